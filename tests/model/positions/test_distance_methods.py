"""Functions of distance against their formulas in float64."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks import plot_biases
from trainshort import alibi
from trainshort.attention import DenseBias, DistanceBias
from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.model.positions import LayerInput, PositionMethod, build_position, positions
from trainshort.model.positions.kerple import log_bias_window

LENGTH = 5000


def make(name, heads=4, **settings):
    torch.manual_seed(0)
    return build_position(
        ModelConfig.parse({"width": 16, "heads": heads, "position": name, "position_settings": settings})
    )


def table(method, length=LENGTH):
    bias = method.score_bias(length)
    assert isinstance(bias, DistanceBias)
    assert bias.table.dtype == torch.float32
    return bias.table.detach().double()


def check(method, formula):
    """At every distance, as exact as float32 is."""
    distance = torch.arange(LENGTH, dtype=torch.float64)
    expected = torch.stack([formula(head, distance) for head in range(4)])
    torch.testing.assert_close(table(method), expected, rtol=1e-5, atol=1e-5)


def test_kerple():
    for form in ("log", "power"):
        method = make("kerple", form=form)
        with torch.no_grad():
            method.a.copy_(torch.tensor([0.5, 1.0, 0.001, 2.0]))
            method.p.copy_(torch.tensor([1.5, 0.3, 1.0, 3.0]))
        a, p = (0.5, 1.0, 0.01, 2.0), (1.5, 0.3, 1.0, 3.0)  # neither below 0.01; a power of 2 at most
        if form == "log":
            check(method, lambda h, d, a=a, p=p: -p[h] * torch.log(1 + a[h] * d))
        else:
            check(method, lambda h, d, a=a, p=p: -a[h] * d ** min(p[h], 2))
    many = make("kerple", heads=16)
    assert 0 <= many.a.min() < many.a.max() <= 1 < many.p.max() <= 2


@pytest.mark.parametrize("form", ["log", "power"])
def test_kerple_comes_back_from_its_bounds(form):
    """What begins below 0.01 (one head in a hundred) or was carried there is still trained, and goes no further."""
    method = make("kerple", form=form)
    with torch.no_grad():
        method.a.copy_(torch.tensor([0.004, 0.004, 0.5, 0.5]))
        method.p.copy_(torch.tensor([1.0, 1.0, -0.2, -0.2]))
    up = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])  # of the loss by the bias: a steeper head 0 makes it smaller
    (method.score_bias(50).table * up).sum().backward()
    assert method.a.grad[0] < 0 == method.a.grad[1]
    assert method.p.grad[2] < 0 == method.p.grad[3]
    if form == "power":
        method.zero_grad()
        with torch.no_grad():
            method.p.fill_(2.5)
        (method.score_bias(50).table * -up).sum().backward()
        assert method.p.grad[0] > 0 == method.p.grad[1]


def test_log_alibi():
    slopes = alibi.slopes(4).double()
    check(make("log-alibi"), lambda h, d: -slopes[h] * torch.log(1 + d))


def test_bam_is_alibi_at_first_and_its_formula_later():
    slopes, method = alibi.slopes(4).double(), make("bam")
    check(method, lambda h, d: -slopes[h] * (d + 1e-5))
    with torch.no_grad():
        method.power.copy_(torch.tensor([0.5, 1, 2, -0.5]))
        method.centre.fill_(3)
    powers = (0.5, 1, 2, -0.5)
    check(method, lambda h, d: -slopes[h] * ((d - 3).abs() + 1e-5) ** powers[h])


def test_sandwich_has_its_cosines():
    def formula(head, d):
        wave = sum(torch.cos(d / 10_000 ** (2 * k / 128)) for k in range(1, 65)) - 64
        return wave * 4 / (8 * (head + 1))

    check(make("sandwich"), formula)
    # The shape that field notes give for width 128, before the head's factor: logarithmic, and not monotone.
    shape = table(make("sandwich"), 8193)[0] * 2
    found = [float(shape[d]) for d in (2, 4, 64, 4096, 8192)]
    assert found == pytest.approx([-5.2, -13.8, -32.9, -67.3, -62.0], abs=0.06)


def test_fire_is_a_network_of_the_share_of_the_distance():
    method, past, new = make("fire", threshold=8), 5, 7
    where = torch.arange(past, past + new).expand(2, -1)
    bias = method.content_bias(LayerInput(0, torch.zeros(2, new, 16), past + new, where, {}))
    assert isinstance(bias, DenseBias)
    assert bias.values.shape == (4, new, past + new)
    for i in range(past, past + new):
        for j in range(i + 1):
            share = math.log(1 + 0.1 * (i - j)) / math.log(1 + 0.1 * max(i, 8))
            hidden = torch.relu(method.wide.weight[:, 0] * share + method.wide.bias)
            expected = method.narrow.weight @ hidden
            torch.testing.assert_close(bias.values[:, i - past, j], expected, rtol=0, atol=1e-5)


def converges(table):
    """The power p with which e^bias falls like d^−p at the table's end: Σ_d e^bias(d) converges where it is above 1.

    A logarithmic bias has one p everywhere; for a faster one it grows with the table, for a bounded one it goes to 0.
    """
    last = table.shape[1] - 1
    return (table[:, last // 2] - table[:, last]) / math.log(last / (last // 2))


def test_which_sums_converge():
    """What the page of methods says of windows: a log bias only with p > 1, a power always, Sandwich and T5 never."""
    log, power = make("kerple"), make("kerple", form="power")
    with torch.no_grad():
        for method in (log, power):
            method.a.fill_(1)
            method.p.copy_(torch.tensor([0.5, 0.9, 1.2, 2.0]))
    far = 10**6
    assert (converges(log.score_bias(far).table) > 1).tolist() == [False, False, True, True]
    assert (converges(power.score_bias(far).table) > 1).all()
    assert (converges(make("log-alibi").score_bias(far).table) > 1).tolist() == [False] * 4
    assert (converges(make("t5").score_bias(far).table[:, -1:].expand(-1, 100)) == 0).all()


@pytest.mark.parametrize("name", ["kerple", "log-alibi", "bam", "sandwich"])
def test_parameters_stay_float32(name):
    method = make(name).to(torch.bfloat16)
    assert table(method, 9).shape == (4, 9)
    assert {getattr(method, kept).dtype for kept in method.float32} == {torch.float32}


def test_wrong_settings_are_told():
    with pytest.raises(InputError, match="form"):
        make("kerple", form="square")
    with pytest.raises(InputError, match="width"):
        make("sandwich", width=7)


def test_the_window_of_a_logarithm_is_long_enough_and_not_much_longer():
    """Against the sum itself, to a million keys and the integral beyond; and as docs/positions.md has it."""
    p, a, excess, tolerance = 3.0, 0.5, 5.0, 1e-6
    window = math.ceil(log_bias_window(p, a, excess, tolerance))
    distance = torch.arange(window, 2_000_000, dtype=torch.float64)
    beyond = (1 + a * 2_000_000) ** (1 - p) / (a * (p - 1))
    mass = math.exp(excess) * (float((1 + a * distance).pow(-p).sum()) + beyond)
    assert 0.99 * tolerance < mass <= tolerance
    assert log_bias_window(1.0, a, excess, tolerance) == math.inf
    page = (Path(__file__).parents[3] / "docs" / "positions.md").read_text(encoding="utf-8")
    for power in (1.5, 2.0, 3.0, 4.0):
        numbers = " | ".join(f"{log_bias_window(power, a, excess, share):.1e}" for share in (1e-6, 1e-2))
        assert f"| {power:g} | {numbers} |" in page


def test_every_method_that_works_inside_the_layers_is_in_a_picture():
    """And is drawn as it is: ALiBi's lines are its slopes, a vector under rotation begins as itself."""
    drawn = {settings["position"] for panels in plot_biases.PICTURES.values() for settings in panels.values()}
    assert drawn == {name for name, method in positions.items() if method.embed is PositionMethod.embed} - {"none"}
    for name in plot_biases.PICTURES:
        assert (plot_biases.FOLDER / f"{name}.png").exists()
    lines = plot_biases.figure("alibi", {"position": "alibi"}).series
    assert [line.y[-1] for line in lines] == pytest.approx([-1023 * 0.5**head for head in plot_biases.SHOWN])
    (rotary,) = plot_biases.figure("rotary", {"position": "rotary"}).series
    assert rotary.y[0] == pytest.approx(1)
