"""`doctor` finds every known bug of the classes of transformers, and reports no bug of correct classes."""

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


def test_findings_of_an_mpt():
    findings = found(make("mpt"))
    assert findings.keys() == {"MPT-LENGTH", *EVERYWHERE}
    assert findings["MPT-LENGTH"][0].measured == 32
    line = str(findings["MPT-LENGTH"][0])
    assert line.startswith("MPT-LENGTH: inputs of more than 32 tokens raise RuntimeError")
    assert "Fix: trainshort.patch(model)" in line
    assert "max_seq_len" in line
    assert findings["QUADRATIC"][0].measured == pytest.approx(6 * 4096**2 * 4 / 2**20, rel=0.02)
    assert findings["PACKED"][0].measured > 0.1


def test_ignored_settings_of_an_mpt():
    findings = found(make("mpt", **ODD, attn_config=dict(ODD_ATTENTION)))
    assert findings.keys() == {"MPT-LENGTH", "MPT-BIASMAX", "MPT-IGNORED", *EVERYWHERE}
    assert findings["MPT-BIASMAX"][0].measured > 0.1
    output = " ".join(finding.sentence for finding in findings["MPT-IGNORED"])
    for name in ("logit_scale", "no_bias", "expansion_ratio", "qk_ln", "prefix_lm", "kv_n_heads"):
        assert name in output
    diagnosis = doctor(make("mpt", attn_config={"alibi": False, "sliding_window_size": 8}))
    assert diagnosis.notes == ("the checks of ALiBi were skipped, because the config disables ALiBi",)
    output = " ".join(finding.sentence for finding in diagnosis.findings if finding.id == "MPT-IGNORED")
    assert "sliding_window_size = 8" in output
    assert "attn_config.alibi = False" in output
    assert "learned_pos_emb = True" in output


def test_findings_of_a_bloom_in_float32_and_half_precision():
    assert found(make("bloom")).keys() == EVERYWHERE
    half = found(make("bloom").bfloat16())
    assert half.keys() == {"BLOOM-HALF", *EVERYWHERE}
    assert half["BLOOM-HALF"][0].measured > 1e-4
    assert "BLOOM-HALF" in found(make("bloom").half())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_findings_of_a_falcon(implementation):
    findings = found(make("falcon", implementation))
    assert findings.keys() == {"FALCON-DOUBLE", "FALCON-BF16", "FALCON-STATIC", *EVERYWHERE}
    assert ("output_attentions" in findings["FALCON-DOUBLE"][0].sentence) == (implementation == "sdpa")
    assert findings["FALCON-DOUBLE"][0].measured > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mpt", "bloom", "falcon"])
def test_patched_model_has_no_findings(kind, dtype):
    model = make(kind, **({"alibi_bias_max": 16} if kind == "mpt" else {"implementation": "eager"})).to(dtype)
    patch(model)
    diagnosis = doctor(model)
    assert diagnosis.ok, str(diagnosis)
    assert "the model is patched" in diagnosis.notes


def test_models_without_alibi_have_no_findings():
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64}
    for kind in ("Llama", "GPTNeoX"):
        config = getattr(transformers, f"{kind}Config")(**shape, vocab_size=100)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        assert doctor(model).ok, str(doctor(model))
        assert doctor(model.bfloat16()).ok


def test_trainshort_class_has_no_findings_until_its_slopes_change(tmp_path):
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


def test_slopes_lost_by_loading_are_found(tmp_path, monkeypatch):
    """Without `_init_weights` of our class, transformers leaves the buffers uninitialized."""
    export(make_run(tmp_path / "run"), "hf", tmp_path / "out")
    import trainshort.hf as ours

    monkeypatch.setattr(ours.TrainshortForCausalLM, "_init_weights", transformers.PreTrainedModel._init_weights)
    assert found(tmp_path / "out").keys() == {"TRAINSHORT-LOST"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    lost = found(loaded)
    assert lost.keys() == {"TRAINSHORT-LOST"}
    assert len(lost["TRAINSHORT-LOST"]) == 2  # what loading does, and what this one has


def test_fixed_library_has_no_findings(monkeypatch):
    """`doctor` observes what a class computes: with the bugs of transformers fixed, it finds nothing."""
    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", modeling_bloom.build_alibi_tensor)
    assert "FALCON-BF16" not in found(make("falcon"))
    build = modeling_mpt.build_mpt_alibi_tensor
    monkeypatch.setattr(modeling_mpt, "build_mpt_alibi_tensor", lambda h, n, most, device: build(h, n, 16, device))
    assert "MPT-BIASMAX" not in found(make("mpt", alibi_bias_max=16))


def test_missing_bias_is_found(monkeypatch):
    build = modeling_mpt.build_mpt_alibi_tensor
    monkeypatch.setattr(modeling_mpt, "build_mpt_alibi_tensor", lambda *given: 0 * build(*given))
    assert "MPT-LOST" in found(make("mpt"))
    with pytest.raises(InputError, match="outputs would change by"):  # `patch` does not change such a model.
        patch(make("mpt"))


def test_unused_stored_biases_are_found(tmp_path):
    model = make("mpt")
    state = model.state_dict()
    state["transformer.blocks.0.attn.Wqkv.bias"] = torch.zeros(144)
    model.save_pretrained(tmp_path, state_dict=state)
    findings = found(tmp_path)
    assert findings["MPT-IGNORED"][0].measured == 1
    assert "transformer.blocks.0.attn.Wqkv.bias" in findings["MPT-IGNORED"][0].sentence


def test_command_exits_with_1_if_there_are_findings(tmp_path, capsys):
    make("mpt").save_pretrained(tmp_path / "mpt")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(tmp_path / "mpt"), "--json"])
    assert ended.value.code == 1
    output = json.loads(capsys.readouterr().out)
    assert [finding["id"] for finding in output["findings"]] == ["MPT-LENGTH", "PACKED", "QUADRATIC"]
    assert output["healthy"] is False
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, vocab_size=100)).save_pretrained(tmp_path / "llama")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(tmp_path / "llama")])
    assert ended.value.code == 0
    assert "no problems found" in capsys.readouterr().out


def test_random_state_and_model_are_not_changed():
    model, state = make("bloom"), torch.get_rng_state()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    doctor(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_invalid_inputs_raise_input_errors(tmp_path):
    with pytest.raises(InputError, match=r"^Expected a model of transformers, .* got Linear\.$"):
        doctor(torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"^MptModel is not a causal language model\."):
        doctor(make("mpt").transformer)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "baichuan", "auto_map": {"AutoConfig": "a.B"}}))
    (tmp_path / "a.py").write_text("raise SystemExit('executed')")
    with pytest.raises(InputError, match=r"does not support .* of type 'baichuan'"):
        doctor(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mpt", "d_model": 10**6, "n_heads": 10**6}))
    with pytest.raises(InputError, match=r"1,000,000 attention heads\. At most 512"):
        doctor(tmp_path)
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 3, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    with pytest.raises(InputError, match=r"^Cannot run a small copy of this LlamaForCausalLM \(RuntimeError: "):
        doctor(tmp_path)
    with pytest.raises(InputError, match=r"got the file .*a\.py"):
        doctor(tmp_path / "a.py")
