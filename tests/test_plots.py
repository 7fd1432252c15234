"""Figures as data: colours that belong to methods, and ticks that can be read."""

import math

import pytest

from trainshort.plots.figures import COLORS, color, round_ticks, spaced


def test_a_method_has_one_colour_and_one_of_its_own():
    names = [*COLORS, "kerple", "mine", "forget-gate", "fire", "cope", "xpos"]
    shades = {name: color(name) for name in names}
    assert len(set(shades.values())) == len(names)
    assert all(len(shade) == 7 and int(shade[1:], 16) >= 0 for shade in shades.values())
    assert color("kerple") == shades["kerple"] == "#84cb4b"


@pytest.mark.parametrize(("low", "high"), [(3.9, 4.4), (258.0, 258.1), (17.2, 17.2), (1.01, 1.5), (18, 400), (67, 110)])
def test_ticks_are_round_and_near_the_values(low, high):
    ticks = round_ticks(low, high)
    assert 1 <= len(ticks) <= 12
    assert all(0.9 * low <= tick <= 1.1 * high and not math.isnan(tick) for tick in ticks)


def test_ticks_of_lengths_keep_their_distance():
    assert [text for _, text in spaced([128, 160, 192, 256, 512, 1024, 2048])] == [
        "128",
        "192",
        "512",
        "1,024",
        "2,048",
    ]
    assert spaced([64]) == ((64, "64"),)
