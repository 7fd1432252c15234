"""`trainshort bench`: speed and memory against peers, as stored results."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trainshort.commands.parser import Arg
from trainshort.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from trainshort.bench import measurements

OWN = ("suites", "quick", "out", "against", "results")
"""Fields that are not settings of a suite."""


@dataclass(frozen=True)
class Bench:
    """Measure speed and memory against peers in one run, store the numbers, compare them with earlier ones.

    attention: engines and other libraries by length: time, memory, share of the matrix-multiply rate, error.
    training: position methods by length, and Hugging Face's MPT of the same shape.
    evaluate: how much of its speed a model keeps at long inputs.
    decode: time per token by context and cache, against reading the weights once, against MPT, without end.
    prepare: text into tokens.

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

    suites: Annotated[tuple[str, ...], Arg(positional=True)] = ()
    """attention, training, evaluate, decode, prepare. Default: all."""
    quick: bool = False
    """Small sizes and few rounds, to see that everything runs; not numbers to quote."""
    rounds: int | None = None
    """Turns of each contestant, in every suite."""
    lengths: tuple[int, ...] = ()
    """Of attention, training and evaluate: tokens at a time."""
    preset: str | None = None
    """Of training, evaluate and decode: the model's shape, as `trainshort list presets` names them."""
    methods: tuple[str, ...] = ()
    """Of training and evaluate: position methods."""
    memory: str | None = None
    """Of attention, training and evaluate: all (default), longest (only at the longest length) or none. Each number is
    a process of its own, which takes some seconds."""
    tolerance: float | None = None
    """Of attention and decode: softmax mass that may be left out. Default: 1e-6."""
    inputs: str | None = None
    """Of attention: normal, scaled (sharper heads), a .safetensors file of q, k, v, or a run folder to record from."""
    layer: int | None = None
    """Of attention with a run folder: the recorded layer, counted from 0. Default: the middle one."""
    engines: tuple[str, ...] = ()
    """Of attention: windowed, windowed-torch, written-mask, mpt, x-transformers, beside plain. Default: all,
    beyond 8,192 tokens only windowed."""
    run_folder: Annotated[Path | None, Arg(name="run")] = None
    """Of evaluate, and of decode's part trained: a run whose trained model is used; windows and rings depend on the
    weights."""
    contexts: tuple[int, ...] = ()
    """Of decode: tokens that the caches hold."""
    parts: tuple[str, ...] = ()
    """Of decode: context, weights, mpt, endless, trained (with --run)."""
    tokens: int | None = None
    """Of decode: length of the endless run. Default: 100,000."""
    out: Path | None = None
    """Where the result is written. Default: runs/bench/TIME.json, where `trainshort report runs` finds it."""
    against: Path | None = None
    """An earlier result; afterwards a table shows what changed."""
    results: Path | None = None
    """A stored result to compare with --against, instead of measuring."""

    def run(self) -> None:
        from rich.console import Console

        from trainshort.bench.compare import compare, print_comparison, wide_console
        from trainshort.bench.measurements import load

        options = {name: value for name, value in vars(self).items() if name not in (*OWN, "run_folder")}
        options["run"] = None if self.run_folder is None else str(self.run_folder)
        old = load(self.against) if self.against else None  # a wrong name should not wait for the measurements
        console = wide_console()
        if self.results is not None:
            self._refuse_measuring(options)
            new = load(self.results)
        else:
            new = self._measure(options, console)
        if old is not None:
            comparison = compare(old, new)
            for warning in comparison.warnings:
                Console(stderr=True).print(f"trainshort: {warning}", markup=False, highlight=False, soft_wrap=True)
            print_comparison(comparison, console)

    def _measure(self, options: dict[str, Any], console: "Console") -> "measurements.BenchResult":
        from trainshort.bench.measure import Progress, run
        from trainshort.bench.suites import choose

        plans = choose(self.suites, self.quick, options)
        if self.layer is not None and not (self.inputs and Path(self.inputs).is_dir()):
            raise InputError("--layer chooses what is recorded from a run; give --inputs RUN with it.")
        out = self.out or Path("runs/bench") / f"{datetime.now():%Y-%m-%d-%H%M%S}.json"
        if out.exists():
            raise InputError(f"{out} already exists, and results are kept. Choose another --out.")
        made = run(plans, self.quick, out, console, Progress())
        console.print(f"Results: {out}", markup=False, highlight=False, soft_wrap=True)
        return made

    def _refuse_measuring(self, options: dict[str, Any]) -> None:
        if self.against is None:
            raise InputError("--results is compared with another file; give it by --against OLD.json.")
        given = [name for name, value in options.items() if value not in (None, ())]
        given += [name for name in ("quick", "out", "suites") if getattr(self, name)]
        if given:
            raise InputError(f"--results compares two stored files and measures nothing; leave out {', '.join(given)}.")
