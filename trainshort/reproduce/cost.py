"""Speed and memory of training and evaluating, all configurations in one run on this machine: the paper's Table 1.

Speeds are taken in rounds, one step of each configuration after the other, so that whatever else the machine does
falls on all of them alike; the median round counts. Memory is the peak above what the program had before the model was
built, each configuration in a process of its own, since a process does not forget what it once held.
"""

from pathlib import Path

import torch

from trainshort.bench.measure import alone, in_turns
from trainshort.bench.rig import Rig
from trainshort.claims.collection import COST_FORMAT, read_costs
from trainshort.config import RunConfig
from trainshort.evaluate.target import pick_device
from trainshort.files import write_sealed
from trainshort.runs import provenance

ROUNDS = 15
"""A round varies by 5 to 10 % on a shared machine, and a claim of the paper is about 1 %."""


def measure_costs(configs: dict[str, RunConfig], path: Path) -> None:
    """Measure what `path` does not hold yet, and add it there."""
    entries = read_costs(path.parent)
    todo = {name: config for name, config in configs.items() if name not in entries}
    if not todo:
        return
    origin, device = provenance(threads=torch.get_num_threads()), pick_device(None)
    rigs = {name: Rig(config, device) for name, config in todo.items()}
    work = {f"train {name}": rig.step for name, rig in rigs.items()}
    work |= {f"read {name}": rig.infer for name, rig in rigs.items()}
    timings = in_turns(work, ROUNDS)
    for name, config in todo.items():
        entries[name] = {
            "position": config.model.position,
            "length": config.train.length,
            "batch": config.train.batch,
            "vocabulary": config.data.vocabulary,
            "train_seconds": timings[f"train {name}"].seconds,
            "read_seconds": timings[f"read {name}"].seconds,
            "tokens": config.train.batch * config.train.length,
            "train_memory": alone("rig", config=config.model_dump(mode="json"), device=device)["training"].get("above"),
            "provenance": origin,
        }
    write_sealed(path, {"format": COST_FORMAT, "entries": entries})
