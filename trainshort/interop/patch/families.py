"""Describe the transformers classes that `patch` supports, and replace the classes of modules.

A patched module gets a subclass of its own class, in which a few methods are replaced. The module object, its weights
and its attribute names do not change. Restoring the original class undoes the patch.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor, nn

from trainshort import alibi
from trainshort.errors import InputError
from trainshort.interop.patch import forward, masks
from trainshort.interop.patch.masks import ReplacementMethod

Part = Literal["attention", "ffn", "block", "body", "head_model"]
"""A kind of module that is patched. A head model is a complete model such as `MptForCausalLM`."""

ORIGINAL_CLASS = "_trainshort_original"
"""The attribute of a patched class that holds the original class."""


@dataclass(frozen=True)
class Family:
    """The classes of one transformers model family, and the methods that replace their methods.

    Attributes:
        body: The class name of the model without a head.
        block: The class name of a transformer block.
        attention: The class name of the attention module.
        ffn: The class name of the feed-forward module.
        base_class: The class name from which all models of the family are derived.
        attention_forward: The replacement for `forward` of the attention module.
        ffn_forward: The replacement for `forward` of the feed-forward module.
        slopes: A function that computes the ALiBi slopes from a model config.
        skips_padding_in_distances: Whether padding between two tokens does not count for their distance.
        disabled_members: Replacements for members of the body that would build a bias table. The patched attention does
            not need the bias table.
        has_alibi: A function that returns whether a model config uses ALiBi.
    """

    body: str
    block: str
    attention: str
    ffn: str
    base_class: str
    attention_forward: ReplacementMethod
    ffn_forward: ReplacementMethod
    slopes: Callable[[Any], Float[Tensor, " heads"]]
    skips_padding_in_distances: bool
    disabled_members: Mapping[str, Any]
    has_alibi: Callable[[Any], bool]

    @property
    def module_path(self) -> str:
        """The import path of the transformers module that defines the classes of the family."""
        name = self.body.removesuffix("Model").lower()
        return f"transformers.models.{name}.modeling_{name}"

    def find_part(self, module: nn.Module) -> Part | None:
        """Return which part of a model a module is, or None if the module does not belong to this family of models.

        A module of a subclass (such as a patched class) counts as the same part as its base class.
        """
        # Only classes of this transformers module count, because other packages may use the same class names.
        class_names = {base.__name__ for base in type(module).__mro__ if base.__module__ == self.module_path}
        if self.attention in class_names:
            return "attention"
        if self.ffn in class_names:
            return "ffn"
        if self.block in class_names:
            return "block"
        if self.body in class_names:
            return "body"
        if self.base_class in class_names:
            return "head_model"
        return None

    def replaced_members(self, part: Part) -> dict[str, Any]:
        """Return the methods and other members of a class that `trainshort.patch` replaces, by name.

        A value is a `ReplacementMethod`, or an object such as a property that replaces the member directly.

        Args:
            part: Which part of a model the class is.
        """
        match part:
            case "attention":
                return {"forward": self.attention_forward}
            case "ffn":
                return {"forward": self.ffn_forward}
            case "block":
                return {"__call__": masks.block_call}
            case "body":
                return {"forward": masks.body_forward, **self.disabled_members}
            case "head_model":
                return {
                    "forward": masks.head_model_forward,
                    "create_masks_for_generate": masks.create_masks_for_generate,
                }


def _falcon_slopes(config: Any) -> Tensor:
    """Return the slopes of a Falcon model: the usual ALiBi slopes, divided by the square root of the head width.

    Falcon adds the ALiBi bias to the attention scores and then divides the sum by this square root.
    """
    num_heads = config.num_attention_heads
    head_dim = config.hidden_size // num_heads
    return alibi.slopes(num_heads) / math.sqrt(head_dim)


def _return_none(original: ReplacementMethod, self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Replace a method that builds the ALiBi bias table. The patched attention does not need the table."""
    return None


FAMILIES = {
    "mpt": Family(
        body="MptModel",
        block="MptBlock",
        attention="MptAttention",
        ffn="MptMLP",
        base_class="MptPreTrainedModel",
        attention_forward=forward.mpt_attention,
        ffn_forward=forward.mpt_ffn,
        slopes=lambda config: alibi.slopes(config.n_heads, config.attn_config.alibi_bias_max),
        skips_padding_in_distances=False,
        disabled_members={"build_mpt_alibi_tensor": _return_none},
        has_alibi=lambda config: bool(config.attn_config.alibi),
    ),
    "bloom": Family(
        body="BloomModel",
        block="BloomBlock",
        attention="BloomAttention",
        ffn="BloomMLP",
        base_class="BloomPreTrainedModel",
        attention_forward=forward.bloom_attention,
        ffn_forward=forward.bloom_ffn,
        slopes=lambda config: alibi.slopes(config.n_head),
        skips_padding_in_distances=True,
        disabled_members={"build_alibi_tensor": _return_none},
        has_alibi=lambda config: True,
    ),
    "falcon": Family(
        body="FalconModel",
        block="FalconDecoderLayer",
        attention="FalconAttention",
        ffn="FalconMLP",
        base_class="FalconPreTrainedModel",
        attention_forward=forward.falcon_attention,
        ffn_forward=forward.falcon_ffn,
        slopes=_falcon_slopes,
        skips_padding_in_distances=True,
        disabled_members={"use_alibi": property(lambda self: False)},
        has_alibi=lambda config: bool(config.alibi),
    ),
}
"""The supported families by the `model_type` of their Hugging Face config."""


# ---- replacing the class of a module


def wrap_module_class(module: nn.Module, family: str, part: Part) -> None:
    """Replace the class of a module by a subclass with the patched methods.

    Args:
        module: The module to patch.
        family: The key of the module's family in `FAMILIES`.
        part: Which part of a model the module is, such as "attention".

    Raises:
        InputError: If another tool has already replaced the module's `forward`. Hooks of accelerate are allowed.
    """
    # The hooks of accelerate replace `forward` on the instance and store the original method in `_old_forward`.
    accelerate_forward = vars(module).get("_old_forward")
    has_accelerate_hook = False
    if isinstance(accelerate_forward, MethodType):
        has_accelerate_hook = accelerate_forward.__func__ is type(module).forward
    if "forward" in vars(module) and not has_accelerate_hook:
        raise InputError(
            f"Cannot patch this {type(module).__name__}: another tool has already replaced its forward method. "
            "Patch the model first, then apply the other tool."
        )
    module.__class__ = _make_patched_class(type(module), family, part)
    # The hook of accelerate must call the patched method.
    if accelerate_forward is not None:
        module._old_forward = MethodType(type(module).forward, module)  # pyright: ignore[reportArgumentType]


def unwrap_module_class(module: nn.Module) -> bool:
    """Restore the original class of a patched module.

    Returns:
        True if the module was patched. False if it was not patched. An unpatched module is not changed.
    """
    original = vars(type(module)).get(ORIGINAL_CLASS)
    if original is None:
        return False
    module.__class__ = original
    vars(module).pop(masks.SETTINGS, None)
    if "_old_forward" in vars(module):  # An accelerate hook calls this method.
        module._old_forward = MethodType(original.forward, module)  # pyright: ignore[reportArgumentType]
    return True


def original_class(module: nn.Module) -> type:
    """Return the class that a module had before it was patched. Return its current class if it is not patched."""
    return vars(type(module)).get(ORIGINAL_CLASS, type(module))


@functools.cache
def _make_patched_class(base: type, family: str, part: Part) -> type:
    """Create a subclass of `base` with the patched methods. The subclass has the same name and docstring as `base`.

    Args:
        base: The original class of a module, such as `MptAttention`.
        family: The key of the family in `FAMILIES`.
        part: Which part of the family the class is.
    """
    namespace: dict[str, Any] = {}
    for name, replacement in FAMILIES[family].replaced_members(part).items():
        if callable(replacement):
            namespace[name] = _bind_replacement(getattr(base, name, None), replacement)
        else:
            namespace[name] = replacement  # for example a property

    namespace["__module__"] = base.__module__
    namespace["__qualname__"] = base.__qualname__
    namespace["__doc__"] = base.__doc__
    namespace[ORIGINAL_CLASS] = base
    # With this setting, transformers does not compile the model in `generate`.
    namespace["_can_compile_fullgraph"] = False

    def reduce_module(self: Any, protocol: int) -> tuple[Any, ...]:
        """Support copy and pickle. The patched class cannot be imported by its name, so it is created again."""
        return _create_empty_module, (base, family, part), self.__dict__

    namespace["__reduce_ex__"] = reduce_module
    metaclass = type(base)
    return metaclass(base.__name__, (base,), namespace)


def _bind_replacement(original: ReplacementMethod | None, replacement: ReplacementMethod) -> ReplacementMethod:
    """Return a method that calls `replacement` with the original method as its first argument.

    The returned method has the signature of the original method, because `generate` and `Trainer` inspect signatures.

    Args:
        original: The method of the unpatched class, or None if that class has no such method.
        replacement: The function that runs in place of the original method.
    """

    @functools.wraps(original or replacement)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    return method


def _create_empty_module(base: type, family: str, part: Part) -> Any:
    """Create a module of a patched class without calling `__init__`. Copy and pickle then restore its attributes."""
    return object.__new__(_make_patched_class(base, family, part))
