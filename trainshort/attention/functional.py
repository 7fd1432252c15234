"""`attend`: the attention function for training, prefill, chunked prefill and decoding.

The backends are in the other modules of this package and register themselves in `backends`.
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
    active_tracer,
    check_tensors,
    validate,
)
from trainshort.config.registries import backends
from trainshort.errors import InputError

log = logging.getLogger("trainshort.attention")


class AttentionOutput(NamedTuple):
    """The attention output and two statistics of the attention weights.

    `attend(..., return_stats=True)` returns an `AttentionOutput` in which all fields are filled. A backend may leave
    `lse` None if `AttentionCall.needs_lse` is False, and `certificate` None if no key was dropped.

    Attributes:
        out: The attention output, in the dtype of `q`.
        lse: The log-sum-exp of the scores of each query (natural logarithm), in float32 or float64. It has no gradient.
            `merge` uses the log-sum-exp to combine attention over separate ranges of keys.
        certificate: An upper bound on the softmax mass (the sum of attention weights) that was dropped from any query,
            for each batch entry and head. The certificate is at most `tolerance`, and 0 if no key was dropped.
    """

    out: Float[Tensor, "batch heads q_len dim"]
    lse: Float[Tensor, "batch heads q_len"] | None = None
    certificate: Float[Tensor, "batch heads"] | None = None


@runtime_checkable
class Backend(Protocol):
    """An implementation of attention that `attend` can use.

    A backend is an object with the two methods below. It is registered under a name:

        backends.register("mine")(MyBackend())

    A backend may also have these two members:

    - `rank`: a number. `backend="auto"` tries the backends in the order of their ranks, highest rank first. A backend
      without a positive rank is used only if the caller names it.
    - `skip_reason(call)`: a method that returns why `backend="auto"` should prefer another backend, although this
      backend supports the call. It returns None if `backend="auto"` can use this backend.
    """

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        """Return why this backend does not support a call.

        The answer is cached for all calls with the same `AttentionCall.signature`. It must not depend on the values of
        tensors.

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


_logged_messages: set[str] = set()
_backend_cache: dict[tuple[object, ...], Backend] = {}
MAX_CACHED_CHOICES = 4096
"""Choices that are remembered; a text that grows token by token asks for a new one each time."""
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
    return_stats: Literal[False] = ...,
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
    return_stats: Literal[True],
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
    return_stats: bool,
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
        >>> out = attend(q, k, v, bias=LinearBias(alibi.slopes(8)))
        >>> out, lse, certificate = attend(q, k, v, bias=LinearBias(alibi.slopes(8)), return_stats=True)
    """
    call = AttentionCall(q, k, v, bias, window, segment_ids, dropout_p, return_stats, tolerance, scale, causal)
    result = run_attention(call, backend)
    if not return_stats:
        return result.out

    out, lse, certificate = result
    assert lse is not None, "a backend must return the log-sum-exp if it supports the call"
    lse = lse.detach().to(torch.promote_types(q.dtype, torch.float32))
    if certificate is None:
        certificate = q.new_zeros(q.shape[:2], dtype=torch.float32)
    return AttentionOutput(out, lse, certificate)


def run_attention(call: AttentionCall, backend: str = "auto") -> AttentionOutput:
    """Check the arguments of a call, choose a backend and run the call.

    Args:
        call: The arguments of the call.
        backend: The name of a backend, or "auto".

    Returns:
        What the backend returned. The certificate is None if no key was dropped.

    Raises:
        InputError: If an argument is invalid or not supported.
    """
    if 0 < call.tolerance < MIN_TOLERANCE:
        call = replace(call, tolerance=0.0)
    validate(call)
    chosen_backend = choose_backend(call) if backend == "auto" else _get_backend(backend, call)
    return chosen_backend.run(call)


def choose_backend(call: AttentionCall) -> Backend:
    """The backend for a call under 'auto', remembered for all that are like it."""
    if active_tracer() is not None or forward_mode._current_level >= 0:
        return _best_backend(call)
    key = (backends.changes, call.signature)
    backend = _backend_cache.get(key)  # one look: another thread may clear the memory at any time
    if backend is None:
        if len(_backend_cache) >= MAX_CACHED_CHOICES:
            _backend_cache.clear()
        backend = _backend_cache[key] = _best_backend(call)
    return backend


def _get_backend(name: str, call: AttentionCall) -> Backend:
    if reason := backends.get(name).unsupported_reason(call):
        raise InputError(f"Attention backend '{name}' does not support this call: {reason}.")
    return _use_reference_if_short(name, call)


def _use_reference_if_short(name: str, call: AttentionCall) -> Backend:
    """The backend of this name; but the formula itself where one trains through a few keys.

    A kernel's backward pass recomputes the weights from a rounded log-sum-exp. Among a few keys that is most of its
    error, and shows where the formula is exact: one key alone has weight 1 and passes no gradient to its query. So few
    keys are no slower to compute plainly.
    """
    return backends.get("reference" if call.needs_grad and call.k.shape[2] <= MAX_REFERENCE_KEYS else name)


def _best_backend(call: AttentionCall) -> Backend:
    """The backend of the highest rank that can do it; said once in the log.

    Derivatives of any order and direction, and graphs for elsewhere, need plain operations of torch: the formula.
    """
    if active_tracer() == "export" or call.is_transformed:
        log_once("attention backend: reference", "reference", logging.INFO)
        return backends.get("reference")
    reasons = []
    ranks = {name: _rank(name, backend) for name, backend in backends.items()}
    for name in sorted((name for name in ranks if ranks[name] > 0), key=lambda name: -ranks[name]):
        backend = backends.get(name)
        reason = backend.unsupported_reason(call)
        skip_reason = getattr(backend, "skip_reason", None)
        if reason is None and skip_reason is not None:
            reason = skip_reason(call)
        if reason is None:
            passed = f" ({'; '.join(reasons)})" if reasons else ""
            log_once(f"attention backend: {name}{passed}", name, logging.INFO)
            return _use_reference_if_short(name, call)
        reasons.append(f"not {name}: {reason.partition('; use ')[0]}")  # advice for those who named it, not for 'auto'
    raise InputError(f"No attention backend supports this call: {'; '.join(reasons)}.")


def _rank(name: str, backend: Backend) -> int | float:
    rank = getattr(backend, "rank", 0)
    if not isinstance(rank, int | float):
        raise InputError(f"The rank of attention backend '{name}' is {type(rank).__name__}; it must be a number.")
    return rank


@torch.compiler.assume_constant_result  # torch.compile would trace the log
def log_once(message: str, about: str | None = None, level: int = logging.WARNING) -> None:
    if (about or message) not in _logged_messages:
        _logged_messages.add(about or message)
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
        segment_ids = _padding_to_segment_ids(key_padding_mask, segment_ids, (k.shape[0], k.shape[2]))
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
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def _padding_to_segment_ids(
    mask: Tensor, segment_ids: Tensor | None, shape: tuple[int, int]
) -> Int[Tensor, "batch k_len"]:
    """Return segment ids in which each run of padding is a segment of its own.

    Tokens do not see padding, distances between tokens stay the same, and every query sees at least one key.

    Example:
        mask        1 1 0 0 0 1
        segment_ids 1 1 0 0 0 2
    """
    if mask.dtype != torch.bool or mask.shape != shape:
        raise InputError(
            f"key_padding_mask must be boolean, True where a key is padding, of shape (batch, k_len) = {shape}; got "
            f"{mask.dtype} of shape {tuple(mask.shape)}. From a mask that is 1 for tokens, pass `mask == 0`."
        )
    begins = mask.clone()
    begins[:, 1:] &= ~mask[:, :-1]
    runs = begins.cumsum(1)  # every backend supports segments in one piece
    if segment_ids is None:
        return torch.where(mask, runs, 0)
    return torch.where(mask, segment_ids.amin() - runs, segment_ids)


def attend_in_blocks(
    q: Float[Tensor, "batch heads q_len dim"],
    k: Float[Tensor, "batch kv_heads k_len dim"],
    v: Float[Tensor, "batch kv_heads k_len dim"],
    *,
    blocks: int,
    **options: Any,
) -> Float[Tensor, "batch heads q_len dim"]:
    """`attend` in which a query sees its own block of keys and the one before (xPos's blockwise causal attention).

    blocks of 2:   query 0 1 | 2 3 | 4 5    first key 0 0 | 0 0 | 2 2
    """
    total, past, parts = k.shape[2], k.shape[2] - q.shape[2], []
    for first in range(past - past % blocks, total, blocks):
        rows = q[:, :, max(first, past) - past : first + blocks - past]
        keys = slice(max(0, first - blocks), min(first + blocks, total))
        parts.append(attend(rows, k[:, :, keys], v[:, :, keys], **options))
    return torch.cat(parts, dim=2)


def _reject_torchscript() -> None:
    raise InputError(
        "torch.jit.script reads Python of a kind that this function is not written in; use torch.jit.trace or "
        "torch.export, which give a graph of torch's own operators."
    )


for _function in (attend, alibi_attention):  # torch.jit.script asks what it is given, and what that calls, for this
    _function.__prepare_scriptable__ = _reject_torchscript  # pyright: ignore[reportFunctionMemberAccess]
