"""Attention reach: weights as the reference backend has them, windows that hold what they say."""

import pytest
import torch
from helpers import random_tokens, tiny_model, tiny_target

from trainshort import alibi
from trainshort.config.registries import backends
from trainshort.evaluate.analyses import reach
from trainshort.evaluate.analyses.base import AnalysisContext
from trainshort.evaluate.attention_inputs import attention_calls
from trainshort.model.positions import positions


@pytest.mark.parametrize("position", ["alibi", "rotary", "t5", "none"])
@pytest.mark.parametrize("changes", [{}, {"kv_heads": 2}, {"window": 5}])
def test_weights_give_the_output_that_the_backend_gives(position: str, changes: dict):
    model = tiny_model(position, **changes)
    tokens = torch.arange(30)[None] * 7 % 32
    calls = attention_calls(model, tokens)
    assert len(calls) == 2
    for call in calls:
        weights = reach.attention_weights(call, slice(0, 30))
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 30))
        out = weights @ call.v.repeat_interleave(call.heads_per_kv_head, dim=1)
        expected = backends.get("reference").run(call).out
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_recording_leaves_nothing_behind():
    model = tiny_model()
    attention_calls(model, torch.arange(8)[None])
    assert all(not module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("position", positions.names())
def test_reading_in_chunks_records_the_same(position: str):
    longer = {"position_settings": {"max_length": 64}} if position == "learned" else {}
    model, tokens = tiny_model(position, **longer), torch.arange(50)[None] * 7 % 32
    for whole, parts in zip(attention_calls(model, tokens), attention_calls(model, tokens, 16), strict=True):
        for name in "qkv":
            torch.testing.assert_close(getattr(whole, name), getattr(parts, name), rtol=1e-4, atol=1e-5)


def test_mass_by_distance_is_the_weights_summed_by_distance(monkeypatch):
    model = tiny_model("none")
    (call, _) = attention_calls(model, torch.arange(20)[None])
    weights = reach.attention_weights(call, slice(0, 20))[0].double()
    expected = torch.zeros(4, 20, dtype=torch.float64)
    for query in range(10, 20):
        for key in range(query + 1):
            expected[:, query - key] += weights[:, query, key] / 10
    torch.testing.assert_close(reach.mass_by_distance(call), expected, rtol=1e-5, atol=1e-7)
    monkeypatch.setattr(reach, "ROW_ELEMENTS", 200)  # two rows at a time
    torch.testing.assert_close(reach.mass_by_distance(call), expected, rtol=1e-5, atol=1e-7)


def test_windows_hold_their_share():
    mass = torch.tensor([0.5, 0.3, 0.2])
    assert [reach.window_for_share(mass, share) for share in (0.4, 0.5, 0.6, 0.8, 0.99)] == [1, 1, 2, 2, 3]
    assert reach.mean_distance(mass) == pytest.approx(0.7)


@pytest.mark.parametrize("seed", range(3))
def test_the_proven_window_is_never_smaller_than_the_measured_one(seed):
    """Of every row by itself, and of the rows together as the table has them."""
    target, tokens = tiny_target(), random_tokens(2000, seed=seed)
    result = reach.run(AnalysisContext(target, tokens, trained_at=64))
    assert result["length"] == 512
    assert [row["slope"] for row in result["rows"]] == pytest.approx([2.0 ** (-2 * (h + 1)) for h in range(4)] * 2)
    assert all(row["window"] <= row["proven"] for row in result["rows"])
    assert any(row["proven"] < 512 for row in result["rows"])  # so the comparison says something
    for call in attention_calls(target.model, torch.from_numpy(tokens[:200].astype("int64"))[None]):
        windows = alibi.proven_windows(call.q, call.k, call.bias.slopes, tolerance=0.01, block=1)[0]
        reached = reach.attention_weights(call, slice(0, 200))[0].flip(-1).double()
        for query in range(100, 200):
            mass = reached[:, query, 199 - query :].cumsum(-1)  # by distance from this query
            window = windows[:, query].clamp(max=query + 1)
            assert (mass.gather(1, window[:, None] - 1) >= 0.99 - 1e-5).all()


def test_steeper_heads_look_less_far():
    rows = reach.run(AnalysisContext(tiny_target(), random_tokens(2000), trained_at=64))["rows"][:4]
    assert [row["window"] for row in rows] == sorted(row["window"] for row in rows)
    assert rows[0]["mean_distance"] < rows[3]["mean_distance"]


def test_every_position_method_has_a_reach():
    for position in positions.names():
        target = tiny_target(position, **({"position_settings": {"max_length": 600}} if position == "learned" else {}))
        result = reach.run(AnalysisContext(target, random_tokens(1100), trained_at=64, lengths=(512,)))
        assert len(result["rows"]) == 8
        assert (result["rows"][0]["proven"] is None) == (position not in ("alibi", "fox"))
