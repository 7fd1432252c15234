"""Linear layers that use oneDNN where oneDNN is faster than MKL."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad

from trainshort.attention.call import active_tracer
from trainshort.utils.machine import mkl_lacks_avx512

# ---- linear layers of the whole model: float32 by oneDNN, where that is quicker than MKL, which torch takes
#
# MKL does not use the widest vectors of processors that are not Intel's. On an AMD EPYC with AVX-512 its products run
# at 120 GFLOP/s a core, whatever their shape, and oneDNN's, which torch brings along, at 180 to 280, forward and
# backward. So there, and only there, linear layers go by oneDNN. Everything else is torch's own `linear`: other
# processors and devices, half precision and autocast, small products, whatever is traced, compiled, transformed, hooked
# or quantized. `torch.backends.mkldnn.flags(enabled=False)` turns it off.

MIN_ONEDNN_MULTIPLICATIONS = 1 << 20
"""Multiplications from which on a product goes by oneDNN, which makes a program for every shape it meets."""


def apply_linear(layer: nn.Module, x: Float[Tensor, "*rows inner"]) -> Float[Tensor, "*rows outer"]:
    """A linear layer of `x`. One that is not plain (a subclass, hooks, a forward of somebody's) is called as it is."""
    if (
        not isinstance(layer, nn.Linear)
        or not _can_use_onednn(x, layer.weight)
        or "forward" in vars(layer)
        or has_hooks(layer)
    ):
        return layer(x)
    plain = type(layer) is nn.Linear or type(layer).__qualname__ == "FalconLinear"
    return _fast_linear(x, layer.weight, layer.bias) if plain else layer(x)


def linear(
    x: Float[Tensor, "*rows inner"], weight: Float[Tensor, "outer inner"], bias: Float[Tensor, " outer"] | None = None
) -> Float[Tensor, "*rows outer"]:
    """x·weightᵀ + bias, as torch's."""
    return _fast_linear(x, weight, bias) if _can_use_onednn(x, weight) else F.linear(x, weight, bias)


def _fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of what fits; followed by autograd only where somebody wants gradients."""
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, weight, bias)):
        return _OneDnnLinear.apply(x, weight, bias)  # pyright: ignore[reportReturnType]
    return _onednn_linear(x, weight, bias)


def has_hooks(*parts: nn.Module) -> bool:
    """Whether somebody has hooks on a module or on one inside it."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    own = any(getattr(one, kind) for part in parts for one in part.modules() for kind in kinds)
    return own or bool(nn.modules.module._has_any_global_hook())


def is_onednn_faster() -> bool:
    """Whether oneDNN is here, and quicker than MKL on this processor."""
    return mkl_lacks_avx512() and torch.backends.mkldnn.is_available()


def _can_use_onednn(x: Tensor, weight: Tensor) -> bool:
    plain = type(x) in (Tensor, nn.Parameter) and type(weight) in (Tensor, nn.Parameter)
    if (
        not plain
        or x.numel() * weight.shape[0] < MIN_ONEDNN_MULTIPLICATIONS
        or not is_onednn_faster()
        or not torch.backends.mkldnn.enabled
    ):
        return False
    here = x.device.type == weight.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    backwards = forward_ad._current_level < 0  # derivatives in forward mode follow torch's own operations
    return here and backwards and not torch.is_autocast_enabled("cpu") and active_tracer() is None


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not weight.is_contiguous() and not weight.T.is_contiguous():
        weight = weight.contiguous()  # of a matrix with gaps oneDNN computes number by number, a thousand times as long
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _OneDnnLinear(torch.autograd.Function):
    """The same with gradients; where derivatives of these are wanted too, by torch's own operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
        wanted, times = ctx.needs_input_grad, F.linear if torch.is_grad_enabled() else linear
        return (
            times(rows, weight.T).view_as(x) if wanted[0] else None,
            times(rows.T, inputs.T) if wanted[1] else None,
            rows.sum(0) if wanted[2] else None,
        )
