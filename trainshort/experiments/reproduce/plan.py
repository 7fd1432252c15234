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

from trainshort.config.run_config import RunConfig
from trainshort.experiments.claims.collection import read_costs
from trainshort.experiments.experiments import Experiment, Scale, Variant, load_published_numbers, with_seed
from trainshort.experiments.recipes import recipe_name, recipes
from trainshort.experiments.scales import PAPER_GPUS
from trainshort.train.run_folder import flatten, run_name
from trainshort.utils.plugins import PLUGIN_ENV_VAR, load_plugin, plugins_of
from trainshort.utils.terminal import format_duration

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class PlanEntry:
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


def make_plan(chosen: Sequence[Experiment], scale: Scale, root: Path, seeds: int = 1) -> list[PlanEntry]:
    """Every model of the experiments once."""
    found: dict[str, PlanEntry] = {}
    costs = read_costs(root)
    for seed in range(1, seeds + 1):
        for experiment in (with_seed(one, seed) for one in chosen):
            for variant in experiment.variants_to_train(scale):
                config = scale.make_config(variant)
                name = run_name(config)
                if name not in found:
                    found[name] = _entry(scale, variant, config, root / name, costs)
    return list(found.values())


def _entry(scale: Scale, variant: Variant, config: RunConfig, run: Path, costs: dict[str, Any]) -> PlanEntry:
    tokens = config.train.steps * config.train.batch * config.train.length
    gpus, memory, hours = scale.gpus, None, None
    if scale.name == "paper":
        row = _paper_row(variant)
        gpus, memory = PAPER_GPUS[variant.setup], row.get("mem_gb", row.get("train_mem_gb"))
        hours = estimate_paper_hours(variant, tokens)
    elif entry := costs.get(run.name):
        hours = tokens / (entry["tokens"] / statistics.median(entry["train_seconds"])) / 3600
    line = training_command(*find_nearest_recipe(config, recipe_name(scale, variant)), run, gpus)
    return PlanEntry(variant, run.name, line, gpus, memory, tokens, hours, count_parameters(config))


def find_nearest_recipe(config: RunConfig, own: str) -> tuple[str, list[str]]:
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
    needed = plugins_of([("position method", position)])
    named = [path for path in os.environ.get(PLUGIN_ENV_VAR, "").split(os.pathsep) if path]
    return [word for path in named if load_plugin(Path(path)) in needed for word in ("--plugin", path)]


def training_command(recipe: str, options: Sequence[str], run: Path, gpus: int) -> str:
    """The command that trains one model, resumable by itself."""
    what = shlex.join(["train", recipe, "--out", str(run), "--resume", *options])
    if gpus <= 1:
        return f"trainshort {what}"
    nodes = max(1, gpus // GPUS_PER_NODE)
    where = "--standalone" if nodes == 1 else "--rdzv_backend=c10d --rdzv_endpoint=$HEAD_NODE:29500"
    return f"torchrun --nnodes={nodes} --nproc_per_node={min(gpus, GPUS_PER_NODE)} {where} -m trainshort {what}"


def estimate_paper_hours(variant: Variant, tokens: int) -> float | None:
    """Wall-clock hours on the paper's GPUs: ALiBi at 512 on 8 V100, 21.1 billion tokens at 28,300 each: 25.9."""
    row, gpus = _paper_row(variant), PAPER_GPUS[variant.setup]
    if variant.setup == "cc100":
        return row["gpu_hours_k"] * 1e3 / gpus if row else None
    speed = dict(load_published_numbers()["fig7"].get(variant.position, [])).get(variant.length)
    speed = row["train_wps_k"] * 1e3 if row else speed
    return tokens / gpus / speed / 3600 if speed else None


def _paper_row(variant: Variant) -> dict[str, Any]:
    """What the paper measured of this training: a row of Table 12 or Table 1; empty where it has none."""
    if variant.setup == "cc100":
        rows = load_published_numbers()["table12"]
        return next((row for row in rows if (row["model"], row["L"]) == (variant.position, variant.length)), {})
    return load_published_numbers()["table1"].get(variant.position, {}).get(str(variant.length), {})


def count_parameters(config: RunConfig) -> int:
    """Number of weights, counted on a model that takes no memory."""
    import torch

    from trainshort.model.transformer import TransformerLM

    size = config.model.vocab_size or config.data.vocab_size
    with torch.device("meta"):
        model = TransformerLM(config.model.replace(vocab_size=size))
    return sum(weight.numel() for weight in model.parameters())


def format_plan(entries: Sequence[PlanEntry], scale: Scale) -> str:
    """The plan as text."""
    lines = [f"{scale.name}: {scale.summary}", f"{len(entries)} models", ""]
    for one in entries:
        facts = [f"{one.parameters:,} parameters", f"{one.tokens:,} tokens"]
        facts += [f"{one.gpus} GPU{'s' if one.gpus > 1 else ''}"] if one.gpus else []
        facts += [f"{one.memory:g} GB each"] if one.memory else []
        facts.append("hours unknown" if one.hours is None else format_duration(3600 * one.hours))
        lines += [f"{one.name}: {', '.join(facts)}", f"  {one.command}"]
    known = {one.name: one.hours for one in entries if one.hours is not None}
    if known and scale.name == "paper":
        gpu_hours = sum(one.gpus * known.get(one.name, 0) for one in entries)
        total = f"{gpu_hours:,.0f} GPU-hours of V100s for {len(known)} models whose speed the paper gives."
        lines += ["", f"In all {total}"]
    elif known:
        total = format_duration(3600 * sum(known.values()))
        lines += ["", f"In all {total} for {len(known)} models, one after the other."]
    return "\n".join(lines)
