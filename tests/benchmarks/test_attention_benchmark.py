"""The benchmark compares like with like: every contestant but the plain one computes the same ALiBi attention."""

import math
from dataclasses import replace

import pytest
import torch
from kernel_helpers import needs_kernel
from safetensors.torch import save_file

from benchmarks.attention import acp_work, needed_work, passes, work
from benchmarks.inputs import make_inputs
from benchmarks.peers import PLAIN, chosen, make_implementation
from benchmarks.run import Progress
from trainshort.attention import DecayBias, attend
from trainshort.errors import InputError


@needs_kernel
def test_contestants_compute_the_same():
    for peer in ("transformers", "x_transformers"):
        pytest.importorskip(peer)
    inputs = make_inputs("normal", 300)
    expected = attend(inputs.q, inputs.k, inputs.v, bias=inputs.bias, backend="reference")
    leaves = [x.requires_grad_() for x in (inputs.q.clone(), inputs.k.clone(), inputs.v.clone())]
    wanted = torch.autograd.grad(attend(*leaves, bias=inputs.bias, backend="reference"), leaves, inputs.grad_out)
    names = chosen((), inputs, Progress())
    assert {"windowed", "clock", "windowed-torch", "written-mask", "mpt", "x-transformers"} <= set(names)
    for name in names:
        if name == PLAIN:
            continue
        function = make_implementation(name, inputs, tolerance=1e-6)
        given = inputs.with_clock() if name == "clock" else inputs
        torch.testing.assert_close(passes(function, given, backward=False)(), expected, atol=1e-5, rtol=1e-4, msg=name)
        grads = passes(function, given, backward=True)()
        for ours, exact in zip(grads, wanted, strict=name != "clock"):  # whose own gradient comes last
            torch.testing.assert_close(ours, exact, atol=1e-4, rtol=1e-3, msg=name)


def of_a_text(length, fall=0.05):
    """Inputs with a clock that goes as a text says."""
    made = make_inputs("normal", length)
    torch.manual_seed(3)
    clock = -(torch.rand(1, 8, length, dtype=torch.float64) * fall).cumsum(-1)
    return replace(made, bias=DecayBias(clock))


@needs_kernel
def test_a_clock_of_the_text_is_computed_alike_by_all_that_know_clocks():
    inputs = of_a_text(300)
    names = chosen((), inputs, Progress())
    assert names == ["plain", "windowed", "windowed-torch", "written-mask"]
    expected = attend(inputs.q, inputs.k, inputs.v, bias=inputs.bias, backend="reference")
    for name in names[1:]:
        function = make_implementation(name, inputs, tolerance=1e-6)
        torch.testing.assert_close(passes(function, inputs, backward=False)(), expected, atol=1e-5, rtol=1e-4, msg=name)
        assert all(grad is not None for grad in passes(function, inputs, backward=True)())


def test_the_work_of_acps_rule_block_by_block():
    """Against the rule written out, block by block."""
    inputs, length, tolerance = of_a_text(500, fall=0.4), 500, 1e-3
    clock, scale, kept, pairs = inputs.bias.values[0], 64**-0.5, 0, 0
    for head in range(8):
        most = float(inputs.q[0, head].norm(dim=-1).max() * inputs.k[0, head].norm(dim=-1).max()) * scale
        threshold = -(2 * most + math.log(length)) + math.log(tolerance)
        for first in range(0, length, 24):
            for begin in range(0, length, 4):
                rows, keys = range(first, min(first + 24, length)), range(begin, min(begin + 4, length))
                count = sum(key <= row for row in rows for key in keys)
                pairs += count
                kept += count * bool(clock[head, first] - clock[head, keys[-1]] >= threshold)
    assert acp_work(inputs, tolerance, scale) == pytest.approx(kept / pairs)
    assert kept < pairs


@needs_kernel
def test_the_kernel_reads_more_than_is_needed_and_less_than_all():
    inputs = of_a_text(900, fall=0.4)
    found = {name: measure.value for name, measure in work(inputs, 1e-6).items()}
    assert 0 < found["work needed"] <= found["work needed in blocks"] <= found["work"] < 100
    assert found["work to needed"] == pytest.approx(found["work"] / found["work needed"])
    assert needed_work(inputs, 0.0)[0] == 1.0  # nothing may be left out


def test_what_a_row_needs_is_counted():
    """Equal scores and a clock that falls by 1: beyond distance d lies e^-d of the mass; e^-2.5 needs 3 keys a row."""
    inputs = of_a_text(200)
    even = replace(inputs, q=inputs.q * 0, bias=DecayBias(-torch.arange(200.0).double().expand(1, 8, -1)))
    seen = torch.arange(1, 25)  # of the first panel, the only one that is asked
    assert needed_work(even, math.exp(-2.5))[0] == pytest.approx(float(seen.clamp(max=3).sum() / seen.sum()))


def test_recorded_inputs_are_read_and_cut(tmp_path):
    path = tmp_path / "layer.safetensors"
    recorded = {name: torch.randn(1, 8, 90, 64).bfloat16() for name in "qkv"}
    save_file(recorded, path)
    inputs = make_inputs(str(path), 50)
    assert torch.equal(inputs.k, recorded["k"][:, :, :50].float())
    with pytest.raises(InputError, match=r"holds 90 tokens; asked for 91\. Give shorter --lengths"):
        make_inputs(str(path), 91)
    for other in ({name: recorded[name][0] for name in "qkv"}, {"q": recorded["q"]}):
        save_file(other, path)
        with pytest.raises(InputError, match=r"must hold q, k and v of one shape \(batch, heads, length, dim\)"):
            make_inputs(str(path), 50)


def test_scaled_inputs_have_sharper_heads():
    norms = make_inputs("scaled", 100).q.norm(dim=-1).mean((0, 2))
    assert norms.tolist() == sorted(norms.tolist())
    assert norms[-1] > 5 * norms[0]
