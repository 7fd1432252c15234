"""`doctor`: finds every known defect of transformers' classes, and none where there is none."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hugging import make_model as make  # noqa: E402
from random_runs import make_run  # noqa: E402
from transformers.models.bloom import modeling_bloom  # noqa: E402
from transformers.models.falcon import modeling_falcon  # noqa: E402
from transformers.models.mpt import modeling_mpt  # noqa: E402

from trainshort import InputError, doctor, patch  # noqa: E402
from trainshort.cli.main import main  # noqa: E402
from trainshort.interop.export import export  # noqa: E402

ODD = {"alibi_bias_max": 16, "logit_scale": 2.0, "no_bias": False, "expansion_ratio": 2}
ODD_ATTENTION = {"qk_ln": True, "prefix_lm": True, "kv_n_heads": 2}
EVERYWHERE = {"PACKED", "QUADRATIC"}


def found(model) -> dict[str, list]:
    """Findings by id."""
    diagnosis = doctor(model)
    assert diagnosis.ok == (not diagnosis.findings)
    return {each.id: [one for one in diagnosis.findings if one.id == each.id] for each in diagnosis.findings}


def test_an_mpt():
    findings = found(make("mpt"))
    assert findings.keys() == {"MPT-LENGTH", *EVERYWHERE}
    assert findings["MPT-LENGTH"][0].measured == 32
    assert str(findings["MPT-LENGTH"][0]) == (
        "MPT-LENGTH: more than 32 tokens, and generating past them, end in RuntimeError (32 tokens). "
        "Cure: trainshort.patch(model), or a larger max_seq_len in its config."
    )
    assert findings["QUADRATIC"][0].measured == pytest.approx(6 * 4096**2 * 4 / 2**20, rel=0.02)
    assert findings["PACKED"][0].measured > 0.1


def test_settings_that_an_mpt_ignores():
    findings = found(make("mpt", **ODD, attn_config=dict(ODD_ATTENTION)))
    assert findings.keys() == {"MPT-LENGTH", "MPT-BIASMAX", "MPT-IGNORED", *EVERYWHERE}
    assert findings["MPT-BIASMAX"][0].measured > 0.1
    told = " ".join(finding.sentence for finding in findings["MPT-IGNORED"])
    for name in ("logit_scale", "no_bias", "expansion_ratio", "qk_ln", "prefix_lm", "kv_n_heads"):
        assert name in told
    diagnosis = doctor(make("mpt", attn_config={"alibi": False, "sliding_window_size": 8}))
    assert diagnosis.notes == ("what concerns ALiBi was not examined: its settings have none",)
    told = " ".join(finding.sentence for finding in diagnosis.findings if finding.id == "MPT-IGNORED")
    assert "sliding_window_size = 8" in told
    assert "attn_config.alibi = False" in told
    assert "learned_pos_emb = True" in told


def test_a_bloom_in_whole_and_half_precision():
    assert found(make("bloom")).keys() == EVERYWHERE
    half = found(make("bloom").bfloat16())
    assert half.keys() == {"BLOOM-HALF", *EVERYWHERE}
    assert half["BLOOM-HALF"][0].measured > 1e-4
    assert "BLOOM-HALF" in found(make("bloom").half())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_falcon(implementation):
    findings = found(make("falcon", implementation))
    assert findings.keys() == {"FALCON-DOUBLE", "FALCON-BF16", "FALCON-STATIC", *EVERYWHERE}
    assert ("output_attentions" in findings["FALCON-DOUBLE"][0].sentence) == (implementation == "sdpa")
    assert findings["FALCON-DOUBLE"][0].measured > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mpt", "bloom", "falcon"])
def test_a_patched_model_is_healthy(kind, dtype):
    model = make(kind, **({"alibi_bias_max": 16} if kind == "mpt" else {"implementation": "eager"})).to(dtype)
    patch(model)
    diagnosis = doctor(model)
    assert diagnosis.ok, str(diagnosis)
    assert "the model is patched" in diagnosis.notes


def test_healthy_models_with_other_positions():
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64}
    for kind in ("Llama", "GPTNeoX"):
        config = getattr(transformers, f"{kind}Config")(**shape, vocab_size=100)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        assert doctor(model).ok, str(doctor(model))
        assert doctor(model.bfloat16()).ok


def test_our_own_class_is_healthy_until_its_slopes_are_rounded(tmp_path):
    export(make_run(tmp_path / "run"), "hf", tmp_path / "out")
    import trainshort.hf  # noqa: F401

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert doctor(model).ok, str(doctor(model))
    assert doctor(tmp_path / "out").ok
    assert not doctor(tmp_path / "out").notes
    for name, buffer in model.named_buffers():
        if name.endswith("slopes"):
            buffer.mul_(1e-9)
    assert found(model).keys() == {"TRAINSHORT-LOST"}


def test_slopes_that_loading_loses(tmp_path, monkeypatch):
    """As our class would be without its own `_init_weights`: transformers gives buffers memory without content."""
    export(make_run(tmp_path / "run"), "hf", tmp_path / "out")
    import trainshort.hf as ours

    monkeypatch.setattr(ours.TrainshortForCausalLM, "_init_weights", transformers.PreTrainedModel._init_weights)
    assert found(tmp_path / "out").keys() == {"TRAINSHORT-LOST"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    lost = found(loaded)
    assert lost.keys() == {"TRAINSHORT-LOST"}
    assert len(lost["TRAINSHORT-LOST"]) == 2  # what loading does, and what this one has


def test_a_repaired_library_is_healthy(monkeypatch):
    """What is probed is what a class does: with transformers' own functions repaired, the findings are gone."""
    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", modeling_bloom.build_alibi_tensor)
    assert "FALCON-BF16" not in found(make("falcon"))
    build = modeling_mpt.build_mpt_alibi_tensor
    monkeypatch.setattr(modeling_mpt, "build_mpt_alibi_tensor", lambda h, n, most, device: build(h, n, 16, device))
    assert "MPT-BIASMAX" not in found(make("mpt", alibi_bias_max=16))


def test_slopes_that_are_gone_are_lost(monkeypatch):
    build = modeling_mpt.build_mpt_alibi_tensor
    monkeypatch.setattr(modeling_mpt, "build_mpt_alibi_tensor", lambda *given: 0 * build(*given))
    assert "MPT-LOST" in found(make("mpt"))
    with pytest.raises(InputError, match="differs by"):  # and no such model is patched
        patch(make("mpt"))


def test_stored_biases_without_a_place(tmp_path):
    model = make("mpt")
    state = model.state_dict()
    state["transformer.blocks.0.attn.Wqkv.bias"] = torch.zeros(144)
    model.save_pretrained(tmp_path, state_dict=state)
    findings = found(tmp_path)
    assert findings["MPT-IGNORED"][0].measured == 1
    assert "transformer.blocks.0.attn.Wqkv.bias" in findings["MPT-IGNORED"][0].sentence


def test_the_command(tmp_path, capsys):
    make("mpt").save_pretrained(tmp_path / "mpt")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(tmp_path / "mpt"), "--json"])
    assert ended.value.code == 1
    told = json.loads(capsys.readouterr().out)
    assert [finding["id"] for finding in told["findings"]] == ["MPT-LENGTH", "PACKED", "QUADRATIC"]
    assert told["healthy"] is False
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, vocab_size=100)).save_pretrained(tmp_path / "llama")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(tmp_path / "llama")])
    assert ended.value.code == 0
    assert "healthy." in capsys.readouterr().out


def test_nobody_elses_randomness_and_model_are_touched():
    model, state = make("bloom"), torch.get_rng_state()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    doctor(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_wrong_inputs(tmp_path):
    with pytest.raises(
        InputError, match=r"^doctor takes a model of transformers, its folder or its name; .* Linear\.$"
    ):
        doctor(torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"^MptModel has no logits for every token; give the causal language model\.$"):
        doctor(make("mpt").transformer)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "baichuan", "auto_map": {"AutoConfig": "a.B"}}))
    (tmp_path / "a.py").write_text("raise SystemExit('executed')")
    with pytest.raises(
        InputError, match=r"is a model of type 'baichuan', for which transformers gives no class of its"
    ):
        doctor(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mpt", "d_model": 10**6, "n_heads": 10**6}))
    with pytest.raises(InputError, match=r"^The config says 1,000,000 heads; a copy with more than 512 would not be"):
        doctor(tmp_path)
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 3, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    with pytest.raises(InputError, match=r"^No copy of this LlamaForCausalLM could be examined \(RuntimeError: "):
        doctor(tmp_path)
    with pytest.raises(InputError, match="is a file; give the folder of a saved Hugging Face model"):
        doctor(tmp_path / "a.py")
