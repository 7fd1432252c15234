"""Runs, checkpoints and Hugging Face models behind one interface."""

import hashlib
import json
import os
import pickle
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
from trainshort.evaluate.sweep import Sweep, measure, score
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


def hugging_face(folder: Path, kind: str) -> HuggingFaceTarget:
    path = folder / kind
    if not path.exists():
        save_hugging_face(path, kind)
    target = open_target(str(path))
    assert isinstance(target, HuggingFaceTarget)
    return target


def test_a_run_and_its_checkpoint_are_the_same_model(run: Path):
    whole = open_target(str(run))
    part = open_target(str(run / "checkpoints" / "step-000000005"))
    assert isinstance(whole, RunTarget)
    assert (whole.kind, whole.name) == ("run", "tiny")
    assert (part.kind, part.name) == ("checkpoint", "tiny step 5")
    assert whole.folder == part.folder == run
    assert whole.trained_at == 16
    described = whole.description()
    assert described["weights"] == part.description()["weights"]
    assert (described["step"], described["position"]) == (5, "alibi")


def test_data_that_changed_since_training_is_refused(run: Path, tmp_path):
    import shutil

    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    sha = hashlib.sha256((run.parent.parent / "tiny-data" / "train.bin").read_bytes()).hexdigest()
    config = load_config(copy / "config.json").data
    append_line(copy / "sessions.jsonl", {"data": sha})
    assert open_run_data(copy, config).meta.splits["train"].sha256 == sha
    (copy / "sessions.jsonl").unlink()
    append_line(copy / "sessions.jsonl", {"data": "0" * 64})
    with pytest.raises(InputError, match=r"is not the data that .*copy was trained on"):
        open_run_data(copy, config)


def test_the_fingerprint_changes_with_any_weight(run: Path):
    target = open_target(str(run))
    before = fingerprint(target.module)
    with torch.no_grad():
        next(target.module.parameters()).view(-1)[7] += 1e-3
    assert fingerprint(target.module) != before


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "mpt", "llama", "gemma2"])
def test_losses_are_those_of_the_models_own_logits(folder: Path, kind: str):
    target = hugging_face(folder, kind)
    tokens = torch.from_numpy(random_tokens(2 * 41, 300).astype(np.int64)).view(2, 41)
    with torch.no_grad():
        logits = target.model(tokens[:, :-1]).logits.double()
    expected = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    for first in (0, 13):
        ours = target.token_nll(tokens[:, :-1], tokens[:, 1:], first)
        torch.testing.assert_close(ours.double(), expected[:, first:], rtol=1e-4, atol=1e-5)


def test_non_overlapping_perplexity_is_that_of_the_models_own_logits(folder: Path, tmp_path):
    target, tokens = hugging_face(folder, "llama"), random_tokens(100, 300)
    stream = torch.tensor([target.bos, *tokens.tolist()])
    total = 0.0
    for start in range(0, 100, 32):
        piece = stream[start : min(start + 32, 100) + 1]
        with torch.no_grad():
            logits = target.model(piece[None, :-1]).logits[0].double()
        total -= float(logits.log_softmax(-1).gather(-1, piece[1:, None]).sum())
    row = measure(target, Sweep(tokens, [32]), 32, tmp_path / "scores")
    assert row.tokens == 100
    assert row.nll == pytest.approx(total, rel=1e-5)


def test_the_head_is_sliced_where_the_logits_allow_it(folder: Path):
    for kind in ("gpt2", "bloom", "mpt", "llama"):
        assert hugging_face(folder, kind)._head is not None
    assert hugging_face(folder, "gemma2")._head is None, "its logits are squashed after the head"


def test_a_position_table_is_a_hard_limit(folder: Path, tmp_path):
    target, tokens = hugging_face(folder, "gpt2"), random_tokens(200, 300)
    assert (target.trained_at, target.max_length) == (64, 64)
    row = measure(target, Sweep(tokens, [65]), 65, tmp_path / "scores")
    assert (row.status, row.reason) == ("cannot", "the model's positions end at 64 tokens")


def test_a_limit_that_shows_only_as_an_error_is_a_result_past_the_declared_length_only(folder: Path, tmp_path):
    target, tokens = hugging_face(folder, "gptj"), random_tokens(200, 300)
    assert target.max_length is None
    row = measure(target, Sweep(tokens, [100]), 100, tmp_path / "scores")
    assert row.status == "cannot"
    assert (row.reason or "").startswith("the model is made for 64 tokens and fails past them: ")
    assert target.length_error_reason(RuntimeError("a real fault"), 64) is None


def test_models_without_a_limit_go_on(folder: Path, tmp_path):
    tokens = random_tokens(200, 300)
    for kind in ("llama", "bloom", "mpt"):
        row = measure(hugging_face(folder, kind), Sweep(tokens, [150]), 150, tmp_path / "scores")
        assert row.status == "scored", kind


def test_mpts_longer_table_is_the_same_table_continued(folder: Path):
    """Transformers writes MPT's bias out up to max_seq_len and fails past it, though ALiBi has no such limit."""
    target, tokens = hugging_face(folder, "mpt"), random_tokens(100, 300)
    with target.for_length(None, 100):
        (long,) = score(target, tokens, Passes(100, 100, 100))
    assert target.model.config.max_seq_len == 64
    short = np.concatenate(list(score(target, tokens, Passes(100, 50, 50))))
    np.testing.assert_allclose(long[:50], short[:50], rtol=1e-4, atol=1e-5)


def test_a_training_length_can_be_given(folder: Path):
    hugging_face(folder, "bloom")
    assert open_target(str(folder / "bloom")).trained_at is None
    assert open_target(str(folder / "bloom"), trained_at=2048).trained_at == 2048


def test_a_folder_in_the_home_folder_is_one(folder: Path, monkeypatch):
    hugging_face(folder, "llama")
    monkeypatch.setenv("HOME", str(folder))
    assert open_target("~/llama").vocab_size == 300


def test_the_token_before_the_first_is_the_beginning_of_text(folder: Path):
    assert hugging_face(folder, "llama").bos == 1


@pytest.mark.parametrize("name", ["gpt2", "EleutherAI/pythia-70m", "facebook/opt-125m"])
def test_hub_names_are_told_from_paths(name: str):
    assert looks_like_hub_name(name)


@pytest.mark.parametrize("name", ["runs/mine", "./x", "/a/b", "a/b/c", "~/x", "x/"])
def test_paths_are_told_from_hub_names(name: str):
    assert not looks_like_hub_name(name)


def test_what_is_not_there_is_said_in_words(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="There is no run or model at 'runs/nothing'"):
        open_target("runs/nothing")
    with pytest.raises(InputError, match=r"There is no run at .*Give a run folder"):
        open_target(str(tmp_path))
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        open_target(str(tmp_path / "file.txt"))
    with pytest.raises(InputError, match="precision is float32 or bfloat16, got 'int4'"):
        open_target("x", precision="int4")


def test_a_run_without_a_checkpoint_is_told_to_be_trained(run: Path, tmp_path):
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    with pytest.raises(InputError, match=r"has no checkpoint yet\. Train the run first"):
        open_target(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"config\.json") as told:
        open_target(str(tmp_path))
    assert "Train it first" not in str(told.value)


def test_a_hub_name_without_a_network_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="no folder 'nobody/nothing' here, the hub does not answer, and no earlier"):
        open_target("nobody/nothing")


def test_without_a_network_nothing_is_tried_again_and_again(tmp_path):
    """The hub's place is a closed port here, so that this holds on every machine."""
    words = ["evaluate", "nobody/nothing", "--data", "x.txt"]
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "trainshort", *words], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "the hub does not answer, and no earlier download" in done.stderr


def with_code_of_its_own(folder: Path, part: str) -> Path:
    """A saved model that says that its own Python file must be run; it would leave a mark."""
    save_hugging_face(folder, "llama")
    (folder / "custom.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Own: pass\n")
    name = "config.json" if part == "model" else "tokenizer_config.json"
    config = json.loads((folder / name).read_text())
    if part == "model":
        config |= {"model_type": "own", "architectures": ["Own"]}
        config["auto_map"] = {"AutoConfig": "custom.Own", "AutoModelForCausalLM": "custom.Own"}
    else:
        config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["custom.Own", None]}}
    (folder / name).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_code_beside_a_model_is_never_run(tmp_path, monkeypatch, part):
    monkeypatch.setattr("builtins.input", lambda *question: "y")  # the answer that used to run it
    folder = with_code_of_its_own(tmp_path / "own", part)
    with pytest.raises(InputError, match=f"needs Python code of its own for its {part}, and trainshort never runs"):
        open_target(str(folder)).tokenizer()
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("value", ["kernels-community/flash-mla", {"": "someone/kernel@main:attend"}], ids=str)
def test_a_repository_that_a_config_names_is_not_fetched_and_run(tmp_path, key, value):
    save_hugging_face(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    for loads in (lambda: open_target(str(tmp_path)), lambda: doctor(tmp_path)):
        with pytest.raises(InputError, match=r"code of its own for its attention \(.*/.*\), and trainshort never runs"):
            loads()


def test_layers_without_end_are_refused_before_any_is_built(tmp_path):
    save_hugging_face(tmp_path, "mpt")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layers": 10**9}))
    for loads in (lambda: open_target(str(tmp_path)), lambda: doctor(tmp_path)):
        with pytest.raises(InputError, match=r"asks for 1,000,000,000 layers \(n_layers\)\. Restore it from a copy\."):
            loads()
    with pytest.raises(InputError, match=r"tells of 1,000,000,000 layers, and the model has \d+ tensors in all\."):
        import_model(ImportRequest(str(tmp_path)), tmp_path / "run")


@pytest.mark.parametrize("change", [{"d_model": "x"}, {"n_heads": None}, {"attn_config": 5}], ids=str)
def test_settings_of_the_wrong_kind_are_one_sentence(tmp_path, change):
    save_hugging_face(tmp_path, "mpt")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(
        InputError, match=r"^Cannot load '.*': the folder did not give a causal language model \(.+\)\."
    ):
        open_target(str(tmp_path))


def test_a_pickle_is_never_opened(tmp_path):
    folder = tmp_path / "pickled"
    save_hugging_face(folder, "llama")
    (folder / "model.safetensors").unlink()
    mark = tmp_path / "ran"

    class Trap:
        def __reduce__(self):
            return mark.touch, ()

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(InputError, match=r"weights as a pickle \(pytorch_model.bin\).*Save the model as safetensors"):
        open_target(str(folder))
    assert not mark.exists()


def test_a_model_without_a_tokenizer_is_told_as_that(tmp_path):
    """transformers makes a GPT-2 tokenizer out of no files, which turns every text into nothing."""
    folder = tmp_path / "bare"
    save_hugging_face(folder, "gpt2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(InputError, match="bare comes without a tokenizer, which reading plain text needs"):
        open_target(str(folder)).tokenizer()


def test_damaged_and_missing_weights_are_told(tmp_path, capfd):
    folder = tmp_path / "model"
    save_hugging_face(folder, "llama")
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "layers.1" not in k}, folder / "model.safetensors", {"format": "pt"})
    capfd.readouterr()
    with pytest.raises(InputError, match=r"^'.*' lacks weights \(model.layers.1"):
        open_target(str(folder))
    assert capfd.readouterr() == ("", "")  # transformers would show a table
    (folder / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match="did not give a causal language model"):
        open_target(str(folder))


def test_an_encoder_of_transformers_is_no_causal_model(tmp_path):
    """Which loads it as one, and the losses would be of tokens that it sees."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for decoder in (False, True):
        BertForMaskedLM(BertConfig(**sizes, intermediate_size=32, is_decoder=decoder)).save_pretrained(tmp_path)
        if decoder:
            assert open_target(str(tmp_path)).vocab_size == 64
            continue
        with pytest.raises(InputError, match=r"\(BertLMHeadModel\) sees the tokens it should predict"):
            open_target(str(tmp_path))


def test_devices(monkeypatch):
    assert pick_device("cpu") == "cpu"
    with pytest.raises(InputError, match="the device 'abacus' is not available here"):
        pick_device("abacus")


def test_half_precision_is_another_result_near_the_first(run: Path):
    tokens = random_tokens(64, 256)
    full, half = (open_target(str(run), precision=name) for name in ("float32", "bfloat16"))
    a, b = (np.concatenate(list(score(target, tokens, Passes(64, 16, 16)))) for target in (full, half))
    assert 0 < np.abs(a - b).mean() < 0.2
    assert full.description()["weights"] != half.description()["weights"]
