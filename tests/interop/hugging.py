"""Small random models of the three ALiBi classes of Hugging Face, and correct float64 references of them."""

import copy

import torch
import transformers
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon

WORDS, WIDTH, HEADS, LAYERS, LENGTH = 131, 48, 6, 2, 32


def make(kind: str, implementation: str | None = None, **settings):
    torch.manual_seed(1)
    match kind:
        case "mpt":
            most = settings.pop("alibi_bias_max", 8)
            shape = {"d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": LENGTH, "use_cache": True}
            attention = {"alibi": True, "alibi_bias_max": most} | settings.pop("attn_config", {})
            config = transformers.MptConfig(**shape, vocab_size=WORDS, attn_config=attention, **settings)
        case "bloom":
            shape = {"hidden_size": WIDTH, "n_head": HEADS, "n_layer": LAYERS}
            config = transformers.BloomConfig(**shape, vocab_size=WORDS, **settings)
        case "falcon":
            shape = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
            plain = {"multi_query": False, "parallel_attn": False, "bias": True, "new_decoder_architecture": False}
            config = transformers.FalconConfig(**shape, vocab_size=WORDS, **{"alibi": True} | plain | settings)
    asked = {} if implementation is None else {"attn_implementation": implementation}
    model = transformers.AutoModelForCausalLM.from_config(config, **asked).eval()
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    model.generation_config.pad_token_id = 0
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.normal_(0, weight.shape[1] ** -0.5)
    return model


def right(model):
    """Return a copy of the model in float64 with the known bugs of its class corrected.

    MPT limits the length and ignores `alibi_bias_max`. Falcon rounds the bias and adds it twice in eager attention.
    """
    model = copy.deepcopy(model).double()
    body = model.transformer
    if hasattr(body, "build_mpt_alibi_tensor"):
        model.config.max_seq_len, build = 4096, type(body).build_mpt_alibi_tensor
        most = model.config.attn_config.alibi_bias_max
        body.build_mpt_alibi_tensor = lambda heads, length, device=None: build(body, heads, length, most, device)
    if hasattr(body, "use_alibi"):
        model.config._attn_implementation = "sdpa"
    return model


def unrounded(monkeypatch):
    """Let Falcon build its bias with the function of BLOOM, which does not round to bfloat16."""
    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", modeling_bloom.build_alibi_tensor)


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference in standard deviations of `b`."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.std())
