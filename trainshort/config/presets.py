"""Named model configs ("presets"): the three models of the ALiBi paper, and small models for laptops and tests.

Example:
    >>> config = presets.get("wikitext103")().replace(position="sinusoidal")
"""

from collections.abc import Callable

from trainshort.config.registries import presets
from trainshort.config.run_config import AdaptiveConfig, ModelConfig

get: Callable[[str], Callable[[], ModelConfig]] = presets.get
names: Callable[[], list[str]] = presets.names


def tiny() -> ModelConfig:
    """Return a model config for tests: 2 layers, width 64, 4 heads."""
    return ModelConfig(vocab_size=256, layers=2, width=64, heads=4)


def laptop() -> ModelConfig:
    """Return a model config for laptops: 4 layers, width 128, 8 heads."""
    return ModelConfig(vocab_size=2048, layers=4, width=128, heads=8)


def portable() -> ModelConfig:
    """Return the config of `laptop` without biases.

    Models without biases can be exported to MPT, llama.cpp and CTranslate2 without changes of the weights.
    """
    return ModelConfig(vocab_size=2048, layers=4, width=128, heads=8, biases=False)


def small() -> ModelConfig:
    """Return the model config of the benchmarks: 6 layers, width 512, 8 heads."""
    return ModelConfig(vocab_size=8192, layers=6, width=512, heads=8)


def wikitext103() -> ModelConfig:
    """Return the ALiBi paper's WikiText-103 model (Baevski & Auli, 2019) with 246,933,504 parameters."""
    return ModelConfig(
        vocab_size=267_744,
        layers=16,
        width=1024,
        heads=8,
        feedforward_width=4096,
        activation="relu",
        final_norm=False,
        embedding_scale=True,
        init="fairseq",
        adaptive=AdaptiveConfig(cutoffs=(20_000, 60_000), factor=4),
        dropout=0.3,
        attention_dropout=0.1,
        activation_dropout=0.1,
        head_dropout=0.2,
    )


def books() -> ModelConfig:
    """Return the ALiBi paper's BookCorpus model.

    The layers are those of `wikitext103`. The vocabulary is BERT's, and one matrix is used as embedding and output
    matrix.
    """
    # The paper gives the vocabulary size as "29K". BERT's cased vocabulary has 28,996 tokens. 29,056 is the next
    # multiple of 64.
    return wikitext103().replace(vocab_size=29_056, adaptive=None, head_dropout=0.0)


def cc100() -> ModelConfig:
    """Return the ALiBi paper's CC100+RoBERTa model with 1.3 billion parameters.

    The paper does not give all settings. The missing settings are those of the model "BASE Layers" (Lewis et al.,
    2021). See docs/reproduce.md.
    """
    return ModelConfig(
        vocab_size=51_200,
        layers=25,
        width=2048,
        heads=16,
        feedforward_width=8192,
        activation="relu",
        embedding_scale=True,
        init="fairseq",
    )
