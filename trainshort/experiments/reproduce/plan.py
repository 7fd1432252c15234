"""Estimate what a reproduction needs: commands, GPUs, memory, tokens and hours.

At the scale "paper", hours and memory are taken from the paper (Table 1, Table 12 and Figure 7), so they are for V100
GPUs. At other scales, hours are computed from speeds that were measured on this machine.
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
    """The plan for one model.

    Attributes:
        variant: The model of the paper.
        name: The run name.
        command: The command that trains the model.
        gpus: The number of GPUs, or 0 for training on a CPU.
        memory: The memory in GB per GPU as stated in the paper, or None if it is unknown.
        tokens: The number of training tokens.
        hours: The training time in hours, or None if it is unknown.
        parameters: The number of parameters of the model.
    """

    variant: Variant
    name: str
    command: str
    gpus: int
    memory: float | None
    tokens: int
    hours: float | None
    parameters: int


def make_plan(experiments: Sequence[Experiment], scale: Scale, root: Path, seeds: int = 1) -> list[PlanEntry]:
    """Return the plan for all models of some experiments: the command, the cost and the time of each training.

    A variant is a model of the paper, such as ALiBi trained at length 512. A scale converts it to the config of the
    model that is trained.

    Args:
        experiments: The tables and figures of the paper.
        scale: The size at which the experiments are run (laptop, gpu or paper).
        root: The folder that contains the run folders.
        seeds: How many seeds each model is trained with.

    Returns:
        One entry for each model. A model that several experiments need has one entry.
    """
    entries: dict[str, PlanEntry] = {}
    costs = read_costs(root)  # The measured speed and memory of models, by run name.
    for seed in range(1, seeds + 1):
        for experiment in experiments:
            for variant in with_seed(experiment, seed).variants_to_train(scale):
                config = scale.make_config(variant)
                name = run_name(config)
                if name not in entries:
                    entries[name] = _make_entry(scale, variant, config, root / name, costs.get(name))
    return list(entries.values())


def _make_entry(
    scale: Scale, variant: Variant, config: RunConfig, run_folder: Path, cost: dict[str, Any] | None
) -> PlanEntry:
    """Return the plan for one model.

    Args:
        scale: The size at which the experiments are run (laptop, gpu or paper).
        variant: The model of the paper.
        config: The config of the model at this scale.
        run_folder: The run folder of the model.
        cost: The measured speed of the model (an entry of `cost.json`), or None if it was not measured.
    """
    tokens = config.train.steps * config.train.batch * config.train.length
    gpus = scale.gpus
    memory = None
    hours = None
    if scale.name == "paper":
        row = _paper_row(variant)
        gpus = PAPER_GPUS[variant.setup]
        memory = row.get("mem_gb", row.get("train_mem_gb"))  # The two tables of the paper use different keys.
        hours = estimate_paper_hours(variant, tokens)
    elif cost is not None:
        tokens_per_second = cost["tokens"] / statistics.median(cost["train_seconds"])
        hours = tokens / tokens_per_second / 3600

    recipe, options = find_nearest_recipe(config, recipe_name(scale, variant))
    return PlanEntry(
        variant=variant,
        name=run_folder.name,
        command=training_command(recipe, options, run_folder, gpus),
        gpus=gpus,
        memory=memory,
        tokens=tokens,
        hours=hours,
        parameters=count_parameters(config),
    )


# ---- the training command


def find_nearest_recipe(config: RunConfig, preferred_recipe: str) -> tuple[str, list[str]]:
    """Find a recipe and command-line options that produce a config.

    A recipe is a registered config with a name, such as "laptop-alibi-64". Options change single settings of a recipe.

    Args:
        config: The config of a run.
        preferred_recipe: The recipe that is used if it exists. Otherwise the recipe that needs the fewest options is
            used. If several recipes need equally few options, a recipe with ALiBi is used.

    Returns:
        The name of the recipe, and the options, such as `["--train.seed", "2"]`.
    """
    recipe_names = [preferred_recipe] if preferred_recipe in recipes else recipes.names()
    recipe_configs = {name: recipes.get(name)() for name in recipe_names}
    # The options that change each recipe into the config.
    options_by_recipe: dict[str, list[str]] = {}
    for name, recipe_config in recipe_configs.items():
        options_by_recipe[name] = _options_between(recipe_config, config)

    def distance(name: str) -> tuple[int, bool]:
        """Return a sort key. The recipe with the smallest key is the nearest one."""
        uses_other_position = recipe_configs[name].model.position != "alibi"
        return len(options_by_recipe[name]), uses_other_position

    nearest = min(recipe_names, key=distance)
    options = options_by_recipe[nearest] + _plugin_options(config.model.position)
    return nearest, options


def _options_between(recipe_config: RunConfig, config: RunConfig) -> list[str]:
    """Return the command-line options that change the config of a recipe into another config.

    Args:
        recipe_config: The config of the recipe.
        config: The config that the recipe and the options must produce.

    Returns:
        The options, such as `["--model.position", "t5", "--train.seed", "2"]`.
    """
    options: list[str] = []
    position = config.model.position
    if recipe_config.model.position != position:
        options += ["--model.position", position]
        # The position method then no longer differs, so the loop below does not add it again.
        recipe_config = recipe_config.replace(model={"position": position})

    # `flatten` turns nested settings into one dictionary with keys such as "train.seed".
    recipe_values = flatten(recipe_config.model_dump(mode="json", exclude={"format", "plugins"}))
    values = flatten(config.model_dump(mode="json", exclude={"format", "plugins"}))
    for name, value in values.items():
        if value == recipe_values.get(name):
            continue
        # The option of a boolean setting needs an equals sign, as in "--train.compile=True".
        if isinstance(value, bool):
            options.append(f"--{name}={value}")
        elif isinstance(value, list):
            options += [f"--{name}", *map(str, value)]
        else:
            options += [f"--{name}", str(value)]
    return options


def _plugin_options(position: str) -> list[str]:
    """Return the options `--plugin FILE` for the plug-in file that defines a position method.

    An installed plug-in and a built-in method need no option. The files of other plug-ins are listed in an environment
    variable (`PLUGIN_ENV_VAR`).
    """
    needed_plugins = plugins_of([("position method", position)])
    options: list[str] = []
    for path in os.environ.get(PLUGIN_ENV_VAR, "").split(os.pathsep):
        if path and load_plugin(Path(path)) in needed_plugins:
            options += ["--plugin", path]
    return options


def training_command(recipe: str, options: Sequence[str], run_folder: Path, gpus: int) -> str:
    """Return the command that trains a model. The same command continues the training after an interruption.

    Args:
        recipe: The name of the recipe.
        options: Command-line options that change settings of the recipe.
        run_folder: The run folder.
        gpus: The number of GPUs. With more than one GPU the command starts with `torchrun`.
    """
    arguments = shlex.join(["train", recipe, "--out", str(run_folder), "--resume", *options])
    if gpus <= 1:
        return f"trainshort {arguments}"

    nodes = max(1, gpus // GPUS_PER_NODE)
    processes_per_node = min(gpus, GPUS_PER_NODE)
    if nodes == 1:
        rendezvous = "--standalone"
    else:
        rendezvous = "--rdzv_backend=c10d --rdzv_endpoint=$HEAD_NODE:29500"
    return f"torchrun --nnodes={nodes} --nproc_per_node={processes_per_node} {rendezvous} -m trainshort {arguments}"


# ---- estimates


def estimate_paper_hours(variant: Variant, tokens: int) -> float | None:
    """Return the hours that the training of a model took in the paper.

    For example, the ALiBi model with length 512 was trained on 21.1 billion tokens with 8 GPUs. Each GPU processed
    28,300 tokens/s, which gives 25.9 hours.

    Args:
        variant: The model of the paper.
        tokens: The number of training tokens.

    Returns:
        The hours, or None if the paper does not state the speed of the model.
    """
    row = _paper_row(variant)
    gpus = PAPER_GPUS[variant.setup]
    if variant.setup == "cc100":  # The paper states the GPU-hours of these models directly.
        if not row:
            return None
        total_gpu_hours = row["gpu_hours_k"] * 1e3  # The key "..._k" stands for thousands.
        return total_gpu_hours / gpus

    # The speeds in the paper are those of a single GPU.
    if row:
        tokens_per_second = row["train_wps_k"] * 1e3  # thousands of words per second; a word is one token
    else:
        figure_points = load_published_numbers()["fig7"].get(variant.position, [])
        tokens_per_second = dict(figure_points).get(variant.length)
    if not tokens_per_second:
        return None
    return tokens / gpus / tokens_per_second / 3600


def _paper_row(variant: Variant) -> dict[str, Any]:
    """Return the paper's measurements of a model, such as its memory and its speed.

    Returns:
        A row of Table 12 (models on CC100+RoBERTa) or of Table 1 (other models). The dictionary is empty if the model
        is in neither table.
    """
    published = load_published_numbers()
    if variant.setup != "cc100":
        rows_by_length = published["table1"].get(variant.position, {})
        return rows_by_length.get(str(variant.length), {})

    for row in published["table12"]:
        if row["model"] == variant.position and row["L"] == variant.length:
            return row
    return {}


def count_parameters(config: RunConfig) -> int:
    """Return the number of parameters of a model. The model is built on the meta device, which needs no memory."""
    import torch

    from trainshort.model.transformer import TransformerLM

    # 0 in the config of the model means that the size of the vocabulary is taken from the dataset.
    vocab_size = config.model.vocab_size or config.data.vocab_size
    with torch.device("meta"):
        model = TransformerLM(config.model.replace(vocab_size=vocab_size))
    return sum(parameter.numel() for parameter in model.parameters())


# ---- the plan as text


def format_plan(entries: Sequence[PlanEntry], scale: Scale) -> str:
    """Return a plan as text: two lines for each model, then the total time."""
    lines = [f"{scale.name}: {scale.summary}", f"{len(entries)} models", ""]
    for entry in entries:
        lines.append(f"{entry.name}: {_format_requirements(entry)}")
        lines.append(f"  {entry.command}")

    timed_entries = [entry for entry in entries if entry.hours is not None]
    if timed_entries:
        lines += ["", _format_total(timed_entries, scale)]
    return "\n".join(lines)


def _format_requirements(entry: PlanEntry) -> str:
    """Return a text such as "246,933,504 parameters, 21,086,208,000 tokens, 8 GPUs, 15.3 GB each, 25.9 h"."""
    parts = [f"{entry.parameters:,} parameters", f"{entry.tokens:,} tokens"]
    if entry.gpus == 1:
        parts.append("1 GPU")
    elif entry.gpus:
        parts.append(f"{entry.gpus} GPUs")
    if entry.memory:
        parts.append(f"{entry.memory:g} GB each")
    if entry.hours is None:
        parts.append("hours unknown")
    else:
        parts.append(format_duration(3600 * entry.hours))
    return ", ".join(parts)


def _format_total(timed_entries: Sequence[PlanEntry], scale: Scale) -> str:
    """Return a sentence with the total training time of some models.

    Args:
        timed_entries: The plan of each model whose time is known.
        scale: The size of the models. For the scale "paper", the speeds in the paper are used (GPUs of type V100).
    """
    count = len(timed_entries)
    if scale.name == "paper":
        gpu_hours = sum(entry.gpus * (entry.hours or 0) for entry in timed_entries)
        return f"Total: {gpu_hours:,.0f} GPU-hours of V100s for the {count} models whose speed the paper states."
    hours = sum(entry.hours or 0 for entry in timed_entries)
    return f"Total: {format_duration(3600 * hours)} for {count} models, if they are trained one after the other."
