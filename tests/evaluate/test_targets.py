"""Tests of the models that can be evaluated: runs, checkpoints and Hugging Face models."""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_run, random_tokens, save_hugging_face
from safetensors.torch import load_file, save_file

from trainshort.config.run_config import load_config
from trainshort.data.passes import Passes
from trainshort.errors import InputError
from trainshort.evaluate.hf_target import HuggingFaceTarget
from trainshort.evaluate.sweep import Sweep, score, score_length
from trainshort.evaluate.targets import RunTarget, looks_like_hub_name, open_target
from trainshort.interop.doctor import doctor
from trainshort.interop.import_model import ImportRequest, import_model
from trainshort.train.checkpoint import fingerprint
from trainshort.train.metrics_log import append_line
from trainshort.train.run_data import open_run_data
from trainshort.utils.machine import pick_device


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("targets")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return make_run(folder)


def open_hugging_face(folder: Path, kind: str) -> HuggingFaceTarget:
    """Open a tiny Hugging Face model. The model is saved in the first call."""
    path = folder / kind
    if not path.exists():
        save_hugging_face(path, kind)
    target = open_target(str(path))
    assert isinstance(target, HuggingFaceTarget)
    return target


def change_config(model_folder: Path, changes: dict) -> None:
    """Change settings in the config.json of a saved model."""
    path = model_folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | changes))


# ---- runs


def test_run_is_its_best_checkpoint(run: Path):
    run_target = open_target(str(run))
    checkpoint_target = open_target(str(run / "checkpoints" / "step-000000005"))
    assert isinstance(run_target, RunTarget)
    assert (run_target.kind, run_target.name) == ("run", "tiny")
    assert (checkpoint_target.kind, checkpoint_target.name) == ("checkpoint", "tiny step 5")
    assert run_target.folder == checkpoint_target.folder == run
    assert run_target.trained_at == 16
    description = run_target.description()
    assert description["weights"] == checkpoint_target.description()["weights"]
    assert (description["step"], description["position"]) == (5, "alibi")


def test_data_that_changed_since_training_is_rejected(run: Path, tmp_path):
    run_copy = Path(shutil.copytree(run, tmp_path / "copy"))
    sessions_path = run_copy / "sessions.jsonl"
    train_data = (run.parent.parent / "tiny-data" / "train.bin").read_bytes()
    sha256 = hashlib.sha256(train_data).hexdigest()
    data_config = load_config(run_copy / "config.json").data
    append_line(sessions_path, {"data": sha256})
    assert open_run_data(run_copy, data_config).meta.splits["train"].sha256 == sha256

    sessions_path.unlink()
    append_line(sessions_path, {"data": "0" * 64})
    with pytest.raises(InputError, match="copy"):
        open_run_data(run_copy, data_config)


def test_fingerprint_depends_on_every_weight(run: Path):
    target = open_target(str(run))
    fingerprint_before = fingerprint(target.module)
    with torch.no_grad():
        next(target.module.parameters()).view(-1)[7] += 1e-3
    assert fingerprint(target.module) != fingerprint_before


def test_bfloat16_losses_are_similar_to_float32_losses(run: Path):
    tokens = random_tokens(64, 256)
    target = open_target(str(run), precision="float32")
    bfloat16_target = open_target(str(run), precision="bfloat16")
    losses = np.concatenate(list(score(target, tokens, Passes(64, 16, 16))))
    bfloat16_losses = np.concatenate(list(score(bfloat16_target, tokens, Passes(64, 16, 16))))
    assert 0 < np.abs(losses - bfloat16_losses).mean() < 0.2
    assert target.description()["weights"] != bfloat16_target.description()["weights"]


# ---- losses of Hugging Face models


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "mpt", "llama", "gemma2"])
def test_losses_equal_losses_from_full_logits(folder: Path, kind: str):
    target = open_hugging_face(folder, kind)
    tokens = torch.from_numpy(random_tokens(2 * 41, 300).astype(np.int64)).view(2, 41)
    with torch.no_grad():
        logits = target.model(tokens[:, :-1]).logits.double()
    expected = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    for first in (0, 13):
        losses = target.token_nll(tokens[:, :-1], tokens[:, 1:], first)
        torch.testing.assert_close(losses.double(), expected[:, first:], rtol=1e-4, atol=1e-5)


def test_loss_without_overlap_equals_loss_from_full_logits(folder: Path, tmp_path):
    target = open_hugging_face(folder, "llama")
    tokens = random_tokens(100, 300)
    stream = torch.tensor([target.bos, *tokens.tolist()])
    expected_nll = 0.0
    for start in range(0, 100, 32):
        window = stream[start : min(start + 32, 100) + 1]
        with torch.no_grad():
            logits = target.model(window[None, :-1]).logits[0].double()
        expected_nll -= float(logits.log_softmax(-1).gather(-1, window[1:, None]).sum())
    row = score_length(target, Sweep(tokens, [32]), 32, tmp_path / "losses")
    assert row.tokens == 100
    assert row.nll == pytest.approx(expected_nll, rel=1e-5)


def test_head_is_applied_in_slices_if_possible(folder: Path):
    for kind in ("gpt2", "bloom", "mpt", "llama"):
        assert open_hugging_face(folder, kind)._body_and_head is not None
    # Gemma 2 applies a soft cap after the head.
    assert open_hugging_face(folder, "gemma2")._body_and_head is None


# ---- lengths of Hugging Face models


def test_position_table_limits_the_length(folder: Path, tmp_path):
    target = open_hugging_face(folder, "gpt2")
    assert (target.trained_at, target.max_length) == (64, 64)
    row = score_length(target, Sweep(random_tokens(200, 300), [65]), 65, tmp_path / "losses")
    assert row.status == "cannot"
    assert "64 tokens" in (row.reason or "")


def test_error_past_the_declared_length_is_a_result(folder: Path, tmp_path):
    target = open_hugging_face(folder, "gptj")
    assert target.max_length is None
    row = score_length(target, Sweep(random_tokens(200, 300), [100]), 100, tmp_path / "losses")
    assert row.status == "cannot"
    assert "64 tokens" in (row.reason or "")
    assert target.length_error_reason(RuntimeError("another error"), 64) is None, "64 is the declared length"


def test_models_without_length_limit_support_longer_inputs(folder: Path, tmp_path):
    tokens = random_tokens(200, 300)
    for kind in ("llama", "bloom", "mpt"):
        row = score_length(open_hugging_face(folder, kind), Sweep(tokens, [150]), 150, tmp_path / "losses")
        assert row.status == "scored", kind


def test_alibi_table_of_mpt_is_extended(folder: Path):
    """transformers computes the ALiBi table of MPT up to `max_seq_len`, and fails for longer inputs."""
    target = open_hugging_face(folder, "mpt")
    tokens = random_tokens(100, 300)
    with target.for_length(None, 100):
        (losses_at_100,) = score(target, tokens, Passes(100, 100, 100))
    assert target.model.config.max_seq_len == 64
    losses_at_50 = np.concatenate(list(score(target, tokens, Passes(100, 50, 50))))
    np.testing.assert_allclose(losses_at_100[:50], losses_at_50[:50], rtol=1e-4, atol=1e-5)


def test_training_length_can_be_given(folder: Path):
    open_hugging_face(folder, "bloom")
    assert open_target(str(folder / "bloom")).trained_at is None
    assert open_target(str(folder / "bloom"), trained_at=2048).trained_at == 2048


def test_first_token_is_the_beginning_of_text_token(folder: Path):
    assert open_hugging_face(folder, "llama").bos == 1


# ---- names of models


def test_home_folder_is_expanded(folder: Path, monkeypatch):
    open_hugging_face(folder, "llama")
    monkeypatch.setenv("HOME", str(folder))
    assert open_target("~/llama").vocab_size == 300


@pytest.mark.parametrize("name", ["gpt2", "EleutherAI/pythia-70m", "facebook/opt-125m"])
def test_hub_names_are_recognized(name: str):
    assert looks_like_hub_name(name)


@pytest.mark.parametrize("name", ["runs/mine", "./x", "/a/b", "a/b/c", "~/x", "x/"])
def test_paths_are_not_hub_names(name: str):
    assert not looks_like_hub_name(name)


def test_missing_models_are_rejected(tmp_path):
    with pytest.raises(InputError, match="'runs/nothing'"):
        open_target("runs/nothing")
    with pytest.raises(InputError, match="Give a run folder"):
        open_target(str(tmp_path))
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(InputError, match=r"file\.txt is a file"):
        open_target(str(tmp_path / "file.txt"))
    with pytest.raises(InputError, match=r"'int4'.*float32 or bfloat16"):
        open_target("x", precision="int4")


def test_run_without_checkpoint_is_rejected(run: Path, tmp_path):
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    with pytest.raises(InputError, match="no checkpoint"):
        open_target(str(tmp_path))


def test_run_with_invalid_config_is_rejected(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"config\.json") as caught:
        open_target(str(tmp_path))
    assert "no checkpoint" not in str(caught.value)


def test_hub_name_without_network_is_rejected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"'nobody/nothing'.*not reachable"):
        open_target("nobody/nothing")


def test_command_without_network_prints_one_line(tmp_path):
    """The address of the Hub is a closed port of this machine, so the test does not depend on the network."""
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-m", "trainshort", "evaluate", "nobody/nothing", "--data", "x.txt"],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert process.returncode == 2
    assert len(process.stderr.splitlines()) == 1
    assert "not reachable" in process.stderr


# ---- code and pickle files of Hugging Face models are not run


def save_model_with_custom_code(folder: Path, part: str) -> Path:
    """Save a model that asks for custom Python code. The code would create the file "code-was-run".

    Args:
        folder: The folder of the model.
        part: The part that needs the code: "model" or "tokenizer".
    """
    save_hugging_face(folder, "llama")
    (folder / "custom.py").write_text(f"open({str(folder / 'code-was-run')!r}, 'w')\nclass Own: pass\n")
    if part == "model":
        auto_map = {"AutoConfig": "custom.Own", "AutoModelForCausalLM": "custom.Own"}
        change_config(folder, {"model_type": "own", "architectures": ["Own"], "auto_map": auto_map})
    else:
        path = folder / "tokenizer_config.json"
        changes = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["custom.Own", None]}}
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_custom_code_is_never_run(tmp_path, monkeypatch, part):
    # transformers may ask on the terminal whether the code may be run. The answer is yes.
    monkeypatch.setattr("builtins.input", lambda *question: "y")
    model_folder = save_model_with_custom_code(tmp_path / "own", part)
    with pytest.raises(InputError, match=f"custom Python code for its {part}"):
        open_target(str(model_folder)).tokenizer()
    assert not (model_folder / "code-was-run").exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("value", ["kernels-community/flash-mla", {"": "someone/kernel@main:attend"}], ids=str)
def test_attention_code_from_the_hub_is_never_run(tmp_path, key, value):
    save_hugging_face(tmp_path, "llama")
    change_config(tmp_path, {key: value})
    with pytest.raises(InputError, match=r"custom Python code for its attention \(.*/.*\)"):
        open_target(str(tmp_path))
    with pytest.raises(InputError, match=r"custom Python code for its attention \(.*/.*\)"):
        doctor(tmp_path)


def test_pickle_file_is_never_loaded(tmp_path):
    model_folder = tmp_path / "pickled"
    save_hugging_face(model_folder, "llama")
    (model_folder / "model.safetensors").unlink()
    marker = tmp_path / "code-was-run"

    class CodeInPickle:
        def __reduce__(self):
            return marker.touch, ()

    (model_folder / "pytorch_model.bin").write_bytes(pickle.dumps(CodeInPickle()))
    with pytest.raises(InputError, match=r"pickle.*\(pytorch_model\.bin\).*safetensors"):
        open_target(str(model_folder))
    assert not marker.exists()


# ---- invalid Hugging Face models


def test_too_many_layers_are_rejected(tmp_path):
    save_hugging_face(tmp_path, "mpt")
    change_config(tmp_path, {"n_layers": 10**9})
    with pytest.raises(InputError, match=r"1,000,000,000 layers \(n_layers\)"):
        open_target(str(tmp_path))
    with pytest.raises(InputError, match=r"1,000,000,000 layers \(n_layers\)"):
        doctor(tmp_path)
    with pytest.raises(InputError, match=r"1,000,000,000 layers"):
        import_model(ImportRequest(str(tmp_path)), tmp_path / "run")


@pytest.mark.parametrize("changes", [{"d_model": "x"}, {"n_heads": None}, {"attn_config": 5}], ids=str)
def test_settings_of_a_wrong_type_are_rejected(tmp_path, changes):
    save_hugging_face(tmp_path, "mpt")
    change_config(tmp_path, changes)
    with pytest.raises(InputError, match=r"^Cannot load '.*'.*\(.+\)"):
        open_target(str(tmp_path))


def test_model_without_tokenizer_is_rejected(tmp_path):
    """Without tokenizer files, transformers returns a GPT-2 tokenizer that turns every text into an empty list."""
    model_folder = tmp_path / "bare"
    save_hugging_face(model_folder, "gpt2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model_folder / name).unlink()
    with pytest.raises(InputError, match="bare has no tokenizer"):
        open_target(str(model_folder)).tokenizer()


def test_missing_weights_are_rejected(tmp_path, capfd):
    save_hugging_face(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    first_layer_weights = {name: weight for name, weight in weights.items() if "layers.1" not in name}
    save_file(first_layer_weights, tmp_path / "model.safetensors", {"format": "pt"})
    capfd.readouterr()
    with pytest.raises(InputError, match=r"lacks weights \(model\.layers\.1"):
        open_target(str(tmp_path))
    assert capfd.readouterr() == ("", ""), "the table of missing weights of transformers is not printed"


def test_damaged_weights_are_rejected(tmp_path):
    save_hugging_face(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(InputError, match="Cannot load"):
        open_target(str(tmp_path))


def test_encoder_is_rejected(tmp_path):
    """transformers loads BERT as a causal model. Its losses would be wrong, because BERT sees later tokens."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(**sizes, intermediate_size=32, is_decoder=False)).save_pretrained(tmp_path / "encoder")
    with pytest.raises(InputError, match=r"\(BertLMHeadModel\) is not causal"):
        open_target(str(tmp_path / "encoder"))
    BertForMaskedLM(BertConfig(**sizes, intermediate_size=32, is_decoder=True)).save_pretrained(tmp_path / "decoder")
    assert open_target(str(tmp_path / "decoder")).vocab_size == 64


def test_unknown_device_is_rejected():
    assert pick_device("cpu") == "cpu"
    with pytest.raises(InputError, match="'abacus'"):
        pick_device("abacus")
