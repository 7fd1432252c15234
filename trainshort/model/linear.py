"""Linear layers that use oneDNN where oneDNN is faster than MKL.

PyTorch computes float32 linear layers on the CPU with MKL. MKL does not use AVX-512 on processors that are not made by
Intel. On an AMD EPYC with AVX-512, MKL reaches 120 GFLOP/s per core, and oneDNN reaches 180 to 280 GFLOP/s. PyTorch
contains oneDNN. `torch.backends.mkldnn.flags(enabled=False)` turns the use of oneDNN off.

All other calls use PyTorch's own `linear`: other processors and devices, half precision, autocast, small products,
and modules that are traced, compiled, transformed by torch.func, hooked or quantized.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad

from trainshort.attention.call import active_tracer
from trainshort.utils.machine import mkl_lacks_avx512

MIN_ONEDNN_MULTIPLICATIONS = 1 << 20
"""Smaller products use MKL, because oneDNN takes time to generate code for every new shape."""


def apply_linear(layer: nn.Module, x: Float[Tensor, "*rows inner"]) -> Float[Tensor, "*rows outer"]:
    """Apply a linear layer to `x`, with oneDNN if possible.

    A layer that is not a plain `nn.Linear` is called as usual: a subclass, a quantized layer, a layer with hooks, or a
    layer whose `forward` was replaced.
    """
    if not isinstance(layer, nn.Linear) or not _can_use_onednn(x, layer.weight):
        return layer(x)
    # An attribute of the instance replaces the method `forward` of the class.
    has_replaced_forward = "forward" in vars(layer)
    if has_replaced_forward or has_hooks(layer):
        return layer(x)
    # transformers' FalconLinear computes the same as nn.Linear.
    is_plain_linear = type(layer) is nn.Linear or type(layer).__qualname__ == "FalconLinear"
    if not is_plain_linear:
        return layer(x)
    return _onednn_linear_with_grad(x, layer.weight, layer.bias)


def linear(
    x: Float[Tensor, "*rows inner"], weight: Float[Tensor, "outer inner"], bias: Float[Tensor, " outer"] | None = None
) -> Float[Tensor, "*rows outer"]:
    """Compute `x @ weight.T + bias` as `torch.nn.functional.linear` does, with oneDNN if possible."""
    if _can_use_onednn(x, weight):
        return _onednn_linear_with_grad(x, weight, bias)
    return F.linear(x, weight, bias)


def _onednn_linear_with_grad(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a linear layer with oneDNN. Record the operation for autograd if an input requires gradients."""
    bias_requires_grad = bias is not None and bias.requires_grad
    requires_grad = x.requires_grad or weight.requires_grad or bias_requires_grad
    if torch.is_grad_enabled() and requires_grad:
        return _OneDnnLinear.apply(x, weight, bias)  # pyright: ignore[reportReturnType]
    return _onednn_linear(x, weight, bias)


def has_hooks(*modules: nn.Module) -> bool:
    """Return whether one of the modules or their submodules has hooks, or global module hooks are registered."""
    if nn.modules.module._has_any_global_hook():
        return True
    hook_attributes = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for module in modules:
        for submodule in module.modules():
            if any(getattr(submodule, attribute) for attribute in hook_attributes):
                return True
    return False


def is_onednn_faster() -> bool:
    """Return whether oneDNN is available and faster than MKL, PyTorch's default library, on this processor."""
    return mkl_lacks_avx512() and torch.backends.mkldnn.is_available()


def _can_use_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether `x @ weight.T` can and should be computed with oneDNN, Intel's library for fast CPU kernels."""
    # Subclasses of Tensor, such as quantized or distributed tensors, have their own implementation.
    plain_types = (Tensor, nn.Parameter)
    if type(x) not in plain_types or type(weight) not in plain_types:
        return False
    num_multiplications = x.numel() * weight.shape[0]
    if num_multiplications < MIN_ONEDNN_MULTIPLICATIONS:
        return False
    if not is_onednn_faster() or not torch.backends.mkldnn.enabled:
        return False

    is_on_cpu = x.device.type == weight.device.type == "cpu"
    is_float32 = x.dtype == weight.dtype == torch.float32
    # oneDNN's operation supports neither forward-mode derivatives nor autocast nor tracing.
    uses_forward_mode = forward_ad._current_level >= 0
    return (
        is_on_cpu
        and is_float32
        and not uses_forward_mode
        and not torch.is_autocast_enabled("cpu")
        and active_tracer() is None
    )


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `x @ weight.T + bias` with oneDNN, without gradients."""
    if not weight.is_contiguous() and not weight.T.is_contiguous():
        # oneDNN is about a thousand times slower for a weight with gaps in memory.
        weight = weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _OneDnnLinear(torch.autograd.Function):
    """A linear layer that computes its output and its gradients with oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        # The forward pass computes x @ weight.T + bias.
        x, weight = ctx.saved_tensors
        x_needs_grad, weight_needs_grad, bias_needs_grad = ctx.needs_input_grad
        # Gradients are enabled here only if the caller wants second derivatives. F.linear has second derivatives.
        multiply = F.linear if torch.is_grad_enabled() else linear
        grad_rows = grad.flatten(0, -2)  # (rows, outer)
        x_rows = x.flatten(0, -2)  # (rows, inner)

        grad_x = multiply(grad_rows, weight.T).view_as(x) if x_needs_grad else None
        grad_weight = multiply(grad_rows.T, x_rows.T) if weight_needs_grad else None
        grad_bias = grad_rows.sum(0) if bias_needs_grad else None
        return grad_x, grad_weight, grad_bias
