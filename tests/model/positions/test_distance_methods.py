"""Tests of KERPLE, logarithmic ALiBi, BAM, Sandwich and FIRE: the biases equal their formulas in float64."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import plot_biases
from trainshort import alibi
from trainshort.attention import DenseBias, DistanceBias
from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.model.positions import LayerInput, PositionMethod, build_position, positions
from trainshort.model.positions.kerple import log_bias_window

LENGTH = 5000
HEADS = 4


def make_method(name: str, heads: int = HEADS, **settings) -> PositionMethod:
    """Create a position method with the given settings of the method."""
    torch.manual_seed(0)
    config = {"width": 16, "heads": heads, "position": name, "position_settings": settings}
    return build_position(ModelConfig.parse(config))


def bias_table(method: PositionMethod, length: int = LENGTH) -> Tensor:
    """Return the biases of a method in float64: one row per head and one column per distance."""
    bias = method.score_bias(length)
    assert isinstance(bias, DistanceBias)
    assert bias.table.dtype == torch.float32
    return bias.table.detach().double()


def assert_bias_equals(method: PositionMethod, formula: Callable[[int, Tensor], Tensor]) -> None:
    """Check the bias at each distance. `formula` takes a head and the distances and returns the expected biases."""
    distances = torch.arange(LENGTH, dtype=torch.float64)
    expected = torch.stack([formula(head, distances) for head in range(HEADS)])
    torch.testing.assert_close(bias_table(method), expected, rtol=1e-5, atol=1e-5)


# ---- KERPLE


def test_kerple_log_equals_formula():
    method = make_method("kerple", form="log")
    with torch.no_grad():
        method.a.copy_(torch.tensor([0.5, 1.0, 0.001, 2.0]))
        method.p.copy_(torch.tensor([1.5, 0.3, 1.0, 3.0]))
    a = (0.5, 1.0, 0.01, 2.0)  # The minimum is 0.01.
    p = (1.5, 0.3, 1.0, 3.0)
    assert_bias_equals(method, lambda head, distances: -p[head] * torch.log(1 + a[head] * distances))


def test_kerple_power_equals_formula():
    method = make_method("kerple", form="power")
    with torch.no_grad():
        method.a.copy_(torch.tensor([0.5, 1.0, 0.001, 2.0]))
        method.p.copy_(torch.tensor([1.5, 0.3, 1.0, 3.0]))
    a = (0.5, 1.0, 0.01, 2.0)  # The minimum is 0.01.
    p = (1.5, 0.3, 1.0, 2.0)  # The maximum of p is 2.
    assert_bias_equals(method, lambda head, distances: -a[head] * distances ** p[head])


def test_initial_parameters_of_kerple():
    method = make_method("kerple", heads=16)
    assert method.a.min() >= 0
    assert method.a.max() <= 1
    assert 1 < method.p.max() <= 2


@pytest.mark.parametrize("form", ["log", "power"])
def test_kerple_parameters_below_the_minimum_are_trained(form):
    """A parameter out of range gets the gradients that lead back into the range, and no other gradients."""
    method = make_method("kerple", form=form)
    with torch.no_grad():
        method.a.copy_(torch.tensor([0.004, 0.004, 0.5, 0.5]))
        method.p.copy_(torch.tensor([1.0, 1.0, -0.2, -0.2]))
    # Heads 0 and 2 reduce the loss with a steeper bias, and heads 1 and 3 with a flatter bias.
    loss_per_bias = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    (method.score_bias(50).table * loss_per_bias).sum().backward()
    assert method.a.grad[0] < 0
    assert method.a.grad[1] == 0
    assert method.p.grad[2] < 0
    assert method.p.grad[3] == 0


def test_kerple_power_above_the_maximum_is_trained():
    method = make_method("kerple", form="power")
    with torch.no_grad():
        method.p.fill_(2.5)
    # Heads 0 and 2 reduce the loss with a flatter bias, and heads 1 and 3 with a steeper bias.
    loss_per_bias = torch.tensor([[-1.0], [1.0], [-1.0], [1.0]])
    (method.score_bias(50).table * loss_per_bias).sum().backward()
    assert method.p.grad[0] > 0
    assert method.p.grad[1] == 0


# ---- logarithmic ALiBi, BAM and Sandwich


def test_log_alibi_equals_formula():
    slopes = alibi.slopes(HEADS).double()
    assert_bias_equals(make_method("log-alibi"), lambda head, distances: -slopes[head] * torch.log(1 + distances))


def test_initial_bam_equals_alibi():
    slopes = alibi.slopes(HEADS).double()
    assert_bias_equals(make_method("bam"), lambda head, distances: -slopes[head] * (distances + 1e-5))


def test_bam_equals_formula():
    slopes = alibi.slopes(HEADS).double()
    powers = (0.5, 1, 2, -0.5)
    method = make_method("bam")
    with torch.no_grad():
        method.power.copy_(torch.tensor(powers))
        method.centre.fill_(3)
    assert_bias_equals(method, lambda head, distances: -slopes[head] * ((distances - 3).abs() + 1e-5) ** powers[head])


def test_sandwich_equals_formula():
    def formula(head: int, distances: Tensor) -> Tensor:
        inner_product = sum(torch.cos(distances / 10_000 ** (2 * pair / 128)) for pair in range(1, 65))
        return (inner_product - 64) * HEADS / (8 * (head + 1))

    assert_bias_equals(make_method("sandwich"), formula)


def test_sandwich_is_not_monotone():
    """The inner products fall about logarithmically, but the value at 4096 is smaller than the value at 8192."""
    head_factor = HEADS / 8
    inner_products = bias_table(make_method("sandwich"), 8193)[0] / head_factor
    values = [float(inner_products[distance]) for distance in (2, 4, 64, 4096, 8192)]
    assert values == pytest.approx([-5.2, -13.8, -32.9, -67.3, -62.0], abs=0.06)


# ---- FIRE


def test_fire_equals_formula():
    num_cached = 5
    num_new = 7
    num_keys = num_cached + num_new
    method = make_method("fire", threshold=8)
    position_ids = torch.arange(num_cached, num_keys).expand(2, -1)
    x = torch.zeros(2, num_new, 16)
    bias = method.content_bias(LayerInput(layer=0, x=x, length=num_keys, position_ids=position_ids, method_cache={}))
    assert isinstance(bias, DenseBias)
    assert bias.values.shape == (HEADS, num_new, num_keys)
    for query in range(num_cached, num_keys):
        for key in range(query + 1):
            normalized_distance = math.log(1 + 0.1 * (query - key)) / math.log(1 + 0.1 * max(query, 8))
            hidden = torch.relu(method.wide.weight[:, 0] * normalized_distance + method.wide.bias)
            expected = method.narrow.weight @ hidden
            torch.testing.assert_close(bias.values[:, query - num_cached, key], expected, rtol=0, atol=1e-5)


# ---- statements of docs/positions.md about windows


def estimate_decay_power(table: Tensor) -> Tensor:
    """Return for each head the power p such that exp(bias) falls like distance**-p at the end of the table.

    The sum of exp(bias) over all distances converges for p > 1.
    """
    last = table.shape[1] - 1
    middle = last // 2
    return (table[:, middle] - table[:, last]) / math.log(last / middle)


def test_biases_whose_softmax_mass_converges():
    """The sum converges for a logarithm with p > 1 and for every power. It does not converge for T5."""
    kerple_log = make_method("kerple")
    kerple_power = make_method("kerple", form="power")
    with torch.no_grad():
        for method in (kerple_log, kerple_power):
            method.a.fill_(1)
            method.p.copy_(torch.tensor([0.5, 0.9, 1.2, 2.0]))
    length = 10**6
    log_converges = estimate_decay_power(kerple_log.score_bias(length).table) > 1
    assert log_converges.tolist() == [False, False, True, True]
    power_converges = estimate_decay_power(kerple_power.score_bias(length).table) > 1
    assert power_converges.all()
    log_alibi_converges = estimate_decay_power(make_method("log-alibi").score_bias(length).table) > 1
    assert not log_alibi_converges.any()
    # T5's bias is constant beyond the end of its table.
    constant_table = make_method("t5").score_bias(length).table[:, -1:].expand(-1, 100)
    assert (estimate_decay_power(constant_table) == 0).all()


def test_log_bias_window_is_sufficient_and_tight():
    p = 3.0
    a = 0.5
    excess = 5.0
    tolerance = 1e-6
    window = math.ceil(log_bias_window(p, a, excess, tolerance))

    # The mass beyond the window: a sum up to two million keys, and an integral for all further keys.
    summed_keys = 2_000_000
    distances = torch.arange(window, summed_keys, dtype=torch.float64)
    mass_of_sum = float((1 + a * distances).pow(-p).sum())
    mass_of_integral = (1 + a * summed_keys) ** (1 - p) / (a * (p - 1))
    mass = math.exp(excess) * (mass_of_sum + mass_of_integral)
    assert mass <= tolerance
    assert mass > 0.99 * tolerance


def test_log_bias_window_is_infinite_for_small_factors():
    assert log_bias_window(1.0, 0.5, 5.0, 1e-6) == math.inf


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0, 4.0])
def test_table_of_windows_in_docs(p):
    page = (Path(__file__).parents[3] / "docs" / "positions.md").read_text(encoding="utf-8")
    small_tolerance_window = log_bias_window(p, 0.5, 5.0, 1e-6)
    large_tolerance_window = log_bias_window(p, 0.5, 5.0, 1e-2)
    assert f"| {p:g} | {small_tolerance_window:.1e} | {large_tolerance_window:.1e} |" in page


# ---- all methods


@pytest.mark.parametrize("name", ["kerple", "log-alibi", "bam", "sandwich"])
def test_parameters_stay_in_float32(name):
    method = make_method(name).to(torch.bfloat16)
    assert bias_table(method, 9).shape == (HEADS, 9)
    for tensor_name in method.float32:
        assert getattr(method, tensor_name).dtype == torch.float32


@pytest.mark.parametrize(("name", "settings"), [("kerple", {"form": "square"}), ("sandwich", {"width": 7})])
def test_invalid_setting_is_named(name, settings):
    (setting,) = settings
    with pytest.raises(InputError, match=setting):
        make_method(name, **settings)


def test_pictures_show_every_method_that_works_inside_the_layers():
    drawn_methods = set()
    for panels in plot_biases.PICTURES.values():
        drawn_methods.update(settings["position"] for settings in panels.values())
    expected_methods = {name for name, method in positions.items() if method.embed is PositionMethod.embed}
    assert drawn_methods == expected_methods - {"none"}
    for picture in plot_biases.PICTURES:
        assert (plot_biases.FOLDER / f"{picture}.png").exists()


def test_pictures_show_the_biases():
    alibi_lines = plot_biases.figure("alibi", {"position": "alibi"}).series
    last_values = [line.y[-1] for line in alibi_lines]
    assert last_values == pytest.approx([-1023 * 0.5**head for head in plot_biases.SHOWN])
    # The line for rotary shows the product of a vector with its rotated copy. It is 1 at distance 0.
    (rotary_line,) = plot_biases.figure("rotary", {"position": "rotary"}).series
    assert rotary_line.y[0] == pytest.approx(1)
