"""The KV caches: results equal attention without a cache, memory is limited, and error bounds hold."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainshort import Cache, InputError, LinearBias, TransformerLM, alibi, attend
from trainshort.config.presets import presets
from trainshort.model.cache import BatchedCache, BoundedCache, LayerCache, WindowCache, bounded
from trainshort.model.cache.bounded import BoundedLayer
from trainshort.model.cache.ring_buffer import kernel_unavailable_reason
from trainshort.model.cache.sliding_window import WindowLayer

needs_decode_kernel = pytest.mark.skipif(
    kernel_unavailable_reason() is not None, reason=str(kernel_unavailable_reason())
)
with_and_without_kernel = pytest.mark.parametrize(
    "compiled", [pytest.param(True, marks=needs_decode_kernel), False], ids=["compiled", "torch"]
)


def make_qkv(heads, kv_heads, length, dim=12, query_scale=2.0):
    """Return random queries, keys and values of one sequence."""
    q = torch.randn(1, heads, length, dim) * query_scale
    k = torch.randn(1, kv_heads, length, dim)
    v = torch.randn(1, kv_heads, length, dim)
    return q, k, v


def attend_in_chunks(layer, q, k, v, chunk_sizes, **options):
    """Pass a sequence to the cache of a layer in chunks, and return the output for the complete sequence."""
    outputs = []
    start = 0
    for size in chunk_sizes:
        chunk = slice(start, start + size)
        outputs.append(layer.attend(q[:, :, chunk], k[:, :, chunk], v[:, :, chunk], **options))
        start += size
    return torch.cat(outputs, dim=2)


# ---- Cache


def test_append_returns_all_keys_and_values():
    cache = LayerCache()
    k = torch.randn(2, 3, 300, 4)
    v = torch.randn(2, 3, 300, 4)
    end = 0
    for size in (1, 70, 1, 100, 128):
        cached_k, cached_v = cache.append(k[:, :, end : end + size], v[:, :, end : end + size])
        end += size
        assert torch.equal(cached_k, k[:, :, :end])
        assert torch.equal(cached_v, v[:, :, :end])
    assert cache.length == 300


def test_storage_is_rarely_reallocated():
    """The capacity doubles, so 1,000 tokens need few allocations and at most twice the memory."""
    cache = LayerCache()
    token = torch.randn(1, 2, 1, 4)
    addresses = set()
    for _ in range(1000):
        k, _ = cache.append(token, token)
        addresses.add(k.data_ptr())
    bytes_per_token = 2 * 2 * 4 * 4  # keys and values, 2 heads, 4 dimensions, 4 bytes
    assert cache.bytes <= 2 * 1000 * bytes_per_token
    assert len(addresses) <= 6


def test_batch_size_cannot_change():
    model = TransformerLM(presets.get("tiny")())
    cache = Cache()
    with torch.no_grad():
        model(torch.ones(2, 3, dtype=torch.long), cache=cache)
        with pytest.raises(InputError, match="a batch of 2 sequences, as in the cache, got 1"):
            model(torch.ones(1, 3, dtype=torch.long), cache=cache)


def test_gradients_are_rejected():
    model = TransformerLM(presets.get("tiny")())
    with pytest.raises(InputError, match=r"torch\.no_grad"):
        model(torch.ones(2, 3, dtype=torch.long), cache=Cache())


# ---- WindowCache


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 20))
def test_window_cache_equals_sliding_window_attention(chunk_sizes, window):
    q, k, v = make_qkv(4, 2, sum(chunk_sizes))
    bias = LinearBias(alibi.slopes(4))
    layer = WindowLayer(window, 0)
    out = attend_in_chunks(layer, q, k, v, chunk_sizes, bias=bias)
    torch.testing.assert_close(out, attend(q, k, v, bias=bias, window=window))
    assert layer.length == sum(chunk_sizes)


def test_memory_of_window_cache_stays_constant():
    layer = WindowLayer(50, 2)
    q, k, v = make_qkv(2, 2, 1000)
    attend_in_chunks(layer, q, k, v, [1] * 400, bias=None)
    bytes_after_400 = layer.bytes
    attend_in_chunks(layer, q, k, v, [1] * 600, bias=None)
    bytes_per_token = 2 * 2 * 12 * 4
    assert layer.bytes == bytes_after_400 <= bytes_per_token * (2 * 50 + 64 + 2)


def attend_with_sinks(q, k, v, bias, window, sinks):
    """Compute attention with sinks query by query: each query sees the cached keys as if no other keys existed."""
    outputs = []
    for i in range(q.shape[2]):
        cached = [j for j in range(i + 1) if j < sinks or i - j < window]
        outputs.append(attend(q[:, :, i : i + 1], k[:, :, cached], v[:, :, cached], bias=bias, backend="reference"))
    return torch.cat(outputs, dim=2)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("chunk_sizes", [[40], [1] * 40, [3, 1, 1, 20, 15], [2, 38]], ids=str)
def test_distances_to_sinks_are_counted_in_the_cache(has_bias, chunk_sizes):
    q, k, v = make_qkv(4, 2, 40)
    bias = LinearBias(alibi.slopes(4)) if has_bias else None
    out = attend_in_chunks(WindowLayer(6, 4), q, k, v, chunk_sizes, bias=bias)
    torch.testing.assert_close(out, attend_with_sinks(q, k, v, bias, 6, 4), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("settings", "name"), [({"window": 0}, "window"), ({"sinks": -1}, "sinks")])
def test_invalid_window_settings_are_rejected(settings, name):
    with pytest.raises(InputError, match=f"^{name} must be at least"):
        WindowCache(**settings)


# ---- BatchedCache


def test_sequences_of_a_batch_have_their_own_positions():
    model = TransformerLM(presets.get("tiny")().replace(position="rotary")).eval()
    prompts = [torch.randint(256, (1, length)) for length in (3, 9)]
    caches = [Cache(), Cache()]
    new_tokens = torch.tensor([[5], [6]])
    with torch.no_grad():
        for prompt, cache in zip(prompts, caches, strict=True):
            model(prompt, cache=cache)
        batch_logits = model(new_tokens, cache=BatchedCache(caches))
        for row, prompt in enumerate(prompts):
            sequence = torch.cat([prompt, new_tokens[row : row + 1]], dim=1)
            logits = model(sequence)[0, -1]
            torch.testing.assert_close(batch_logits[row, 0], logits, atol=1e-5, rtol=0)
    assert [cache.length for cache in caches] == [4, 10]


def test_invalid_batches_are_rejected():
    model = TransformerLM(presets.get("tiny")())
    cache = BatchedCache([Cache(), Cache()])
    with torch.no_grad(), pytest.raises(InputError, match="a batch of 2 sequences, as in the cache, got 3"):
        model(torch.ones(3, 1, dtype=torch.long), cache=cache)
    with pytest.raises(InputError, match="at least one cache"):
        BatchedCache([])


# ---- BoundedCache


@with_and_without_kernel
@pytest.mark.parametrize("tolerance", [1e-6, 1e-2])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("chunk_sizes", [[1] * 400, [150, *[1] * 200, 50]], ids=["tokens", "chunks"])
def test_certificate_is_an_upper_bound(compiled, tolerance, kv_heads, chunk_sizes):
    """The certificate is compared with the true softmax mass of the keys that the ring buffers no longer contained."""
    heads_per_kv_head = 4 // kv_heads
    q, k, v = make_qkv(4, kv_heads, 400)
    slopes = alibi.slopes(4, max_bias=3.0)
    exact_out = attend(q, k, v, bias=LinearBias(slopes), backend="reference")
    products = q @ k.repeat_interleave(heads_per_kv_head, 1).mT / math.sqrt(12)
    weights = (products + alibi.bias(slopes, 400, 400)).double().softmax(-1)

    layer = BoundedLayer(tolerance, compiled)
    max_evicted_mass = 0.0
    true_rows_above = 0
    outputs = []
    start = 0
    for size in chunk_sizes:
        counts = [ring_buffer.count for ring_buffer in layer.ring_buffers] or [0] * kv_heads
        chunk = slice(start, start + size)
        outputs.append(layer.attend(q[:, :, chunk], k[:, :, chunk], v[:, :, chunk], bias=LinearBias(slopes)))
        for head in range(4):
            num_evicted = start - counts[head // heads_per_kv_head]
            evicted_mass = weights[0, head, chunk, :num_evicted].sum(-1)
            max_evicted_mass = max(max_evicted_mass, float(evicted_mass.max()))
            true_rows_above += int((evicted_mass > tolerance).sum())
        start += size

    certificate = max(state.certificate for state in layer.head_states)
    rows_above = sum(state.rows_above_tolerance for state in layer.head_states)
    assert max_evicted_mass <= certificate
    error = (torch.cat(outputs, dim=2) - exact_out).abs().max()
    assert error <= 2 * certificate * v.norm(dim=-1).max() + 1e-5
    assert rows_above >= true_rows_above
    assert (rows_above > 0) == (certificate > tolerance)
    assert max(ring_buffer.count for ring_buffer in layer.ring_buffers) < 400  # all ring buffers have evicted keys
    assert layer.length == 400


@needs_decode_kernel
@pytest.mark.parametrize("window", [None, 90, 5, 1])
@pytest.mark.parametrize("dim", [12, 64, 7])
def test_compiled_step_equals_torch(window, dim):
    q, k, v = make_qkv(4, 2, 500, dim)
    options = {"bias": LinearBias(alibi.slopes(4, max_bias=3.0)), "window": window}
    chunk_sizes = [40, *[1] * 460]
    torch_layer = BoundedLayer(1e-4, False)
    compiled_layer = BoundedLayer(1e-4, True)
    torch_out = attend_in_chunks(torch_layer, q, k, v, chunk_sizes, **options)
    compiled_out = attend_in_chunks(compiled_layer, q, k, v, chunk_sizes, **options)
    torch.testing.assert_close(compiled_out, torch_out, atol=2e-6, rtol=1e-5)

    for actual, expected in zip(compiled_layer.ring_buffers, torch_layer.ring_buffers, strict=True):
        assert actual.count == expected.count
        assert actual.next == expected.next
        assert actual.capacity == expected.capacity
        assert actual.max_evicted_norm == pytest.approx(expected.max_evicted_norm, rel=1e-6)
        assert actual.max_norm == pytest.approx(expected.max_norm, rel=1e-6)
    for actual, expected in zip(compiled_layer.head_states, torch_layer.head_states, strict=True):
        assert actual.rows_above_tolerance == expected.rows_above_tolerance
        assert actual.certificate == pytest.approx(expected.certificate, rel=1e-3)
        assert actual.max_excess == pytest.approx(expected.max_excess, rel=1e-3)
    torch.testing.assert_close(compiled_layer.ordered_kv(1), torch_layer.ordered_kv(1))


@with_and_without_kernel
def test_query_above_the_tolerance_is_counted_and_the_buffers_grow(compiled):
    q, k, v = make_qkv(2, 2, 601)
    q[:, :, 600] *= 30
    layer = BoundedLayer(1e-6, compiled)
    bias = LinearBias(alibi.slopes(2, max_bias=2.0))
    attend_in_chunks(layer, q, k, v, [1] * 600, bias=bias)
    capacities = [ring_buffer.capacity for ring_buffer in layer.ring_buffers]
    grow_count = layer.grow_count
    rows_above = [state.rows_above_tolerance for state in layer.head_states]

    layer.attend(q[:, :, 600:], k[:, :, 600:], v[:, :, 600:], bias=bias)
    for ring_buffer, capacity in zip(layer.ring_buffers, capacities, strict=True):
        assert ring_buffer.capacity > capacity
    assert [state.rows_above_tolerance for state in layer.head_states] == [count + 1 for count in rows_above]
    assert max(state.certificate for state in layer.head_states) > 1e-6
    assert layer.grow_count == grow_count + 2


@with_and_without_kernel
@pytest.mark.parametrize("damage", ["NaN in query", "NaN in key", "infinity in key"])
def test_nan_stays_in_the_certificate_and_does_not_change_capacities(compiled, damage):
    """One of 500 tokens is not finite. Its key is evicted later, so that the following outputs are finite again."""
    q, k, v = make_qkv(2, 2, 500)
    bias = LinearBias(alibi.slopes(2, max_bias=2.0))
    intact_layer = BoundedLayer(1e-6, compiled)
    attend_in_chunks(intact_layer, q, k, v, [1] * 500, bias=bias)
    assert max(state.certificate for state in intact_layer.head_states) < 1

    damaged_tensor = q if damage == "NaN in query" else k
    damaged_tensor[0, 0, 300] = math.inf if damage == "infinity in key" else math.nan
    layer = BoundedLayer(1e-6, compiled)
    out = attend_in_chunks(layer, q, k, v, [1] * 500, bias=bias)
    assert out[0, 0, 300].isnan().all()
    assert out[0, 0, -1].isfinite().all()
    head_certificate = layer.head_states[0].certificate
    assert math.isnan(head_certificate) or head_certificate == math.inf
    assert layer.head_states[0].rows_above_tolerance > 0

    damaged_certificate = BoundedCache(layers=[intact_layer, layer, intact_layer]).certificate
    intact_certificate = BoundedCache(layers=[intact_layer]).certificate
    sums = [damaged_certificate + intact_certificate, intact_certificate + damaged_certificate]
    for certificate in (damaged_certificate, *sums):
        is_small = certificate.mass <= 1  # False for NaN
        assert not is_small

    for actual, expected in zip(layer.head_states, intact_layer.head_states, strict=True):
        assert actual.max_excess == pytest.approx(expected.max_excess, rel=0.2)
    for actual, expected in zip(layer.ring_buffers, intact_layer.ring_buffers, strict=True):
        assert actual.max_norm == pytest.approx(expected.max_norm, rel=0.2)
        assert actual.capacity == pytest.approx(expected.capacity, rel=0.2)


def test_head_with_slope_zero_keeps_all_keys():
    q, k, v = make_qkv(2, 2, 300)
    layer = BoundedLayer(1e-2)
    attend_in_chunks(layer, q, k, v, [1] * 300, bias=LinearBias(torch.tensor([0.5, 0.0])))
    assert layer.ring_buffers[0].count < 300
    assert layer.ring_buffers[1].count == 300


def test_short_text_needs_little_memory():
    """The required capacity is large, but the ring buffer grows with the text."""
    slope = 2.0**-8
    state = bounded.HeadState(slope=slope, max_excess=0.0)
    assert 4000 < bounded.required_capacity([state], 1e-6) < 6000
    q, k, v = make_qkv(1, 1, 100, query_scale=0.1)
    layer = BoundedLayer(1e-6)
    attend_in_chunks(layer, q, k, v, [1] * 100, bias=LinearBias(torch.tensor([slope])))
    assert layer.ring_buffers[0].capacity == 128


def test_invalid_uses_of_bounded_cache_are_rejected():
    with pytest.raises(InputError, match="tolerance must be at least 0 and less than 1"):
        BoundedCache(tolerance=1.0)
    q, k, v = make_qkv(2, 2, 3)
    with pytest.raises(InputError, match="requires ALiBi"):
        BoundedLayer(1e-6).attend(q, k, v, bias=None)
    q, k, v = (torch.cat([x, x]) for x in (q, k, v))
    with pytest.raises(InputError, match="one sequence, got a batch of 2"):
        BoundedLayer(1e-6).attend(q, k, v, bias=LinearBias(alibi.slopes(2)))
