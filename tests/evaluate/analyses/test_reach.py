"""Tests of the analysis `reach`: attention weights, measured windows and proven windows."""

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
def test_attention_weights_give_the_output_of_the_reference_backend(position: str, changes: dict):
    model = tiny_model(position, **changes)
    tokens = torch.arange(30)[None] * 7 % 32
    calls = attention_calls(model, tokens)
    assert len(calls) == 2
    for call in calls:
        weights = reach.attention_weights(call, slice(0, 30))
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 30))
        output = weights @ call.v.repeat_interleave(call.heads_per_kv_head, dim=1)
        expected_output = backends.get("reference").run(call).out
        torch.testing.assert_close(output, expected_output, rtol=1e-4, atol=1e-5)


def test_recording_attention_calls_removes_its_hooks():
    model = tiny_model()
    attention_calls(model, torch.arange(8)[None])
    assert all(not module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("position", positions.names())
def test_attention_calls_of_chunks_equal_those_of_one_forward_pass(position: str):
    changes = {"position_settings": {"max_length": 64}} if position == "learned" else {}
    model = tiny_model(position, **changes)
    tokens = torch.arange(50)[None] * 7 % 32
    calls = attention_calls(model, tokens)
    chunked_calls = attention_calls(model, tokens, chunk=16)
    for call, chunked_call in zip(calls, chunked_calls, strict=True):
        for name in ("q", "k", "v"):
            torch.testing.assert_close(getattr(call, name), getattr(chunked_call, name), rtol=1e-4, atol=1e-5)


def test_mass_by_distance_is_the_mean_of_attention_weights(monkeypatch):
    model = tiny_model("none")
    (call, _) = attention_calls(model, torch.arange(20)[None])
    weights = reach.attention_weights(call, slice(0, 20))[0].double()
    expected = torch.zeros(4, 20, dtype=torch.float64)
    for query in range(10, 20):  # the second half of the queries
        for key in range(query + 1):
            expected[:, query - key] += weights[:, query, key] / 10
    torch.testing.assert_close(reach.mass_by_distance(call), expected, rtol=1e-5, atol=1e-7)
    # With this limit, two queries are computed at a time.
    monkeypatch.setattr(reach, "ROW_ELEMENTS", 200)
    torch.testing.assert_close(reach.mass_by_distance(call), expected, rtol=1e-5, atol=1e-7)


def test_window_contains_the_given_share():
    mass = torch.tensor([0.5, 0.3, 0.2])
    assert [reach.window_for_share(mass, share) for share in (0.4, 0.5, 0.6, 0.8, 0.99)] == [1, 1, 2, 2, 3]
    assert reach.mean_distance(mass) == pytest.approx(0.7)


@pytest.mark.parametrize("seed", range(3))
def test_proven_window_is_at_least_the_measured_window(seed: int):
    target = tiny_target()
    tokens = random_tokens(2000, seed=seed)
    result = reach.run(AnalysisContext(target, tokens, trained_at=64))
    assert result["length"] == 512
    assert [row["slope"] for row in result["rows"]] == pytest.approx([2.0 ** (-2 * (h + 1)) for h in range(4)] * 2)
    assert all(row["window"] <= row["proven"] for row in result["rows"])
    assert any(row["proven"] < 512 for row in result["rows"]), "some proven windows are shorter than the text"


@pytest.mark.parametrize("seed", range(3))
def test_proven_window_of_each_query_contains_99_percent_of_its_weights(seed: int):
    length = 200
    tokens = torch.from_numpy(random_tokens(2000, seed=seed)[:length].astype("int64"))[None]
    for call in attention_calls(tiny_target().model, tokens):
        windows = alibi.proven_windows(call.q, call.k, call.bias.slopes, tolerance=0.01, block=1)[0]
        weights = reach.attention_weights(call, slice(0, length))[0].double()
        for query in range(100, length):
            weights_by_distance = weights[:, query, : query + 1].flip(-1)
            mass_in_window = weights_by_distance.cumsum(-1)
            window = windows[:, query].clamp(max=query + 1)
            assert (mass_in_window.gather(1, window[:, None] - 1) >= 0.99 - 1e-5).all()


def test_heads_with_steeper_slopes_have_shorter_windows():
    result = reach.run(AnalysisContext(tiny_target(), random_tokens(2000), trained_at=64))
    first_layer_rows = result["rows"][:4]  # from the steepest to the flattest slope
    windows = [row["window"] for row in first_layer_rows]
    assert windows == sorted(windows)
    assert first_layer_rows[0]["mean_distance"] < first_layer_rows[3]["mean_distance"]


@pytest.mark.parametrize("position", positions.names())
def test_every_position_method_can_be_analyzed(position: str):
    changes = {"position_settings": {"max_length": 600}} if position == "learned" else {}
    target = tiny_target(position, **changes)
    result = reach.run(AnalysisContext(target, random_tokens(1100), trained_at=64, lengths=(512,)))
    assert len(result["rows"]) == 8
    has_proven_window = result["rows"][0]["proven"] is not None
    assert has_proven_window == (position in ("alibi", "fox"))
