"""Change how a trained model uses positions, without changing its weights.

An override tests whether a trained model can use a longer context. The options of the command line are:

    --slopes interpolate    multiply the ALiBi slopes by L / length for inputs longer than the training length L
    --slopes ntk=4          divide the flattest slope by 4, keep the steepest slope, and interpolate in between
    --slopes clamp=512      treat every distance above 512 as 512 (LM-Infinite)
    --slopes max_bias=16    use the slopes of another maximum bias, so that the flattest slope is 2^-16
    --slopes window=512     keep the trained slopes and add a sliding window of 512 tokens
    --rotary linear=4       scale the rotary frequencies; other methods are ntk=4, dynamic=1 and yarn=4
    --rotary blocks=256     let each token attend to its own block of 256 tokens and to the block before
    --attention-scale 1.2   multiply all attention scores by 1.2 before the softmax
"""

import math
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

# The methods of each option, and the smallest number that each method accepts. None means that the method takes no
# number. The number of `max_bias` must be larger than its minimum.
OVERRIDE_MINIMUMS: dict[str, dict[str, float | None]] = {
    "slopes": {"interpolate": None, "ntk": 1.0, "clamp": 1.0, "max_bias": 0.0, "window": 1.0},
    "rotary": {"linear": 1.0, "ntk": 1.0, "dynamic": 1.0, "yarn": 1.0, "blocks": 1.0},
}

# The numbers of these methods count tokens, so they must be integers.
METHODS_WITH_TOKEN_COUNT = ("clamp", "window", "blocks")

# The valid values of each option, for error messages.
EXPECTED_VALUES = {
    "slopes": "interpolate, ntk=4, clamp=512, max_bias=16 or window=512",
    "rotary": "linear=4, ntk=4, dynamic=1, yarn=4 or blocks=256, with a number of at least 1",
}


@dataclass(frozen=True)
class Override:
    """A change of a trained model that is made for an evaluation.

    Attributes:
        option: The command-line option without its dashes: "slopes", "rotary" or "attention-scale".
        method: The method of the option, such as "yarn". The option "attention-scale" has no methods.
        value: The number of the method, or the factor of the option "attention-scale".
    """

    option: str
    method: str = ""
    value: float = 0.0

    @staticmethod
    def parse(option: str, text: str) -> "Override":
        """Parse a command-line option that changes a trained model.

        Args:
            option: The name of the option without its dashes: "slopes", "rotary" or "attention-scale".
            text: The value of the option, as the user typed it.

        Returns:
            The parsed override.

        Raises:
            InputError: If `text` is not a valid value of the option.

        Example:
            >>> Override.parse("slopes", "max_bias=16")
            Override(option='slopes', method='max_bias', value=16.0)
        """
        if option == "attention-scale":
            factor = _parse_number(text)
            if factor is None or factor <= 0:
                raise InputError(f"Invalid --attention-scale: expected a number above 0 such as 1.2, got '{text}'.")
            return Override("attention-scale", value=factor)

        method, equals_sign, number_text = text.partition("=")
        number = _parse_number(number_text)
        if not _is_valid_value(option, method, has_equals_sign=bool(equals_sign), number=number):
            raise InputError(f"Invalid --{option}: expected {EXPECTED_VALUES[option]}, got '{text}'.")
        if number is None:
            number = 0.0  # The method `interpolate` takes no number.
        return Override(option, method, number)

    @staticmethod
    def from_options(slopes: str | None, rotary: str | None, attention_scale: str | None) -> "Override | None":
        """Create an override from the options of a command.

        Args:
            slopes: The value of `--slopes`, or None if the option was not given.
            rotary: The value of `--rotary`, or None.
            attention_scale: The value of `--attention-scale`, or None.

        Returns:
            The override, or None if no option was given.

        Raises:
            InputError: If several options were given, or if a value is invalid.
        """
        all_options = {"slopes": slopes, "rotary": rotary, "attention-scale": attention_scale}
        given_options = {name: text for name, text in all_options.items() if text is not None}
        if not given_options:
            return None
        if len(given_options) > 1:
            names = " and ".join(f"--{name}" for name in given_options)
            raise InputError(f"{names} cannot be combined. Give one of them.")
        [(name, text)] = given_options.items()  # exactly one option
        return Override.parse(name, text)

    def __str__(self) -> str:
        """Return the name of this override in result files, such as "ntk=4", "rotary-yarn=4" or "scores=1.2"."""
        if self.option == "attention-scale":
            return f"scores={self.value:g}"
        if self.method == "interpolate":
            name = "interpolate"  # This method has no number.
        else:
            name = f"{self.method}={self.value:g}"
        if self.option == "slopes":
            return name
        return f"{self.option}-{name}"


def _parse_number(text: str) -> float | None:
    """Return the number that a text contains, or None if the text is not a number, is infinite, or is NaN."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _is_valid_value(option: str, method: str, *, has_equals_sign: bool, number: float | None) -> bool:
    """Return whether a command-line value such as "yarn=4" is valid.

    Args:
        option: The command-line option that the value belongs to, such as "rotary" for `--rotary yarn=4`.
        method: The part of the value before the equals sign, such as "yarn".
        has_equals_sign: Whether the value has an equals sign.
        number: The number after the equals sign, or None if it is missing or not a number.
    """
    minimums = OVERRIDE_MINIMUMS[option]
    if method not in minimums:
        return False
    minimum = minimums[method]
    if minimum is None:  # The method takes no number.
        return not has_equals_sign
    if number is None:
        return False
    if method in METHODS_WITH_TOKEN_COUNT and not number.is_integer():
        return False
    if method == "max_bias":
        return number > minimum  # Only for this method, the minimum itself is not allowed.
    return number >= minimum


def compute_override_slopes(
    trained_slopes: Float[Tensor, " heads"], override: Override, trained_at: int, length: int
) -> Float[Tensor, " heads"]:
    """Return the ALiBi slopes that an override uses for inputs of a given length.

    Args:
        trained_slopes: The slopes of the model.
        override: An override with the option "slopes".
        trained_at: The training length of the model.
        length: The length of the inputs.

    Returns:
        The slopes. The methods "clamp" and "window" do not change the slopes.

    Example:
        The slopes 1/4 and 1/16 of a model that was trained at length 128 become:

        - interpolate: 1/16 and 1/64 at length 512. They do not change at lengths up to 128.
        - ntk=4: 1/4 and 1/64 at every length.
    """
    match override.method:
        case "interpolate":
            return trained_slopes * min(1.0, trained_at / length)
        case "ntk":
            # The rank of the steepest slope is 0, and the rank of the flattest slope is heads - 1.
            # `argsort` twice gives the rank of each slope.
            ranks = trained_slopes.argsort(descending=True).argsort().to(trained_slopes.dtype)
            max_rank = max(1, len(trained_slopes) - 1)
            return trained_slopes * override.value ** (-ranks / max_rank)
        case "max_bias":
            return alibi.slopes(len(trained_slopes), override.value).to(trained_slopes.device)
        case _:
            return trained_slopes


@contextmanager
def apply_override(model: TransformerLM, override: Override, trained_at: int, length: int) -> Iterator[None]:
    """Context manager: run a model with an override. The model is restored when the block ends.

    An override is a change of a trained model, such as other ALiBi slopes, without further training.

    Args:
        model: The model.
        override: The override to apply.
        trained_at: The training length of the model.
        length: The length of the inputs that the model will read.

    Raises:
        InputError: If the position method of the model does not support the override.
    """
    with ExitStack() as stack:
        if override.option == "slopes":
            _override_slopes(stack, model, override, trained_at, length)
        if override.option == "rotary":
            _override_rotary(stack, model, override, trained_at, length)

        attention_layers = [module for module in model.modules() if isinstance(module, Attention)]
        for layer in attention_layers:
            if override.option == "attention-scale":
                set_attribute_temporarily(stack, layer, "score_factor", layer.score_factor * override.value)
            if override.method in ("window", "blocks"):
                # The attributes `Attention.window` and `Attention.blocks` have the same names as the methods.
                set_attribute_temporarily(stack, layer, override.method, int(override.value))
        yield


def _override_slopes(stack: ExitStack, model: TransformerLM, override: Override, trained_at: int, length: int) -> None:
    """Replace the ALiBi slopes of a model until `stack` is closed. The other arguments are those of `apply_override`.

    `InputError` is raised if the model has no ALiBi slopes, or if it has separate slopes for tokens after the query.
    """
    trained_slopes = model.position.linear_slopes()
    position_name = model.config.position
    if trained_slopes is None:
        raise InputError(f"--slopes requires a model with ALiBi positions, got position='{position_name}'.")
    bias = model.position.score_bias(1)  # The kind of the bias is the same for every number of keys.
    if bias is not None and bias.right is not None:  # `right` holds the slopes for tokens after the query.
        raise InputError(
            f"--slopes does not support position='{position_name}', which has separate slopes for later tokens."
        )
    slopes = compute_override_slopes(trained_slopes.detach().clone(), override, trained_at, length)
    max_distance = int(override.value) if override.method == "clamp" else None
    # The method that creates the bias is replaced, because not every position method stores its slopes as a tensor.
    score_bias = partial(alibi_bias, slopes, max_distance)
    set_attribute_temporarily(stack, model.position, "score_bias", score_bias)


def _override_rotary(stack: ExitStack, model: TransformerLM, override: Override, trained_at: int, length: int) -> None:
    """Scale the rotary frequencies of a model until `stack` is closed.

    The other arguments are those of `apply_override`.
    """
    if not isinstance(model.position, Rotary):
        raise InputError(
            f"--rotary requires a model with rotary or xpos positions, got position='{model.config.position}'."
        )
    if override.method == "blocks":
        return  # This method changes the attention mask and not the frequencies.
    scaling_method: Any = override.method  # `Override.parse` accepts only the methods of RotaryScaling.
    scaling = RotaryScaling(scaling_method, override.value, trained_at, length)
    set_attribute_temporarily(stack, model.position, "scaling", scaling)


def set_attribute_temporarily(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of an object, and restore the old state when `stack` is closed.

    Args:
        stack: The stack that restores the attribute.
        owner: The object.
        name: The name of the attribute.
        value: The new value.
    """
    is_inherited_from_class = name not in vars(owner) and hasattr(type(owner), name)
    if is_inherited_from_class:
        # Without the attribute on the instance, the attribute of the class is visible again.
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
