"""What a run measures, as plain data: one plan per suite, in full size and in a quick one. No torch.

A suite's fields are its options on the command line, each with its one help text; `choose` refuses an option that no
chosen suite has.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainshort.errors import InputError
from trainshort.utils.plugins import load_plugins
from trainshort.utils.registry import did_you_mean
from trainshort.utils.terminal import join_words

CONTENDERS = ("plain", "windowed", "clock", "windowed-torch", "written-mask", "mpt", "x-transformers")
"""Who takes part in the attention benchmark unless others are named; every other engine can be."""
PARTS = ("context", "weights", "mpt", "endless")
TRAINED = "trained"
"""The part of decode that reads a run's own text with its trained weights: measured when there is a --run."""
WORDS = {
    "engines": CONTENDERS,
    "parts": (*PARTS, TRAINED),
    "memory": ("all", "longest", "none"),
    "sides": ("left", "both"),
    "measure": ("all", "work"),
}
"""What options that take words know."""


@dataclass(frozen=True)
class AttentionPlan:
    """Engines and other libraries by length: time, memory, work left of the causal one, share of the matrix-multiply
    rate, error."""

    lengths: tuple[int, ...] = (1024, 4096, 8192, 16_384, 32_768)
    """Tokens at a time."""
    engines: tuple[str, ...] = ()
    """windowed, clock (the same, slopes as a clock), windowed-torch, written-mask, mpt, x-transformers, beside plain;
    by name also any other engine (`trainshort list backends`), such as your own. Default: all that are installed,
    beyond 8,192 tokens only windowed and clock."""
    inputs: str = "normal"
    """normal, scaled (sharper heads), a .safetensors file of q, k, v, or a run folder to record from."""
    layer: int | None = None
    """The recorded layer of a run folder, counted from 0. Default: the middle one."""
    sides: str = "left"
    """left (causal), or both: an encoder's attention against plain attention without a mask."""
    tolerance: float = 1e-6
    """Softmax mass that may be left out."""
    rounds: int | None = None
    """Turns of each contestant. Default of attention: 9 up to 4,096 tokens, 5 at 8,192, 3 beyond."""
    memory: str = "all"
    """all, longest (only at the longest length) or none. Each number is a process of its own, which takes some
    seconds."""
    measure: str = "all"
    """all, or work: nothing is timed, only what is read of the causal work is counted, on however busy a machine."""


@dataclass(frozen=True)
class TrainingPlan:
    """Training steps of a whole model by position method and length, and of Hugging Face's MPT of the same shape."""

    lengths: tuple[int, ...] = (512, 2048, 4096)
    methods: tuple[str, ...] = ("alibi", "none", "sinusoidal", "rotary", "t5")
    """Position methods; in training also alibi-learned (trained slopes), alibi-ssmax (scores that
    grow) and fox-alibi (gates that begin at ALiBi's slopes)."""
    preset: str = "small"
    """The model's shape, as `trainshort list presets` names them."""
    rounds: int = 5
    memory: str = "all"
    batch_tokens: int = 2048
    """Tokens a step has at least."""


@dataclass(frozen=True)
class EvaluatePlan:
    """How much of its speed a model keeps at long inputs, by position method."""

    lengths: tuple[int, ...] = (1024, 4096, 16_384)
    methods: tuple[str, ...] = ("alibi", "sinusoidal")
    preset: str = "small"
    run: str | None = None
    """A run whose trained model is used; proven windows and rings depend on the weights."""
    rounds: int = 5
    memory: str = "all"


@dataclass(frozen=True)
class DecodePlan:
    """Time per token by context and cache, against reading the weights once, against MPT, without end."""

    contexts: tuple[int, ...] = (1024, 65_536)
    """Tokens that the caches hold."""
    parts: tuple[str, ...] = PARTS
    """What is measured: context, weights, mpt, endless, trained (with --run)."""
    tokens: int = 100_000
    """Length of the endless run."""
    prompts: tuple[int, ...] = (512, 8192)
    """Tokens of the prompts that are compared with MPT."""
    preset: str = "small"
    run: str | None = None
    tolerance: float = 1e-6
    rounds: int = 20


@dataclass(frozen=True)
class PatchPlan:
    """Hugging Face's MPT before and after trainshort.patch, by length: reading, training, memory, greedy text."""

    lengths: tuple[int, ...] = (1024, 4096)
    preset: str = "small"
    rounds: int = 5
    memory: str = "all"


@dataclass(frozen=True)
class PreparePlan:
    """Text into tokens, by tokenizer."""

    vocabularies: tuple[int, ...] = (2048, 32_768)
    """Sizes of the tokenizers that are built."""
    megabytes: int | None = None
    """Text that is used. Default: all of the embedded corpus."""
    rounds: int = 3


Plan = AttentionPlan | TrainingPlan | EvaluatePlan | DecodePlan | PatchPlan | PreparePlan

FULL: dict[str, Plan] = {
    "attention": AttentionPlan(),
    "training": TrainingPlan(),
    "evaluate": EvaluatePlan(),
    "decode": DecodePlan(),
    "patch": PatchPlan(),
    "prepare": PreparePlan(),
}
QUICK: dict[str, Plan] = {
    "attention": AttentionPlan(lengths=(256, 1024), rounds=3, memory="longest"),
    "training": TrainingPlan(
        lengths=(128, 512), methods=("alibi", "none"), preset="laptop", rounds=3, memory="longest"
    ),
    "evaluate": EvaluatePlan(lengths=(512, 4096), preset="laptop", rounds=3, memory="longest"),
    "decode": DecodePlan(contexts=(256, 4096), tokens=5000, prompts=(64, 512), preset="laptop", rounds=5),
    "patch": PatchPlan(lengths=(128, 512), preset="laptop", rounds=3, memory="longest"),
    "prepare": PreparePlan(vocabularies=(2048,), megabytes=1, rounds=2),
}
"""Small sizes and few rounds: whether everything runs, and a first look. Not numbers to quote."""


def choose(suites: tuple[str, ...], quick: bool, options: Mapping[str, Any]) -> dict[str, Plan]:
    """Plans of the named suites (none: all), changed by those options that were given.

    choose(("decode",), False, {"rounds": 3, "lengths": None})  →  {"decode": DecodePlan(rounds=3)}
    """
    for name in suites:
        if name not in FULL:
            raise InputError(f"Unknown suite '{name}'.{did_you_mean(name, FULL)} Known: {', '.join(FULL)}.")
    base = QUICK if quick else FULL
    plans = {name: base[name] for name in FULL if name in suites or not suites}
    for option, value in options.items():
        if value is None or value == ():
            continue
        taking = [name for name, plan in plans.items() if hasattr(plan, option)]
        if not taking:
            known = [name for name, plan in FULL.items() if hasattr(plan, option)]
            raise InputError(
                f"--{option} concerns {join_words(known)}, and only {join_words(list(plans))} was chosen. "
                f"Leave it out, or add {known[0]}."
            )
        for name in taking:
            plans[name] = replace(plans[name], **{option: value})
    for plan in plans.values():
        _check(plan)
    return plans


def wants_memory(plan: AttentionPlan | TrainingPlan | EvaluatePlan | PatchPlan, length: int) -> bool:
    """Whether the memory of this length is measured."""
    return plan.memory == "all" or (plan.memory == "longest" and length == max(plan.lengths))


def _other_engines() -> tuple[str, ...]:
    """Asked only where a word is no contestant's: it brings torch."""
    from trainshort.config.registries import backends

    load_plugins()
    return tuple(name for name in backends.names() if name not in CONTENDERS)


def _check(plan: Plan) -> None:
    """Refuse what cannot be measured before the first hour of measuring."""
    for name, value in asdict(plan).items():
        for one in value if isinstance(value, tuple) else (value,):
            least = {"layer": 0, "contexts": 2, "vocabularies": 257}.get(name, 1)  # a vocabulary: the bytes and an end
            if isinstance(one, int) and one < least:
                raise InputError(f"--{name} must be at least {least}, got {one}.")
    if not 0 <= getattr(plan, "tolerance", 0) < 1:
        raise InputError("--tolerance is a share of softmax mass, at least 0 and less than 1.")
    if isinstance(plan, AttentionPlan) and plan.measure == "work" and (plan.sides == "both" or not plan.tolerance):
        raise InputError("--measure work counts causal work at a tolerance; give one above 0, leave --sides both out.")
    for option, known in WORDS.items():
        given = getattr(plan, option, ())
        for one in (given,) if isinstance(given, str) else given:
            if option == "engines" and one not in known:
                known += _other_engines()
            if one not in known:
                raise InputError(f"--{option} knows no '{one}'.{did_you_mean(one, known)} Known: {', '.join(known)}.")
    if not isinstance(plan, AttentionPlan | PreparePlan):
        from trainshort.config.presets import presets

        presets.get(plan.preset)
    if isinstance(plan, EvaluatePlan) and any(max(plan.lengths) % length for length in plan.lengths):
        raise InputError("--lengths of evaluate must divide the longest, so that all score the same tokens.")
    if isinstance(plan, DecodePlan) and TRAINED in plan.parts and plan.run is None:
        raise InputError("--parts trained reads a run's own text with its trained model; give --run RUN.")
