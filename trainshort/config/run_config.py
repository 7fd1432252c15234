"""What a run is: typed, frozen settings that refuse what they do not know.

A `RunConfig` is all there is to say about a run; the command line is made from it and `config.json` is its dump, so the
three can never disagree. No torch here: `trainshort --help` and the report read configs without it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from trainshort.config.base import StrictConfig
from trainshort.config.position_config import FINITE_FLOAT, EmptyPositionConfig, PositionConfig, parse_method_config
from trainshort.errors import HuggingFaceConfigError, InputError
from trainshort.utils.io import MissingFileError, read_json_object, write_atomic

CONFIG_FORMAT = 2
"""The version of the format of run folders. Configs with another version are refused.

Increase the version when a setting is renamed, changes its meaning or gets another default. The version is also part
of the run names (trainshort.train.run_folder.run_name).
"""
IGNORED = -100
"""A target that is not scored, as torch's cross entropy has it."""


class AdaptiveConfig(StrictConfig):
    """Adaptive input and softmax (Baevski & Auli): rare words get narrower vectors."""

    cutoffs: tuple[int, ...] = (20_000, 60_000)
    """Word ranks at which a new, narrower band begins."""
    factor: int = Field(default=4, ge=1)
    """Each band's vectors are this many times narrower than the band before."""

    @model_validator(mode="after")
    def _cutoffs_ascend(self) -> Self:
        if not self.cutoffs or list(self.cutoffs) != sorted(set(self.cutoffs)) or self.cutoffs[0] < 1:
            raise ValueError(
                f"cutoffs must be ascending positive word ranks, such as (20000, 60000); got {self.cutoffs}"
            )
        return self


class ModelConfig(StrictConfig):
    """A pre-norm decoder language model. `position` alone decides how it knows where a token stands."""

    model_config = FINITE_FLOAT

    vocab_size: int = Field(default=0, ge=0)
    """Number of token types; 0 takes it from the data."""
    causal: bool = True
    """Whether a token sees only what came before; else it is an encoder, trained as a masked language model."""
    layers: int = Field(default=4, ge=1)
    """Transformer blocks."""
    width: int = Field(default=128, ge=1)
    """Size of the residual stream."""
    heads: int = Field(default=8, ge=1)
    """Query heads; must divide width."""
    kv_heads: int | None = Field(default=None, ge=1)
    """Key and value heads (grouped-query attention); must divide heads. Default: as many as heads."""
    feedforward_width: int | None = Field(default=None, ge=1)
    """Hidden size of the feed-forward layers. Default: four times width."""
    position: str = "alibi"
    """Position method; `trainshort list positions` names them."""
    position_settings: SerializeAsAny[PositionConfig] = EmptyPositionConfig()
    """Settings of the position method, each method's its own."""
    nope_heads: int = Field(default=0, ge=0)
    """The last so many heads know no positions (half of them: NAPE). ALiBi's slopes are then those of the others."""
    nope_every: int | None = Field(default=None, ge=2)
    """Every n-th layer knows no positions and sees all; a window holds for the others (SWAN, iRoPE). Default: none."""
    length_scaling: Literal["none", "ssmax", "llama4"] = "none"
    """How scores grow with the number n of tokens seen: s ln n, s trained; or 1 + 0.1 ln(1 + floor(n / length))."""
    length_scaling_length: int = Field(default=8192, ge=1)
    """The length in llama4's growth."""
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "gelu"
    """Non-linearity of the feed-forward layers; gelu_tanh is the approximation that GPT-2 and BLOOM use."""
    gated_feedforward: bool = False
    """Whether the feed-forward layers are gated, wide times activation(gate); with silu this is SwiGLU (Llama)."""
    parallel_blocks: bool = False
    """Whether a block's feed-forward layers read what its attention reads, beside it and not after it (GPT-NeoX)."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm, or RMSNorm, which subtracts no mean and has no bias (Llama)."""
    biases: bool = True
    """Whether the linear layers and norms have biases."""
    attention_biases: bool | None = None
    """Whether the attention's linear layers have biases. Default: as biases."""
    feedforward_biases: bool | None = None
    """Whether the feed-forward linear layers have biases. Default: as biases."""
    norm_biases: bool | None = None
    """Whether LayerNorms have biases. Default: as biases."""
    clip_qkv: float | None = Field(default=None, gt=0)
    """Queries, keys and values are clipped to plus or minus this (MPT). Default: not clipped."""
    softmax_scale: float | None = Field(default=None, gt=0)
    """Factor of query · key. Default: one over the square root of the heads' width."""
    logit_scale: float = Field(default=1.0, gt=0)
    """Factor of the scores over the vocabulary."""
    final_norm: bool = True
    """Whether a norm follows the last block (the paper's WikiText-103 model has none)."""
    tie_embeddings: bool = True
    """Whether the output matrix is the input embedding."""
    embedding_scale: bool = False
    """Whether embeddings are multiplied by the square root of width, as fairseq does."""
    embedding_factor: float = Field(default=1.0, gt=0)
    """A further factor of the embeddings (BTLM, Jais)."""
    embedding_norm: bool = False
    """Whether a norm follows the embeddings (BLOOM)."""
    init: Literal["gpt2", "fairseq"] = "gpt2"
    """First weights: gpt2, normal with deviation 0.02; fairseq, as the paper's code (Xavier, embeddings dim^-0.5)."""
    adaptive: AdaptiveConfig | None = None
    """Adaptive input embeddings and softmax for very large word vocabularies. Default: one plain matrix."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on embeddings and on each residual branch."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on attention weights."""
    activation_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout inside the feed-forward layers."""
    head_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adaptive softmax's input and inside its tails."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to variances in the norms."""
    window: int | None = Field(default=None, ge=1)
    """Sliding-window attention over this many tokens. Default: all that came before."""
    backend: str = "auto"
    """Attention backend; `trainshort list backends` names them."""
    tolerance: float = Field(default=1e-6, ge=0, lt=1)
    """ALiBi: softmax mass that attention may leave out of a row where that is proven and saves work; 0: nothing."""

    @model_validator(mode="before")
    @classmethod
    def _parse_position_settings(cls, values: Any) -> Any:
        """Parse `position_settings` with the settings class of the position method."""
        if not isinstance(values, dict):
            return values
        position = values.get("position", "alibi")
        given = values.get("position_settings")
        if not isinstance(position, str) or not isinstance(given, Mapping | StrictConfig | None):
            return values  # pydantic reports the wrong type.
        return values | {"position_settings": parse_method_config(position, given)}

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of heads {self.heads}; "
                f"choose width {self.heads * max(1, round(self.width / self.heads))} or another number of heads"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")
        positioned, group = self.heads - self.nope_heads, self.heads // self.key_heads
        if positioned < 1:
            raise ValueError(f"nope_heads {self.nope_heads} leaves none of {self.heads} heads with positions")
        if positioned % group:
            raise ValueError(
                f"nope_heads {self.nope_heads} leaves {positioned} of {self.heads} heads with positions; "
                f"leave a multiple of {group}, the heads that share a key"
            )
        if self.nope_every is not None and self.nope_every > self.layers:
            raise ValueError(f"nope_every {self.nope_every} leaves all of {self.layers} layers with positions")
        if problem := self.position_settings.unsupported_reason(self.width, self.heads):
            raise ValueError(problem)
        return self

    def with_overrides(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Another position method comes with settings of its own; this one's mean nothing to it."""
        values = super().with_overrides(changes)
        if values["position"] != self.position:
            values["position_settings"] = changes.get("position_settings")
        return values

    def with_max_length(self, length: int) -> Self:
        """The same model able to read inputs of this length: learned positions need a longer table."""
        return self.replace(position_settings=self.position_settings.with_max_length(length))

    @property
    def num_rotary_kv_heads(self) -> int:
        """Key heads that positions may turn; the others belong to plain heads."""
        return self.key_heads * (self.heads - self.nope_heads) // self.heads

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def ffn_width(self) -> int:
        return self.feedforward_width or 4 * self.width

    def require_causal(self, feature: str) -> None:
        """Raise an error if this model is an encoder (`causal=False`).

        Args:
            feature: The feature that requires a causal model, as the subject of a sentence. Error messages start
                with this text.

        Raises:
            InputError: If `causal` is false.
        """
        if not self.causal:
            raise InputError(
                f"{feature} requires a causal model, but this model is an encoder (model.causal is false). "
                "Encoders can only be trained and evaluated."
            )

    def has_biases(self, place: Literal["attention", "feedforward", "norm"]) -> bool:
        """Whether the linear layers or norms at this place have biases."""
        own = getattr(self, f"{place}_biases")
        return self.biases if own is None else own

    @property
    def min_parameter_count(self) -> int:
        """Weights that a model of these settings has at least: queries, outputs, feed-forward layers, embeddings."""
        embeddings = self.vocab_size * (1 if self.adaptive else self.width)
        return self.layers * self.width * (2 * self.width + 2 * self.ffn_width) + embeddings

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads


class DataConfig(StrictConfig):
    """Which text, and how it becomes numbers."""

    corpus: str = "sotu"
    """Corpus name, file, folder or glob; `trainshort list corpora` names the built-in ones."""
    tokenizer: str = "bpe"
    """bytes, words, bpe, or the path of a saved tokenizer.json."""
    vocab_size: int = Field(default=2048, ge=2, le=1 << 24)
    """Size of a vocabulary that is built here (bpe, words)."""
    folder: Path | None = None
    """A prepared data folder. Default: data/<corpus>-<tokenizer><vocabulary>, prepared when it is missing."""
    packing: Literal["blocks", "documents"] = "blocks"
    """blocks: contiguous text, document ends ignored, as the paper; documents: packed, unable to see each other."""
    drop_last: bool = False
    """Do not train on the first token and on the last block if it is shorter than the others."""


class OptimConfig(StrictConfig):
    """How weights are moved."""

    name: Literal["adamw", "nesterov", "muon"] = "adamw"
    """adamw, the paper's Nesterov momentum, or muon: orthogonal steps for the layers' matrices, AdamW for the rest."""
    lr: float = Field(default=2e-3, gt=0, allow_inf_nan=False)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Learning rate at the end of the schedule."""
    warmup: int = Field(default=50, ge=0)
    """Steps of linear warm-up."""
    warmup_start_lr: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Learning rate at which the warm-up begins (the paper: 1e-7)."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW: decay of the two moments."""
    momentum: float = Field(default=0.99, ge=0, lt=1)
    """Nesterov and Muon: momentum (usual with Muon: 0.95)."""
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Decay of matrices; vectors (norms, biases, slopes) and the position method's own are not decayed."""
    position_lr_multiplier: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Learning rate of what the position method trains (T5's table, learned positions), as a multiple of lr."""
    embedding_lr_multiplier: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Learning rate of the vocabulary's matrices, as a multiple of lr."""
    max_grad_norm: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Largest gradient norm; 0 does not clip."""

    @field_validator("betas")
    @classmethod
    def _decays(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"both are at least 0 and less than 1, got {betas[0]} and {betas[1]}")
        return betas


class TrainConfig(StrictConfig):
    """How long, how much, how exactly."""

    length: int = Field(default=128, ge=1)
    """The paper's L: tokens in a training sequence. It ties nothing else; evaluate at any length."""
    batch: int = Field(default=32, ge=1)
    """Sequences per step, over all processes."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Sequences per forward pass of one process; smaller saves memory, not mathematics. Default: all at once."""
    steps: int = Field(default=600, ge=1)
    """Steps."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Seed of weights, order of data and dropout."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 runs the matrix products in half precision (autocast) where the hardware is fast at it."""
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Compile the model with torch.compile."""
    log_every: int = Field(default=10, ge=1)
    """Steps between two lines in metrics.jsonl."""
    valid_every: int = Field(default=200, ge=0)
    """Steps between validations; 0 validates at the end only."""
    valid_tokens: int = Field(default=65_536, ge=1)
    """At most this many validation tokens during training."""
    save_every: int = Field(default=200, ge=0)
    """Steps between checkpoints; 0 saves at the end only."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept beside the best one."""
    patience: int = Field(default=0, ge=0)
    """Stop after this many validations without a better one; 0 never stops early."""
    parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """Under torchrun: replicate (ddp), shard (fsdp), or shard within a node and replicate across (hsdp)."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, to tensorboard/ in the run folder (needs the `track` extra)."""

    @model_validator(mode="after")
    def _micro_batch_fits(self) -> Self:
        if self.micro_batch and self.batch % self.micro_batch:
            raise ValueError(f"micro_batch {self.micro_batch} must divide batch {self.batch}")
        return self


class PluginRecord(StrictConfig):
    """A plug-in that a run was made with; its code is the user's to keep."""

    name: str
    sha256: str
    for_data: bool = False
    """Whether only its corpus is used, so that nobody needs it who has the tokens, or another text."""


class RunConfig(StrictConfig):
    """Everything a run depends on."""

    format: int = CONFIG_FORMAT
    """Version of this layout; written by the program."""
    plugins: tuple[PluginRecord, ...] = ()
    """Plug-ins that the run needs; written by the program."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.optim.name == "muon" and self.train.parallel != "ddp":
            shared = f"train.parallel {self.train.parallel} shares them out"
            raise ValueError(f"optim.name muon needs whole matrices, and {shared}; use ddp, or adamw")
        if self.format != CONFIG_FORMAT:
            raise ValueError(
                f"this config has format {self.format}, and this version of trainshort reads format {CONFIG_FORMAT}; "
                "use the version that wrote it, or start a new run"
            )
        return self


def save_config(config: StrictConfig, path: Path) -> None:
    write_atomic(path, config.model_dump_json(indent=2) + "\n")


def load_config(path: Path) -> RunConfig:
    """Read a `config.json`; a missing, damaged or foreign file is told apart in words."""
    try:
        values = read_json_object(path, hint="Restore it, or start a new run.")
    except MissingFileError:
        raise InputError(f"No config at {path}. Is this a run folder? It should hold config.json.") from None
    if "model_type" in values:
        raise HuggingFaceConfigError(f"{path} is of a Hugging Face model. Bring it in first, by trainshort import.")
    if values.get("format", CONFIG_FORMAT) != CONFIG_FORMAT:
        # Checked before the fields: another format may well have other fields, and those would be blamed first.
        values = {"format": values["format"]}
    return RunConfig.parse(values, origin_path=path)
