"""Verify an export: load it in the program it was made for, and compare the results with the run.

Three things are compared: the logits at 1, 2 and 8 times the training length, greedy text, and the tokens of unusual
texts. The differences of logits are measured in standard deviations of the logits.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from trainshort.config.registries import targets
from trainshort.config.run_config import load_config
from trainshort.data.tokenizers.base import Tokenizer
from trainshort.errors import InputError
from trainshort.evaluate.targets import EXPORTED
from trainshort.interop.export import run_tokenizer
from trainshort.interop.export.base import EXPORT_AGAIN_HINT, MaxError, Runtime
from trainshort.model.transformer import TransformerLM
from trainshort.train.checkpoint import find_checkpoint, load_model
from trainshort.utils.io import read_json_object, write_atomic

LENGTH_MULTIPLES = (1, 2, 8)
"""The input lengths at which logits are compared, as multiples of the training length."""

# The number of tokens that are generated without sampling.
GREEDY_TOKENS = 32

RESULT_FILE = "verify.json"

# The largest number of characters of another program's error message that are shown to the user.
MAX_CAUSE_LENGTH = 160

RUN_FOLDER_HINT = "Give the run with --run-folder RUN."

EDGE_CASE_STRINGS = (
    "The state of the Union",
    "  two  spaces and\ttabs\n\nlines\r\n",
    "naïve café, Ελληνικά, 中文, 🙂👩‍👩‍👧, ‮right to left‬",
    "<|endoftext|> <eos> <unk> <s>",
    "don't WON'T I'll 1234567890 3.14",
    "\u00a0\u3000\u200b zero\x00byte",
    "a" * 100,
    "",
)
"""Texts that tokenizers often split differently: white space, scripts, special tokens, control characters."""

# Other programs add slope * key position, where trainshort adds slope * distance. The difference is the same for all
# keys, so the attention weights are equal. But large positions lose accuracy: the relative rounding error of float32 is
# 2^-24 per operation.
SLOPE_ROUNDING = 4 * 2.0**-24


@dataclass(frozen=True)
class LogitError:
    """The comparison of logits at one input length.

    Attributes:
        length: The input length.
        compared: The number of positions that were compared.
        difference: The largest difference of two logits, in standard deviations of the logits.
        kl: The largest Kullback-Leibler divergence at one position.
        limit: The largest accepted value of `difference`.
    """

    length: int
    compared: int
    difference: float
    kl: float
    limit: float


@dataclass(frozen=True)
class Verification:
    """The result of `verify`. It is stored in the file `verify.json` of the export.

    Attributes:
        engine: The name and the version of the program that ran the export.
        rows: The comparison of logits at each input length.
        greedy: Whether the program generates the same greedy text.
        tokenization: Whether the program splits texts into the same tokens. None if the program has no tokenizer.
        problems: A clause for each difference that is larger than accepted.
    """

    engine: str
    rows: list[LogitError]
    greedy: bool
    tokenization: bool | None
    problems: list[str] = field(default_factory=list)

    def table(self) -> Table:
        """Return a table that compares the logits of an export and its run, with one row for each input length."""
        table = Table("tokens", "compared at", "largest difference", "allowed", "KL", title=self.engine)
        for row in self.rows:
            table.add_row(
                f"{row.length:,}",
                f"{row.compared:,}",
                f"{row.difference:.1e}",
                f"{row.limit:.0e}",
                f"{row.kl:.1e}",
            )
        return table


def verify(folder: Path, run: Path | None = None) -> Verification:
    """Load an export in the program it was made for, and compare the results with its run.

    The result is also written to `verify.json` in the folder of the export.

    Args:
        folder: The folder of the export.
        run: The run that was exported. None means the run that the export names.

    Raises:
        InputError: If the export or the run cannot be loaded, or if the export was made from another run.
    """
    target_name, training_length, max_error = _read_export_record(folder)
    if run is None:
        run = _find_run(folder)
    model = load_model(_find_matching_checkpoint(run, folder, training_length))
    runtime = open_runtime(target_name, folder, max(LENGTH_MULTIPLES) * training_length)
    # Run one token to find out the vocabulary size of the export.
    _, log_probabilities = runtime.log_probabilities([0])
    vocab_size = log_probabilities.shape[-1]
    if vocab_size != model.config.vocab_size:
        raise _wrong_run_error(folder, run, f"{vocab_size:,} tokens in the vocabulary", f"{model.config.vocab_size:,}")

    rows = []
    for multiple in LENGTH_MULTIPLES:
        length = multiple * training_length
        rows.append(_compare_logits(model, runtime, length, max_error.logits))
    problems = _find_logit_problems(rows, max_error)

    tokenizer = run_tokenizer(run)
    # Some programs stop at the end token, so `generate_greedy` must not choose this token.
    forbidden_token = None
    if tokenizer is not None and not runtime.allows_end_token:
        forbidden_token = tokenizer.end
    has_same_greedy_text = _is_greedy_text_equal(model, runtime, training_length, max_error.logits, forbidden_token)
    if not has_same_greedy_text:
        problems.append(f"the greedy text after {training_length} tokens is different")

    has_same_tokens = None
    if tokenizer is not None:
        has_same_tokens = _is_tokenization_equal(tokenizer, runtime)
    if has_same_tokens is False:
        problems.append("the tokens of a text are different")

    verification = Verification(runtime.version, rows, has_same_greedy_text, has_same_tokens, problems)
    write_atomic(folder / RESULT_FILE, json.dumps(asdict(verification), indent=2) + "\n")
    return verification


def _find_logit_problems(rows: list[LogitError], max_error: MaxError) -> list[str]:
    """Return a clause for each input length at which the logits of an export and its run differ too much.

    Args:
        rows: The comparison of the logits at each input length.
        max_error: The largest differences that are accepted.
    """
    problems = []
    for row in rows:
        # The comparisons are False for NaN.
        is_accepted = row.difference <= row.limit and row.kl <= max_error.kl
        if not is_accepted:
            problems.append(
                f"at {row.length:,} tokens the logits differ by {row.difference:.1e} standard deviations "
                f"(allowed {row.limit:.0e}), KL divergence {row.kl:.1e} (allowed {max_error.kl:.0e})"
            )
    return problems


def _read_export_record(folder: Path) -> tuple[str, int, MaxError]:
    """Read the file `trainshort.json` of an export.

    Returns:
        The name of the export target, the training length, and the errors that are accepted for the export's dtype.

    Raises:
        InputError: If the file is missing or invalid.
    """
    record = read_json_object(folder / EXPORTED, hint="Give a folder that trainshort export made.")
    target_name = str(record.get("to"))
    dtype = str(record.get("dtype"))
    training_length: Any = record.get("trained_at")

    max_error = None
    if target_name in targets:
        max_error = targets.get(target_name).max_errors.get(dtype)
    # In Python, True is an instance of int, so `isinstance` would accept True as a length.
    has_valid_length = type(training_length) is int and training_length >= 1
    if max_error is None or not has_valid_length:
        raise InputError(
            f"Invalid file {folder / EXPORTED}: it does not state a valid target, dtype and training length. "
            f"{EXPORT_AGAIN_HINT}"
        )
    return target_name, training_length, max_error


def open_runtime(target_name: str, folder: Path, max_length: int) -> Runtime:
    """Load an export in the program it was made for.

    Args:
        target_name: The name of the export target.
        folder: The folder of the export.
        max_length: The length of the longest input that will be read.

    Returns:
        The loaded export.

    Raises:
        InputError: If the program is not installed, or if it cannot open the export.
    """
    runtime_class: Any = targets.get(target_name).runtime
    try:
        return runtime_class(folder, max_length)
    except ImportError as error:
        raise InputError(
            f"Verifying {folder} requires {runtime_class.package}. Install it with: pip install 'trainshort[interop]'. "
            f"The import failed with: {error}."
        ) from None
    except InputError:
        raise
    except Exception as error:  # A damaged export can make its program fail with any exception.
        # Messages of other programs can be long and have several lines.
        one_line_message = " ".join(str(error).split())
        cause = one_line_message[:MAX_CAUSE_LENGTH] or type(error).__name__
        raise InputError(f"{runtime_class.package} cannot open {folder} ({cause}). {EXPORT_AGAIN_HINT}") from None


def _find_run(folder: Path) -> Path:
    """Return the run that an export names in its file `trainshort.json`.

    Raises:
        InputError: If the export names no run, or if the run does not exist at the recorded path.
    """
    run = read_json_object(folder / EXPORTED).get("run")
    if not isinstance(run, str) or not run:
        raise InputError(f"{folder / EXPORTED} does not name the run that was exported. {RUN_FOLDER_HINT}")
    if not Path(run).exists():
        raise InputError(f"{folder} was exported from {run}, which does not exist. {RUN_FOLDER_HINT}")
    return Path(run)


def _find_matching_checkpoint(run: Path, folder: Path, training_length: int) -> Path:
    """Return the checkpoint of a run, and check that the export can be from this run.

    Args:
        run: The run.
        folder: The folder of the export, for error messages.
        training_length: The training length that the export states.

    Raises:
        InputError: If the model of the run is an encoder, or was trained at another length.
    """
    checkpoint = find_checkpoint(run)
    config = load_config(checkpoint / "config.json")
    config.model.require_causal("Verification of an export")
    if config.train.length != training_length:
        raise _wrong_run_error(folder, run, f"training length {training_length:,}", f"{config.train.length:,}")
    return checkpoint


def _wrong_run_error(folder: Path, run: Path, export_property: str, run_value: str) -> InputError:
    """Return the error for an export that was made from another run.

    Args:
        folder: The folder of the export.
        run: The run.
        export_property: A property of the export, such as "training length 32".
        run_value: The value of this property in the run.
    """
    return InputError(
        f"{folder} was not exported from {run}: the export has {export_property}, the run has {run_value}. "
        f"{RUN_FOLDER_HINT}"
    )


def _random_tokens(vocab_size: int, length: int) -> list[int]:
    """Return random tokens. The same length always gives the same tokens."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


@torch.no_grad()
def _compare_logits(model: TransformerLM, runtime: Runtime, length: int, max_difference: float) -> LogitError:
    """Compare the logits of a run and of its export on random tokens.

    Args:
        model: The model of the run.
        runtime: The loaded export.
        length: The input length.
        max_difference: The largest accepted difference in standard deviations of the logits, without the rounding error
            of the ALiBi bias.

    Returns:
        The differences, and the largest difference that is accepted at this length.
    """
    tokens = _random_tokens(model.config.vocab_size, length)
    positions, export_log_probabilities = runtime.log_probabilities(tokens)
    hidden = model.hidden(torch.tensor([tokens]))[0, positions]
    logits = model.vocabulary.log_scores(hidden).float()
    log_probabilities = logits.log_softmax(-1)
    deviation = float(logits.std())
    divergences = (log_probabilities.exp() * (log_probabilities - export_log_probabilities)).sum(-1)
    largest_divergence = float(divergences.max())

    # A constant that is added to all logits of a position does not change the probabilities. Subtract the mean
    # difference, so that such a constant does not count.
    differences = log_probabilities - export_log_probabilities
    largest_difference = (differences - differences.mean(-1, keepdim=True)).abs().max()

    # The rounding error of slope * position grows with the input length.
    rounding = 0.0
    slopes = model.position.linear_slopes()
    if slopes is not None:
        rounding = SLOPE_ROUNDING * length * float(slopes.abs().max()) / deviation
    return LogitError(
        length=length,
        compared=len(positions),
        difference=float(largest_difference) / deviation,
        kl=max(0.0, largest_divergence),  # Rounding can make a divergence negative.
        limit=max_difference + rounding,
    )


@torch.no_grad()
def _is_greedy_text_equal(
    model: TransformerLM, runtime: Runtime, length: int, max_difference: float, forbidden_token: int | None
) -> bool:
    """Return whether an export generates the same greedy text as its run. Greedy text is generated without sampling.

    A token may differ from the most likely token of the run, if the accepted difference of logits explains the choice.

    Args:
        model: The model of the run.
        runtime: The loaded export.
        length: The length of the prompt, which consists of random tokens.
        max_difference: The largest accepted difference of logits, in standard deviations.
        forbidden_token: A token that the export cannot generate, or None.
    """
    prompt = _random_tokens(model.config.vocab_size, length)
    generated = runtime.generate_greedy(prompt, GREEDY_TOKENS)
    if not generated:
        return False
    logits: Tensor = model(torch.tensor([prompt + generated]))  # pyright: ignore[reportAssignmentType]
    # The logits at each position predict the next token, so the first generated token follows position `length - 1`.
    next_token_logits = logits[0, length - 1 : -1].float()  # (generated tokens, vocab)
    if forbidden_token is not None:
        # The lowest logit makes the forbidden token the least likely token.
        next_token_logits[:, forbidden_token] = next_token_logits.amin()
    # The logit of the token that the export generated, and the highest logit: one value for each generated token.
    chosen_logits = next_token_logits.gather(1, torch.tensor(generated)[:, None])[:, 0]
    best_logits = next_token_logits.amax(-1)
    # Both the best and the chosen logit can be off by the accepted difference.
    max_gap = 2 * max_difference * next_token_logits.std()
    return bool((best_logits - chosen_logits <= max_gap).all())


def _is_tokenization_equal(tokenizer: Tokenizer, runtime: Runtime) -> bool | None:
    """Return whether an export splits unusual texts into the same tokens as the tokenizer of the run.

    Returns:
        True or False, or None if the program of the export has no tokenizer.
    """
    if runtime.encode("a") is None:  # The program has no tokenizer and takes token ids only.
        return None
    for text in EDGE_CASE_STRINGS:
        expected_tokens = tokenizer.encode(text).tolist()
        if runtime.encode(text) != expected_tokens:
            return False
    return True
