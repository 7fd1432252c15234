"""Tests of linear layers with oneDNN: the results are those of PyTorch, and oneDNN is used only where it is allowed."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from trainshort.model import linear as linear_module
from trainshort.model.linear import apply_linear, linear

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch build has no oneDNN")


@pytest.fixture(autouse=True)
def _use_onednn_on_every_processor(monkeypatch):
    """Use oneDNN also on processors on which MKL is as fast, and for small products."""
    monkeypatch.setattr(linear_module, "is_onednn_faster", lambda: True)
    monkeypatch.setattr(linear_module, "MIN_ONEDNN_MULTIPLICATIONS", 0)


class OneDnnCounter(TorchDispatchMode):
    """Count the calls of oneDNN's linear operation, and the calls with a weight that has gaps in memory."""

    calls = 0
    calls_with_gaps = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.mkldnn._linear_pointwise.default:
            weight = args[1]
            self.calls += 1
            if not weight.is_contiguous() and not weight.T.is_contiguous():
                self.calls_with_gaps += 1
        return func(*args, **(kwargs or {}))


def count_onednn_calls(function) -> int:
    """Call a function and return how often it used oneDNN."""
    with OneDnnCounter() as counter:
        function()
    return counter.calls


def random_matrix(layout: str, rows: int, columns: int) -> torch.Tensor:
    """Return a random matrix with the given memory layout."""
    match layout:
        case "contiguous":
            return torch.randn(rows, columns)
        case "transposed":
            return torch.randn(columns, rows).T
        case "sliced":
            return torch.randn(2 * rows, 2 * columns)[::2, ::2]
        case "expanded":
            return torch.randn(1, columns).expand(rows, columns)
    raise ValueError(layout)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("inner", [1, 3, 16, 130])
def test_onednn_is_as_exact_as_pytorch(layout, inner):
    torch.manual_seed(inner)
    onednn_errors = []
    pytorch_errors = []
    for rows in (1, 2, 9, 65):
        for outer in (1, 2, 5, 33, 128):
            x = random_matrix(layout, rows, inner)
            weight = random_matrix(layout, outer, inner)
            bias = torch.randn(outer)
            exact = x.double() @ weight.double().T + bias
            onednn_errors.append((linear(x, weight, bias) - exact).square().flatten())
            pytorch_errors.append((F.linear(x, weight, bias) - exact).square().flatten())
    # docs/attention.md allows twice the root mean square error. So the mean square error may be four times as large.
    assert torch.cat(onednn_errors).mean() <= 4 * torch.cat(pytorch_errors).mean()


@pytest.mark.parametrize("x_shape", [(7, 24), (2, 5, 24)])
def test_first_and_second_derivatives_equal_pytorch(x_shape):
    torch.manual_seed(0)
    x = torch.randn(*x_shape, requires_grad=True)
    weight = torch.randn(40, 24, requires_grad=True)
    bias = torch.randn(40, requires_grad=True)
    inputs = [x, weight, bias]

    def compute_derivatives(linear_function) -> list[torch.Tensor]:
        loss = linear_function(x, weight, bias).sin().sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        second = torch.autograd.grad(sum((grad**2).sum() for grad in first), inputs)
        # The gradient of a sum is an expanded tensor with one element.
        of_sum = torch.autograd.grad(linear_function(x, weight, bias).sum(), inputs)
        return [*first, *second, *of_sum]

    for derivative, expected in zip(compute_derivatives(linear), compute_derivatives(F.linear), strict=True):
        torch.testing.assert_close(derivative, expected, rtol=1e-4, atol=1e-4)


def test_gradient_of_the_weight_alone():
    x = torch.randn(7, 24)
    weight = torch.randn(40, 24, requires_grad=True)
    (grad,) = torch.autograd.grad(linear(x, weight).sum(), [weight])
    torch.testing.assert_close(grad, x.sum(0).expand(40, 24), rtol=1e-4, atol=1e-4)


def test_plain_layers_use_onednn():
    layer = nn.Linear(24, 40)
    x = torch.randn(9, 24)
    assert count_onednn_calls(lambda: apply_linear(layer, x)) == 1
    # The forward pass, the gradient of the input and the gradient of the weight.
    assert count_onednn_calls(lambda: apply_linear(layer, x.requires_grad_()).sum().backward()) == 3
    with torch.no_grad():
        assert count_onednn_calls(lambda: linear(x, layer.weight)) == 1


def test_weights_with_gaps_in_memory_are_copied():
    """oneDNN is slow if the weight has gaps in memory. The input may have gaps."""
    x = torch.randn(30, 72)[:, 24:48].requires_grad_()
    weight = torch.randn(40, 72)[:, 24:48].requires_grad_()
    with OneDnnCounter() as counter:
        grads = torch.autograd.grad(linear(x, weight).sin().sum(), [x, weight])
    assert counter.calls == 3
    assert counter.calls_with_gaps == 0
    expected_grads = torch.autograd.grad(F.linear(x, weight).sin().sum(), [x, weight])
    for grad, expected in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("hook", "calls_in_forward"),
    [("register_forward_hook", 1), ("register_forward_pre_hook", 1), ("register_full_backward_hook", 0)],
)
def test_layer_with_hook_does_not_use_onednn(hook, calls_in_forward):
    layer = nn.Linear(24, 40)
    hook_calls = []
    getattr(layer, hook)(lambda *args: hook_calls.append(args))
    assert count_onednn_calls(lambda: apply_linear(layer, torch.randn(9, 24))) == 0
    assert len(hook_calls) == calls_in_forward


def test_global_hook_disables_onednn():
    layer = nn.Linear(24, 40)
    with nn.modules.module.register_module_forward_hook(lambda *args: None):
        assert count_onednn_calls(lambda: apply_linear(layer, torch.randn(9, 24))) == 0


def test_layer_with_replaced_forward_does_not_use_onednn():
    layer = nn.Linear(24, 40)
    forward_inputs = []

    def replaced_forward(x: torch.Tensor) -> torch.Tensor:
        forward_inputs.append(x)
        return F.linear(x, layer.weight)

    changed_layer = copy.deepcopy(layer)
    changed_layer.forward = replaced_forward
    assert count_onednn_calls(lambda: apply_linear(changed_layer, torch.randn(9, 24))) == 0
    assert len(forward_inputs) == 1


def test_subclass_does_not_use_onednn():
    class OwnLinear(nn.Linear):
        pass

    layer = OwnLinear(24, 40)
    assert count_onednn_calls(lambda: apply_linear(layer, torch.randn(9, 24))) == 0


def test_float64_does_not_use_onednn():
    layer = nn.Linear(24, 40).double()
    assert count_onednn_calls(lambda: apply_linear(layer, torch.randn(9, 24).double())) == 0


def test_disabled_onednn_is_not_used():
    layer = nn.Linear(24, 40)
    x = torch.randn(9, 24)
    with torch.backends.mkldnn.flags(enabled=False):
        assert count_onednn_calls(lambda: apply_linear(layer, x)) == 0
    assert torch.allclose(apply_linear(layer, x), layer(x), atol=1e-5)


def test_autocast_does_not_use_onednn():
    layer = nn.Linear(24, 40)
    x = torch.randn(9, 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert count_onednn_calls(lambda: apply_linear(layer, x)) == 0
        assert apply_linear(layer, x).dtype == torch.bfloat16


def test_torch_func_and_forward_mode_derivatives():
    layer = nn.Linear(24, 40)
    x = torch.randn(9, 24)
    with torch.no_grad():
        vmapped = torch.func.vmap(lambda row: apply_linear(layer, row[None])[0])(x)
    assert torch.allclose(vmapped, layer(x), atol=1e-5)

    _, tangent = torch.func.jvp(lambda x: apply_linear(layer, x), (x,), (x,))
    assert torch.allclose(tangent, F.linear(x, layer.weight), atol=1e-5)
    with forward_ad.dual_level():
        out = apply_linear(layer, forward_ad.make_dual(x, x))
        assert torch.allclose(forward_ad.unpack_dual(out).tangent, tangent, atol=1e-5)


def test_exported_graph_does_not_contain_onednn():
    graph = torch.export.export(nn.Sequential(nn.Linear(24, 40)), (torch.randn(9, 24),)).graph
    assert not any("mkldnn" in str(node.target) for node in graph.nodes)


def test_onednn_is_not_used_where_it_is_not_faster(monkeypatch):
    layer = nn.Linear(24, 40)
    x = torch.randn(9, 24)
    monkeypatch.setattr(linear_module, "is_onednn_faster", lambda: False)
    assert count_onednn_calls(lambda: apply_linear(layer, x)) == 0

    monkeypatch.setattr(linear_module, "is_onednn_faster", lambda: True)
    monkeypatch.setattr(linear_module, "MIN_ONEDNN_MULTIPLICATIONS", 9 * 24 * 40 + 1)
    assert count_onednn_calls(lambda: apply_linear(layer, x)) == 0
    assert torch.equal(apply_linear(layer, x), layer(x))
