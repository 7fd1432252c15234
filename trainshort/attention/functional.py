"""The attention functions `attend` and `alibi_attention`, and the choice of a backend.

The same functions serve training, prefill, chunked prefill and decoding. The backends are in the package
`trainshort.attention.backends`, and the registry `backends` contains all of them by name.
"""

import logging
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol, overload, runtime_checkable

import torch
import torch.autograd.forward_ad as forward_mode
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trainshort import alibi
from trainshort.attention.call import (
    MIN_TOLERANCE,
    TOLERANCE,
    AttentionCall,
    Bias,
    LinearBias,
    accumulation_dtype,
    active_tracer,
    check_tensors,
    validate,
)
from trainshort.config.registries import backends
from trainshort.errors import InputError

log: logging.Logger = logging.getLogger("trainshort.attention")


class AttentionOutput(NamedTuple):
    """The attention output and two statistics of the attention weights.

    `attend(..., return_stats=True)` returns an `AttentionOutput` in which all fields are filled. A backend may leave
    `lse` None if `AttentionCall.needs_lse` is False, and `certificate` None if no key was dropped.

    Attributes:
        out: The attention output, in the dtype of `q`.
        lse: The log-sum-exp of the scores of each query (natural logarithm), in float32 or float64. The
            log-sum-exp has no gradient. `merge_by_lse` uses the log-sum-exp to combine the attention over two ranges of
            keys.
        certificate: An upper bound on the softmax mass (the sum of attention weights) that was dropped from any query,
            for each batch entry and head. The certificate is at most `tolerance`, and 0 if no key was dropped.
    """

    out: Float[Tensor, "batch heads q_len dim"]
    lse: Float[Tensor, "batch heads q_len"] | None = None
    certificate: Float[Tensor, "batch heads"] | None = None


@runtime_checkable
class Backend(Protocol):
    """An implementation of attention that `attend` can use.

    A backend is an object with the two methods below. The backend is registered under a name:

        backends.register("mine")(MyBackend())

    A backend may also have these two members:

    - `rank`: A number. `backend="auto"` tries the backends in the order of their ranks, highest rank first. A backend
      without a positive rank is used only if the caller names the backend.
    - `skip_reason(call)`: A method that returns why `backend="auto"` should prefer another backend, although this
      backend supports the call. The method returns None if `backend="auto"` can use this backend.
    """

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        """Return why this backend does not support a call.

        The result is cached for all calls with the same `AttentionCall.signature`. The result must not depend on the
        values of tensors.

        Args:
            call: The arguments of the call.

        Returns:
            A reason that tells the user what to do, such as "it supports linear biases only; use 'sdpa'".
            None if the backend supports the call.
        """
        ...

    def run(self, call: AttentionCall) -> AttentionOutput:
        """Compute attention.

        Args:
            call: The arguments of the call. `unsupported_reason` returned None for a call with the same signature.

        Returns:
            The attention output and its statistics.
        """
        ...


# The keys of all messages that `log_once` has logged.
_logged_messages: set[str] = set()

# The backend that `choose_backend` chose for each call signature.
_backend_cache: dict[tuple[object, ...], Backend] = {}

# The cache is cleared when it has this many entries. Text generation needs a new entry for each number of keys.
MAX_CACHED_CHOICES = 4096

# With gradients and at most this many keys, calls are computed by the backend `reference`.
# See `_use_reference_if_short`.
MAX_REFERENCE_KEYS = 16


@overload
def attend(
    q: Float[Tensor, "batch heads q_len dim"],
    k: Float[Tensor, "batch kv_heads k_len dim"],
    v: Float[Tensor, "batch kv_heads k_len dim"],
    *,
    bias: Bias | None = ...,
    window: int | None = ...,
    segment_ids: Int[Tensor, "batch k_len"] | None = ...,
    dropout_p: float = ...,
    scale: float | None = ...,
    backend: str = ...,
    tolerance: float = ...,
    causal: bool = ...,
    return_stats: Literal[False] = ...,  # Without statistics, the result is only the attention output.
) -> Tensor: ...


@overload
def attend(
    q: Float[Tensor, "batch heads q_len dim"],
    k: Float[Tensor, "batch kv_heads k_len dim"],
    v: Float[Tensor, "batch kv_heads k_len dim"],
    *,
    bias: Bias | None = ...,
    window: int | None = ...,
    segment_ids: Int[Tensor, "batch k_len"] | None = ...,
    dropout_p: float = ...,
    scale: float | None = ...,
    backend: str = ...,
    tolerance: float = ...,
    causal: bool = ...,
    return_stats: Literal[True],  # With statistics, the result also has the log-sum-exp of each query.
) -> AttentionOutput: ...


@overload
def attend(
    q: Float[Tensor, "batch heads q_len dim"],
    k: Float[Tensor, "batch kv_heads k_len dim"],
    v: Float[Tensor, "batch kv_heads k_len dim"],
    *,
    bias: Bias | None = ...,
    window: int | None = ...,
    segment_ids: Int[Tensor, "batch k_len"] | None = ...,
    dropout_p: float = ...,
    scale: float | None = ...,
    backend: str = ...,
    tolerance: float = ...,
    causal: bool = ...,
    return_stats: bool,  # If a type checker does not know the value, both results are possible.
) -> Tensor | AttentionOutput: ...


def attend(
    q: Float[Tensor, "batch heads q_len dim"],
    k: Float[Tensor, "batch kv_heads k_len dim"],
    v: Float[Tensor, "batch kv_heads k_len dim"],
    *,
    bias: Bias | None = None,
    window: int | None = None,
    segment_ids: Int[Tensor, "batch k_len"] | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
    tolerance: float = TOLERANCE,
    causal: bool = True,
    return_stats: bool = False,
) -> Tensor | AttentionOutput:
    """Compute scaled dot-product attention. With `causal=True`, the last query is aligned with the last key.

    This alignment is the alignment of FlashAttention and of PyTorch's `causal_lower_right`. PyTorch's `is_causal=True`
    aligns the first query with the first key instead. The alignments differ only if there are fewer queries than keys.

    The distance between query and key for q_len=2 and k_len=5, where '.' marks a key that the query does not see:

        3 2 1 0 .
        4 3 2 1 0

    Args:
        q: The queries. There may be fewer queries than keys, for example when a text is continued token by token.
        k: The keys. The number of query heads must be a multiple of the number of key heads. Consecutive query heads
            then share one key head (grouped-query attention).
        v: The values, with the same shape as `k`.
        bias: The bias that is added to the scores: a `LinearBias`, `DistanceBias`, `DecayBias` or `DenseBias`.
        window: The size of a sliding window. A query sees its own key and the `window - 1` keys before it. With
            `causal=False`, a query also sees the `window - 1` keys after it.
        segment_ids: The segment that each key belongs to, as integers. A query sees only the keys of its own segment.
            The queries belong to the segments of the last keys. Use segments to pack several sequences into one row.
        dropout_p: The probability that an attention weight is dropped.
        scale: The factor applied to the product of query and key. The default is 1 / sqrt(dim).
        backend: The name of a backend, or "auto" for the backend with the highest rank that supports the call.
        tolerance: The softmax mass (the sum of attention weights) that a backend may drop from each query to save
            work. A backend drops keys only if it can prove this bound. With 0, no key is dropped.
        causal: Whether a query sees no keys to its right. Use False for encoders.
        return_stats: Whether to return an `AttentionOutput` with the log-sum-exp and the certificate.

    Returns:
        The attention output with the shape and dtype of `q`, or an `AttentionOutput` if `return_stats` is True.

    Raises:
        InputError: If an argument is invalid, if the named backend does not support the call, or if no backend
            supports the call.

    Example:
        >>> q, k, v = (torch.randn(1, 8, 1024, 64) for _ in range(3))
        >>> bias = LinearBias(alibi.slopes(8))
        >>> attend(q, k, v, bias=bias).shape
        torch.Size([1, 8, 1024, 64])
        >>> out, lse, certificate = attend(q, k, v, bias=bias, return_stats=True)
        >>> lse.shape, certificate.shape
        (torch.Size([1, 8, 1024]), torch.Size([1, 8]))
    """
    call = AttentionCall(
        q,
        k,
        v,
        bias=bias,
        window=window,
        segment_ids=segment_ids,
        dropout_p=dropout_p,
        needs_lse=return_stats,
        tolerance=tolerance,
        scale=scale,
        causal=causal,
    )
    result = run_attention(call, backend)
    if not return_stats:
        return result.out

    out, lse, certificate = result
    assert lse is not None, "A backend must return the log-sum-exp if `needs_lse` is True."
    lse = lse.detach().to(accumulation_dtype(q))
    if certificate is None:
        certificate = q.new_zeros(q.shape[:2], dtype=torch.float32)
    return AttentionOutput(out, lse, certificate)


def run_attention(call: AttentionCall, backend: str = "auto") -> AttentionOutput:
    """Check the arguments of a call, choose a backend and run the call.

    Args:
        call: The arguments of the call.
        backend: The name of a backend, or "auto".

    Returns:
        The output of the backend. `lse` may be None if `call.needs_lse` is False. `certificate` may be None if no key
        was dropped.

    Raises:
        InputError: If an argument is invalid or not supported.
    """
    # float32 cannot represent such small softmax masses well. With tolerance 0, no key is skipped.
    if 0 < call.tolerance < MIN_TOLERANCE:
        call = replace(call, tolerance=0.0)
    validate(call)
    if backend == "auto":
        chosen_backend = choose_backend(call)
    else:
        chosen_backend = _get_backend(backend, call)
    return chosen_backend.run(call)


def choose_backend(call: AttentionCall) -> Backend:
    """Return the backend that `backend="auto"` uses for a call.

    The choice is cached for all calls with the same `AttentionCall.signature`.

    Args:
        call: The arguments of the call.

    Returns:
        The backend with the highest rank that supports the call.

    Raises:
        InputError: If no backend supports the call.
    """
    is_forward_mode = forward_mode._current_level >= 0  # The level is -1 outside of forward-mode differentiation.
    if active_tracer() is not None or is_forward_mode:
        # The choice also depends on the transform that is active, which is not part of the signature.
        return _find_best_backend(call)

    # `backends.changes` counts the changes of the list of backends, such as a backend of a plug-in.
    cache_key = (backends.changes, call.signature)
    # The cache is read only once, because another thread may clear the cache between two reads.
    backend = _backend_cache.get(cache_key)
    if backend is None:
        if len(_backend_cache) >= MAX_CACHED_CHOICES:
            _backend_cache.clear()
        backend = _find_best_backend(call)
        _backend_cache[cache_key] = backend
    return backend


def _get_backend(name: str, call: AttentionCall) -> Backend:
    """Return the backend that the user named, or raise `InputError` if this backend does not support the call."""
    reason = backends.get(name).unsupported_reason(call)
    if reason:
        raise InputError(f"Attention backend '{name}' does not support this call: {reason}.")
    return _use_reference_if_short(name, call)


def _use_reference_if_short(name: str, call: AttentionCall) -> Backend:
    """Return the named backend, or the backend `reference` for calls with gradients and few keys.

    The backward pass of a kernel recomputes the attention weights from the rounded log-sum-exp. With few keys, this
    rounding is most of the total error. For example, a query with a single key has the weight 1 and no gradient, and
    only the backend `reference` returns exactly zero. With few keys, `reference` is not slower.
    """
    if call.needs_grad and call.k.shape[2] <= MAX_REFERENCE_KEYS:
        return backends.get("reference")
    return backends.get(name)


def _find_best_backend(call: AttentionCall) -> Backend:
    """Return the backend with the highest rank that supports the call, and log each chosen backend once."""
    # Graph export, torch.func and forward-mode differentiation require plain PyTorch operations.
    if active_tracer() == "export" or call.is_transformed:
        log_once("attention backend: reference", key="reference", level=logging.INFO)
        return backends.get("reference")

    ranks = {name: _backend_rank(name, backend) for name, backend in backends.items()}
    candidates = [name for name in ranks if ranks[name] > 0]
    candidates.sort(key=lambda name: -ranks[name])

    skipped_backends: list[str] = []  # such as "not flex: FlexAttention has no dropout"
    for name in candidates:
        reason = _reason_not_to_choose(backends.get(name), call)
        if reason is None:
            backend = _use_reference_if_short(name, call)
            if backend is not backends.get(name):
                return backend  # The log names the backend of longer calls only.
            message = f"attention backend: {name}"
            if skipped_backends:
                message += f" ({'; '.join(skipped_backends)})"
            log_once(message, key=name, level=logging.INFO)
            return backend
        # A reason may end with advice such as "; use 'sdpa'". The advice is only for users who named a backend.
        reason_without_advice = reason.partition("; use ")[0]
        skipped_backends.append(f"not {name}: {reason_without_advice}")
    raise InputError(f"No attention backend supports this call: {'; '.join(skipped_backends)}.")


def _reason_not_to_choose(backend: Backend, call: AttentionCall) -> str | None:
    """Return why `backend="auto"` should not use a backend for a call, or None if the backend can be used.

    Either the backend does not support the call, or its method `skip_reason` reports that another backend is preferred.
    """
    reason = backend.unsupported_reason(call)
    skip_reason = getattr(backend, "skip_reason", None)  # This method is optional.
    if reason is None and skip_reason is not None:
        reason = skip_reason(call)
    return reason


def _backend_rank(name: str, backend: Backend) -> int | float:
    """Return the rank of a backend. `backend="auto"` prefers backends with a high rank and never uses rank 0.

    A backend without the attribute `rank` has rank 0.
    """
    rank = getattr(backend, "rank", 0)
    if not isinstance(rank, int | float):
        raise InputError(f"The rank of attention backend '{name}' must be a number, got {type(rank).__name__}.")
    return rank


# torch.compile must not trace the logging, so the decorator runs the function while the graph is compiled.
@torch.compiler.assume_constant_result
def log_once(message: str, key: str | None = None, level: int = logging.WARNING) -> None:
    """Log a message unless a message with the same key was logged before.

    Args:
        message: The message.
        key: The key of the message. The default is the message itself.
        level: The logging level.
    """
    if key is None:
        key = message
    if key not in _logged_messages:
        _logged_messages.add(key)
        log.log(level, message)


def alibi_attention(
    q: Float[Tensor, "batch heads q_len dim"],
    k: Float[Tensor, "batch kv_heads k_len dim"],
    v: Float[Tensor, "batch kv_heads k_len dim"],
    slopes: Float[Tensor, " heads"] | None = None,
    *,
    key_padding_mask: Bool[Tensor, "batch k_len"] | None = None,
    segment_ids: Int[Tensor, "batch k_len"] | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    tolerance: float = TOLERANCE,
    causal: bool = True,
) -> Float[Tensor, "batch heads q_len dim"]:
    """Compute attention with ALiBi (attention with linear biases). The last query is aligned with the last key.

    The function adds `-slopes[h] * (i - j)` to the score of query position i and key position j in head h. With
    `causal=False`, the function adds `-slopes[h] * |i - j|`. Under autocast, `q`, `k` and `v` are cast to the autocast
    dtype, as in PyTorch's `scaled_dot_product_attention`.

    Args:
        q: The queries. There may be fewer queries than keys.
        k: The keys. The number of query heads must be a multiple of the number of key heads (grouped-query attention).
        v: The values, with the same shape as `k`.
        slopes: One slope per query head. The default is the slopes of the ALiBi paper.
        key_padding_mask: True where a key is padding, as in `torch.nn.MultiheadAttention`. Padding may be on the left
            or on the right. The output of padding tokens has no meaning. The `attention_mask` of Hugging Face
            tokenizers is 1 for tokens: pass `attention_mask == 0`.
        segment_ids: The segment that each key belongs to, as integers. A query sees only the keys of its own segment.
        window: The size of a sliding window. A query sees its own key and the `window - 1` keys before it.
        dropout_p: The probability that an attention weight is dropped.
        scale: The factor applied to the product of query and key. The default is 1 / sqrt(dim).
        tolerance: The softmax mass (the sum of attention weights) that may be dropped from each query to save work.
            With 0, no key is dropped.
        causal: Whether a query sees no keys to its right. Use False for encoders.

    Returns:
        The attention output with the shape of `q`.

    Raises:
        InputError: If an argument is invalid or not supported.

    Example:
        >>> q, k, v = (torch.randn(1, 8, 1024, 64) for _ in range(3))
        >>> alibi_attention(q, k, v).shape
        torch.Size([1, 8, 1024, 64])
    """
    q, k, v = _cast_for_autocast(q, k, v)
    check_tensors(q, k, v)
    if key_padding_mask is not None:
        expected_shape = (k.shape[0], k.shape[2])
        segment_ids = _padding_to_segment_ids(key_padding_mask, segment_ids, expected_shape)
    if slopes is None:
        slopes = alibi.slopes(q.shape[1]).to(q.device)
    return attend(
        q,
        k,
        v,
        bias=LinearBias(slopes),
        window=window,
        segment_ids=segment_ids,
        dropout_p=dropout_p,
        scale=scale,
        tolerance=tolerance,
        causal=causal,
    )


def _cast_for_autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast tensors to the autocast dtype if autocast is enabled. Integer and float64 tensors are not cast."""
    device_type = tensors[0].device.type
    # Autocast does not exist for meta tensors.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return list(tensors)

    autocast_dtype = torch.get_autocast_dtype(device_type)
    cast_tensors = []
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.dtype != torch.float64:
            tensor = tensor.to(autocast_dtype)
        cast_tensors.append(tensor)
    return cast_tensors


def _padding_to_segment_ids(
    mask: Tensor, segment_ids: Tensor | None, expected_shape: tuple[int, int]
) -> Int[Tensor, "batch k_len"]:
    """Return segment ids in which each run of padding (consecutive padding keys) is a segment of its own.

    Tokens do not see padding, distances between tokens stay the same, and every query sees at least one key.

    Args:
        mask: True where a key is padding.
        segment_ids: The segment that each key belongs to, or None if each sequence is one segment.
        expected_shape: The shape (batch, k_len) that the mask must have.

    Returns:
        The segment ids. All backends support the result, because no segment of padding is interrupted.

    Raises:
        InputError: If the mask is not boolean or has a wrong shape.

    Example:
        >>> mask = torch.tensor([[True, True, False, False, False, True]])
        >>> _padding_to_segment_ids(mask, None, (1, 6))
        tensor([[1, 1, 0, 0, 0, 2]])
    """
    if mask.dtype != torch.bool or mask.shape != expected_shape:
        raise InputError(
            f"key_padding_mask must be boolean, True where a key is padding, with shape "
            f"(batch, k_len) = {expected_shape}, got {mask.dtype} of shape {tuple(mask.shape)}. "
            "If the mask is 1 for tokens, pass `mask == 0`."
        )
    # A run of padding starts at each padding key that does not follow another padding key.
    starts_run = mask.clone()
    starts_run[:, 1:] &= ~mask[:, :-1]
    run_number = starts_run.cumsum(1)  # The first run of padding has the number 1.
    if segment_ids is None:
        return torch.where(mask, run_number, 0)  # All tokens belong to segment 0.
    # The padding gets ids that are smaller than all ids of the tokens.
    padding_ids = segment_ids.amin() - run_number
    return torch.where(mask, padding_ids, segment_ids)


def attend_in_blocks(
    q: Float[Tensor, "batch heads q_len dim"],
    k: Float[Tensor, "batch kv_heads k_len dim"],
    v: Float[Tensor, "batch kv_heads k_len dim"],
    *,
    blocks: int,
    **options: Any,
) -> Float[Tensor, "batch heads q_len dim"]:
    """Compute blockwise causal attention, as in xPos: a query sees its own block of keys and the previous block.

    For example, with blocks of 2 keys, the queries 2 and 3 see the keys 0 to 3, and the queries 4 and 5 see the keys 2
    to 5. Within its own block, a query sees no keys to its right.

    Args:
        q: The queries. The last query is aligned with the last key.
        k: The keys.
        v: The values, with the same shape as `k`.
        blocks: The number of keys in a block.
        **options: Further arguments of `attend`, such as `bias`.

    Returns:
        The attention output with the shape of `q`.
    """
    k_len = k.shape[2]
    query_start = k_len - q.shape[2]  # the position of the first query
    first_block_start = query_start - query_start % blocks  # the start of the block that contains the first query
    outputs = []
    for block_start in range(first_block_start, k_len, blocks):
        block_end = block_start + blocks
        # Slices of the queries count from the first query.
        first_row = max(block_start, query_start) - query_start
        block_q = q[:, :, first_row : block_end - query_start]
        visible_keys = slice(max(0, block_start - blocks), min(block_end, k_len))
        outputs.append(attend(block_q, k[:, :, visible_keys], v[:, :, visible_keys], **options))
    return torch.cat(outputs, dim=2)


def _reject_torchscript() -> None:
    """Raise an error with advice. torch.jit.script calls this function instead of compiling `attend`."""
    raise InputError(
        "torch.jit.script does not support this function. Use torch.jit.trace or torch.export, which create a graph of "
        "PyTorch operators."
    )


# torch.jit.script calls `__prepare_scriptable__` of every function that it compiles.
for _function in (attend, alibi_attention):
    _function.__prepare_scriptable__ = _reject_torchscript  # pyright: ignore[reportFunctionMemberAccess]
