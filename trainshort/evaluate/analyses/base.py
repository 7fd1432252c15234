"""What every analysis gets and returns, and how it scores: given tokens in, losses of the last few out.

Most questions here are of one kind: how does the loss of the same targets change when only their context changes? So
losses are compared target by target, and the intervals are those of the differences. What may be concluded from them
is one rule for all: `trainshort.evaluate.significance`.

An analysis is a function from a `Lab` to plain JSON with a "summary", and one that makes a table of it:

    analyses.register("mine")(Analysis("what is asked?", run, table))

Each answer is saved as it is found, and one that is there already for the same model, text and settings is shown, not
found again: a command that was stopped goes on when it is given again.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text as Styled

from trainshort.config.registries import analyses
from trainshort.data.passes import Passes
from trainshort.errors import InputError
from trainshort.evaluate.results import interval_of
from trainshort.evaluate.sweep import BATCH_TOKENS, score
from trainshort.evaluate.targets import ModelTarget, Target, Text
from trainshort.model.transformer import TransformerLM
from trainshort.utils.io import make_folder, read_json_object, read_with_checksum, write_atomic, write_with_checksum
from trainshort.utils.machine import collect_provenance
from trainshort.utils.terminal import ProgressMeter, escape_for_output, new_console

SCORED_TOKENS = 32
"""Tokens at the end of a probe whose losses are measured."""


@dataclass(frozen=True)
class AnalysisContext:
    """A model, a text, and how thoroughly to look."""

    target: Target
    tokens: np.ndarray
    trained_at: int
    lengths: tuple[int, ...] = ()
    """Lengths asked for; an analysis has its own when there are none."""
    samples: int = 64
    seed: int = 0
    batch_tokens: int = BATCH_TOKENS
    methods: tuple[str, ...] = ()
    """Position methods asked for, where several are compared; an analysis has its own when there are none."""
    meter: ProgressMeter = field(default_factory=ProgressMeter)
    """Where an analysis says how much it will read, and is told to have read it."""
    notes: Path | None = None
    """File that keeps measurements of one question until it is answered."""

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def multiples(self, *factors: int) -> list[int]:
        """The lengths asked for, else these multiples of the training length as far as text and model go."""
        wanted = self.lengths or tuple(self.trained_at * factor for factor in factors)
        longest = min(len(self.tokens) // 2, self.target.max_length or len(self.tokens))
        fitting = sorted({length for length in wanted if length <= longest})
        if fitting and (not self.lengths or len(fitting) == len(set(wanted))):
            return fitting
        needed = max(wanted) if self.lengths else min(wanted)
        if self.target.max_length is not None and needed > self.target.max_length:
            raise InputError(
                f"{self.target.name} reads up to {self.target.max_length:,} tokens, so it cannot be analyzed at "
                f"length {needed:,}. Give shorter --lengths."
            )
        raise InputError(
            f"the text has {len(self.tokens):,} tokens; an analysis at length {needed:,} needs at least twice that "
            "length. Give a longer text or shorter --lengths."
        )

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """So many tokens of the text from each start on, (starts, length)."""
        return np.stack([np.asarray(self.tokens[start : start + length]) for start in starts]).astype(np.int64)

    def sample_ends(self, longest: int) -> np.ndarray:
        """Where probes end: evenly spread over the text, each with `longest` tokens and one more before it."""
        room = len(self.tokens) - (longest + 1)
        count = max(1, min(self.samples, room // SCORED_TOKENS))
        return longest + 1 + np.linspace(0, room, count).astype(np.int64)

    def sample_windows(self, ends: np.ndarray, length: int) -> np.ndarray:
        """For each end the `length` + 1 tokens before it: one row per probe, as `score` reads them."""
        return self.rows(ends - length - 1, length + 1)

    def score(self, rows: np.ndarray, scored: int) -> np.ndarray:
        """Losses of the last `scored` tokens of each row, (rows, scored); a row's first token is context only."""
        length, found = rows.shape[1] - 1, []
        with self.target.for_length(None, length):
            for some in torch.from_numpy(rows.astype(np.int64)).split(max(1, self.batch_tokens // length)):
                inputs, targets = (part.contiguous().to(self.target.device) for part in (some[:, :-1], some[:, 1:]))
                losses = self.target.token_nll(inputs, targets, length - scored)
                found.append(losses.double().cpu().numpy())
                self.meter.advance(inputs.numel(), f"{length:,} tokens")
        return np.concatenate(found)

    def score_all(self, passes: Passes) -> np.ndarray:
        """Losses of all targets of the text."""
        parts = []
        with self.target.for_length(None, passes.length):
            for losses in score(self.target, self.tokens, passes, batch_tokens=self.batch_tokens):
                parts.append(losses)
                self.meter.advance(len(losses) * passes.read / passes.tokens, f"{passes.length:,} tokens")
        return np.concatenate(parts).astype(np.float64)

    def model(self, what: str) -> TransformerLM:
        """The model itself, for analyses that look inside."""
        if not isinstance(self.target, ModelTarget):
            raise InputError(f"{what} looks inside trainshort's own models, and {self.target.name} is none of them.")
        return self.target.model

    def cached(self, key: str, measure: Callable[[], Any]) -> Any:
        """What an earlier session measured under this key before it was stopped; else what is measured now, which is
        then noted: for questions that take minutes."""
        known: dict[str, Any] = {}
        if self.notes is not None and self.notes.is_file():
            known = read_json_object(self.notes, hint="Remove it and analyze again.")
        if key not in known:
            known[key] = measure()
            if self.notes is not None:
                write_atomic(self.notes, json.dumps(known, allow_nan=False))
        return known[key]


@dataclass(frozen=True)
class Analysis:
    """A question: what it is called, how it is answered, how the answer is shown."""

    question: str
    run: Callable[[AnalysisContext], dict[str, Any]]
    """The answer as plain JSON; "summary" is its one sentence."""
    table: Callable[[dict[str, Any]], Group]
    slow: bool = False
    """Whether it takes minutes; such questions are asked last."""
    fits: Callable[[AnalysisContext], object] = lambda lab: None
    """Raises `InputError` where model, text or lengths do not allow the question. Of all questions that are asked by
    name this is called before the first is begun."""


def compare(losses: np.ndarray, others: np.ndarray) -> dict[str, Any]:
    """How much higher the others' losses are, probe by probe."""
    difference = others.mean(axis=1) - losses.mean(axis=1)
    return {"loss": float(others.mean()), "rise": float(difference.mean()), "interval": interval_of(difference)}


def interval_text(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}"


def new_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def with_title(title: str, table: Table) -> Group:
    """A table under its title, which may be wider than the table."""
    return Group(Styled(title, style="italic"), table)


# ---- one `trainshort analyze`

ANALYSIS_FORMAT = 2
"""2: conclusions by the rule of evaluate.evidence."""


def analyze(
    lab: AnalysisContext, text: Text, names: Sequence[str], console: Console, again: bool = False
) -> list[Path]:
    """Answer each question and write analysis/NAME.json in the target's folder. When all were asked for, one that does
    not fit this model is passed over in words; one that was asked for by name is an error."""
    written = []
    origin = _origin(lab, text)
    notes = new_console(stderr=True, quiet=console.quiet)
    for name in names:
        analyses.get(name).fits(lab)
    asked = names or sorted(analyses.names(), key=lambda name: analyses.get(name).slow)
    for number, name in enumerate(asked, start=1):
        chosen, path = analyses.get(name), lab.target.folder / "analysis" / f"{name}.json"
        console.print(f"\n[bold]{name}[/] ({number} of {len(asked)}): {chosen.question}", highlight=False, markup=True)
        result = None if again else _stored(path, origin)
        if result is not None:
            console.print("known from before; --again asks anew.", highlight=False)
        else:
            partial = path.with_suffix(f".{origin['digest']}.partial")
            try:
                chosen.fits(lab)
                make_folder(path.parent)
                with ProgressMeter(notes) as meter:
                    result = chosen.run(replace(lab, meter=meter, notes=partial))
            except InputError as error:
                if names:
                    raise
                console.print(f"passed over: {escape_for_output(str(error))}", highlight=False, markup=False)
                continue
            answer = {"format": ANALYSIS_FORMAT, "analysis": name, **origin, "result": result}
            write_with_checksum(path, answer | {"provenance": collect_provenance(threads=torch.get_num_threads())})
            partial.unlink(missing_ok=True)
        written.append(path)
        console.print(chosen.table(result))
        console.print(f"{result['summary']}.", highlight=False)
    console.print(
        "\nWritten: " + ", ".join(escape_for_output(str(path)) for path in written), highlight=False, soft_wrap=True
    )
    return written


def _origin(lab: AnalysisContext, text: Text) -> dict[str, Any]:
    """What an answer depends on, and a digest of it."""
    settings = {"trained_at": lab.trained_at, "lengths": list(lab.lengths), "samples": lab.samples, "seed": lab.seed}
    settings |= {"methods": list(lab.methods)} if lab.methods else {}
    target, corpus = lab.target.description(), text.description()
    depends = [ANALYSIS_FORMAT, target["weights"], corpus["sha256"], settings]
    digest = sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:8]
    return {"digest": digest, "target": target, "corpus": corpus, "settings": settings}


def _stored(path: Path, origin: dict[str, Any]) -> dict[str, Any] | None:
    """The answer that an earlier session found to this very question."""
    if not path.is_file():
        return None
    content = read_with_checksum(path, hint="Remove it and analyze again.")
    same = content.get("format") == ANALYSIS_FORMAT and content.get("digest") == origin["digest"]
    return content["result"] if same else None
