"""What one attention call is: queries, keys, values, a bias, what may be seen; checked before any engine sees it."""

import math
from dataclasses import dataclass, replace

import torch
import torch.autograd.forward_ad as forward_mode
from jaxtyping import Float, Int
from torch import Tensor

from trainshort.errors import InputError


@dataclass(frozen=True)
class LinearBias:
    """score(h, i, j) −= slopes[h] · (i − j); engines compute it on the fly.

    Without a causal mask, keys on the right lose right[h] · (j − i), and an infinite slope says that a head does not
    see that side."""

    slopes: Float[Tensor, " heads"]
    right: Float[Tensor, " heads"] | None = None
    """None: as on the left."""

    @property
    def values(self) -> Tensor:
        return self.slopes


@dataclass(frozen=True)
class DistanceBias:
    """score(h, i, j) += table[h, i − j]; distances past the table use its last column (T5). Without a causal mask, keys
    on the right have right[h, j − i]."""

    table: Float[Tensor, "heads distances"]
    right: Float[Tensor, "heads distances"] | None = None
    """None: as on the left."""

    @property
    def values(self) -> Tensor:
        return self.table


@dataclass(frozen=True)
class ClockBias:
    """score(b, h, i, j) += clock[b, h, i] − clock[b, h, j], with a reading for every key (FoX; clocks.py). In float64:
    a clock grows with the text, and its differences count. Without a causal mask, keys on the right have
    right[b, h, j] − right[b, h, i]: a clock that falls is a penalty on either side."""

    clock: Float[Tensor, "batch heads k_len"]
    right: Float[Tensor, "batch heads k_len"] | None = None
    """None: as on the left."""

    @property
    def values(self) -> Tensor:
        return self.clock


@dataclass(frozen=True)
class DenseBias:
    """score(b, h, i, j) += values[b, h, i, j]: whatever else a method wants, written out by the caller; without a batch
    dimension it is the same for all."""

    values: Float[Tensor, "*batch heads q_len k_len"]


Bias = LinearBias | DistanceBias | ClockBias | DenseBias

SMALLEST = 1e-30
"""Tolerances below it are 0: nothing is left out. So small a mass has no room in a float's exponent."""
TOLERANCE = 1e-6
"""Softmax mass that a row may leave out where that is proven and saves work. Float32 loses as much by rounding."""


@dataclass(frozen=True)
class Call:
    """One checked request. Everything an engine needs to know, and all it may look at."""

    q: Float[Tensor, "batch heads q_len dim"]
    k: Float[Tensor, "batch kv_heads k_len dim"]
    v: Float[Tensor, "batch kv_heads k_len dim"]
    bias: Bias | None = None
    window: int | None = None
    documents: Int[Tensor, "batch k_len"] | None = None
    dropout: float = 0.0
    needs_lse: bool = False
    tolerance: float = TOLERANCE
    scale: float | None = None
    """What products of queries and keys are multiplied with; None: 1/√dim."""
    causal: bool = True
    """False: keys on the right are seen too."""

    @property
    def factor(self) -> float:
        return 1 / math.sqrt(self.q.shape[-1]) if self.scale is None else self.scale

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def signature(self) -> tuple[object, ...]:
        """All of it but the numbers in its tensors, and whether documents are in pieces: calls of one signature are
        computed by one engine."""
        bias, right = None if self.bias is None else self.bias.values, getattr(self.bias, "right", None)
        return (
            *(self.q.shape, self.k.shape, self.q.dtype, self.q.device, torch.is_grad_enabled()),
            *(self.q.requires_grad, self.k.requires_grad, self.v.requires_grad, type(self.bias)),
            *(None if bias is None else (bias.shape, bias.dtype, bias.requires_grad), self.documents is None),
            *(self.window, self.dropout, self.needs_lse, self.tolerance, self.scale, self.causal),
            None if right is None else (right.shape, right.dtype, right.requires_grad),
            None if self.causal else self.in_pieces,
        )

    @property
    def in_pieces(self) -> bool:
        """Whether both sides are seen and a document is interrupted by another: then a row's neighbour does not tell
        what it sees. Not asked where an answer would have to be waited for (devices, graphs).

            documents 7 7 3 3: no      7 3 3 7: yes
        """
        if self.causal or self.documents is None or self.documents.device.type != "cpu" or tracer() is not None:
            return False
        rows, in_order = self.documents, self.documents.sort(dim=1).values
        changes, kinds = ((x[:, 1:] != x[:, :-1]).sum(1) for x in (rows, in_order))
        return bool((changes > kinds).any())

    @property
    def bias_tensors(self) -> tuple[Tensor, ...]:
        """The bias's own tensors: none, one, or one for each side."""
        right = getattr(self.bias, "right", None)
        return tuple(x for x in (None if self.bias is None else self.bias.values, right) if x is not None)

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
        return tracer() == "func" or self.has_tangents


def tracer() -> str | None:
    """Who looks at the operations rather than doing them: 'export' makes a graph for elsewhere, where nobody knows
    operators of ours; 'func' is torch.func (grad, vmap, jvp, ...); 'compile' is torch.compile. None: nobody."""
    if torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None or torch.onnx.is_in_onnx_export():
        return "export"
    if torch._C._functorch.maybe_current_level() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return "func"
    return "compile" if torch.compiler.is_compiling() else None


def check(call: Call) -> None:
    """Refuse what no engine should see."""
    q, k = call.q, call.k
    check_tensors(q, k, call.v)
    _check_bias(call)
    if call.window is not None and call.window < 1:
        raise InputError(f"window must be at least 1 (a token sees itself), got {call.window}.")
    if not 0 <= call.tolerance < 1:
        raise InputError(f"tolerance is a share of softmax mass, at least 0 and less than 1; got {call.tolerance}.")
    if not 0 <= call.dropout < 1:
        raise InputError(f"dropout must be in [0, 1), got {call.dropout}.")
    if call.scale is not None and not 0 < call.scale < math.inf:
        raise InputError(f"scale must be positive and finite, got {call.scale}.")
    documents = call.documents
    if documents is not None and documents.shape != (q.shape[0], k.shape[2]):
        raise InputError(
            f"documents must number every key position, shape (batch, k_len) = {(q.shape[0], k.shape[2])}; "
            f"got {tuple(documents.shape)}."
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


def _check_bias(call: Call) -> None:
    heads, q_len, k_len = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    match call.bias:
        case None:
            return
        case LinearBias(slopes):
            if slopes.shape != (heads,):
                raise InputError(f"slopes must be one per query head, shape ({heads},); got {tuple(slopes.shape)}.")
            # An infinite slope would turn every row to NaN far from here. Read only where that costs no waiting.
            finite = slopes.isfinite() if call.causal else slopes > -math.inf
            if slopes.device.type == "cpu" and tracer() is None and not finite.all():
                blind = "" if call.causal else ", or inf where a head does not see that side"
                raise InputError(f"slopes must be finite{blind}, got {slopes.tolist()}.")
        case DistanceBias(table):
            if table.dim() != 2 or table.shape[0] != heads or table.shape[1] < 1:
                raise InputError(f"a distance bias has shape (heads={heads}, distances); got {tuple(table.shape)}.")
        case ClockBias(clock):
            shape = (call.q.shape[0], heads, k_len)
            if clock.shape != shape or not clock.is_floating_point():
                raise InputError(
                    f"a clock has one reading per text, query head and key, shape {shape}, in floats; got "
                    f"{tuple(clock.shape)} of {clock.dtype}."
                )
            if clock.device.type == "cpu" and tracer() is None and not clock.isfinite().all():
                raise InputError("a clock must be finite everywhere; this one has readings that are not.")
        case DenseBias(values):
            shape = (heads, q_len, k_len)
            if values.shape not in (shape, (call.q.shape[0], *shape)):
                raise InputError(
                    f"a dense bias has shape {shape} here, or that for each text; got {tuple(values.shape)}."
                )
        case unknown:
            raise unknown_bias(unknown)
    if call.bias.values.device != call.q.device:
        raise InputError(f"the bias is on {call.bias.values.device}, but q on {call.q.device}; move it there.")
    if (right := getattr(call.bias, "right", None)) is not None:
        if call.causal:
            raise InputError("a bias for the right side needs causal=False; causal attention sees the left side only.")
        _check_bias(replace(call, bias=type(call.bias)(right)))


def contiguous_rows(x: Tensor) -> Tensor:
    """`x`, copied only where the numbers of a row do not lie side by side."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()  # the stride of a single number says nothing


def wide(x: Tensor) -> torch.dtype:
    """What sums over `x` are made in: its own precision, and float32 at the least."""
    return torch.promote_types(x.dtype, torch.float32)


def of_bias(call: Call, keys: Tensor, rows: Tensor) -> Tensor:
    """The gradient of one side's bias, from where it stands for keys and, if it is a clock, where it does for rows."""
    if call.bias_tensors[0].dim() < 3:
        return keys.sum(0)
    keys[..., call.k.shape[2] - call.q.shape[2] :] += rows
    return keys


def unknown_bias(bias: object) -> InputError:
    """A bias that an engine does not know is an error everywhere: dropped in silence it would be another model."""
    return InputError(
        f"bias must be LinearBias, DistanceBias, ClockBias, DenseBias or None, got {type(bias).__name__}."
    )
