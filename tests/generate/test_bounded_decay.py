"""The bounded cache for models with a decay bias (FoX): error bounds hold, and memory is limited."""

import pytest
import torch

import trainshort
from trainshort.config.run_config import ModelConfig
from trainshort.model.cache import BoundedCache, Cache
from trainshort.model.cache.bounded_decay import BoundedDecayLayer
from trainshort.model.transformer import TransformerLM


def make_fox_model(**changes):
    """Return a FoX model with large random weights, so that its attention and its forget gates depend on the text."""
    torch.manual_seed(1)
    settings = {
        "vocab_size": 64,
        "layers": 2,
        "width": 32,
        "heads": 4,
        "position": "fox",
        "position_settings": {"init": "alibi"},
        **changes,
    }
    model = TransformerLM(ModelConfig(**settings)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "position" not in name:
                weight.mul_(8)
        model.position.weight.mul_(20)  # pyright: ignore
    return model


@torch.no_grad()
def compute_logits(model, tokens, cache, chunk_sizes):
    """Run the model on a sequence in chunks, and return the logits of the complete sequence."""
    chunks = tokens.split(chunk_sizes, dim=1)
    return torch.cat([model(chunk, cache=cache) for chunk in chunks], dim=1)


@pytest.mark.parametrize(
    ("changes", "tolerance"), [({}, 1e-6), ({}, 1e-3), ({"kv_heads": 2}, 1e-6), ({"window": 40}, 1e-6)], ids=str
)
def test_bounded_cache_stays_within_the_tolerance(changes, tolerance):
    model = make_fox_model(**changes)
    tokens = torch.randint(64, (1, 400))
    cache = BoundedCache(tolerance=tolerance, has_decay_bias=True)
    bounded_logits = compute_logits(model, tokens, cache, [64] * 6 + [1] * 16)
    full_logits = compute_logits(model, tokens, Cache(), [400])
    torch.testing.assert_close(bounded_logits, full_logits, rtol=0, atol=2e-4 if tolerance < 1e-4 else 0.1)

    certificate = cache.certificate
    assert certificate.mass <= tolerance
    assert certificate.rows_above_tolerance == 0
    if "window" not in changes:
        assert certificate.mass > 0
        assert min(min(counts) for counts in cache.windows) < 200  # some heads have evicted keys


@torch.no_grad()
def test_certificate_is_an_upper_bound():
    """The certificate is compared with the true softmax mass of the keys that the ring buffers no longer contained."""
    torch.manual_seed(0)
    length = 250
    dim = 8
    q, k, v = (torch.randn(1, 2, length, dim) for _ in range(3))
    log_decays = -torch.rand(1, 2, length, dtype=torch.float64) * torch.tensor([0.6, 0.3])[:, None]
    cumulative = log_decays.cumsum(-1)
    products = (q.double() @ k.double().transpose(-1, -2)) / dim**0.5
    scores = products + cumulative[..., :, None] - cumulative[..., None, :]
    is_future = torch.ones(length, length).triu(1).bool()
    weights = scores.masked_fill(is_future, -torch.inf).softmax(-1)

    layer = BoundedDecayLayer(1e-3)
    max_evicted_mass = torch.zeros(2)
    for t in range(length):
        counts = [ring_buffer.count for ring_buffer in layer.ring_buffers] or [0, 0]
        for head in range(2):
            evicted_mass = float(weights[0, head, t, : t - counts[head]].sum())
            max_evicted_mass[head] = max(max_evicted_mass[head], evicted_mass)
        token = slice(t, t + 1)
        bias = trainshort.DecayBias(cumulative[..., : t + 1])
        layer.attend(q[:, :, token], k[:, :, token], v[:, :, token], bias=bias)

    assert layer.ring_buffers[0].count < length
    assert max_evicted_mass[0] > 0
    for head in range(2):
        assert max_evicted_mass[head] <= layer.head_states[head].certificate <= 1e-3


def test_decays_of_evicted_keys_are_removed():
    model = make_fox_model(position_settings={})
    stream = trainshort.stream(model, [1, 2, 3], tokens=120, mode="bounded", stop_at_end=False)
    assert len(list(stream)) == 120
    layer = stream.caches[0].layer(0)
    assert isinstance(layer, BoundedDecayLayer)
    num_decays = layer.method_cache["clock"].shape[2]
    assert num_decays == max(ring_buffer.count for ring_buffer in layer.ring_buffers)
    assert num_decays < 120
