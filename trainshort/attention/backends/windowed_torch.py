"""Attention with proven windows in plain PyTorch, for machines on which the C kernel cannot be built.

The queries are processed in chunks. The keys of a chunk's own positions (the diagonal block) get a mask tensor. The
keys before the chunk are read as far back as the window of each head reaches. Heads with similar windows share one call
of PyTorch's flash attention kernel. All of these keys lie before the position where the chunk starts (the edge), so the
bias is a sum of two terms:

    −m·(i − j)  =  −m·(i − edge)  −  m·(edge − j)        for ALiBi slopes m
     c_i − c_j  =  (c_i − c_edge) +  (c_edge − c_j)      for a cumulative log decay c

The first term is the same for all keys of a query, so the term changes only the log-sum-exp. The second term is one
number per key, so the mask has only one row. Keys near the edge have a bias near zero, so the rounding errors of the
mask are small where the attention weights are large. A mask with a row for each query is needed only with a sliding
window or with segments.

The results of the blocks are combined by their log-sum-exps. The backward pass calls the backward function of the flash
attention kernel directly, because autograd would spend more time on slicing than the skipped keys save.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
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

# The number of query rows that have a common first key. The value is the same as QUERY_TILE in matmul.h.
QUERY_TILE = 24

# The number of queries in a chunk. With 192 or more queries, the flash attention kernel uses its larger blocks.
QUERY_CHUNK = 8 * QUERY_TILE

# Neighboring heads share one call of the kernel if their windows differ by at most this factor.
MAX_WINDOW_RATIO = 1.5

WRONG_ROW_MASK_RESULT = "PyTorch's CPU kernel computes wrong results for a mask with one row; use 'sdpa'"

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def count_query_tiles(q_len: int) -> int:
    """Return the number of query tiles (groups of `QUERY_TILE` query rows). The last tile may have fewer rows."""
    return -(-q_len // QUERY_TILE)


@dataclass(frozen=True)
class KeyRange:
    """The queries, heads and keys of one call of the flash attention kernel.

    Attributes:
        rows: The queries, where 0 is the first query of the attention call.
        heads: The query heads.
        keys: The keys.
        is_diagonal: Whether the keys are at the positions of the queries. Otherwise all keys lie before the queries.
    """

    rows: slice
    heads: slice
    keys: slice
    is_diagonal: bool


def forward(call: AttentionCall, out: Tensor, lse: Tensor, first_keys: Tensor, dropped_mass: Tensor) -> None:
    """Compute attention and write the results into the given tensors.

    Args:
        call: The arguments of the call, with a `LinearBias` or a `DecayBias`.
        out: Receives the attention output.
        lse: Receives the log-sum-exp of the scores of each query.
        first_keys: Receives the first key that each query tile (group of query rows) reads.
        dropped_mass: Receives an upper bound on the softmax mass that each query tile skipped.
    """
    tolerance = call.tolerance if call.tolerance >= MIN_TOLERANCE else 0.0
    first_keys.copy_(compute_first_keys(call, tolerance))
    dtype = accumulation_dtype(out)
    if out.dtype == dtype:
        total_out = out
    else:
        total_out = torch.empty(out.shape, dtype=dtype)
    masks = _Masks(call, dtype)

    # The diagonal block of each chunk comes first, and sets the values that later blocks are merged into.
    for key_range in _key_ranges(call, first_keys):
        q, k, v = _slice_inputs(call, key_range)
        mask, shift = masks.get(key_range)
        block_out, block_lse = flash(q, k, v, attn_mask=mask, scale=call.softmax_scale)
        rows_out = total_out[:, key_range.heads, key_range.rows]
        rows_lse = lse[:, key_range.heads, key_range.rows]
        if key_range.is_diagonal:
            rows_out.copy_(block_out)
            rows_lse.copy_(block_lse)
            continue

        block_lse = block_lse.to(lse.dtype) + shift
        has_mask_per_row = mask.shape[2] > 1
        if has_mask_per_row:
            # The mask can hide all keys from a row. The kernel then returns NaN for this row.
            sees_nothing = mask.isneginf().all(-1)
            block_out = block_out.masked_fill(sees_nothing[..., None], 0)
            block_lse = block_lse.masked_fill(sees_nothing, -math.inf)
        merged_out, merged_lse = merge_by_lse(rows_out, rows_lse, block_out.to(dtype), block_lse)
        rows_out.copy_(merged_out)
        rows_lse.copy_(merged_lse)

    if total_out is not out:
        out.copy_(total_out)
    dropped_mass.copy_(_bound_dropped_mass(call, lse, first_keys).clamp(max=tolerance))


def backward(
    call: AttentionCall,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    first_keys: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Compute the gradients of the queries, keys and values.

    Args:
        call: The arguments of the call, with a `LinearBias` or a `DecayBias`.
        grad_out: The gradient of the output.
        out: The output of `forward`.
        lse: The log-sum-exp of `forward`.
        first_keys: The first keys of `forward`.
        grads: Receives the gradients of the queries, keys and values. The gradient of the queries is added to its
            tensor, which must be float32 or float64. The other two tensors are overwritten.
    """
    grad_q, grad_k, grad_v = grads
    dtype = grad_q.dtype
    total_grad_k = torch.zeros(grad_k.shape, dtype=dtype)
    total_grad_v = torch.zeros(grad_v.shape, dtype=dtype)
    masks = _Masks(call, dtype)

    for key_range in _key_ranges(call, first_keys):
        q, k, v = _slice_inputs(call, key_range)
        mask, shift = masks.get(key_range)
        rows = (slice(None), key_range.heads, key_range.rows)
        block_lse = (lse[rows] - shift).to(dtype)
        block_grad_q, block_grad_k, block_grad_v = flash_backward(
            contiguous_rows(grad_out[rows]),
            q,
            k,
            v,
            out[rows],
            block_lse,
            0.0,  # dropout
            False,  # is_causal
            attn_mask=mask,
            scale=call.softmax_scale,
        )
        grad_q[rows] += block_grad_q
        # The gradients of all query heads that share a key head are added.
        kv_heads = torch.arange(key_range.heads.start, key_range.heads.stop) // call.heads_per_kv_head
        total_grad_k[:, :, key_range.keys].index_add_(1, kv_heads, block_grad_k.to(dtype))
        total_grad_v[:, :, key_range.keys].index_add_(1, kv_heads, block_grad_v.to(dtype))

    grad_k.copy_(total_grad_k)
    grad_v.copy_(total_grad_v)


def backward_decay(
    call: AttentionCall,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    first_keys: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
) -> tuple[Float[Tensor, "batch heads k_len"], Float[Tensor, "batch heads q_len"]]:
    """Compute the gradients of the queries, keys, values and the cumulative log decay.

    The gradient of the cumulative log decay is the sum of each row of score gradients (as a query), minus the sum of
    each column (as a key). PyTorch's kernel does not return these sums. The queries and keys therefore get two
    additional columns, which do not change the scores. The gradients of the zeros contain the sums:

        [q 1 0] · [k 0 1] = q · k

    Args:
        call: The arguments of the call, with a `DecayBias`.
        grad_out: The gradient of the output.
        out: The output of `forward`.
        lse: The log-sum-exp of `forward`.
        first_keys: The first keys of `forward`.
        grads: Receives the gradients of the queries, keys and values.

    Returns:
        The gradient of the cumulative log decay as a key, and the gradient as a query.
    """
    grad_q, grad_k, grad_v = grads
    head_dim = call.q.shape[3]
    dtype = grad_q.dtype
    heads_per_kv_head = call.heads_per_kv_head

    q = _append_two_columns(call.q, dtype)
    k = _append_two_columns(call.k, dtype)
    v = _append_two_columns(call.v, dtype)
    # Each query head has its own decay, so each query head needs its own key head.
    k = k.repeat_interleave(heads_per_kv_head, dim=1)
    v = v.repeat_interleave(heads_per_kv_head, dim=1)
    q[..., head_dim] = 1
    k[..., head_dim + 1] = 1

    wide_grad_q = torch.zeros_like(q)
    wide_grad_k = torch.zeros_like(k)
    wide_grad_v = torch.zeros_like(v)
    backward(
        # The default scale would depend on the number of columns, so the scale is passed explicitly.
        replace(call, q=q, k=k, v=v, scale=call.softmax_scale),
        _append_two_columns(grad_out, dtype),
        _append_two_columns(out, dtype),
        lse,
        first_keys,
        (wide_grad_q, wide_grad_k, wide_grad_v),
    )

    grad_q.copy_(wide_grad_q[..., :head_dim])
    # The gradients of all query heads that share a key head are added.
    grad_k.copy_(wide_grad_k[..., :head_dim].unflatten(1, (-1, heads_per_kv_head)).sum(2))
    grad_v.copy_(wide_grad_v[..., :head_dim].unflatten(1, (-1, heads_per_kv_head)).sum(2))
    row_sums = wide_grad_q[..., head_dim + 1].double() / call.softmax_scale
    column_sums = wide_grad_k[..., head_dim].double() / call.softmax_scale
    return -column_sums, row_sums


def _append_two_columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to `dtype` and append two columns of zeros to its last dimension."""
    return F.pad(x.to(dtype), (0, 2))


def compute_first_keys(call: AttentionCall, tolerance: float) -> Int[Tensor, "batch heads tiles"]:
    """Return the first key that each query tile (group of query rows) reads.

    The first key is the latest of three positions: the first key according to the proof, the first key in the sliding
    window, and the first key of the segment.

    Args:
        call: The arguments of the call, with a `LinearBias` or a `DecayBias`.
        tolerance: The softmax mass (the sum of attention weights) that may be skipped for each query.
    """
    batch, heads, q_len, _ = call.q.shape
    k_len = call.k.shape[2]
    # A value that is infinite or NaN changes the output at any distance, because 0 · NaN is NaN.
    if not call.v.isfinite().all():
        tolerance = 0.0

    # Queries are processed in chunks of QUERY_CHUNK queries. A chunk consists of several tiles.
    chunk_starts = torch.arange(call.query_start, k_len, QUERY_CHUNK)
    window = k_len if call.window is None else call.window
    first_visible = chunk_starts - window + 1
    if call.segment_ids is not None:
        _, segment_start = segment_starts(call.segment_ids)
        earliest_start = _min_per_chunk(segment_start[:, call.query_start :].long(), padding_value=k_len)
        first_visible = torch.maximum(first_visible, earliest_start)[:, None]

    proven_first = _proven_first_keys(call, tolerance, chunk_starts)
    first_keys = torch.maximum(proven_first, first_visible).clamp(min=0)
    # The diagonal block (the keys at the positions of the queries of a chunk) is always read completely.
    first_keys = torch.minimum(first_keys, chunk_starts).expand(batch, heads, -1)
    tiles_per_chunk = QUERY_CHUNK // QUERY_TILE
    return first_keys.repeat_interleave(tiles_per_chunk, dim=2)[..., : count_query_tiles(q_len)]


def _min_per_chunk(positions: Int[Tensor, "... q_len"], padding_value: int) -> Int[Tensor, "... chunks"]:
    """Return the smallest position of each chunk of queries. The last chunk is filled with the padding value."""
    missing_rows = -positions.shape[-1] % QUERY_CHUNK
    padded = F.pad(positions, (0, missing_rows), value=padding_value)
    return padded.unflatten(-1, (-1, QUERY_CHUNK)).amin(-1)


def _proven_first_keys(
    call: AttentionCall, tolerance: float, chunk_starts: Int[Tensor, " chunks"]
) -> Int[Tensor, "batch heads chunks"]:
    """Return the first key that each chunk of queries must read according to the proof.

    The proof is an upper bound on the softmax mass (sum of attention weights) of all earlier keys: the bound is at most
    `tolerance`.

    Args:
        call: The arguments of the call, with a `LinearBias` or a `DecayBias`.
        tolerance: The softmax mass that may be skipped for each query.
        chunk_starts: The key position of the first query of each chunk.
    """
    k_len = call.k.shape[2]
    if isinstance(call.bias, DecayBias):
        excess = alibi.max_excess(call.q, call.k, call.softmax_scale)
        first_keys_of_rows = decay.proven_first_keys(excess, call.bias.cumulative, tolerance)
        return _min_per_chunk(first_keys_of_rows, padding_value=k_len)
    windows = alibi.proven_windows(call.q, call.k, _get_slopes(call), tolerance, QUERY_CHUNK, call.softmax_scale)
    # A window of k_len means that no key can be skipped.
    return torch.where(windows >= k_len, 0, chunk_starts - windows + 1)


def _key_ranges(call: AttentionCall, first_keys: Int[Tensor, "batch heads tiles"]) -> Iterator[KeyRange]:
    """Yield the calls of the flash attention kernel that together compute the attention.

    Each chunk of queries starts with its diagonal block (the keys at the positions of the queries). The keys before the
    diagonal block follow, in one call for each group of neighboring heads that read similar numbers of keys.

    Args:
        call: The arguments of the call.
        first_keys: The first key that each query tile reads, from `compute_first_keys`.
    """
    heads, q_len = call.q.shape[1:3]
    tiles_per_chunk = QUERY_CHUNK // QUERY_TILE
    # All tiles of a chunk have the same first key, so the first tile of each chunk is enough.
    first_keys_of_chunks = first_keys[..., ::tiles_per_chunk]
    # chunk_first[head][chunk] is the first key that any sequence of the batch reads.
    chunk_first = first_keys_of_chunks.amin(0).tolist()
    for chunk, start in enumerate(range(0, q_len, QUERY_CHUNK)):
        rows = slice(start, min(start + QUERY_CHUNK, q_len))
        edge = call.query_start + start  # the key position of the first query of the chunk
        diagonal_keys = slice(edge, call.query_start + rows.stop)
        yield KeyRange(rows, slice(0, heads), diagonal_keys, is_diagonal=True)

        # The number of keys that each head reads before the edge (the start of the diagonal block).
        key_counts = [edge - chunk_first[head][chunk] for head in range(heads)]
        for group in _group_similar(key_counts):
            largest_count = max(key_counts[group])
            if largest_count > 0:
                yield KeyRange(rows, group, slice(edge - largest_count, edge), is_diagonal=False)


def _group_similar(key_counts: list[int]) -> list[slice]:
    """Divide heads into groups of neighboring heads that read similar numbers of keys.

    In a group, the largest number of keys is at most `MAX_WINDOW_RATIO` times the smallest number.

    Args:
        key_counts: The number of keys that each head reads.

    Returns:
        A range of heads for each group.

    Example:
        With a ratio of 1.5, [10, 12, 40, 50] gives [slice(0, 2), slice(2, 4)].
    """
    groups = []
    group_start = 0
    for head in range(1, len(key_counts)):
        counts = key_counts[group_start : head + 1]  # the current group with this head
        if max(counts) > MAX_WINDOW_RATIO * min(counts):
            groups.append(slice(group_start, head))
            group_start = head
    groups.append(slice(group_start, len(key_counts)))
    return groups


def _get_slopes(call: AttentionCall) -> Float[Tensor, " heads"]:
    """Return the ALiBi slopes of a call with a `LinearBias`."""
    assert isinstance(call.bias, LinearBias), "The backend supports only LinearBias and DecayBias."
    return call.bias.slopes


def _slice_inputs(call: AttentionCall, key_range: KeyRange) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of a key range, with one key head for each query head.

    A key range consists of some queries (`rows`), some query heads and some keys, which are computed together.
    """
    q = call.q[:, key_range.heads, key_range.rows]
    k = call.k[:, :, key_range.keys]
    v = call.v[:, :, key_range.keys]
    if call.heads_per_kv_head == 1:
        k = k[:, key_range.heads]
        v = v[:, key_range.heads]
    else:
        # Several query heads share a key-value head. With 2 query heads per key-value head: 0, 0, 1, 1, ...
        kv_heads = torch.arange(key_range.heads.start, key_range.heads.stop) // call.heads_per_kv_head
        k = k[:, kv_heads]
        v = v[:, kv_heads]
    return contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)


class _Masks:
    """Computes the mask and the log-sum-exp shift of each call of the flash attention kernel."""

    def __init__(self, call: AttentionCall, dtype: torch.dtype) -> None:
        self.call = call
        self.dtype = dtype
        # With ALiBi slopes and without segments, all diagonal blocks with the same number of rows have the same mask.
        self.diagonal_masks: dict[int, Tensor] = {}

    def get(self, key_range: KeyRange) -> tuple[Tensor, Tensor | float]:
        """Return the mask of a key range, and the shift that must be added to the log-sum-exp of the kernel.

        A mask contains the bias. A full mask has one row for each query, and its shift is 0. If all keys lie before the
        chunk and are visible, the mask has only one row. The shift is then the part of the bias that depends only on
        the query.
        """
        call = self.call
        uses_decay = isinstance(call.bias, DecayBias)
        if key_range.is_diagonal:
            if call.segment_ids is not None or uses_decay:
                return self._full_mask(key_range), 0.0
            row_count = key_range.rows.stop - key_range.rows.start
            if row_count not in self.diagonal_masks:
                self.diagonal_masks[row_count] = self._full_mask(key_range)
            return self.diagonal_masks[row_count], 0.0

        if call.window is not None or call.segment_ids is not None:
            return self._full_mask(key_range), 0.0
        if uses_decay:
            return self._decay_row_mask(key_range)
        return self._slope_row_mask(key_range)

    def _full_mask(self, key_range: KeyRange) -> Tensor:
        """Return a mask with one value per query and key: the bias, or minus infinity for keys that are not visible.

        The shape is (1 or batch, heads, rows, keys), for the heads, rows (queries) and keys of the key range.
        """
        bias = materialize_bias(self.call, key_range.rows, key_range.keys)
        assert bias is not None, "The backend supports only calls with a bias."
        if bias.dim() == 3:
            bias = bias[None]  # Add a batch dimension.
        is_visible = visibility_mask(self.call, key_range.rows, key_range.keys)
        return bias[:, key_range.heads].to(self.dtype).masked_fill(~is_visible, -math.inf)

    def _decay_row_mask(self, key_range: KeyRange) -> tuple[Tensor, Tensor]:
        """Return the mask c_edge − c_j with one row, and the shift c_i − c_edge of each query.

        c is the cumulative log decay, j is a key, i is a query, and the edge is the position after the last key. The
        bias c_i − c_j is the sum of both parts. A mask with one row for all queries needs less memory.
        """
        assert isinstance(self.call.bias, DecayBias)
        query_start = self.call.query_start
        cumulative = self.call.bias.cumulative.double()[:, key_range.heads]
        edge_value = cumulative[..., key_range.keys.stop, None]
        key_values = cumulative[..., key_range.keys]
        query_values = cumulative[..., query_start + key_range.rows.start : query_start + key_range.rows.stop]
        mask = (edge_value - key_values).to(self.dtype)[:, :, None, :]
        return mask, query_values - edge_value

    def _slope_row_mask(self, key_range: KeyRange) -> tuple[Tensor, Tensor]:
        """Return the mask −m·(edge − j) with one row, and the shift −m·(i − edge) of each query.

        m is the slope of a head, j is a key, i is a query, and the edge is the position after the last key. The edge is
        also the position of the first query. ALiBi's bias −m·(i − j) is the sum of both parts. A mask with one row for
        all queries needs less memory.
        """
        slopes = _get_slopes(self.call)[key_range.heads, None].float().to(self.dtype)
        key_count = key_range.keys.stop - key_range.keys.start
        row_count = key_range.rows.stop - key_range.rows.start
        key_distance_to_edge = torch.arange(key_count, 0, -1)
        query_distance_to_edge = torch.arange(row_count)
        mask = -slopes * key_distance_to_edge
        shift = -slopes.double() * query_distance_to_edge
        return mask[None, :, None, :], shift


def _bound_dropped_mass(
    call: AttentionCall, lse: Float[Tensor, "batch heads q_len"], first_keys: Int[Tensor, "batch heads tiles"]
) -> Float[Tensor, "batch heads tiles"]:
    """Compute an upper bound on the softmax mass that each query tile (group of query rows) skipped.

    The bound is the bound of `alibi.proven_windows` with two improvements: it uses the computed log-sum-exp of each
    query, and the largest norm of the skipped keys.

    Args:
        call: The arguments of the call, with a `LinearBias` or a `DecayBias`.
        lse: The log-sum-exp of the scores of each query.
        first_keys: The first key that each query tile reads.
    """
    q_len = call.q.shape[2]
    rows = torch.arange(q_len)
    first_of_row = first_keys.long()[..., rows // QUERY_TILE]  # (batch, heads, q_len)

    # The largest norm of the keys that each query skipped.
    key_norm = torch.linalg.vector_norm(call.k, dim=-1, dtype=torch.float64)
    query_norm = torch.linalg.vector_norm(call.q, dim=-1, dtype=torch.float64)
    max_norm_until = key_norm.cummax(dim=-1).values.repeat_interleave(call.heads_per_kv_head, dim=1)
    last_skipped_key = (first_of_row - 1).clamp(min=0)
    max_skipped_norm = max_norm_until.gather(2, last_skipped_key)
    excess = query_norm * max_skipped_norm * call.softmax_scale - lse.double()

    if isinstance(call.bias, DecayBias):
        cumulative = call.bias.cumulative
        log_mass = decay.log_mass_before(cumulative).gather(2, first_of_row)
        mass = torch.exp(excess + cumulative.double()[..., call.query_start :] + log_mass)
    else:
        nearest_skipped_distance = rows + call.query_start - first_of_row + 1
        mass = alibi.mass_beyond(excess, _get_slopes(call).double()[:, None], nearest_skipped_distance)

    # Keys that the query does not see were not skipped. If a key was skipped, the bound must not be rounded to 0.
    nothing_skipped = first_of_row <= _first_visible_key(call)[:, None]
    smallest_float = torch.finfo(torch.float32).tiny
    mass = torch.where(nothing_skipped, 0.0, mass.clamp(min=smallest_float))
    padded_mass = F.pad(mass, (0, -q_len % QUERY_TILE))
    return padded_mass.unflatten(2, (-1, QUERY_TILE)).amax(-1).float()


def _first_visible_key(call: AttentionCall) -> Int[Tensor, "one_or_batch q_len"]:
    """Return the first key that each query sees, according to the sliding window and the segments (documents)."""
    batch = call.q.shape[0]
    k_len = call.k.shape[2]
    window = k_len if call.window is None else call.window
    first_visible = torch.arange(call.query_start, k_len) - window + 1
    if call.segment_ids is None:
        return first_visible.clamp(min=0).expand(1, -1)
    _, segment_start = segment_starts(call.segment_ids)
    first_visible = torch.maximum(first_visible, segment_start[:, call.query_start :])
    return first_visible.clamp(min=0).expand(batch, -1)


# torch.compile must not trace the self-test, so the decorator runs the function while the graph is compiled.
@torch.compiler.assume_constant_result
def unsupported_reason() -> str | None:
    """Return why this implementation cannot be used with the installed PyTorch, or None if it can be used."""
    return row_mask_unsupported_reason()


@cache
def row_mask_unsupported_reason() -> str | None:
    """Test whether PyTorch's CPU flash attention kernel supports a float32 mask with one row.

    PyTorch does not document this feature. The test compares the forward pass, the backward pass and a half-precision
    forward pass with the plain formula. The test runs once per process.

    Returns:
        Why the kernel cannot be used, or None if all results are correct.
    """
    # The test must also work if the caller is in inference mode.
    with torch.inference_mode(False), torch.enable_grad():
        generator = torch.Generator().manual_seed(0)
        q, k, v, grad_out = (torch.randn(1, 2, 5, 8, generator=generator) for _ in range(4))
        row_mask = torch.linspace(-1, 0, 5).expand(1, 2, 1, 5)
        q64, k64, v64 = (x.double().requires_grad_() for x in (q, k, v))
        scores = q64 @ k64.transpose(-1, -2) + row_mask
        expected_out = scores.softmax(-1) @ v64
        expected_grads = torch.autograd.grad(expected_out, (q64, k64, v64), grad_out.double())
    try:
        with torch.no_grad():
            out, lse = flash(q, k, v, attn_mask=row_mask, scale=1.0)
            grads = flash_backward(grad_out, q, k, v, out, lse, 0.0, False, attn_mask=row_mask, scale=1.0)
            half_out, _ = flash(q.bfloat16(), k.bfloat16(), v.bfloat16(), attn_mask=row_mask, scale=1.0)
    except (RuntimeError, TypeError) as error:
        return f"PyTorch's CPU kernel does not accept a mask with one row ({error}); use 'sdpa'"

    results = (out, *grads)
    expected_results = (expected_out, *expected_grads)
    for result, expected in zip(results, expected_results, strict=True):
        if not torch.allclose(result.double(), expected, atol=1e-4):
            return WRONG_ROW_MASK_RESULT
    if not torch.allclose(half_out.double(), expected_out, atol=0.1):
        return WRONG_ROW_MASK_RESULT
    return None
