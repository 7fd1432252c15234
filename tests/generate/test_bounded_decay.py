"""The bounded cache and the endless generator with a clock: forgets by the text's own gates, and keeps its promise."""

import pytest
import torch

import trainshort
from trainshort.config.run_config import ModelConfig
from trainshort.model.cache import BoundedCache, Cache
from trainshort.model.cache.bounded_decay import BoundedDecayLayer
from trainshort.model.transformer import TransformerLM


def fox(heads=4, **changes):
    torch.manual_seed(1)
    settings = {"vocab_size": 64, "layers": 2, "width": 32, "heads": heads, "position": "fox"}
    model = TransformerLM(ModelConfig(**{**settings, "position_settings": {"init": "alibi"}, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "position" not in name:
                weight.mul_(8)
        model.position.weight.mul_(20)
    return model


@torch.no_grad()
def run(model, tokens, cache, pieces):
    return torch.cat([model(part, cache=cache) for part in tokens.split(pieces, dim=1)], 1)


@pytest.mark.parametrize(
    ("changes", "tolerance"), [({}, 1e-6), ({}, 1e-3), ({"kv_heads": 2}, 1e-6), ({"window": 40}, 1e-6)], ids=str
)
def test_the_promise_is_kept(changes, tolerance):
    model, tokens = fox(**changes), torch.randint(64, (1, 400))
    cache = BoundedCache(tolerance=tolerance, clocked=True)
    found = run(model, tokens, cache, [64] * 6 + [1] * 16)
    whole = run(model, tokens, Cache(), [400])
    certificate = cache.certificate
    assert certificate.mass <= tolerance
    assert certificate.rows_above_tolerance == 0
    if "window" not in changes:
        assert certificate.mass > 0
        assert min(min(windows) for windows in cache.windows) < 200  # heads that forget, do
    torch.testing.assert_close(found, whole, rtol=0, atol=2e-4 if tolerance < 1e-4 else 0.1)


@torch.no_grad()
def test_the_certificate_is_above_what_was_forgotten():
    """The true mass of the forgotten keys, by the full softmax of every row, from what the layer was given."""
    torch.manual_seed(0)
    layer, length, dim = BoundedDecayLayer(1e-3), 250, 8
    q, k, v = (torch.randn(1, 2, length, dim) for _ in range(3))
    clock = -(torch.rand(1, 2, length, dtype=torch.float64) * torch.tensor([0.6, 0.3])[:, None]).cumsum(-1)
    scores = (q.double() @ k.double().transpose(-1, -2)) / dim**0.5 + clock[..., :, None] - clock[..., None, :]
    weights = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
    lost = torch.zeros(2)
    for t in range(length):
        held = [ring.count for ring in layer.rings] or [0, 0]
        for head in range(2):
            lost[head] = max(lost[head], float(weights[0, head, t, : t - held[head]].sum()))
        now = slice(t, t + 1)
        bias = trainshort.DecayBias(clock[..., : t + 1])
        layer.attend(q[:, :, now], k[:, :, now], v[:, :, now], bias=bias)
    assert layer.rings[0].count < length
    assert lost[0] > 0
    for head in range(2):
        assert lost[head] <= layer.heads[head].mass <= 1e-3


def test_memory_is_bounded():
    model = fox(position_settings={})
    made = trainshort.stream(model, [1, 2, 3], tokens=120, mode="bounded", stop_at_end=False)
    assert len(list(made)) == 120
    layer = made.caches[0].layer(0)
    assert layer.place["clock"].shape[2] == max(ring.count for ring in layer.rings)
    assert layer.place["clock"].shape[2] < 120
