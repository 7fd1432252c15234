"""The types that all analyses share, and `trainshort analyze`, which runs analyses and stores their results.

Most analyses ask how the loss of the same targets changes if only their context changes. A target is a token that the
model predicts. An analysis consists of a function that returns a result as JSON values, and a function that formats the
result as a table:

    analyses.register("mine")(Analysis("What does the analysis find out?", run, table))
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text as StyledText

from trainshort.config.registries import analyses
from trainshort.data.passes import Passes
from trainshort.errors import InputError
from trainshort.evaluate.results import Interval, bootstrap_interval
from trainshort.evaluate.sweep import BATCH_TOKENS, score
from trainshort.evaluate.targets import ModelTarget, Target
from trainshort.evaluate.text import Text
from trainshort.model.transformer import TransformerLM
from trainshort.utils.io import make_folder, read_json_object, read_with_checksum, write_atomic, write_with_checksum
from trainshort.utils.machine import collect_provenance
from trainshort.utils.terminal import ProgressMeter, escape_for_output, new_console

# The number of tokens at the end of a sampled window whose losses are measured.
SCORED_TOKENS = 32


@dataclass(frozen=True)
class AnalysisContext:
    """The model, the text and the settings of an analysis.

    Attributes:
        target: The model.
        tokens: The text as tokens of the model.
        trained_at: The training length of the model.
        lengths: The input lengths that the user chose. If it is empty, each analysis uses its default lengths.
        samples: The number of samples per measurement.
        seed: The seed of all random choices.
        batch_tokens: The number of tokens in one batch.
        methods: The position methods that the user chose. If it is empty, an analysis uses its default methods.
        meter: The progress meter. An analysis calls `meter.start` with the number of tokens that it will read.
        cache_path: The file in which `cached` stores partial results, or None.
    """

    target: Target
    tokens: Integer[np.ndarray, " tokens"]
    trained_at: int
    lengths: tuple[int, ...] = ()
    samples: int = 64
    seed: int = 0
    batch_tokens: int = BATCH_TOKENS
    methods: tuple[str, ...] = ()
    meter: ProgressMeter = field(default_factory=ProgressMeter)
    cache_path: Path | None = None

    def rng(self) -> np.random.Generator:
        """Return a new random generator with the seed of the analysis."""
        return np.random.default_rng(self.seed)

    def choose_lengths(self, *factors: int) -> list[int]:
        """Return the input lengths of an analysis.

        Args:
            factors: The default lengths, as multiples of the training length. Default lengths that the text or the
                model does not allow are left out.

        Returns:
            The lengths that the user chose, or the default lengths. The lengths are sorted.

        Raises:
            InputError: If a chosen length, or every default length, is longer than the model supports or longer than
                half of the text.
        """
        default_lengths = tuple(self.trained_at * factor for factor in factors)
        is_user_choice = len(self.lengths) > 0
        requested = self.lengths if is_user_choice else default_lengths

        model_limit = self.target.max_length
        limit = len(self.tokens) // 2
        if model_limit is not None:
            limit = min(limit, model_limit)
        possible = sorted({length for length in requested if length <= limit})
        are_all_possible = len(possible) == len(set(requested))
        if possible and (are_all_possible or not is_user_choice):
            return possible

        # Of the lengths that the user chose, at least the longest is impossible. Of the default lengths, all are.
        impossible_length = max(requested) if is_user_choice else min(requested)
        if model_limit is not None and impossible_length > model_limit:
            raise InputError(
                f"{self.target.name} supports at most {model_limit:,} tokens, so it cannot be analyzed at length "
                f"{impossible_length:,}. Use shorter --lengths."
            )
        raise InputError(
            f"An analysis at length {impossible_length:,} requires a text of at least {2 * impossible_length:,} "
            f"tokens, but the text has {len(self.tokens):,} tokens. Use a longer text or shorter --lengths."
        )

    def windows_at(self, starts: Int[np.ndarray, " windows"], length: int) -> Int[np.ndarray, "windows length"]:
        """Return windows of the text.

        Args:
            starts: The position of the first token of each window.
            length: The number of tokens in each window.
        """
        windows = [np.asarray(self.tokens[start : start + length]) for start in starts]
        return np.stack(windows).astype(np.int64)

    def sample_ends(self, max_length: int) -> Int[np.ndarray, " samples"]:
        """Choose the positions in the text at which samples end. The positions are spread evenly over the text.

        Args:
            max_length: The number of tokens that the model reads in the longest sample.

        Returns:
            The position after the last token of each sample. There are `samples` positions, or fewer if the text is
            short.
        """
        # A sample consists of the tokens that the model reads, and the token after them, which is only predicted.
        first_end = max_length + 1  # the end of a sample that starts at the first token of the text
        num_remaining_tokens = len(self.tokens) - first_end
        # In a short text, fewer samples are chosen, so that the scored tokens of two samples do not overlap.
        count = max(1, min(self.samples, num_remaining_tokens // SCORED_TOKENS))
        return first_end + np.linspace(0, num_remaining_tokens, count).astype(np.int64)

    def sample_windows(self, ends: Int[np.ndarray, " samples"], length: int) -> Int[np.ndarray, "samples window"]:
        """Return a window of `length` + 1 tokens before each position.

        The model reads the first `length` tokens of a window, and predicts the last `length` tokens (see `score`).

        Args:
            ends: The position after the last token of each window.
            length: The number of tokens that the model reads.
        """
        window_length = length + 1
        return self.windows_at(ends - window_length, window_length)

    def score(
        self, windows: Int[np.ndarray, "windows length"], num_scored: int
    ) -> Float[np.ndarray, "windows num_scored"]:
        """Compute the losses of the last tokens of each window.

        Args:
            windows: The tokens. Each row is a window, which is a consecutive part of the text.
            num_scored: The number of tokens at the end of each window whose losses are computed.

        Returns:
            The losses in float64.
        """
        # The model does not read the last token of a window, because that token is only predicted.
        length = windows.shape[1] - 1
        batch_size = max(1, self.batch_tokens // length)
        device = self.target.device
        losses = []
        with self.target.for_length(None, length):
            for batch in torch.from_numpy(windows.astype(np.int64)).split(batch_size):
                inputs = batch[:, :-1].contiguous().to(device)
                targets = batch[:, 1:].contiguous().to(device)
                first_scored = length - num_scored  # The targets before this position are only context.
                batch_losses = self.target.token_nll(inputs, targets, first_scored)
                losses.append(batch_losses.double().cpu().numpy())
                self.meter.advance(inputs.numel(), f"{length:,} tokens")
        return np.concatenate(losses)

    def score_all(self, passes: Passes) -> Float[np.ndarray, " tokens"]:
        """Compute the losses of all tokens of the text in float64.

        Args:
            passes: The windows of the text that the model reads, and the tokens that are scored in each window.
        """
        losses = []
        # If windows overlap, more tokens are read than are scored. The progress meter counts the tokens that are read.
        tokens_read_per_target = passes.read / passes.tokens
        with self.target.for_length(None, passes.length):
            for batch_losses in score(self.target, self.tokens, passes, batch_tokens=self.batch_tokens):
                losses.append(batch_losses)
                self.meter.advance(len(batch_losses) * tokens_read_per_target, f"{passes.length:,} tokens")
        return np.concatenate(losses).astype(np.float64)

    def require_model(self, analysis_name: str) -> TransformerLM:
        """Return the model as a `TransformerLM`, for analyses that need more than the losses of a model.

        Args:
            analysis_name: The name of the analysis, for the error message.

        Raises:
            InputError: If the model is a Hugging Face model.
        """
        if not isinstance(self.target, ModelTarget):
            raise InputError(
                f"The analysis '{analysis_name}' supports models of trainshort only, got {self.target.name}. "
                "Import the model with `trainshort import`."
            )
        return self.target.model

    def cached(self, key: str, measure: Callable[[], Any]) -> Any:
        """Return a partial result of an analysis, and compute it only if it is not stored in the cache file.

        The cache file contains the partial results that were computed before the analysis was interrupted. Without a
        cache file (if `self.cache_path` is None), the partial result is always computed.

        Args:
            key: The name of the partial result.
            measure: A function that computes the partial result. The result must consist of JSON values.
        """
        cached_results: dict[str, Any] = {}
        if self.cache_path is not None and self.cache_path.is_file():
            cached_results = read_json_object(self.cache_path, hint="Remove it and analyze again.")
        if key not in cached_results:
            cached_results[key] = measure()
            if self.cache_path is not None:
                write_atomic(self.cache_path, json.dumps(cached_results, allow_nan=False))
        return cached_results[key]


def _accept_any_context(context: AnalysisContext) -> None:
    """Do nothing. Analyses that support every model and every text use this function as their check."""


@dataclass(frozen=True)
class Analysis:
    """An analysis that `trainshort analyze` can run.

    Attributes:
        question: The question that the analysis answers. `trainshort list` prints it.
        run: A function that returns the result as JSON values. Its key "summary" is one sentence without a period.
        table: A function that formats a result for the terminal.
        slow: Whether the analysis takes minutes. Slow analyses run last.
        check: A function that raises `InputError` if the model, the text or the lengths do not fit the analysis. It is
            called before the first analysis starts.
    """

    question: str
    run: Callable[[AnalysisContext], dict[str, Any]]
    table: Callable[[dict[str, Any]], Group]
    slow: bool = False
    check: Callable[[AnalysisContext], object] = _accept_any_context


# ---- tools for analyses


def compare(
    losses: Float[np.ndarray, "samples scored"], changed_losses: Float[np.ndarray, "samples scored"]
) -> dict[str, Any]:
    """Measure how much the losses of the same targets rise if their context is changed.

    Args:
        losses: The loss of each scored token with the original context. Each row is a sample (one window of the text).
        changed_losses: The losses of the same tokens with the changed context.

    Returns:
        A dictionary with these keys:

        - `loss`: the mean loss with the changed context
        - `rise`: the mean loss with the changed context minus the mean loss with the original context
        - `interval`: the 95 % interval of `rise`, or None if there is only one sample
    """
    differences = changed_losses.mean(axis=1) - losses.mean(axis=1)  # one mean difference for each sample
    return {
        "loss": float(changed_losses.mean()),
        "rise": float(differences.mean()),
        "interval": bootstrap_interval(differences),
    }


def format_interval(interval: Sequence[float] | None) -> str:
    """Return an interval as text, such as "+0.0120 to +0.0340", or an empty string for None."""
    if interval is None:
        return ""
    low, high = interval
    return f"{low:+.4f} to {high:+.4f}"


def format_effect(effect: float, interval: Interval | None) -> str:
    """Return an effect in nats and its 95 % interval, such as "+0.0230 nats, 95 % interval +0.0120 to +0.0340"."""
    if interval is None:
        return f"{effect:+.4f} nats, no interval because of too few samples"
    return f"{effect:+.4f} nats, 95 % interval {format_interval(interval)}"


def new_table(*columns: str) -> Table:
    """Return a table without rows. The columns have the given names and are right-aligned."""
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def with_title(title: str, table: Table) -> Group:
    """Return a table with a title above it. Unlike the title of a rich table, the title can be wider than the table."""
    return Group(StyledText(title, style="italic"), table)


# ---- `trainshort analyze`

# The version of the result files. Results of other versions are computed again.
ANALYSIS_FORMAT = 2


def analyze(
    context: AnalysisContext, text: Text, names: Sequence[str], console: Console, again: bool = False
) -> list[Path]:
    """Run analyses, write their results to `analysis/NAME.json` in the folder of the model, and print them.

    Args:
        context: The model, the tokens and the settings.
        text: The text that `context.tokens` belong to.
        names: The analyses to run. If it is empty, all analyses run that fit the model, slow ones last.
        console: The console for the results. The progress is printed on standard error.
        again: Whether to run analyses again whose results are stored.

    Returns:
        The result files.

    Raises:
        InputError: If an analysis of `names` does not fit the model, the text or the lengths.
    """
    for name in names:
        analyses.get(name).check(context)
    inputs = _describe_inputs(context, text)
    selected_names = names or sorted(analyses.names(), key=lambda name: analyses.get(name).slow)
    written_paths = []
    for number, name in enumerate(selected_names, start=1):
        analysis = analyses.get(name)
        path = context.target.folder / "analysis" / f"{name}.json"
        heading = f"\n[bold]{name}[/] ({number} of {len(selected_names)}): {analysis.question}"
        console.print(heading, highlight=False, markup=True)

        result = None if again else _load_result(path, inputs)
        if result is not None:
            console.print("This result was stored before. --overwrite computes it again.", highlight=False)
        else:
            try:
                result = _run_and_store(name, context, inputs, path, quiet=console.quiet)
            except InputError as error:
                if names:
                    raise
                console.print(f"Skipped: {escape_for_output(str(error))}", highlight=False, markup=False)
                continue
        written_paths.append(path)
        console.print(analysis.table(result))
        console.print(f"{result['summary']}.", highlight=False)

    path_list = ", ".join(escape_for_output(str(path)) for path in written_paths)
    console.print(f"\nWritten: {path_list}", highlight=False, soft_wrap=True)
    return written_paths


def _run_and_store(
    name: str, context: AnalysisContext, inputs: dict[str, Any], path: Path, *, quiet: bool
) -> dict[str, Any]:
    """Run an analysis and write its result file.

    Args:
        name: The name of the analysis.
        context: The model, the tokens and the settings.
        inputs: The description of the inputs, as `_describe_inputs` returns it.
        path: The result file.
        quiet: Whether to show no progress.

    Returns:
        The result of the analysis.

    Raises:
        InputError: If the analysis does not fit the model, the text or the lengths.
    """
    analysis = analyses.get(name)
    analysis.check(context)
    make_folder(path.parent)
    # The name of the cache file contains a hash, so partial results of other inputs are never used.
    cache_path = path.with_suffix(f".{inputs['digest']}.partial")
    with ProgressMeter(new_console(stderr=True, quiet=quiet)) as meter:
        result = analysis.run(replace(context, meter=meter, cache_path=cache_path))
    content = {
        "format": ANALYSIS_FORMAT,
        "analysis": name,
        **inputs,
        "result": result,
        "provenance": collect_provenance(threads=torch.get_num_threads()),
    }
    write_with_checksum(path, content)
    cache_path.unlink(missing_ok=True)
    return result


def _describe_inputs(context: AnalysisContext, text: Text) -> dict[str, Any]:
    """Describe the model, the text and the settings of an analysis, and compute a hash of them.

    A stored result is reused only if its hash equals the hash of the current inputs.

    Args:
        context: The model and the settings.
        text: The text.

    Returns:
        A dictionary that can be written as JSON. `digest` is the hash, shortened to 8 characters. `target` describes
        the model, `corpus` describes the text, and `settings` contains the settings.
    """
    settings: dict[str, Any] = {
        "trained_at": context.trained_at,
        "lengths": list(context.lengths),
        "samples": context.samples,
        "seed": context.seed,
    }
    if context.methods:
        settings["methods"] = list(context.methods)
    target_description = context.target.description()
    text_description = text.description()

    hashed_values = [ANALYSIS_FORMAT, target_description["weights"], text_description["sha256"], settings]
    hashed_json = json.dumps(hashed_values, sort_keys=True)
    digest = sha256(hashed_json.encode()).hexdigest()[:8]
    return {"digest": digest, "target": target_description, "corpus": text_description, "settings": settings}


def _load_result(path: Path, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the stored result of an analysis, or None if there is no result for the current inputs.

    Args:
        path: The result file.
        inputs: The description of the current inputs, as `_describe_inputs` returns it.
    """
    if not path.is_file():
        return None
    content = read_with_checksum(path, hint="Remove it and analyze again.")
    has_same_format = content.get("format") == ANALYSIS_FORMAT
    has_same_inputs = content.get("digest") == inputs["digest"]
    if has_same_format and has_same_inputs:
        return content["result"]
    return None
