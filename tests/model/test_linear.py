"""oneDNN's products: torch's `linear` to rounding, with its gradients, and only where nobody would miss it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from trainshort.model import linear as linear_module
from trainshort.model.linear import apply_linear, linear

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """Also on processors where MKL is as quick, and for small numbers."""
    monkeypatch.setattr(linear_module, "is_onednn_faster", lambda: True)
    monkeypatch.setattr(linear_module, "MIN_ONEDNN_MULTIPLICATIONS", 0)


class Counted(TorchDispatchMode):
    calls = gaps = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.calls += 1
            self.gaps += not (args[1].is_contiguous() or args[1].T.is_contiguous())
        return func(*args, **(kwargs or {}))


def calls_of(work) -> int:
    with Counted() as counted:
        work()
    return counted.calls


def rows_of(form: str, rows: int, columns: int) -> torch.Tensor:
    match form:
        case "transposed":
            return torch.randn(columns, rows).T
        case "sliced":
            return torch.randn(2 * rows, 2 * columns)[::2, ::2]
        case "expanded":
            return torch.randn(1, columns).expand(rows, columns)
    return torch.randn(rows, columns)


@pytest.mark.parametrize("form", ["whole", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("inner", [1, 3, 16, 130])
def test_numbers_of_any_shape_and_strides(form, inner):
    torch.manual_seed(inner)
    errors, plain = [], []
    for rows in (1, 2, 9, 65):
        for outer in (1, 2, 5, 33, 128):
            x, weight, bias = rows_of(form, rows, inner), rows_of(form, outer, inner), torch.randn(outer)
            exact = x.double() @ weight.double().T + bias
            errors.append((linear(x, weight, bias) - exact).square().flatten())
            plain.append((F.linear(x, weight, bias) - exact).square().flatten())
    assert torch.cat(errors).mean() <= 4 * torch.cat(plain).mean()  # the error budget of docs/attention.md: 2, of roots


@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24)])
def test_gradients_are_linear_s_and_may_be_differentiated_again(shape):
    torch.manual_seed(0)
    x, weight, bias = leaves = [torch.randn(*size, requires_grad=True) for size in (shape, (40, 24), (40,))]
    found = {}
    for one in (linear, F.linear):
        first = torch.autograd.grad(one(x, weight, bias).sin().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum((part**2).sum() for part in first), leaves)
        summed = torch.autograd.grad(one(x, weight, bias).sum(), leaves)  # its gradient is one number, expanded
        found[one] = (*first, *second, *summed)
    for a, b in zip(found[linear], found[F.linear], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    only = torch.autograd.grad(linear(x.detach(), weight).sum(), [weight])
    torch.testing.assert_close(only[0], x.detach().flatten(0, -2).sum(0).expand(40, 24), rtol=1e-4, atol=1e-4)


def test_what_goes_by_onednn():
    layer, x = nn.Linear(24, 40), torch.randn(9, 24)
    assert calls_of(lambda: apply_linear(layer, x)) == 1
    assert calls_of(lambda: apply_linear(layer, x.requires_grad_()).sum().backward()) == 3
    with torch.no_grad():
        assert calls_of(lambda: linear(x, layer.weight)) == 1


def test_a_second_matrix_with_gaps_is_copied_first():
    """oneDNN has no quick way for it; the first one may have them."""
    x, weight = torch.randn(30, 72)[:, 24:48].requires_grad_(), torch.randn(40, 72)[:, 24:48].requires_grad_()
    with Counted() as counted:
        out = linear(x, weight)
        found = torch.autograd.grad(out.sin().sum(), [x, weight])
    assert (counted.calls, counted.gaps) == (3, 0)
    for a, b in zip(found, torch.autograd.grad(F.linear(x, weight).sin().sum(), [x, weight]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_nobody_is_passed_over():
    layer, x, seen = nn.Linear(24, 40), torch.randn(9, 24), []
    expected = layer(x)

    def as_it_is(one=layer, given=x) -> bool:
        return calls_of(lambda: apply_linear(one, given)) == 0

    for way in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        handle = getattr(layer, way)(lambda *args: seen.append(1))
        assert as_it_is()
        handle.remove()
    assert len(seen) == 2  # nobody went backward
    with nn.modules.module.register_module_forward_hook(lambda *args: None):
        assert as_it_is()
    other = copy.deepcopy(layer)
    other.forward = lambda given: seen.append(given.shape) or F.linear(given, layer.weight)
    assert as_it_is(other)
    assert as_it_is(type("Own", (nn.Linear,), {})(24, 40))
    assert as_it_is(layer.double(), x.double())
    layer.float()
    with torch.backends.mkldnn.flags(enabled=False):
        assert as_it_is()
    with torch.autocast("cpu", torch.bfloat16):
        assert as_it_is()
        assert apply_linear(layer, x).dtype == torch.bfloat16
    assert torch.allclose(apply_linear(layer, x), expected, atol=1e-5)


def test_transforms_follow_torch_s_own_operations():
    layer, x = nn.Linear(24, 40), torch.randn(9, 24)
    with torch.no_grad():
        each = torch.func.vmap(lambda row: apply_linear(layer, row[None])[0])(x)
    assert torch.allclose(each, layer(x), atol=1e-5)
    _, moved = torch.func.jvp(lambda given: apply_linear(layer, given), (x,), (x,))
    assert torch.allclose(moved, F.linear(x, layer.weight), atol=1e-5)
    with forward_ad.dual_level():
        out = apply_linear(layer, forward_ad.make_dual(x, x))
        assert torch.allclose(forward_ad.unpack_dual(out).tangent, moved, atol=1e-5)
    program = torch.export.export(torch.nn.Sequential(layer), (x,)).graph
    assert not any("mkldnn" in str(node.target) for node in program.nodes)


def test_where_it_is_not_quicker_nothing_changes(monkeypatch):
    layer, x = nn.Linear(24, 40), torch.randn(9, 24)
    monkeypatch.setattr(linear_module, "is_onednn_faster", lambda: False)
    assert calls_of(lambda: apply_linear(layer, x)) == 0
    monkeypatch.setattr(linear_module, "is_onednn_faster", lambda: True)
    monkeypatch.setattr(linear_module, "MIN_ONEDNN_MULTIPLICATIONS", 9 * 24 * 40 + 1)
    assert calls_of(lambda: apply_linear(layer, x)) == 0
    assert torch.equal(apply_linear(layer, x), layer(x))
