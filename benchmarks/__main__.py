"""Measure speed and memory against peers: `python -m benchmarks`, or `trainshort bench` in a source checkout."""

import inspect
import sys
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trainshort.cli.main import exit_with, run_command
from trainshort.cli.parser import Arg, Option, options_from_dataclass, read_command
from trainshort.errors import InputError
from trainshort.utils.io import check_file_writable
from trainshort.utils.terminal import join_words, print_status

if TYPE_CHECKING:
    from rich.console import Console

    from trainshort.utils import bench_results


@dataclass(frozen=True)
class Bench:
    """Measure speed and memory against peers in one run, store the numbers, compare them with earlier ones.

    In full size it takes long, mostly for plain attention at the longest lengths; --quick takes a few minutes.
    Tables go to standard output, progress to standard error, the file is written after every step.

    Examples:
      trainshort bench
      trainshort bench --quick
      trainshort bench attention --lengths 1024 4096 --engines windowed
      trainshort bench attention --inputs runs/demo-alibi --lengths 4096 16384
      trainshort bench decode --parts context mpt --rounds 40
      trainshort bench decode --parts trained --run runs/demo-alibi --contexts 1024 16384
      trainshort bench attention --against benchmarks/results/attention.json
      trainshort bench --against old.json --results new.json
    """

    suites: Annotated[tuple[str, ...], Arg(metavar="SUITE", positional=True, comma_separated=True)] = ()
    """attention, training, evaluate, decode, patch, prepare. Default: all."""
    quick: bool = False
    """Small sizes and few rounds, to see that everything runs; not numbers to quote."""
    out: Path | None = None
    """Where the result is written. Default: runs/bench/TIME.json, where `trainshort report runs` finds it."""
    against: Path | None = None
    """An earlier result; afterwards a table shows what changed."""
    results: Path | None = None
    """A stored result to compare with --against, instead of measuring."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Those of the suites that were given."""

    @classmethod
    def parse(cls, words: list[str]) -> "Bench":
        """From the command line: the options above, and one for every setting of a suite."""
        return read_command(cls, words, suite_options(), described(cls))

    def run(self) -> None:
        from benchmarks.compare import compare, print_comparison, wide_console
        from trainshort.utils.bench_results import load_bench_result

        old = (
            load_bench_result(self.against) if self.against else None
        )  # a wrong name should not wait for the measurements
        console = wide_console()
        if self.results is not None:
            self._refuse_measuring()
            new = load_bench_result(self.results)
        else:
            new = self._measure(console)
        if old is not None:
            comparison = compare(old, new)
            for warning in comparison.warnings:
                print_status(warning)
            print_comparison(comparison, console)

    def _measure(self, console: "Console") -> "bench_results.BenchResult":
        from benchmarks.run import run
        from benchmarks.suites import choose

        plans = choose(self.suites, self.quick, self.settings)
        inputs = self.settings.get("inputs")
        if self.settings.get("layer") is not None and not (inputs and Path(inputs).is_dir()):
            raise InputError("--layer chooses what is recorded from a run; give --inputs RUN with it.")
        out = self.out or Path("runs/bench") / f"{datetime.now():%Y-%m-%d-%H%M%S}.json"
        if out.exists():
            raise InputError(f"{out} already exists, and results are kept. Choose another --out.")
        check_file_writable(out)
        made = run(plans, self.quick, out, console)
        console.print(f"Results: {out}", markup=False, highlight=False, soft_wrap=True)
        return made

    def _refuse_measuring(self) -> None:
        if self.against is None:
            raise InputError("--results is compared with another file; give it by --against OLD.json.")
        given = [*self.settings, *(name for name in ("quick", "out", "suites") if getattr(self, name))]
        if given:
            raise InputError(f"--results compares two stored files and measures nothing; leave out {', '.join(given)}.")


def suite_options() -> list[Option]:
    """Every setting of a suite, once, with the suites that have it and the default that all of these share."""
    from benchmarks.suites import FULL

    found: dict[str, list[tuple[str, Option]]] = {}
    for suite, plan in FULL.items():
        for one in options_from_dataclass(type(plan)):
            found.setdefault(one.field, []).append((suite, one))
    made = []
    for having in found.values():
        suites, alike = zip(*having, strict=True)
        text, default = next(one.help for one in alike if one.help), alike[0].default
        if len(suites) < len(FULL):
            text = f"Of {join_words(list(suites))}: {text[:1].lower()}{text[1:]}"
        if len({one.default for one in alike}) == 1 and default not in (None, ()) and "Default" not in text:
            text += f" Default: {' '.join(map(str, default)) if isinstance(default, tuple) else default}."
        made.append(replace(alike[0], help=text, default=None, comma_separated=alike[0].value_count is None))
    return made


def described(command: type) -> str:
    """What the command does, with a line of each suite."""
    from benchmarks.suites import FULL

    head, rest = inspect.cleandoc(command.__doc__ or "").split("\n\n", 1)
    return f"{head}\n\n{chr(10).join(f'  {name}: {type(plan).__doc__}' for name, plan in FULL.items())}\n\n{rest}"


def main(words: list[str] | None = None) -> None:
    """Run the benchmarks and exit.

    Args:
        words: The command line arguments. By default, those of the process.
    """
    exit_with(lambda: run_command(Bench, sys.argv[1:] if words is None else words))


if __name__ == "__main__":
    main()
