"""The arguments of one attention call and the biases that can be added to the scores."""

import math
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

import torch
import torch.autograd.forward_ad as forward_mode
from jaxtyping import Float, Int
from torch import Tensor

from trainshort.errors import InputError


class AttentionBias:
    """Base class of the biases that are added to the attention scores."""

    right: Tensor | None = None
    """The bias tensor of the keys to the right of the query. None means that both sides use the same bias tensor."""


@dataclass(frozen=True)
class LinearBias(AttentionBias):
    """A bias that falls linearly with the distance between query and key (ALiBi).

    With query position i and key position j, the score of head h changes as follows:

        score[h, i, j] -= slopes[h] * (i - j)

    The backends compute the bias while they compute the scores, so the bias takes no memory.

    Args:
        slopes: One slope per query head. `trainshort.alibi.slopes(heads)` returns the slopes of the ALiBi paper.
        right: The slopes for keys to the right of the query, used with `causal=False` only:
            `score[h, i, j] -= right[h] * (j - i)`. None means that both sides use `slopes`.
            With `causal=False`, an infinite slope hides that side from the head.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 16, 64) for _ in range(3))  # two heads
        >>> bias = LinearBias(torch.tensor([0.5, 0.25]))
        >>> attend(q, k, v, bias=bias).shape
        torch.Size([1, 2, 16, 64])
    """

    slopes: Float[Tensor, " heads"]
    right: Float[Tensor, " heads"] | None = None

    @property
    def values(self) -> Tensor:
        """The slopes. All bias classes have this property."""
        return self.slopes


@dataclass(frozen=True)
class DistanceBias(AttentionBias):
    """A bias that is looked up in a table by the distance between query and key (T5).

    With query position i and key position j, the score of head h changes as follows:

        score[h, i, j] += table[h, i - j]

    A distance beyond the end of the table uses the last column of the table.

    Args:
        table: One row per query head and one column per distance. Column 0 is distance 0.
        right: The table for keys to the right of the query, used with `causal=False` only:
            `score[h, i, j] += right[h, j - i]`. None means that both sides use `table`.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 16, 64) for _ in range(3))  # two heads
        >>> table = torch.nn.Parameter(torch.zeros(2, 32))  # one value for each distance from 0 to 31
        >>> attend(q, k, v, bias=DistanceBias(table)).shape
        torch.Size([1, 2, 16, 64])
    """

    table: Float[Tensor, "heads distances"]
    right: Float[Tensor, "heads distances"] | None = None

    @property
    def values(self) -> Tensor:
        """The table. All bias classes have this property."""
        return self.table


@dataclass(frozen=True)
class DecayBias(AttentionBias):
    """A bias given by cumulative log decays (the Forgetting Transformer, FoX).

    In the Forgetting Transformer, a forget gate between 0 and 1 is computed for each token and head. `cumulative` is
    the cumulative sum of the logarithms of these gates. With query position i and key position j, the score of head h
    in sequence b changes as follows:

        score[b, h, i, j] += cumulative[b, h, i] - cumulative[b, h, j]

    Args:
        cumulative: The cumulative log decay at each key position. Use float64 for long sequences: the values grow with
            the length, but only their differences matter.
        right: The cumulative log decay for keys to the right of the query, used with `causal=False` only:
            `score[b, h, i, j] += right[b, h, j] - right[b, h, i]`. Decreasing values therefore lower the scores of
            distant keys on both sides. None means that both sides use `cumulative`.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 16, 64) for _ in range(3))  # two heads
        >>> gates = torch.rand(1, 2, 16, dtype=torch.float64)  # one forget gate for each head and token
        >>> bias = DecayBias(gates.log().cumsum(-1))
        >>> attend(q, k, v, bias=bias).shape
        torch.Size([1, 2, 16, 64])
    """

    cumulative: Float[Tensor, "batch heads k_len"]
    right: Float[Tensor, "batch heads k_len"] | None = None

    @property
    def values(self) -> Tensor:
        """The cumulative log decay. All bias classes have this property."""
        return self.cumulative


@dataclass(frozen=True)
class DenseBias(AttentionBias):
    """A bias that contains one value for each pair of query and key.

    With query row i and key position j, the score of head h in sequence b changes as follows:

        score[b, h, i, j] += values[b, h, i, j]

    Args:
        values: The bias. Without a batch dimension, all sequences of the batch use the same bias.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 16, 64) for _ in range(3))  # two heads
        >>> bias = DenseBias(torch.randn(2, 16, 16))
        >>> attend(q, k, v, bias=bias).shape
        torch.Size([1, 2, 16, 64])
    """

    values: Float[Tensor, "*batch heads q_len k_len"]


Bias = LinearBias | DistanceBias | DecayBias | DenseBias
"""Every bias that `attend` accepts."""


class BiasKind(IntEnum):
    """The meaning of the tensor that the operator `torch.ops.trainshort.attention` receives as its bias.

    PyTorch operators cannot take objects such as `LinearBias`. The operator therefore takes a tensor and a `BiasKind`.
    """

    SLOPES = 0
    """The tensor is `LinearBias.slopes`, shape (heads,)."""
    TABLE = 1
    """The tensor is a table with one value per distance, shape (heads, k_len)."""
    DECAY = 2
    """The tensor is `DecayBias.cumulative`, shape (batch, heads, k_len)."""


BIAS_TYPES = {BiasKind.SLOPES: LinearBias, BiasKind.TABLE: DistanceBias, BiasKind.DECAY: DecayBias}


def bias_kind_of(bias: Bias | None) -> BiasKind:
    """Return the bias kind that belongs to the type of a bias.

    Raises:
        InputError: If `bias` is None or a type that has no bias kind, such as `DenseBias`.
    """
    for kind, bias_type in BIAS_TYPES.items():
        if isinstance(bias, bias_type):
            return kind
    raise unknown_bias_error(bias)


# `attend` treats a smaller tolerance as 0. The softmax mass of a skipped key would be too small for float32.
MIN_TOLERANCE = 1e-30

# The default of the softmax mass that a backend may drop from each query. Float32 rounding errors have a similar size.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention call.

    A backend receives an `AttentionCall` and nothing else. The function `validate` checks the arguments before a
    backend receives them.

    Args:
        q: The queries. The last query is aligned with the last key.
        k: The keys. The number of query heads must be a multiple of the number of key heads.
        v: The values, with the same shape as `k`.
        bias: The bias that is added to the scores, or None.
        window: The number of keys that a query sees in a sliding window, its own key included, or None.
        segment_ids: The segment that each key belongs to, or None. A query sees only the keys of its own segment.
        dropout_p: The probability that an attention weight is dropped.
        needs_lse: Whether the backend must return the log-sum-exp of the scores.
        tolerance: The softmax mass (the sum of attention weights) that a backend may drop from each query, if the
            backend can prove this bound.
        scale: The factor applied to the product of query and key. None means 1 / sqrt(dim).
        causal: Whether a query sees no keys to its right.
    """

    q: Float[Tensor, "batch heads q_len dim"]
    k: Float[Tensor, "batch kv_heads k_len dim"]
    v: Float[Tensor, "batch kv_heads k_len dim"]
    bias: Bias | None = None
    window: int | None = None
    segment_ids: Int[Tensor, "batch k_len"] | None = None
    dropout_p: float = 0.0
    needs_lse: bool = False
    tolerance: float = TOLERANCE
    scale: float | None = None
    causal: bool = True

    @property
    def softmax_scale(self) -> float:
        """The factor applied to the product of query and key. The default is 1 / sqrt(dim)."""
        if self.scale is None:
            return 1 / math.sqrt(self.q.shape[-1])
        return self.scale

    @property
    def heads_per_kv_head(self) -> int:
        """The number of query heads that share one key head (grouped-query attention)."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def query_start(self) -> int:
        """The key position of the first query. The last query is aligned with the last key."""
        return self.k.shape[2] - self.q.shape[2]

    @property
    def signature(self) -> tuple[object, ...]:
        """Everything that the choice of a backend depends on.

        The signature contains shapes, dtypes and options, but no values of tensors. The exception is
        `has_split_segments`, which depends on the values of `segment_ids`. All calls with the same signature are run by
        the same backend.
        """
        left_bias = None if self.bias is None else self.bias.values
        right_bias = None if self.bias is None else self.bias.right
        left_bias_signature = None
        if left_bias is not None:
            left_bias_signature = (left_bias.shape, left_bias.dtype, left_bias.requires_grad)
        right_bias_signature = None
        if right_bias is not None:
            right_bias_signature = (right_bias.shape, right_bias.dtype, right_bias.requires_grad)
        return (
            self.q.shape,
            self.k.shape,
            self.q.dtype,
            self.q.device,
            torch.is_grad_enabled(),
            self.q.requires_grad,
            self.k.requires_grad,
            self.v.requires_grad,
            type(self.bias),
            left_bias_signature,
            self.segment_ids is None,
            self.window,
            self.dropout_p,
            self.needs_lse,
            self.tolerance,
            self.scale,
            self.causal,
            right_bias_signature,
            self.has_split_segments,  # always False for causal calls
        )

    @property
    def has_split_segments(self) -> bool:
        """Whether a segment (document) is interrupted by another segment in a call without a causal mask.

        For example, `segment_ids` [7, 3, 3, 7] has a split segment, and [7, 7, 3, 3] has none.

        The result is always False for causal calls, on devices other than the CPU, and while a graph is traced. Reading
        the values of `segment_ids` would block until the device has finished, or would not be possible.
        """
        if self.causal or self.segment_ids is None:
            return False
        can_read_values = self.segment_ids.device.type == "cpu" and active_tracer() is None
        if not can_read_values:
            return False
        # Sorting joins the parts of each segment. A sequence has a split segment if its segment changes more often
        # before the sorting than after the sorting.
        changes = _count_segment_changes(self.segment_ids)
        changes_if_sorted = _count_segment_changes(self.segment_ids.sort(dim=1).values)
        return bool((changes > changes_if_sorted).any())

    @property
    def bias_tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the bias: no tensor, one tensor, or one tensor for each side.

        The left side consists of the keys before a query, the right side of the keys after it. Without a tensor of its
        own, the right side uses the tensor of the left side.
        """
        if self.bias is None:
            return ()
        if self.bias.right is None:
            return (self.bias.values,)
        return (self.bias.values, self.bias.right)

    @property
    def bias_needs_grad(self) -> bool:
        """Whether autograd needs a gradient of the bias."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.bias_tensors)

    @property
    def needs_grad(self) -> bool:
        """Whether autograd needs a gradient of the queries, the keys, the values or the bias."""
        inputs = (self.q, self.k, self.v)
        inputs_need_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        return inputs_need_grad or self.bias_needs_grad

    @property
    def has_tangents(self) -> bool:
        """Whether a tensor carries a tangent of PyTorch's forward-mode automatic differentiation.

        The result is always False while torch.compile traces the call.
        """
        if torch.compiler.is_compiling():
            return False
        tensors = (self.q, self.k, self.v, *self.bias_tensors)
        return any(forward_mode.unpack_dual(tensor).tangent is not None for tensor in tensors)

    @property
    def is_transformed(self) -> bool:
        """Whether torch.func (grad, vmap, jvp, ...) or forward-mode automatic differentiation is active."""
        return active_tracer() == "func" or self.has_tangents


def _count_segment_changes(segment_ids: Int[Tensor, "batch k_len"]) -> Int[Tensor, " batch"]:
    """Count how often the segment changes from one key to the next, for each sequence of the batch."""
    return (segment_ids[:, 1:] != segment_ids[:, :-1]).sum(1)


def active_tracer() -> Literal["export", "func", "compile"] | None:
    """Return which part of PyTorch is tracing the current operations, if any.

    Returns:
        "export" during torch.export, torch.jit.trace and ONNX export, which do not support custom operators here.
        "func" inside a torch.func transform such as grad, vmap or jvp.
        "compile" while torch.compile traces.
        None if the operations are executed normally.
    """
    is_jit_tracing = torch._C._get_tracing_state() is not None
    if torch.compiler.is_exporting() or is_jit_tracing or torch.onnx.is_in_onnx_export():
        return "export"
    if torch._C._functorch.maybe_current_level() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return "func"
    if torch.compiler.is_compiling():
        return "compile"
    return None


def validate(call: AttentionCall) -> None:
    """Check all arguments of an attention call.

    Raises:
        InputError: If an argument has a wrong shape, dtype, device or value.
    """
    check_tensors(call.q, call.k, call.v)
    _check_bias(call)
    if call.window is not None and call.window < 1:
        raise InputError(
            f"window must be at least 1, got {call.window}. A window of 1 contains only the query's own key."
        )
    if not 0 <= call.tolerance < 1:
        raise InputError(
            f"tolerance must be at least 0 and less than 1, got {call.tolerance}. "
            "The tolerance is the share of the softmax mass that may be dropped."
        )
    if not 0 <= call.dropout_p < 1:
        raise InputError(f"dropout_p must be in [0, 1), got {call.dropout_p}.")
    if call.scale is not None and not 0 < call.scale < math.inf:
        raise InputError(f"scale must be positive and finite, got {call.scale}.")
    if call.segment_ids is not None:
        expected_shape = (call.q.shape[0], call.k.shape[2])
        if call.segment_ids.shape != expected_shape:
            raise InputError(
                f"segment_ids must have shape (batch, k_len) = {expected_shape}, got {tuple(call.segment_ids.shape)}."
            )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check the shapes, dtypes and devices of queries, keys and values.

    Raises:
        InputError: If a tensor is invalid, or if the tensors do not match each other.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise InputError(f"{name} must have shape (batch, heads, length, dim), got {tuple(tensor.shape)}.")
        if 0 in tensor.shape:
            raise InputError(f"{name} is empty: shape {tuple(tensor.shape)}. Attention requires at least one token.")
        if not tensor.is_floating_point():
            raise InputError(f"{name} must have a floating-point dtype, got {tensor.dtype}.")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise InputError(
                f"q, k and v must have the same dtype and the same device. "
                f"q is {q.dtype} on {q.device}, {name} is {tensor.dtype} on {tensor.device}."
            )
    if k.shape != v.shape:
        raise InputError(f"k and v must have the same shape, got {tuple(k.shape)} and {tuple(v.shape)}.")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InputError(f"q and k must have the same batch and dim, got {tuple(q.shape)} and {tuple(k.shape)}.")
    if q.shape[1] % k.shape[1]:
        raise InputError(
            f"The number of query heads must be a multiple of the number of key heads, "
            f"got {q.shape[1]} query heads and {k.shape[1]} key heads."
        )
    if q.shape[2] > k.shape[2]:
        raise InputError(
            f"There must be at least as many keys as queries, got {q.shape[2]} queries and {k.shape[2]} keys. "
            "The queries are the last tokens of the keys, so pass the keys of earlier tokens as well."
        )


def _check_bias(call: AttentionCall) -> None:
    """Raise `InputError` if the bias does not match the queries and keys."""
    match call.bias:
        case None:
            return
        case LinearBias(slopes):
            _check_slopes(call, slopes)
        case DistanceBias(table):
            _check_distance_table(call, table)
        case DecayBias(cumulative):
            _check_cumulative_decay(call, cumulative)
        case DenseBias(values):
            _check_dense_bias(call, values)
        case unknown:
            raise unknown_bias_error(unknown)

    if call.bias.values.device != call.q.device:
        raise InputError(
            f"The bias and q must be on the same device, got {call.bias.values.device} and {call.q.device}. "
            "Move the bias to the device of q."
        )
    if call.bias.right is not None:
        if call.causal:
            raise InputError(
                "A bias for the right side requires causal=False. Causal attention sees only the left side."
            )
        # The bias of the right side must satisfy the same conditions as the bias of the left side.
        right_bias = type(call.bias)(call.bias.right)
        _check_bias(replace(call, bias=right_bias))


def _check_slopes(call: AttentionCall, slopes: Tensor) -> None:
    """Raise `InputError` if the slopes of a `LinearBias` have a wrong shape or are not finite."""
    heads = call.q.shape[1]
    if slopes.shape != (heads,):
        raise InputError(f"slopes must have one value per query head, shape ({heads},), got {tuple(slopes.shape)}.")
    if not _can_read_values(slopes):
        return
    if call.causal:
        if not slopes.isfinite().all():
            raise InputError(f"slopes must be finite, got {slopes.tolist()}.")
    elif not (slopes > -math.inf).all():  # This comparison is also False for NaN.
        raise InputError(
            f"slopes must be finite, or inf to hide one side of the text from a head, got {slopes.tolist()}."
        )


def _check_distance_table(call: AttentionCall, table: Tensor) -> None:
    """Raise `InputError` if the table of a `DistanceBias` has a wrong shape."""
    heads = call.q.shape[1]
    if table.dim() != 2 or table.shape[0] != heads or table.shape[1] < 1:
        raise InputError(
            f"The table of a DistanceBias must have shape (heads={heads}, distances), got {tuple(table.shape)}."
        )


def _check_cumulative_decay(call: AttentionCall, cumulative: Tensor) -> None:
    """Raise `InputError` if the tensor of a `DecayBias` has a wrong shape or dtype or is not finite."""
    expected_shape = (call.q.shape[0], call.q.shape[1], call.k.shape[2])
    if cumulative.shape != expected_shape or not cumulative.is_floating_point():
        raise InputError(
            f"DecayBias.cumulative must be a floating-point tensor of shape (batch, heads, k_len) = {expected_shape}, "
            f"got {tuple(cumulative.shape)} of {cumulative.dtype}."
        )
    if _can_read_values(cumulative) and not cumulative.isfinite().all():
        raise InputError("DecayBias.cumulative must be finite, but some values are infinite or NaN.")


def _check_dense_bias(call: AttentionCall, values: Tensor) -> None:
    """Raise `InputError` if the tensor of a `DenseBias` has a wrong shape."""
    batch, heads, q_len, _ = call.q.shape
    k_len = call.k.shape[2]
    expected_shapes = ((heads, q_len, k_len), (batch, heads, q_len, k_len))
    if values.shape not in expected_shapes:
        raise InputError(
            f"A DenseBias must have shape {expected_shapes[0]} or {expected_shapes[1]}, got {tuple(values.shape)}."
        )


def _can_read_values(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be read without waiting for a device and without breaking a trace."""
    return tensor.device.type == "cpu" and active_tracer() is None


def contiguous_rows(x: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous in memory. The tensor is copied only if necessary.

    Args:
        x: A tensor of shape (batch, heads, length, dim).
    """
    # The stride of a dimension with one element has no meaning.
    if x.stride(3) == 1 or x.shape[3] == 1:
        return x
    return x.contiguous()


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which sums over `x` are computed: float64 for float64 inputs, otherwise float32."""
    return torch.promote_types(x.dtype, torch.float32)


def reduce_bias_grad(call: AttentionCall, key_grad: Tensor, query_grad: Tensor) -> Tensor:
    """Combine the parts of the bias gradient that a kernel computed for one side of the text.

    The bias of a `DecayBias` is c[i] - c[j] for query i and key j, where c is the cumulative log decay. A token is both
    a query and a key, so the gradient of its c has two parts.

    Args:
        call: The arguments of the call.
        key_grad: For a `DecayBias`, the gradient of the cumulative log decay as a key, shape (batch, heads, k_len).
            For other biases, the gradient of the bias tensor for each batch entry.
        query_grad: The gradient of the cumulative log decay as a query, shape (batch, heads, q_len). The tensor is used
            only for a `DecayBias`.

    Returns:
        The gradient of the bias tensor. For a `DecayBias`, the result is `key_grad`, which is changed in place.
    """
    if not isinstance(call.bias, DecayBias):
        return key_grad.sum(0)  # All sequences of the batch share the bias tensor.
    # The queries are the last tokens of the keys.
    key_grad[..., call.query_start :] += query_grad
    return key_grad


def unknown_bias_error(bias: object) -> InputError:
    """Return the error for a bias type that a backend does not know. No backend ignores an unknown bias."""
    return InputError(
        f"bias must be LinearBias, DistanceBias, DecayBias, DenseBias or None, got {type(bias).__name__}."
    )
