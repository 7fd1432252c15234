"""The windows of `windowed` in plain PyTorch, for machines where its kernel cannot be built.

Queries are taken in chunks. A chunk's own keys (its diagonal block) get a written-out distance mask; the keys before
it, as far back as the window of each head reaches, are one call of torch's flash kernel per group of heads with similar
windows. All of them lie before all of the chunk's queries, so their bias splits exactly:

    −m·(i − j)  =  −m·(i − edge)  −  m·(edge − j)          edge: where the chunk begins

(With a clock, c_i − c_j = (c_i − c_edge) + (c_edge − c_j).) The first part is the same for a whole row: it leaves the
softmax untouched and only shifts its log-sum-exp. The second is one number per key, a mask of one row that torch's
kernel takes. So nothing large is written (only sliding windows and segments need a written mask there). Both are exact
where it counts, because a key near the edge has a bias near zero; one such row over a whole text, slope × key position,
would round at the size of slope × length. The parts are
merged by log-sum-exp; backward calls the flash kernel's own backward with the merged result and adds up in place,
because slicing under autograd costs more than skipping saves.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trainshort import alibi
from trainshort.attention import decay
from trainshort.attention.backends.reference import materialize_bias, merge_by_lse, segment_starts, visibility_mask
from trainshort.attention.call import (
    MIN_TOLERANCE,
    AttentionCall,
    DecayBias,
    LinearBias,
    accumulation_dtype,
    contiguous_rows,
)

QUERY_TILE = 24
"""Query rows that decide together which keys they read; the same number as in tile.h."""
QUERY_CHUNK = 8 * QUERY_TILE
"""Queries in a chunk; 192 is also the shortest that the flash kernel cuts into pieces of 64."""
MAX_WINDOW_RATIO = 1.5
"""Neighbouring heads share a call when their windows differ by no more than this factor."""


flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class KeyRange:
    """Query rows, the heads they belong to, and the keys they attend to in one call."""

    rows: slice
    heads: slice
    keys: slice
    diagonal: bool


def forward(call: AttentionCall, out: Tensor, lse: Tensor, first: Tensor, dropped: Tensor) -> None:
    """Fill the output, the rows' log-sum-exp, each panel's first key, and the mass that may lie before it."""
    tolerance = call.tolerance if call.tolerance >= MIN_TOLERANCE else 0.0
    first.copy_(first_keys(call, tolerance))
    dtype = accumulation_dtype(out)
    summed = out if out.dtype == dtype else torch.empty(out.shape, dtype=dtype)
    masks = _Masks(call, dtype)
    for part in _parts(call, first):
        q, k, v = _operands(call, part)
        mask, shift = masks.get(part)
        part_out, part_lse = flash(q, k, v, attn_mask=mask, scale=call.softmax_scale)
        rows, rows_lse = summed[:, part.heads, part.rows], lse[:, part.heads, part.rows]
        if part.diagonal:
            rows.copy_(part_out)
            rows_lse.copy_(part_lse)
            continue
        part_lse = part_lse.to(lse.dtype) + shift
        if mask.shape[2] > 1:  # a written mask may hide all keys of a row: not a number, where it means nothing
            blind = mask.isneginf().all(-1)
            part_out, part_lse = part_out.masked_fill(blind[..., None], 0), part_lse.masked_fill(blind, -math.inf)
        for into, merged in zip(
            (rows, rows_lse), merge_by_lse(rows, rows_lse, part_out.to(dtype), part_lse), strict=True
        ):
            into.copy_(merged)
    if summed is not out:
        out.copy_(summed)
    dropped.copy_(_certificate(call, lse, first).clamp(max=tolerance))


def backward(
    call: AttentionCall,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fill the gradients of k and v, and add to that of q (float32 or float64, zeros before)."""
    group, grad_q = call.heads_per_kv_head, grads[0]
    dtype = grad_q.dtype
    wide_k, wide_v = (torch.zeros(x.shape, dtype=dtype) for x in grads[1:])
    masks = _Masks(call, dtype)
    for part in _parts(call, first):
        q, k, v = _operands(call, part)
        mask, shift = masks.get(part)
        rows = (slice(None), part.heads, part.rows)
        part_lse = (lse[rows] - shift).to(dtype)
        part_q, part_k, part_v = flash_backward(
            *(contiguous_rows(grad_out[rows]), q, k, v, out[rows], part_lse, 0.0, False),
            attn_mask=mask,
            scale=call.softmax_scale,
        )
        grad_q[rows] += part_q
        key_heads = torch.arange(part.heads.start, part.heads.stop) // group
        wide_k[:, :, part.keys].index_add_(1, key_heads, part_k.to(dtype))
        wide_v[:, :, part.keys].index_add_(1, key_heads, part_v.to(dtype))
    grads[1].copy_(wide_k)
    grads[2].copy_(wide_v)


def backward_decay(
    call: AttentionCall,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
) -> tuple[Float[Tensor, "batch heads k_len"], Float[Tensor, "batch heads q_len"]]:
    """The same, and the gradient of the clock: where it stands for keys, minus the sum of a column of score gradients,
    and where it stands for queries, the sum of a row. Torch's kernel does not give them away, so they are read off two
    more columns of queries and keys:

        [q 1 0] · [k 0 1] = q · k          gradients of the ones: the sums over rows, and over columns
    """
    width, dtype = call.q.shape[3], grads[0].dtype
    q, k, v, g, o = (torch.nn.functional.pad(x.to(dtype), (0, 2)) for x in (call.q, call.k, call.v, grad_out, out))
    # One key for each query head: a clock belongs to a query head.
    k, v = (x.repeat_interleave(call.heads_per_kv_head, dim=1) for x in (k, v))
    q[..., width], k[..., width + 1] = 1, 1
    more = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
    backward(replace(call, q=q, k=k, v=v, scale=call.softmax_scale), g, o, lse, first, more)
    grads[0].copy_(more[0][..., :width])
    for grad, wide_grad in zip(grads[1:], more[1:], strict=True):
        grad.copy_(wide_grad[..., :width].unflatten(1, (-1, call.heads_per_kv_head)).sum(2))
    rows, columns = more[0][..., width + 1].double(), more[1][..., width].double()
    return -columns / call.softmax_scale, rows / call.softmax_scale


def first_keys(call: AttentionCall, tolerance: float) -> Int[Tensor, "batch heads panels"]:
    """The first key that each panel of query rows reads: whatever is latest of proof, sliding window and segments."""
    batch, heads, q_len, _ = call.q.shape
    k_len = call.k.shape[2]
    finite = bool(call.v.isfinite().all())  # 0 · NaN is NaN: a value that is not finite matters at any distance
    allowed = tolerance if finite else 0.0
    starts = torch.arange(k_len - q_len, k_len, QUERY_CHUNK)
    reach = starts - (k_len if call.window is None else call.window) + 1
    if call.segment_ids is not None:
        earliest = segment_starts(call.segment_ids)[1][:, k_len - q_len :].long()
        padded = torch.nn.functional.pad(earliest, (0, -q_len % QUERY_CHUNK), value=k_len)
        reach = torch.maximum(reach, padded.unflatten(1, (-1, QUERY_CHUNK)).amin(-1))[:, None]
    # A chunk's diagonal block is always whole. Where everything is read there is nothing before key 0.
    first = torch.maximum(_proven_first(call, allowed, starts), reach).clamp(min=0)
    first = torch.minimum(first, starts).expand(batch, heads, -1)
    return first.repeat_interleave(QUERY_CHUNK // QUERY_TILE, dim=2)[..., : -(-q_len // QUERY_TILE)]


def _proven_first(
    call: AttentionCall, tolerance: float, starts: Int[Tensor, " chunks"]
) -> Int[Tensor, "batch heads chunks"]:
    """The first key that each chunk of queries must read, by the proof."""
    if isinstance(call.bias, DecayBias):
        rows = decay.proven_first_keys(
            alibi.most_excess(call.q, call.k, call.softmax_scale), call.bias.cumulative, tolerance
        )
        padded = torch.nn.functional.pad(rows, (0, -rows.shape[2] % QUERY_CHUNK), value=call.k.shape[2])
        return padded.unflatten(2, (-1, QUERY_CHUNK)).amin(-1)
    windows = alibi.proven_windows(call.q, call.k, _slopes(call), tolerance, QUERY_CHUNK, call.softmax_scale)
    return torch.where(windows >= call.k.shape[2], 0, starts - windows + 1)


def _parts(call: AttentionCall, first: Int[Tensor, "batch heads panels"]) -> Iterator[KeyRange]:
    """For each chunk of queries its diagonal block, then what lies before it, by groups of heads with like windows."""
    heads, q_len = call.q.shape[1:3]
    past = call.k.shape[2] - q_len
    earliest = first[..., :: QUERY_CHUNK // QUERY_TILE].amin(0).tolist()  # (heads, chunks)
    for chunk, start in enumerate(range(0, q_len, QUERY_CHUNK)):
        rows = slice(start, min(start + QUERY_CHUNK, q_len))
        yield KeyRange(rows, slice(0, heads), slice(past + rows.start, past + rows.stop), diagonal=True)
        reads = [past + start - earliest[head][chunk] for head in range(heads)]
        begin = 0
        for head in range(1, heads + 1):
            own = reads[begin : head + 1]
            if head == heads or max(own) > MAX_WINDOW_RATIO * min(own):
                if longest := max(reads[begin:head]):
                    keys = slice(past + start - longest, past + start)
                    yield KeyRange(rows, slice(begin, head), keys, diagonal=False)
                begin = head


def _slopes(call: AttentionCall) -> Float[Tensor, " heads"]:
    assert isinstance(call.bias, LinearBias), "checked by the backend"
    return call.bias.slopes


def _operands(call: AttentionCall, part: KeyRange) -> tuple[Tensor, Tensor, Tensor]:
    group, heads = call.heads_per_kv_head, part.heads
    k, v = call.k[:, :, part.keys], call.v[:, :, part.keys]
    if group == 1:
        k, v = k[:, heads], v[:, heads]
    else:
        shared = torch.arange(heads.start, heads.stop) // group
        k, v = k[:, shared], v[:, shared]
    return contiguous_rows(call.q[:, heads, part.rows]), contiguous_rows(k), contiguous_rows(v)


class _Masks:
    """The bias of each part, up to what is constant in a row, and that constant."""

    def __init__(self, call: AttentionCall, dtype: torch.dtype) -> None:
        self.call = call
        self.dtype = dtype
        self.diagonals: dict[int, Tensor] = {}  # without segments, diagonal blocks of one size are all the same

    def get(self, part: KeyRange) -> tuple[Tensor, Tensor | float]:
        size = part.rows.stop - part.rows.start
        clock = self.call.bias.cumulative if isinstance(self.call.bias, DecayBias) else None
        if part.diagonal and self.call.segment_ids is None and clock is None:
            if size not in self.diagonals:
                self.diagonals[size] = self._written(part)
            return self.diagonals[size], 0.0
        if part.diagonal or self.call.window is not None or self.call.segment_ids is not None:
            return self._written(part), 0.0
        if clock is not None:
            past, own = self.call.k.shape[2] - self.call.q.shape[2], clock.double()[:, part.heads]
            edge = own[..., part.keys.stop, None]
            rows = own[..., past + part.rows.start : past + part.rows.stop]
            return (edge - own[..., part.keys]).to(self.dtype)[:, :, None, :], rows - edge
        slopes = _slopes(self.call)[part.heads, None].float().to(self.dtype)
        before_edge = torch.arange(part.keys.stop - part.keys.start, 0, -1)
        return (-slopes * before_edge)[None, :, None, :], -slopes.double() * torch.arange(size)

    def _written(self, part: KeyRange) -> Tensor:
        written = materialize_bias(self.call, part.rows, part.keys)
        assert written is not None
        seen = visibility_mask(self.call, part.rows, part.keys)
        one_or_all = written if written.dim() == 4 else written[None]
        return one_or_all[:, part.heads].to(self.dtype).masked_fill(~seen, -math.inf)


def _certificate(
    call: AttentionCall, lse: Float[Tensor, "batch heads q_len"], first: Int[Tensor, "batch heads panels"]
) -> Float[Tensor, "batch heads panels"]:
    """The most that a panel's rows can have left out: the bound of `alibi.proven_windows` again, with the row's real
    denominator in place of its own key alone, and the largest norm among the keys that were left out."""
    heads, q_len = call.q.shape[1:3]
    k_len, group = call.k.shape[2], heads // call.k.shape[1]
    rows = torch.arange(q_len)
    start = first.long()[..., rows // QUERY_TILE]  # (batch, heads, q_len)
    largest = torch.linalg.vector_norm(call.k, dim=-1, dtype=torch.float64).cummax(dim=-1).values
    largest = largest.repeat_interleave(group, dim=1).gather(2, (start - 1).clamp(min=0))
    norm = torch.linalg.vector_norm(call.q, dim=-1, dtype=torch.float64)
    excess = norm * largest * call.softmax_scale - lse.double()
    if isinstance(call.bias, DecayBias):
        before = decay.log_mass_before(call.bias.cumulative).gather(2, start)
        mass = torch.exp(excess + call.bias.cumulative.double()[..., k_len - q_len :] + before)
    else:
        nearest = rows + k_len - q_len - start + 1  # distance of the nearest key left out
        mass = alibi.mass_beyond(excess, _slopes(call).double()[:, None], nearest)
    hidden = start <= _first_visible_key(call)[:, None]
    # Where something is left out, nobody shall read 0.
    mass = torch.where(hidden, 0.0, mass.clamp(min=torch.finfo(torch.float32).tiny))
    padded = torch.nn.functional.pad(mass, (0, -q_len % QUERY_TILE))
    return padded.unflatten(2, (-1, QUERY_TILE)).amax(-1).float()


def _first_visible_key(call: AttentionCall) -> Int[Tensor, "one_or_batch q_len"]:
    """The first key each query row may see."""
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    reach = torch.arange(k_len - q_len, k_len) - (k_len if call.window is None else call.window) + 1
    if call.segment_ids is not None:
        reach = torch.maximum(reach, segment_starts(call.segment_ids)[1][:, k_len - q_len :])
    return reach.clamp(min=0).expand(1 if call.segment_ids is None else call.q.shape[0], -1)


@torch.compiler.assume_constant_result  # an answer, not an experiment for torch.compile to trace
def unsupported_reason() -> str | None:
    """Why this cannot be computed here; None when it can."""
    return row_mask_unsupported_reason()


@cache
def row_mask_unsupported_reason() -> str | None:
    """Torch does not document that its CPU flash kernel takes a float32 row mask, forward and backward, also for
    half-precision inputs. So it is tried once per process on a few numbers; None when it holds."""
    with torch.inference_mode(False), torch.enable_grad():  # whatever the caller is in the middle of
        generator = torch.Generator().manual_seed(0)
        q, k, v, g = (torch.randn(1, 2, 5, 8, generator=generator) for _ in range(4))
        row = torch.linspace(-1, 0, 5).expand(1, 2, 1, 5)
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
