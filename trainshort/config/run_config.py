"""The settings of a run: the model, the dataset, the optimizer and the training.

The command-line options are generated from these classes. The docstring of a field is the help text of its option. A
run folder stores its `RunConfig` in `config.json`. This module does not import torch.
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
"""A target with this value is not scored. PyTorch's cross entropy uses the same value by default."""


class AdaptiveConfig(StrictConfig):
    """Settings of the adaptive input and softmax (Baevski & Auli, 2019), in which rare words have shorter vectors.

    The words are sorted by frequency and split into bands. The first band contains the most frequent words.
    """

    cutoffs: tuple[int, ...] = (20_000, 60_000)
    """Word ids at which a new band starts."""
    factor: int = Field(default=4, ge=1)
    """The vectors of a band are shorter than the vectors of the band before by this factor."""

    @model_validator(mode="after")
    def _check_cutoffs(self) -> Self:
        """Check that the cutoffs are positive and ascending, and that there is at least one cutoff.

        The cutoffs split the vocabulary, sorted by frequency, into bands with embeddings of different widths.
        """
        # The set removes duplicates, so this comparison fails for equal numbers too.
        is_ascending = list(self.cutoffs) == sorted(set(self.cutoffs))
        if not self.cutoffs or not is_ascending or self.cutoffs[0] < 1:
            raise ValueError(
                f"cutoffs must be ascending positive word ranks, such as (20000, 60000); got {self.cutoffs}"
            )
        return self


class ModelConfig(StrictConfig):
    """Settings of a Transformer language model."""

    model_config = FINITE_FLOAT

    vocab_size: int = Field(default=0, ge=0)
    """Size of the vocabulary. 0 uses the size of the dataset's vocabulary."""
    causal: bool = True
    """Train a causal language model. False trains an encoder as a masked language model."""
    layers: int = Field(default=4, ge=1)
    """Number of Transformer blocks."""
    width: int = Field(default=128, ge=1)
    """Hidden size of the model."""
    heads: int = Field(default=8, ge=1)
    """Number of query heads. The width must be a multiple of this number."""
    kv_heads: int | None = Field(default=None, ge=1)
    """Number of key-value heads (grouped-query attention). It must divide heads. Default: the number of heads."""
    feedforward_width: int | None = Field(default=None, ge=1)
    """Hidden size of the feed-forward layers. Default: four times the width."""
    position: str = "alibi"
    """Position method. `trainshort list positions` shows all methods."""
    position_settings: SerializeAsAny[PositionConfig] = EmptyPositionConfig()
    """Settings of the position method. Each method has its own settings."""
    nope_heads: int = Field(default=0, ge=0)
    """Number of heads without positions, the last heads of each layer. ALiBi's slopes are computed for the others."""
    nope_every: int | None = Field(default=None, ge=2)
    """Make every n-th layer a layer without positions and without sliding window. Default: no such layers."""
    length_scaling: Literal["none", "ssmax", "llama4"] = "none"
    """Factor on scores that grows with n visible tokens: trained s ln n, or 1 + 0.1 ln(1 + floor(n / length))."""
    length_scaling_length: int = Field(default=8192, ge=1)
    """The length in the formula of llama4."""
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "gelu"
    """Activation function of the feed-forward layers. gelu_tanh is the approximation that GPT-2 and BLOOM use."""
    gated_feedforward: bool = False
    """Use gated feed-forward layers: wide(x) * activation(gate(x)). With silu this is SwiGLU (Llama)."""
    parallel_blocks: bool = False
    """Compute attention and feed-forward layers of a block from the same input, as GPT-NeoX does."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm or RMSNorm. RMSNorm does not subtract the mean and has no bias (Llama)."""
    biases: bool = True
    """Use biases in linear layers and norms."""
    attention_biases: bool | None = None
    """Use biases in the linear layers of the attention. Default: the value of biases."""
    feedforward_biases: bool | None = None
    """Use biases in the feed-forward layers. Default: the value of biases."""
    norm_biases: bool | None = None
    """Use biases in LayerNorms. Default: the value of biases."""
    clip_qkv: float | None = Field(default=None, gt=0)
    """Clip queries, keys and values to plus or minus this number (MPT). Default: no clipping."""
    softmax_scale: float | None = Field(default=None, gt=0)
    """Factor on the product of query and key. Default: 1 / sqrt(width / heads)."""
    logit_scale: float = Field(default=1.0, gt=0)
    """Factor on the logits."""
    final_norm: bool = True
    """Apply a norm after the last block. The ALiBi paper's WikiText-103 model has no such norm."""
    tie_embeddings: bool = True
    """Use the embedding matrix as output matrix."""
    embedding_scale: bool = False
    """Multiply embeddings by the square root of the width, as fairseq does."""
    embedding_factor: float = Field(default=1.0, gt=0)
    """Additional factor on the embeddings (BTLM, Jais)."""
    embedding_norm: bool = False
    """Apply a norm after the embeddings (BLOOM)."""
    init: Literal["gpt2", "fairseq"] = "gpt2"
    """Initial weights: normal with standard deviation 0.02 (gpt2), or Xavier as in the ALiBi paper's code (fairseq)."""
    adaptive: AdaptiveConfig | None = None
    """Use adaptive input embeddings and softmax, for very large word vocabularies. Default: one embedding matrix."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the embeddings and on the output of attention and feed-forward layers."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on attention weights."""
    activation_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout inside the feed-forward layers."""
    head_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the input of the adaptive softmax and inside its tails."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Number that norms add to the variance."""
    window: int | None = Field(default=None, ge=1)
    """Number of tokens in the sliding window of the attention. Default: no sliding window."""
    backend: str = "auto"
    """Attention backend. `trainshort list backends` shows all backends."""
    tolerance: float = Field(default=1e-6, ge=0, lt=1)
    """Softmax mass that ALiBi attention may skip per query if this is proven. 0 skips nothing."""

    @model_validator(mode="before")
    @classmethod
    def _parse_position_settings(cls, values: Any) -> Any:
        """Parse `position_settings` with the settings class of the position method.

        Args:
            values: The settings of the model before the validation, usually a dictionary.

        Returns:
            The settings with a parsed `position_settings`. Values of a wrong type are returned unchanged, because
            pydantic reports them afterwards.
        """
        if not isinstance(values, dict):
            return values
        position = values.get("position", "alibi")
        position_settings = values.get("position_settings")
        if not isinstance(position, str) or not isinstance(position_settings, Mapping | StrictConfig | None):
            return values
        return values | {"position_settings": parse_method_config(position, position_settings)}

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        """Check that the numbers of heads, the width and the settings of the position method fit together."""
        if self.width % self.heads != 0:
            nearest_multiple = max(1, round(self.width / self.heads))
            raise ValueError(
                f"width {self.width} is not a multiple of heads {self.heads}; "
                f"choose width {self.heads * nearest_multiple} or another number of heads"
            )
        if self.heads % self.key_heads != 0:
            raise ValueError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")

        # NoPE heads are heads without positions. They must consist of complete groups that share a key-value head.
        num_position_heads = self.heads - self.nope_heads
        heads_per_kv_head = self.heads // self.key_heads
        if num_position_heads < 1:
            raise ValueError(f"nope_heads {self.nope_heads} leaves none of {self.heads} heads with positions")
        if num_position_heads % heads_per_kv_head != 0:
            raise ValueError(
                f"nope_heads {self.nope_heads} leaves {num_position_heads} of {self.heads} heads with positions; "
                f"leave a multiple of {heads_per_kv_head}, the number of query heads that share a key head"
            )
        if self.nope_every is not None and self.nope_every > self.layers:
            raise ValueError(f"nope_every {self.nope_every} leaves all of {self.layers} layers with positions")

        reason = self.position_settings.unsupported_reason(self.width, self.heads)
        if reason is not None:
            raise ValueError(reason)
        return self

    def with_overrides(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Return the settings as a dictionary, with `changes` applied and not yet validated.

        If `changes` selects another position method, the settings of the current method are dropped.
        """
        values = super().with_overrides(changes)
        if values["position"] != self.position:
            values["position_settings"] = changes.get("position_settings")
        return values

    def with_max_length(self, length: int) -> Self:
        """Return the settings of a model that accepts inputs of at least `length` tokens.

        Only learned positions have a maximum length. The settings of other models are not changed.
        """
        return self.replace(position_settings=self.position_settings.with_max_length(length))

    @property
    def key_heads(self) -> int:
        """The number of key-value heads. It equals the number of query heads if `kv_heads` is not set."""
        return self.kv_heads or self.heads

    @property
    def num_rotary_kv_heads(self) -> int:
        """The number of key-value heads that a position method may rotate.

        The remaining key-value heads belong to NoPE heads (heads without positions) and are not rotated.
        """
        num_position_heads = self.heads - self.nope_heads
        return self.key_heads * num_position_heads // self.heads

    @property
    def head_width(self) -> int:
        """The number of dimensions of each head."""
        return self.width // self.heads

    @property
    def ffn_width(self) -> int:
        """The hidden size of the feed-forward layers."""
        return self.feedforward_width or 4 * self.width

    @property
    def min_parameter_count(self) -> int:
        """A lower bound on the number of parameters of the model.

        The bound counts the query and output matrices of the attention, the feed-forward layers and the embeddings.
        """
        embedding_parameters = self.vocab_size * self.width
        # Adaptive embeddings give rare words shorter vectors.
        if self.adaptive is not None:
            embedding_parameters = self.vocab_size  # The vectors of rare words may have one dimension only.
        attention_parameters = 2 * self.width * self.width
        feedforward_parameters = 2 * self.width * self.ffn_width
        return self.layers * (attention_parameters + feedforward_parameters) + embedding_parameters

    def require_causal(self, feature: str) -> None:
        """Raise an error if this model is an encoder (`causal=False`).

        Args:
            feature: The feature that requires a causal model, for example "A cache". The error message starts with this
                text.

        Raises:
            InputError: If `causal` is false.
        """
        if not self.causal:
            raise InputError(
                f"{feature} requires a causal model, but this model is an encoder (model.causal is false). "
                "Encoders can only be trained and evaluated."
            )

    def has_biases(self, part: Literal["attention", "feedforward", "norm"]) -> bool:
        """Return whether a part of the model has biases.

        The setting of the part, such as `attention_biases`, overrides the setting `biases`.
        """
        part_has_biases = getattr(self, f"{part}_biases")
        return self.biases if part_has_biases is None else part_has_biases


class DataConfig(StrictConfig):
    """Settings of the dataset: the text and how it is tokenized."""

    corpus: str = "sotu"
    """Name of a corpus, or a file, folder or glob pattern. `trainshort list corpora` shows the built-in corpora."""
    tokenizer: str = "bpe"
    """Tokenizer: bytes, words, bpe, or the path of a saved tokenizer.json."""
    vocab_size: int = Field(default=2048, ge=2, le=1 << 24)
    """Size of a vocabulary that is trained on the corpus (bpe and words)."""
    folder: Path | None = None
    """Folder of the prepared dataset. It is created if missing. Default: data/<corpus>-<tokenizer><vocabulary>."""
    packing: Literal["blocks", "documents"] = "blocks"
    """blocks ignores document boundaries, as the paper does. documents prevents attention between documents."""
    drop_last: bool = False
    """Do not train on the last block if it is shorter than the others, nor on the first token."""


class OptimConfig(StrictConfig):
    """Settings of the optimizer and the learning rate schedule."""

    name: Literal["adamw", "nesterov", "muon"] = "adamw"
    """Optimizer. nesterov is the paper's optimizer. muon uses Muon for matrices and AdamW for other parameters."""
    lr: float = Field(default=2e-3, gt=0, allow_inf_nan=False)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Learning rate at the end of the schedule."""
    warmup: int = Field(default=50, ge=0)
    """Number of steps of linear warm-up."""
    warmup_start_lr: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Learning rate at the start of the warm-up. The paper uses 1e-7."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate decay after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW: decay rates of the two moments."""
    momentum: float = Field(default=0.99, ge=0, lt=1)
    """Momentum of nesterov and muon. 0.95 is common for muon."""
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Weight decay of matrices. Vectors and the parameters of the position method have no weight decay."""
    position_lr_multiplier: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Factor on the learning rate of the position method's parameters."""
    embedding_lr_multiplier: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Factor on the learning rate of the embedding and output matrices."""
    max_grad_norm: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Maximum gradient norm. Larger gradients are clipped. 0 turns clipping off."""

    @field_validator("betas")
    @classmethod
    def _check_betas(cls, betas: tuple[float, float]) -> tuple[float, float]:
        """Check that both decay rates are at least 0 and less than 1."""
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"expected two numbers from 0 to less than 1, got {betas[0]} and {betas[1]}")
        return betas


class TrainConfig(StrictConfig):
    """Settings of the training loop."""

    length: int = Field(default=128, ge=1)
    """Number of tokens in a training sequence, called L in the paper. The model can be evaluated at any length."""
    batch: int = Field(default=32, ge=1)
    """Number of sequences per step, over all processes."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Number of sequences per forward pass of a process. Smaller values save memory. Default: all at once."""
    steps: int = Field(default=600, ge=1)
    """Number of training steps."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Random seed of the initial weights, the order of the data and dropout."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 uses automatic mixed precision (autocast) if the hardware supports it well."""
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass. This saves memory and takes about a third more time."""
    compile: bool = False
    """Compile the model with torch.compile."""
    log_every: int = Field(default=10, ge=1)
    """Number of steps between two lines in metrics.jsonl."""
    valid_every: int = Field(default=200, ge=0)
    """Number of steps between validations. 0 validates at the end only."""
    valid_tokens: int = Field(default=65_536, ge=1)
    """Maximum number of tokens of a validation during training."""
    save_every: int = Field(default=200, ge=0)
    """Number of steps between checkpoints. 0 saves at the end only."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of checkpoints that are kept, not counting the best checkpoint."""
    patience: int = Field(default=0, ge=0)
    """Stop after this many validations without improvement. 0 never stops early."""
    parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """Under torchrun: replicate (ddp), shard (fsdp), or shard within a node and replicate across nodes (hsdp)."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard into tensorboard/ in the run folder. Requires the package tensorboard."""

    @model_validator(mode="after")
    def _check_micro_batch(self) -> Self:
        """Check that a batch consists of complete micro-batches."""
        if self.micro_batch is not None and self.batch % self.micro_batch != 0:
            raise ValueError(f"micro_batch {self.micro_batch} must divide batch {self.batch}")
        return self


class PluginRecord(StrictConfig):
    """A plug-in that a run uses. The code of the plug-in is not stored in the run folder."""

    name: str
    """Name of the plug-in."""
    sha256: str
    """SHA-256 of the code of the plug-in."""
    for_data: bool = False
    """Whether only the corpus comes from the plug-in. Such a plug-in is not needed if the dataset exists already."""


class RunConfig(StrictConfig):
    """All settings of a run."""

    format: int = CONFIG_FORMAT
    """Version of the config format. trainshort sets this value."""
    plugins: tuple[PluginRecord, ...] = ()
    """Plug-ins that the run uses. trainshort sets this value."""
    model: ModelConfig = ModelConfig()
    """Settings of the model."""
    data: DataConfig = DataConfig()
    """Settings of the dataset."""
    optim: OptimConfig = OptimConfig()
    """Settings of the optimizer."""
    train: TrainConfig = TrainConfig()
    """Settings of the training loop."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        """Check settings of different sections that cannot be combined, and the version of the config format."""
        if self.optim.name == "muon" and self.train.parallel != "ddp":
            raise ValueError(
                f"optim.name muon cannot be combined with train.parallel {self.train.parallel}, which shards the "
                "weight matrices; use train.parallel ddp, or optim.name adamw"
            )
        if self.format != CONFIG_FORMAT:
            raise ValueError(
                f"this config has format {self.format}, and this version of trainshort reads format {CONFIG_FORMAT}; "
                "use the version that wrote it, or start a new run"
            )
        return self


def save_config(config: StrictConfig, path: Path) -> None:
    """Write a config to a JSON file."""
    write_atomic(path, config.model_dump_json(indent=2) + "\n")


def load_config(path: Path) -> RunConfig:
    """Read the `config.json` of a run folder.

    Args:
        path: The path of the file.

    Returns:
        The validated config.

    Raises:
        HuggingFaceConfigError: If the file is the config of a Hugging Face model.
        InputError: If the file does not exist or is invalid.
    """
    try:
        values = read_json_object(path, hint="Restore it, or start a new run.")
    except MissingFileError:
        raise InputError(f"No config at {path}. Is this a run folder? It should hold config.json.") from None
    if "model_type" in values:
        raise HuggingFaceConfigError(
            f"{path} belongs to a Hugging Face model. Import the model first with `trainshort import`."
        )
    if values.get("format", CONFIG_FORMAT) != CONFIG_FORMAT:
        # Another format may have settings that this version does not know. With the format alone, the error message
        # names the wrong format instead of an unknown setting.
        values = {"format": values["format"]}
    return RunConfig.parse(values, origin_path=path)
