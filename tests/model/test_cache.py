"""Caches: the growing one copies little; the window forgets exactly; the bounded one keeps its promise and says so."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainshort import Cache, InputError, LinearBias, TransformerLM, alibi, attend
from trainshort.config.presets import presets
from trainshort.model.cache import BatchedCache, BoundedCache, LayerCache, WindowCache, bounded, ring_buffer
from trainshort.model.cache.bounded import BoundedLayer
from trainshort.model.cache.sliding_window import WindowLayer


def test_appending_returns_everything_so_far():
    cache, k, v = LayerCache(), torch.randn(2, 3, 300, 4), torch.randn(2, 3, 300, 4)
    end = 0
    for size in (1, 70, 1, 100, 128):
        got_k, got_v = cache.append(k[:, :, end : end + size], v[:, :, end : end + size])
        end += size
        assert torch.equal(got_k, k[:, :, :end])
        assert torch.equal(got_v, v[:, :, :end])
    assert cache.length == 300


def test_room_at_most_doubles():
    cache, token = LayerCache(), torch.randn(1, 2, 1, 4)
    moves = set()
    for _ in range(1000):
        k, _ = cache.append(token, token)
        moves.add(k.data_ptr())
    assert cache.bytes <= 2 * 1000 * 2 * 2 * 4 * 4
    assert len(moves) <= 6


def test_a_cache_is_for_one_batch():
    model, cache = TransformerLM(presets.get("tiny")()), Cache()
    with torch.no_grad():
        model(torch.ones(2, 3, dtype=torch.long), cache=cache)
        with pytest.raises(InputError, match="holds 2 sequences, but the input has 1"):
            model(torch.ones(1, 3, dtype=torch.long), cache=cache)


def test_a_cache_is_not_for_training():
    with pytest.raises(InputError, match="cannot be trained through"):
        TransformerLM(presets.get("tiny")())(torch.ones(2, 3, dtype=torch.long), cache=Cache())


def inputs(heads, kv_heads, length, dim=12, loud=2.0):
    q = torch.randn(1, heads, length, dim) * loud
    return q, torch.randn(1, kv_heads, length, dim), torch.randn(1, kv_heads, length, dim)


def pieces(layer, q, k, v, sizes, **options):
    """The layer's outputs, fed in pieces."""
    outs, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        outs.append(layer.attend(q[:, :, part], k[:, :, part], v[:, :, part], **options))
        start += size
    return torch.cat(outs, dim=2)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 20))
def test_a_window_is_the_sliding_window_of_attend(sizes, window):
    q, k, v = inputs(4, 2, sum(sizes))
    bias = LinearBias(alibi.slopes(4))
    layer = WindowLayer(window, 0)
    torch.testing.assert_close(pieces(layer, q, k, v, sizes, bias=bias), attend(q, k, v, bias=bias, window=window))
    assert layer.length == sum(sizes)


def test_a_window_has_bounded_memory():
    layer, (q, k, v) = WindowLayer(50, 2), inputs(2, 2, 1000)
    pieces(layer, q, k, v, [1] * 400, bias=None)
    early = layer.bytes
    pieces(layer, q, k, v, [1] * 600, bias=None)
    assert layer.bytes == early <= 2 * 2 * 12 * 4 * (2 * 50 + 64 + 2)


def sinks_oracle(q, k, v, slopes, window, sinks):
    """Row by row: the kept keys as if they were all there is."""
    rows = []
    for i in range(q.shape[2]):
        kept = [j for j in range(i + 1) if j < sinks or i - j < window]
        bias = LinearBias(slopes) if slopes is not None else None
        rows.append(attend(q[:, :, i : i + 1], k[:, :, kept], v[:, :, kept], bias=bias, backend="reference"))
    return torch.cat(rows, dim=2)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("sizes", [[40], [1] * 40, [3, 1, 1, 20, 15], [2, 38]], ids=str)
def test_sinks_count_distances_inside_the_cache(biased, sizes):
    q, k, v = inputs(4, 2, 40)
    slopes = alibi.slopes(4) if biased else None
    got = pieces(WindowLayer(6, 4), q, k, v, sizes, bias=LinearBias(slopes) if biased else None)
    torch.testing.assert_close(got, sinks_oracle(q, k, v, slopes, 6, 4), atol=1e-5, rtol=1e-5)


def test_windows_that_cannot_be():
    with pytest.raises(InputError, match="a window is at least 1"):
        WindowCache(window=0)


def test_rows_keep_their_own_positions():
    model = TransformerLM(presets.get("tiny")().replace(position="rotary")).eval()
    texts = [torch.randint(256, (1, n)) for n in (3, 9)]
    caches, newest = [Cache(), Cache()], torch.tensor([[5], [6]])
    with torch.no_grad():
        for text, cache in zip(texts, caches, strict=True):
            model(text, cache=cache)
        together = model(newest, cache=BatchedCache(caches))
        for row, text in enumerate(texts):
            alone = model(torch.cat([text, newest[row : row + 1]], dim=1))[0, -1]
            torch.testing.assert_close(together[row, 0], alone, atol=1e-5, rtol=0)
        assert [cache.length for cache in caches] == [4, 10]
        with pytest.raises(InputError, match="holds 2 sequences, but the input has 3"):
            model(torch.ones(3, 1, dtype=torch.long), cache=BatchedCache(caches))
    with pytest.raises(InputError, match="at least one row"):
        BatchedCache([])


IMPLEMENTATIONS = [
    pytest.param(
        True,
        marks=pytest.mark.skipif(
            bool(ring_buffer.kernel_unavailable_reason()), reason=str(ring_buffer.kernel_unavailable_reason())
        ),
    ),
    False,
]


@pytest.mark.parametrize("compiled", IMPLEMENTATIONS, ids=["compiled", "torch"])
@pytest.mark.parametrize("tolerance", [1e-6, 1e-2])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("sizes", [[1] * 400, [150, *[1] * 200, 50]], ids=["tokens", "chunks"])
def test_the_certificate_bounds_what_was_forgotten(compiled, tolerance, kv_heads, sizes):
    """The truth: all keys kept, the mass of those that each head's ring no longer had."""
    q, k, v = inputs(4, kv_heads, 400)
    slopes = alibi.slopes(4, max_bias=3.0)
    layer, group = BoundedLayer(tolerance, compiled), 4 // kv_heads
    exact = attend(q, k, v, bias=LinearBias(slopes), backend="reference")
    weights = (q @ k.repeat_interleave(group, 1).mT / math.sqrt(12) + alibi.bias(slopes, 400, 400)).double().softmax(-1)
    lost, broken, start, outs = 0.0, 0, 0, []
    for size in sizes:
        counts = [r.count for r in layer.rings] or [0] * kv_heads
        part = slice(start, start + size)
        outs.append(layer.attend(q[:, :, part], k[:, :, part], v[:, :, part], bias=LinearBias(slopes)))
        for head in range(4):
            gone = weights[0, head, part, : start - counts[head // group]].sum(-1)
            lost, broken = max(lost, float(gone.max())), broken + int((gone > tolerance).sum())
        start += size
    mass = max(head.mass for head in layer.heads)
    assert lost <= mass
    assert (torch.cat(outs, dim=2) - exact).abs().max() <= 2 * mass * v.norm(dim=-1).max() + 1e-5
    above = sum(head.above for head in layer.heads)
    assert above >= broken
    assert (above > 0) == (mass > tolerance)
    assert max(r.count for r in layer.rings) < 400  # all rings did forget
    assert layer.length == 400


@pytest.mark.skipif(bool(ring_buffer.kernel_unavailable_reason()), reason=str(ring_buffer.kernel_unavailable_reason()))
@pytest.mark.parametrize("window", [None, 90, 5, 1])
@pytest.mark.parametrize("dim", [12, 64, 7])
def test_the_compiled_step_is_the_plain_one(window, dim):
    q, k, v = inputs(4, 2, 500, dim)
    options = {"bias": LinearBias(alibi.slopes(4, max_bias=3.0)), "window": window}
    plain, fast = BoundedLayer(1e-4, False), BoundedLayer(1e-4, True)
    sizes = [40, *[1] * 460]
    torch.testing.assert_close(
        pieces(fast, q, k, v, sizes, **options), pieces(plain, q, k, v, sizes, **options), atol=2e-6, rtol=1e-5
    )
    for mine, other in zip(fast.rings, plain.rings, strict=True):
        assert (mine.count, mine.next, mine.capacity) == (other.count, other.next, other.capacity)
        assert (mine.far, mine.peak) == pytest.approx((other.far, other.peak), rel=1e-6)
    for mine, other in zip(fast.heads, plain.heads, strict=True):
        assert mine.above == other.above
        assert (mine.mass, mine.excess) == pytest.approx((other.mass, other.excess), rel=1e-3)
    torch.testing.assert_close(fast.ordered_kv(1), plain.ordered_kv(1))


@pytest.mark.parametrize("compiled", IMPLEMENTATIONS, ids=["compiled", "torch"])
def test_a_query_that_breaks_the_promise_is_counted_and_the_window_grows(compiled):
    q, k, v = inputs(2, 2, 601)
    q[:, :, 600] *= 30
    layer, bias = BoundedLayer(1e-6, compiled), LinearBias(alibi.slopes(2, max_bias=2.0))
    pieces(layer, q, k, v, [1] * 600, bias=bias)
    before, grown = [r.capacity for r in layer.rings], layer.grown
    above = [head.above for head in layer.heads]
    layer.attend(q[:, :, 600:], k[:, :, 600:], v[:, :, 600:], bias=bias)
    assert all(r.capacity > size for r, size in zip(layer.rings, before, strict=True))
    assert [head.above for head in layer.heads] == [count + 1 for count in above]
    assert max(head.mass for head in layer.heads) > 1e-6
    assert layer.grown == grown + 2


@pytest.mark.parametrize("compiled", IMPLEMENTATIONS, ids=["compiled", "torch"])
@pytest.mark.parametrize("spoilt", ["query", "key", "infinite key"])
def test_what_is_not_a_number_stays_in_the_certificate_and_out_of_the_rings_sizes(compiled, spoilt):
    """One bad token among 500; the key is forgotten again, after which all outputs look well."""
    q, k, v = inputs(2, 2, 500)
    bias = LinearBias(alibi.slopes(2, max_bias=2.0))
    layer, well = BoundedLayer(1e-6, compiled), BoundedLayer(1e-6, compiled)
    pieces(well, q, k, v, [1] * 500, bias=bias)
    assert max(head.mass for head in well.heads) < 1
    (q if spoilt == "query" else k)[0, 0, 300] = math.inf if spoilt == "infinite key" else math.nan
    out = pieces(layer, q, k, v, [1] * 500, bias=bias)
    assert out[0, 0, 300].isnan().all()
    assert out[0, 0, -1].isfinite().all()
    mass = layer.heads[0].mass
    assert math.isnan(mass) or mass == math.inf
    assert layer.heads[0].above > 0
    cache = BoundedCache(layers=[well, layer, well])
    for certificate in (cache.certificate, BoundedCache(layers=[well]).certificate + cache.certificate):
        assert not certificate.mass <= 1
    assert (cache.certificate + BoundedCache(layers=[well]).certificate).mass != well.heads[0].mass
    for mine, other in zip((*layer.heads, *layer.rings), (*well.heads, *well.rings), strict=True):
        for name in ("excess", "peak", "capacity"):
            assert getattr(mine, name, 0) == pytest.approx(getattr(other, name, 0), rel=0.2)


def test_a_slope_that_is_not_positive_forgets_nothing():
    q, k, v = inputs(2, 2, 300)
    layer = BoundedLayer(1e-2)
    pieces(layer, q, k, v, [1] * 300, bias=LinearBias(torch.tensor([0.5, 0.0])))
    assert layer.rings[0].count < 300
    assert layer.rings[1].count == 300


def test_room_is_taken_as_it_is_needed():
    head = bounded.Head(2.0**-8, 0.0)
    wanted = bounded.required_capacity([head], 1e-6)
    assert 4000 < wanted < 6000
    q, k, v = inputs(1, 1, 100, loud=0.1)
    layer = BoundedLayer(1e-6)
    pieces(layer, q, k, v, [1] * 100, bias=LinearBias(torch.tensor([2.0**-8])))
    assert layer.rings[0].capacity == 128


def test_bounded_caches_that_cannot_be():
    with pytest.raises(InputError, match="tolerance is a share of softmax mass"):
        BoundedCache(tolerance=1.0)
    q, k, v = inputs(2, 2, 3)
    with pytest.raises(InputError, match="needs ALiBi"):
        BoundedLayer(1e-6).attend(q, k, v, bias=None)
    two = [torch.cat([x, x]) for x in (q, k, v)]
    with pytest.raises(InputError, match="holds one sequence"):
        BoundedLayer(1e-6).attend(*two, bias=LinearBias(alibi.slopes(2)))
