"""The arguments of one attention call and the biases that can be added to the scores."""

import math
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
import torch.autograd.forward_ad as forward_mode
from jaxtyping import Float, Int
from torch import Tensor

from trainshort.errors import InputError


class AttentionBias:
    """Base class of the biases that are added to the attention scores."""

    right: Tensor | None = None
    """The bias of the keys to the right of the query. None means that both sides use the same bias."""


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
        >>> bias = LinearBias(torch.tensor([0.5, 0.25]))
        >>> out = attend(q, k, v, bias=bias)  # q has two heads
    """

    slopes: Float[Tensor, " heads"]
    right: Float[Tensor, " heads"] | None = None

    @property
    def values(self) -> Tensor:
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
    """

    table: Float[Tensor, "heads distances"]
    right: Float[Tensor, "heads distances"] | None = None

    @property
    def values(self) -> Tensor:
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
            `score[b, h, i, j] += right[b, h, j] - right[b, h, i]`. Falling values are therefore a penalty on both
            sides. None means that both sides use `cumulative`.
    """

    cumulative: Float[Tensor, "batch heads k_len"]
    right: Float[Tensor, "batch heads k_len"] | None = None

    @property
    def values(self) -> Tensor:
        return self.cumulative


@dataclass(frozen=True)
class DenseBias(AttentionBias):
    """A bias that contains one value for each pair of query and key.

    With query row i and key position j, the score of head h in sequence b changes as follows:

        score[b, h, i, j] += values[b, h, i, j]

    Args:
        values: The bias. Without a batch dimension, all sequences of the batch use the same bias.
    """

    values: Float[Tensor, "*batch heads q_len k_len"]


Bias = LinearBias | DistanceBias | DecayBias | DenseBias


class BiasKind(IntEnum):
    """The meaning of the tensor that `torch.ops.trainshort.attention` receives as its bias."""

    SLOPES = 0
    """`LinearBias.slopes`, shape (heads,)."""
    TABLE = 1
    """One value per distance, shape (heads, k_len)."""
    DECAY = 2
    """`DecayBias.cumulative`, shape (batch, heads, k_len)."""


BIAS_TYPES = {BiasKind.SLOPES: LinearBias, BiasKind.TABLE: DistanceBias, BiasKind.DECAY: DecayBias}


def bias_kind_of(bias: Bias | None) -> BiasKind:
    """Return the bias kind that belongs to the type of a bias."""
    for kind, bias_type in BIAS_TYPES.items():
        if isinstance(bias, bias_type):
            return kind
    raise unknown_bias_error(bias)


MIN_TOLERANCE = 1e-30
"""Tolerances below it are 0: nothing is left out. So small a mass has no room in a float's exponent."""
TOLERANCE = 1e-6
"""Softmax mass that a row may leave out where that is proven and saves work. Float32 loses as much by rounding."""


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention call.

    A backend receives an `AttentionCall` and nothing else. `check` has checked the arguments before.

    Args:
        q: The queries. The last query is aligned with the last key.
        k: The keys. The number of query heads must be a multiple of the number of key heads.
        v: The values, with the same shape as `k`.
        bias: The bias that is added to the scores, or None.
        window: The number of keys that a query sees in a sliding window, its own key included, or None.
        segment_ids: The segment that each key belongs to, or None. A query sees only the keys of its own segment.
        dropout_p: The probability that an attention weight is dropped.
        needs_lse: Whether the backend must return the log-sum-exp of the scores.
        tolerance: The softmax mass that a backend may drop from each query, if the backend can prove this bound.
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
        return 1 / math.sqrt(self.q.shape[-1]) if self.scale is None else self.scale

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def signature(self) -> tuple[object, ...]:
        """Return everything that the choice of a backend depends on.

        The signature contains shapes, dtypes and options, but no values of tensors. The exception is `in_pieces`,
        which depends on the values of `segment_ids`. All calls with the same signature are run by the same backend.
        """
        bias = None if self.bias is None else self.bias.values
        right = None if self.bias is None else self.bias.right
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
            None if bias is None else (bias.shape, bias.dtype, bias.requires_grad),
            self.segment_ids is None,
            self.window,
            self.dropout_p,
            self.needs_lse,
            self.tolerance,
            self.scale,
            self.causal,
            None if right is None else (right.shape, right.dtype, right.requires_grad),
            None if self.causal else self.has_split_segments,
        )

    @property
    def has_split_segments(self) -> bool:
        """Return whether a segment is interrupted by another segment in a call without a causal mask.

        A backend can then not decide from the neighbor of a key whether a segment ends there.
        The answer is False on devices other than the CPU and while a graph is traced, because reading the values would
        wait for the device or would not be possible.

        Example:
            segment_ids 7 7 3 3: False
            segment_ids 7 3 3 7: True
        """
        if (
            self.causal
            or self.segment_ids is None
            or self.segment_ids.device.type != "cpu"
            or active_tracer() is not None
        ):
            return False
        rows = self.segment_ids
        in_order = rows.sort(dim=1).values
        changes_in_row = (rows[:, 1:] != rows[:, :-1]).sum(1)
        changes_if_sorted = (in_order[:, 1:] != in_order[:, :-1]).sum(1)
        return bool((changes_in_row > changes_if_sorted).any())

    @property
    def bias_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the bias: no tensor, one tensor, or one tensor for each side."""
        if self.bias is None:
            return ()
        if self.bias.right is None:
            return (self.bias.values,)
        return (self.bias.values, self.bias.right)

    @property
    def bias_needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.bias_tensors)

    @property
    def needs_grad(self) -> bool:
        inputs = torch.is_grad_enabled() and any(x.requires_grad for x in (self.q, self.k, self.v))
        return inputs or self.bias_needs_grad

    @property
    def has_tangents(self) -> bool:
        """Whether somebody differentiates this in forward mode, which only plain operations of torch can follow."""
        if torch.compiler.is_compiling():
            return False
        given = (self.q, self.k, self.v, *self.bias_tensors)
        return any(forward_mode.unpack_dual(x).tangent is not None for x in given)

    @property
    def is_transformed(self) -> bool:
        """Whether torch.func is at work (grad, vmap, jvp, ...), or derivatives are taken in forward mode."""
        return active_tracer() == "func" or self.has_tangents


def active_tracer() -> str | None:
    """Who looks at the operations rather than doing them: 'export' makes a graph for elsewhere, where nobody knows
    operators of ours; 'func' is torch.func (grad, vmap, jvp, ...); 'compile' is torch.compile. None: nobody."""
    if torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None or torch.onnx.is_in_onnx_export():
        return "export"
    if torch._C._functorch.maybe_current_level() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return "func"
    return "compile" if torch.compiler.is_compiling() else None


def validate(call: AttentionCall) -> None:
    """Refuse what no backend should see."""
    q, k = call.q, call.k
    check_tensors(q, k, call.v)
    _check_bias(call)
    if call.window is not None and call.window < 1:
        raise InputError(f"window must be at least 1 (a token sees itself), got {call.window}.")
    if not 0 <= call.tolerance < 1:
        raise InputError(f"tolerance is a share of softmax mass, at least 0 and less than 1; got {call.tolerance}.")
    if not 0 <= call.dropout_p < 1:
        raise InputError(f"dropout_p must be in [0, 1), got {call.dropout_p}.")
    if call.scale is not None and not 0 < call.scale < math.inf:
        raise InputError(f"scale must be positive and finite, got {call.scale}.")
    segment_ids = call.segment_ids
    if segment_ids is not None and segment_ids.shape != (q.shape[0], k.shape[2]):
        raise InputError(
            f"segment_ids must have shape (batch, k_len) = {(q.shape[0], k.shape[2])}, got {tuple(segment_ids.shape)}."
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise InputError(f"{name} must have shape (batch, heads, length, dim), got {tuple(x.shape)}.")
        if 0 in x.shape:
            raise InputError(f"{name} is empty, shape {tuple(x.shape)}; attention needs at least one token.")
        if not x.is_floating_point() or x.dtype != q.dtype or x.device != q.device:
            raise InputError(
                f"q, k and v must share one floating-point dtype and device; q is {q.dtype} on {q.device}, "
                f"{name} is {x.dtype} on {x.device}."
            )
    if k.shape != v.shape:
        raise InputError(f"k and v must have the same shape, got {tuple(k.shape)} and {tuple(v.shape)}.")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InputError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch and dim.")
    if q.shape[1] % k.shape[1]:
        raise InputError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads; give a divisor of them.")
    if q.shape[2] > k.shape[2]:
        raise InputError(
            f"q has {q.shape[2]} tokens but k only {k.shape[2]}; queries are the last tokens of the keys, "
            "so pass the keys of the past along with the new ones."
        )


def _check_bias(call: AttentionCall) -> None:
    heads, q_len, k_len = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    match call.bias:
        case None:
            return
        case LinearBias(slopes):
            if slopes.shape != (heads,):
                raise InputError(f"slopes must be one per query head, shape ({heads},); got {tuple(slopes.shape)}.")
            # An infinite slope would turn every row to NaN far from here. Read only where that costs no waiting.
            finite = slopes.isfinite() if call.causal else slopes > -math.inf
            if slopes.device.type == "cpu" and active_tracer() is None and not finite.all():
                blind = "" if call.causal else ", or inf where a head does not see that side"
                raise InputError(f"slopes must be finite{blind}, got {slopes.tolist()}.")
        case DistanceBias(table):
            if table.dim() != 2 or table.shape[0] != heads or table.shape[1] < 1:
                raise InputError(f"a distance bias has shape (heads={heads}, distances); got {tuple(table.shape)}.")
        case DecayBias(cumulative):
            shape = (call.q.shape[0], heads, k_len)
            if cumulative.shape != shape or not cumulative.is_floating_point():
                raise InputError(
                    f"DecayBias.cumulative must be a floating-point tensor of shape (batch, heads, k_len) = {shape}, "
                    f"got {tuple(cumulative.shape)} of {cumulative.dtype}."
                )
            if cumulative.device.type == "cpu" and active_tracer() is None and not cumulative.isfinite().all():
                raise InputError("DecayBias.cumulative must be finite, but some values are infinite or NaN.")
        case DenseBias(values):
            shape = (heads, q_len, k_len)
            if values.shape not in (shape, (call.q.shape[0], *shape)):
                raise InputError(
                    f"a dense bias has shape {shape} here, or that for each text; got {tuple(values.shape)}."
                )
        case unknown:
            raise unknown_bias_error(unknown)
    if call.bias.values.device != call.q.device:
        raise InputError(f"the bias is on {call.bias.values.device}, but q on {call.q.device}; move it there.")
    right = call.bias.right
    if right is not None:
        if call.causal:
            raise InputError("a bias for the right side needs causal=False; causal attention sees the left side only.")
        _check_bias(replace(call, bias=type(call.bias)(right)))


def contiguous_rows(x: Tensor) -> Tensor:
    """`x`, copied only where the numbers of a row do not lie side by side."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()  # the stride of a single number says nothing


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """What sums over `x` are made in: its own precision, and float32 at the least."""
    return torch.promote_types(x.dtype, torch.float32)


def reduce_bias_grad(call: AttentionCall, keys: Tensor, rows: Tensor) -> Tensor:
    """The gradient of one side's bias, from where it stands for keys and, if it is a clock, where it does for rows."""
    if not isinstance(call.bias, DecayBias):
        return keys.sum(0)
    keys[..., call.k.shape[2] - call.q.shape[2] :] += rows
    return keys


def unknown_bias_error(bias: object) -> InputError:
    """A bias that a backend does not know is an error everywhere: dropped in silence it would be another model."""
    return InputError(
        f"bias must be LinearBias, DistanceBias, DecayBias, DenseBias or None, got {type(bias).__name__}."
    )
