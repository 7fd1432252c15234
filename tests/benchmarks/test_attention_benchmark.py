"""Tests of the attention benchmark: its implementations are equivalent, and its shares of the work are correct."""

import math
from dataclasses import replace

import pytest
import torch
from kernel_helpers import needs_kernel
from safetensors.torch import save_file

from benchmarks.attention import acp_work, adapt_inputs, make_attention_task, measure_work, needed_work
from benchmarks.inputs import Inputs, make_inputs
from benchmarks.peers import DECAY, PLAIN, make_implementation, select_implementations
from benchmarks.run import Progress
from trainshort.attention import DecayBias, attend
from trainshort.errors import InputError


@needs_kernel
def test_all_implementations_of_alibi_compute_the_same():
    for package in ("transformers", "x_transformers"):
        pytest.importorskip(package)
    inputs = make_inputs("normal", 300)
    expected = attend(inputs.q, inputs.k, inputs.v, bias=inputs.bias, backend="reference")
    leaves = [x.requires_grad_() for x in (inputs.q.clone(), inputs.k.clone(), inputs.v.clone())]
    reference_out = attend(*leaves, bias=inputs.bias, backend="reference")
    expected_grads = torch.autograd.grad(reference_out, leaves, inputs.grad_out)

    names = select_implementations((), inputs, Progress())
    assert {"windowed", "clock", "windowed-torch", "written-mask", "mpt", "x-transformers"} <= set(names)
    for name in names:
        if name == PLAIN:
            continue
        function = make_implementation(name, inputs, tolerance=1e-6)
        own_inputs = adapt_inputs(inputs, name)
        out = make_attention_task(function, own_inputs, backward=False)()
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4, msg=name)
        grads = make_attention_task(function, own_inputs, backward=True)()
        # The last gradient of the implementation "clock" is that of the decay bias. It has no counterpart.
        for grad, expected_grad in zip(grads, expected_grads, strict=name != DECAY):
            torch.testing.assert_close(grad, expected_grad, atol=1e-4, rtol=1e-3, msg=name)


def make_inputs_with_decay(length: int, max_step: float = 0.05) -> Inputs:
    """Return random inputs with a decay bias that differs between tokens, as in FoX.

    Args:
        length: The number of tokens.
        max_step: The largest decay from one token to the next.
    """
    inputs = make_inputs("normal", length)
    torch.manual_seed(3)
    steps = torch.rand(1, 8, length, dtype=torch.float64) * max_step
    return replace(inputs, bias=DecayBias(-steps.cumsum(-1)))


@needs_kernel
def test_implementations_with_decay_bias_compute_the_same():
    inputs = make_inputs_with_decay(300)
    names = select_implementations((), inputs, Progress())
    assert names == ["plain", "windowed", "windowed-torch", "written-mask"]
    expected = attend(inputs.q, inputs.k, inputs.v, bias=inputs.bias, backend="reference")
    for name in names[1:]:
        function = make_implementation(name, inputs, tolerance=1e-6)
        out = make_attention_task(function, inputs, backward=False)()
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4, msg=name)
        grads = make_attention_task(function, inputs, backward=True)()
        assert all(grad is not None for grad in grads)


def test_acp_work_equals_a_loop_over_all_blocks():
    length = 500
    tolerance = 1e-3
    scale = 64**-0.5
    inputs = make_inputs_with_decay(length, max_step=0.4)
    cumulative_decay = inputs.bias.values[0]
    computed_pairs = 0
    all_pairs = 0
    for head in range(8):
        max_query_norm = inputs.q[0, head].norm(dim=-1).max()
        max_key_norm = inputs.k[0, head].norm(dim=-1).max()
        score_bound = float(max_query_norm * max_key_norm) * scale
        threshold = -(2 * score_bound + math.log(length)) + math.log(tolerance)
        # A query tile of the kernel has 24 rows, and a block of keys has 4 keys.
        for first_row in range(0, length, 24):
            rows = range(first_row, min(first_row + 24, length))
            for first_key in range(0, length, 4):
                keys = range(first_key, min(first_key + 4, length))
                pairs = sum(key <= row for row in rows for key in keys)
                all_pairs += pairs
                if cumulative_decay[head, first_row] - cumulative_decay[head, keys[-1]] >= threshold:
                    computed_pairs += pairs
    assert acp_work(inputs, tolerance, scale) == pytest.approx(computed_pairs / all_pairs)
    assert computed_pairs < all_pairs


@needs_kernel
def test_kernel_computes_more_than_needed_and_less_than_everything():
    inputs = make_inputs_with_decay(900, max_step=0.4)
    shares = {name: measure.value for name, measure in measure_work(inputs, 1e-6).items()}
    assert 0 < shares["work needed"] <= shares["work needed in blocks"] <= shares["work"] < 100
    assert shares["work to needed"] == pytest.approx(shares["work"] / shares["work needed"])
    # With tolerance 0, no key can be skipped.
    assert needed_work(inputs, 0.0)[0] == 1.0


def test_needed_work_counts_the_nearest_keys():
    # All scores are equal, and the decay is 1 per token. Keys beyond distance d carry the mass e^-d, so at the
    # tolerance e^-2.5 a row needs its 3 nearest keys.
    inputs = make_inputs_with_decay(200)
    decay_of_one = DecayBias(-torch.arange(200.0).double().expand(1, 8, -1))
    inputs = replace(inputs, q=inputs.q * 0, bias=decay_of_one)
    # Only the first query tile is sampled. Its rows have 1 to 24 keys.
    causal_keys = torch.arange(1, 25)
    expected_share = float(causal_keys.clamp(max=3).sum() / causal_keys.sum())
    assert needed_work(inputs, math.exp(-2.5))[0] == pytest.approx(expected_share)


def test_recorded_inputs_are_cut_to_the_length(tmp_path):
    path = tmp_path / "layer.safetensors"
    tensors = {name: torch.randn(1, 8, 90, 64).bfloat16() for name in ("q", "k", "v")}
    save_file(tensors, path)
    inputs = make_inputs(str(path), 50)
    assert torch.equal(inputs.k, tensors["k"][:, :, :50].float())
    with pytest.raises(InputError, match=r"holds 90 tokens.*--lengths"):
        make_inputs(str(path), 91)


def test_invalid_recorded_inputs_are_rejected(tmp_path):
    path = tmp_path / "layer.safetensors"
    without_batch = {name: torch.randn(8, 90, 64) for name in ("q", "k", "v")}
    only_queries = {"q": torch.randn(1, 8, 90, 64)}
    for tensors in (without_batch, only_queries):
        save_file(tensors, path)
        with pytest.raises(InputError, match=r"must hold q, k and v of one shape \(batch, heads, length, dim\)"):
            make_inputs(str(path), 50)


def test_scaled_inputs_have_larger_queries_in_later_heads():
    norms = make_inputs("scaled", 100).q.norm(dim=-1).mean((0, 2))
    assert norms.tolist() == sorted(norms.tolist())
    assert norms[-1] > 5 * norms[0]
