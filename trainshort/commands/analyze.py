"""`trainshort analyze`: why a model is good as far as it is."""

from dataclasses import dataclass
from typing import Annotated

from trainshort.commands.evaluate import OnText
from trainshort.commands.parser import Arg
from trainshort.errors import InputError


@dataclass(frozen=True)
class Analyze(OnText):
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
    only: tuple[str, ...] = ()
    """Analyses by name. Default: all that fit the model."""
    lengths: tuple[str, ...] = ()
    """Lengths or distances, as in evaluate. Default: up to 8x, recall 32x, cost 16x, as far as the text goes."""
    samples: int = 64
    """Probes per measurement; more take longer and narrow the intervals."""
    max_tokens: int | None = 32_768
    """Tokens of the text that are used."""
    methods: tuple[str, ...] = ()
    """Of cost: the position methods to measure. Default: the paper's four and the run's own."""
    seed: int = 0
    """Seed of shuffles and random probes."""

    def run(self) -> None:
        from rich.console import Console

        from trainshort.analyze.lab import Lab, analyses, analyze
        from trainshort.evaluate.text import open_text
        from trainshort.methods import methods
        from trainshort.passes import read_lengths

        least = (("--samples", self.samples, 1), ("--batch-tokens", self.batch_tokens, 1), ("--seed", self.seed, 0))
        for option, number, smallest in least:
            if number < smallest:
                raise InputError(f"{option} must be at least {smallest}, got {number}.")
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
        lab = Lab(target, text.tokens, target.trained_at, lengths, *thoroughly)
        analyze(lab, text, self.only, Console(), self.again)
