"""Tests that skipping keys outside of the proven windows does not change the perplexity of a trained model."""

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
    """A small ALiBi model that was trained at 64 bytes, and a long text of the same kind."""
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


def compute_perplexity(trained, tolerance: float) -> float:
    """Return the perplexity if every layer may skip keys with this total softmax mass."""
    model, tokens = trained
    for layer in model.layers:
        layer.attention.config = model.config.replace(tolerance=tolerance)
    return math.exp(model.token_nll(tokens[:, :-1], tokens[:, 1:]).double().mean())


def test_skipping_does_not_change_perplexity(trained):
    exact_perplexity = compute_perplexity(trained, 0.0)
    assert exact_perplexity < 12, "the model has learned; an untrained model has a perplexity of about 256"
    assert compute_perplexity(trained, 1e-6) == pytest.approx(exact_perplexity, rel=1e-5)


def test_keys_are_skipped_at_the_default_tolerance(trained):
    """The certificate is an upper bound on the softmax mass that was skipped. It is 0 if no keys are skipped."""
    model, tokens = trained
    for call in attention_calls(model, tokens[:, :LENGTH]):
        is_steepest_head = call.bias.slopes == call.bias.slopes.max()
        for tolerance in (1e-6, 1e-3):
            certificate = attend(
                call.q, call.k, call.v, bias=call.bias, backend="windowed", tolerance=tolerance, return_stats=True
            ).certificate
            assert (certificate[0][is_steepest_head] > 0).all()
            assert certificate.max() <= tolerance


def test_tolerance_is_stored_with_the_model(trained):
    model, _ = trained
    assert model.config.tolerance == 1e-6
