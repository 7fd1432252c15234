"""Encoders: masked language models from their masks to their evaluation, and what they refuse."""

import json
import shutil

import numpy as np
import pytest
import torch
from helpers import evaluations, make_run, prose, random_tokens, tiny_model, tiny_target

from trainshort import stream
from trainshort.cli.main import main
from trainshort.config.run_config import IGNORED, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from trainshort.data import mlm
from trainshort.data.batches import BatchStream
from trainshort.data.preparation import prepare
from trainshort.errors import InputError
from trainshort.evaluate.sweep import Sweep, score
from trainshort.model.cache import Cache
from trainshort.model.transformer import TransformerLM
from trainshort.train.checkpoint import load_model
from trainshort.train.loop import train


def run(*words):
    """A command's exit code."""
    with pytest.raises(SystemExit) as ended:
        main.main(list(words))
    return ended.value.code or 0


TWO_SIDED = ["alibi", "t5", "none", "sinusoidal", "learned", "rotary", "fox", "kerple"]


def test_masks_of_training_are_a_function_of_seed_step_and_row():
    tokens = np.arange(1000) % 50
    options = {"length": 20, "batch_size": 4, "seed": 5, "mask": 50}
    whole = BatchStream(tokens, **options).batch(7)
    again = BatchStream(tokens, **options).batch(7)
    halves = [BatchStream(tokens, **options, rank=rank, world=2).batch(7) for rank in (0, 1)]
    for name in ("inputs", "targets"):
        assert np.array_equal(getattr(whole, name), getattr(again, name))
        assert np.array_equal(getattr(whole, name), np.concatenate([getattr(half, name) for half in halves]))
    hidden = whole.inputs == 50
    assert np.array_equal(hidden, whole.targets != IGNORED)
    others = BatchStream(tokens, **{**options, "seed": 6}).batch(7).inputs == 50
    assert not np.array_equal(hidden, others)
    truth = np.where(hidden, whole.targets, whole.inputs)
    assert (np.diff(truth, axis=1) % 50 == 1).all()  # consecutive tokens of the text, not shifted
    share = np.mean([(BatchStream(tokens, **options).batch(step).inputs == 50).mean() for step in range(100)])
    assert abs(share - 1 / mlm.MASK_ROUNDS) < 0.02


def test_what_fills_the_last_block_is_hidden_from_the_others():
    batches = [BatchStream(np.arange(10), length=4, batch_size=1, seed=0, mask=10, bos=9).batch(n) for n in range(3)]
    short = next(batch for batch in batches if batch.segment_ids is not None)
    assert short.segment_ids is not None
    assert short.segment_ids.tolist() == [[0, 0, 1, 1]]
    assert (short.targets[:, 2:] == IGNORED).all()


def test_every_token_is_hidden_in_one_round_whatever_the_length():
    short = mlm.evaluation_rounds(range(0, 960, 10), 10).flatten()
    assert np.array_equal(short, mlm.evaluation_rounds([0], 960)[0])
    counts = np.bincount(short, minlength=mlm.MASK_ROUNDS)
    assert counts.min() > 100
    inputs, targets = mlm.mask_tokens(np.array([[5, 6, 7]]), np.array([[False, True, False]]), 9)
    assert inputs.tolist() == [[5, 9, 7]]
    assert targets.tolist() == [[IGNORED, 6, IGNORED]]


def test_an_evaluation_scores_each_token_in_its_own_round():
    target, tokens = tiny_target(causal=False), random_tokens(50, vocab_size=31)
    losses = np.concatenate(list(score(target, tokens, Sweep(tokens, [25]).passes(25))))
    rounds = mlm.evaluation_rounds([25], 25)[0]
    place = 7
    inputs = torch.from_numpy(np.where(rounds == rounds[place], 31, tokens[25:]).astype(np.int64))[None]
    logits = target.model(inputs)[0, place]
    expected = -logits.log_softmax(-1)[int(tokens[25 + place])].item()
    assert losses[25 + place] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("position", TWO_SIDED)
def test_a_token_sees_both_sides(position):
    model = tiny_model(position, causal=False)
    tokens = torch.arange(14)[None]
    changed = tokens.clone()
    changed[0, 13] = 30
    first, second = model.hidden(tokens), model.hidden(changed)
    assert torch.isfinite(first).all()
    assert (first[0, :13] - second[0, :13]).abs().amax(-1).min() > 1e-4
    causal = tiny_model(position)
    assert torch.allclose(causal.hidden(tokens)[0, :13], causal.hidden(changed)[0, :13], atol=1e-5)


def test_t5_knows_left_from_right():
    bias = tiny_model("t5", causal=False).position.score_bias(20)
    assert not torch.equal(bias.table[:, 1:5], bias.right[:, 1:5])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny encoder, trained for real."""
    root = tmp_path_factory.mktemp("encoder")
    (root / "text.txt").write_text(prose(600), encoding="utf-8")
    data = DataConfig(corpus=str(root / "text.txt"), tokenizer="bytes", folder=root / "data")
    prepare(data, progress=False)
    config = RunConfig(
        model=ModelConfig(layers=2, width=32, heads=4, causal=False),
        data=data,
        optim=OptimConfig(lr=3e-3, warmup=10),
        train=TrainConfig(length=32, batch=8, steps=80, log_every=20, valid_every=0, save_every=40),
    )
    return config, root, train(config, root / "run", quiet=True)


def test_training_learns_and_resumes_exactly(trained):
    config, root, result = trained
    assert result.valid_nll / result.valid_count < 3.4  # 5.5 at first, and 2.9 for bytes without their neighbours
    half = root / "half"
    shutil.copytree(root / "run", half)
    last = half / "checkpoints" / "step-000000080"
    shutil.rmtree(last)  # as if it had been stopped after step 40
    train(config, half, resume=True, quiet=True)
    for name, weight in load_model(result.run).state_dict().items():
        assert torch.equal(weight, load_model(half).state_dict()[name]), name
    saved = json.loads((root / "run" / "config.json").read_text())
    assert saved["model"]["vocab_size"] == 257  # 256 bytes and the mask


def test_evaluated_at_many_times_its_length(trained, capsys):
    _, root, _ = trained
    assert run("evaluate", str(root / "run"), "--lengths", "1x,16x", "--max-tokens", "1024") == 0
    assert "pseudo-perplexity" in capsys.readouterr().out
    (found,) = evaluations(root / "run")
    assert found.protocol["masked"] == "1 in 7"
    assert found.bits_per_byte(found.rows[0]) is None
    assert [row.tokens for row in found.rows] == [1024, 1024]
    assert found.rows[1].loss < found.rows[0].loss + 0.3


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "RUN", "the"],
        ["export", "RUN", "--to", "hf", "--out", "OUT"],
        ["analyze", "RUN"],
        ["harness", "RUN", "--tasks", "lambada_openai"],
    ],
    ids=lambda words: words[0],
)
def test_what_needs_the_past_alone_says_so(trained, tmp_path, capsys, words):
    _, root, _ = trained
    given = [{"RUN": str(root / "run"), "OUT": str(tmp_path / "out")}.get(word, word) for word in words]
    assert run(*given) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "needs a causal model, and this one is an encoder (model.causal is false)" in said


def test_a_stride_is_refused(trained, capsys):
    assert run("evaluate", str(trained[1] / "run"), "--stride", "8") == 2
    assert "Leave out --stride" in capsys.readouterr().err


def test_what_does_not_go_with_an_encoder():
    model = tiny_model(causal=False)
    with pytest.raises(InputError, match="A cache needs a causal model"):
        model(torch.zeros(1, 3, dtype=torch.long), cache=Cache(model.config.layers))
    with pytest.raises(InputError, match="Generating text needs a causal model"):
        stream(model, [1, 2, 3], tokens=2)
    with pytest.raises(InputError, match="fire is defined for causal models"):
        TransformerLM(ModelConfig(vocab_size=9, position="fire", causal=False))
    with pytest.raises(InputError, match="length_scaling counts the tokens that came before"):
        TransformerLM(ModelConfig(vocab_size=9, length_scaling="ssmax", causal=False))
    with pytest.raises(InputError, match="half of its buckets on each side; 7 is odd"):
        TransformerLM(ModelConfig(vocab_size=9, position="t5", position_settings={"buckets": 7}, causal=False))


def test_a_causal_run_is_evaluated_as_before(tmp_path):
    assert run("evaluate", str(make_run(tmp_path)), "--lengths", "16", "--max-tokens", "64") == 0
    (found,) = evaluations(tmp_path / "runs" / "tiny")
    assert found.metric_name == "perplexity"
    assert "masked" not in found.protocol
