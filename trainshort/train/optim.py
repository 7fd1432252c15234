"""Optimizers, the learning rate schedule and gradient clipping.

The learning rate is a function of the step, so there is no scheduler state to store. The state of an optimizer consists
of tensors that belong to parameters, such as the moments of AdamW. Every parameter is updated in every step. Therefore
a single step count for the run is enough.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from trainshort.config.run_config import OptimConfig

# The names of the tensors that AdamW stores for each parameter.
ADAMW_STATE = ("exp_avg", "exp_avg_sq")

# The names of the tensors that Nesterov and Muon store for each parameter.
MOMENTUM_STATE = ("momentum_buffer",)

# The coefficients (a, b, c) of the polynomials a·s + b·s³ + c·s⁵ that Muon applies to singular values, one polynomial
# after the other. The first polynomial is closest to 1 on [0.01, 1]. Each following polynomial is closest to 1 on the
# range of the one before. They were found by linear programming. Three of these polynomials are as accurate as five
# applications of the single polynomial in Jordan's implementation.
MUON_COEFFICIENTS = ((8.0934, -23.6205, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))

ParameterKind = Literal["matrix", "embedding", "position", "vector"]


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Return the learning rate of a training step.

    The schedule equals that of fairseq: the first step of the warm-up uses `warmup_start_lr`, and `min_lr` would be
    reached at the step `steps`, which is not trained.

    Args:
        step: The number of the step. The first step is 0.
        steps: The number of steps of the run.
        config: The settings of the optimizer.

    Example:
        With warmup=4, warmup_start_lr=0, lr=1, min_lr=0, schedule="linear" and 8 steps:

            step  0    1     2    3     4  5     6    7
            lr    0  0.25  0.5  0.75    1  0.75  0.5  0.25
    """
    if step < config.warmup:
        return config.warmup_start_lr + (config.lr - config.warmup_start_lr) * step / config.warmup
    if config.schedule == "constant":
        return config.lr
    # After the warm-up, the progress rises from 0 to 1, and the learning rate falls from `lr` to `min_lr`.
    progress = min(1.0, (step - config.warmup) / max(1, steps - config.warmup))
    if config.schedule == "linear":
        remaining = 1 - progress
    else:
        remaining = (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr + (config.lr - config.min_lr) * remaining


class Nesterov(torch.optim.SGD):
    """SGD with Nesterov momentum as in fairseq (`nag`), the optimizer of the paper.

    The momentum equals that of `torch.optim.SGD`. fairseq stores v = -lr·b, where b is the momentum buffer of torch,
    and rescales v by lr/lr_old when the learning rate changes:

        fairseq   v ← m·(lr/lr_old)·v − lr·g        p ← p + m·v − lr·g
        torch     b ← m·b + g                       p ← p − lr·(g + m·b)

    Inserting v = −lr·b into the first line gives the second line, for any schedule. The weight decay differs: fairseq
    multiplies the weight, p ← p·(1 − lr·decay), while torch adds decay·p to the gradient.

    Args:
        groups: The parameter groups, as returned by `parameter_groups`.
        lr: The learning rate.
        momentum: The momentum. 0 gives plain SGD.
    """

    def __init__(self, groups: list[dict], *, lr: float, momentum: float) -> None:
        """Create the optimizer for some parameter groups. Each group is a dictionary with its own weight decay."""
        # torch must not apply the weight decay, because `step` applies it. So it is stored under another name.
        weight_decays = [group.pop("weight_decay") for group in groups]
        super().__init__(groups, lr=lr, momentum=momentum, nesterov=momentum > 0)
        for group, weight_decay in zip(self.param_groups, weight_decays, strict=True):
            group["decay"] = weight_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Decay the weights, then do one step of Nesterov momentum."""
        for group in self.param_groups:
            if not group["decay"]:
                continue
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * group["decay"])
        super().step(closure)


class Muon(torch.optim.AdamW):
    """Muon (Jordan 2024) for the matrices inside the layers, and AdamW for all other parameters.

    A Muon step is the orthogonal matrix that is nearest to the momentum. So all directions of a weight matrix change by
    the same amount, also directions with small gradients. The size of a step equals that of AdamW (0.2·√width, as in
    Moonlight), so both kinds of parameters use the same learning rate. `torch.optim.Muon` computes in bfloat16, which
    is slow on most CPUs. This class computes in float32 and processes all matrices of the same shape at once.

    Args:
        groups: The parameter groups, as returned by `parameter_groups`. The key "state_names" selects the algorithm.
        lr: The learning rate.
        betas: The decay of the two moments of AdamW.
        momentum: The momentum of Muon.
    """

    def __init__(self, groups: list[dict], *, lr: float, betas: tuple[float, float], momentum: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, fused=True)
        self.momentum = momentum

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do one step of AdamW for some parameter groups, and one step of Muon for the other groups.

        The key "state_names" of a parameter group names the tensors that the optimizer stores for each parameter. It
        also selects the algorithm: `ADAMW_STATE` selects AdamW, and `MOMENTUM_STATE` selects Muon.
        """
        all_groups = self.param_groups
        # AdamW.step updates all groups in `self.param_groups`, so the list is temporarily reduced to the AdamW groups.
        self.param_groups = [group for group in all_groups if group["state_names"] is ADAMW_STATE]
        super().step(closure)
        self.param_groups = all_groups
        for group in all_groups:
            if group["state_names"] is MOMENTUM_STATE:
                self._update_muon_group(group)

    def _update_muon_group(self, group: dict[str, Any]) -> None:
        """Do one step of Muon for a parameter group, whose parameters are matrices with gradients.

        Matrices of the same shape are processed together.
        """
        parameters_by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            parameters_by_shape.setdefault(parameter.shape, []).append(parameter)

        for (rows, columns), parameters in parameters_by_shape.items():
            # Shape of the momenta and of the updates: (number of parameters, rows, columns).
            momenta = torch.stack([self._update_momentum(parameter) for parameter in parameters])
            updates = orthogonalize(momenta)
            # With this factor, the update has about the same size as an update of AdamW.
            step_size = 0.2 * math.sqrt(max(rows, columns)) * group["lr"]
            for parameter, update in zip(parameters, updates, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(update, alpha=step_size)

    def _update_momentum(self, parameter: nn.Parameter) -> Tensor:
        """Update the momentum buffer of a parameter with its gradient, and return the Nesterov momentum."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient: Tensor = parameter.grad  # pyright: ignore[reportAssignmentType]  (`step` sets missing gradients to 0.)
        # a.lerp(b, weight) = a + weight * (b - a). The buffer becomes a moving average of the gradients.
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - self.momentum)
        return gradient.lerp(buffer, self.momentum)


def orthogonalize(matrices: Float[Tensor, "n rows columns"]) -> Float[Tensor, "n rows columns"]:
    """Return matrices with nearly the same singular vectors, and with singular values near 1.

    Singular values of at least 0.01 times the norm of the matrix are brought into the range 0.73 to 1.27. The method is
    a Newton-Schulz iteration with three polynomials:

        x ← p·x,   p = a + b·g + c·g²,   g = x·xᵀ

    For each singular value s of x, one iteration computes s ← a·s + b·s³ + c·s⁵.

    Args:
        matrices: A batch of matrices.

    Returns:
        The batch of orthogonalized matrices.
    """
    # The Gram matrix g is smaller if the matrices are wide.
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    identity = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    gram = x @ x.mT

    # All polynomials p commute, because they are polynomials of the first Gram matrix. So the Gram matrix of the next
    # iteration is p·g·p. The large matrix x is only multiplied once at the end, by the product of all p.
    (a, b, c), *remaining_coefficients = MUON_COEFFICIENTS
    factor = torch.baddbmm(a * identity + b * gram, gram, gram, alpha=c)
    product = factor
    for a, b, c in remaining_coefficients:
        gram = factor @ gram @ factor
        factor = torch.baddbmm(a * identity + b * gram, gram, gram, alpha=c)
        product = factor @ product
    x = product @ x
    return x.mT if is_tall else x


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer. Groups without parameters are left out.

    Matrices and embeddings are decayed. Vectors (norms, biases) and the parameters of the position method (such as the
    bias table of T5) are not decayed. Embeddings and the position method have their own learning rates.

    Args:
        model: The model to train.
        config: The settings of the optimizer.

    Returns:
        One dictionary for each group. Besides the keys of torch, "lr_scale" is the factor of the learning rate, and
        "state_names" contains the names of the tensors that the optimizer stores for each parameter.
    """
    parameters: dict[ParameterKind, list[nn.Parameter]] = {"matrix": [], "embedding": [], "position": [], "vector": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = _parameter_kind(name, parameter)
            parameters[kind].append(parameter)

    state_names = MOMENTUM_STATE if config.name == "nesterov" else ADAMW_STATE
    # Muon uses momentum for matrices, and AdamW for everything else.
    matrix_state_names = MOMENTUM_STATE if config.name == "muon" else state_names
    groups = [
        {
            "params": parameters["matrix"],
            "weight_decay": config.weight_decay,
            "lr_scale": 1.0,
            "state_names": matrix_state_names,
        },
        {
            "params": parameters["embedding"],
            "weight_decay": config.weight_decay,
            "lr_scale": config.embedding_lr_multiplier,
            "state_names": state_names,
        },
        {
            "params": parameters["vector"],
            "weight_decay": 0.0,
            "lr_scale": 1.0,
            "state_names": state_names,
        },
        {
            "params": parameters["position"],
            "weight_decay": 0.0,
            "lr_scale": config.position_lr_multiplier,
            "state_names": state_names,
        },
    ]
    return [group for group in groups if group["params"]]


def _parameter_kind(name: str, parameter: nn.Parameter) -> ParameterKind:
    """Return which parameter group of the optimizer a parameter belongs to. Each group has its own settings.

    Args:
        name: The name of the parameter in the model, such as "vocabulary.embedding.weight".
        parameter: The parameter.
    """
    if name.startswith("position."):
        return "position"
    if parameter.ndim < 2:
        return "vector"
    if name.startswith("vocabulary."):
        return "embedding"
    return "matrix"


def build(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Create the optimizer of a model.

    Args:
        model: The model to train.
        config: The settings of the optimizer. The learning rate is replaced before every step, see `step`.
    """
    groups = parameter_groups(model, config)
    if config.name == "nesterov":
        return Nesterov(groups, lr=config.lr, momentum=config.momentum)
    if config.name == "muon":
        return Muon(groups, lr=config.lr, betas=config.betas, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def step(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], lr: float) -> None:
    """Update all parameters, and reset their gradients.

    A parameter may have no gradient, for example the tail of an adaptive softmax if the batch has no rare word. Such a
    gradient is set to zero, so that the moments of the parameter decay on all ranks.

    Args:
        optimizer: The optimizer, which was created by `build`.
        parameters: All parameters of the model.
        lr: The learning rate. It is multiplied by the factor "lr_scale" of each parameter group.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients so that the norm of all gradients together is at most `max_norm`.

    Args:
        parameters: All parameters of the model.
        max_norm: The largest norm. 0 does not scale the gradients.

    Returns:
        The norm before the scaling.
    """
    norm = nn.utils.clip_grad_norm_(parameters, max_norm or math.inf)  # An infinite limit changes nothing.
    if hasattr(norm, "full_tensor"):
        return norm.full_tensor()  # pyright: ignore  (With FSDP, the norm is a sharded tensor.)
    return norm


def state_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that the optimizer stores for the parameters of a model.

    The tensors are not copies. Writing to a tensor restores the state of the optimizer. Before the first step, the
    tensors are created and filled with zeros.

    Args:
        optimizer: The optimizer, which was created by `build`.
        model: The model that is trained.

    Returns:
        The tensors by the name of the parameter and of the tensor, such as "layers.0.ffn.wide.weight.exp_avg".
    """
    # The names of the tensors that the optimizer stores for each parameter, such as ("exp_avg", "exp_avg_sq").
    names_by_parameter = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            names_by_parameter[parameter] = group["state_names"]

    tensors = {}
    for parameter_name, parameter in model.named_parameters():
        # A frozen parameter is in no group and has no state.
        for state_name in names_by_parameter.get(parameter, ()):
            state = optimizer.state[parameter]
            if state_name not in state:
                state[state_name] = torch.zeros_like(parameter)
            tensors[f"{parameter_name}.{state_name}"] = state[state_name]
    return tensors


def set_step_count(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Set the number of steps that the optimizer has done. AdamW needs the number for its bias correction.

    Args:
        optimizer: The optimizer, whose state tensors were restored before.
        count: The number of steps.
    """
    for state in optimizer.state.values():
        if "exp_avg" in state:
            state["step"] = torch.tensor(float(count), dtype=torch.float32, device=state["exp_avg"].device)
