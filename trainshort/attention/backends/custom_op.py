"""The PyTorch operator `torch.ops.trainshort.attention`, its gradient, and its output shapes for torch.compile.

The backends `windowed` and `compiled` use the operator. The operator calls the compiled C kernel (ctypes_call.py), or
computes the attention in plain PyTorch (windowed_torch.py) if the kernel cannot be built. A PyTorch operator takes only
tensors and numbers, so the fields of an `AttentionCall` are passed as separate arguments.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from trainshort.attention.backends import bidirectional, ctypes_call, windowed_torch
from trainshort.attention.backends.bidirectional import CausalGradients
from trainshort.attention.backends.windowed_torch import count_query_tiles
from trainshort.attention.call import (
    BIAS_TYPES,
    AttentionCall,
    BiasKind,
    accumulation_dtype,
    bias_kind_of,
    contiguous_rows,
    reduce_bias_grad,
)


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return why the custom operator does not support an attention call, or None if the operator supports the call.

    The type of the bias is not checked here. The backends that use the operator check the type.
    """
    if call.q.device.type != "cpu":
        return "it runs on the CPU; use 'flex' or 'sdpa'"
    if call.dropout_p:
        return "it has no dropout; use 'sdpa'"
    if call.q.dtype not in ctypes_call.DTYPE_CODES:
        return f"it does not compute in {call.q.dtype}; use float32, bfloat16, float16 or float64"
    k_len = call.k.shape[2]
    if k_len > ctypes_call.MAX_KEYS:
        return f"it supports at most {ctypes_call.MAX_KEYS:,} keys, got {k_len:,}; use 'sdpa'"
    if call.has_split_segments:
        return bidirectional.SPLIT_SEGMENTS_MESSAGE
    if call.is_transformed:
        return "its kernel does not support torch.func and forward-mode derivatives; use 'reference'"
    return None


@torch.library.custom_op("trainshort::attention", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    bias_kind: int,
    segment_ids: Tensor | None,
    window: int | None,
    scale: float,
    tolerance: float,
    compiled: bool,
    bias_right: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute attention on the CPU, with the compiled kernel or in PyTorch.

    Args:
        q: The queries.
        k: The keys.
        v: The values.
        bias: The bias of the keys to the left of the query. `bias_kind` says what the tensor contains.
        bias_kind: A value of `BiasKind`.
        segment_ids: The segment that each key belongs to, or None.
        window: The size of a sliding window, or None.
        scale: The factor applied to the product of query and key.
        tolerance: The softmax mass that may be dropped from each query.
        compiled: Whether to use the compiled kernel if it is available.
        bias_right: The bias of the keys to the right of the query. None means causal attention.

    Returns:
        The attention output.
        The log-sum-exp, in float64 because the backward pass computes the attention weights from the log-sum-exp.
        The first key that each query tile (group of query rows) reads.
        An upper bound on the softmax mass that each query tile dropped.

        Without a causal mask, the query tiles of the right side follow the query tiles of the left side.
    """
    call = _rebuild_call(q, k, v, bias, bias_kind, segment_ids, window, scale, tolerance, bias_right)
    if not call.causal:
        return bidirectional.forward(call, compiled)

    out, lse, first_keys, dropped_mass = _allocate_outputs(q)
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    if compiled and ctypes_call.has_kernel(q.shape[3], q.dtype):
        ctypes_call.run_kernel(
            "trainshort_forward",
            bias=bias,
            bias_kind=BiasKind(bias_kind),
            segment_ids=segment_ids,
            window=window,
            scale=scale,
            tolerance=tolerance,
            tensors={
                "q": q,
                "k": k,
                "v": v,
                "out": out,
                "lse": lse,
                "first_keys": first_keys,
                "dropped_mass": dropped_mass,
            },
        )
    else:
        windowed_torch.forward(replace(call, q=q, k=k, v=v), out, lse, first_keys, dropped_mass)
    return out, lse, first_keys, dropped_mass


@torch.library.custom_op("trainshort::attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    bias_kind: int,
    segment_ids: Tensor | None,
    window: int | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
    first_keys: Tensor,
    compiled: bool,
    bias_right: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of the operator `trainshort::attention`.

    Args:
        grad_out: The gradient of the attention output.
        q: The queries.
        k: The keys.
        v: The values.
        bias: The bias of the keys to the left of the query. `bias_kind` says what the tensor contains.
        bias_kind: A value of `BiasKind`.
        segment_ids: The segment that each key belongs to, or None.
        window: The size of a sliding window, or None.
        scale: The factor applied to the product of query and key.
        out: The attention output of the forward pass.
        lse: The log-sum-exp of the forward pass.
        first_keys: The first key that each query tile (group of query rows) read in the forward pass.
        compiled: Whether to use the compiled kernel if it is available.
        bias_right: The bias of the keys to the right of the query. None means causal attention.

    Returns:
        The gradients of `q`, `k`, `v`, `bias` and `bias_right`. The bias gradients are float64. The gradient of slopes
        is not computed, so its tensor is empty. The gradient of `bias_right` is also empty for causal attention.
    """
    # The tolerance has no effect, because the backward pass reads the keys that the forward pass read.
    call = _rebuild_call(q, k, v, bias, bias_kind, segment_ids, window, scale, 0.0, bias_right)
    if not call.causal:
        causal_backward = partial(_causal_backward, compiled=compiled)
        return bidirectional.backward(call, grad_out, out, lse, first_keys, causal_backward)
    grads = _causal_backward(call, grad_out, out, lse, first_keys, compiled=compiled)
    grad_bias = reduce_bias_grad(call, grads.bias_keys, grads.bias_queries)
    return grads.q, grads.k, grads.v, grad_bias, lse.new_empty(0)


def _causal_backward(
    call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, first_keys: Tensor, compiled: bool
) -> CausalGradients:
    """Compute the gradients of one causal call, with the compiled kernel or in PyTorch.

    Args:
        call: The arguments of the call.
        grad_out: The gradient of the attention output.
        out: The attention output of the forward pass.
        lse: The log-sum-exp of the forward pass.
        first_keys: The first key that each query tile (group of query rows) read in the forward pass.
        compiled: Whether to use the compiled kernel if it is available.
    """
    bias = call.bias_tensors[0]
    bias_kind = bias_kind_of(call.bias)
    grad_q = _empty_like_contiguous(call.q)
    grad_k = _empty_like_contiguous(call.k)
    grad_v = _empty_like_contiguous(call.v)
    q, k, v, grad_out = (contiguous_rows(x) for x in (call.q, call.k, call.v, grad_out))

    # The gradient of q is a sum over ranges of keys, so the sum is computed in float32 or float64.
    if q.dtype == accumulation_dtype(q):
        total_grad_q = grad_q.zero_()
    else:
        total_grad_q = torch.zeros(q.shape, dtype=accumulation_dtype(q))
    grad_bias_keys = _allocate_bias_grad(q, k, bias_kind).zero_()
    query_grad_shape = q.shape[:3] if bias_kind == BiasKind.DECAY else (0,)
    grad_bias_queries = q.new_zeros(query_grad_shape, dtype=torch.float64)

    if compiled and ctypes_call.has_kernel(q.shape[3], q.dtype):
        tensors = {
            "q": q,
            "k": k,
            "v": v,
            "out": out,
            "grad_out": grad_out,
            "lse": lse,
            "first_keys": first_keys,
            "grad_q": total_grad_q,
            "grad_k": grad_k,
            "grad_v": grad_v,
            "grad_out_dot_out": torch.empty_like(lse, dtype=total_grad_q.dtype),
        }
        if bias_kind == BiasKind.TABLE:
            tensors["grad_table"] = grad_bias_keys
        if bias_kind == BiasKind.DECAY:
            tensors["grad_decay_keys"] = grad_bias_keys
            tensors["grad_decay_queries"] = grad_bias_queries
        ctypes_call.run_kernel(
            "trainshort_backward",
            bias=bias,
            bias_kind=bias_kind,
            segment_ids=call.segment_ids,
            window=call.window,
            scale=call.softmax_scale,
            tolerance=0.0,
            tensors=tensors,
        )
    else:
        torch_call = replace(call, q=q, k=k, v=v)
        grads = (total_grad_q, grad_k, grad_v)
        if bias_kind == BiasKind.DECAY:
            grad_bias_keys, grad_bias_queries = windowed_torch.backward_decay(
                torch_call, grad_out, out, lse, first_keys, grads
            )
        else:
            windowed_torch.backward(torch_call, grad_out, out, lse, first_keys, grads)

    if total_grad_q is not grad_q:
        grad_q.copy_(total_grad_q)
    return CausalGradients(grad_q, grad_k, grad_v, grad_bias_keys, grad_bias_queries)


def _rebuild_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    bias_kind: int,
    segment_ids: Tensor | None,
    window: int | None,
    scale: float,
    tolerance: float,
    bias_right: Tensor | None,
) -> AttentionCall:
    """Build an `AttentionCall` from the arguments of the operator.

    A PyTorch operator accepts only tensors and numbers, so the bias arrives as a tensor and the number of its type.
    `bias_right` is the bias for the keys after each query. The call is causal if `bias_right` is None.
    """
    bias_type = BIAS_TYPES[BiasKind(bias_kind)]
    return AttentionCall(
        q,
        k,
        v,
        bias=bias_type(bias, bias_right),
        window=window,
        segment_ids=segment_ids,
        tolerance=tolerance,
        scale=scale,
        causal=bias_right is None,
    )


@_forward.register_fake
def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    bias_kind: int,
    segment_ids: Tensor | None,
    window: int | None,
    scale: float,
    tolerance: float,
    compiled: bool,
    bias_right: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return empty tensors with the shapes and dtypes that `_forward` returns. torch.compile calls this function."""
    out, lse, first_keys, dropped_mass = _allocate_outputs(q)
    # `bias_right` is given in calls without a causal mask. They also return the statistics of the right side (the keys
    # after each query). With a window of 1, a query sees only its own key.
    if bias_right is not None and window != 1:
        # The right side has one query less, because the last query sees no key on the right.
        right_tiles = count_query_tiles(q.shape[2] - 1)
        right_shape = (*first_keys.shape[:2], right_tiles)
        first_keys = torch.cat([first_keys, first_keys.new_empty(right_shape)], dim=2)
        dropped_mass = torch.cat([dropped_mass, dropped_mass.new_empty(right_shape)], dim=2)
    return out, lse, first_keys, dropped_mass


@_backward.register_fake
def _fake_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    bias_kind: int,
    segment_ids: Tensor | None,
    window: int | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
    first_keys: Tensor,
    compiled: bool,
    bias_right: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return empty tensors with the shapes and dtypes that `_backward` returns. torch.compile calls this function."""
    grad_q, grad_k, grad_v = (_empty_like_contiguous(x) for x in (q, k, v))
    grad_bias = _allocate_bias_grad(q, k, bias_kind)
    if bias_kind != BiasKind.DECAY:
        grad_bias = grad_bias.sum(0)  # (heads, k_len). A decay bias keeps its batch dimension.
    # `bias_right` is the bias of the keys after each query. The operator computes no gradient of slopes.
    has_right_grad = bias_right is not None and bias_kind != BiasKind.SLOPES
    grad_bias_right = torch.empty_like(grad_bias) if has_right_grad else grad_bias.new_empty(0)
    return grad_q, grad_k, grad_v, grad_bias, grad_bias_right


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save what the backward pass needs. PyTorch calls this function after the forward pass.

    Args:
        ctx: The context object of autograd, which keeps the saved values.
        inputs: The arguments of the operator.
        output: The results of the operator: the attention output, the log-sum-exp of each query, the first key that
            each query tile (group of query rows) reads, and the softmax mass that each query tile dropped.
    """
    q, k, v, bias, bias_kind, segment_ids, window, scale, _tolerance, compiled, bias_right = inputs
    out, lse, first_keys, dropped_mass = output
    ctx.bias_kind = bias_kind
    ctx.window = window
    ctx.scale = scale
    ctx.compiled = compiled
    ctx.save_for_backward(q, k, v, bias, segment_ids, out, lse, first_keys, bias_right)
    ctx.mark_non_differentiable(lse, first_keys, dropped_mass)


def _autograd_backward(ctx: Any, grad_out: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradient of each argument of the operator. PyTorch calls this function in the backward pass.

    Only the attention output has a gradient (`grad_out`). The other results of the operator are not differentiable.
    """
    q, k, v, bias, segment_ids, out, lse, first_keys, bias_right = ctx.saved_tensors
    grad_q, grad_k, grad_v, grad_bias, grad_bias_right = torch.ops.trainshort.attention_backward(
        grad_out,
        q,
        k,
        v,
        bias,
        ctx.bias_kind,
        segment_ids,
        ctx.window,
        ctx.scale,
        out,
        lse,
        first_keys,
        ctx.compiled,
        bias_right,
    )
    if ctx.bias_kind == BiasKind.SLOPES:
        # The operator computes no gradient of slopes.
        grad_bias = None
        grad_bias_right = None
    else:
        grad_bias = grad_bias.to(bias.dtype)
        grad_bias_right = None if bias_right is None else grad_bias_right.to(bias.dtype)
    # These arguments have no gradient: bias_kind, segment_ids, window, scale, tolerance, compiled.
    no_grads = (None,) * 6
    return grad_q, grad_k, grad_v, grad_bias, *no_grads, grad_bias_right


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)


def _allocate_outputs(q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate the results of a causal call.

    Returns:
        Empty tensors for the output, the log-sum-exp of each query, the first key of each query tile (group of query
        rows), and the softmax mass that each query tile dropped.
    """
    batch, heads, q_len, head_dim = q.shape
    # As in PyTorch's own attention, the memory layout is (batch, q_len, heads, head_dim). Joining the heads after the
    # attention then needs no copy.
    out = q.new_empty(batch, q_len, heads, head_dim).transpose(1, 2)
    lse = q.new_empty(batch, heads, q_len, dtype=torch.float64)
    tiles = count_query_tiles(q_len)
    first_keys = q.new_empty(batch, heads, tiles, dtype=torch.int32)
    dropped_mass = q.new_empty(batch, heads, tiles, dtype=torch.float32)
    return out, lse, first_keys, dropped_mass


def _allocate_bias_grad(q: Tensor, k: Tensor, bias_kind: int) -> Float[Tensor, "entries heads k_len"]:
    """Allocate the bias gradient of a causal call, with one entry per sequence of the batch.

    A distance table also gets one gradient per sequence, because the kernel processes the sequences in parallel. For
    slopes, the tensor has no entries, because their gradient is not computed.
    """
    batch, heads = q.shape[:2]
    entries = 0 if bias_kind == BiasKind.SLOPES else batch
    return q.new_empty(entries, heads, k.shape[2], dtype=torch.float64)


def _empty_like_contiguous(x: Tensor) -> Tensor:
    """Return an empty tensor with the memory layout of `x` if its rows are contiguous, else a contiguous tensor.

    A row is the last dimension of the tensor.
    """
    empty = torch.empty_like(x)
    has_contiguous_rows = contiguous_rows(empty) is empty  # `contiguous_rows` returns its argument if it need not copy.
    if has_contiguous_rows:
        return empty
    return torch.empty_like(x, memory_format=torch.contiguous_format)
