"""Build a small random copy of a Hugging Face model: the same class, the same settings and the same number of heads.

A bug of a model class also appears in a small copy, and the copy runs in about a second. The real model is never run.
For families that `patch` supports, a patched copy in float64 is the reference that the copy is compared with.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trainshort.errors import InputError
from trainshort.interop.patch import PatchReport, apply_patch
from trainshort.interop.patch.families import FAMILIES
from trainshort.interop.patch.masks import SETTINGS

VOCAB_SIZE = 128
NUM_LAYERS = 2
MAX_LENGTH = 1024
MAX_HEADS = 512
"""The largest number of heads for which a copy is built. A model with more heads would not be small."""

MAX_LENGTH_SETTINGS = ("max_seq_len", "max_position_embeddings", "n_positions")
"""The settings of Hugging Face configs that limit the input length."""


@dataclass(frozen=True)
class TinyModelBuilder:
    """Builds small copies of the Hugging Face model that `doctor` examines.

    Attributes:
        model_type: The `model_type` of the Hugging Face config.
        model_class: The class of the model, such as `MptForCausalLM`.
        config: The config of the full-size model.
        dtype: The data type of the weights.
        implementation: The attention implementation with which the model was loaded, such as "sdpa". None means the
            default.
        patch_report: The report of `patch`, if the model is patched.
        weight_names: The names of the tensors in the weight files. Empty if the model was passed as a loaded module.
        slope_buffers: The buffers of a loaded model that hold ALiBi slopes, by name.
    """

    model_type: str
    model_class: type
    config: Any
    dtype: torch.dtype = torch.float32
    implementation: str | None = None
    patch_report: PatchReport | None = None
    weight_names: frozenset[str] = frozenset()
    slope_buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def max_length_setting(self) -> str | None:
        """The name of the config's setting that limits the input length, or None if the config has no such setting."""
        for name in MAX_LENGTH_SETTINGS:
            if isinstance(getattr(self.config, name, None), int):
                return name
        return None

    @property
    def load_options(self) -> dict[str, str]:
        """The keyword arguments for the function of transformers that creates or loads a model."""
        if self.implementation is None:
            return {}
        return {"attn_implementation": self.implementation}

    @property
    def has_known_alibi(self) -> bool:
        """Whether the model uses ALiBi and belongs to a family that `patch` supports."""
        return self.model_type in FAMILIES and FAMILIES[self.model_type].has_alibi(self.config)

    def without_patch(self) -> "TinyModelBuilder":
        """Return a builder of copies that are not patched, even if the original model is patched."""
        return replace(self, patch_report=None)

    def build(self, *, max_length: int = MAX_LENGTH, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
        """Build a small copy with random weights. The weights are the same in every call.

        Args:
            max_length: The longest input of the copy.
            dtype: The data type of the copy.
            **settings: Settings of the config to change. A name with a dot, such as `attn_config.alibi`, is a setting
                of a nested config.

        Returns:
            The model in evaluation mode. It is patched if the original model is patched.
        """
        config = make_small_config(self.config, max_length)
        for name, value in settings.items():
            nested_name, _, setting = name.rpartition(".")
            changed_config = getattr(config, nested_name) if nested_name else config
            setattr(changed_config, setting, value)

        with fixed_seed():
            # `getattr` with a fixed name, because the type checker does not know this method.
            create_from_config: Any = getattr(self.model_class, "_from_config")  # noqa: B009
            model = create_from_config(config, **self.load_options).eval()
            for weight in model.parameters():
                # Larger weights than those of a new model, so that errors in the attention change the logits clearly.
                if weight.dim() == 2:
                    torch.nn.init.normal_(weight, mean=0, std=weight.shape[1] ** -0.5)
        model = model.to(dtype)
        if self.patch_report is not None:
            apply_patch(model, self.patch_report.tolerance)
        return model

    @cached_property
    def reference(self) -> Any:
        """A small copy that `patch` changed, in float64. The copy computes ALiBi correctly.

        Only models with `has_known_alibi` have a reference.
        """
        model = self.without_patch().build(dtype=torch.float64)
        apply_patch(model, tolerance=0)
        return model

    @contextmanager
    def reference_with_slopes(self, slopes: Float[Tensor, " heads"]) -> Iterator[Any]:
        """Context manager: change the ALiBi slopes of the reference model. At the end, restore its slopes.

        Args:
            slopes: One slope for each attention head.

        Yields:
            The reference model with these slopes.
        """
        # `patch` stores its settings, with the slopes, as an attribute of the model without its head.
        patched_bodies = [module for module in self.reference.modules() if SETTINGS in vars(module)]
        body_attributes = vars(patched_bodies[0])
        original_settings = body_attributes[SETTINGS]
        body_attributes[SETTINGS] = replace(original_settings, slopes=slopes)
        try:
            yield self.reference
        finally:
            body_attributes[SETTINGS] = original_settings


def make_small_config(config: Any, max_length: int) -> Any:
    """Return a copy of a Hugging Face config with the same number of heads, but few layers and a small width.

    Args:
        config: The config of the full-size model.
        max_length: The value for the settings that limit the input length.

    Raises:
        InputError: If the config has no valid number of heads, or more than `MAX_HEADS`.
    """
    if config.model_type == "trainshort":
        return _make_small_trainshort_config(config)

    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1:
        raise InputError(f"Cannot examine a model of type '{config.model_type}': its config has no number of heads.")
    if heads > MAX_HEADS:
        raise InputError(f"Cannot examine a model with {heads:,} attention heads. At most {MAX_HEADS} are supported.")

    head_dim = 16 if heads <= 32 else 8  # Narrower heads keep a copy with many heads small.
    width = heads * head_dim
    small_settings: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": NUM_LAYERS, "vocab_size": VOCAB_SIZE}
    # These settings are changed only if the config has a number for them.
    optional_sizes = {"intermediate_size": 2 * width, "ffn_hidden_size": 4 * width, "head_dim": head_dim}
    for name in MAX_LENGTH_SETTINGS:
        optional_sizes[name] = max_length
    for name, size in optional_sizes.items():
        if isinstance(getattr(config, name, None), int):
            small_settings[name] = size

    # Special tokens can be outside the small vocabulary. A small copy is not quantized.
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "quantization_config"):
        small_settings[name] = None
    layer_types = getattr(config, "layer_types", None)
    if isinstance(layer_types, list):
        small_settings["layer_types"] = layer_types[:NUM_LAYERS]

    small_config = copy.deepcopy(config)
    for name, value in small_settings.items():
        try:
            setattr(small_config, name, value)
        except AttributeError:  # A property without a setter. It is computed from other settings.
            continue
    return small_config


def _make_small_trainshort_config(config: Any) -> Any:
    """Return a copy of the Hugging Face config of a trainshort model, with few layers and a small width."""
    from trainshort.config.run_config import ModelConfig

    # The Hugging Face config stores the config of the trainshort model in its attribute `model`.
    model_config = ModelConfig.parse(config.model)
    width = model_config.heads * 16  # 16 dimensions for each head
    small_model_config = model_config.replace(
        layers=NUM_LAYERS,
        width=width,
        vocab_size=VOCAB_SIZE,
        adaptive=None,  # Adaptive embeddings need a large vocabulary.
        feedforward_width=4 * width,
    )
    return type(config).from_model_config(small_model_config)


@contextmanager
def fixed_seed() -> Iterator[None]:
    """Context manager: seed PyTorch's random number generator. At the end, restore its previous state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def random_tokens(length: int) -> Int[Tensor, "1 length"]:
    """Return random token ids for a small copy. The same length always gives the same token ids."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(1, VOCAB_SIZE, (1, length), generator=generator)
