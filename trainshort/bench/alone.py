"""`python -m trainshort.bench.alone`: one contestant's memory in a process of its own, since a process does not forget
what it once held. Reads what to measure as JSON from standard input, prints the result as one line of JSON."""

import importlib
import json
import sys

if __name__ == "__main__":
    import torch

    asked = json.load(sys.stdin)
    torch.set_num_threads(asked["threads"])
    print(json.dumps(importlib.import_module(f"trainshort.bench.{asked['suite']}").peak(**asked["task"])))
