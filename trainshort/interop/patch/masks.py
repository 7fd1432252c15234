"""What the queries of a patched Hugging Face model may see, worked out once a call and handed down to each layer.

outermost model   remembers which documents were packed, since two of the three classes drop it on the way
body              works out what may be seen, and builds no mask and no table of biases
block             hands that on as an argument, so that gradient checkpointing finds it again in the backward pass
"""

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from trainshort.errors import InputError

SETTINGS = "_trainshort"
"""On a body: what its attention needs to know."""

Method = Callable[..., Any]
"""Called with the method that it stands for, and then as that."""


@dataclass(frozen=True)
class PatchSettings:
    """What the attention of one model needs to know beside its inputs."""

    slopes: Float[Tensor, " heads"]
    tolerance: float
    counts_tokens: bool
    """Distances are counted in tokens also where padding stands between them (BLOOM, Falcon), not in places (MPT)."""
    report: Any = None
    """What `patch` gave back."""


@dataclass(frozen=True)
class MaskInfo:
    """What the queries of one call may see; takes the place of the written mask."""

    settings: PatchSettings
    total: int
    """Keys, with those of the past."""
    segment_ids: Int[Tensor, "batch keys"] | None
    places: Int[Tensor, "batch keys"] | None
    """Tokens before each key, where padding stands between them and is not to be counted."""
    mask: Tensor | None
    """A mask that the caller wrote out himself."""
    weights: bool
    """The weights are asked for, so they have to be written out."""


_packing_kwargs: ContextVar[dict[str, Tensor]] = ContextVar("packed", default={})  # noqa: B039  (never changed in place)
_seen: ContextVar[MaskInfo | None] = ContextVar("seen", default=None)


def outer_forward(original: Method, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    token = _packing_kwargs.set(_packing(inspect.signature(original).bind(self, *args, **kwargs).arguments))
    try:
        return original(self, *args, **kwargs)
    finally:
        _packing_kwargs.reset(token)


def masks_for_generate(original: Method, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A static cache's length times length mask is not wanted either."""
    return kwargs.get("attention_mask")


def body_forward(original: Method, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    given = bound.arguments
    first = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    if first is None:
        return original(self, *args, **kwargs)  # which says what is missing
    packing = _packing(given) or _packing_kwargs.get()
    cache, mask = given.get("past_key_values"), given.get("attention_mask")
    past = 0 if cache is None else int(cache.get_seq_length())
    asked = given.get("output_attentions")
    asked = self.config.output_attentions if asked is None else asked  # pyright: ignore[reportAttributeAccessIssue]
    seen = build_mask_info(vars(self)[SETTINGS], first, past, mask, packing, bool(asked))
    given["attention_mask"] = torch.zeros(1, 1, 1, 1, device=first.device)  # four dimensions: it is taken as it is
    token = _seen.set(seen)
    try:
        return original(*bound.args, **bound.kwargs)
    finally:
        _seen.reset(token)


def block_call(original: Method, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    seen = _seen.get()
    return original(self, *args, **(kwargs if seen is None else kwargs | {"attention_mask": seen}))


def _packing(given: dict[str, Any]) -> dict[str, Tensor]:
    """Those arguments of a call by which transformers tells packed documents."""
    given = given | given.get("kwargs", {})
    return {name: given[name] for name in ("position_ids", "cu_seq_lens_q") if given.get(name) is not None}


def build_mask_info(
    settings: PatchSettings, first: Tensor, past: int, mask: Tensor | None, packing: Mapping[str, Tensor], weights: bool
) -> MaskInfo:
    """From what transformers is told to what `attend` is."""
    batch, new = first.shape[:2]
    total = past + new
    if mask is not None and mask.dim() == 4:
        return MaskInfo(settings, total, None, None, mask, weights)
    text = None if mask is None else _text(mask, total)
    segment_ids = _segment_ids(packing, batch, new) if past == 0 else None
    if text is not None:
        segment_ids = text.long() if segment_ids is None else torch.where(text, segment_ids, -1)
    places = None
    if text is not None and settings.counts_tokens and _has_holes(text):
        places = text.long().cumsum(1) - 1
    return MaskInfo(settings, total, segment_ids, places, None, weights)


def _text(mask: Tensor, total: int) -> Bool[Tensor, "batch keys"] | None:
    """Where there is text and not padding; none where all is text."""
    if mask.dim() != 2 or mask.shape[1] < total:
        raise InputError(
            f"attention_mask should have a column for each of the {total} keys (those in the cache too); its shape is "
            f"{tuple(mask.shape)}."
        )
    text = mask[:, :total].bool()
    return None if bool(text.all()) else text


def _has_holes(text: Bool[Tensor, "batch keys"]) -> bool:
    """Whether padding stands between tokens: text begins more than once in a row."""
    begins = text[:, 1:] & ~text[:, :-1]
    return bool((begins.sum(1) + text[:, 0] > 1).any())


def _segment_ids(packing: Mapping[str, Tensor], batch: int, new: int) -> Int[Tensor, "batch keys"] | None:
    """Numbers of packed documents, which begin where positions do not go on.

    positions  0 1 2 0 1 0   ->   0 0 0 1 1 2
    """
    if (where := packing.get("position_ids")) is not None and where.dim() == 2 and where.shape[1] == new:
        numbers = (where[:, 1:] != where[:, :-1] + 1).cumsum(1)
        numbers = nn.functional.pad(numbers, (1, 0))
    elif (ends := packing.get("cu_seq_lens_q")) is not None:
        numbers = torch.bucketize(torch.arange(new, device=ends.device), ends[1:].long(), right=True)[None]
    else:
        return None
    return numbers.expand(batch, new) if bool(numbers.any()) else None
