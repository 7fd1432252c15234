"""The classes that are patched, and how: a module gets a class that is its own with a few methods around the old ones.

Modules, weights and names stay what they are, and giving back the old class undoes it.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from trainshort import alibi
from trainshort.errors import InputError
from trainshort.interop.patch import forward, masks
from trainshort.interop.patch.masks import Method

ORIGINAL = "_trainshort_original"
"""On a class made here: the one it was made of."""


@dataclass(frozen=True)
class Family:
    """One file of transformers: what its parts are called, and what is put around their methods."""

    body: str
    block: str
    attention: str
    ffn: str
    root: str
    """What all its whole models are derived from."""
    attend: Method
    narrow: Method
    slopes: Callable[[Any], Float[Tensor, " heads"]]
    counts_tokens: bool
    quiet: Mapping[str, Any]
    """Of the body: parts that would build a bias nobody reads."""
    has_alibi: Callable[[Any], bool]

    @property
    def module(self) -> str:
        name = self.body.removesuffix("Model").lower()
        return f"transformers.models.{name}.modeling_{name}"

    def part(self, module: nn.Module) -> str | None:
        """Which part of the family a module is."""
        names = {one.__name__ for one in type(module).__mro__ if one.__module__ == self.module}
        for name in ("attention", "ffn", "block", "body"):
            if getattr(self, name) in names:
                return name
        return "outer" if self.root in names else None

    def methods(self, part: str) -> dict[str, Any]:
        match part:
            case "attention":
                return {"forward": self.attend}
            case "ffn":
                return {"forward": self.narrow}
            case "block":
                return {"__call__": masks.block_call}
            case "body":
                return {"forward": masks.body_forward, **self.quiet}
        return {"forward": masks.outer_forward, "create_masks_for_generate": masks.masks_for_generate}


def _falcon_slopes(config: Any) -> Tensor:
    heads = config.num_attention_heads
    return alibi.slopes(heads) / math.sqrt(config.hidden_size // heads)


def _nothing(original: Method, self: nn.Module, *args: Any, **kwargs: Any) -> None:
    return None


FAMILIES = {
    "mpt": Family(
        *("MptModel", "MptBlock", "MptAttention", "MptMLP", "MptPreTrainedModel"),
        attend=forward.mpt_attention,
        narrow=forward.mpt_ffn,
        slopes=lambda config: alibi.slopes(config.n_heads, config.attn_config.alibi_bias_max),
        counts_tokens=False,
        quiet={"build_mpt_alibi_tensor": _nothing},
        has_alibi=lambda config: bool(config.attn_config.alibi),
    ),
    "bloom": Family(
        *("BloomModel", "BloomBlock", "BloomAttention", "BloomMLP", "BloomPreTrainedModel"),
        attend=forward.bloom_attention,
        narrow=forward.bloom_ffn,
        slopes=lambda config: alibi.slopes(config.n_head),
        counts_tokens=True,
        quiet={"build_alibi_tensor": _nothing},
        has_alibi=lambda config: True,
    ),
    "falcon": Family(
        *("FalconModel", "FalconDecoderLayer", "FalconAttention", "FalconMLP", "FalconPreTrainedModel"),
        attend=forward.falcon_attention,
        narrow=forward.falcon_ffn,
        slopes=_falcon_slopes,
        counts_tokens=True,
        quiet={"use_alibi": property(lambda self: False)},
        has_alibi=lambda config: bool(config.alibi),
    ),
}
"""By transformers' model_type."""


# ---- putting a class in a module's place


def wrap_module_class(module: nn.Module, family: str, part: str) -> None:
    """Give a module a class that is its own with the part's methods around the old ones."""
    old = vars(module).get("_old_forward")  # accelerate's hooks keep it there
    if "forward" in vars(module) and not (isinstance(old, MethodType) and old.__func__ is type(module).forward):
        raise InputError(
            f"Something else has already put its own forward into this {type(module).__name__}. Patch the model first, "
            "then wrap it."
        )
    module.__class__ = _make_patched_class(type(module), family, part)
    if old is not None:
        module._old_forward = MethodType(type(module).forward, module)  # pyright: ignore[reportArgumentType]


def unwrap_module_class(module: nn.Module) -> bool:
    """Undo it; whether there was anything to undo."""
    original = vars(type(module)).get(ORIGINAL)
    if original is None:
        return False
    module.__class__ = original
    vars(module).pop(masks.SETTINGS, None)
    if "_old_forward" in vars(module):
        module._old_forward = MethodType(original.forward, module)  # pyright: ignore[reportArgumentType]
    return True


def original_class(module: nn.Module) -> type:
    """A module's class without what was put around it."""
    return vars(type(module)).get(ORIGINAL, type(module))


@functools.cache
def _make_patched_class(base: type, family: str, part: str) -> type:
    namespace: dict[str, Any] = {
        name: _around(getattr(base, name, None), method) if callable(method) else method
        for name, method in FAMILIES[family].methods(part).items()
    }
    namespace |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    namespace |= {ORIGINAL: base, "_can_compile_fullgraph": False}
    namespace["__reduce_ex__"] = lambda self, protocol: (_blank, (base, family, part), self.__dict__)
    return type(base)(base.__name__, (base,), namespace)


def _around(original: Method | None, method: Method) -> Method:
    @functools.wraps(original or method)  # generate and Trainer read the signature
    def around(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(original, self, *args, **kwargs)

    return around


def _blank(base: type, family: str, part: str) -> Any:
    """An empty module of a made class, which a copy or a pickle fills."""
    return object.__new__(_make_patched_class(base, family, part))
