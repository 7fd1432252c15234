"""How weights are moved: three optimizers, and a learning rate that is a pure function of the step's number.

The schedule keeps no state, so there is none to save or to restore wrongly. Optimizer state is only tensors beside
parameters (moments or momentum), under the parameter's name; every parameter is updated every time, so the count of
steps is that of the run and is not stored once per parameter.
"""

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from trainshort.config.run_config import OptimConfig

MOMENTS, MOMENTUM = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
"""Tensors that are kept beside a parameter: by AdamW, and by Nesterov and Muon."""
MUON_COEFFICIENTS = ((8.0934, -23.6205, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))
"""Muon's polynomials. Each is the odd quintic nearest to 1 on what the one before leaves of [0.01, 1] (found by linear
programming); three of them do what takes five of Jordan's single one."""


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Learning rate at `step` (the first is 0) of a run of `steps`.

    warmup 4, warmup_start_lr 0, lr 1, min_lr 0, linear, steps 8:
        step  0    1     2    3     4  5     6    7
        lr    0  0.25  0.5  0.75    1  0.75  0.5  0.25
    As fairseq's: the warm-up's first step uses `warmup_start_lr`, and `min_lr` would be the rate at `steps`.
    """
    if step < config.warmup:
        return config.warmup_start_lr + (config.lr - config.warmup_start_lr) * step / config.warmup
    if config.schedule == "constant":
        return config.lr
    gone = min(1.0, (step - config.warmup) / max(1, steps - config.warmup))
    left = 1 - gone if config.schedule == "linear" else (1 + math.cos(math.pi * gone)) / 2
    return config.min_lr + (config.lr - config.min_lr) * left


class Nesterov(torch.optim.SGD):
    """fairseq's `nag`, the paper's optimizer: torch's Nesterov momentum plus a decay that is not part of the gradient.

    fairseq keeps v = -lr·b, where b is torch's momentum buffer, and rescales v by lr/lr_old when the rate changes:
        fairseq   v ← m·(lr/lr_old)·v − lr·g        p ← p + m·v − lr·g
        torch     b ← m·b + g                       p ← p − lr·(g + m·b)
    Putting v = −lr·b into the first line gives the second, under any schedule; tests/test_optim.py runs both.
    Decay differs: fairseq shrinks the weight itself, p ← p·(1 − lr·decay), where torch's SGD would add decay·p to g.
    """

    def __init__(self, groups: list[dict], *, lr: float, momentum: float) -> None:
        decays = [group.pop("weight_decay") for group in groups]
        super().__init__(groups, lr=lr, momentum=momentum, nesterov=momentum > 0)
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["decay"] = decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"] if group["decay"] else ():
                parameter.mul_(1 - group["lr"] * group["decay"])
        super().step(closure)


class Muon(torch.optim.AdamW):
    """Matrices inside the layers by Muon (Jordan 2024), all else by AdamW, under one learning rate.

    Muon's step is the nearest orthogonal matrix to the momentum: every direction of a weight is moved equally far, also
    those in which gradients are small. Its size is AdamW's (Moonlight's 0.2·√width), so both take one rate. torch's own
    Muon iterates in bfloat16, for which most CPUs have no unit; here it is float32, all matrices of a shape at once.
    """

    def __init__(self, groups: list[dict], *, lr: float, betas: tuple[float, float], momentum: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, fused=True)
        self.momentum = momentum

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        every = self.param_groups
        self.param_groups = [group for group in every if group["keeps"] is MOMENTS]
        super().step(closure)
        self.param_groups = every
        for group in every:
            if group["keeps"] is MOMENTUM:
                self._update_group(group)

    def _update_group(self, group: dict) -> None:
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            shapes.setdefault(parameter.shape, []).append(parameter)
        for (rows, columns), alike in shapes.items():
            ahead = []
            for parameter in alike:
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                gradient: Tensor = parameter.grad  # pyright: ignore[reportAssignmentType]  (`step` gave everyone one)
                buffer = state["momentum_buffer"].lerp_(gradient, 1 - self.momentum)
                ahead.append(gradient.lerp(buffer, self.momentum))
            size = 0.2 * math.sqrt(max(rows, columns)) * group["lr"]
            for parameter, turned in zip(alike, orthogonalize(torch.stack(ahead)), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(turned, alpha=size)


def orthogonalize(matrices: Float[Tensor, "n rows columns"]) -> Float[Tensor, "n rows columns"]:
    """Each matrix with its singular values brought near 1 (0.73 to 1.27, of all down to 0.01 of its norm), by three
    steps of Newton-Schulz's kind:

        x ← p·x,   p = a + b·g + c·g²,   g = xxᵀ        is, for each singular value,        s ← a·s + b·s³ + c·s⁵

    All p are polynomials of the first g, so they commute: g ← p·g·p, and x itself, the larger, is multiplied once.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    one = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    gram = x @ x.mT
    (a, b, c), *others = MUON_COEFFICIENTS
    product = factor = torch.baddbmm(a * one + b * gram, gram, gram, alpha=c)
    for a, b, c in others:
        gram = factor @ gram @ factor
        factor = torch.baddbmm(a * one + b * gram, gram, gram, alpha=c)
        product = factor @ product
    x = product @ x
    return x.mT if tall else x


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict]:
    """Matrices are decayed; vectors (norms, biases, slopes) are not, nor is what the position method owns, which has a
    learning rate of its own: a T5 bias is a bias, though its numbers for all heads stand in one table."""
    kinds: dict[str, list[nn.Parameter]] = {"matrix": [], "embedding": [], "position": [], "vector": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kinds[_kind(name, parameter)].append(parameter)
    keeps = MOMENTUM if config.name == "nesterov" else MOMENTS
    decay = config.weight_decay
    matrices = MOMENTUM if config.name == "muon" else keeps
    made = [
        {"params": kinds["matrix"], "weight_decay": decay, "scale": 1.0, "keeps": matrices},
        {"params": kinds["embedding"], "weight_decay": decay, "scale": config.embedding_lr_multiplier, "keeps": keeps},
        {"params": kinds["vector"], "weight_decay": 0.0, "scale": 1.0, "keeps": keeps},
        {"params": kinds["position"], "weight_decay": 0.0, "scale": config.position_lr_multiplier, "keeps": keeps},
    ]
    return [group for group in made if group["params"]]


def _kind(name: str, parameter: nn.Parameter) -> str:
    if name.startswith("position."):
        return "position"
    if parameter.ndim < 2:
        return "vector"
    return "embedding" if name.startswith("vocabulary.") else "matrix"


def build(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer a config asks for. The rate set here is replaced before every step."""
    made = parameter_groups(model, config)
    if config.name == "nesterov":
        return Nesterov(made, lr=config.lr, momentum=config.momentum)
    if config.name == "muon":
        return Muon(made, lr=config.lr, betas=config.betas, momentum=config.momentum)
    return torch.optim.AdamW(made, lr=config.lr, betas=config.betas, fused=True)


def step(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], rate: float) -> None:
    """One step at learning rate `rate`, of every parameter.

    A parameter that no loss reached (an adaptive softmax's tail, when a batch has no rare word) gets a zero gradient:
    its moments go on decaying whether or not another rank's batch did reach it.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def clip_grad_norm(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Scale gradients so that their joint norm is at most `largest` (0: leave them), and return the norm before."""
    norm = nn.utils.clip_grad_norm_(parameters, largest or math.inf)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # pyright: ignore


def state_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's tensors by "parameter.kind"; made as zeros where no step has made them yet.

    They are the optimizer's own, not copies: loading into them in place is restoring the optimizer.
    """
    tensors = {}
    keeps = {parameter: group["keeps"] for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        for kind in keeps.get(parameter, ()):  # none for one that is not trained
            state = optimizer.state[parameter]
            if kind not in state:
                state[kind] = torch.zeros_like(parameter)
            tensors[f"{name}.{kind}"] = state[kind]
    return tensors


def set_step_count(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Tell the optimizer how many steps its restored tensors have seen (AdamW's bias correction needs it)."""
    for state in optimizer.state.values():
        if "exp_avg" in state:
            state["step"] = torch.tensor(float(count), dtype=torch.float32, device=state["exp_avg"].device)
