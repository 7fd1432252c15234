"""What torch does with functions, done to `alibi_attention`: the table in docs/attention.md, a test for each line."""

import logging

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
from torch import nn

from trainshort import alibi, alibi_attention
from trainshort.attention import LinearBias, attend
from trainshort.errors import InputError

q, k, v, t = (
    torch.randn(2, 2, 40, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(4)
)


def exactly(q, k, v):
    return attend(q, k, v, bias=LinearBias(alibi.slopes(2)), backend="reference")


def loss(q, attention=alibi_attention):
    return attention(q, k, v).square().sum()


def exact_loss(q):
    return loss(q, exactly)


def test_jvp_and_jacfwd():
    step = 1e-6
    expected = (exactly(q + step * t, k, v) - exactly(q - step * t, k, v)) / (2 * step)
    _, tangent = torch.func.jvp(lambda q: alibi_attention(q, k, v), (q,), (t,))
    torch.testing.assert_close(tangent, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(torch.func.jacfwd(loss)(q), torch.func.grad(exact_loss)(q))
    slopes = alibi.slopes(2)
    _, of_slopes = torch.func.jvp(lambda m: alibi_attention(q, k, v, m), (slopes,), (torch.ones(2),))
    assert of_slopes.abs().max() > 0.01


def test_dual_numbers():
    _, expected = torch.func.jvp(lambda k: exactly(q, k, v), (k,), (t,))
    with forward_mode.dual_level():
        dual = forward_mode.make_dual(k, t)
        torch.testing.assert_close(forward_mode.unpack_dual(alibi_attention(q, dual, v)).tangent, expected)


@pytest.mark.parametrize("name", ["windowed", "windowed-torch", "compiled", "sdpa", "flex"])
def test_backends_without_forward_mode_say_who_has_it(name):
    with forward_mode.dual_level():
        dual = forward_mode.make_dual(q.float(), t.float())
        bias = LinearBias(alibi.slopes(2))
        with pytest.raises(InputError, match=r"forward-mode derivatives.*use 'reference'|it needs the compiled kernel"):
            attend(dual, k.float(), v.float(), bias=bias, backend=name)


@pytest.mark.parametrize("name", ["windowed", "windowed-torch"])
def test_backends_without_torch_func_say_who_has_it(name):
    with pytest.raises(
        InputError, match=r"torch\.func and forward-mode .* do not reach into its kernel; use 'reference'"
    ):
        torch.func.grad(lambda q: attend(q, k, v, bias=LinearBias(alibi.slopes(2)), backend=name).sum())(q)


def test_torch_func_grad():
    torch.testing.assert_close(torch.func.grad(loss)(q), torch.func.grad(exact_loss)(q))


def test_per_sample_gradients():
    samples = torch.stack([q, t, q - t])
    expected = torch.stack([torch.func.grad(exact_loss)(x) for x in samples])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(samples), expected)
    torch.testing.assert_close(
        torch.func.vmap(lambda q: alibi_attention(q, k, v))(samples), torch.stack([exactly(x, k, v) for x in samples])
    )


def test_hessians():
    small = q[:1, :, :3, :2].clone()

    def function(x):
        return alibi_attention(x, small, small).square().sum()

    def exact(x):
        return exactly(x, small, small).square().sum()

    torch.testing.assert_close(torch.func.hessian(function)(small), torch.func.hessian(exact)(small))


@pytest.mark.parametrize("name", ["auto", "windowed", "windowed-torch"])
def test_the_operator_has_no_second_derivatives(name):
    leaf = q.clone().requires_grad_()
    out = attend(leaf, k, v, bias=LinearBias(alibi.slopes(2)), backend=name)
    (grad,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(grad.square().sum(), leaf)


def test_reference_has_second_derivatives():
    leaves = [x[:, :, :20].clone().requires_grad_() for x in (q, k, v)]
    bias = LinearBias(alibi.slopes(2))
    assert torch.autograd.gradgradcheck(lambda *x: attend(*x, bias=bias, backend="reference"), leaves, fast_mode=True)


class Model(nn.Module):
    def forward(self, q, k, v):
        return alibi_attention(q, k, v)


SINGLE = tuple(x.float() for x in (q, k, v))


def operators(graph):
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


def test_torch_export():
    """The graph holds torch's own operators only, and serves other lengths than the one it was made with."""
    length = torch.export.Dim("length", min=2, max=4096)
    exported = torch.export.export(Model(), SINGLE, dynamic_shapes=({2: length}, {2: length}, {2: length}))
    assert operators(exported.graph)
    assert not any("trainshort" in name for name in operators(exported.graph))
    longer = [torch.randn(2, 2, 100, 8) for _ in range(3)]
    torch.testing.assert_close(exported.module()(*longer), Model()(*longer), rtol=0, atol=2e-6)


def test_onnx(tmp_path):
    pytest.importorskip("onnxscript")
    program = torch.onnx.export(Model(), SINGLE, dynamo=True, verbose=False)
    assert program is not None
    assert {node.domain for node in program.model.graph} <= {"", "ai.onnx"}
    assert {node.op_type for node in program.model.graph} >= {"MatMul", "Softmax"}


def test_torch_jit_trace_but_not_script():
    traced = torch.jit.trace(Model(), SINGLE, check_trace=False)
    assert "trainshort::" not in str(traced.graph)
    torch.testing.assert_close(traced(*SINGLE), Model()(*SINGLE), rtol=0, atol=2e-6)
    for scripted in (Model(), alibi_attention, attend):  # also where a model that is scripted calls it
        with pytest.raises(InputError, match=r"use torch.jit.trace or torch.export, which give"):
            torch.jit.script(scripted)


def test_meta_tensors_and_fake_ones():
    out = alibi_attention(*(x.to("meta") for x in SINGLE))
    assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.float32, "meta")


def test_torch_compile_of_a_derivative():
    compiled = torch.compile(lambda q: torch.func.jvp(lambda q: alibi_attention(q, *SINGLE[1:]), (q,), (q,))[1])
    _, expected = torch.func.jvp(lambda q: exactly(q, *SINGLE[1:]), (SINGLE[0],), (SINGLE[0],))
    torch.testing.assert_close(compiled(SINGLE[0]), expected, rtol=1e-4, atol=1e-5)


def test_inference_mode_and_no_grad():
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            torch.testing.assert_close(alibi_attention(*SINGLE), exactly(*SINGLE), rtol=0, atol=2e-6)


def test_what_takes_over_is_said(caplog, monkeypatch):
    monkeypatch.setattr("trainshort.attention.functional._logged_messages", set())
    monkeypatch.setattr("trainshort.attention.functional._backend_cache", {})
    with caplog.at_level(logging.INFO, logger="trainshort.attention"):
        torch.func.grad(loss)(q)
    assert [record.getMessage() for record in caplog.records] == ["attention backend: reference"]


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast_brings_dtypes_together_as_torch_does(given):
    mixed = SINGLE[0].to(given), SINGLE[1].bfloat16(), SINGLE[2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = nn.functional.scaled_dot_product_attention(*mixed, is_causal=True)
        ours = alibi_attention(*mixed)
        still = alibi_attention(q, k, v)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert still.dtype == torch.float64
    torch.testing.assert_close(ours.float(), exactly(*SINGLE), rtol=0, atol=0.03)
    with pytest.raises(InputError, match="must share one floating-point dtype"):
        alibi_attention(SINGLE[0].bfloat16(), *SINGLE[1:])
