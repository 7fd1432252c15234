"""Tests of `alibi_attention` with PyTorch's function transforms, export, compilation and autocast.

The tests cover each line of the table "PyTorch features" in docs/attention.md.
"""

import logging

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
from torch import nn

from trainshort import alibi, alibi_attention
from trainshort.attention import LinearBias, attend
from trainshort.errors import InputError

Q, K, V, TANGENT = (
    torch.randn(2, 2, 40, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(4)
)
FLOAT32_INPUTS = tuple(x.float() for x in (Q, K, V))


def reference_attention(q, k, v):
    """Compute ALiBi attention with the backend `reference`."""
    return attend(q, k, v, bias=LinearBias(alibi.slopes(2)), backend="reference")


def loss(q):
    """Return a loss of `alibi_attention`."""
    return alibi_attention(q, K, V).square().sum()


def reference_loss(q):
    """Return the same loss, computed with the backend `reference`."""
    return reference_attention(q, K, V).square().sum()


def test_jvp_and_jacfwd():
    step = 1e-6
    difference = reference_attention(Q + step * TANGENT, K, V) - reference_attention(Q - step * TANGENT, K, V)
    _, tangent = torch.func.jvp(lambda q: alibi_attention(q, K, V), (Q,), (TANGENT,))
    torch.testing.assert_close(tangent, difference / (2 * step), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(torch.func.jacfwd(loss)(Q), torch.func.grad(reference_loss)(Q))

    slopes = alibi.slopes(2)
    _, slopes_tangent = torch.func.jvp(lambda m: alibi_attention(Q, K, V, m), (slopes,), (torch.ones(2),))
    assert slopes_tangent.abs().max() > 0.01


def test_forward_mode_automatic_differentiation():
    _, expected = torch.func.jvp(lambda k: reference_attention(Q, k, V), (K,), (TANGENT,))
    with forward_mode.dual_level():
        dual = forward_mode.make_dual(K, TANGENT)
        out = alibi_attention(Q, dual, V)
        torch.testing.assert_close(forward_mode.unpack_dual(out).tangent, expected)


@pytest.mark.parametrize("backend", ["windowed", "windowed-torch", "compiled", "sdpa", "flex"])
def test_backends_without_forward_mode_recommend_reference(backend):
    with forward_mode.dual_level():
        dual = forward_mode.make_dual(Q.float(), TANGENT.float())
        bias = LinearBias(alibi.slopes(2))
        with pytest.raises(InputError, match=r"forward-mode derivatives.*use 'reference'|it needs the compiled kernel"):
            attend(dual, K.float(), V.float(), bias=bias, backend=backend)


@pytest.mark.parametrize("backend", ["windowed", "windowed-torch"])
def test_backends_without_torch_func_recommend_reference(backend):
    def function(q):
        return attend(q, K, V, bias=LinearBias(alibi.slopes(2)), backend=backend).sum()

    with pytest.raises(InputError, match=r"torch\.func.*use 'reference'"):
        torch.func.grad(function)(Q)


def test_torch_func_grad():
    torch.testing.assert_close(torch.func.grad(loss)(Q), torch.func.grad(reference_loss)(Q))


def test_vmap_and_per_sample_gradients():
    samples = torch.stack([Q, TANGENT, Q - TANGENT])
    expected_grads = torch.stack([torch.func.grad(reference_loss)(sample) for sample in samples])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(samples), expected_grads)
    expected_outputs = torch.stack([reference_attention(sample, K, V) for sample in samples])
    outputs = torch.func.vmap(lambda q: alibi_attention(q, K, V))(samples)
    torch.testing.assert_close(outputs, expected_outputs)


def test_hessian():
    small = Q[:1, :, :3, :2].clone()

    def function(x):
        return alibi_attention(x, small, small).square().sum()

    def reference_function(x):
        return reference_attention(x, small, small).square().sum()

    torch.testing.assert_close(torch.func.hessian(function)(small), torch.func.hessian(reference_function)(small))


@pytest.mark.parametrize("backend", ["auto", "windowed", "windowed-torch"])
def test_operator_has_no_second_derivatives(backend):
    leaf = Q.clone().requires_grad_()
    out = attend(leaf, K, V, bias=LinearBias(alibi.slopes(2)), backend=backend)
    (grad,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(grad.square().sum(), leaf)


def test_reference_has_second_derivatives():
    leaves = [x[:, :, :20].clone().requires_grad_() for x in (Q, K, V)]
    assert torch.autograd.gradgradcheck(reference_attention, leaves, fast_mode=True)


class AttentionModule(nn.Module):
    """A module that calls `alibi_attention`."""

    def forward(self, q, k, v):
        return alibi_attention(q, k, v)


def operator_names(graph):
    """Return the names of all operators in a graph."""
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


def test_torch_export_contains_only_pytorch_operators():
    length = torch.export.Dim("length", min=2, max=4096)
    dynamic_shapes = ({2: length}, {2: length}, {2: length})
    exported = torch.export.export(AttentionModule(), FLOAT32_INPUTS, dynamic_shapes=dynamic_shapes)
    names = operator_names(exported.graph)
    assert names
    assert not any("trainshort" in name for name in names)

    # The exported graph also supports other lengths.
    longer_inputs = [torch.randn(2, 2, 100, 8) for _ in range(3)]
    expected = AttentionModule()(*longer_inputs)
    torch.testing.assert_close(exported.module()(*longer_inputs), expected, rtol=0, atol=2e-6)


def test_onnx_export_contains_only_onnx_operators():
    pytest.importorskip("onnxscript")
    program = torch.onnx.export(AttentionModule(), FLOAT32_INPUTS, dynamo=True, verbose=False)
    assert program is not None
    assert {node.domain for node in program.model.graph} <= {"", "ai.onnx"}
    assert {node.op_type for node in program.model.graph} >= {"MatMul", "Softmax"}


def test_torch_jit_trace():
    traced = torch.jit.trace(AttentionModule(), FLOAT32_INPUTS, check_trace=False)
    assert "trainshort::" not in str(traced.graph)
    torch.testing.assert_close(traced(*FLOAT32_INPUTS), AttentionModule()(*FLOAT32_INPUTS), rtol=0, atol=2e-6)


@pytest.mark.parametrize("scripted", [AttentionModule(), alibi_attention, attend], ids=["module", "alibi", "attend"])
def test_torch_jit_script_is_rejected(scripted):
    with pytest.raises(InputError, match=r"torch\.jit\.trace or torch\.export"):
        torch.jit.script(scripted)


def test_meta_tensors():
    out = alibi_attention(*(x.to("meta") for x in FLOAT32_INPUTS))
    assert out.shape == Q.shape
    assert out.dtype == torch.float32
    assert out.device.type == "meta"


def test_torch_compile_of_a_derivative():
    q, k, v = FLOAT32_INPUTS

    @torch.compile
    def compiled_tangent(q):
        return torch.func.jvp(lambda q: alibi_attention(q, k, v), (q,), (q,))[1]

    _, expected = torch.func.jvp(lambda q: reference_attention(q, k, v), (q,), (q,))
    torch.testing.assert_close(compiled_tangent(q), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_inference_mode_and_no_grad(mode):
    with mode():
        out = alibi_attention(*FLOAT32_INPUTS)
        torch.testing.assert_close(out, reference_attention(*FLOAT32_INPUTS), rtol=0, atol=2e-6)


def test_chosen_backend_of_a_transform_is_logged(caplog, monkeypatch):
    monkeypatch.setattr("trainshort.attention.functional._logged_messages", set())
    monkeypatch.setattr("trainshort.attention.functional._backend_cache", {})
    with caplog.at_level(logging.INFO, logger="trainshort.attention"):
        torch.func.grad(loss)(Q)
    assert [record.getMessage() for record in caplog.records] == ["attention backend: reference"]


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_as_pytorch_does(q_dtype):
    q, k, v = FLOAT32_INPUTS
    mixed_inputs = (q.to(q_dtype), k.bfloat16(), v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pytorch_out = nn.functional.scaled_dot_product_attention(*mixed_inputs, is_causal=True)
        out = alibi_attention(*mixed_inputs)
        float64_out = alibi_attention(Q, K, V)
    assert out.dtype == pytorch_out.dtype == torch.bfloat16
    assert float64_out.dtype == torch.float64
    torch.testing.assert_close(out.float(), reference_attention(q, k, v), rtol=0, atol=0.03)


def test_mixed_dtypes_are_rejected_without_autocast():
    q, k, v = FLOAT32_INPUTS
    with pytest.raises(InputError, match="same dtype"):
        alibi_attention(q.bfloat16(), k, v)
