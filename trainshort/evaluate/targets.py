"""Models that can be evaluated, behind one interface: runs, checkpoints and Hugging Face models.

`Target` is the interface. `open_target` finds out what a name on the command line means. The text of an evaluation is
described in `trainshort.evaluate.text`.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from trainshort.config.run_config import RunConfig, load_config
from trainshort.data.mlm import mask_token
from trainshort.errors import InputError
from trainshort.evaluate.overrides import Override, apply_override
from trainshort.model.transformer import TransformerLM
from trainshort.train.checkpoint import find_checkpoint, fingerprint, is_hugging_face, load_model, read_state
from trainshort.train.run_data import run_tokenizer

# `trainshort export` writes this file into the exported folder. The file describes the run that was exported.
EXPORTED = "trainshort.json"

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TextTokenizer(Protocol):
    """The methods and attributes of a tokenizer that evaluation uses.

    Attributes:
        name: The name of the tokenizer.
        vocab_size: The number of token types.
        end: The id of the token between documents, or None if the tokenizer has no such token.
        ends_lines: Whether the token `end` stands for the end of a line. `encode` then adds the token after each line.
    """

    name: str
    vocab_size: int
    end: int | None
    ends_lines: ClassVar[bool]

    def encode(self, text: str) -> np.ndarray: ...
    def decode(self, ids: Any) -> str: ...
    def to_json(self) -> str: ...


class Target(ABC):
    """A model that can be evaluated.

    Attributes:
        name: The name of the model in results.
        kind: What the model is: "run" (the best checkpoint of a run), "checkpoint", "huggingface" or "model".
        trained_at: The training length (L in the paper), or None if it is unknown.
        max_length: The longest input that the model supports, or None if no limit is known.
        vocab_size: The number of token types in a text. The mask token of an encoder is not counted.
        bos: The id of the token that the model reads before the first token of a text.
        mask: The id of the mask token of an encoder, or None for a causal model.
        module: The PyTorch module with the weights.
        folder: The folder for results, usually the run folder.
    """

    name: str
    kind: str
    trained_at: int | None
    max_length: int | None = None
    vocab_size: int
    bos: int
    mask: int | None = None
    module: nn.Module
    folder: Path

    @abstractmethod
    def token_nll(
        self, tokens: Int[Tensor, "batch length"], targets: Int[Tensor, "batch length"], first: int
    ) -> Float[Tensor, "batch scored"]:
        """Return the negative log-likelihood (the loss in nats) of each target from position `first` on.

        Args:
            tokens: The inputs.
            targets: The token that the model predicts at each position.
            first: The first position that is scored. Earlier positions are only context.

        Returns:
            The losses of the positions from `first` on, with length - `first` columns.
        """

    @abstractmethod
    def tokenizer(self) -> TextTokenizer:
        """Return the tokenizer of the model.

        Raises:
            InputError: If the model has no tokenizer.
        """

    @abstractmethod
    def extra_description(self) -> dict[str, Any]:
        """Return the entries of `description` that depend on the kind of the model, such as its config."""

    def length_error_reason(self, error: Exception, length: int) -> str | None:
        """Return why the model does not support an input length.

        Args:
            error: The error that the model raised for an input of this length.
            length: The input length.

        Returns:
            The reason, or None if the error has another cause than the length.
        """
        return None

    def for_length(self, override: Override | None, length: int) -> AbstractContextManager[None]:
        """Return a context manager that prepares the model for inputs of a given length.

        Args:
            override: A change of the trained model, or None.
            length: The length of the inputs.

        Raises:
            InputError: If the model does not support overrides.
        """
        if override is None:
            return nullcontext()
        raise InputError(
            f"--{override.option} supports runs of trainshort only, and {self.name} is a Hugging Face model. "
            "Import the model with `trainshort import` and evaluate the imported run."
        )

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next(self.module.parameters()).device

    def description(self) -> dict[str, Any]:
        """Return the description of the model that is stored with results. It can be written as JSON."""
        return {
            "name": self.name,
            "kind": self.kind,  # for example "run" or "checkpoint"
            "trained_at": self.trained_at,
            "max_length": self.max_length,
            "parameters": sum(weight.numel() for weight in self.module.parameters()),
            "weights": fingerprint(self.module),  # a hash of all weights
            **self.extra_description(),
        }


class ModelTarget(Target):
    """A model of trainshort that is in memory. It has no tokenizer, so its text is given as tokens.

    Args:
        model: The model.
        trained_at: The training length.
        name: The name of the model in results.
        bos: The id of the token that the model reads before the first token of a text.
    """

    kind = "model"

    def __init__(self, model: TransformerLM, *, trained_at: int, name: str = "model", bos: int = 0) -> None:
        self.model = model.eval()
        self.module = model
        self.name = name
        self.trained_at = trained_at
        self.bos = bos
        self.folder = Path("runs") / name
        self.max_length = model.position.max_length
        self.vocab_size = model.config.vocab_size
        if not model.config.causal:
            self.mask = mask_token(model.config)
            self.vocab_size -= 1  # A text does not contain the mask token.

    def token_nll(
        self, tokens: Int[Tensor, "batch length"], targets: Int[Tensor, "batch length"], first: int
    ) -> Float[Tensor, "batch scored"]:
        """Return the negative log-likelihood of each target from position `first` on (see `Target.token_nll`)."""
        return self.model.token_nll(tokens, targets, first)

    def tokenizer(self) -> TextTokenizer:
        """Raise `InputError`, because a model in memory has no tokenizer."""
        raise InputError(f"{self.name} has no tokenizer. Pass tokens instead of text, or evaluate a run.")

    def for_length(self, override: Override | None, length: int) -> AbstractContextManager[None]:
        """Return a context manager that runs the model with an override, a change such as other ALiBi slopes.

        Args:
            override: The override. Without an override, the context manager does nothing.
            length: The length of the inputs.
        """
        if override is None:
            return nullcontext()
        # If the training length is unknown, the model is treated as if it was trained at this length.
        training_length = self.trained_at or length
        return apply_override(self.model, override, training_length, length)

    def extra_description(self) -> dict[str, Any]:
        """Return the position method and the config of the model."""
        return {"position": self.model.config.position, "model": self.model.config.model_dump(mode="json")}


class RunTarget(ModelTarget):
    """The best checkpoint of a run, or a chosen checkpoint.

    Args:
        path: A run folder, or the folder of one of its checkpoints.
        device: The device of the model.
        precision: A key of `PRECISIONS`.
        encoders: Whether encoders are accepted.

    Attributes:
        checkpoint: The folder of the checkpoint.
        config: The config of the run.
        step: The training step of the checkpoint.
        run: The run folder. Unlike `folder`, it does not change if results are written to another folder.

    Raises:
        InputError: If there is no valid checkpoint, or if the model is an encoder and `encoders` is False.
    """

    def __init__(self, path: Path, *, device: str = "cpu", precision: str = "float32", encoders: bool = False) -> None:
        self.checkpoint = find_checkpoint(path)
        self.config: RunConfig = load_config(self.checkpoint / "config.json")
        if not encoders:
            self.config.model.require_causal("This command")
        self.step = read_state(self.checkpoint).step

        run_folder = self.checkpoint.parent.parent
        name = run_folder.resolve().name
        is_run_folder = path.resolve() == run_folder.resolve()
        if not is_run_folder:
            name += f" step {self.step}"
        self.kind = "run" if is_run_folder else "checkpoint"

        model = load_model(self.checkpoint, device=device).to(PRECISIONS[precision])
        super().__init__(model, trained_at=self.config.train.length, name=name)
        self.run: Path = run_folder
        self.folder = run_folder
        self._tokenizer = run_tokenizer(run_folder)
        self.bos = self._tokenizer.end or 0

    def tokenizer(self) -> TextTokenizer:
        """Return the tokenizer of the run."""
        return self._tokenizer

    def extra_description(self) -> dict[str, Any]:
        """Return the training step, the position method and the config of the model."""
        return {"step": self.step, **super().extra_description()}


def open_target(
    name: str, *, device: str = "cpu", precision: str = "float32", trained_at: int | None = None, encoders: bool = False
) -> Target:
    """Load the model that a name on the command line means.

    Args:
        name: A run folder, a checkpoint folder, the folder of a Hugging Face model, or the name of a model on the
            Hugging Face Hub.
        device: The device of the model.
        precision: A key of `PRECISIONS`.
        trained_at: The training length. None uses the training length that is stored with the model.
        encoders: Whether encoders are accepted.

    Returns:
        The model.

    Raises:
        InputError: If there is no such model, or if the model cannot be evaluated.
    """
    if precision not in PRECISIONS:
        raise InputError(f"Unknown precision '{precision}'. Expected {' or '.join(PRECISIONS)}.")
    path = Path(name).expanduser()
    if path.is_file():
        raise InputError(f"{path} is a file. Give a run folder, a checkpoint folder, or a Hugging Face model.")
    reject_foreign_export(path)

    target: Target
    if path.is_dir() and not is_hugging_face(path):
        target = RunTarget(path, device=device, precision=precision, encoders=encoders)
    elif path.is_dir() or looks_like_hub_name(name):
        # This import is slow, and runs do not need it.
        from trainshort.evaluate.hf_target import HuggingFaceTarget

        model_name = str(path) if path.is_dir() else name
        target = HuggingFaceTarget(model_name, device=device, precision=precision)
    else:
        raise InputError(f"There is no run or model at '{path}'. `ls runs` lists the runs in this folder.")
    if trained_at is not None:
        target.trained_at = trained_at
    return target


def reject_foreign_export(path: Path) -> None:
    """Raise `InputError` if a folder was exported for another program, such as llama.cpp or CTranslate2.

    trainshort can load its own exports only if they were made with `trainshort export --to hf`.
    """
    is_export = (path / EXPORTED).exists()
    if is_export and not is_hugging_face(path):
        raise InputError(
            f"{path} is an export for another program, and trainshort cannot load it. Give the run that was exported "
            f"(see {path / EXPORTED}), or export the run with --to hf."
        )


def looks_like_hub_name(name: str) -> bool:
    """Return whether a name can be a model on the Hugging Face Hub, such as "gpt2" or "owner/model".

    Names that look like paths, such as "runs/model", "./model" or "a/b/c", are not names on the Hub.
    """
    has_path_prefix = name.startswith(("runs/", ".", "/", "~"))
    return name.count("/") <= 1 and not has_path_prefix and not name.endswith("/")
