"""Change the weights of a model so that another program supports the model. The logits stay the same.

repeat_kv_heads         repeat each key-value head for all query heads that share it
pad_ffn                 widen the feed-forward layers with zeros
fold_scales             multiply the weights by the scale factors of embeddings, logits and attention scores
fold_embedding_norm     apply the norm after the embeddings to the embedding matrix
add_zero_biases         add biases of zero
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
    """A model that is prepared for an export.

    Attributes:
        config: The config of the model.
        weights: The tensors by name.
        applied_transforms: A clause for each transform that changed the model, for users.
    """

    config: ModelConfig
    weights: dict[str, Tensor]
    applied_transforms: tuple[str, ...] = ()

    @property
    def max_bias(self) -> float:
        """The exponent of the smallest ALiBi slope. The model must use ALiBi."""
        settings: Any = self.config.position_settings
        return settings.max_bias

    def with_changes(self, note: str, new_weights: dict[str, Tensor], **settings: object) -> "ExportModel":
        """Return a model with changed weights and settings.

        Args:
            note: A clause that describes the change, for users.
            new_weights: The tensors that are replaced or added.
            settings: The settings that are changed.
        """
        return ExportModel(
            config=self.config.replace(**settings),
            weights=self.weights | new_weights,
            applied_transforms=(*self.applied_transforms, note),
        )


@dataclass(frozen=True)
class Requirement:
    """A condition that an export target requires of a model config.

    Attributes:
        is_met: Returns whether a config meets the requirement.
        unsupported: What a config has that does not meet the requirement, such as "window {config.window}".
        hint: A sentence that says what is supported, or how to train a model that the target supports.
    """

    is_met: Callable[[Any], bool]
    unsupported: str
    hint: str


def check_supported(target: str, config: ModelConfig, requirements: tuple[Requirement, ...]) -> None:
    """Check that an export target supports a model.

    Args:
        target: The name of the export target, for the error message.
        config: The config of the model.
        requirements: The requirements of the target.

    Raises:
        InputError: If the config does not meet a requirement. The message names the setting.
    """
    for requirement in requirements:
        if not requirement.is_met(config):
            unsupported = requirement.unsupported.format(config=config)  # for example "window 128"
            raise InputError(
                f"Export to {target} does not support {unsupported}. {requirement.hint} `--to hf` supports every model."
            )


ALIBI_REQUIREMENTS = (
    Requirement(lambda c: c.position == "alibi", "position {config.position}", "Only alibi is supported."),
    Requirement(lambda c: c.adaptive is None, "adaptive embeddings", "Train without model.adaptive."),
    Requirement(lambda c: c.norm == "layer", "norm {config.norm}", "Only layer is supported."),
    Requirement(lambda c: not c.gated_feedforward, "gated_feedforward", "Train with gated_feedforward=False."),
    Requirement(lambda c: not c.parallel_blocks, "parallel_blocks", "Train with parallel_blocks=False."),
    Requirement(
        lambda c: not c.position_settings.learned_slopes,
        "learned_slopes",
        "The slopes must follow from the number of heads.",
    ),
    Requirement(
        lambda c: c.position_settings.slopes is None,
        "custom slopes",
        "The slopes must follow from the number of heads.",
    ),
    Requirement(lambda c: c.window is None, "window {config.window}", "Train without a window."),
    Requirement(
        lambda c: not c.nope_heads and c.nope_every is None,
        "nope_heads or nope_every",
        "Train with positions in all heads and layers.",
    ),
    Requirement(
        lambda c: c.length_scaling == "none",
        "length_scaling {config.length_scaling}",
        "Train with length_scaling=none.",
    ),
)
"""What every target except `hf` requires: a plain Transformer with ALiBi."""

NO_SCALE_WITH_CLIPPING = Requirement(
    lambda c: c.clip_qkv is None or c.softmax_scale is None,
    "softmax_scale together with clip_qkv",
    "The scale cannot be folded into the queries, because they are clipped afterwards.",
)


def layer_prefixes(config: ModelConfig) -> list[str]:
    """Return the beginning of the tensor names of each layer: `layers.0.`, `layers.1.` and so on."""
    return [f"layers.{index}." for index in range(config.layers)]


def repeat_kv_heads(model: ExportModel) -> ExportModel:
    """Repeat the key-value heads, so that each query head has its own key-value head.

    A model without grouped-query attention is returned unchanged.
    """
    config = model.config
    num_kv_heads = config.key_heads
    queries_per_kv_head = config.heads // num_kv_heads
    if queries_per_kv_head == 1:
        return model

    def repeat_heads(rows: Tensor) -> Tensor:
        """Repeat the rows of each key or value head for all query heads that share the head."""
        heads = rows.unflatten(0, (-1, config.head_width))  # (key-value heads, head width, ...)
        return heads.repeat_interleave(queries_per_kv_head, 0).flatten(0, 1)

    kv_width = num_kv_heads * config.head_width
    new_weights = {}
    for prefix in layer_prefixes(config):
        for name in (f"{prefix}attention.qkv.weight", f"{prefix}attention.qkv.bias"):
            if name in model.weights:
                q, k, v = model.weights[name].split([config.width, kv_width, kv_width])
                new_weights[name] = torch.cat([q, repeat_heads(k), repeat_heads(v)])
    note = f"the {num_kv_heads} key-value heads were repeated to {config.heads}"
    return model.with_changes(note, new_weights, kv_heads=None)


def pad_ffn(model: ExportModel, width: int) -> ExportModel:
    """Widen the feed-forward layers with zeros.

    The added units output zero, because all activation functions map zero to zero. A model whose feed-forward layers
    already have this width or more is returned unchanged.

    Args:
        model: The model.
        width: The new number of units of the feed-forward layers.
    """
    old_width = model.config.ffn_width
    num_added = width - old_width
    if num_added <= 0:
        return model
    # The second argument of `pad` is the number of zeros before and after the last dimension, and then the same two
    # numbers for the dimension before it.
    pad = torch.nn.functional.pad
    new_weights = {}
    for prefix in layer_prefixes(model.config):
        wide_weight = model.weights[f"{prefix}ffn.wide.weight"]
        new_weights[f"{prefix}ffn.wide.weight"] = pad(wide_weight, (0, 0, 0, num_added))  # adds rows
        wide_bias = model.weights.get(f"{prefix}ffn.wide.bias")
        if wide_bias is not None:
            new_weights[f"{prefix}ffn.wide.bias"] = pad(wide_bias, (0, num_added))
        narrow_weight = model.weights[f"{prefix}ffn.narrow.weight"]
        new_weights[f"{prefix}ffn.narrow.weight"] = pad(narrow_weight, (0, num_added))  # adds columns
    note = f"the feed-forward layers were padded with zeros from {old_width} to {width}"
    return model.with_changes(note, new_weights, feedforward_width=width)


def fold_scales(model: ExportModel, *, fold_softmax_scale: bool = True) -> ExportModel:
    """Multiply the weights by the scale factors of the model, and set the factors to 1.

    Args:
        model: The model.
        fold_softmax_scale: Whether to fold the factor of the attention scores into the queries. The factors of the
            embeddings and of the logits are always folded.
    """
    model = _fold_embedding_and_logit_scale(model)
    if fold_softmax_scale:
        model = _fold_softmax_scale(model)
    return model


def _fold_embedding_and_logit_scale(model: ExportModel) -> ExportModel:
    """Multiply the embedding and output matrices by their scale factors, and set the factors to 1.

    Tied matrices (one matrix for embeddings and output) become two matrices.
    """
    config = model.config
    width_factor = config.width**0.5 if config.embedding_scale else 1
    embedding_factor = config.embedding_factor * width_factor
    if embedding_factor == 1 and config.logit_scale == 1:
        return model
    embedding = model.weights["vocabulary.embedding.weight"]
    output = model.weights.get("vocabulary.output.weight", embedding)
    new_weights = {
        "vocabulary.embedding.weight": embedding * embedding_factor,
        "vocabulary.output.weight": output * config.logit_scale,
    }
    return model.with_changes(
        "the scale factors of embeddings and logits were multiplied into two matrices",
        new_weights,
        embedding_scale=False,
        embedding_factor=1.0,
        logit_scale=1.0,
        tie_embeddings=False,
    )


def _fold_softmax_scale(model: ExportModel) -> ExportModel:
    """Multiply the query projections, so that the attention scores have the usual factor 1 / sqrt(head width).

    A model multiplies its attention scores by `softmax_scale` instead, if this setting is not None.
    """
    config = model.config
    if config.softmax_scale is None:
        return model
    assert config.clip_qkv is None, "queries are clipped after the projection"
    query_factor = config.softmax_scale * config.head_width**0.5
    new_weights = {}
    for prefix in layer_prefixes(config):
        for name in (f"{prefix}attention.qkv.weight", f"{prefix}attention.qkv.bias"):
            if name in model.weights:
                qkv = model.weights[name].clone()
                qkv[: config.width] *= query_factor  # The first `width` rows compute the queries.
                new_weights[name] = qkv
    return model.with_changes("softmax_scale was multiplied into the queries", new_weights, softmax_scale=None)


def fold_embedding_norm(model: ExportModel) -> ExportModel:
    """Apply the norm after the embeddings to each row of the embedding matrix, and remove the norm.

    The output matrix stays the same, so tied matrices become two matrices. A model without this norm is returned
    unchanged. The scale factors of the embeddings must be folded before (`fold_scales`), because they are applied
    before the norm.
    """
    config = model.config
    if not config.embedding_norm:
        return model
    assert config.embedding_factor == 1, "call fold_scales before"
    assert not config.embedding_scale, "call fold_scales before"
    weights = dict(model.weights)
    norm_weight = weights.pop("embedding_norm.weight")
    norm_bias = weights.pop("embedding_norm.bias", None)
    embedding = weights["vocabulary.embedding.weight"]
    normalized = torch.layer_norm(embedding, norm_weight.shape, norm_weight, norm_bias, config.norm_eps)
    new_weights = {
        "vocabulary.embedding.weight": normalized,
        "vocabulary.output.weight": weights.get("vocabulary.output.weight", embedding),
    }
    return replace(model, weights=weights).with_changes(
        "the norm after the embeddings was applied to the embedding matrix",
        new_weights,
        embedding_norm=False,
        tie_embeddings=False,
    )


def add_zero_biases(model: ExportModel) -> ExportModel:
    """Add biases of zero to all linear layers and norms that have no bias."""
    module_names = []
    for prefix in layer_prefixes(model.config):
        module_names += [
            f"{prefix}attention.qkv",
            f"{prefix}attention.out",
            f"{prefix}ffn.wide",
            f"{prefix}ffn.narrow",
            f"{prefix}attention_norm",
            f"{prefix}ffn_norm",
        ]
    module_names += ["final_norm", "embedding_norm"]
    new_weights = {}
    for module_name in module_names:
        weight = model.weights.get(f"{module_name}.weight")
        if weight is not None and f"{module_name}.bias" not in model.weights:
            new_weights[f"{module_name}.bias"] = torch.zeros(len(weight))
    if not new_weights:
        return model
    return model.with_changes(
        "missing biases were set to zero",
        new_weights,
        biases=True,
        attention_biases=None,
        feedforward_biases=None,
        norm_biases=None,
    )
