"""Tests of encoders (`causal=False`): masks, training, evaluation, and features that encoders do not support."""

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

ENCODER_METHODS = ["alibi", "t5", "none", "sinusoidal", "learned", "rotary", "fox", "kerple"]

MASK_TOKEN = 50


def run_command(*words: str) -> int:
    """Run a trainshort command and return its exit code."""
    with pytest.raises(SystemExit) as exit_info:
        main(list(words))
    return exit_info.value.code or 0


def make_stream(tokens: np.ndarray, **options) -> BatchStream:
    """Create the batches of a masked language model."""
    defaults = {"length": 20, "batch_size": 4, "seed": 5, "mask": MASK_TOKEN}
    return BatchStream(tokens, **{**defaults, **options})


def test_training_masks_depend_on_seed_and_step_only():
    tokens = np.arange(1000) % MASK_TOKEN
    batch = make_stream(tokens).batch(7)
    repeated_batch = make_stream(tokens).batch(7)
    assert np.array_equal(batch.inputs, repeated_batch.inputs)
    assert np.array_equal(batch.targets, repeated_batch.targets)

    rank_batches = [make_stream(tokens, rank=rank, world=2).batch(7) for rank in (0, 1)]
    assert np.array_equal(batch.inputs, np.concatenate([rank_batch.inputs for rank_batch in rank_batches]))
    assert np.array_equal(batch.targets, np.concatenate([rank_batch.targets for rank_batch in rank_batches]))

    is_masked = batch.inputs == MASK_TOKEN
    is_masked_with_other_seed = make_stream(tokens, seed=6).batch(7).inputs == MASK_TOKEN
    assert not np.array_equal(is_masked, is_masked_with_other_seed)


def test_targets_of_an_encoder_are_the_masked_tokens():
    tokens = np.arange(1000) % MASK_TOKEN
    batch = make_stream(tokens).batch(7)
    is_masked = batch.inputs == MASK_TOKEN
    assert np.array_equal(is_masked, batch.targets != IGNORED)
    # Inputs and targets together are consecutive tokens of the text. The targets are not shifted.
    text = np.where(is_masked, batch.targets, batch.inputs)
    assert (np.diff(text, axis=1) % MASK_TOKEN == 1).all()


def test_share_of_masked_tokens():
    tokens = np.arange(1000) % MASK_TOKEN
    batches = [make_stream(tokens).batch(step) for step in range(100)]
    masked_share = np.mean([(batch.inputs == MASK_TOKEN).mean() for batch in batches])
    assert abs(masked_share - 1 / mlm.MASK_ROUNDS) < 0.02


def test_filler_of_last_block_is_a_separate_segment_without_targets():
    stream = BatchStream(np.arange(10), length=4, batch_size=1, seed=0, mask=10, bos=9)
    batches = [stream.batch(step) for step in range(3)]
    (last_block,) = [batch for batch in batches if batch.segment_ids is not None]
    assert last_block.segment_ids is not None
    assert last_block.segment_ids.tolist() == [[0, 0, 1, 1]]
    assert (last_block.targets[:, 2:] == IGNORED).all()


def test_evaluation_masks_each_token_in_one_round_at_every_length():
    """An encoder reads each block in several rounds. The length of the blocks does not change a token's round."""
    rounds_of_short_blocks = mlm.evaluation_rounds(range(0, 960, 10), 10).flatten()
    rounds_of_one_block = mlm.evaluation_rounds([0], 960)[0]
    assert np.array_equal(rounds_of_short_blocks, rounds_of_one_block)
    tokens_per_round = np.bincount(rounds_of_short_blocks, minlength=mlm.MASK_ROUNDS)
    assert tokens_per_round.min() > 100


def test_mask_tokens():
    inputs, targets = mlm.mask_tokens(np.array([[5, 6, 7]]), np.array([[False, True, False]]), 9)
    assert inputs.tolist() == [[5, 9, 7]]
    assert targets.tolist() == [[IGNORED, 6, IGNORED]]


def test_evaluation_scores_each_token_in_its_round():
    """An encoder reads each block in several rounds. Each token is masked and scored in one of the rounds."""
    target = tiny_target(causal=False)
    tokens = random_tokens(50, vocab_size=31)
    mask_token = 31
    losses = np.concatenate(list(score(target, tokens, Sweep(tokens, [25]).passes(25))))

    # Compute the loss of one token of the second block, which starts at token 25.
    block_start = 25
    index = 7
    rounds = mlm.evaluation_rounds([block_start], 25)[0]
    masked_block = np.where(rounds == rounds[index], mask_token, tokens[block_start:])
    logits = target.model(torch.from_numpy(masked_block.astype(np.int64))[None])[0, index]
    expected_loss = -logits.log_softmax(-1)[int(tokens[block_start + index])].item()
    assert losses[block_start + index] == pytest.approx(expected_loss, abs=1e-5)


@pytest.mark.parametrize("position", ENCODER_METHODS)
def test_encoder_attends_to_both_sides(position):
    tokens = torch.arange(14)[None]
    changed_tokens = tokens.clone()
    changed_tokens[0, 13] = 30

    encoder = tiny_model(position, causal=False)
    hidden = encoder.hidden(tokens)[0, :13]
    changed_hidden = encoder.hidden(changed_tokens)[0, :13]
    assert torch.isfinite(hidden).all()
    # The last token changes the hidden states of all tokens before it.
    assert (hidden - changed_hidden).abs().amax(-1).min() > 1e-4

    causal_model = tiny_model(position)
    causal_hidden = causal_model.hidden(tokens)[0, :13]
    assert torch.allclose(causal_hidden, causal_model.hidden(changed_tokens)[0, :13], atol=1e-5)


def test_t5_encoder_has_different_biases_for_left_and_right():
    bias = tiny_model("t5", causal=False).position.score_bias(20)
    assert not torch.equal(bias.table[:, 1:5], bias.right[:, 1:5])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a tiny encoder. Return its config, the folder that contains the folder `run`, and the training result."""
    folder = tmp_path_factory.mktemp("encoder")
    corpus = folder / "text.txt"
    corpus.write_text(prose(600), encoding="utf-8")
    data = DataConfig(corpus=str(corpus), tokenizer="bytes", folder=folder / "data")
    prepare(data, progress=False)
    config = RunConfig(
        model=ModelConfig(layers=2, width=32, heads=4, causal=False),
        data=data,
        optim=OptimConfig(lr=3e-3, warmup=10),
        train=TrainConfig(length=32, batch=8, steps=80, log_every=20, valid_every=0, save_every=40),
    )
    return config, folder, train(config, folder / "run", quiet=True)


def test_encoder_training_reduces_the_loss(trained):
    _, folder, result = trained
    # The initial loss is 5.5. A model that knows only the frequencies of bytes has a loss of 2.9.
    assert result.valid_nll / result.valid_count < 3.4
    config = json.loads((folder / "run" / "config.json").read_text())
    assert config["model"]["vocab_size"] == 257  # 256 bytes and the mask token


def test_resumed_encoder_run_equals_uninterrupted_run(trained):
    config, folder, result = trained
    resumed_run = folder / "resumed"
    shutil.copytree(folder / "run", resumed_run)
    # Without the last checkpoint, the run looks as if it had been stopped after step 40.
    shutil.rmtree(resumed_run / "checkpoints" / "step-000000080")
    train(config, resumed_run, resume=True, quiet=True)

    resumed_weights = load_model(resumed_run).state_dict()
    for name, weight in load_model(result.run).state_dict().items():
        assert torch.equal(weight, resumed_weights[name]), name


def test_encoder_is_evaluated_at_longer_lengths(trained, capsys):
    _, folder, _ = trained
    assert run_command("evaluate", str(folder / "run"), "--lengths", "1x,16x", "--max-tokens", "1024") == 0
    assert "pseudo-perplexity" in capsys.readouterr().out
    (evaluation,) = evaluations(folder / "run")
    assert evaluation.protocol["masked"] == "1 in 7"
    assert evaluation.bits_per_byte(evaluation.rows[0]) is None
    assert [row.tokens for row in evaluation.rows] == [1024, 1024]
    assert evaluation.rows[1].loss < evaluation.rows[0].loss + 0.3


@pytest.mark.parametrize("command", ["generate", "export", "analyze", "harness"])
def test_command_that_requires_a_causal_model_names_the_setting(trained, tmp_path, capsys, command):
    _, folder, _ = trained
    arguments = {
        "generate": ["the"],
        "export": ["--to", "hf", "--out", str(tmp_path / "out")],
        "analyze": [],
        "harness": ["--tasks", "lambada_openai"],
    }
    assert run_command(command, str(folder / "run"), *arguments[command]) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert "model.causal is false" in message


def test_evaluation_of_an_encoder_rejects_stride(trained, capsys):
    _, folder, _ = trained
    assert run_command("evaluate", str(folder / "run"), "--stride", "8") == 2
    message = capsys.readouterr().err
    assert "encoder" in message.lower()
    assert "--stride" in message


def test_encoder_rejects_cache_and_generation():
    model = tiny_model(causal=False)
    with pytest.raises(InputError, match=r"cache requires a causal model.*model\.causal is false"):
        model(torch.zeros(1, 3, dtype=torch.long), cache=Cache())
    with pytest.raises(InputError, match=r"generation requires a causal model.*model\.causal is false"):
        stream(model, [1, 2, 3], tokens=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"position": "fire"}, "fire requires a causal model"),
        ({"length_scaling": "ssmax"}, "length_scaling requires a causal model"),
        ({"position": "t5", "position_settings": {"buckets": 7}}, "even number of buckets, got 7"),
    ],
)
def test_encoder_rejects_settings_of_causal_models(settings, message):
    with pytest.raises(InputError, match=message):
        TransformerLM(ModelConfig(vocab_size=9, causal=False, **settings))


def test_evaluation_of_a_causal_model_has_no_masks(tmp_path):
    run_folder = make_run(tmp_path)
    assert run_command("evaluate", str(run_folder), "--lengths", "16", "--max-tokens", "64") == 0
    (evaluation,) = evaluations(run_folder)
    assert evaluation.metric_name == "perplexity"
    assert "masked" not in evaluation.protocol
