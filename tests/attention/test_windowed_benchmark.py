"""The benchmark compares like with like: every contestant but the plain one computes the same ALiBi attention."""

import pytest
import torch
from compiled_code import needs_kernel
from safetensors.torch import save_file

from trainshort.attention import LinearBias, attend
from trainshort.bench.attention import passes
from trainshort.bench.measure import Progress
from trainshort.bench.peers import PLAIN, chosen, contestant
from trainshort.bench.recorded import make_inputs
from trainshort.errors import InputError


@needs_kernel
def test_contestants_compute_the_same():
    for peer in ("transformers", "x_transformers"):
        pytest.importorskip(peer)
    inputs = make_inputs("normal", 300)
    expected = attend(inputs.q, inputs.k, inputs.v, bias=LinearBias(inputs.slopes), backend="reference")
    leaves = [x.requires_grad_() for x in (inputs.q.clone(), inputs.k.clone(), inputs.v.clone())]
    wanted = torch.autograd.grad(
        attend(*leaves, bias=LinearBias(inputs.slopes), backend="reference"), leaves, inputs.grad_out
    )
    names = chosen((), inputs, Progress())
    assert {"windowed", "windowed-torch", "written-mask", "mpt", "x-transformers"} <= set(names)
    for name in names:
        if name == PLAIN:
            continue
        function = contestant(name, heads=8, dim=64, tolerance=1e-6)
        torch.testing.assert_close(passes(function, inputs, backward=False)(), expected, atol=1e-5, rtol=1e-4, msg=name)
        grads = passes(function, inputs, backward=True)()
        for ours, exact in zip(grads, wanted, strict=True):
            torch.testing.assert_close(ours, exact, atol=1e-4, rtol=1e-3, msg=name)


def test_recorded_inputs_are_read_and_cut(tmp_path):
    path = tmp_path / "layer.safetensors"
    recorded = {name: torch.randn(1, 8, 90, 64).bfloat16() for name in "qkv"}
    save_file(recorded, path)
    inputs = make_inputs(str(path), 50)
    assert torch.equal(inputs.k, recorded["k"][:, :, :50].float())
    with pytest.raises(InputError, match=r"holds 90 tokens; asked for 91\. Give shorter --lengths"):
        make_inputs(str(path), 91)


def test_scaled_inputs_have_sharper_heads():
    norms = make_inputs("scaled", 100).q.norm(dim=-1).mean((0, 2))
    assert norms.tolist() == sorted(norms.tolist())
    assert norms[-1] > 5 * norms[0]
