"""Tests of figures: each method has its own color, and ticks are readable."""

import math

import pytest

from trainshort.utils.figures import COLORS, MIN_COLOR_DISTANCE, method_color, round_ticks, thin_ticks, to_lab


def test_each_method_has_its_own_color():
    names = [*COLORS, "kerple", "mine", "forget-gate", "fire", "cope", "xpos"]
    colors = {name: method_color(name) for name in names}
    assert len(set(colors.values())) == len(names)
    assert all(len(color) == 7 and int(color[1:], 16) >= 0 for color in colors.values())
    assert method_color("kerple") == colors["kerple"] == "#84cb4b"


def test_computed_color_differs_from_the_colors_of_the_paper():
    """The first hash of the name "falls" gives #8a42c8, which is too close to the color of T5."""
    assert to_lab("#ffffff") == pytest.approx((100, 0, 0), abs=0.1)
    assert to_lab("#ff0000") == pytest.approx((53.2, 80.1, 67.2), abs=1)
    assert math.dist(to_lab("#8a42c8"), to_lab(COLORS["t5"])) < MIN_COLOR_DISTANCE
    colors = [method_color(name) for name in ("falls", *(f"method-{number}" for number in range(300)))]
    for color in colors:
        distances = [math.dist(to_lab(color), to_lab(fixed_color)) for fixed_color in COLORS.values()]
        assert min(distances) >= MIN_COLOR_DISTANCE
    assert len(set(colors)) > 290


@pytest.mark.parametrize(("low", "high"), [(3.9, 4.4), (258.0, 258.1), (17.2, 17.2), (1.01, 1.5), (18, 400), (67, 110)])
def test_ticks_are_near_the_values(low, high):
    ticks = round_ticks(low, high)
    assert 1 <= len(ticks) <= 12
    assert all(0.9 * low <= tick <= 1.1 * high and not math.isnan(tick) for tick in ticks)


def test_thin_ticks_keep_their_distance():
    labels = [label for _, label in thin_ticks([128, 160, 192, 256, 512, 1024, 2048])]
    assert labels == ["128", "192", "512", "1,024", "2,048"]
    assert thin_ticks([64]) == ((64, "64"),)
