"""Tests of learning rate schedules, optimizers and gradient clipping."""

import copy
import math

import pytest
import torch
from torch import nn

from trainshort.config.run_config import OptimConfig, RunConfig
from trainshort.errors import InputError
from trainshort.train import optim

PAPER_CONFIG = OptimConfig(
    name="nesterov", lr=1.0, min_lr=1e-4, warmup=16_000, warmup_start_lr=1e-7, weight_decay=0.0, max_grad_norm=0.1
)


def test_learning_rate_equals_the_example_in_its_docstring():
    config = OptimConfig(lr=1.0, warmup=4, schedule="linear")
    rates = [optim.learning_rate(step, 8, config) for step in range(8)]
    assert rates == [0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25]


def test_learning_rate_of_the_paper():
    rates = {step: optim.learning_rate(step, 286_000, PAPER_CONFIG) for step in (0, 8_000, 16_000, 151_000, 286_000)}
    assert rates[0] == 1e-7
    assert rates[8_000] == pytest.approx(0.5, rel=1e-6)
    assert rates[16_000] == 1.0
    assert rates[151_000] == pytest.approx((1 + 1e-4) / 2)  # The middle of the cosine.
    assert rates[286_000] == pytest.approx(1e-4)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_learning_rate_decays_to_min_lr_and_stays_there(schedule):
    config = OptimConfig(lr=3e-3, min_lr=1e-4, warmup=10, schedule=schedule)
    rates = [optim.learning_rate(step, 100, config) for step in range(10, 120)]
    assert rates[0] == 3e-3
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1e-4)
    assert min(rates) >= 1e-4 * (1 - 1e-12)


def test_constant_learning_rate_without_warmup():
    config = OptimConfig(lr=0.5, warmup=0, schedule="constant")
    assert optim.learning_rate(0, 10, config) == 0.5
    assert optim.learning_rate(99, 10, config) == 0.5


def test_warmup_as_long_as_the_run():
    assert optim.learning_rate(9, 10, OptimConfig(lr=1.0, warmup=10)) == 0.9


def small_model() -> nn.Module:
    """Return a model with matrices and vectors, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def random_gradient(seed: int) -> torch.Tensor:
    """Return a random matrix of shape (3, 2) in float64."""
    return torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_nesterov_equals_fairseq(weight_decay):
    """Compare with the update rule of fairseq's `nag`, with a learning rate that changes in every step."""
    momentum = 0.99
    rates = [1e-7, 0.5, 1.0, 0.3, 0.3, 1e-4]
    parameter = nn.Parameter(random_gradient(1))
    group = {"params": [parameter], "weight_decay": weight_decay, "lr_scale": 1.0}
    optimizer = optim.Nesterov([group], lr=1.0, momentum=momentum)

    expected = parameter.detach().clone()
    velocity = torch.zeros(3, 2, dtype=torch.float64)
    previous_rate = rates[0]
    for step, rate in enumerate(rates):
        gradient = random_gradient(10 + step)
        parameter.grad = gradient.clone()
        optim.step(optimizer, [parameter], rate)

        # The update rule of fairseq.
        rate_change = rate / previous_rate
        expected *= 1 - rate * weight_decay
        expected += momentum * momentum * rate_change * velocity - (1 + momentum) * rate * gradient
        velocity = momentum * rate_change * velocity - rate * gradient
        previous_rate = rate
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["adamw", "nesterov", "muon"])
def test_only_matrices_are_decayed(name):
    model = small_model()
    model_before = copy.deepcopy(model)
    optimizer = optim.build(model, OptimConfig(name=name, weight_decay=0.5))
    optim.step(optimizer, model.parameters(), 0.1)  # Without gradients, only the weight decay changes the weights.
    for (label, new), old in zip(model.named_parameters(), model_before.parameters(), strict=True):
        expected = old * (1 - 0.1 * 0.5) if old.ndim == 2 else old
        torch.testing.assert_close(new, expected, msg=label)


@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (6, 20), (20, 6)])
def test_orthogonalize_keeps_singular_vectors_and_brings_singular_values_near_1(rows, columns):
    generator = torch.Generator().manual_seed(1)
    u, _, vt = torch.linalg.svd(torch.randn(2, rows, columns, generator=generator), full_matrices=False)
    singular_values = torch.logspace(-2, 0, 6).expand(2, 6)
    matrices = u @ torch.diag_embed(singular_values) @ vt
    result = u.mT @ optim.orthogonalize(matrices) @ vt.mT  # This is diagonal if the singular vectors are unchanged.
    new_singular_values = result.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(result, torch.diag_embed(new_singular_values), atol=1e-4, rtol=0)
    assert float(new_singular_values.min()) > 0.4
    assert float(new_singular_values.max()) < 1.3


class ModelWithPositionTable(nn.Module):
    """A layer, an embedding and a position table, with the parameter names of `TransformerLM`."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary = nn.Embedding(5, 4)
        self.position = nn.ParameterDict({"table": torch.ones(2, 3)})
        self.layers = nn.ModuleList([nn.Linear(4, 4)])


@pytest.mark.parametrize("name", ["adamw", "nesterov", "muon"])
def test_position_table_has_its_own_learning_rate_and_no_decay(name):
    model = ModelWithPositionTable()
    config = OptimConfig(name=name, weight_decay=0.5, position_lr_multiplier=3.0, embedding_lr_multiplier=0.5)
    optimizer = optim.build(model, config)
    optim.step(optimizer, model.parameters(), 0.1)  # Without gradients, only the weight decay changes the weights.
    assert torch.equal(model.position["table"], torch.ones(2, 3))

    rates = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            rates[id(parameter)] = group["lr"]
    assert rates[id(model.position["table"])] == pytest.approx(0.3)
    assert rates[id(model.vocabulary.weight)] == pytest.approx(0.05)
    assert rates[id(model.layers[0].weight)] == 0.1

    tensor_names = optim.state_tensors(optimizer, model).keys()
    matrix_state = "exp_avg_sq" if name == "adamw" else "momentum_buffer"
    embedding_state = "momentum_buffer" if name == "nesterov" else "exp_avg_sq"
    assert f"layers.0.weight.{matrix_state}" in tensor_names
    assert f"vocabulary.weight.{embedding_state}" in tensor_names


def test_muon_stores_no_adamw_moments_for_matrices():
    model = ModelWithPositionTable()
    tensor_names = optim.state_tensors(optim.build(model, OptimConfig(name="muon")), model).keys()
    assert [name for name in tensor_names if name.startswith("layers.0.weight.")] == ["layers.0.weight.momentum_buffer"]


def test_muon_with_sharded_matrices_is_rejected():
    with pytest.raises(InputError, match=r"optim\.name.*muon.*fsdp"):
        RunConfig().replace(optim={"name": "muon"}, train={"parallel": "fsdp"})


def test_clip_grad_norm_scales_all_gradients_and_returns_the_norm():
    model = small_model()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    parameter_count = sum(parameter.numel() for parameter in model.parameters())
    norm = optim.clip_grad_norm(model.parameters(), 0.0)  # 0 does not clip.
    assert float(norm) == pytest.approx(2 * math.sqrt(parameter_count))
    assert float(next(model.parameters()).grad[0, 0]) == 2.0

    optim.clip_grad_norm(model.parameters(), 0.1)
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert float(gradients.norm()) == pytest.approx(0.1, rel=1e-4)
    assert gradients.unique().numel() == 1


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Do one training step on random inputs. The inputs and the learning rate depend on the step."""
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
    model(inputs).square().sum().backward()
    optim.step(optimizer, model.parameters(), 0.01 * (step + 1))


@pytest.mark.parametrize("name", ["adamw", "nesterov", "muon"])
def test_restored_optimizer_continues_bit_for_bit(name):
    config = OptimConfig(name=name)
    model = small_model()
    optimizer = optim.build(model, config)
    for step in range(3):
        take_step(model, optimizer, step)

    restored_model = copy.deepcopy(model)
    restored_optimizer = optim.build(restored_model, config)
    stored_tensors = {key: tensor.clone() for key, tensor in optim.state_tensors(optimizer, model).items()}
    for key, tensor in optim.state_tensors(restored_optimizer, restored_model).items():
        tensor.copy_(stored_tensors[key])
    optim.set_step_count(restored_optimizer, 3)

    for step in range(3, 6):
        take_step(model, optimizer, step)
        take_step(restored_model, restored_optimizer, step)
    for parameter, restored_parameter in zip(model.parameters(), restored_model.parameters(), strict=True):
        assert torch.equal(parameter, restored_parameter)

    # With a wrong step count, AdamW gives another result. So the comparison above can fail.
    if name == "adamw":
        optim.set_step_count(restored_optimizer, 0)
        take_step(model, optimizer, 6)
        take_step(restored_model, restored_optimizer, 6)
        assert not torch.equal(next(model.parameters()), next(restored_model.parameters()))


def test_parameter_without_gradient_is_updated_with_a_zero_gradient():
    """So all parameters have seen the same number of steps."""
    parameter = nn.Parameter(torch.ones(2, 2))
    model = nn.ParameterList([parameter])
    optimizer = optim.build(model, OptimConfig(weight_decay=0.0))
    parameter.grad = torch.ones(2, 2)
    optim.step(optimizer, model.parameters(), 0.1)
    optim.step(optimizer, model.parameters(), 0.1)
    assert float(optimizer.state[parameter]["step"]) == 2
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], torch.full((2, 2), 0.1 * 0.9))
