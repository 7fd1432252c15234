"""ALiBi on the CPU at the price of attention without positions: the causal triangle, cut into squares.

No L×L bias is ever written. Inside a square all keys lie before all queries, so the bias splits exactly:

    −m·(i − j)  =  −m·(i − edge)  −  m·(edge − j)          edge: where the square's queries begin

The first part is the same for a whole row: it leaves the softmax untouched and only shifts its log-sum-exp. The second
is one number per key, a (1, heads, 1, keys) mask that torch's CPU flash kernel takes. Both are exact where it counts,
because a key near the edge has a bias near zero. (One such mask for the whole triangle, slope × key position, is as
fast, but the scores are then rounded at the size of slope × length: 15 times the error at 1,024 tokens, and growing.)

    8 tokens, diagonal blocks of 2:      . = masked      d = diagonal blocks, a dense distance mask, one call
                                                         1 = squares of 2, one call      2 = the square of 4
        d . . . . . . .
        d d . . . . . .
        1 1 d . . . . .
        1 1 d d . . . .
        2 2 2 2 d . . .
        2 2 2 2 d d . .
        2 2 2 2 1 1 d .
        2 2 2 2 1 1 d d

All blocks of one size are one batched call, so there are log2(length / block) calls, each computing only what is
needed; results are merged by log-sum-exp. Queries that continue a past (chunked prefill) get one more rectangle.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainshort import alibi
from trainshort.attention.kernel.library import contiguous_rows
from trainshort.attention.op import Call, LinearBias, engines, scale, wide
from trainshort.attention.reference import formula, is_short

BLOCK = 128
"""Side of the diagonal blocks. They compute both halves of their square, so smaller wastes less, and calls cost more;
64 to 256 were within 5 % of each other from 1,024 to 8,192 tokens."""

TILE = 1024
"""Queries to a call, so that a part's own output and gradients stay small beside the whole. The kernel is as fast with
this many as with more; with fewer than 768 it works in smaller pieces."""

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Squares:
    """ALiBi on the CPU at the speed and memory of plain causal attention; never writes a length × length bias."""

    def unsupported(self, call: Call) -> str | None:
        if not isinstance(call.bias, LinearBias):
            return "it computes linear biases (ALiBi) only; use 'sdpa'"
        if call.q.device.type != "cpu":
            return "it is built on torch's CPU kernel; use 'flex' or 'sdpa'"
        if call.bias_needs_grad:
            return "it does not train slopes; use 'sdpa' or 'reference'"
        if call.window is not None or call.documents is not None:
            return "it knows no sliding window and no packed documents; use 'sdpa'"
        if call.dropout:
            return "torch's CPU kernel has no dropout; use 'sdpa'"
        return row_mask_fault()

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        assert isinstance(call.bias, LinearBias)
        if is_short(call):
            return formula(call)
        return _Squares.apply(call.q, call.k, call.v, call.bias.slopes.detach().float(), scale(call))


@dataclass(frozen=True)
class Part:
    """`count` equal blocks of queries and the keys each attends to, one `step` apart, all in one call."""

    q_start: int
    q_len: int
    k_start: int
    k_len: int
    count: int = 1
    step: int = 0
    row: int = 0  # of the square, where this part of it begins
    diagonal: bool = False

    def queries(self, x: Tensor) -> Tensor:
        return _blocks(x, self.q_start, self.q_len, self.count, self.step)

    def keys(self, x: Tensor) -> Tensor:
        return _blocks(x, self.k_start, self.k_len, self.count, self.step)

    def mask(self, slopes: Float[Tensor, " heads"]) -> Float[Tensor, "1 heads rows k_len"]:
        """The bias, up to what is constant in a row: dense on the diagonal, one row everywhere else."""
        if self.diagonal:
            return alibi.bias(slopes, self.q_len, self.k_len)[None]
        before_edge = torch.arange(self.k_len, 0, -1)
        return (-slopes[:, None] * before_edge)[None, :, None, :]

    def row_shift(self, slopes: Float[Tensor, " heads"]) -> Float[Tensor, "heads 1 q_len"] | float:
        """What the mask leaves out, per row; shaped to be added to a (batch, heads, count, q_len) log-sum-exp."""
        if self.diagonal:
            return 0.0
        return (-slopes.double()[:, None] * torch.arange(self.row, self.row + self.q_len))[:, None]


def parts(q_len: int, k_len: int, block: int = BLOCK, tile: int = TILE) -> list[Part]:
    """The causal trapezium as diagonal blocks (first, so that every row has begun), squares, and the past."""
    past = k_len - q_len
    if q_len == 1:
        return [Part(0, 1, 0, k_len, diagonal=True)]  # decoding: the one row's distances, in one call
    whole, rest = divmod(q_len, block)
    found = _runs(Part(0, block, past, block, whole, block, diagonal=True), tile)
    if rest:
        found.append(Part(whole * block, rest, past + whole * block, rest, diagonal=True))
    side = block
    while side < q_len:
        whole, rest = divmod(q_len, 2 * side)
        found += _runs(Part(side, side, past, side, whole, 2 * side), tile)
        if rest > side:
            start = whole * 2 * side
            found += _tiles(Part(start + side, rest - side, past + start, side), tile)
        side *= 2
    if past:
        found += _tiles(Part(0, q_len, 0, past), tile)
    return found


def _runs(part: Part, tile: int) -> list[Part]:
    """Equal blocks, as many to a call as fit a tile; a block larger than a tile is cut instead."""
    size = max(1, tile // part.q_len)
    runs = [
        replace(
            part,
            q_start=part.q_start + first * part.step,
            k_start=part.k_start + first * part.step,
            count=min(size, part.count - first),
        )
        for first in range(0, part.count, size)
    ]
    return runs if part.q_len <= tile else [piece for run in runs for piece in _tiles(run, tile)]


def _tiles(part: Part, tile: int) -> list[Part]:
    """One rectangle, cut into tiles of queries. (Its keys stay together: they cost no buffer of their own.)"""
    return [
        replace(part, q_start=part.q_start + first, q_len=min(tile, part.q_len - first), row=first)
        for first in range(0, part.q_len, tile)
    ]


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, slopes, factor):
        q, k, v = (contiguous_rows(x) for x in (q, k, v))
        dtype = wide(q)
        out = torch.empty_like(q, dtype=dtype, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:3], dtype=torch.float64)  # the backward pass makes weights of it
        for part in parts(q.shape[2], k.shape[2]):
            part_out, part_lse = flash(
                part.queries(q),
                part.keys(k),
                part.keys(v),
                attn_mask=part.mask(slopes).to(dtype),
                scale=factor,
            )
            _merge(part, slopes, (out, lse), (part_out, part_lse))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, slopes, out, lse)
        ctx.factor = factor
        rounded = lse.to(dtype)
        ctx.mark_non_differentiable(rounded)
        return out, rounded

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Each part's gradients come from the flash kernel with the merged output and log-sum-exp, which is exactly
        what makes its recomputed weights the true ones."""
        grad_out, _ = grads
        q, k, v, slopes, out, lse = ctx.saved_tensors
        group = q.shape[1] // k.shape[1]
        dtype = wide(q)
        grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
        for part in parts(q.shape[2], k.shape[2]):
            part_lse = part.queries(lse[..., None])[..., 0]
            shift = part.row_shift(slopes)
            if isinstance(shift, Tensor):
                part_lse = part_lse - shift.transpose(0, 1)
            part_k, part_v = (_repeat(part.keys(x), group) for x in (k, v))
            part_grads = flash_backward(
                part.queries(grad_out),
                part.queries(q),
                part_k,
                part_v,
                part.queries(out),
                part_lse.to(dtype),
                0.0,
                False,
                attn_mask=part.mask(slopes).to(dtype),
                scale=ctx.factor,
            )
            _add_into(grad_q, part.q_start, part, part_grads[0])
            _add_into(grad_k, part.k_start, part, _sum_groups(part_grads[1], group))
            _add_into(grad_v, part.k_start, part, _sum_groups(part_grads[2], group))
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _strided(x: Tensor, start: int, length: int, count: int, step: int) -> Tensor:
    """(batch, heads, tokens, dim) → (batch, heads, count, length, dim): a view of equal blocks, `step` apart."""
    batch, heads, _, dim = x.shape
    strides = x.stride()
    offset = x.storage_offset() + start * strides[2]
    return x.as_strided((batch, heads, count, length, dim), (*strides[:2], step * strides[2], *strides[2:]), offset)


def _blocks(x: Tensor, start: int, length: int, count: int, step: int) -> Tensor:
    """Blocks as the kernel wants them, (batch · count, heads, length, dim); a copy only where strides cannot say it."""
    if count == 1:
        return x[:, :, start : start + length]
    return _strided(x, start, length, count, step).transpose(1, 2).flatten(0, 1)


def _unflatten(x: Tensor, batch: int) -> Tensor:
    """(batch · count, heads, ...) → (batch, heads, count, ...)"""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def _merge(part: Part, slopes: Tensor, whole: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> None:
    """Put a part's rows into the running output and log-sum-exp."""
    out, lse = whole
    rows = _strided(out, part.q_start, part.q_len, part.count, part.step)
    rows_lse = _strided(lse[..., None], part.q_start, part.q_len, part.count, part.step)[..., 0]
    new_out, new_lse = (_unflatten(x, out.shape[0]) for x in new)
    if part.diagonal:
        rows.copy_(new_out)
        rows_lse.copy_(new_lse)
        return
    new_lse = new_lse.double() + part.row_shift(slopes)
    share = torch.sigmoid(new_lse - rows_lse)[..., None]
    rows.lerp_(new_out.to(out.dtype), share.to(out.dtype).expand_as(rows))
    rows_lse.copy_(torch.logaddexp(rows_lse, new_lse))


def _add_into(total: Tensor, start: int, part: Part, grad: Tensor) -> None:
    rows = _strided(total, start, grad.shape[2], part.count, part.step)
    rows.add_(_unflatten(grad, total.shape[0]))


def _repeat(x: Tensor, group: int) -> Tensor:
    """One copy of each key head per query head that shares it: the backward kernel knows no groups."""
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _sum_groups(grad: Tensor, group: int) -> Tensor:
    """Key heads that several query heads shared get the sum of their gradients."""
    return grad if group == 1 else grad.unflatten(1, (-1, group)).sum(2)


@cache
def row_mask_fault() -> str | None:
    """Torch does not document that its CPU flash kernel takes a float32 row mask, forward and backward, also for
    half-precision inputs. So it is tried once per process on a few numbers; None when it holds."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, 2, 5, 8, generator=generator) for _ in range(4))
    row = torch.linspace(-1, 0, 5).expand(1, 2, 1, 5)
    with torch.enable_grad():
        q64, k64, v64 = (x.double().requires_grad_() for x in (q, k, v))
        scores = q64 @ k64.transpose(-1, -2) + row
        expected = scores.softmax(-1) @ v64
        expected_grads = torch.autograd.grad(expected, (q64, k64, v64), g.double())
    try:
        with torch.no_grad():
            out, lse = flash(q, k, v, attn_mask=row, scale=1.0)
            grads = flash_backward(g, q, k, v, out, lse, 0.0, False, attn_mask=row, scale=1.0)
            half, _ = flash(q.bfloat16(), k.bfloat16(), v.bfloat16(), attn_mask=row, scale=1.0)
    except (RuntimeError, TypeError) as error:
        return f"this torch's CPU kernel refuses a row mask ({error}); use 'sdpa'"
    pairs = zip((out, *grads), (expected, *expected_grads), strict=True)
    exact = all(torch.allclose(x.double(), y, atol=1e-4) for x, y in pairs)
    if not exact or not torch.allclose(half.double(), expected, atol=0.1):
        return "this torch's CPU kernel computes something else with a row mask; use 'sdpa'"
    return None


engines.register("squares")(Squares())
