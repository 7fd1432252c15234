"""Surgery: a model with other positions becomes an ALiBi model; training brings back what it lost, at any length."""

import json
from pathlib import Path

import pytest
import torch
from helpers import byte_tokenizer, make_run, prose

from trainshort import InputError
from trainshort.cli.main import run as command
from trainshort.config.run_config import RunConfig, TrainConfig, load_config
from trainshort.evaluate import results, significance
from trainshort.interop.convert import convert, open_conversion_source
from trainshort.interop.import_model import ImportRequest
from trainshort.model.transformer import TransformerLM
from trainshort.train.checkpoint import load_model

transformers = pytest.importorskip("transformers")

LENGTH, WORDS = 32, 258
SMALL = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 0, "max_position_embeddings": LENGTH}
BODY = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
GPT2 = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 48, "n_layer": 2, "n_head": 4}
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
KINDS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **QUIET)),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL, **BODY)),
    "gpt_neox in turn": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**SMALL, **BODY, use_parallel_residual=False)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, **BODY, num_key_value_heads=2, attention_bias=True)
    ),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SMALL, **BODY, num_key_value_heads=2, sliding_window=20)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SMALL, **BODY, num_key_value_heads=4, tie_word_embeddings=True)
    ),
}


def saved(folder: Path, kind: str, steps: int = 0) -> torch.nn.Module:
    """A tiny model of this kind, trained a little on prose if asked to, in a folder with its tokenizer."""
    torch.manual_seed(0)
    model, tokenizer = KINDS[kind](), byte_tokenizer()
    text = torch.tensor(tokenizer(prose(3000), add_special_tokens=False)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        rows = torch.stack([text[at : at + LENGTH] for at in torch.randint(len(text) - LENGTH, (8,))])
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if not steps:  # loud, so that every part shows
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval()


def surgery(source: Path, out: Path) -> TransformerLM:
    request = ImportRequest(str(source))
    patient = open_conversion_source(request)
    model = patient.source.weight_map.model
    convert(patient, request, RunConfig(model=model.config, train=TrainConfig(length=model.training_length)), out)
    return load_model(out)


MODELING = "transformers.models.{0}.modeling_{0}.apply_rotary_pos_emb"


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_but_the_positions_stays(kind, tmp_path, monkeypatch):
    """Both without positions (rotation left out there; the mean of a learned table there and here) compute the same."""
    theirs = saved(tmp_path / "theirs", kind)
    ours = surgery(tmp_path / "theirs", tmp_path / "run")
    assert ours.config.position == "alibi"
    bare = TransformerLM(ours.config.replace(position="none")).eval()
    bare.load_state_dict(ours.state_dict())
    if kind == "gpt2":
        table = theirs.transformer.wpe.weight.data
        table.copy_(table.mean(0).expand_as(table))
    else:
        monkeypatch.setattr(MODELING.format(kind.partition(" ")[0]), lambda q, k, *_, **__: (q, k))
    tokens = torch.randint(WORDS, (2, LENGTH))
    with torch.no_grad():
        expected, found = theirs(tokens).logits.log_softmax(-1), bare(tokens).log_softmax(-1)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.std()))
    record = json.loads((tmp_path / "run" / "import.json").read_text())
    assert record["converted"] == {"from": "learned" if kind == "gpt2" else "rotary", "to": "alibi"}
    assert len(record["files"]["model.safetensors"]) == 64


@pytest.mark.parametrize("kind", [pytest.param("gpt2", marks=pytest.mark.slow), "gpt_neox", "llama"])
def test_the_command(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved(Path("theirs"), kind, steps=80)
    Path("book.txt").write_text(prose(3000, seed=5))
    asked = ["convert", "theirs", "--to", "alibi", "--out", "runs/it", "--corpus", "book.txt", "--quiet"]
    asked += ["--steps", "60", "--optim.lr", "0.003", "--max-tokens", "4000"]
    assert command(asked) == 0
    told = capsys.readouterr().out
    assert all(word in told for word in ("before surgery", "right after", "trained on", "32 = L", "256"))
    stages = [results.load(Path(f"runs/it/conversion/{name}.json")) for name in ("before", "surgery", "trained")]
    before, after, trained = ({row.length: row for row in one.rows} for one in stages)
    assert list(before) == list(after) == list(trained) == [LENGTH, 2 * LENGTH, 4 * LENGTH, 8 * LENGTH]
    assert before[LENGTH].perplexity < 20, "it had learned something"
    assert trained[LENGTH].perplexity < after[LENGTH].perplexity, "training helps"
    assert trained[LENGTH].perplexity < 1.02 * before[LENGTH].perplexity, "and brings back what it was"
    assert trained[8 * LENGTH].perplexity < 1.05 * trained[LENGTH].perplexity, "at any length"
    assert before[2 * LENGTH].status == ("cannot" if kind == "gpt2" else "scored")
    assert significance.load_summary(Path("runs/it"))["summary"].startswith("trained at 32, good to ")
    assert {path.suffix for path in Path("runs/it/conversion").iterdir()} == {".json", ".png", ".svg"}
    with pytest.raises(InputError, match="runs/it already exists"):
        command(asked)
    if kind == "llama":
        assert load_config(Path("runs/it/config.json")).model.kv_heads == 2
        assert command([*asked, "--resume"]) == 0, "what is done is not done again"
        assert capsys.readouterr().out.splitlines()[-8:] == told.splitlines()[-8:]
        assert command(["generate", "runs/it", "the cat", "--tokens", "20", "--mode", "bounded"]) == 0


@pytest.mark.parametrize("position", ["rotary", "sinusoidal", "t5", "learned", "none"])
def test_runs_of_ours(position, tmp_path):
    run = make_run(tmp_path, position=position, width=32)
    ours, before = surgery(run, tmp_path / "out"), load_model(run)
    names = {name for name, _ in ours.named_parameters()}
    for name, weight in before.named_parameters():
        moved = position in ("sinusoidal", "learned") and name == "vocabulary.embedding.weight"
        assert (name in names) != name.startswith("position.")
        assert moved or name not in names or torch.equal(weight, dict(ours.named_parameters())[name])
        if moved:  # every row by the same vector, the positions' mean
            shift = dict(ours.named_parameters())[name] - weight
            mean = before.position.embed(torch.zeros(1, 16, 32), torch.arange(16)[None])[0].mean(0)
            torch.testing.assert_close(shift, mean.expand_as(shift), rtol=0, atol=1e-5)


def setting(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


BAD = {
    "alibi": (setting(model_type="mpt"), "type 'mpt', an ALiBi model already; trainshort import takes it as it is"),
    "unknown": (
        setting(model_type="mamba"),
        "type 'mamba', and these can be converted: gpt2, gpt_neox, llama",
    ),
    "head width": (setting(head_dim=20), "has heads of width 20, and ours are hidden_size over heads wide"),
    "activation": (setting(hidden_act="mish"), "has hidden_act 'mish', and these are known: relu, gelu"),
    "layers": (setting(num_hidden_layers=3), "no tensor model.layers.2"),
    "key heads": (setting(num_key_value_heads=4), "config and weights are of different models"),
    "no length": (setting(max_position_embeddings=None), "should say max_position_embeddings"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), r"has no tokenizer\.json.*--tokenizer FILE"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
}


@pytest.mark.parametrize(("change", "sentence"), BAD.values(), ids=BAD)
def test_bad_folders(change, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(Path("theirs"), "llama")
    Path("book.txt").write_text("a text")
    change(Path("theirs"))
    with pytest.raises(InputError, match=sentence):
        command(["convert", "theirs", "--to", "alibi", "--out", "run", "--corpus", "book.txt"])
    assert not Path("run").exists()


def test_bad_requests(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alibi = make_run(tmp_path)
    rest = ["--out", "out", "--corpus", "tiny.txt"]
    requests = {
        "has ALiBi already. Train it on as it is": [str(alibi), "--to", "alibi", *rest],
        "--to is alibi, got 'rotary'": [str(alibi), "--to", "rotary", *rest],
        "--data.corpus is required": [str(alibi), "--to", "alibi", "--out", "out"],
        "'nothing.txt' is neither a known corpus nor a file": [
            str(alibi),
            "--to",
            "alibi",
            "--out",
            "out",
            "--corpus",
            "nothing.txt",
        ],
        "tiny.txt is a file. Give a run folder": ["tiny.txt", "--to", "alibi", *rest],
        "Invalid --train.steps: expected an integer, got 'few'": [str(alibi), "--to", "alibi", *rest, "--steps", "few"],
    }
    for sentence, words in requests.items():
        with pytest.raises(InputError, match=sentence):
            command(["convert", *words])
    assert not Path("out").exists()


def test_what_a_conversion_of_a_run_does_not_take(tmp_path, monkeypatch):
    """--tokenizer was passed over in silence, and --resume measured another run's model before it refused."""
    monkeypatch.chdir(tmp_path)
    ours = make_run(tmp_path, position="rotary")
    words = ["convert", str(ours), "--to", "alibi", "--corpus", "tiny.txt"]
    with pytest.raises(InputError, match=r"--tokenizer is for a Hugging Face model; the run .* has its own"):
        command([*words, "--out", "out", "--tokenizer", "gone.json"])
    with pytest.raises(InputError, match="is a run, and no conversion that was stopped"):
        command([*words, "--out", str(ours), "--resume"])
    saved(Path("gpt2"), "gpt2")
    surgery(Path("gpt2"), Path("out"))
    with pytest.raises(InputError, match=r"out is a conversion of gpt2, not of .*tiny"):
        command([*words, "--out", "out", "--resume"])
    assert not Path("out/conversion").exists()


def test_a_text_that_cannot_be_trained_on_leaves_no_run_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved(Path("gpt2"), "gpt2")
    Path("one.txt").write_text("only one line")
    Path("some.txt").write_text(prose(400))
    capsys.readouterr()  # what saving the model said
    for corpus, more, told in (
        ("one.txt", [], "'one.txt' holds 1 different document, too few to split into train, valid and test."),
        ("some.txt", ["--length", "100000"], "but one sequence of length 100000 needs 100000"),
    ):
        with pytest.raises(InputError, match=told):
            command(["convert", "gpt2", "--to", "alibi", "--out", "out", "--corpus", corpus, "--quiet", *more])
        assert capsys.readouterr() == ("", "")
        assert not Path("out").exists()


def test_stretched_rotation_is_told(tmp_path):
    saved(tmp_path / "theirs", "llama")
    setting(rope_scaling={"rope_type": "yarn", "factor": 4.0})(tmp_path / "theirs")
    notes = open_conversion_source(ImportRequest(str(tmp_path / "theirs"))).source.weight_map.model.notes
    assert notes == ("its rotary positions were stretched (yarn); that goes with them",)


def test_import_points_to_convert(tmp_path):
    saved(tmp_path / "theirs", "gpt2")
    with pytest.raises(InputError, match="type 'gpt2', with learned positions; trainshort convert makes"):
        command(["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "run")])
