"""The transformer language model: one pre-norm decoder for every position method.

Read `TransformerLM.hidden` first; it is the whole model. The position method has three doors (positions/base.py), the
attention one call (attention/op.py), the vocabulary two kinds (vocabulary.py); nothing here branches on any of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainshort.attention import Bias, attend, attend_in_blocks
from trainshort.config.registries import backends
from trainshort.config.run_config import IGNORED, ModelConfig
from trainshort.errors import InputError
from trainshort.model.cache import Cache, LayerCache
from trainshort.model.embeddings import build_vocabulary
from trainshort.model.linear import apply_linear
from trainshort.model.positions import (
    LayerInput,
    LengthScaling,
    PositionMethod,
    build_position,
    zero_bias_for_nope_heads,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class Loss(NamedTuple):
    """Sum of negative log-likelihoods and how many targets it sums; divide once, at the end."""

    total: Float[Tensor, ""]
    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  (a tuple has a method of this name)


class ForwardContext(NamedTuple):
    """What every layer of one forward pass needs to know beside its input."""

    where: Int[Tensor, "batch length"]
    bias: Bias | None
    """The bias that all layers share; a method that looks at the text gives each its own."""
    segment_ids: Int[Tensor, "batch length"] | None


class TransformerLM(nn.Module):
    """A causal language model, or an encoder (`causal=False`).

    model = TransformerLM(presets.get("small")())
    model(tokens)                    # logits
    model(tokens, targets)           # Loss(total, count)
    model(tokens, cache=cache)       # logits of new tokens that continue what the cache has read
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise InputError("a model needs a vocabulary; set model.vocabulary, or let the data give it.")
        if config.backend != "auto":
            backends.get(config.backend)  # an unknown backend should not wait for the first batch to be noticed
        if not config.causal and config.length_scaling != "none":
            raise InputError("length_scaling counts the tokens that came before; an encoder sees all: leave it off.")
        self.config = config
        self.checkpoint_activations = False
        self.vocabulary = build_vocabulary(config)
        self.embedding_norm = _norm(config) if config.embedding_norm else nn.Identity()
        self.position = build_position(config)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.layers))
        self.final_norm = _norm(config) if config.final_norm else nn.Identity()
        if config.init == "gpt2":
            for layer in self.layers:
                _init_gpt2(layer, config.layers)
        else:
            for layer in self.layers:
                _init_fairseq(layer, config)

    def forward(
        self,
        tokens: Int[Tensor, "batch length"],
        targets: Int[Tensor, "batch length"] | None = None,
        *,
        segment_ids: Int[Tensor, "batch length"] | None = None,
        cache: Cache | None = None,
    ) -> Tensor | Loss:
        """Logits of the next token at each position (of an encoder: of the token there), or with targets the loss;
        IGNORED targets are not scored.

        One `forward` for both, because DDP and FSDP hook exactly this call.
        """
        hidden = self.hidden(tokens, segment_ids=segment_ids, cache=cache)
        if targets is None:
            return self.vocabulary.log_scores(hidden)
        total = self.vocabulary.total_nll(hidden.flatten(0, 1), targets.flatten())
        return Loss(total, (targets != IGNORED).sum())

    def loss(self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None = None) -> Loss:
        result = self(tokens, targets, segment_ids=segment_ids)
        assert isinstance(result, Loss)
        return result

    @torch.no_grad()
    def token_nll(
        self, tokens: Int[Tensor, "batch length"], targets: Int[Tensor, "batch length"], first: int = 0
    ) -> Float[Tensor, "batch scored"]:
        """Negative log-likelihood of each target from position `first` on, for evaluation: the head is applied to the
        scored positions alone, and in slices."""
        hidden = self.hidden(tokens)[:, first:]
        nll = self.vocabulary.token_nll(hidden.flatten(0, 1), targets[:, first:].flatten())
        return nll.view(hidden.shape[:2])

    def hidden(
        self,
        tokens: Int[Tensor, "batch length"],
        *,
        segment_ids: Int[Tensor, "batch length"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch length width"]:
        """The last layer's output, before it becomes scores over the vocabulary."""
        self._check(tokens, segment_ids, cache)
        where = _positions(tokens, 0 if cache is None else cache.offset(len(tokens)), segment_ids)
        length = (0 if cache is None else cache.length) + tokens.shape[1]
        self.position.check_length(length if segment_ids is None else int(where.max()) + 1)
        step = ForwardContext(
            where, zero_bias_for_nope_heads(self.position.score_bias(length), self.config), segment_ids
        )

        x = self.dropout(self.embed(tokens, where))
        for index, layer in enumerate(self.layers):
            if self.checkpoint_activations and self.training:
                x = checkpoint(layer, x, self.position, step, use_reentrant=False)
            else:
                x = layer(x, self.position, step, None if cache is None else cache.layer(index))
        x = self.final_norm(x)
        return x if self.config.logit_scale == 1 else x * self.config.logit_scale

    def embed(
        self, tokens: Int[Tensor, "batch length"], where: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch length width"]:
        """The first layer's input."""
        x, config = self.vocabulary.embed(tokens), self.config
        if config.embedding_scale:
            x = x * config.width**0.5
        if config.embedding_factor != 1:
            x = x * config.embedding_factor
        return self.position.embed(self.embedding_norm(x), where)

    def _check(self, tokens: Tensor, segment_ids: Tensor | None, cache: Cache | None) -> None:
        if tokens.dim() != 2 or 0 in tokens.shape:
            raise InputError(
                f"tokens must have shape (batch, length) with at least one token; got {tuple(tokens.shape)}."
            )
        if cache is not None:
            self.config.require_causal("A cache")
        if segment_ids is not None and (segment_ids.shape != tokens.shape or cache is not None):
            raise InputError(
                "segment_ids must have the shape of tokens, (batch, length), and cannot be combined with a cache."
            )
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.config.vocab_size:
                wrong = low if low < 0 else high
                raise InputError(
                    f"token id {wrong} is outside the model's vocabulary of {self.config.vocab_size}; "
                    "is the text tokenized with the model's own tokenizer?"
                )


class Block(nn.Module):
    """Attention, then feed-forward (or both at once), each on a normed copy and added back."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config, index)
        self.ffn_norm = _norm(config)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)
        self.parallel = config.parallel_blocks

    def forward(
        self, x: Tensor, position: PositionMethod, step: ForwardContext, cache: LayerCache | None = None
    ) -> Tensor:
        attended = x + self.dropout(self.attention(self.attention_norm(x), position, step, cache))
        return attended + self.dropout(self.ffn(self.ffn_norm(x if self.parallel else attended)))


class Attention(nn.Module):
    """Projections around `attend`; queries, keys and values come from one matrix."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.plain = config.nope_every is not None and (index + 1) % config.nope_every == 0
        self.window = None if self.plain else config.window
        sees_all = self.window is None and (self.plain or config.nope_every is None)
        self.growth = LengthScaling(config) if sees_all and config.length_scaling != "none" else None
        scale = config.softmax_scale
        self.score_factor = 1.0 if scale is None else scale * config.head_width**0.5  # evaluate/changes.py has others
        self.blocks: int | None = None  # at inference too
        self.split = [config.heads, config.key_heads, config.key_heads]
        biases = config.has_biases("attention")
        self.qkv = nn.Linear(config.width, sum(self.split) * config.head_width, bias=biases)
        self.out = nn.Linear(config.width, config.width, bias=biases)

    def project(
        self,
        x: Float[Tensor, "batch length width"],
        position: PositionMethod,
        where: Int[Tensor, "batch length"],
        qkv: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (batch, heads, length, dim) each, as they meet in `attend`.

        `qkv` is another way to apply the same matrix, where there is one.
        """
        config, flat = self.config, apply_linear(self.qkv, x) if qkv is None else qkv(x)
        if config.clip_qkv is not None:
            flat = flat.clamp(-config.clip_qkv, config.clip_qkv)
        q, k, v = flat.unflatten(-1, (-1, config.head_width)).transpose(1, 2).split(self.split, dim=1)
        if self.score_factor != 1:
            # Here and not by attend's `scale`: what bounds a cache, and what is analyzed, are these queries.
            q = q * self.score_factor
        if self.growth is not None:
            q = self.growth(q, where)
        return *self._rotate(q, k, position, where), v

    def _rotate(self, q: Tensor, k: Tensor, position: PositionMethod, where: Tensor) -> tuple[Tensor, Tensor]:
        """The first heads turn; plain ones, and those of a plain layer, do not."""
        if self.plain or not position.rotates():
            return q, k
        turning = self.config.heads - self.config.nope_heads, self.config.num_rotary_kv_heads
        turned = position.rotate(q[:, : turning[0]], k[:, : turning[1]], where)
        if not self.config.nope_heads:
            return turned
        q, k = (torch.cat([x, y[:, n:]], dim=1) for x, y, n in zip(turned, (q, k), turning, strict=True))
        return q, k

    def bias(self, x: Tensor, position: PositionMethod, step: ForwardContext, cache: LayerCache | None) -> Any:
        """The bias that all layers share, or this layer's own where the method looks at the text."""
        if self.plain:
            return None
        if not position.is_content_dependent():
            return step.bias

        def ask(rows: slice, past: int, place: dict[str, Tensor]) -> Bias | None:
            given = LayerInput(self.index, x[rows], past + x.shape[1], step.where[rows], place)
            return zero_bias_for_nope_heads(position.content_bias(given), self.config)

        return ask(slice(None), 0, {}) if cache is None else cache.content_bias(ask)

    def forward(self, x: Tensor, position: PositionMethod, step: ForwardContext, cache: LayerCache | None) -> Tensor:
        config = self.config
        q, k, v = self.project(x, position, step.where)
        call = attend if cache is None else cache.attend
        if self.blocks is not None:
            call = partial(attend_in_blocks if cache is None else cache.attend, blocks=self.blocks)
        y = call(
            q,
            k,
            v,
            bias=self.bias(x, position, step, cache),
            window=self.window,
            segment_ids=step.segment_ids,
            dropout_p=config.attention_dropout if self.training else 0.0,
            backend=config.backend,
            tolerance=config.tolerance,
            **({} if config.causal else {"causal": False}),
        )
        assert isinstance(y, Tensor)
        return apply_linear(self.out, y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Wide, non-linear, narrow; or wide, times a non-linear gate, narrow."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        biases = config.has_biases("feedforward")
        self.wide = nn.Linear(config.width, config.ffn_width, bias=biases)
        self.gate = nn.Linear(config.width, config.ffn_width, bias=biases) if config.gated_feedforward else None
        self.narrow = nn.Linear(config.ffn_width, config.width, bias=biases)
        self.activation = config.activation
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, x: Tensor) -> Tensor:
        activate, wide = ACTIVATIONS[self.activation], apply_linear(self.wide, x)
        x = activate(wide) if self.gate is None else activate(apply_linear(self.gate, x)) * wide
        return apply_linear(self.narrow, self.dropout(x))


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.has_biases("norm"))


def _positions(tokens: Tensor, start: int | Tensor, segment_ids: Tensor | None) -> Int[Tensor, "batch length"]:
    """Each token's position, counted from the beginning of its own segment, or on from what a cache has read.

    segment_ids 7 7 7 4 4 9   →   0 1 2 0 1 0
    """
    index = torch.arange(tokens.shape[1], device=tokens.device)
    start = start.to(tokens.device) if isinstance(start, Tensor) else start
    index = (index + start).clamp(min=0).expand(tokens.shape)  # below 0 is padding, which stands nowhere
    if segment_ids is None:
        return index
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return index - index.where(begins, 0).cummax(dim=1).values


def _init_gpt2(block: nn.Module, layers: int) -> None:
    """Normal weights with deviation 0.02; what writes to the residual stream is smaller the deeper the model."""
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            writes = name.endswith((".out", ".narrow"))
            nn.init.normal_(module.weight, std=0.02 / (2 * layers) ** 0.5 if writes else 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _init_fairseq(block: nn.Module, config: ModelConfig) -> None:
    """The paper's code: each of q, k and v Xavier with gain 1/√2, the output projection Xavier with a zero bias, the
    feed-forward layers as torch makes them."""
    attention = block.attention
    assert isinstance(attention, Attention)
    for part in attention.qkv.weight.split([heads * config.head_width for heads in attention.split]):
        nn.init.xavier_uniform_(part, gain=2**-0.5)
    nn.init.xavier_uniform_(attention.out.weight)
    if attention.out.bias is not None:
        nn.init.zeros_(attention.out.bias)
