"""What proven windows leave out does not show in a trained model's perplexity, however long the text."""

import math

import pytest
import torch
from helpers import prose

from trainshort.attention import attend
from trainshort.config.run_config import DataConfig, ModelConfig, RunConfig, TrainConfig
from trainshort.data.preparation import prepare
from trainshort.evaluate.attention_inputs import attention_calls
from trainshort.train.checkpoint import best_checkpoint, load_model
from trainshort.train.loop import train

LENGTH = 16_384


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small ALiBi model, trained at 64 bytes until it has learned to spell, and a long text of the same kind."""
    folder = tmp_path_factory.mktemp("skipping")
    (folder / "text.txt").write_text(prose(4000), encoding="utf-8")
    data = DataConfig(corpus=str(folder / "text.txt"), tokenizer="bytes", folder=folder / "data")
    prepare(data, progress=False)
    config = RunConfig(
        model=ModelConfig(layers=2, width=64, heads=8),
        data=data,
        train=TrainConfig(length=64, batch=16, steps=120),
    )
    train(config, folder / "run", quiet=True)
    checkpoint = best_checkpoint(folder / "run")
    assert checkpoint is not None
    text = prose(1000, seed=1).encode()[: LENGTH + 1]
    return load_model(checkpoint), torch.tensor(list(text))[None]


def perplexity(trained, tolerance):
    model, tokens = trained
    for layer in model.layers:
        layer.attention.config = model.config.replace(tolerance=tolerance)
    return math.exp(model.token_nll(tokens[:, :-1], tokens[:, 1:]).double().mean())


def test_perplexity_at_16384_tokens_is_the_same_with_and_without_skipping(trained):
    whole = perplexity(trained, 0.0)
    assert whole < 12  # it has learned: bytes by chance are 256
    assert perplexity(trained, 1e-6) == pytest.approx(whole, rel=1e-5)


def test_keys_are_left_out_at_the_tolerance_that_models_have(trained):
    """The certificate is the mass that the backend bounded away: with nothing skipped it would be 0."""
    model, tokens = trained
    for call in attention_calls(model, tokens[:, :LENGTH]):
        steepest = float(call.bias.slopes.max())
        for tolerance in (1e-6, 1e-3):
            certificate = attend(
                call.q, call.k, call.v, bias=call.bias, backend="windowed", tolerance=tolerance, return_stats=True
            ).certificate
            skipping = certificate[0][call.bias.slopes == steepest]
            assert (skipping > 0).all()
            assert certificate.max() <= tolerance


def test_the_setting_is_stored_with_the_model(trained):
    assert trained[0].config.tolerance == 1e-6
