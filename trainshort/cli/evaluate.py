"""`trainshort evaluate`: measure perplexity by length. `trainshort analyze`: measure which context a model uses."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from trainshort.cli.parser import Arg, check_minimum
from trainshort.errors import InputError
from trainshort.utils.io import check_folder_writable
from trainshort.utils.terminal import new_console

if TYPE_CHECKING:
    from trainshort.evaluate.targets import Target


@dataclass(frozen=True)
class TextCommand:
    """Base class of the commands that read a text with a model. It defines the options that they share."""

    target: Annotated[str, Arg(metavar="RUN", positional=True)]
    """Evaluate this run folder, checkpoint, Hugging Face folder or model on the hub"""
    data: tuple[str, ...] = ()
    """Read this prepared folder, these text files, or this corpus (default: the data of the run)"""
    split: str = "valid"
    """Read this split of the data: valid, test or train"""
    lengths: tuple[str, ...] = ()
    """Read at these lengths: numbers, multiples of the training length such as 2x, or paper (default: 1x 2x 4x 8x 16x,
    up to the length of the text)"""
    max_tokens: int | None = None
    """Read only this many tokens from the start of the text"""
    trained_at: int | None = None
    """Set the training length, for models that do not state it or state it wrongly"""
    batch_tokens: int = 16_384
    """Read this many tokens at once, if several passes fit"""
    precision: str = "float32"
    """Compute in float32 or bfloat16"""
    device: str | None = None
    """Compute on this device: cpu, cuda, cuda:1 and so on (default: cuda if available)"""
    out: Path | None = None
    """Write the results to this folder (default: the run folder, or runs/NAME for Hugging Face models)"""
    overwrite: bool = False
    """Measure again, even if results for the same model, text and settings exist"""

    supports_encoders: ClassVar[bool] = False
    """Whether the command accepts encoders, which are models whose tokens attend to both sides."""

    def open_target(self) -> "Target":
        """Load the model that is evaluated (the target), and choose the folder for its results.

        Raises:
            InputError: If an option is invalid, the model cannot be loaded, or the folder is not writable.
        """
        from trainshort.evaluate.targets import open_target
        from trainshort.utils.machine import pick_device

        check_minimum(1, trained_at=self.trained_at)  # --trained-at is the training length of the model.
        target = open_target(
            self.target,
            device=pick_device(self.device),
            precision=self.precision,
            trained_at=self.trained_at,
            encoders=self.supports_encoders,
        )
        if self.out is not None:
            check_folder_writable(self.out)
            target.folder = self.out
        return target


@dataclass(frozen=True)
class Evaluate(TextCommand):
    """Measure the perplexity of a model at several lengths

    The results are a table, a figure, the files eval/*.json and a summary of the extrapolation. Every token of the text
    is scored exactly once at each length. If the command is interrupted, run it again to continue. Lengths with results
    are not evaluated again.

    Examples:
      trainshort evaluate runs/demo-alibi
      trainshort evaluate runs/demo-alibi --lengths 1x 2x 16x --max-tokens 20000
      trainshort evaluate runs/demo-alibi --lengths paper --split test
      trainshort evaluate runs/demo-alibi --lengths 512 --stride 1
      trainshort evaluate runs/demo-alibi --lengths 1x 4x --slopes interpolate
      trainshort evaluate gpt2 --data book.txt --lengths 256 1024
    """

    supports_encoders: ClassVar[bool] = True
    stride: int | None = None
    """Score this many new tokens in each pass and use the tokens before them as context (default: the length)"""
    slopes: str | None = None
    """Change the ALiBi slopes: interpolate, ntk=4, clamp=512, max_bias=16 or window=512"""
    rotary: str | None = None
    """Change the rotary positions: linear=4, ntk=4, dynamic=1, yarn=4 or blocks=256"""
    attention_scale: str | None = None
    """Multiply the attention scores by this factor, such as 1.2"""
    memory: float | None = None
    """Use at most this many gigabytes; longer lengths are reported as out of memory (default: the free memory)"""
    dry_run: bool = False
    """Show only how much work the evaluation is"""

    def run(self) -> None:
        """Evaluate the model at all lengths, print a table and store the results."""
        from trainshort.data.passes import read_lengths
        from trainshort.evaluate.evaluation import evaluate
        from trainshort.evaluate.overrides import Override
        from trainshort.evaluate.sweep import Sweep
        from trainshort.evaluate.text import open_text

        check_minimum(1, batch_tokens=self.batch_tokens)
        if self.memory is not None and not self.memory > 0:
            raise InputError(f"--memory must be above 0, got {self.memory}.")
        override = Override.from_options(self.slopes, self.rotary, self.attention_scale)
        target = self.open_target()

        # Reading the text can take long, so this check comes first. `for_length` applies the override to the model, and
        # raises InputError if the model does not support the override.
        if override is not None and target.kind == "huggingface":
            with target.for_length(override, target.trained_at or 1):
                pass

        text = open_text(target, self.data, self.split, self.max_tokens)
        lengths = read_lengths(self.lengths, target.trained_at, len(text.tokens))
        plan = Sweep(
            tokens=text.tokens,
            lengths=lengths,
            stride=self.stride,
            override=override,
            batch_tokens=self.batch_tokens,
            max_gigabytes=self.memory,
        )
        evaluate(
            target,
            text,
            plan,
            precision=self.precision,
            again=self.overwrite,
            dry_run=self.dry_run,
            console=new_console(),
        )


@dataclass(frozen=True)
class Analyze(TextCommand):
    """Analyze context use, attention distance and cost

    The results are tables and the files analysis/*.json. These analyses exist:

      early-tokens   find out whether longer inputs help by more context, or only by fewer early tokens
      far-context    measure the loss if the context beyond a distance is shuffled, replaced or removed
      recall         test whether a token is found again after a distance
      reach          measure how far each head attends, and how far it could attend at most
      slopes         test whether other ALiBi slopes use context beyond the training length
      cost           measure speed and memory of position methods at each length (takes minutes)

    Examples:
      trainshort analyze runs/demo-alibi
      trainshort analyze runs/demo-alibi --only early-tokens slopes --samples 256
      trainshort analyze runs/demo-alibi --only recall --lengths 1x 32x
      trainshort analyze runs/demo-alibi --only cost --lengths 512 1024 3072
      trainshort analyze runs/demo-alibi --only cost --methods alibi none fox
    """

    target: Annotated[str, Arg(metavar="RUN", positional=True)]
    """Analyze this run folder or checkpoint, or a Hugging Face model (early-tokens, far-context and recall only)"""
    only: Annotated[tuple[str, ...], Arg(comma_separated=True)] = ()
    """Run only these analyses (default: all analyses that support the model)"""
    lengths: tuple[str, ...] = ()
    """Measure at these lengths or distances, as in evaluate (default: up to 8x, 32x for recall and 16x for cost, up to
    the length of the text)"""
    samples: int = 64
    """Use this many samples per measurement; more samples take longer and narrow the intervals"""
    max_tokens: int | None = 32_768
    """Use this many tokens of the text"""
    methods: Annotated[tuple[str, ...], Arg(comma_separated=True)] = ()
    """Measure the cost of these position methods (default: the four methods of the paper and the method of the run)"""
    seed: int = 0
    """Set the seed of shuffles and random samples"""

    def run(self) -> None:
        """Run the chosen analyses, print their tables and store the results."""
        from trainshort.config.position_config import methods
        from trainshort.data.passes import read_lengths
        from trainshort.evaluate.analyses.base import AnalysisContext, analyses, analyze
        from trainshort.evaluate.text import open_text

        check_minimum(1, samples=self.samples, batch_tokens=self.batch_tokens)
        check_minimum(0, seed=self.seed)
        # Loading the model takes time, so unknown names are reported first.
        for name in self.only:
            analyses.get(name)
        for name in self.methods:
            methods.get(name)
        if self.methods and self.only and "cost" not in self.only:
            raise InputError("--methods requires the analysis cost. Add cost to --only, or leave out --methods.")

        target = self.open_target()
        if target.trained_at is None:
            raise InputError(f"The training length of {target.name} is unknown. Set it with --trained-at.")
        text = open_text(target, self.data, self.split, self.max_tokens)
        lengths: tuple[int, ...] = ()
        if self.lengths:
            lengths = tuple(read_lengths(self.lengths, target.trained_at, len(text.tokens)))
        context = AnalysisContext(
            target=target,
            tokens=text.tokens,
            trained_at=target.trained_at,
            lengths=lengths,
            samples=self.samples,
            seed=self.seed,
            batch_tokens=self.batch_tokens,
            methods=self.methods,
        )
        analyze(context, text, self.only, new_console(), again=self.overwrite)
