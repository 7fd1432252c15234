"""The three scales at which the experiments are run: laptop, gpu and paper. This module does not import torch.

Models of one scale differ only in the position method and in the training length. The number of tokens per training
step is the same at every length.
"""

from typing import Any, Literal

from pydantic import Field

from trainshort.config.base import StrictConfig
from trainshort.config.presets import presets
from trainshort.config.run_config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from trainshort.experiments.experiments import Scale, Variant
from trainshort.utils.registry import Registry

SETUPS = ("wikitext103", "books", "cc100")
"""The three combinations of dataset and model size in the paper."""

LENGTHS = (64, 128, 256, 512, 1024, 1536, 2048, 3072)
"""The training lengths in the paper."""


def _with_paper_initialization(model: ModelConfig, position: str) -> ModelConfig:
    """Return a model config with a position method and the initialization of the paper's models.

    In the paper, token embeddings are as large as the sinusoidal embeddings that are added to them. With smaller token
    embeddings (standard deviation 0.02), the comparison would be unfair to sinusoidal embeddings.
    """
    # With vocab_size=0 the size of the vocabulary is taken from the dataset. The initialization "fairseq" and
    # embedding_scale=True (multiply token embeddings by sqrt(width)) give token embeddings of about this size.
    return model.replace(position=position, vocab_size=0, init="fairseq", embedding_scale=True)


# ---- laptop


class TrainingRecipe(StrictConfig):
    """The optimizer settings that `trainshort tune` searches for each position method at the laptop scale."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(gt=0)
    """The learning rate."""
    position_lr: float = Field(default=1.0, gt=0)
    """The factor by which the learning rate is multiplied for parameters of the position method."""
    embedding_lr: float = Field(default=1.0, gt=0)
    """The factor by which the learning rate is multiplied for the token embeddings."""

    def optim_config(self, steps: int) -> OptimConfig:
        """Return the optimizer config of a run.

        Args:
            steps: The number of training steps. The learning rate rises during the first tenth of the steps. After
                that it falls linearly to 0.
        """
        return OptimConfig(
            name=self.optimizer,
            lr=self.lr,
            position_lr_multiplier=self.position_lr,
            embedding_lr_multiplier=self.embedding_lr,
            warmup=steps // 10,
            schedule="linear",
            momentum=0.95,  # the usual momentum of Muon; AdamW does not use this setting
        )


LAPTOP_TOKENS_PER_STEP = 768
"""Tokens per training step. With equally many training tokens, small steps gave a lower perplexity than large ones.

With training length 512 (2,048 in the paper) a step has 1,024 tokens, because 512 does not divide 768.
"""

LAPTOP_TOKENS = 1440 * LAPTOP_TOKENS_PER_STEP
"""The number of training tokens of every model: about 1.1 million."""

TUNED_RECIPES = {
    "alibi": TrainingRecipe(optimizer="muon", lr=0.012),
    "rotary": TrainingRecipe(optimizer="muon", lr=0.012),
    "t5": TrainingRecipe(optimizer="muon", lr=0.012, position_lr=5),
    "sinusoidal": TrainingRecipe(optimizer="muon", lr=0.012),
}
"""The optimizer settings that `trainshort tune` chose for each method. Other methods use those of ALiBi."""


def laptop_config(variant: Variant, recipe: TrainingRecipe | None = None, tokens: int = LAPTOP_TOKENS) -> RunConfig:
    """Return the config of a small model that trains in about two minutes on one CPU core.

    Args:
        variant: The model of the paper. Its training length is divided by 4.
        recipe: The optimizer settings. The default is the entry of `TUNED_RECIPES`.
        tokens: The number of training tokens.
    """
    if recipe is None:
        recipe = TUNED_RECIPES.get(variant.position, TUNED_RECIPES["alibi"])
    length = variant.length // 4
    # `batch` is the number of sequences per step. All models process about the same number of tokens per step.
    batch = max(1, round(LAPTOP_TOKENS_PER_STEP / length))
    steps = max(1, tokens // (batch * length))
    return RunConfig(
        model=_with_paper_initialization(presets.get("laptop")(), variant.position),
        data=DataConfig(corpus="sotu", tokenizer="bpe", vocab_size=2048),
        optim=recipe.optim_config(steps),
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


# ---- one GPU

GPU_TOKENS_PER_STEP = 36_864


def _gpu_train_config(
    variant: Variant, tokens_per_step: int, steps: int, interval: int, **settings: Any
) -> TrainConfig:
    """Return the training config of a model that is trained in bfloat16 on GPUs.

    Args:
        variant: The model of the paper.
        tokens_per_step: The number of tokens per training step.
        steps: The number of training steps.
        interval: How many steps lie between two validations and between two checkpoints.
        settings: Other settings of `TrainConfig`.
    """
    return TrainConfig(
        length=variant.length,
        seed=variant.seed,
        precision="bfloat16",
        batch=tokens_per_step // variant.length,
        steps=steps,
        valid_every=interval,
        save_every=interval,
        **settings,
    )


def gpu_config(variant: Variant) -> RunConfig:
    """Return the config of a model that trains in about one hour on one GPU, on WikiText-103 with sub-words.

    Args:
        variant: The model of the paper. Its training length is used without change.
    """
    # If the training length is long, one sequence is processed at a time. A step then fits into the memory of one GPU.
    micro_batch = 1 if variant.length > 1024 else None
    model = _with_paper_initialization(presets.get("small")(), variant.position)
    return RunConfig(
        model=model.replace(dropout=0.1),
        data=DataConfig(corpus="wikitext-103", tokenizer="bpe", vocab_size=8192),
        optim=OptimConfig(lr=1e-3, warmup=1000, max_grad_norm=1.0),
        train=_gpu_train_config(variant, GPU_TOKENS_PER_STEP, steps=20_000, interval=1000, micro_batch=micro_batch),
    )


# ---- paper

PAPER_GPUS = {"wikitext103": 8, "books": 8, "cc100": 128}
"""The number of GPUs in the paper, by setup."""

PAPER_TOKENS_PER_STEP = 73_728
CC100_TOKENS_PER_STEP = 2_097_152


def paper_config(variant: Variant) -> RunConfig:
    """Return the config of a model in the paper. docs/reproduce.md lists the settings that the paper does not state."""
    if variant.setup == "cc100":
        return _cc100_config(variant)
    return _wikitext_config(variant)


def _wikitext_config(variant: Variant) -> RunConfig:
    """Return the config of a model on WikiText-103 or BookCorpus: 286,000 steps on 8 GPUs.

    The BookCorpus models are trained with the same recipe, but with a sub-word vocabulary instead of words.
    """
    tokens_per_step = PAPER_TOKENS_PER_STEP
    if variant.length == 2048:
        # The authors' command fits 4 sequences of 2,048 tokens into 9,216 tokens per GPU, so 8 GPUs have 32 sequences.
        tokens_per_step = 32 * 2048
    micro_batch = 1 if variant.length == 3072 else None

    if variant.setup == "books":
        data = DataConfig(corpus="bookcorpus", tokenizer="bert/tokenizer.json", vocab_size=29_056)
        vocab_size = 0  # The size is taken from tokenizer.json.
    else:
        data = DataConfig(corpus="wikitext-103", tokenizer="words", vocab_size=267_744)
        vocab_size = 267_744

    return RunConfig(
        model=presets.get(variant.setup)().replace(position=variant.position, vocab_size=vocab_size),
        data=data,
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
        train=_gpu_train_config(
            variant, tokens_per_step, steps=286_000, interval=2000, micro_batch=micro_batch, valid_tokens=217_646
        ),
    )


def _cc100_config(variant: Variant) -> RunConfig:
    """Return the config of a model on CC100+RoBERTa: 50,000 steps on 128 GPUs.

    The paper does not state the optimizer and the batch size. The values of the BASE Layers paper are used.
    """
    return RunConfig(
        model=presets.get("cc100")().replace(position=variant.position, vocab_size=0),
        data=DataConfig(corpus="cc100", tokenizer="gpt2/tokenizer.json", vocab_size=51_200),
        optim=OptimConfig(lr=7.5e-5, warmup=2000, schedule="linear", weight_decay=0.0, max_grad_norm=0.1),
        train=_gpu_train_config(
            variant,
            CC100_TOKENS_PER_STEP,
            steps=50_000,
            interval=1000,
            micro_batch=max(1, 2048 // variant.length),
            parallel="fsdp",
            checkpoint_activations=False,
            valid_tokens=649_000,
        ),
    )


# ---- the registry

scales: Registry[Scale] = Registry("scale")

LAPTOP = Scale(
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
)

GPU = Scale(
    name="gpu",
    summary="one GPU, 6 layers of width 512, WikiText-103 in sub-words, the paper's lengths",
    training_lengths=LENGTHS,
    stride_one=16,
    sliding_tokens=65_536,
    build=gpu_config,
    gpus=1,
    uses_single_corpus=True,
)

PAPER = Scale(
    name="paper",
    summary="the published setup: 8 GPUs for WikiText-103 and BookCorpus, 128 for CC100+RoBERTa",
    training_lengths=LENGTHS,
    build=paper_config,
    gpus=8,
)

for scale in (LAPTOP, GPU, PAPER):
    scales.add(scale.name, scale)
