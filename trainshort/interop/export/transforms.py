"""The same model in fewer words: what a target has no setting for is written into the weights, where that is exact.

grouped heads       each key and value head repeated for the query heads that share it
a narrow ffn        filled up with rows and columns of zeros, since every activation here maps 0 to 0
factors             of embeddings into the table, of logits into an output matrix of its own, of scores into q
an embedding norm   its output, which depends on the token alone, as the table; the output matrix is one of its own
missing biases      zeros
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError


@dataclass(frozen=True)
class ExportModel:
    """A model's settings and tensors while they are rewritten."""

    config: ModelConfig
    weights: dict[str, Tensor]
    applied_transforms: tuple[str, ...] = ()
    """What was rewritten, in words."""

    @property
    def max_bias(self) -> float:
        settings: Any = self.config.position_settings
        return settings.max_bias

    def changed(self, note: str, weights: dict[str, Tensor], **settings: object) -> "ExportModel":
        return ExportModel(self.config.replace(**settings), self.weights | weights, (*self.applied_transforms, note))


@dataclass(frozen=True)
class Requirement:
    """One thing that a target asks of a model."""

    fits: Callable[[Any], bool]
    setting: str
    """The first setting to blame, and its value that does not fit, as a format string over the config."""
    hint: str


def check_supported(target: str, config: ModelConfig, needs: tuple[Requirement, ...]) -> None:
    """Name the first setting that a target cannot carry, and what would have made it fit."""
    for need in needs:
        if not need.fits(config):
            has = need.setting.format(config=config)
            raise InputError(f"{target} cannot carry a model with {has}; {need.hint}. --to hf carries every model.")


PLAIN_ALIBI = (
    Requirement(lambda c: c.position == "alibi", "position {config.position}", "it knows ALiBi alone"),
    Requirement(lambda c: c.adaptive is None, "an adaptive vocabulary", "train with one plain matrix"),
    Requirement(lambda c: c.norm == "layer", "norm {config.norm}", "it has LayerNorm"),
    Requirement(lambda c: not c.gated_feedforward, "gated feed-forward layers", "train with gated_feedforward=False"),
    Requirement(lambda c: not c.parallel_blocks, "parallel_blocks", "train with parallel_blocks=False"),
    Requirement(
        lambda c: not c.position_settings.learned_slopes, "learned_slopes", "its slopes follow from the number of heads"
    ),
    Requirement(
        lambda c: c.position_settings.slopes is None, "slopes of its own", "its slopes follow from the number of heads"
    ),
    Requirement(lambda c: c.window is None, "window {config.window}", "train without a window"),
    Requirement(
        lambda c: not c.nope_heads and c.nope_every is None, "heads or layers without positions", "it has none"
    ),
    Requirement(
        lambda c: c.length_scaling == "none", "length_scaling {config.length_scaling}", "its scores do not grow"
    ),
)
"""What every target but our own asks."""


NO_CLIPPED_SCALE = Requirement(
    lambda c: c.clip_qkv is None or c.softmax_scale is None,
    "softmax_scale together with clip_qkv",
    "the scale cannot be folded into what is clipped after it",
)


def layers(config: ModelConfig) -> list[str]:
    return [f"layers.{index}." for index in range(config.layers)]


def repeat_kv_heads(model: ExportModel) -> ExportModel:
    """As many key heads as query heads."""
    config = model.config
    group, dim = config.heads // config.key_heads, config.head_width
    if group == 1:
        return model
    made = {}
    for at in layers(config):
        for name in (f"{at}attention.qkv.weight", f"{at}attention.qkv.bias"):
            if name in model.weights:
                q, k, v = model.weights[name].split([config.width, *[config.key_heads * dim] * 2])
                k, v = (x.unflatten(0, (-1, dim)).repeat_interleave(group, 0).flatten(0, 1) for x in (k, v))
                made[name] = torch.cat([q, k, v])
    return model.changed(f"{config.key_heads} key heads repeated to {config.heads}", made, kv_heads=None)


def pad_ffn(model: ExportModel, size: int) -> ExportModel:
    """Feed-forward layers of at least this width."""
    extra = size - model.config.ffn_width
    if extra <= 0:
        return model
    made = {}
    for at in layers(model.config):
        for name, pad in ((f"{at}ffn.wide.weight", (0, 0, 0, extra)), (f"{at}ffn.wide.bias", (0, extra))):
            if name in model.weights:
                made[name] = torch.nn.functional.pad(model.weights[name], pad)
        made[f"{at}ffn.narrow.weight"] = torch.nn.functional.pad(model.weights[f"{at}ffn.narrow.weight"], (0, extra))
    return model.changed(f"ffn {model.config.ffn_width} filled up with zeros to {size}", made, feedforward_width=size)


def fold_scales(model: ExportModel, *, scores: bool = True) -> ExportModel:
    """No factors: of embeddings, of logits, and, if asked for, of scores."""
    config = model.config
    embedding = model.weights["vocabulary.embedding.weight"]
    output = model.weights.get("vocabulary.output.weight", embedding)
    factor = config.embedding_factor * (config.width**0.5 if config.embedding_scale else 1)
    if factor != 1 or config.logit_scale != 1:
        made = {"vocabulary.embedding.weight": embedding * factor}
        made["vocabulary.output.weight"] = output * config.logit_scale
        plain = {"embedding_scale": False, "embedding_factor": 1.0, "logit_scale": 1.0, "tie_embeddings": False}
        model = model.changed("factors of embeddings and logits folded into two matrices", made, **plain)
    if scores and config.softmax_scale is not None:
        assert config.clip_qkv is None, "clipping comes after the projection"
        factor, made = config.softmax_scale * config.head_width**0.5, {}
        for at in layers(config):
            for name in (f"{at}attention.qkv.weight", f"{at}attention.qkv.bias"):
                if name in model.weights:
                    rows = model.weights[name].clone()
                    rows[: config.width] *= factor
                    made[name] = rows
        model = model.changed("softmax_scale folded into the queries", made, softmax_scale=None)
    return model


def fold_embedding_norm(model: ExportModel) -> ExportModel:
    """No norm after the embeddings: a token's row is always the same, so the table can hold what the norm makes of it.
    The matrix that gives the logits stays what it was. Factors of embeddings come before the norm (`unscaled`)."""
    config = model.config
    if not config.embedding_norm:
        return model
    assert (config.embedding_factor, config.embedding_scale) == (1, False)
    weights = dict(model.weights)
    weight, bias = weights.pop("embedding_norm.weight"), weights.pop("embedding_norm.bias", None)
    table = weights["vocabulary.embedding.weight"]
    made = {"vocabulary.output.weight": weights.get("vocabulary.output.weight", table)}
    made["vocabulary.embedding.weight"] = torch.layer_norm(table, weight.shape, weight, bias, config.norm_eps)
    plain = {"embedding_norm": False, "tie_embeddings": False}
    return replace(model, weights=weights).changed("the embedding norm folded into a table of its own", made, **plain)


def add_zero_biases(model: ExportModel) -> ExportModel:
    """Biases everywhere, zero where there were none."""
    made, config = {}, model.config
    places = {
        "attention.qkv": "attention",
        "attention.out": "attention",
        "ffn.wide": "feedforward",
        "ffn.narrow": "feedforward",
    }
    names = [f"{at}{place}" for at in layers(config) for place in (*places, "attention_norm", "ffn_norm")]
    for name in (*names, "final_norm", "embedding_norm"):
        weight = model.weights.get(f"{name}.weight")
        if weight is not None and f"{name}.bias" not in model.weights:
            made[f"{name}.bias"] = torch.zeros(len(weight))
    if not made:
        return model
    every = {"biases": True, "attention_biases": None, "feedforward_biases": None, "norm_biases": None}
    return model.changed("zeros for missing biases", made, **every)
