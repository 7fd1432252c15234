"""Names: registered once, found with help."""

import pytest

from trainshort.errors import InputError
from trainshort.registry import Registry


def test_a_registry_keeps_order_and_helps():
    colours: Registry[int] = Registry("colour")
    colours.register("red")(1)
    colours.register("green")(2)
    assert colours.names() == ["red", "green"]
    assert colours.get("green") == 2
    assert "red" in colours
    with pytest.raises(InputError, match=r"Unknown colour 'gren'\. Did you mean 'green'\? Known: red, green\."):
        colours.get("gren")
    with pytest.raises(InputError, match=r"Unknown colour 'xyz'\. Known: red, green\."):
        colours.get("xyz")


def test_a_name_is_taken_once():
    colours: Registry[int] = Registry("colour")
    colours.register("red")(1)
    with pytest.raises(InputError, match="colour 'red' is already registered"):
        colours.register("red")(2)
    assert colours.get("red") == 1


def test_a_long_list_is_cut():
    numbers: Registry[int] = Registry("number")
    for i in range(30):
        numbers.register(f"n{i}")(i)
    with pytest.raises(InputError, match=r"Known: n0, n1, .*, n11 and 18 more\.$"):
        numbers.get("zzz")
