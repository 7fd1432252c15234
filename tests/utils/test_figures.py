"""Figures as data: colours that belong to methods, and ticks that can be read."""

import math

import pytest

from trainshort.utils.figures import COLORS, MIN_COLOR_DISTANCE, method_color, round_ticks, thin_ticks, to_lab


def test_a_method_has_one_colour_and_one_of_its_own():
    names = [*COLORS, "kerple", "mine", "forget-gate", "fire", "cope", "xpos"]
    shades = {name: method_color(name) for name in names}
    assert len(set(shades.values())) == len(names)
    assert all(len(shade) == 7 and int(shade[1:], 16) >= 0 for shade in shades.values())
    assert method_color("kerple") == shades["kerple"] == "#84cb4b"


def test_a_method_from_outside_does_not_look_like_one_of_the_papers():
    """By its first digest alone `falls` was #8a42c8, beside T5's #9a63d6."""
    assert to_lab("#ffffff") == pytest.approx((100, 0, 0), abs=0.1)
    assert to_lab("#ff0000") == pytest.approx((53.2, 80.1, 67.2), abs=1)
    assert math.dist(to_lab("#8a42c8"), to_lab(COLORS["t5"])) < MIN_COLOR_DISTANCE
    shades = [method_color(name) for name in ("falls", *(f"method-{number}" for number in range(300)))]
    assert (
        min(math.dist(to_lab(shade), to_lab(named)) for shade in shades for named in COLORS.values())
        >= MIN_COLOR_DISTANCE
    )
    assert len(set(shades)) > 290


@pytest.mark.parametrize(("low", "high"), [(3.9, 4.4), (258.0, 258.1), (17.2, 17.2), (1.01, 1.5), (18, 400), (67, 110)])
def test_ticks_are_round_and_near_the_values(low, high):
    ticks = round_ticks(low, high)
    assert 1 <= len(ticks) <= 12
    assert all(0.9 * low <= tick <= 1.1 * high and not math.isnan(tick) for tick in ticks)


def test_ticks_of_lengths_keep_their_distance():
    assert [text for _, text in thin_ticks([128, 160, 192, 256, 512, 1024, 2048])] == [
        "128",
        "192",
        "512",
        "1,024",
        "2,048",
    ]
    assert thin_ticks([64]) == ((64, "64"),)
