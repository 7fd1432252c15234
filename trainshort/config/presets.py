"""Models by name: the paper's three, and small ones for laptops and tests.

presets.get("wikitext103")()            # a ModelConfig
presets.get("wikitext103")().replace(position="sinusoidal")
"""

from trainshort.config.registries import presets
from trainshort.config.run_config import AdaptiveConfig, ModelConfig

get, names = presets.get, presets.names


def tiny() -> ModelConfig:
    """2 layers, width 64, 4 heads: for tests."""
    return ModelConfig(vocab_size=256, layers=2, width=64, heads=4)


def laptop() -> ModelConfig:
    """4 layers, width 128, 8 heads: trains in a minute or two on two cores."""
    return ModelConfig(vocab_size=2048, layers=4, width=128, heads=8)


def portable() -> ModelConfig:
    """The laptop model without biases: transformers' MPT, llama.cpp and CTranslate2 take it as it is."""
    return ModelConfig(vocab_size=2048, layers=4, width=128, heads=8, biases=False)


def small() -> ModelConfig:
    """6 layers, width 512, 8 heads: the shape of the benchmarks."""
    return ModelConfig(vocab_size=8192, layers=6, width=512, heads=8)


def wikitext103() -> ModelConfig:
    """The paper's WikiText-103 model (Baevski & Auli), 246,933,504 parameters."""
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
    """The paper's BookCorpus model: the same body with one tied matrix over BERT's sub-words.

    The paper says "29K"; 29,056 is BERT's vocabulary of 28,996 (cased) rounded up to a multiple of 64.
    """
    return wikitext103().replace(vocab_size=29_056, adaptive=None, head_dropout=0.0)


def cc100() -> ModelConfig:
    """The paper's CC100+RoBERTa model, 1.3B; what the paper leaves open follows BASE Layers (docs/reproduce.md)."""
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
