"""What a file says of a cache, checked before it is believed: counts and sizes become addresses in compiled code, and
a checksum only says that a file is as somebody wrote it."""

from collections.abc import Mapping

from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from trainshort.config import Settings
from trainshort.errors import InputError


class Strict(Settings):
    """Plain numbers and words; nothing is converted, nothing unknown is taken."""

    model_config = ConfigDict(strict=True)


class Facts(Strict):
    """What any layer holds."""

    length: int = Field(ge=0, lt=2**53)
    """Tokens read."""


class RingFacts(Strict):
    """What `Ring` holds beside its keys and values."""

    capacity: int = Field(ge=1)
    count: int = Field(ge=0)
    next: int = Field(ge=0)
    far: float
    peak: float

    @model_validator(mode="after")
    def _inside(self) -> "RingFacts":
        # The next key goes after the last one, anywhere once the ring is full.
        places = range(self.capacity) if self.count == self.capacity else (self.count,)
        if self.count > self.capacity or self.next not in places:
            raise ValueError(f"a ring of {self.capacity} keys cannot hold {self.count} and go on at {self.next}")
        return self


class HeadFacts(Strict):
    """What `Head` holds."""

    slope: float
    excess: float
    mass: float
    above: int = Field(ge=0)


class BoundedFacts(Facts):
    grown: int = Field(default=0, ge=0, lt=2**53)
    dim: int = 0
    rings: tuple[RingFacts, ...] = Field(default=(), strict=False)
    heads: tuple[HeadFacts, ...] = Field(default=(), strict=False)
    weights: tuple[float, ...] = Field(default=(), strict=False)
    """Of a clock: the log of what each head's forgotten keys can weigh."""
    began: tuple[float, ...] = Field(default=(), strict=False)
    """Of a clock: what it showed at the beginning of the text."""


def saved_tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The tensor of that name, if it has the shape and dtype that the model gives it."""
    found = tensors.get(name)
    if found is None or tuple(found.shape) != shape or found.dtype != like.dtype:
        came = "nothing" if found is None else f"{found.dtype} {tuple(found.shape)}"
        raise InputError(f"'{name}' should be {like.dtype} {shape}, but it holds {came}.")
    return found


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def check(fits: bool, what: str) -> None:
    """Refuse numbers that do not fit each other."""
    if not fits:
        raise InputError(f"{what} does not fit the rest of it.")
