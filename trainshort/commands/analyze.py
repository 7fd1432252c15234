"""`trainshort analyze`: why a model is good as far as it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from trainshort.commands.parser import Arg
from trainshort.errors import InputError
from trainshort.files import make_folder


@dataclass(frozen=True)
class Analyze:
    """Which context a model uses, how far its heads look, what position methods cost: analysis/*.json and tables.

    early-tokens: is a longer block better for its longer context, or only for having fewer early tokens?
    far-context: the loss when everything farther than d tokens is shuffled, replaced or cut.
    recall: is something that stood d tokens ago still found?
    reach: how far each head looks, and how far it could at most.
    slopes: do other ALiBi slopes use context beyond the training length?
    cost: speed and memory of every position method at each length (takes minutes).

    Examples:
      trainshort analyze runs/demo-alibi
      trainshort analyze runs/demo-alibi --only early-tokens slopes --samples 256
      trainshort analyze runs/demo-alibi --only recall --lengths 1x 32x
      trainshort analyze runs/demo-alibi --only cost --lengths 512 1024 3072
    """

    target: Annotated[str, Arg(metavar="RUN", positional=True)]
    """A run folder or checkpoint; a Hugging Face model for early-tokens, far-context and recall."""
    only: tuple[str, ...] = ()
    """Analyses by name. Default: all that fit the model."""
    data: tuple[str, ...] = ()
    """Prepared folder, text files, or a corpus by name. Default: the run's own data."""
    split: str = "valid"
    """Part of the data: valid, test or train."""
    lengths: tuple[str, ...] = ()
    """Lengths or distances, as in evaluate. Default: up to 8x, recall 32x, cost 16x, as far as the text goes."""
    samples: int = 64
    """Probes per measurement; more take longer and narrow the intervals."""
    max_tokens: int = 32_768
    """Tokens of the text that are used."""
    seed: int = 0
    """Seed of shuffles and random probes."""
    trained_at: int | None = None
    """The training length, for a model that does not tell it."""
    batch_tokens: int = 16_384
    """Tokens read at once, if several probes fit in them."""
    precision: str = "float32"
    """float32 or bfloat16."""
    device: str | None = None
    """cpu, cuda, ... Default: cuda where there is one."""
    out: Path | None = None
    """Folder for results. Default: the run folder."""
    again: bool = False
    """Ask anew what was answered before for the same model, text and settings."""

    def run(self) -> None:
        from rich.console import Console

        from trainshort.analyze.lab import Lab, analyses, analyze
        from trainshort.evaluate.target import open_target, pick_device
        from trainshort.evaluate.text import open_text
        from trainshort.passes import read_lengths

        for option, number in (("--samples", self.samples), ("--batch-tokens", self.batch_tokens)):
            if number < 1:
                raise InputError(f"{option} must be at least 1, got {number}.")
        for name in self.only:
            analyses.get(name)  # an unknown name should not wait for the model to load
        target = open_target(
            self.target, device=pick_device(self.device), precision=self.precision, trained_at=self.trained_at
        )
        if target.trained_at is None:
            raise InputError(f"{target.name} does not tell its training length; give it by --trained-at.")
        if self.out is not None:
            target.folder = make_folder(self.out)
        text = open_text(target, self.data, self.split, self.max_tokens)
        lengths = tuple(read_lengths(self.lengths, target.trained_at, len(text.tokens))) if self.lengths else ()
        lab = Lab(target, text.tokens, target.trained_at, lengths, self.samples, self.seed, self.batch_tokens)
        analyze(lab, text, self.only, Console(), self.again)
