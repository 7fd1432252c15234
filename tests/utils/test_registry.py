"""Names: registered once, found with help."""

import math

import pytest

import trainshort
from trainshort.config import registries
from trainshort.errors import InputError
from trainshort.utils.registry import Registry


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


def test_a_builtin_entry_is_imported_on_first_use():
    places: Registry[object] = Registry("place", builtin={"pi": ("math:pi", "3.14"), "gone": ("no_such:thing", "gone")})
    places.register("mine")(test_a_long_list_is_cut)
    assert places.names() == ["pi", "gone", "mine"]
    assert places.describe("gone") == "gone"
    assert places.get("pi") == math.pi
    with pytest.raises(ModuleNotFoundError):
        places.get("gone")
    with pytest.raises(InputError, match="place 'gone' is already registered"):
        places.register("gone")(1)


@pytest.mark.parametrize("name", [name for name in vars(registries) if isinstance(vars(registries)[name], Registry)])
def test_every_builtin_entry_exists(name):
    for _, entry in vars(registries)[name].items():
        assert entry is not None


@pytest.mark.parametrize("name", [name for name in trainshort.__all__ if name.startswith("register_")])
def test_public_decorators_add_to_their_registry(name):
    registry = getattr(trainshort, name).__self__
    assert isinstance(registry, Registry)
