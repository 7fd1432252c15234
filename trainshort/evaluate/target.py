"""What is evaluated: a run, a checkpoint of it, or any Hugging Face causal language model, behind one small interface.

Scoring needs four things of a model: losses of given targets, the longest input it can read, the length it was trained
at, and its tokenizer. Nothing past this file asks which kind it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from trainshort.checkpoint import find, is_hugging_face, load_model, read_state, sha256_of
from trainshort.config import RunConfig, load_config
from trainshort.data.of_run import run_tokenizer
from trainshort.errors import InputError
from trainshort.evaluate.changes import Change, changed
from trainshort.masking import mask_token, refuse_encoder
from trainshort.model import TransformerLM
from trainshort.terminal import first_sentence

EXPORTED = "trainshort.json"
"""In a folder that export made: what it was made of."""
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TextTokenizer(Protocol):
    """A tokenizer, as far as evaluation needs one."""

    name: str
    vocabulary: int
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
    longest: int | None = None
    """Longest input it can read at all; None: no such limit is known."""
    vocabulary: int
    bos: int
    """Fed to the model as the token before the first."""
    mask: int | None = None
    """An encoder's mask token; None: a causal model."""
    module: nn.Module
    folder: Path
    """Where results go: the run folder, or one like it."""
    change_by: Callable[[Any, Change, int | None, int], AbstractContextManager[None]] | None = None
    """How a model that is not ours is changed at inference; given by whoever may know of interop."""

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

    def refusal(self, error: Exception, length: int) -> str | None:
        """Why the model cannot read `length` tokens, if that is what this error means."""
        return None

    def at(self, change: Change | None, length: int) -> AbstractContextManager[None]:
        """Inside, the model is set up for inputs of this length, changed otherwise if asked for."""
        if change is None:
            return nullcontext()
        raise InputError(f"--{change.option} changes models of trainshort's own; {self.name} is none.")

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def description(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "trained_at": self.trained_at,
            "longest": self.longest,
            "parameters": sum(weight.numel() for weight in self.module.parameters()),
            "weights": fingerprint(self.module),
            **self.describe(),
        }


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
        self.longest = model.position.longest
        self.mask = None if model.config.causal else mask_token(model.config)
        self.vocabulary = model.config.vocabulary - (0 if self.mask is None else 1)

    def token_nll(self, tokens: Tensor, targets: Tensor, first: int) -> Tensor:
        return self.model.token_nll(tokens, targets, first)

    def tokenizer(self) -> TextTokenizer:
        raise InputError(f"{self.name} is a bare model without a tokenizer; give it tokens, or evaluate a run.")

    def at(self, change: Change | None, length: int) -> AbstractContextManager[None]:
        return nullcontext() if change is None else changed(self.model, change, self.trained_at or length, length)

    def describe(self) -> dict[str, Any]:
        return {"position": self.model.config.position, "model": self.model.config.model_dump(mode="json")}


class RunTarget(ModelTarget):
    """The best checkpoint of a run folder, or one checkpoint by its own folder."""

    run: Path
    """The run folder, whose data it was trained on, wherever results go."""

    def __init__(self, path: Path, *, device: str = "cpu", precision: str = "float32", encoders: bool = False) -> None:
        self.checkpoint = find(path)
        self.config: RunConfig = load_config(self.checkpoint / "config.json")
        if not encoders and not self.config.model.causal:
            refuse_encoder("This")
        self.step = read_state(self.checkpoint).step
        folder = self.checkpoint.parent.parent
        self.kind = "run" if path.resolve() == folder.resolve() else "checkpoint"
        super().__init__(
            load_model(self.checkpoint, device=device).to(PRECISIONS[precision]),
            trained_at=self.config.train.length,
            name=folder.resolve().name + ("" if self.kind == "run" else f" step {self.step}"),
        )
        self.folder = self.run = folder
        self._tokenizer = run_tokenizer(folder, self.config.data)
        self.bos = self._tokenizer.end or 0

    def tokenizer(self) -> TextTokenizer:
        return self._tokenizer

    def describe(self) -> dict[str, Any]:
        return {"step": self.step, **super().describe()}


def pick_device(name: str | None) -> str:
    """The device that was asked for, if it is there; else a GPU where there is one."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name).cpu()  # back from it, too: meta takes everything and gives nothing
    except (RuntimeError, AssertionError) as error:
        why = "torch knows no such kind" if "device string" in str(error) else first_sentence(error)
        others = "cpu, cuda or cuda:N" if torch.cuda.is_available() else "cpu"
        raise InputError(f"the device '{name}' is not available here ({why}). Choose {others}.") from None
    return name


def open_target(
    name: str,
    *,
    device: str = "cpu",
    precision: str = "float32",
    trained_at: int | None = None,
    encoders: bool = False,
) -> Target:
    """The model that `name` means: a folder of ours, a folder of Hugging Face's, or a name on its hub."""
    if precision not in PRECISIONS:
        raise InputError(f"precision is {' or '.join(PRECISIONS)}, got '{precision}'.")
    path = Path(name).expanduser()
    if path.is_file():
        raise InputError(f"{path} is a file. Give a run folder, one of its checkpoints, or a Hugging Face model.")
    refuse_foreign_export(path)
    if path.is_dir() and not is_hugging_face(path):
        target: Target = RunTarget(path, device=device, precision=precision, encoders=encoders)
    elif path.is_dir() or looks_like_hub_name(name):
        from trainshort.evaluate.hugging_face import HuggingFaceTarget

        target = HuggingFaceTarget(name, device=device, precision=precision)
    else:
        raise InputError(f"There is no run or model at '{path}'. `ls runs` shows the runs made here.")
    if trained_at is not None:
        target.trained_at = trained_at
    return target


def refuse_foreign_export(path: Path) -> None:
    """A folder for llama.cpp or CTranslate2 holds no model that runs here."""
    if (path / EXPORTED).exists() and not is_hugging_face(path):
        raise InputError(
            f"{path} is an export for another program, which its own commands run. Give the run it was made of (its "
            f"{EXPORTED} says which), or an export by --to hf."
        )


def looks_like_hub_name(name: str) -> bool:
    """`gpt2` and `owner/name`, but not `runs/mine`, `./x` or `a/b/c`: those would be folders here."""
    return name.count("/") <= 1 and not name.startswith(("runs/", ".", "/", "~")) and not name.endswith("/")


def fingerprint(module: nn.Module) -> str:
    """sha256 of all weights by name, so that results of other weights are never mixed up with these."""
    return sha256_of(dict(module.named_parameters()))
