"""Tests of registries: a name is registered once, and an unknown name gets a suggestion."""

import math

import pytest

import trainshort
from trainshort.config import registries
from trainshort.errors import InputError
from trainshort.utils.registry import Registry


def test_registry_keeps_order_and_suggests_names():
    colors: Registry[int] = Registry("color")
    colors.register("red")(1)
    colors.register("green")(2)
    assert colors.names() == ["red", "green"]
    assert colors.get("green") == 2
    assert "red" in colors
    with pytest.raises(InputError, match=r"color 'gren'.*'green'.* red, green"):
        colors.get("gren")
    with pytest.raises(InputError, match=r"color 'xyz'.* red, green"):
        colors.get("xyz")


def test_name_is_registered_once():
    colors: Registry[int] = Registry("color")
    colors.register("red")(1)
    with pytest.raises(InputError, match="color 'red'"):
        colors.register("red")(2)
    assert colors.get("red") == 1


def test_error_names_at_most_twelve_entries():
    numbers: Registry[int] = Registry("number")
    for i in range(30):
        numbers.register(f"n{i}")(i)
    with pytest.raises(InputError, match=r" n0, n1, .*, n11 and 18 more"):
        numbers.get("zzz")


def test_builtin_entry_is_imported_on_first_use():
    places: Registry[object] = Registry("place", builtin={"pi": ("math:pi", "3.14"), "gone": ("no_such:thing", "gone")})
    places.register("mine")(test_error_names_at_most_twelve_entries)
    assert places.names() == ["pi", "gone", "mine"]
    assert places.describe("gone") == "gone"
    assert places.get("pi") == math.pi
    with pytest.raises(ModuleNotFoundError):
        places.get("gone")
    with pytest.raises(InputError, match="place 'gone'"):
        places.register("gone")(1)


@pytest.mark.parametrize("name", [name for name in vars(registries) if isinstance(vars(registries)[name], Registry)])
def test_every_builtin_entry_exists(name):
    for _, entry in vars(registries)[name].items():
        assert entry is not None


@pytest.mark.parametrize("name", [name for name in trainshort.__all__ if name.startswith("register_")])
def test_public_decorators_add_to_their_registry(name):
    registry = getattr(trainshort, name).__self__
    assert isinstance(registry, Registry)
