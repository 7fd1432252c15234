"""Does an export compute, in the program it was made for, what our model computes?

Logits at 1, 2 and 8 times the training length, greedy text, and the tokens of awkward strings. Differences are given in
units of the logits' deviation.
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
from trainshort.interop.export import RECORD, run_tokenizer
from trainshort.interop.export.base import EXPORT_AGAIN_HINT, MaxError, Runtime
from trainshort.model.transformer import TransformerLM
from trainshort.train.checkpoint import find_checkpoint, load_model
from trainshort.utils.io import read_json_object, write_atomic

TIMES = (1, 2, 8)
GREEDY = 32
RESULT = "verify.json"

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

SLOPE_ROUNDING = 4 * 2.0**-24
"""Of slope times index, which other programs add where we add slope times distance."""


@dataclass(frozen=True)
class LogitError:
    """One length."""

    length: int
    compared: int
    """Positions at which the two were compared."""
    difference: float
    kl: float
    limit: float


@dataclass(frozen=True)
class Verification:
    """What was found."""

    engine: str
    rows: list[LogitError]
    greedy: bool
    tokenization: bool | None
    problems: list[str] = field(default_factory=list)

    def table(self) -> Table:
        table = Table("tokens", "compared at", "largest difference", "allowed", "KL", title=self.engine)
        for row in self.rows:
            difference, limit = f"{row.difference:.1e}", f"{row.limit:.0e}"
            table.add_row(f"{row.length:,}", f"{row.compared:,}", difference, limit, f"{row.kl:.1e}")
        return table


def verify(folder: Path, run: Path | None = None) -> Verification:
    """Load an export in its own program and compare it with the run it was made of."""
    record = read_json_object(folder / RECORD, hint="Give a folder that trainshort export made.")
    to, length = str(record.get("to")), record.get("trained_at")
    max_error = _find_max_error(to, str(record.get("dtype")))
    if max_error is None or type(length) is not int or length < 1:
        raise InputError(f"{folder / RECORD} does not say what was exported. Export the run again.")
    run = run or _origin(folder, record.get("run"))
    ours = load_model(_same_length(run, folder, length))
    engine = open_engine(to, folder, max(TIMES) * length)
    known = engine.log_probabilities([0])[1].shape[-1]
    if known != ours.config.vocab_size:
        raise InputError(_wrong_run_message(folder, f"knows {known:,} token types", run, f"{ours.config.vocab_size:,}"))
    rows, problems = [], []
    for times in TIMES:
        row = _compare(ours, engine, times * length, max_error.logits)
        rows.append(row)
        if not row.difference <= row.limit or not row.kl <= max_error.kl:
            problems.append(
                f"at {row.length:,} tokens the logits differ by {row.difference:.1e} of their deviation "
                f"(allowed {row.limit:.0e}), KL {row.kl:.1e} (allowed {max_error.kl:.0e})"
            )
    tokenizer = run_tokenizer(run)
    end = None if tokenizer is None or engine.ends else tokenizer.end
    same = _same_greedy(ours, engine, length, max_error.logits, end)
    if not same:
        problems.append(f"greedy text after {length} tokens is another")
    tokens = None if tokenizer is None else _same_tokens(tokenizer, engine)
    if tokens is False:
        problems.append("a text becomes other tokens")
    report = Verification(engine.version, rows, same, tokens, problems)
    write_atomic(folder / RESULT, json.dumps(asdict(report), indent=2) + "\n")
    return report


def _find_max_error(to: str, dtype: str) -> MaxError | None:
    """Return the errors that are accepted for a target and a dtype, or None if one of them is unknown."""
    if to not in targets:
        return None
    return targets.get(to).max_errors.get(dtype)


def open_engine(to: str, folder: Path, longest: int) -> Runtime:
    """Load an export in the program it was made for.

    Args:
        to: The name of the export target.
        folder: The folder of the export.
        longest: The length of the longest input that will be read.

    Returns:
        The loaded export.

    Raises:
        InputError: If the program is not installed, or if it cannot open the export.
    """
    runtime: Any = targets.get(to).runtime
    try:
        return runtime(folder, longest)
    except ImportError as error:
        raise InputError(
            f"{runtime.package} is not installed ({error}), so that {folder} cannot be verified: "
            "pip install 'trainshort[interop,hf]'."
        ) from None
    except InputError:
        raise
    except Exception as error:  # A damaged export can make its program fail with any exception.
        first = " ".join(str(error).split())[:160] or type(error).__name__
        raise InputError(f"{runtime.package} cannot open {folder} ({first}). {EXPORT_AGAIN_HINT}") from None


def _origin(folder: Path, run: object) -> Path:
    """The run that an export was made of, by its record."""
    if not isinstance(run, str) or not run:
        raise InputError(f"{folder / RECORD} does not say of which run it was made. Say it: --run-folder RUN.")
    if not Path(run).exists():
        raise InputError(f"{folder} was made of {run}, which is not there. Say where it is: --run-folder RUN.")
    return Path(run)


def _same_length(run: Path, folder: Path, length: int) -> Path:
    """The run's checkpoint, if it is of a causal model that was trained at this length."""
    checkpoint = find_checkpoint(run)
    config = load_config(checkpoint / "config.json")
    config.model.require_causal("Verification of an export")
    if config.train.length != length:
        raise InputError(
            _wrong_run_message(folder, f"says it was trained at {length:,} tokens", run, f"{config.train.length:,}")
        )
    return checkpoint


def _wrong_run_message(folder: Path, says: str, run: Path, own: str) -> str:
    return (
        f"{folder} {says}, and {run} has {own}: they are not one model. Say of which run it was made: --run-folder RUN."
    )


def _tokens(vocab_size: int, length: int) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@torch.no_grad()
def _compare(ours: TransformerLM, engine: Runtime, length: int, limit: float) -> LogitError:
    tokens = _tokens(ours.config.vocab_size, length)
    where, theirs = engine.log_probabilities(tokens)
    hidden = ours.hidden(torch.tensor([tokens]))[0, where]
    logits = ours.vocabulary.log_scores(hidden).float()
    mine, deviation = logits.log_softmax(-1), float(logits.std())
    kl = (mine.exp() * (mine - theirs)).sum(-1).max()
    slopes = ours.position.linear_slopes()
    rounding = 0.0 if slopes is None else SLOPE_ROUNDING * length * float(slopes.abs().max()) / deviation
    off = mine - theirs
    off = (off - off.mean(-1, keepdim=True)).abs().max()  # of logits, which may all be shifted
    return LogitError(length, len(where), float(off) / deviation, max(0.0, float(kl)), limit + rounding)


@torch.no_grad()
def _same_greedy(ours: TransformerLM, engine: Runtime, length: int, limit: float, end: int | None) -> bool:
    """Whether each token is our model's best, or so near to it that the allowed difference explains the choice."""
    tokens = _tokens(ours.config.vocab_size, length)
    made = engine.greedy(tokens, GREEDY)
    if not made:
        return False
    scores: Tensor = ours(torch.tensor([tokens + made]))[0, length - 1 : -1].float()  # pyright: ignore
    if end is not None:
        scores[:, end] = scores.amin()
    chosen = scores.gather(1, torch.tensor(made)[:, None])[:, 0]
    return bool((scores.amax(-1) - chosen <= 2 * limit * scores.std()).all())


def _same_tokens(tokenizer: Tokenizer, engine: Runtime) -> bool | None:
    if engine.encode("a") is None:
        return None
    return all(engine.encode(text) == tokenizer.encode(text).tolist() for text in EDGE_CASE_STRINGS)
