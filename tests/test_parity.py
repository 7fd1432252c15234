"""The same weights give the same logits as Hugging Face's MPT and BLOOM, at and past the length they were made for."""

import pytest
import torch

from trainshort import ModelConfig, TransformerLM

transformers = pytest.importorskip("transformers")

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 96, 6, 3, 131, 64


def copy(ours: torch.nn.Module, theirs: torch.nn.Module, pairs: dict[str, str], layers: int) -> None:
    """Copy weights by name; `{}` stands for the layer. Nothing may be left over on our side."""
    source, target = theirs.state_dict(), ours.state_dict()
    names = {}
    for a, b in pairs.items():
        indices = range(layers) if "{}" in a else [0]
        names |= {a.format(i): b.format(i) for i in indices}
    assert set(names) == set(target), set(names) ^ set(target)
    ours.load_state_dict({a: source[b] for a, b in names.items()})


def louder(model: torch.nn.Module) -> None:
    """First weights are so small that attention is nearly uniform; louder ones make every part of the formula show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name and "wte" not in name:
                parameter.mul_(5)


def make_mpt():
    torch.manual_seed(0)
    theirs = transformers.MptForCausalLM(
        transformers.MptConfig(
            d_model=WIDTH,
            n_heads=HEADS,
            n_layers=LAYERS,
            vocab_size=VOCABULARY,
            max_seq_len=2 * LENGTH,  # MPT builds a bias of this size and fails past it
        )
    )
    louder(theirs)
    ours = TransformerLM(ModelConfig(vocabulary=VOCABULARY, width=WIDTH, heads=HEADS, layers=LAYERS, biases=False))
    pairs = {
        "vocabulary.embedding.weight": "transformer.wte.weight",
        "final_norm.weight": "transformer.norm_f.weight",
        "layers.{}.attention_norm.weight": "transformer.blocks.{}.norm_1.weight",
        "layers.{}.attention.qkv.weight": "transformer.blocks.{}.attn.Wqkv.weight",
        "layers.{}.attention.out.weight": "transformer.blocks.{}.attn.out_proj.weight",
        "layers.{}.ffn_norm.weight": "transformer.blocks.{}.norm_2.weight",
        "layers.{}.ffn.wide.weight": "transformer.blocks.{}.ffn.up_proj.weight",
        "layers.{}.ffn.narrow.weight": "transformer.blocks.{}.ffn.down_proj.weight",
    }
    copy(ours, theirs, pairs, LAYERS)
    return ours.eval(), theirs.eval()


def make_bloom():
    torch.manual_seed(0)
    theirs = transformers.BloomForCausalLM(
        transformers.BloomConfig(hidden_size=WIDTH, n_head=HEADS, n_layer=LAYERS, vocab_size=VOCABULARY)
    )
    louder(theirs)
    ours = TransformerLM(
        ModelConfig(
            vocabulary=VOCABULARY,
            width=WIDTH,
            heads=HEADS,
            layers=LAYERS,
            activation="gelu_tanh",
            embedding_norm=True,
        )
    )
    pairs = {"vocabulary.embedding.weight": "transformer.word_embeddings.weight"}
    for kind in ("weight", "bias"):
        pairs |= {
            f"embedding_norm.{kind}": f"transformer.word_embeddings_layernorm.{kind}",
            f"final_norm.{kind}": f"transformer.ln_f.{kind}",
            f"layers.{{}}.attention_norm.{kind}": f"transformer.h.{{}}.input_layernorm.{kind}",
            f"layers.{{}}.attention.qkv.{kind}": f"transformer.h.{{}}.self_attention.query_key_value.{kind}",
            f"layers.{{}}.attention.out.{kind}": f"transformer.h.{{}}.self_attention.dense.{kind}",
            f"layers.{{}}.ffn_norm.{kind}": f"transformer.h.{{}}.post_attention_layernorm.{kind}",
            f"layers.{{}}.ffn.wide.{kind}": f"transformer.h.{{}}.mlp.dense_h_to_4h.{kind}",
            f"layers.{{}}.ffn.narrow.{kind}": f"transformer.h.{{}}.mlp.dense_4h_to_h.{kind}",
        }
    copy(ours, theirs, pairs, LAYERS)
    for layer in ours.layers:  # BLOOM keeps q, k and v of each head together; we keep all q, all k, all v
        for parameter in layer.attention.qkv.parameters():
            by_head = parameter.data.unflatten(0, (HEADS, 3, -1))
            parameter.data = by_head.transpose(0, 1).flatten(0, 2).contiguous()
    return ours.eval(), theirs.eval()


@pytest.mark.parametrize("make", [make_mpt, make_bloom], ids=["mpt", "bloom"])
@pytest.mark.parametrize("times", [1, 2])
def test_logits_are_hugging_faces(make, times):
    ours, theirs = make()
    with torch.no_grad():
        tokens = torch.randint(VOCABULARY, (2, times * LENGTH))
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-4)
        assert expected.std() > 0.05
