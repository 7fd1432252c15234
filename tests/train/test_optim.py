"""Learning rates against the paper's numbers, Nesterov against fairseq's own equations."""

import copy
import math

import pytest
import torch
from torch import nn

from trainshort.config.run_config import OptimConfig, RunConfig
from trainshort.errors import InputError
from trainshort.train import optim

PAPER = OptimConfig(
    name="nesterov", lr=1.0, min_lr=1e-4, warmup=16_000, warmup_start_lr=1e-7, weight_decay=0.0, max_grad_norm=0.1
)


def test_the_docstrings_example():
    config = OptimConfig(lr=1.0, warmup=4, schedule="linear")
    assert [optim.learning_rate(step, 8, config) for step in range(8)] == [0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25]


def test_the_papers_schedule():
    rates = {step: optim.learning_rate(step, 286_000, PAPER) for step in (0, 8_000, 16_000, 151_000, 286_000)}
    assert rates[0] == 1e-7
    assert rates[8_000] == pytest.approx(0.5, rel=1e-6)
    assert rates[16_000] == 1.0
    assert rates[151_000] == pytest.approx((1 + 1e-4) / 2)  # half-way down the cosine
    assert rates[286_000] == pytest.approx(1e-4)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_decay_falls_from_lr_to_min_lr_and_stays(schedule):
    config = OptimConfig(lr=3e-3, min_lr=1e-4, warmup=10, schedule=schedule)
    rates = [optim.learning_rate(step, 100, config) for step in range(10, 120)]
    assert rates[0] == 3e-3
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1e-4)
    assert min(rates) >= 1e-4 * (1 - 1e-12)


def test_constant_and_no_warmup():
    assert optim.learning_rate(0, 10, OptimConfig(lr=0.5, warmup=0, schedule="constant")) == 0.5
    assert optim.learning_rate(99, 10, OptimConfig(lr=0.5, warmup=0, schedule="constant")) == 0.5
    # A warm-up as long as the run leaves nothing to decay.
    assert optim.learning_rate(9, 10, OptimConfig(lr=1.0, warmup=10)) == 0.9


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_nesterov_is_fairseqs(decay):
    """fairseq's `nag`, written down from its update rule, on the same gradients and a rate that changes every step."""
    momentum, rates = 0.99, [1e-7, 0.5, 1.0, 0.3, 0.3, 1e-4]
    parameter = nn.Parameter(torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    expected, velocity, old = parameter.detach().clone(), torch.zeros(3, 2, dtype=torch.float64), rates[0]
    ours = optim.Nesterov([{"params": [parameter], "weight_decay": decay, "scale": 1.0}], lr=1.0, momentum=momentum)
    for step, rate in enumerate(rates):
        gradient = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(10 + step))
        parameter.grad = gradient.clone()
        optim.step(ours, [parameter], rate)

        correct = rate / old
        expected *= 1 - rate * decay
        expected += momentum * momentum * correct * velocity - (1 + momentum) * rate * gradient
        velocity = momentum * correct * velocity - rate * gradient
        old = rate
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["adamw", "nesterov", "muon"])
def test_matrices_decay_and_vectors_do_not(name):
    model = small_model()
    before = copy.deepcopy(model)
    config = OptimConfig(name=name, weight_decay=0.5)
    optim.step(optim.build(model, config), model.parameters(), 0.1)  # no gradients: only decay moves weights
    for (label, new), old in zip(model.named_parameters(), before.parameters(), strict=True):
        expected = old * (1 - 0.1 * 0.5) if old.ndim == 2 else old
        torch.testing.assert_close(new, expected, msg=label)


def test_muon_turns_a_momentum_into_the_nearest_orthogonal_matrix():
    """Three steps bring singular values of 0.01 to 1 near 1, and leave the directions; U·Vᵀ from an exact SVD."""
    generator = torch.Generator().manual_seed(1)
    for rows, columns in ((6, 6), (6, 20), (20, 6)):
        u, _, vt = torch.linalg.svd(torch.randn(2, rows, columns, generator=generator), full_matrices=False)
        values = torch.logspace(-2, 0, 6).expand(2, 6)
        found = optim.orthogonalize(u @ torch.diag_embed(values) @ vt)
        seen = u.mT @ found @ vt.mT
        torch.testing.assert_close(seen, torch.diag_embed(seen.diagonal(dim1=1, dim2=2)), atol=1e-4, rtol=0)
        assert 0.4 < float(seen.diagonal(dim1=1, dim2=2).min()) < float(seen.diagonal(dim1=1, dim2=2).max()) < 1.3


class WithTable(nn.Module):
    """A layer, an embedding and a position table, under the names that our model has."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary = nn.Embedding(5, 4)
        self.position = nn.ParameterDict({"table": torch.ones(2, 3)})
        self.layers = nn.ModuleList([nn.Linear(4, 4)])


@pytest.mark.parametrize("name", ["adamw", "nesterov", "muon"])
def test_a_position_table_is_not_decayed_and_has_a_rate_of_its_own(name):
    model = WithTable()
    optimizer = optim.build(
        model, OptimConfig(name=name, weight_decay=0.5, position_lr_multiplier=3.0, embedding_lr_multiplier=0.5)
    )
    optim.step(optimizer, model.parameters(), 0.1)  # no gradients
    assert torch.equal(model.position["table"], torch.ones(2, 3))
    rates = {id(one): group["lr"] for group in optimizer.param_groups for one in group["params"]}
    assert rates[id(model.position["table"])] == pytest.approx(0.3)
    assert rates[id(model.vocabulary.weight)] == pytest.approx(0.05)
    assert rates[id(model.layers[0].weight)] == 0.1
    kept = {key.rpartition(".")[0]: key.rpartition(".")[2] for key in optim.state_tensors(optimizer, model)}
    assert kept["layers.0.weight"] == ("exp_avg_sq" if name == "adamw" else "momentum_buffer")
    assert kept["vocabulary.weight"] == ("momentum_buffer" if name == "nesterov" else "exp_avg_sq")


def test_muon_is_not_for_shared_out_matrices():
    with pytest.raises(InputError, match=r"optim.name muon cannot be combined with train.parallel fsdp"):
        RunConfig().replace(optim={"name": "muon"}, train={"parallel": "fsdp"})


def test_clipping_scales_all_gradients_alike_and_reports_the_norm_before():
    model = small_model()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    count = sum(p.numel() for p in model.parameters())
    norm = optim.clip_grad_norm(model.parameters(), 0.0)  # 0 does not clip
    assert float(norm) == pytest.approx(2 * math.sqrt(count))
    assert float(next(model.parameters()).grad[0, 0]) == 2.0
    optim.clip_grad_norm(model.parameters(), 0.1)
    clipped = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert float(clipped.norm()) == pytest.approx(0.1, rel=1e-4)
    assert clipped.unique().numel() == 1


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
    model(x).square().sum().backward()
    optim.step(optimizer, model.parameters(), 0.01 * (step + 1))


@pytest.mark.parametrize("name", ["adamw", "nesterov", "muon"])
def test_an_optimizer_rebuilt_from_its_tensors_goes_on_bit_for_bit(name):
    config = OptimConfig(name=name)
    model = small_model()
    optimizer = optim.build(model, config)
    for step in range(3):
        take_step(model, optimizer, step)

    other = copy.deepcopy(model)
    rebuilt = optim.build(other, config)
    kept = {key: value.clone() for key, value in optim.state_tensors(optimizer, model).items()}
    for key, tensor in optim.state_tensors(rebuilt, other).items():
        tensor.copy_(kept[key])
    optim.set_step_count(rebuilt, 3)

    for step in range(3, 6):
        take_step(model, optimizer, step)
        take_step(other, rebuilt, step)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    # The same without the count of updates is not the same, for AdamW: the check above can fail.
    if name == "adamw":
        optim.set_step_count(rebuilt, 0)
        take_step(model, optimizer, 6)
        take_step(other, rebuilt, 6)
        assert not torch.equal(next(model.parameters()), next(other.parameters()))


def test_a_parameter_without_a_gradient_keeps_its_count():
    """Its moments decay as if the gradient were zero, so that all parameters have seen the same number of updates."""
    config = OptimConfig(weight_decay=0.0)
    parameter = nn.Parameter(torch.ones(2, 2))
    module = nn.ParameterList([parameter])
    optimizer = optim.build(module, config)
    parameter.grad = torch.ones(2, 2)
    optim.step(optimizer, module.parameters(), 0.1)
    optim.step(optimizer, module.parameters(), 0.1)
    assert float(optimizer.state[parameter]["step"]) == 2
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], torch.full((2, 2), 0.1 * 0.9))
