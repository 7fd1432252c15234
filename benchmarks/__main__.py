"""Measure speed and memory: `python -m benchmarks`, or `trainshort bench` in a source checkout."""

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

    from trainshort.utils.bench_results import BenchResult


@dataclass(frozen=True)
class Bench:
    """Measure speed and memory against other implementations

    The results are stored in a file after every step, and printed as tables. A stored result can be compared with an
    earlier result. At full size, plain attention at the longest lengths takes most of the time. With --quick, the
    benchmarks take a few minutes.

    Examples:
      trainshort bench
      trainshort bench --quick
      trainshort bench attention --lengths 1024 4096 --backends windowed
      trainshort bench attention --inputs runs/demo-alibi --lengths 4096 16384
      trainshort bench decode --parts context mpt --rounds 40
      trainshort bench decode --parts trained --run runs/demo-alibi --contexts 1024 16384
      trainshort bench attention --baseline benchmarks/results/attention.json
      trainshort bench --baseline old.json --results new.json
    """

    suites: Annotated[tuple[str, ...], Arg(metavar="SUITE", positional=True, comma_separated=True)] = ()
    """attention, training, evaluate, decode, patch or prepare. Default: all."""
    quick: bool = False
    """Use small sizes and few rounds, to check that all benchmarks run. Do not publish these numbers."""
    out: Path | None = None
    """The result file. Default: runs/bench/TIME.json, where `trainshort report runs` finds the file."""
    baseline: Path | None = None
    """An earlier result. A table shows what has changed since then."""
    results: Path | None = None
    """A stored result that is compared with --baseline. Nothing is measured."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The options of the suites that the user gave."""

    @classmethod
    def parse(cls, words: list[str]) -> "Bench":
        """Parse the command line. Besides the fields of this class, every field of a suite's plan is an option."""
        return read_command(cls, words, suite_options(), describe_command(cls))

    def run(self) -> None:
        """Measure or load a result, print it, and compare it with the baseline if there is one."""
        from benchmarks.compare import compare, make_table_console, print_comparison
        from trainshort.utils.bench_results import load_bench_result

        # The baseline is loaded first, so that a wrong path is reported before the measurement.
        baseline_result = None
        if self.baseline is not None:
            baseline_result = load_bench_result(self.baseline)

        console = make_table_console()
        if self.results is not None:
            self._check_nothing_to_measure()
            new_result = load_bench_result(self.results)
        else:
            new_result = self._measure(console)

        if baseline_result is not None:
            comparison = compare(baseline_result, new_result)
            for warning in comparison.warnings:
                print_status(warning)
            print_comparison(comparison, console)

    def _measure(self, console: "Console") -> "BenchResult":
        """Run the chosen benchmarks and store the result.

        Raises:
            InputError: If an option is invalid, or the result file exists already.
        """
        from benchmarks.run import run_benchmarks
        from benchmarks.suites import choose_plans

        plans = choose_plans(self.suites, self.quick, self.settings)
        inputs = self.settings.get("inputs")
        records_run = inputs is not None and Path(inputs).is_dir()
        if self.settings.get("layer") is not None and not records_run:
            raise InputError("--layer selects the layer of a run that is recorded. Add --inputs RUN.")

        out = self.out
        if out is None:
            out = Path("runs/bench") / f"{datetime.now():%Y-%m-%d-%H%M%S}.json"
        if out.exists():
            raise InputError(f"{out} already exists, and results are not overwritten. Choose another --out.")
        check_file_writable(out)

        result = run_benchmarks(plans, self.quick, out, console)
        console.print(f"Results: {out}", markup=False, highlight=False, soft_wrap=True)
        return result

    def _check_nothing_to_measure(self) -> None:
        """Raise `InputError` if `--results` is combined with options of a measurement, or has no baseline."""
        if self.baseline is None:
            raise InputError("--results requires a result to compare with. Add --baseline OLD.json.")
        measuring_options = list(self.settings)
        for name in ("quick", "out", "suites"):
            if getattr(self, name):
                measuring_options.append(name)
        if measuring_options:
            raise InputError(
                f"--results compares two stored results and measures nothing. Remove {', '.join(measuring_options)}."
            )


def suite_options() -> list[Option]:
    """Return one option for every field of a plan. A field that several suites have becomes one option."""
    from benchmarks.suites import FULL_PLANS

    options_by_field: dict[str, dict[str, Option]] = {}
    for suite, plan in FULL_PLANS.items():
        for option in options_from_dataclass(type(plan)):
            options_by_field.setdefault(option.field, {})[suite] = option

    merged_options = []
    for options_by_suite in options_by_field.values():
        first_option = next(iter(options_by_suite.values()))
        merged_option = replace(
            first_option,
            help=_merge_help_texts(options_by_suite, len(FULL_PLANS)),
            # The default depends on the suite, so the plans contain it and not the option.
            default=None,
            comma_separated=first_option.value_count is None,
        )
        merged_options.append(merged_option)
    return merged_options


def _merge_help_texts(options_by_suite: dict[str, Option], suite_count: int) -> str:
    """Return the help text of an option that several suites have.

    Args:
        options_by_suite: The option of each suite. At least one of them has a help text.
        suite_count: The number of all suites. If not all of them have the option, the text names those that have it.

    Returns:
        The text, for example "Of decode: number of tokens in the caches. Default: 1024 65536."
    """
    options = list(options_by_suite.values())
    help_text = ""
    for option in options:
        if option.help:
            help_text = option.help
            break
    if len(options) < suite_count:
        lowercase_text = help_text[:1].lower() + help_text[1:]
        help_text = f"Of {join_words(list(options_by_suite))}: {lowercase_text}"

    # The default is only shown if it is the same in all suites.
    defaults = {option.default for option in options}
    default = options[0].default
    if len(defaults) == 1 and default not in (None, ()) and "Default" not in help_text:
        default_text = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
        help_text += f" Default: {default_text}."
    return help_text


def describe_command(command: type) -> str:
    """Return the description for `--help`: the docstring of the command, with one line for each suite."""
    from benchmarks.suites import FULL_PLANS

    summary, details = inspect.cleandoc(command.__doc__ or "").split("\n\n", 1)
    suite_lines = [f"  {suite}: {type(plan).__doc__}" for suite, plan in FULL_PLANS.items()]
    return "\n\n".join([summary, "\n".join(suite_lines), details])


def main(words: list[str] | None = None) -> None:
    """Run the benchmarks and exit.

    Args:
        words: The command line arguments. The default is the arguments of the process.
    """
    arguments = sys.argv[1:] if words is None else words
    exit_with(lambda: run_command(Bench, arguments))


if __name__ == "__main__":
    main()
