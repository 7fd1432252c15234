"""`trainshort evaluate`: perplexity at any lengths, of a run or of any Hugging Face model."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from trainshort.commands.parser import Arg
from trainshort.errors import InputError
from trainshort.files import make_folder

if TYPE_CHECKING:
    from trainshort.evaluate.target import Target


@dataclass(frozen=True)
class OnText:
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

    def open(self) -> "Target":
        """The model, with the folder that its results go to."""
        from trainshort.evaluate.target import open_target, pick_device

        target = open_target(
            self.target, device=pick_device(self.device), precision=self.precision, trained_at=self.trained_at
        )
        if self.out is not None:
            target.folder = make_folder(self.out)
        return target


@dataclass(frozen=True)
class Evaluate(OnText):
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
        from rich.console import Console

        from trainshort.evaluate.changes import Change
        from trainshort.evaluate.session import evaluate
        from trainshort.evaluate.sweep import Sweep
        from trainshort.evaluate.text import open_text
        from trainshort.passes import read_lengths

        if self.batch_tokens < 1:
            raise InputError(f"--batch-tokens must be at least 1, got {self.batch_tokens}.")
        if self.memory is not None and not self.memory > 0:
            raise InputError(f"--memory is a number of gigabytes above 0, got {self.memory}.")
        change = Change.chosen(self.slopes, self.rotary, self.scores)
        target = self.open()
        if change is not None and target.kind == "huggingface":
            from trainshort.interop.changing import changed_elsewhere

            target.change_by = changed_elsewhere
            with target.at(change, target.trained_at or 1):
                pass  # one that the model does not know is told before the text is read
        text = open_text(target, self.data, self.split, self.max_tokens)
        lengths = read_lengths(self.lengths, target.trained_at, len(text.tokens))
        plan = Sweep(text.tokens, lengths, self.stride, change, self.batch_tokens, self.memory)
        evaluate(
            target,
            text,
            plan,
            precision=self.precision,
            again=self.again,
            dry_run=self.dry_run,
            console=Console(),
        )
