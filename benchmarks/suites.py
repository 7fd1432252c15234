"""The settings of the benchmarks: one plan for each suite, at full size and at a small size.

Each field of a plan is an option of `trainshort bench`. The docstring below a field is the help text of the option. If
several plans have the same field, only one of them needs the docstring. This module does not import torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainshort.errors import InputError
from trainshort.utils.plugins import load_plugins
from trainshort.utils.registry import did_you_mean
from trainshort.utils.terminal import join_words

# The implementations of attention that are measured by default. "clock" is the backend "windowed" with the same slopes
# as a decay bias.
ATTENTION_IMPLEMENTATIONS = ("plain", "windowed", "clock", "windowed-torch", "written-mask", "mpt", "x-transformers")

# The parts of the decode benchmark that are measured by default.
DECODE_PARTS = ("context", "weights", "mpt", "endless")

# The part of the decode benchmark that measures a trained model on its own text. It requires `--run`.
TRAINED_PART = "trained"

# The smallest values of options whose smallest value is not 1. The smallest vocabulary consists of all bytes and one
# token for the end of a document.
MINIMUMS = {"layer": 0, "contexts": 2, "vocabularies": 257}

# The allowed values of options with a fixed set of values. `--backends` also accepts all other attention backends.
CHOICES = {
    "backends": ATTENTION_IMPLEMENTATIONS,
    "parts": (*DECODE_PARTS, TRAINED_PART),
    "memory": ("all", "longest", "none"),
    "sides": ("left", "both"),
    "measure": ("all", "work"),
}


@dataclass(frozen=True)
class AttentionPlan:
    """Time, memory, error and skipped work of attention backends and of other libraries, by length."""

    lengths: tuple[int, ...] = (1024, 4096, 8192, 16_384, 32_768)
    """Number of tokens that are processed at once."""
    backends: tuple[str, ...] = ()
    """Implementations that are compared with plain attention: windowed, clock (windowed with a decay bias that has the
    same slopes), windowed-torch, written-mask, mpt, x-transformers, or any backend of `trainshort list backends`.
    Default: all that are installed; above 8,192 tokens only windowed and clock."""
    inputs: str = "normal"
    """normal, scaled (larger queries in later heads), a .safetensors file with q, k and v, or a run folder whose model
    is recorded."""
    layer: int | None = None
    """The layer of the run folder that is recorded, counted from 0. Default: the middle layer."""
    sides: str = "left"
    """left (causal), or both (bidirectional attention against plain attention without a mask)."""
    tolerance: float = 1e-6
    """Softmax mass that may be skipped per query."""
    rounds: int | None = None
    """How often each function is timed. Default of attention: 9 up to 4,096 tokens, 5 at 8,192, 3 above."""
    memory: str = "all"
    """Lengths at which the peak memory is measured: all, longest or none. Each value needs its own process, which
    takes some seconds."""
    measure: str = "all"
    """all, or work (only count which share of the causal work is computed; nothing is timed)."""


@dataclass(frozen=True)
class TrainingPlan:
    """Speed and memory of training steps by position method and length, and of Hugging Face's MPT of the same shape."""

    lengths: tuple[int, ...] = (512, 2048, 4096)
    methods: tuple[str, ...] = ("alibi", "none", "sinusoidal", "rotary", "t5")
    """Position methods. The training suite also accepts alibi-learned (trained slopes), alibi-ssmax (scores that grow
    with the length) and fox-alibi (forget gates that start at ALiBi's slopes)."""
    preset: str = "small"
    """The model size, one of `trainshort list presets`."""
    rounds: int = 5
    memory: str = "all"
    batch_tokens: int = 2048
    """Minimum number of tokens in a training step."""


@dataclass(frozen=True)
class EvaluatePlan:
    """Speed of evaluation at long inputs compared with short inputs, by position method."""

    lengths: tuple[int, ...] = (1024, 4096, 16_384)
    methods: tuple[str, ...] = ("alibi", "sinusoidal")
    preset: str = "small"
    run: str | None = None
    """A run whose trained model is measured. How many keys can be skipped depends on the weights."""
    rounds: int = 5
    memory: str = "all"


@dataclass(frozen=True)
class DecodePlan:
    """Time per generated token by context and cache, compared with reading the weights and with MPT."""

    contexts: tuple[int, ...] = (1024, 65_536)
    """Number of tokens in the caches."""
    parts: tuple[str, ...] = DECODE_PARTS
    """Parts of the benchmark: context, weights, mpt, endless, trained (requires --run)."""
    tokens: int = 100_000
    """Number of tokens that the part endless generates."""
    prompts: tuple[int, ...] = (512, 8192)
    """Lengths of the prompts that are compared with MPT."""
    preset: str = "small"
    run: str | None = None
    tolerance: float = 1e-6
    rounds: int = 20


@dataclass(frozen=True)
class PatchPlan:
    """Speed, memory and generated text of Hugging Face's MPT before and after `trainshort.patch`, by length."""

    lengths: tuple[int, ...] = (1024, 4096)
    preset: str = "small"
    rounds: int = 5
    memory: str = "all"


@dataclass(frozen=True)
class PreparePlan:
    """Speed of tokenizers."""

    vocabularies: tuple[int, ...] = (2048, 32_768)
    """Vocabulary sizes of the tokenizers that are trained."""
    megabytes: int | None = None
    """Amount of text. Default: the complete built-in corpus."""
    rounds: int = 3


Plan = AttentionPlan | TrainingPlan | EvaluatePlan | DecodePlan | PatchPlan | PreparePlan

FULL_PLANS: dict[str, Plan] = {
    "attention": AttentionPlan(),
    "training": TrainingPlan(),
    "evaluate": EvaluatePlan(),
    "decode": DecodePlan(),
    "patch": PatchPlan(),
    "prepare": PreparePlan(),
}
"""The settings of all suites at full size."""

QUICK_PLANS: dict[str, Plan] = {
    "attention": AttentionPlan(lengths=(256, 1024), rounds=3, memory="longest"),
    "training": TrainingPlan(
        lengths=(128, 512), methods=("alibi", "none"), preset="laptop", rounds=3, memory="longest"
    ),
    "evaluate": EvaluatePlan(lengths=(512, 4096), preset="laptop", rounds=3, memory="longest"),
    "decode": DecodePlan(contexts=(256, 4096), tokens=5000, prompts=(64, 512), preset="laptop", rounds=5),
    "patch": PatchPlan(lengths=(128, 512), preset="laptop", rounds=3, memory="longest"),
    "prepare": PreparePlan(vocabularies=(2048,), megabytes=1, rounds=2),
}
"""Small sizes and few rounds, to check that all benchmarks run. The numbers should not be published."""


def choose_plans(suites: tuple[str, ...], quick: bool, options: Mapping[str, Any]) -> dict[str, Plan]:
    """Return the plans of the chosen suites, changed by the options of the command line.

    Args:
        suites: The names of the suites. An empty tuple chooses all suites.
        quick: Whether the small plans are used.
        options: Values by the name of the option. None and empty tuples are ignored. An option changes all chosen
            plans that have a field with this name.

    Raises:
        InputError: If a suite is unknown, a value is invalid, or no chosen suite has one of the options.

    Example:
        >>> choose_plans(("decode",), False, {"rounds": 3, "lengths": None})
        {'decode': DecodePlan(rounds=3)}
    """
    for suite in suites:
        if suite not in FULL_PLANS:
            known_suites = ", ".join(FULL_PLANS)
            raise InputError(f"Unknown suite '{suite}'.{did_you_mean(suite, FULL_PLANS)} Known: {known_suites}.")
    all_plans = QUICK_PLANS if quick else FULL_PLANS
    plans = {suite: plan for suite, plan in all_plans.items() if suite in suites or not suites}

    for option, value in options.items():
        if value is None or value == ():
            continue
        for suite in _suites_with_option(option, plans):
            plans[suite] = replace(plans[suite], **{option: value})
    for plan in plans.values():
        _check_plan(plan)
    return plans


def _suites_with_option(option: str, plans: Mapping[str, Plan]) -> list[str]:
    """Return the chosen suites that have an option.

    Raises:
        InputError: If none of the chosen suites has the option.
    """
    suites = [suite for suite, plan in plans.items() if hasattr(plan, option)]
    if suites:
        return suites
    supporting_suites = [suite for suite, plan in FULL_PLANS.items() if hasattr(plan, option)]
    raise InputError(
        f"--{option} is an option of {join_words(supporting_suites)}, but only {join_words(list(plans))} was chosen. "
        f"Remove the option, or add the suite {supporting_suites[0]}."
    )


def is_memory_measured(plan: AttentionPlan | TrainingPlan | EvaluatePlan | PatchPlan, length: int) -> bool:
    """Return whether the peak memory is measured at a length, according to the option `--memory`."""
    if plan.memory == "longest":
        return length == max(plan.lengths)
    return plan.memory == "all"


def _check_plan(plan: Plan) -> None:
    """Raise `InputError` if a plan has invalid settings. This check runs before the first measurement."""
    _check_numbers(plan)
    for option, choices in CHOICES.items():
        value = getattr(plan, option, ())
        values = (value,) if isinstance(value, str) else value
        for choice in values:
            _check_choice(option, choice, choices)

    if isinstance(plan, AttentionPlan):
        _check_work_settings(plan)
    if not isinstance(plan, AttentionPlan | PreparePlan):
        from trainshort.config.presets import presets

        presets.get(plan.preset)  # Raises an InputError for an unknown preset.
    if isinstance(plan, EvaluatePlan):
        longest = max(plan.lengths)
        if any(longest % length for length in plan.lengths):
            raise InputError(
                "Invalid --lengths: in the suite evaluate, all lengths must divide the longest length, so that the "
                "same tokens are scored at every length."
            )
    if isinstance(plan, DecodePlan) and TRAINED_PART in plan.parts and plan.run is None:
        raise InputError("--parts trained requires a trained model. Add --run RUN.")


def _check_work_settings(plan: AttentionPlan) -> None:
    """Raise `InputError` if `--measure work` is combined with settings for which no work is skipped."""
    skips_work = plan.sides == "left" and plan.tolerance > 0
    if plan.measure == "work" and not skips_work:
        raise InputError("--measure work requires causal attention (--sides left) and a --tolerance above 0.")


def _check_numbers(plan: Plan) -> None:
    """Raise `InputError` if a number of a plan is too small or, for the tolerance, too large."""
    for option, value in asdict(plan).items():
        minimum = MINIMUMS.get(option, 1)
        values = value if isinstance(value, tuple) else (value,)
        for number in values:
            if isinstance(number, int) and number < minimum:
                raise InputError(f"--{option} must be at least {minimum}, got {number}.")
    tolerance = getattr(plan, "tolerance", 0)
    if not 0 <= tolerance < 1:
        raise InputError(f"--tolerance must be at least 0 and less than 1, got {tolerance}.")


def _check_choice(option: str, choice: str, choices: tuple[str, ...]) -> None:
    """Raise `InputError` if a value of an option is not one of the allowed values.

    Args:
        option: The name of the option, such as "memory".
        choice: The value that the user typed.
        choices: The allowed values. For the option "backends", the names of all other backends are allowed as well.
    """
    if choice in choices:
        return
    if option == "backends":
        choices += _other_backends()
    if choice not in choices:
        suggestion = did_you_mean(choice, choices)
        raise InputError(f"Unknown value '{choice}' of --{option}.{suggestion} Known: {', '.join(choices)}.")


def _other_backends() -> tuple[str, ...]:
    """Return the attention backends that are not measured by default, including those of plug-ins."""
    # The registry is imported here, because it is only needed for names that are not in ATTENTION_IMPLEMENTATIONS.
    from trainshort.config.registries import backends

    load_plugins()
    return tuple(name for name in backends.names() if name not in ATTENTION_IMPLEMENTATIONS)
