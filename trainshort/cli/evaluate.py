"""`trainshort evaluate`: how good a model is at each length; `trainshort analyze`: why it is good as far as it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from trainshort.cli.parser import Arg, at_least
from trainshort.errors import InputError
from trainshort.utils.io import check_folder_writable
from trainshort.utils.terminal import new_console

if TYPE_CHECKING:
    from trainshort.evaluate.targets import Target


@dataclass(frozen=True)
class TextCommand:
    """What `evaluate` and `analyze` both take: a model, a text, and how the one reads the other."""

    target: Annotated[str, Arg(metavar="RUN", positional=True)]
    """A run folder, one of its checkpoints, a Hugging Face model's folder, or its name on the hub."""
    data: tuple[str, ...] = ()
    """Prepared folder, text files, or a corpus by name. Default: the run's own data."""
    split: str = "valid"
    """Part of the data: valid, test or train."""
    lengths: tuple[str, ...] = ()
    """Numbers, multiples of the training length (2x), or paper. Default: 1x 2x 4x 8x 16x, as far as the text goes."""
    max_tokens: int | None = None
    """Only the first so many tokens, for a quick look."""
    trained_at: int | None = None
    """The training length, for a model that does not tell it or tells it wrong."""
    batch_tokens: int = 16_384
    """Tokens read at once, if several passes fit in them."""
    precision: str = "float32"
    """float32 or bfloat16."""
    device: str | None = None
    """cpu, cuda, cuda:1, ... Default: cuda where there is one."""
    out: Path | None = None
    """Folder for results. Default: the run folder; for Hugging Face models runs/NAME."""
    again: bool = False
    """Measure anew what was measured before for the same model, text and settings."""

    encoders: ClassVar[bool] = False
    """Whether it makes sense for a model that sees both sides."""

    def open(self) -> "Target":
        """The model, with the folder that its results go to."""
        from trainshort.evaluate.targets import open_target
        from trainshort.utils.machine import pick_device

        at_least(1, trained_at=self.trained_at)
        device = pick_device(self.device)
        target = open_target(
            self.target, device=device, precision=self.precision, trained_at=self.trained_at, encoders=self.encoders
        )
        if self.out is not None:
            check_folder_writable(self.out)
            target.folder = self.out
        return target


@dataclass(frozen=True)
class Evaluate(TextCommand):
    """How good a model is at each length: a table, a picture, eval/*.json, and the extrapolation card.

    Every token of the text is scored exactly once at every length. A killed evaluation goes on where it stopped when
    the same command is given again; lengths that were scored before are kept.

    Examples:
      trainshort evaluate runs/demo-alibi
      trainshort evaluate runs/demo-alibi --lengths 1x 2x 16x --max-tokens 20000
      trainshort evaluate runs/demo-alibi --lengths paper --split test
      trainshort evaluate runs/demo-alibi --lengths 512 --stride 1
      trainshort evaluate runs/demo-alibi --lengths 1x 4x --slopes interpolate
      trainshort evaluate gpt2 --data book.txt --lengths 256 1024
    """

    encoders: ClassVar[bool] = True
    stride: int | None = None
    """Tokens that each pass scores; it re-reads the rest of the length. Default: the length, without overlap."""
    slopes: str | None = None
    """Other ALiBi slopes than trained: interpolate, ntk=4, clamp=512, max_bias=16, or window=512."""
    rotary: str | None = None
    """Rotary positions that turn slower than trained: linear=4, ntk=4, dynamic=1, yarn=4; or seen in blocks=256."""
    scores: str | None = None
    """Factor of every product of a query and a key, such as 1.2."""
    memory: float | None = None
    """Gigabytes that may be taken; a length that needs more is reported as out of memory. Default: what is free."""
    dry_run: bool = False
    """Only say what it would cost."""

    def run(self) -> None:
        from trainshort.data.passes import read_lengths
        from trainshort.evaluate.evaluation import evaluate
        from trainshort.evaluate.overrides import Override
        from trainshort.evaluate.sweep import Sweep
        from trainshort.evaluate.text import open_text

        at_least(1, batch_tokens=self.batch_tokens)
        if self.memory is not None and not self.memory > 0:
            raise InputError(f"--memory is a number of gigabytes above 0, got {self.memory}.")
        change = Override.from_options(self.slopes, self.rotary, self.scores)
        target = self.open()
        # Find out early whether the model supports the change. Reading the text can take long.
        if change is not None and target.kind == "huggingface":
            with target.for_length(change, target.trained_at or 1):
                pass
        text = open_text(target, self.data, self.split, self.max_tokens)
        lengths = read_lengths(self.lengths, target.trained_at, len(text.tokens))
        plan = Sweep(text.tokens, lengths, self.stride, change, self.batch_tokens, self.memory)
        console = new_console()
        evaluate(target, text, plan, precision=self.precision, again=self.again, dry_run=self.dry_run, console=console)


@dataclass(frozen=True)
class Analyze(TextCommand):
    """Which context a model uses, how far its heads look, what position methods cost: analysis/*.json and tables.

    early-tokens: is a longer block better for its longer context, or only for having fewer early tokens?
    far-context: the loss when everything farther than d tokens is shuffled, replaced or cut.
    recall: is something that stood d tokens ago still found?
    reach: how far each head looks, and how far it could at most.
    slopes: do other ALiBi slopes use context beyond the training length?
    cost: speed and memory of position methods at each length (takes minutes).

    Examples:
      trainshort analyze runs/demo-alibi
      trainshort analyze runs/demo-alibi --only early-tokens slopes --samples 256
      trainshort analyze runs/demo-alibi --only recall --lengths 1x 32x
      trainshort analyze runs/demo-alibi --only cost --lengths 512 1024 3072
      trainshort analyze runs/demo-alibi --only cost --methods alibi none fox
    """

    target: Annotated[str, Arg(metavar="RUN", positional=True)]
    """A run folder or checkpoint; a Hugging Face model for early-tokens, far-context and recall."""
    only: Annotated[tuple[str, ...], Arg(names=True)] = ()
    """Analyses by name. Default: all that fit the model."""
    lengths: tuple[str, ...] = ()
    """Lengths or distances, as in evaluate. Default: up to 8x, recall 32x, cost 16x, as far as the text goes."""
    samples: int = 64
    """Probes per measurement; more take longer and narrow the intervals."""
    max_tokens: int | None = 32_768
    """Tokens of the text that are used."""
    methods: Annotated[tuple[str, ...], Arg(names=True)] = ()
    """Of cost: the position methods to measure. Default: the paper's four and the run's own."""
    seed: int = 0
    """Seed of shuffles and random probes."""

    def run(self) -> None:
        from trainshort.config.position_config import methods
        from trainshort.data.passes import read_lengths
        from trainshort.evaluate.analyses.base import AnalysisContext, analyses, analyze
        from trainshort.evaluate.text import open_text

        at_least(1, samples=self.samples, batch_tokens=self.batch_tokens)
        at_least(0, seed=self.seed)
        for name in self.only:
            analyses.get(name)  # an unknown name should not wait for the model to load
        for name in self.methods:
            methods.get(name)
        if self.methods and self.only and "cost" not in self.only:
            raise InputError("--methods says what cost measures; give --only cost with it.")
        target = self.open()
        if target.trained_at is None:
            raise InputError(f"{target.name} does not tell its training length; give it by --trained-at.")
        text = open_text(target, self.data, self.split, self.max_tokens)
        lengths = tuple(read_lengths(self.lengths, target.trained_at, len(text.tokens))) if self.lengths else ()
        thoroughly = (self.samples, self.seed, self.batch_tokens, self.methods)
        lab = AnalysisContext(target, text.tokens, target.trained_at, lengths, *thoroughly)
        analyze(lab, text, self.only, new_console(), self.again)
