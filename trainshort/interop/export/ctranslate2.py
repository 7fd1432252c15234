"""CTranslate2: every plain configuration exactly, and the sharpest independent check of an export.

Its ALiBi table grows by 2,048 a call and no more, so that a first prompt longer than that is read past its end;
whoever runs long prompts calls it once with a short one (`warm`).
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainshort.data.tokenizers.base import Tokenizer
from trainshort.interop.export.base import (
    EXPORT_AGAIN_HINT,
    ExportSource,
    ExportTarget,
    MaxError,
    Runtime,
    last_log_probabilities,
)
from trainshort.interop.export.transforms import PLAIN_ALIBI, ExportModel, Requirement, fold_scales
from trainshort.utils.io import read_json
from trainshort.utils.optional import require_package

NEEDS = (
    *PLAIN_ALIBI,
    Requirement(lambda c: c.activation != "silu", "activation silu", "train with relu, gelu or gelu_tanh"),
    Requirement(
        lambda c: c.position_settings.max_bias == 8,
        "max_bias {config.position_settings.max_bias}",
        "it follows 8 alone",
    ),
    Requirement(lambda c: c.clip_qkv is None, "clip_qkv {config.clip_qkv}", "train without clip_qkv"),
)
GROWTH = 2048
"""Keys by which its table grows in a call."""


def rewritten(model: ExportModel) -> ExportModel:
    return fold_scales(model)


def write(folder: Path, run: ExportSource) -> None:
    """Write the model and its vocabulary in the format of CTranslate2."""
    require_package("ctranslate2", "Writing a CTranslate2 model", "trainshort[interop]")
    from ctranslate2 import specs

    config, weights, tokenizer = run.model.config, run.model.weights, run.tokenizer
    activations = {
        "relu": specs.Activation.RELU,
        "gelu": specs.Activation.GELU,
        "gelu_tanh": specs.Activation.GELUTanh,
    }
    spec: Any = specs.TransformerDecoderModelSpec.from_config(
        config.layers,
        config.heads,
        pre_norm=True,
        activation=activations[config.activation],
        layernorm_embedding=config.embedding_norm,
        no_final_norm=not config.final_norm,
        alibi=True,
        num_heads_kv=None if config.key_heads == config.heads else config.key_heads,
    )
    decoder: Any = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = _array(weights["vocabulary.embedding.weight"])
    output = weights.get("vocabulary.output.weight", weights["vocabulary.embedding.weight"])
    decoder.projection.weight = _array(output)
    norms = {"final_norm": "layer_norm", "embedding_norm": "layernorm_embedding"}
    for ours, theirs in norms.items():
        if f"{ours}.weight" in weights:
            _norm(getattr(decoder, theirs), weights, ours)
    for index, layer in enumerate(decoder.layer):
        at = f"layers.{index}."
        _norm(layer.self_attention.layer_norm, weights, at + "attention_norm")
        _linear(layer.self_attention.linear[0], weights, at + "attention.qkv")
        _linear(layer.self_attention.linear[1], weights, at + "attention.out")
        _norm(layer.ffn.layer_norm, weights, at + "ffn_norm")
        _linear(layer.ffn.linear_0, weights, at + "ffn.wide")
        _linear(layer.ffn.linear_1, weights, at + "ffn.narrow")
    words = vocabulary(tokenizer, config.vocab_size)
    end = words[tokenizer.end if tokenizer is not None and tokenizer.end is not None else 0]
    spec.config.layer_norm_epsilon = config.norm_eps
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = end
    spec.register_vocabulary(words)
    spec.validate()
    spec.save(str(folder))


def vocabulary(tokenizer: Tokenizer | None, size: int) -> list[str]:
    """A string for every token, as the engine wants; those of our tokenizer where it is a saved one."""
    import json

    words = [f"<token{number}>" for number in range(size)]
    if tokenizer is None:
        return words
    layout = json.loads(tokenizer.to_json())
    known = layout["model"].get("vocab")
    ids = dict(known) if isinstance(known, dict) else {}
    ids |= {one["content"]: one["id"] for one in layout.get("added_tokens") or ()}
    for word, number in ids.items():
        words[number] = word
    return words


def _array(weight: torch.Tensor) -> np.ndarray:
    return weight.detach().float().contiguous().numpy()


def _linear(spec: Any, weights: dict[str, torch.Tensor], name: str) -> None:
    spec.weight = _array(weights[f"{name}.weight"])
    if f"{name}.bias" in weights:
        spec.bias = _array(weights[f"{name}.bias"])


def _norm(spec: Any, weights: dict[str, torch.Tensor], name: str) -> None:
    weight = weights[f"{name}.weight"]
    spec.gamma = _array(weight)
    spec.beta = _array(weights.get(f"{name}.bias", torch.zeros_like(weight)))


class CTranslate2(Runtime):
    package = "ctranslate2"

    def __init__(self, folder: Path, longest: int) -> None:
        import ctranslate2

        self.generator = ctranslate2.Generator(str(folder), device="cpu", compute_type="float32")
        self.words = read_json(folder / "vocabulary.json", hint=EXPORT_AGAIN_HINT)
        for length in range(1, longest + 1, GROWTH - 1):
            self.generator.forward_batch([[0] * length])  # its table grows by so much a call, and no more

    def log_probabilities(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        return last_log_probabilities(torch.from_numpy(np.array(self.generator.forward_batch([tokens])))[0])

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        prompt = [[self.words[token] for token in tokens]]
        limits = {"max_length": count, "min_length": count, "sampling_topk": 1}
        made = self.generator.generate_batch(prompt, include_prompt_in_result=False, **limits)
        return made[0].sequences_ids[0]


CTRANSLATE2 = ExportTarget(
    summary="CTranslate2, as its own decoder",
    requirements=NEEDS,
    transform=rewritten,
    write=write,
    runtime=CTranslate2,
    max_errors={"f32": MaxError(logits=1e-4, kl=1e-6)},
    loading="ctranslate2.Generator; call it once with a short prompt before a long one",
)
