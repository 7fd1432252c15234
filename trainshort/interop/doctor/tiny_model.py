"""A tiny copy of a Hugging Face model: the same class, settings, heads and number format, with loud random weights.

What is wrong with a class shows on its copy in a second; the model itself, which may have billions of weights, is never
run. Where the copy's family is one that `patch` knows, a patched copy in float64 is the reference.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from trainshort.errors import InputError
from trainshort.interop.patch import PatchReport, apply_patch
from trainshort.interop.patch.families import FAMILIES
from trainshort.interop.patch.masks import SETTINGS

WORDS, LAYERS, LONGEST = 128, 2, 1024
MOST_HEADS = 512
MAX_ERROR = ("max_seq_len", "max_position_embeddings", "n_positions")
"""What configs call the longest input."""


@dataclass(frozen=True)
class TinyModel:
    """What is examined."""

    kind: str
    """transformers' model_type."""
    model_class: type
    config: Any
    """Of the model itself."""
    dtype: torch.dtype = torch.float32
    implementation: str | None = None
    """Of attention, as the model was loaded."""
    patched: PatchReport | None = None
    weights: frozenset[str] = frozenset()
    """Names of the stored tensors, where it is a folder."""
    slopes: dict[str, Tensor] = field(default_factory=dict)
    """Buffers of a loaded model that hold slopes."""

    @property
    def limit(self) -> int | None:
        return next((value for name in MAX_ERROR if isinstance(value := getattr(self.config, name, None), int)), None)

    @property
    def loading(self) -> dict[str, str]:
        return {} if self.implementation is None else {"attn_implementation": self.implementation}

    def tiny(self, *, longest: int = LONGEST, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
        """The copy; settings change its config, `attn_config.x` the one inside."""
        config = small(self.config, longest)
        for name, value in settings.items():
            place, _, last = name.rpartition(".")
            setattr(getattr(config, place) if place else config, last, value)
        with seeded():
            made = self.model_class._from_config(config, **self.loading).eval()  # pyright: ignore[reportAttributeAccessIssue]
            for weight in made.parameters():
                if weight.dim() == 2:
                    torch.nn.init.normal_(weight, 0, weight.shape[1] ** -0.5)
        made = made.to(dtype)
        if self.patched is not None:
            apply_patch(made, self.patched.tolerance)
        return made

    @cached_property
    def reference(self) -> Any:
        """What the settings describe; None for a family that has no ALiBi or is not known."""
        if self.kind not in FAMILIES or not FAMILIES[self.kind].has_alibi(self.config):
            return None
        made = replace(self, patched=None).tiny(dtype=torch.float64)
        apply_patch(made, 0)
        return made

    @contextmanager
    def with_slopes(self, slopes: Tensor) -> Iterator[Any]:
        """The reference with other slopes."""
        body = next(module for module in self.reference.modules() if SETTINGS in vars(module))
        kept = vars(body)[SETTINGS]
        vars(body)[SETTINGS] = replace(kept, slopes=slopes)
        try:
            yield self.reference
        finally:
            vars(body)[SETTINGS] = kept


def small(config: Any, longest: int) -> Any:
    """A config of the same settings and heads, with little of everything else."""
    if config.model_type == "trainshort":
        return _small_of_ours(config)
    made = copy.deepcopy(config)
    heads = getattr(made, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1:
        raise InputError(f"A model of type '{made.model_type}' does not say how many heads it has.")
    if heads > MOST_HEADS:
        raise InputError(f"The config says {heads:,} heads; a copy with more than {MOST_HEADS} would not be small.")
    width = heads * (16 if heads <= 32 else 8)
    changed = {"hidden_size": width, "num_hidden_layers": LAYERS, "vocab_size": WORDS}
    for name, value in {
        "intermediate_size": 2 * width,
        "ffn_hidden_size": 4 * width,
        "head_dim": width // heads,
    }.items():
        if isinstance(getattr(made, name, None), int):
            changed[name] = value
    changed |= {name: longest for name in MAX_ERROR if isinstance(getattr(made, name, None), int)}
    changed |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "quantization_config"))
    if isinstance(kinds := getattr(made, "layer_types", None), list):
        changed["layer_types"] = kinds[:LAYERS]
    for name, value in changed.items():
        try:
            setattr(made, name, value)
        except AttributeError:  # computed from the others
            continue
    return made


def _small_of_ours(config: Any) -> Any:
    from trainshort.config.run_config import ModelConfig

    model = ModelConfig.parse(config.model)
    width = model.heads * 16
    shape = {"layers": LAYERS, "width": width, "vocab_size": WORDS, "adaptive": None, "feedforward_width": 4 * width}
    return type(config).from_model_config(model.replace(**shape))


@contextmanager
def seeded() -> Iterator[None]:
    """The same weights each time, and nobody else's randomness touched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def text(length: int) -> Tensor:
    return torch.randint(1, WORDS, (1, length), generator=torch.Generator().manual_seed(length))
