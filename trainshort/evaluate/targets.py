"""What is evaluated, and on what: a model behind one small interface, and a text in its own tokens.

Scoring needs four things of a model: losses of given targets, the longest input it can read, the length it was trained
at, and its tokenizer. It is a run, a checkpoint of it, or any Hugging Face causal language model, and nothing past this
file asks which. The text that a command line means by --data:

nothing           the run's own data, its validation split
a folder          prepared data (it has a meta.json), made with the model's own tokenizer
files             plain text, whole; several are separated by the end token
anything else     a corpus by name, as `trainshort prepare` knows them; its split
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from trainshort.config.run_config import RunConfig, load_config
from trainshort.data.corpora import find_corpus
from trainshort.data.dataset import PreparedDataset, is_dataset_folder, open_dataset, token_type
from trainshort.data.mlm import mask_token
from trainshort.data.splits import make_splitter
from trainshort.errors import InputError
from trainshort.evaluate.overrides import Override, apply_override
from trainshort.model.transformer import TransformerLM
from trainshort.train.checkpoint import find_checkpoint, fingerprint, is_hugging_face, load_model, read_state
from trainshort.train.run_data import open_run_data, run_tokenizer
from trainshort.utils.io import read_text

EXPORTED = "trainshort.json"
"""In a folder that export made: what it was made of."""
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TABLES = (".jsonl", ".parquet")
"""Files that hold records and not a text; they are read as a corpus."""


class TextTokenizer(Protocol):
    """A tokenizer, as far as evaluation needs one."""

    name: str
    vocab_size: int
    end: int | None
    """The token between documents."""
    ends_lines: ClassVar[bool]
    """Whether that token stands for a line end, which the text really has."""

    def encode(self, text: str) -> np.ndarray: ...
    def decode(self, ids: Any) -> str: ...
    def to_json(self) -> str: ...


class Target(ABC):
    """A causal language model to be measured."""

    name: str
    kind: str
    trained_at: int | None
    """The paper's L; None when the model does not tell."""
    max_length: int | None = None
    """Longest input it can read at all; None: no such limit is known."""
    vocab_size: int
    bos: int
    """Fed to the model as the token before the first."""
    mask: int | None = None
    """An encoder's mask token; None: a causal model."""
    module: nn.Module
    folder: Path
    """Where results go: the run folder, or one like it."""

    @abstractmethod
    def token_nll(
        self, tokens: Int[Tensor, "batch length"], targets: Int[Tensor, "batch length"], first: int
    ) -> Float[Tensor, "batch scored"]:
        """Losses of the targets from position `first` on, in float32."""

    @abstractmethod
    def tokenizer(self) -> TextTokenizer:
        """The model's own tokenizer."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What a result says of the model, beside the fields above."""

    def length_error_reason(self, error: Exception, length: int) -> str | None:
        """Why the model cannot read `length` tokens, if that is what this error means."""
        return None

    def for_length(self, change: Override | None, length: int) -> AbstractContextManager[None]:
        """Inside, the model is set up for inputs of this length, changed otherwise if asked for."""
        if change is None:
            return nullcontext()
        raise InputError(
            f"--{change.option} supports runs of trainshort only, and {self.name} is a Hugging Face model. "
            "Import the model with `trainshort import` and evaluate the imported run."
        )

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def description(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in ("name", "kind", "trained_at", "max_length")}
        size = sum(weight.numel() for weight in self.module.parameters())
        return {**told, "parameters": size, "weights": fingerprint(self.module), **self.describe()}


class ModelTarget(Target):
    """A model of ours that is in memory; tokens are the caller's affair."""

    kind = "model"

    def __init__(self, model: TransformerLM, *, trained_at: int, name: str = "model", bos: int = 0) -> None:
        self.model = model.eval()
        self.module = model
        self.name = name
        self.trained_at = trained_at
        self.bos = bos
        self.folder = Path("runs") / name
        self.max_length = model.position.max_length
        self.mask = None if model.config.causal else mask_token(model.config)
        self.vocab_size = model.config.vocab_size - (0 if self.mask is None else 1)

    def token_nll(self, tokens: Tensor, targets: Tensor, first: int) -> Tensor:
        return self.model.token_nll(tokens, targets, first)

    def tokenizer(self) -> TextTokenizer:
        raise InputError(f"{self.name} is a bare model without a tokenizer; give it tokens, or evaluate a run.")

    def for_length(self, change: Override | None, length: int) -> AbstractContextManager[None]:
        return (
            nullcontext() if change is None else apply_override(self.model, change, self.trained_at or length, length)
        )

    def describe(self) -> dict[str, Any]:
        return {"position": self.model.config.position, "model": self.model.config.model_dump(mode="json")}


class RunTarget(ModelTarget):
    """The best checkpoint of a run folder, or one checkpoint by its own folder."""

    run: Path
    """The run folder, whose data it was trained on, wherever results go."""

    def __init__(self, path: Path, *, device: str = "cpu", precision: str = "float32", encoders: bool = False) -> None:
        self.checkpoint = find_checkpoint(path)
        self.config: RunConfig = load_config(self.checkpoint / "config.json")
        if not encoders:
            self.config.model.require_causal("This command")
        self.step = read_state(self.checkpoint).step
        folder = self.checkpoint.parent.parent
        self.kind = "run" if path.resolve() == folder.resolve() else "checkpoint"
        super().__init__(
            load_model(self.checkpoint, device=device).to(PRECISIONS[precision]),
            trained_at=self.config.train.length,
            name=folder.resolve().name + ("" if self.kind == "run" else f" step {self.step}"),
        )
        self.folder = self.run = folder
        self._tokenizer = run_tokenizer(folder)
        self.bos = self._tokenizer.end or 0

    def tokenizer(self) -> TextTokenizer:
        return self._tokenizer

    def describe(self) -> dict[str, Any]:
        return {"step": self.step, **super().describe()}


def open_target(
    name: str, *, device: str = "cpu", precision: str = "float32", trained_at: int | None = None, encoders: bool = False
) -> Target:
    """The model that `name` means: a folder of ours, a folder of Hugging Face's, or a name on its hub."""
    if precision not in PRECISIONS:
        raise InputError(f"precision is {' or '.join(PRECISIONS)}, got '{precision}'.")
    path = Path(name).expanduser()
    if path.is_file():
        raise InputError(f"{path} is a file. Give a run folder, one of its checkpoints, or a Hugging Face model.")
    reject_foreign_export(path)
    if path.is_dir() and not is_hugging_face(path):
        target: Target = RunTarget(path, device=device, precision=precision, encoders=encoders)
    elif path.is_dir() or looks_like_hub_name(name):
        from trainshort.evaluate.hf_target import HuggingFaceTarget

        target = HuggingFaceTarget(str(path) if path.is_dir() else name, device=device, precision=precision)
    else:
        raise InputError(f"There is no run or model at '{path}'. `ls runs` shows the runs made here.")
    if trained_at is not None:
        target.trained_at = trained_at
    return target


def reject_foreign_export(path: Path) -> None:
    """A folder for llama.cpp or CTranslate2 holds no model that runs here."""
    if (path / EXPORTED).exists() and not is_hugging_face(path):
        raise InputError(
            f"{path} is an export for another program, which its own commands run. Give the run it was made of (its "
            f"{EXPORTED} says which), or an export by --to hf."
        )


def looks_like_hub_name(name: str) -> bool:
    """`gpt2` and `owner/name`, but not `runs/mine`, `./x` or `a/b/c`: those would be folders here."""
    return name.count("/") <= 1 and not name.startswith(("runs/", ".", "/", "~")) and not name.endswith("/")


# ---- the text


@dataclass(frozen=True)
class Text:
    """Targets, and what was counted of the text they came from."""

    name: str
    split: str | None
    tokens: np.ndarray
    words: int
    """Words between white space."""
    bytes: int
    """Bytes of UTF-8."""
    sha256: str
    tokenizer: str
    end: int | None
    """The token between documents, if there is one."""
    own: bool = False
    """Whether it is the data that the run was trained beside, and not a text that was named."""
    whole: int | None = None
    """Tokens before the text was cut; None: it was not."""

    def description(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in ("name", "split", "sha256", "tokenizer", "own", "words", "bytes")}
        return told | {"tokens": len(self.tokens), "whole": self.whole or len(self.tokens)}


def open_text(target: Target, data: Sequence[str], split: str = "valid", max_tokens: int | None = None) -> Text:
    """The text that a command line means, cut after `max_tokens` for a quick look."""
    text = _whole_text(target, data, split)
    if not len(text.tokens):
        raise InputError(f"{text.name} holds no text in its split '{split}'; choose another --data or --split.")
    largest = int(text.tokens.max())
    if largest >= target.vocab_size:
        raise InputError(
            f"{text.name} holds token {largest}, but {target.name} knows {target.vocab_size:,} types. "
            "Was it made with another tokenizer?"
        )
    if max_tokens is None or max_tokens >= len(text.tokens):
        return text
    if max_tokens < 1:
        raise InputError(f"--max-tokens must be at least 1, got {max_tokens}.")
    return cut(text, max_tokens, target.tokenizer())


def cut(text: Text, count: int, tokenizer: TextTokenizer) -> Text:
    """The first `count` tokens; their words and bytes are counted in what they spell, end tokens left out."""
    kept = np.asarray(text.tokens[:count])
    if tokenizer.ends_lines:
        pieces = [tokenizer.decode(kept)]
    else:
        parts = np.split(kept, np.flatnonzero(kept == text.end))
        pieces = [tokenizer.decode(part[part != text.end]) for part in parts]
    return replace(text, tokens=kept, whole=len(text.tokens), **_counted(kept, pieces))


def _counted(tokens: np.ndarray, pieces: list[str]) -> dict[str, Any]:
    return {
        "words": sum(len(piece.split()) for piece in pieces),
        "bytes": sum(len(piece.encode()) for piece in pieces),
        "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
    }


def _whole_text(target: Target, data: Sequence[str], split: str) -> Text:
    if isinstance(target, RunTarget) and (not data or list(data) == [target.config.data.corpus]):
        return replace(_from_prepared(open_run_data(target.run, target.config.data), split), own=True)
    if not data:
        raise InputError(
            f"{target.name} does not say which text to use. Give one: --data sotu, --data book.txt, or a folder."
        )
    paths = [Path(name).expanduser() for name in data]
    if len(data) == 1 and is_dataset_folder(paths[0]):
        prepared = open_dataset(paths[0])
        _check_same_tokenizer(target, prepared)
        return _from_prepared(prepared, split)
    if all(path.is_file() and path.suffix not in TABLES for path in paths):
        documents = [read_text(path, hint="Give a text file in UTF-8.", limit=2**36) for path in paths]
        return _encoded(" ".join(data), None, documents, target.tokenizer())
    if len(data) > 1:
        missing = next((path for path in paths if not path.is_file()), paths[0])
        raise InputError(f"several --data must all be text files, and {missing} is none.")
    corpus = find_corpus(data[0])
    rule = make_splitter(corpus, "strict")
    documents = [document.text for document in corpus.documents() if rule.split(document) == split]
    if not documents:
        raise InputError(f"the corpus '{data[0]}' has no split '{split}'; it has {', '.join(corpus.splits)}.")
    return _encoded(data[0], split, documents, target.tokenizer())


def _from_prepared(prepared: PreparedDataset, split: str) -> Text:
    tokens, meta = prepared.split(split), prepared.meta
    counts = meta.splits[split].model_dump(include={"words", "bytes", "sha256"})
    return Text(meta.request.corpus, split, tokens, tokenizer=meta.tokenizer, end=meta.end, **counts)


def _check_same_tokenizer(target: Target, prepared: PreparedDataset) -> None:
    """Equal numbers of token types would let another tokenizer's data pass as nonsense, so the tokenizers compare."""
    theirs, ours = json.loads(prepared.tokenizer().to_json()), json.loads(target.tokenizer().to_json())
    if theirs["model"].get("vocab") != ours["model"].get("vocab"):
        raise InputError(
            f"{prepared.folder} was made with another tokenizer ('{prepared.meta.tokenizer}', "
            f"{prepared.meta.vocab_size:,} types) than {target.name} has ({target.vocab_size:,} types). "
            "Give the text itself as --data, and it is tokenized for this model."
        )


def _encoded(name: str, split: str | None, documents: list[str], tokenizer: TextTokenizer) -> Text:
    """Documents as tokens, the end token between two of them, unless the tokenizer ends every line by itself."""
    parts: list[np.ndarray] = []
    for index, document in enumerate(documents):
        if index and tokenizer.end is not None and not tokenizer.ends_lines:
            parts.append(np.array([tokenizer.end], dtype=np.int64))
        parts.append(tokenizer.encode(document))
    tokens = np.concatenate(parts).astype(token_type(tokenizer.vocab_size))
    counts = _counted(tokens, documents)
    return Text(name, split, tokens, tokenizer=tokenizer.name, end=tokenizer.end, **counts)
