"""What a reproduction would take: commands, GPUs, memory, tokens, hours; every model is built on the meta device.

Hours at the paper's scale come from the paper's own speeds (Table 1, Figure 7; GPU-hours of Table 12), so they are
hours of V100s. At the other scales they come from the costs measured here, where there are any.
"""

import os
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainshort.claims.collection import read_costs
from trainshort.config import RunConfig
from trainshort.recipes import recipe_name, recipes
from trainshort.recipes.experiments import Experiment, Scale, Variant, published, reseeded
from trainshort.recipes.scales import PAPER_GPUS
from trainshort.registry import VARIABLE, load_plugin, origins
from trainshort.runs import flatten, run_name

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Entry:
    """One model of a plan."""

    variant: Variant
    name: str
    command: str
    gpus: int
    memory: float | None
    """GB per GPU, as the paper measured it."""
    tokens: int
    hours: float | None
    parameters: int


def make_plan(chosen: Sequence[Experiment], scale: Scale, root: Path, seeds: int = 1) -> list[Entry]:
    """Every model of the experiments once."""
    found: dict[str, Entry] = {}
    costs = read_costs(root)
    for seed in range(1, seeds + 1):
        for experiment in (reseeded(one, seed) for one in chosen):
            for variant in experiment.variants(scale):
                config = scale.config(variant)
                name = run_name(config)
                if name not in found:
                    found[name] = _entry(scale, variant, config, root / name, costs)
    return list(found.values())


def _entry(scale: Scale, variant: Variant, config: RunConfig, run: Path, costs: dict[str, Any]) -> Entry:
    gpus = PAPER_GPUS[variant.setup] if scale.name == "paper" else 1 if scale.name == "gpu" else 0
    settings = config.train
    tokens = settings.steps * settings.batch * settings.length
    hours = paper_hours(variant, tokens) if scale.name == "paper" else _measured_hours(costs, run.name, tokens)
    return Entry(
        variant=variant,
        name=run.name,
        command=command(*nearest_recipe(config, recipe_name(scale, variant)), run, gpus),
        gpus=gpus,
        memory=paper_memory(variant) if scale.name == "paper" else None,
        tokens=tokens,
        hours=hours,
        parameters=parameters(config),
    )


def nearest_recipe(config: RunConfig, own: str) -> tuple[str, list[str]]:
    """The recipe that a run has of its own, or else the one with the fewest settings to change, ALiBi's first; and the
    options that make it this run: --train.seed 2, or --model.position mine --plugin mine.py."""
    made = {name: recipes.get(name)() for name in ([own] if own in recipes else recipes.names())}
    options = {name: _options(base, config) for name, base in made.items()}
    name = min(made, key=lambda one: (len(options[one]), made[one].model.position != "alibi"))
    return name, options[name] + _plugins(config.model.position)


def _options(base: RunConfig, config: RunConfig) -> list[str]:
    """Words that change a recipe's settings to others."""
    position, words = config.model.position, []
    if base.model.position != position:
        words, base = ["--model.position", position], base.replace(model={"position": position})
    before, after = (flatten(one.model_dump(mode="json", exclude={"format", "plugins"})) for one in (base, config))
    for name, value in after.items():
        if value != before.get(name):
            several = value if isinstance(value, list) else [value]
            words += [f"--{name}={value}"] if isinstance(value, bool) else [f"--{name}", *map(str, several)]
    return words


def _plugins(position: str) -> list[str]:
    """`--plugin` with the file that a method came from; one that is installed needs none."""
    needed = origins([("position method", position)])
    named = [path for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]
    return [word for path in named if load_plugin(Path(path)) in needed for word in ("--plugin", path)]


def command(recipe: str, options: Sequence[str], run: Path, gpus: int) -> str:
    """The command that trains one model, resumable by itself."""
    what = shlex.join(["train", recipe, "--out", str(run), "--resume", *options])
    if gpus <= 1:
        return f"trainshort {what}"
    nodes = max(1, gpus // GPUS_PER_NODE)
    where = "--standalone" if nodes == 1 else "--rdzv_backend=c10d --rdzv_endpoint=$HEAD_NODE:29500"
    return f"torchrun --nnodes={nodes} --nproc_per_node={min(gpus, GPUS_PER_NODE)} {where} -m trainshort {what}"


def paper_speed(variant: Variant) -> float | None:
    """Training tokens per second of one V100, as Table 1 or Figure 7 has it."""
    row = published()["table1"].get(variant.position, {}).get(str(variant.length))
    if row:
        return row["train_wps_k"] * 1e3
    return dict(published()["fig7"].get(variant.position, [])).get(variant.length)


def paper_hours(variant: Variant, tokens: int) -> float | None:
    """Wall-clock hours on the paper's GPUs: ALiBi at 512 on 8 V100, 21.1 billion tokens at 28,300 each: 25.9."""
    gpus = PAPER_GPUS[variant.setup]
    if variant.setup == "cc100":
        row = _large(variant)
        return row["gpu_hours_k"] * 1e3 / gpus if row else None
    speed = paper_speed(variant)
    return tokens / gpus / speed / 3600 if speed else None


def paper_memory(variant: Variant) -> float | None:
    """GB per GPU in training, where the paper gives it."""
    if variant.setup == "cc100":
        row = _large(variant)
        return row["mem_gb"] if row else None
    row = published()["table1"].get(variant.position, {}).get(str(variant.length))
    return row["train_mem_gb"] if row else None


def _large(variant: Variant) -> dict[str, Any] | None:
    rows = published()["table12"]
    return next((row for row in rows if (row["model"], row["L"]) == (variant.position, variant.length)), None)


def _measured_hours(costs: dict[str, Any], name: str, tokens: int) -> float | None:
    entry = costs.get(name)
    if entry is None:
        return None
    return tokens / (entry["tokens"] / statistics.median(entry["train_seconds"])) / 3600


def parameters(config: RunConfig) -> int:
    """Number of weights, counted on a model that takes no memory."""
    import torch

    from trainshort.model import TransformerLM

    size = config.model.vocabulary or config.data.vocabulary
    with torch.device("meta"):
        model = TransformerLM(config.model.replace(vocabulary=size))
    return sum(weight.numel() for weight in model.parameters())


def told(entries: Sequence[Entry], scale: Scale) -> str:
    """The plan as text."""
    lines = [f"{scale.name}: {scale.summary}", f"{len(entries)} models", ""]
    for one in entries:
        facts = [f"{one.parameters:,} parameters", f"{one.tokens:,} tokens"]
        if one.gpus:
            facts.append(f"{one.gpus} GPU{'s' if one.gpus > 1 else ''}")
        if one.memory:
            facts.append(f"{one.memory:g} GB each")
        facts.append(
            "hours unknown"
            if one.hours is None
            else f"{one.hours:,.1f} h"
            if one.hours >= 1
            else f"{60 * one.hours:.1f} min"
        )
        lines += [f"{one.name}: {', '.join(facts)}", f"  {one.command}"]
    known = [one for one in entries if one.hours is not None]
    if known and scale.name == "paper":
        gpu_hours = sum((one.hours or 0) * one.gpus for one in known)
        lines += [
            "",
            f"In all {gpu_hours:,.0f} GPU-hours of V100s for {len(known)} models whose speed the paper gives.",
        ]
    elif known:
        lines += [
            "",
            f"In all {sum(one.hours or 0 for one in known):.1f} h for {len(known)} models, one after the other.",
        ]
    return "\n".join(lines)
