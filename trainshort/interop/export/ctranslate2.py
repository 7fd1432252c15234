"""Export target `ctranslate2`: the format of CTranslate2.

CTranslate2 extends its ALiBi table by at most 2,048 tokens per call, and reads past the end of the table if the first
input is longer. Call CTranslate2 with a short input before a long input.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
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
from trainshort.interop.export.transforms import ALIBI_REQUIREMENTS, Requirement, fold_scales
from trainshort.utils.io import read_json
from trainshort.utils.optional import require_package

REQUIREMENTS = (
    *ALIBI_REQUIREMENTS,
    Requirement(lambda c: c.activation != "silu", "activation silu", "Train with relu, gelu or gelu_tanh."),
    Requirement(
        lambda c: c.position_settings.max_bias == 8,
        "max_bias {config.position_settings.max_bias}",
        "Only 8 is supported.",
    ),
    Requirement(lambda c: c.clip_qkv is None, "clip_qkv {config.clip_qkv}", "Train without clip_qkv."),
)

# CTranslate2 extends its ALiBi table by at most this number of tokens in one call.
ALIBI_TABLE_GROWTH = 2048


def write(folder: Path, run: ExportSource) -> None:
    """Write the model and its vocabulary in the format of CTranslate2.

    Args:
        folder: The folder to write to.
        run: The model to export.

    Raises:
        InputError: If CTranslate2 is not installed.
    """
    require_package("ctranslate2", "Writing a CTranslate2 model", "trainshort[interop]")
    config = run.model.config
    spec = _make_model_spec(run)
    _fill_decoder(spec.decoder, run)

    tokens = list_tokens(run.tokenizer, config.vocab_size)
    # If the tokenizer has no end token, the first token takes its place.
    end_token_id = 0
    if run.tokenizer is not None and run.tokenizer.end is not None:
        end_token_id = run.tokenizer.end
    end_token = tokens[end_token_id]
    spec.config.layer_norm_epsilon = config.norm_eps
    spec.config.bos_token = end_token
    spec.config.eos_token = end_token
    spec.config.unk_token = end_token
    spec.register_vocabulary(tokens)
    spec.validate()
    spec.save(str(folder))


def _make_model_spec(run: ExportSource) -> Any:
    """Create the specification of a model for CTranslate2. It describes the layers, and gets its weights later."""
    from ctranslate2 import specs

    config = run.model.config
    activations = {
        "relu": specs.Activation.RELU,
        "gelu": specs.Activation.GELU,
        "gelu_tanh": specs.Activation.GELUTanh,
    }
    uses_grouped_query_attention = config.key_heads != config.heads
    return specs.TransformerDecoderModelSpec.from_config(
        config.layers,
        config.heads,
        pre_norm=True,
        activation=activations[config.activation],
        layernorm_embedding=config.embedding_norm,
        no_final_norm=not config.final_norm,
        alibi=True,
        num_heads_kv=config.key_heads if uses_grouped_query_attention else None,
    )


def _fill_decoder(decoder: Any, run: ExportSource) -> None:
    """Copy the weights of a model into the decoder of a CTranslate2 specification.

    Args:
        decoder: The decoder of the specification. It has one attribute for each module of the model.
        run: The model to export.
    """
    weights = run.model.weights
    embedding = weights["vocabulary.embedding.weight"]
    output = weights.get("vocabulary.output.weight", embedding)  # Tied matrices are stored once.
    decoder.scale_embeddings = False  # `fold_scales` has already multiplied the embeddings by their scale.
    decoder.embeddings.weight = _to_numpy(embedding)
    decoder.projection.weight = _to_numpy(output)
    if "final_norm.weight" in weights:
        _fill_norm(decoder.layer_norm, weights, "final_norm")
    if "embedding_norm.weight" in weights:
        _fill_norm(decoder.layernorm_embedding, weights, "embedding_norm")
    for index, layer in enumerate(decoder.layer):
        prefix = f"layers.{index}."
        _fill_norm(layer.self_attention.layer_norm, weights, prefix + "attention_norm")
        _fill_linear(layer.self_attention.linear[0], weights, prefix + "attention.qkv")
        _fill_linear(layer.self_attention.linear[1], weights, prefix + "attention.out")
        _fill_norm(layer.ffn.layer_norm, weights, prefix + "ffn_norm")
        _fill_linear(layer.ffn.linear_0, weights, prefix + "ffn.wide")
        _fill_linear(layer.ffn.linear_1, weights, prefix + "ffn.narrow")


def list_tokens(tokenizer: Tokenizer | None, vocab_size: int) -> list[str]:
    """Return a text for each token id, which CTranslate2 requires.

    Args:
        tokenizer: The tokenizer, or None.
        vocab_size: The number of tokens of the model.

    Returns:
        The texts of the tokenizer. Tokens without a text are called `<token0>`, `<token1>` and so on.
    """
    tokens = [f"<token{token_id}>" for token_id in range(vocab_size)]
    if tokenizer is None:
        return tokens
    layout = json.loads(tokenizer.to_json())  # the content of a tokenizer.json
    vocabulary = layout["model"].get("vocab")
    token_ids = {}
    if isinstance(vocabulary, dict):
        token_ids.update(vocabulary)
    # Special tokens are listed separately.
    for added_token in layout.get("added_tokens") or ():
        token_ids[added_token["content"]] = added_token["id"]
    for token, token_id in token_ids.items():
        tokens[token_id] = token
    return tokens


def _to_numpy(weight: Tensor) -> np.ndarray:
    """Return the values of a tensor as a float32 array."""
    return weight.detach().float().contiguous().numpy()


def _fill_linear(spec: Any, weights: dict[str, Tensor], name: str) -> None:
    """Copy the weight and the bias of a linear layer into its CTranslate2 specification."""
    spec.weight = _to_numpy(weights[f"{name}.weight"])
    if f"{name}.bias" in weights:
        spec.bias = _to_numpy(weights[f"{name}.bias"])


def _fill_norm(spec: Any, weights: dict[str, Tensor], name: str) -> None:
    """Copy a LayerNorm into its CTranslate2 specification. A missing bias becomes zero."""
    weight = weights[f"{name}.weight"]
    bias = weights.get(f"{name}.bias", torch.zeros_like(weight))
    spec.gamma = _to_numpy(weight)
    spec.beta = _to_numpy(bias)


class CTranslate2(Runtime):
    """An export that is loaded in CTranslate2, on the CPU and in float32."""

    package = "ctranslate2"

    def __init__(self, folder: Path, max_length: int) -> None:
        """Load an exported model from a folder. `max_length` is the length of the longest input that will be read."""
        import ctranslate2

        self.generator = ctranslate2.Generator(str(folder), device="cpu", compute_type="float32")
        self.tokens = read_json(folder / "vocabulary.json", hint=EXPORT_AGAIN_HINT)
        # CTranslate2 stores the ALiBi bias of each distance in a table. A call extends the table by a limited number of
        # tokens. Therefore inputs of growing length are run, until the table covers inputs of `max_length` tokens.
        for length in range(1, max_length + 1, ALIBI_TABLE_GROWTH - 1):
            tokens = [0] * length
            self.generator.forward_batch([tokens])

    def log_probabilities(
        self, tokens: list[int]
    ) -> tuple[Int64[Tensor, " positions"], Float[Tensor, "positions vocab"]]:
        """Return the log-probabilities of the next token at the last positions of an input.

        Returns:
            The positions, and the log-probabilities of all tokens at each position.
        """
        batch_logits = self.generator.forward_batch([tokens])
        logits = torch.from_numpy(np.array(batch_logits))[0]  # (length, vocab)
        return last_log_probabilities(logits)

    def generate_greedy(self, tokens: list[int], count: int) -> list[int]:
        """Return the `count` tokens that the program generates after a prompt without sampling."""
        # CTranslate2 reads the texts of the tokens, and not their ids.
        prompt = [self.tokens[token] for token in tokens]
        # With `sampling_topk=1`, each generated token is the most likely token.
        results = self.generator.generate_batch(
            [prompt], max_length=count, min_length=count, sampling_topk=1, include_prompt_in_result=False
        )
        return results[0].sequences_ids[0]


CTRANSLATE2 = ExportTarget(
    requirements=REQUIREMENTS,
    transform=fold_scales,
    write=write,
    runtime=CTranslate2,
    max_errors={"f32": MaxError(logits=1e-4, kl=1e-6)},
    loading="ctranslate2.Generator; call it once with a short prompt before a long prompt",
)
