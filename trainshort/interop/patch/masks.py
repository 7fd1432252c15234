"""Tell the attention layers of a patched Hugging Face model which keys each query may attend to.

Three modules of the model take part in each forward pass:

- The outermost model (such as `MptForCausalLM`) stores the arguments that describe packed documents.
- The body (such as `MptModel`) builds one `MaskInfo`. It builds no attention mask and no bias table.
- Each block receives the `MaskInfo` in place of `attention_mask`, also if gradient checkpointing runs the block again.
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
"""The attribute of a patched body that holds its `PatchSettings`."""

ReplacementMethod = Callable[..., Any]
"""A function that replaces a method. Its arguments are the original method, the module, and the call's arguments."""


@dataclass(frozen=True)
class PatchSettings:
    """The settings of the patched attention of one model.

    Attributes:
        slopes: The ALiBi slope of each attention head.
        tolerance: The softmax mass that `attend` may skip for each query where an upper bound is proven.
        skips_padding_in_distances: Whether padding tokens between two tokens do not count for their distance. This is
            True for BLOOM and Falcon, and False for MPT.
        report: The `PatchReport` that `patch` returned for this model.
    """

    slopes: Float[Tensor, " heads"]
    tolerance: float
    skips_padding_in_distances: bool
    report: Any = None


@dataclass(frozen=True)
class MaskInfo:
    """The keys that the queries of one forward pass may attend to. It replaces the attention mask tensor.

    Attributes:
        settings: The settings of the patched attention.
        num_keys: The number of keys, including the keys in the KV cache.
        segment_ids: The document of each key. A query attends only to keys with its own id. Padding has its own id.
            None means that all keys belong to one document.
        token_positions: The position of each key, not counting padding. None means that keys are numbered in order.
        explicit_mask: A mask of four dimensions that the caller passed. None if the caller did not pass such a mask.
        needs_weights: Whether the caller asked for the attention weights.
    """

    settings: PatchSettings
    num_keys: int
    segment_ids: Int[Tensor, "batch keys"] | None
    token_positions: Int[Tensor, "batch keys"] | None
    explicit_mask: Tensor | None
    needs_weights: bool


# The default dictionary is never changed in place.
_packing_kwargs: ContextVar[dict[str, Tensor]] = ContextVar("packing_kwargs", default={})  # noqa: B039
_mask_info: ContextVar[MaskInfo | None] = ContextVar("mask_info", default=None)


def head_model_forward(original: ReplacementMethod, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The new `forward` method of a patched model that has a head, such as `MptForCausalLM`.

    Packed documents are several documents in one row. A document must not attend to the others.

    The arguments that describe packed documents are stored until the call ends, because MPT and BLOOM do not pass
    these arguments on to their body.
    """
    # `bind` finds the name of each argument, including positional arguments.
    bound_arguments = inspect.signature(original).bind(self, *args, **kwargs)
    packing = _packing_arguments(bound_arguments.arguments)
    reset_token = _packing_kwargs.set(packing)
    try:
        return original(self, *args, **kwargs)
    finally:
        _packing_kwargs.reset(reset_token)


def create_masks_for_generate(original: ReplacementMethod, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replace `create_masks_for_generate`, which builds a mask of four dimensions for a static cache.

    The replacement returns the `attention_mask` that the caller passed. `body_forward` converts it to a `MaskInfo`.
    """
    return kwargs.get("attention_mask")


def body_forward(original: ReplacementMethod, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replace `forward` of a body such as `MptModel`.

    The replacement builds a `MaskInfo` from the arguments. `block_call` passes the `MaskInfo` to each block. The
    original method is then called with a small placeholder as its attention mask.
    """
    # `bind` finds the name of each argument, including positional arguments.
    bound_arguments = inspect.signature(original).bind(self, *args, **kwargs)
    arguments = bound_arguments.arguments

    inputs = arguments.get("inputs_embeds")
    if inputs is None:
        inputs = arguments.get("input_ids")
    if inputs is None:
        # The original method raises an error that names the missing argument.
        return original(self, *args, **kwargs)

    packing = _packing_arguments(arguments)
    if not packing:
        # The model with the head stored these arguments, because it does not pass them on.
        packing = _packing_kwargs.get()

    past_length = 0
    cache = arguments.get("past_key_values")
    if cache is not None:
        past_length = int(cache.get_seq_length())

    needs_weights = arguments.get("output_attentions")
    if needs_weights is None:
        needs_weights = self.config.output_attentions  # pyright: ignore[reportAttributeAccessIssue]

    mask_info = build_mask_info(
        vars(self)[SETTINGS],
        inputs,
        past_length=past_length,
        attention_mask=arguments.get("attention_mask"),
        packing=packing,
        needs_weights=bool(needs_weights),
    )
    # transformers uses a mask of four dimensions unchanged and builds no mask of its own.
    arguments["attention_mask"] = torch.zeros(1, 1, 1, 1, device=inputs.device)

    reset_token = _mask_info.set(mask_info)
    try:
        return original(*bound_arguments.args, **bound_arguments.kwargs)
    finally:
        _mask_info.reset(reset_token)


def block_call(original: ReplacementMethod, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replace `__call__` of a transformer block: pass a `MaskInfo` in place of the tensor `attention_mask`.

    A `MaskInfo` describes which keys the queries of the current forward pass may attend to.

    The `MaskInfo` is an argument of the block. Gradient checkpointing therefore stores it and uses it again when it
    recomputes the block in the backward pass.
    """
    mask_info = _mask_info.get()
    if mask_info is not None:
        kwargs = kwargs | {"attention_mask": mask_info}
    return original(self, *args, **kwargs)


def _packing_arguments(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Return the arguments of a call that describe packed documents: `position_ids` and `cu_seq_lens_q`.

    Packed documents are several documents in one row. `position_ids` starts again at 0 at each document, and
    `cu_seq_lens_q` lists where the documents start and end.

    Args:
        arguments: All arguments of the call by name. The entry `kwargs` holds the arguments that the method takes
            as `**kwargs`.

    Returns:
        The arguments that were passed and are not None.
    """
    all_arguments = arguments | arguments.get("kwargs", {})
    packing = {}
    for name in ("position_ids", "cu_seq_lens_q"):
        value = all_arguments.get(name)
        if value is not None:
            packing[name] = value
    return packing


def build_mask_info(
    settings: PatchSettings,
    inputs: Tensor,
    *,
    past_length: int,
    attention_mask: Tensor | None,
    packing: Mapping[str, Tensor],
    needs_weights: bool,
) -> MaskInfo:
    """Convert the mask arguments of a transformers model to a `MaskInfo`.

    Args:
        settings: The settings of the patched attention.
        inputs: The token ids or the input embeddings. Their first two dimensions are batch and sequence length.
        past_length: The number of tokens in the KV cache.
        attention_mask: The mask that the caller passed: two dimensions for padding, or four dimensions for a complete
            mask.
        packing: The arguments that describe packed documents, as `_packing_arguments` returns them.
        needs_weights: Whether the caller asked for the attention weights.

    Raises:
        InputError: If `attention_mask` has a wrong shape.
    """
    batch_size, new_length = inputs.shape[:2]
    num_keys = past_length + new_length
    if attention_mask is not None and attention_mask.dim() == 4:
        return MaskInfo(
            settings,
            num_keys,
            segment_ids=None,
            token_positions=None,
            explicit_mask=attention_mask,
            needs_weights=needs_weights,
        )

    is_token = None
    if attention_mask is not None:
        is_token = _padding_mask(attention_mask, num_keys)

    # Packed documents are only supported in the first forward pass, when the KV cache is empty.
    segment_ids = None
    if past_length == 0:
        segment_ids = _packed_segment_ids(packing, batch_size, new_length)
    if is_token is not None:
        # Padding gets a segment id of its own, so that tokens do not attend to padding.
        if segment_ids is None:
            segment_ids = is_token.long()
        else:
            segment_ids = torch.where(is_token, segment_ids, -1)

    token_positions = None
    if is_token is not None and settings.skips_padding_in_distances and _has_padding_between_tokens(is_token):
        token_positions = is_token.long().cumsum(1) - 1  # the number of tokens before each token

    return MaskInfo(
        settings,
        num_keys,
        segment_ids=segment_ids,
        token_positions=token_positions,
        explicit_mask=None,
        needs_weights=needs_weights,
    )


def _padding_mask(attention_mask: Tensor, num_keys: int) -> Bool[Tensor, "batch keys"] | None:
    """Return a mask that is True for tokens and False for padding, or None if there is no padding.

    Raises:
        InputError: If `attention_mask` is not a matrix with at least one column for each key.
    """
    if attention_mask.dim() != 2 or attention_mask.shape[1] < num_keys:
        raise InputError(
            f"Expected an attention_mask with one column for each of the {num_keys} keys (including the KV cache), "
            f"got shape {tuple(attention_mask.shape)}."
        )
    is_token = attention_mask[:, :num_keys].bool()
    if bool(is_token.all()):
        return None
    return is_token


def _has_padding_between_tokens(is_token: Bool[Tensor, "batch keys"]) -> bool:
    """Return whether a sequence has padding between two of its tokens, and not only before or after all tokens."""
    # A sequence without padding between tokens has only one group of consecutive tokens. The mask 0 1 1 0 1 has two
    # groups. A group starts at a token after padding, or at the first token of the sequence.
    starts_after_padding = is_token[:, 1:] & ~is_token[:, :-1]
    num_token_groups = starts_after_padding.sum(1) + is_token[:, 0]
    return bool((num_token_groups > 1).any())


def _packed_segment_ids(
    packing: Mapping[str, Tensor], batch_size: int, length: int
) -> Int[Tensor, "batch keys"] | None:
    """Return the document number of each token in packed sequences.

    A new document starts where a position id is not the previous position id plus 1:

        position_ids  0 1 2 0 1 0
        segment ids   0 0 0 1 1 2

    If there are no matching position ids, the documents are read from `cu_seq_lens_q`. Its values are the cumulative
    lengths of the documents.

    Args:
        packing: The arguments `position_ids` and `cu_seq_lens_q` that the caller passed.
        batch_size: The number of sequences.
        length: The number of tokens of each sequence.

    Returns:
        The segment ids, or None if the arguments describe only one document.
    """
    position_ids = packing.get("position_ids")
    cumulative_lengths = packing.get("cu_seq_lens_q")
    if position_ids is not None and position_ids.dim() == 2 and position_ids.shape[1] == length:
        is_document_start = position_ids[:, 1:] != position_ids[:, :-1] + 1
        segment_ids = is_document_start.cumsum(1)
        segment_ids = nn.functional.pad(segment_ids, (1, 0))  # The first token belongs to document 0.
    elif cumulative_lengths is not None:
        token_indices = torch.arange(length, device=cumulative_lengths.device)
        document_ends = cumulative_lengths[1:].long()
        segment_ids = torch.bucketize(token_indices, document_ends, right=True)[None]
    else:
        return None

    has_several_documents = bool(segment_ids.any())
    return segment_ids.expand(batch_size, length) if has_several_documents else None
