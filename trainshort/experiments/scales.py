"""The same experiments at three scales: which text, which model, how long. No torch.

The paper's lengths name an experiment's models at every scale ("the model trained at 512"); a scale says what takes
their place. Within a scale only the position method and the length differ between runs: one optimizer setting, and as
many tokens per step at every length.
"""

from typing import Any, Literal

from pydantic import Field

from trainshort.config.base import StrictConfig
from trainshort.config.presets import presets
from trainshort.config.run_config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from trainshort.experiments.experiments import Scale, Variant
from trainshort.utils.registry import Registry

SETUPS = ("wikitext103", "books", "cc100")
"""The paper's three test beds."""

LENGTHS = (64, 128, 256, 512, 1024, 1536, 2048, 3072)
"""The paper's training lengths."""


def _as_the_paper(model: ModelConfig, position: str) -> ModelConfig:
    """A small model that starts as the paper's do: embeddings as large as the sinusoids that are added to them. With
    embeddings of deviation 0.02 the sinusoids would drown them, and that method would lose for no fault of its own."""
    return model.replace(position=position, vocab_size=0, init="fairseq", embedding_scale=True)


class TrainingRecipe(StrictConfig):
    """How a model of the laptop scale is trained: what `trainshort tune` searches, and all that may differ between the
    position methods of that scale beside themselves."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(gt=0)
    position_lr: float = Field(default=1.0, gt=0)
    embedding_lr: float = Field(default=1.0, gt=0)

    def optim_config(self, steps: int) -> OptimConfig:
        """The settings of a run of so many steps; a tenth of them is warm-up, then the rate falls on a line to 0."""
        return OptimConfig(
            name=self.optimizer,
            lr=self.lr,
            position_lr_multiplier=self.position_lr,
            embedding_lr_multiplier=self.embedding_lr,
            warmup=steps // 10,
            schedule="linear",
            momentum=0.95,
        )


LAPTOP_TOKENS_PER_STEP = 768
"""Tokens per step at the laptop; at 512, which does not divide it, 1,024. Small steps and many of them are worth
most here: with equally many tokens, ALiBi's perplexity went from 67.7 to 48.1 when they became a third as large."""
LAPTOP_TOKENS = 1440 * LAPTOP_TOKENS_PER_STEP
"""Tokens that every model of the laptop scale is trained on: about 1.1 million."""
TUNED_RECIPES = {
    "alibi": TrainingRecipe(optimizer="muon", lr=0.012),
    "rotary": TrainingRecipe(optimizer="muon", lr=0.012),
    "t5": TrainingRecipe(optimizer="muon", lr=0.012, position_lr=5),
    "sinusoidal": TrainingRecipe(optimizer="muon", lr=0.012),
}
"""The way that `trainshort tune` chose for each method; one that was not searched is trained as ALiBi."""


def laptop_config(variant: Variant, way: TrainingRecipe | None = None, tokens: int = LAPTOP_TOKENS) -> RunConfig:
    """4 layers, width 128, on the embedded corpus: about two minutes on one core."""
    length = variant.length // 4
    batch = max(1, round(LAPTOP_TOKENS_PER_STEP / length))
    steps = max(1, tokens // (batch * length))
    way = way or TUNED_RECIPES.get(variant.position, TUNED_RECIPES["alibi"])
    return RunConfig(
        model=_as_the_paper(presets.get("laptop")(), variant.position),
        data=DataConfig(corpus="sotu", tokenizer="bpe", vocab_size=2048),
        optim=way.optim_config(steps),
        train=TrainConfig(
            length=length,
            batch=batch,
            steps=steps,
            seed=variant.seed,
            log_every=20,
            valid_every=max(1, steps // 4),
            valid_tokens=16_384,
            save_every=max(1, steps // 8),
            keep_checkpoints=8,
        ),
    )


def _on_gpus(variant: Variant, batch: int, steps: int, every: int, **more: Any) -> TrainConfig:
    """A GPU's run: in bfloat16, validated and saved every so many steps."""
    own = {"length": variant.length, "seed": variant.seed, "precision": "bfloat16"}
    return TrainConfig(batch=batch, steps=steps, valid_every=every, save_every=every, **own, **more)


GPU_TOKENS = 36_864


def gpu_config(variant: Variant) -> RunConfig:
    """6 layers, width 512, on WikiText-103 in sub-words: an hour or so on one GPU."""
    micro = 1 if variant.length > 1024 else None
    return RunConfig(
        model=_as_the_paper(presets.get("small")(), variant.position).replace(dropout=0.1),
        data=DataConfig(corpus="wikitext-103", tokenizer="bpe", vocab_size=8192),
        optim=OptimConfig(lr=1e-3, warmup=1000, max_grad_norm=1.0),
        train=_on_gpus(variant, GPU_TOKENS // variant.length, steps=20_000, every=1000, micro_batch=micro),
    )


PAPER_TOKENS = 73_728
PAPER_GPUS = {"wikitext103": 8, "books": 8, "cc100": 128}


def paper_config(variant: Variant) -> RunConfig:
    """The published setup; what the paper leaves open is said in docs/reproduce.md."""
    return _cc100(variant) if variant.setup == "cc100" else _wikitext(variant)


def _wikitext(variant: Variant) -> RunConfig:
    """286,000 steps of Nesterov momentum on 8 GPUs; BookCorpus by the same recipe, with a plain tied vocabulary."""
    books = variant.setup == "books"
    # At 2,048 the released command fits 4 sequences in 9,216 tokens, so a step has 65,536; elsewhere 73,728.
    batch = 32 if variant.length == 2048 else PAPER_TOKENS // variant.length
    micro = 1 if variant.length == 3072 else None
    return RunConfig(
        # A sub-word vocabulary has the size of its tokenizer.json, so the data gives it.
        model=presets.get(variant.setup)().replace(position=variant.position, vocab_size=0 if books else 267_744),
        data=DataConfig(
            corpus="bookcorpus" if books else "wikitext-103",
            tokenizer="bert/tokenizer.json" if books else "words",
            vocab_size=29_056 if books else 267_744,
        ),
        optim=OptimConfig(
            name="nesterov",
            lr=1.0,
            min_lr=1e-4,
            warmup=16_000,
            warmup_start_lr=1e-7,
            momentum=0.99,
            weight_decay=0.0,
            max_grad_norm=0.1,
        ),
        train=_on_gpus(variant, batch, steps=286_000, every=2000, micro_batch=micro, valid_tokens=217_646),
    )


CC100_TOKENS = 2_097_152


def _cc100(variant: Variant) -> RunConfig:
    """50,000 steps on 128 GPUs; optimizer and batch follow BASE Layers, since the paper does not give them."""
    return RunConfig(
        model=presets.get("cc100")().replace(position=variant.position, vocab_size=0),
        data=DataConfig(corpus="cc100", tokenizer="gpt2/tokenizer.json", vocab_size=51_200),
        optim=OptimConfig(lr=7.5e-5, warmup=2000, schedule="linear", weight_decay=0.0, max_grad_norm=0.1),
        train=_on_gpus(
            variant,
            CC100_TOKENS // variant.length,
            steps=50_000,
            every=1000,
            micro_batch=max(1, 2048 // variant.length),
            parallel="fsdp",
            checkpoint_activations=False,
            valid_tokens=649_000,
        ),
    )


scales: Registry[Scale] = Registry("scale")

for _scale in (
    Scale(
        name="laptop",
        summary="two CPU cores, 4 layers of width 128, the embedded corpus, lengths divided by 4",
        length_divisor=4,
        training_lengths=(256, 512, 1024, 2048, 3072),
        excluded_lengths={"table5": (256, 2048), "fig4": (2048,), "fig8": (2048,)},
        stride_one=32,
        sliding_tokens=4096,
        eval_tokens=32_768,
        max_eval_length=4096,
        default_split="test",
        build=laptop_config,
        uses_single_corpus=True,
    ),
    Scale(
        name="gpu",
        summary="one GPU, 6 layers of width 512, WikiText-103 in sub-words, the paper's lengths",
        training_lengths=LENGTHS,
        stride_one=16,
        sliding_tokens=65_536,
        build=gpu_config,
        gpus=1,
        uses_single_corpus=True,
    ),
    Scale(
        name="paper",
        summary="the published setup: 8 GPUs for WikiText-103 and BookCorpus, 128 for CC100+RoBERTa",
        training_lengths=LENGTHS,
        build=paper_config,
        gpus=8,
    ),
):
    scales.add(_scale.name, _scale)
