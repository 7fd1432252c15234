"""Models run otherwise than they were trained, with the same weights: does any of it let them use more context?

    --slopes interpolate    ALiBi's slopes · L / length once length > L: the farthest bias is one that training has seen
    --slopes ntk=4          the steepest slope stays, the flattest is divided by 4, those between by less
    --slopes clamp=512      what is farther than 512 counts as 512 (LM-Infinite)
    --slopes max_bias=16    the slopes of another maximum bias: the flattest head becomes 2^-16 and looks farther
    --slopes window=512     the trained slopes under a sliding-window mask: ALiBi as a plain window
    --rotary linear=4       positions interpolated; ntk=4 another base; dynamic=1 one that grows with the input; yarn=4
    --rotary blocks=256     a token sees its block of 256 and the one before (xPos: half the training length)
    --scores 1.2            every product of a query and a key is multiplied by this; any model

The model is as before when the context ends.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor

from trainshort import alibi
from trainshort.errors import InputError
from trainshort.model.positions.alibi import alibi_bias
from trainshort.model.positions.rotary import Rotary, RotaryScaling
from trainshort.model.transformer import Attention, TransformerLM

OVERRIDE_MINIMUMS = {
    "slopes": {"interpolate": None, "ntk": 1.0, "clamp": 1.0, "max_bias": 0.0, "window": 1.0},
    "rotary": {"linear": 1.0, "ntk": 1.0, "dynamic": 1.0, "yarn": 1.0, "blocks": 1.0},
}
"""What each option knows, and the least number that goes with it (max_bias: above it); None: no number."""
WHOLE = ("clamp", "window", "blocks")
EXAMPLES = {
    "slopes": "slopes are interpolate, ntk=4, clamp=512, max_bias=16 or window=512",
    "rotary": "rotary is linear=4, ntk=4, dynamic=1, yarn=4 or blocks=256, with a number of at least 1",
}


@dataclass(frozen=True)
class Override:
    """One change of a trained model, as an option names it."""

    option: str
    kind: str = ""
    value: float = 0.0

    @staticmethod
    def read(option: str, text: str) -> "Override":
        """From the command line: `interpolate`, `max_bias=16`, `yarn=4`; of `scores`, a number."""
        if option == "scores":
            number = _number(text)
            if number is None or not number > 0:
                raise InputError(f"--scores is a factor above 0, such as 1.2; got '{text}'.")
            return Override("scores", value=number)
        kind, equals, value = text.partition("=")
        number = _number(value)
        if kind in OVERRIDE_MINIMUMS[option] and _is_valid_value(
            kind, OVERRIDE_MINIMUMS[option][kind], bool(equals), number
        ):
            return Override(option, kind, number or 0.0)
        raise InputError(f"{EXAMPLES[option]}; got '{text}'.")

    @staticmethod
    def from_options(slopes: str | None, rotary: str | None, scores: str | None) -> "Override | None":
        """Of the options of a command; one at a time."""
        given = {"slopes": slopes, "rotary": rotary, "scores": scores}
        named = {name: text for name, text in given.items() if text is not None}
        if len(named) > 1:
            raise InputError(f"give one of {' and '.join('--' + name for name in named)}, so that its effect is seen.")
        return next((Override.read(name, text) for name, text in named.items()), None)

    def __str__(self) -> str:
        """Return the name of this change in stored results."""
        if self.option == "scores":
            return f"scores={self.value:g}"
        named = self.kind if self.kind == "interpolate" else f"{self.kind}={self.value:g}"
        return named if self.option == "slopes" else f"{self.option}-{named}"


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if number < float("inf") else None


def _is_valid_value(kind: str, least: float | None, given: bool, number: float | None) -> bool:
    if least is None:
        return not given
    if number is None or (kind in WHOLE and not number.is_integer()):
        return False
    return number > least if kind == "max_bias" else number >= least


def new_slopes(trained: Float[Tensor, " heads"], change: Override, trained_at: int, length: int) -> Tensor:
    """The slopes for inputs of this length.

    interpolate, trained at 128:   length 64 or 128 → as trained      length 512 → a quarter of them
    ntk=4, two heads:              1/16, 1/256 → 1/16, 1/1024
    """
    match change.kind:
        case "interpolate":
            return trained * min(1.0, trained_at / length)
        case "ntk":
            by_steepness = trained.argsort(descending=True).argsort().to(trained.dtype)
            return trained * change.value ** (-by_steepness / max(1, len(trained) - 1))
        case "max_bias":
            return alibi.slopes(len(trained), change.value).to(trained.device)
        case _:
            return trained


@contextmanager
def apply_override(model: TransformerLM, change: Override, trained_at: int, length: int) -> Iterator[None]:
    """Inside, `model` runs with a change, for inputs of this length."""
    with ExitStack() as held:
        if change.option == "slopes":
            _change_slopes(held, model, change, trained_at, length)
        if change.option == "rotary":
            _stretch(held, model, change, trained_at, length)
        for attention in (module for module in model.modules() if isinstance(module, Attention)):
            if change.option == "scores":
                set_attribute_temporarily(held, attention, "score_factor", attention.score_factor * change.value)
            if change.kind in ("window", "blocks"):
                set_attribute_temporarily(held, attention, change.kind, int(change.value))
        yield


def _change_slopes(held: ExitStack, model: TransformerLM, change: Override, trained_at: int, length: int) -> None:
    trained = model.position.linear_slopes()
    if trained is None:
        raise InputError(
            f"--slopes needs a model with ALiBi positions; this one has position='{model.config.position}'."
        )
    bias = model.position.score_bias(1)
    if bias is not None and bias.right is not None:
        raise InputError(f"--slopes changes one side; position='{model.config.position}' has slopes for either.")
    slopes = new_slopes(trained.detach().clone(), change, trained_at, length)
    farthest = int(change.value) if change.kind == "clamp" else None
    # In place of the method's own bias, which may keep its slopes as a tensor or compute them each time.
    set_attribute_temporarily(held, model.position, "score_bias", partial(alibi_bias, slopes, farthest))


def _stretch(held: ExitStack, model: TransformerLM, change: Override, trained_at: int, length: int) -> None:
    if not isinstance(model.position, Rotary):
        raise InputError(
            f"--rotary needs a model with rotary or xpos positions; this one has position='{model.config.position}'."
        )
    if change.kind != "blocks":
        how: Any = change.kind  # one of Stretch's, as `read` has it
        set_attribute_temporarily(held, model.position, "scaling", RotaryScaling(how, change.value, trained_at, length))


def set_attribute_temporarily(held: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute; it is what it was when `held` ends."""
    if name in vars(owner) or not hasattr(type(owner), name):
        held.callback(setattr, owner, name, getattr(owner, name))
    else:
        held.callback(delattr, owner, name)  # the class's own again
    setattr(owner, name, value)
