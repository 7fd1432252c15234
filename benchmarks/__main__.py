"""`python -m benchmarks [name ...]`: all benchmarks, or the named ones."""

import importlib
import sys

NAMES = ("attention", "training", "evaluate", "decode", "prepare")


def main() -> None:
    chosen = sys.argv[1:] or list(NAMES)
    sys.argv = sys.argv[:1]
    for name in chosen:
        if name not in NAMES:
            sys.exit(f"Unknown benchmark '{name}'. Known: {', '.join(NAMES)}.")
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
