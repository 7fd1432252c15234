"""The Transformer language model: a pre-norm Transformer for every position method.

`TransformerLM.hidden` shows how the parts work together. The parts are in other modules:

- the position methods in `trainshort.model.positions`
- the attention computation in `trainshort.attention`
- the token embeddings and the output matrix in `trainshort.model.embeddings`
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
from trainshort.model.embeddings import AdaptiveVocabulary, Vocabulary, build_vocabulary
from trainshort.model.linear import apply_linear
from trainshort.model.positions import (
    LayerInput,
    LengthScaling,
    PositionMethod,
    build_position,
    zero_bias_for_nope_heads,
)

# The activation functions of the feed-forward layers by their name in `ModelConfig.activation`.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class Loss(NamedTuple):
    """A loss that is summed over tokens. The mean loss is `total / count`.

    Attributes:
        total: The sum of the negative log-likelihoods.
        count: The number of targets in the sum.
    """

    total: Float[Tensor, ""]
    # Tuples have a method called `count`. The field replaces this method.
    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]


class ForwardContext(NamedTuple):
    """The values that all layers share during one forward pass.

    Attributes:
        position_ids: The position of each token in its own segment.
        bias: The attention bias that all layers share. Position methods whose bias depends on the text compute another
            bias in each layer and do not use this field.
        segment_ids: The segment (document) of each token, or None if each row is one segment.
    """

    position_ids: Int[Tensor, "batch length"]
    bias: Bias | None
    segment_ids: Int[Tensor, "batch length"] | None


class TransformerLM(nn.Module):
    """A causal language model, or an encoder if `config.causal` is false.

    Example:
        >>> model = TransformerLM(presets.get("small")())
        >>> logits = model(tokens)
        >>> loss = model(tokens, targets)  # Loss(total, count)
        >>> cache = Cache()
        >>> logits = model(prompt, cache=cache)
        >>> logits = model(next_tokens, cache=cache)  # continues the prompt

    Args:
        config: The settings of the model.

    Raises:
        InputError: If the vocabulary size is 0, the attention backend is unknown, or two settings cannot be combined.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise InputError(
                "Expected a positive vocabulary size, got 0. Set model.vocab_size, or take the size from the dataset."
            )
        if config.backend != "auto":
            # Raises InputError for an unknown backend. Otherwise the error would appear in the first forward pass.
            backends.get(config.backend)
        if not config.causal and config.length_scaling != "none":
            raise InputError(
                "length_scaling requires a causal model, because it depends on the number of previous tokens. "
                "Set length_scaling to 'none' for an encoder."
            )
        self.config = config
        self.checkpoint_activations = False  # True recomputes activations in the backward pass, to save memory.
        self.vocabulary: Vocabulary | AdaptiveVocabulary = build_vocabulary(config)
        self.embedding_norm: nn.Module = _make_norm(config) if config.embedding_norm else nn.Identity()
        self.position: PositionMethod = build_position(config)
        self.dropout: nn.Dropout = nn.Dropout(config.dropout)
        self.layers: nn.ModuleList = nn.ModuleList(Block(config, layer_index) for layer_index in range(config.layers))
        self.final_norm: nn.Module = _make_norm(config) if config.final_norm else nn.Identity()
        for layer in self.layers:
            if config.init == "gpt2":
                _init_gpt2(layer, config.layers)
            else:
                _init_fairseq(layer, config)

    def forward(
        self,
        tokens: Int[Tensor, "batch length"],
        targets: Int[Tensor, "batch length"] | None = None,
        *,
        segment_ids: Int[Tensor, "batch length"] | None = None,
        cache: Cache | None = None,
    ) -> Tensor | Loss:
        """Compute the logits, or the loss if targets are given.

        Both results come from `forward`, because DDP and FSDP attach their hooks to this method only.

        Args:
            tokens: The token ids.
            targets: The token id to predict at each position. Targets equal to `IGNORED` (-100) are not scored.
            segment_ids: The segment (document) of each token. A token attends to tokens of its own segment only.
            cache: The keys and values of previous tokens. `tokens` continue these tokens and are added to the cache.

        Returns:
            Without targets, the logits of shape (batch, length, vocabulary). The logits of a causal model predict the
            next token. The logits of an encoder predict the token at the same position.
            With targets, the summed loss.

        Raises:
            InputError: If a shape or a token id is invalid, or the input is too long for the position method.
        """
        hidden = self.hidden(tokens, segment_ids=segment_ids, cache=cache)
        if targets is None:
            return self.vocabulary.log_scores(hidden)
        total = self.vocabulary.total_nll(hidden.flatten(0, 1), targets.flatten())
        return Loss(total, (targets != IGNORED).sum())

    def loss(self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None = None) -> Loss:
        """Compute the summed loss. The arguments are those of `forward`."""
        result = self(tokens, targets, segment_ids=segment_ids)
        assert isinstance(result, Loss)
        return result

    @torch.no_grad()
    def token_nll(
        self, tokens: Int[Tensor, "batch length"], targets: Int[Tensor, "batch length"], start: int = 0
    ) -> Float[Tensor, "batch scored"]:
        """Compute the negative log-likelihood of each target for an evaluation, without gradients.

        Args:
            tokens: The token ids.
            targets: The token id to predict at each position.
            start: The first position that is scored. Earlier positions are context only.

        Returns:
            The negative log-likelihoods of the targets from `start` on.
        """
        hidden = self.hidden(tokens)[:, start:]
        nll = self.vocabulary.token_nll(hidden.flatten(0, 1), targets[:, start:].flatten())
        return nll.view(hidden.shape[:2])

    def hidden(
        self,
        tokens: Int[Tensor, "batch length"],
        *,
        segment_ids: Int[Tensor, "batch length"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch length width"]:
        """Compute the hidden states after the last layer. The arguments and errors are those of `forward`."""
        self._check_inputs(tokens, segment_ids, cache)

        start_position = 0
        cached_length = 0
        if cache is not None:
            start_position = cache.offset(len(tokens))
            cached_length = cache.length
        position_ids = _make_position_ids(tokens, start_position, segment_ids)

        num_keys = cached_length + tokens.shape[1]
        if segment_ids is None:
            self.position.check_length(num_keys)
        else:
            # Positions start at 0 in each segment, so only the longest segment must fit.
            self.position.check_length(int(position_ids.max()) + 1)

        shared_bias = zero_bias_for_nope_heads(self.position.score_bias(num_keys), self.config)
        context = ForwardContext(position_ids, shared_bias, segment_ids)

        x = self.dropout(self.embed(tokens, position_ids))
        for layer_index, layer in enumerate(self.layers):
            if self.checkpoint_activations and self.training:
                x = checkpoint(layer, x, self.position, context, use_reentrant=False)
            else:
                layer_cache = None if cache is None else cache.layer(layer_index)
                x = layer(x, self.position, context, layer_cache)

        x = self.final_norm(x)
        if self.config.logit_scale != 1:
            x = x * self.config.logit_scale
        return x

    def embed(
        self, tokens: Int[Tensor, "batch length"], position_ids: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch length width"]:
        """Compute the input of the first layer: the token embeddings.

        Some position methods, such as sinusoidal positions, also add a vector for the position of each token.
        """
        x = self.vocabulary.embed(tokens)
        if self.config.embedding_scale:  # whether embeddings are multiplied by the square root of the width
            x = x * self.config.width**0.5
        if self.config.embedding_factor != 1:
            x = x * self.config.embedding_factor
        return self.position.embed(self.embedding_norm(x), position_ids)

    def _check_inputs(self, tokens: Tensor, segment_ids: Tensor | None, cache: Cache | None) -> None:
        """Raise `InputError` if the arguments of `hidden` have wrong shapes, or a token id is out of range."""
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
        # On a GPU, reading the smallest and largest token id would wait for the device.
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            smallest_id = int(tokens.min())
            largest_id = int(tokens.max())
            if smallest_id < 0 or largest_id >= self.config.vocab_size:
                invalid_id = smallest_id if smallest_id < 0 else largest_id
                raise InputError(
                    f"token id {invalid_id} is outside the model's vocabulary of {self.config.vocab_size}. "
                    "Tokenize the text with the tokenizer of this model."
                )


class Block(nn.Module):
    """A Transformer block: attention and a feed-forward network, each with a pre-norm and a residual connection.

    With `config.parallel_blocks`, the feed-forward network reads the input of the block instead of the attention's
    output.
    """

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.attention_norm = _make_norm(config)
        self.attention = Attention(config, layer_index)
        self.ffn_norm = _make_norm(config)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)
        self.parallel = config.parallel_blocks

    def forward(
        self, x: Tensor, position: PositionMethod, context: ForwardContext, cache: LayerCache | None = None
    ) -> Tensor:
        """Compute the output of the block.

        Args:
            x: The input of the block, of shape (batch, length, width).
            position: The position method of the model, such as ALiBi.
            context: The position ids, bias and segment ids that all layers share.
            cache: The KV cache of this layer, or None.
        """
        attention_out = self.attention(self.attention_norm(x), position, context, cache)
        after_attention = x + self.dropout(attention_out)
        # In a parallel block, the feed-forward network reads the same input as the attention.
        ffn_input = x if self.parallel else after_attention
        return after_attention + self.dropout(self.ffn(self.ffn_norm(ffn_input)))


class Attention(nn.Module):
    """Multi-head attention of one layer. One matrix computes queries, keys and values.

    Args:
        config: The settings of the model.
        layer_index: The index of the layer, counted from 0.

    Attributes:
        is_nope_layer: Whether the layer uses no positions (NoPE). With `config.nope_every = n`, every n-th layer is a
            NoPE layer. NoPE layers do not use the sliding window.
        window: The number of tokens in the sliding window, or None.
        growth: Multiplies the queries by a factor that grows with the number of visible tokens, or None.
        score_factor: A factor on all attention scores, in addition to the usual 1 / sqrt(head width).
        blocks: A block size, or None. With a block size, a token attends to its own block and the block before. An
            evaluation with `--rotary blocks=...` sets the attribute for the time of the evaluation.
        qkv_heads: The number of query heads, key heads and value heads.
    """

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.config = config
        self.layer_index = layer_index
        # NoPE layers are layers without positions: every `nope_every`-th layer.
        self.is_nope_layer = config.nope_every is not None and (layer_index + 1) % config.nope_every == 0
        self.window = None if self.is_nope_layer else config.window

        # If a model has NoPE layers, only the NoPE layers multiply their queries by a factor of the length.
        may_scale = self.is_nope_layer or config.nope_every is None
        self.growth = None  # the factor that grows with the number of tokens that a query sees
        if config.length_scaling != "none" and may_scale and self.window is None:
            self.growth = LengthScaling(config)

        # `attend` multiplies the scores by 1 / sqrt(head_width). The product of both factors is `softmax_scale`.
        self.score_factor = 1.0
        if config.softmax_scale is not None:
            self.score_factor = config.softmax_scale * config.head_width**0.5
        self.blocks: int | None = None

        self.qkv_heads = [config.heads, config.key_heads, config.key_heads]
        has_biases = config.has_biases("attention")
        self.qkv = nn.Linear(config.width, sum(self.qkv_heads) * config.head_width, bias=has_biases)
        self.out = nn.Linear(config.width, config.width, bias=has_biases)

    def project(
        self,
        x: Float[Tensor, "batch length width"],
        position: PositionMethod,
        position_ids: Int[Tensor, "batch length"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the queries, keys and values that are passed to the attention backend.

        The queries and keys are already rotated if the position method rotates them.

        Args:
            x: The normalized input of the layer.
            position: The position method of the model.
            position_ids: The position of each token in its own segment.

        Returns:
            q, k and v, each of shape (batch, heads, length, head width). With grouped-query attention, k and v have
            fewer heads than q.
        """
        qkv = apply_linear(self.qkv, x)
        if self.config.clip_qkv is not None:
            qkv = qkv.clamp(-self.config.clip_qkv, self.config.clip_qkv)
        all_heads = qkv.unflatten(-1, (-1, self.config.head_width)).transpose(1, 2)
        q, k, v = all_heads.split(self.qkv_heads, dim=1)

        if self.score_factor != 1:
            # The queries are scaled here and not inside `attend`, because caches and analyses also read the queries.
            q = q * self.score_factor
        if self.growth is not None:
            # This layer multiplies each query by a factor that grows with the number of tokens that the query sees.
            q = self.growth(q, position_ids)
        q, k = self._rotate(q, k, position, position_ids)
        return q, k, v

    def _rotate(self, q: Tensor, k: Tensor, position: PositionMethod, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys if the position method rotates them (such as rotary embeddings).

        NoPE layers (layers without positions) are not rotated. In the other layers, the last `config.nope_heads` heads
        are not rotated.
        """
        if self.is_nope_layer or not position.rotates():
            return q, k
        num_rotary_heads = self.config.heads - self.config.nope_heads
        num_rotary_kv_heads = self.config.num_rotary_kv_heads
        rotated_q, rotated_k = position.rotate(q[:, :num_rotary_heads], k[:, :num_rotary_kv_heads], position_ids)
        if self.config.nope_heads == 0:
            return rotated_q, rotated_k
        q = torch.cat([rotated_q, q[:, num_rotary_heads:]], dim=1)
        k = torch.cat([rotated_k, k[:, num_rotary_kv_heads:]], dim=1)
        return q, k

    def bias(self, x: Tensor, position: PositionMethod, context: ForwardContext, cache: LayerCache | None) -> Any:
        """Compute the attention bias of this layer.

        Args:
            x: The normalized input of the layer.
            position: The position method of the model.
            context: The values that all layers share, including the shared bias.
            cache: The cache of this layer, or None.

        Returns:
            The shared bias, or a bias of this layer if the position method depends on the text. None means no bias.
            A cache of several sequences with different lengths returns a list with one bias per sequence.
        """
        if self.is_nope_layer:
            return None
        if not position.is_content_dependent():
            return context.bias

        def compute_bias(rows: slice, past_length: int, method_cache: dict[str, Tensor]) -> Bias | None:
            """Compute the bias of some rows (sequences) of the batch, in one layer of the model.

            The KV cache contains `past_length` tokens of these rows. The position method may keep tensors for the next
            call in `method_cache`.
            """
            layer_input = LayerInput(
                layer=self.layer_index,
                x=x[rows],
                length=past_length + x.shape[1],
                position_ids=context.position_ids[rows],
                method_cache=method_cache,
            )
            return zero_bias_for_nope_heads(position.content_bias(layer_input), self.config)

        if cache is None:
            all_rows = slice(None)
            return compute_bias(all_rows, 0, {})
        return cache.content_bias(compute_bias)

    def forward(self, x: Tensor, position: PositionMethod, context: ForwardContext, cache: LayerCache | None) -> Tensor:
        """Compute the output of the attention.

        Args:
            x: The normalized input of the layer, of shape (batch, length, width).
            position: The position method of the model.
            context: The position ids, bias and segment ids that all layers share.
            cache: The KV cache of this layer, or None. The new keys and values are added to the cache.
        """
        config = self.config
        q, k, v = self.project(x, position, context.position_ids)

        options: dict[str, Any] = {
            "bias": self.bias(x, position, context, cache),
            "window": self.window,
            "segment_ids": context.segment_ids,
            "dropout_p": config.attention_dropout if self.training else 0.0,
            "backend": config.backend,
            "tolerance": config.tolerance,
        }
        if not config.causal:
            options["causal"] = False
        if self.blocks is not None:
            # A token attends to its own block of `blocks` tokens and to the block before.
            options["blocks"] = self.blocks

        attention: Callable[..., Any]
        if cache is not None:
            attention = cache.attend
        elif self.blocks is not None:
            attention = attend_in_blocks
        else:
            attention = attend
        y = attention(q, k, v, **options)
        assert isinstance(y, Tensor)

        merged_heads = y.transpose(1, 2).flatten(2)
        return apply_linear(self.out, merged_heads)


class FeedForward(nn.Module):
    """The feed-forward network of a block.

    The network computes `narrow(activation(wide(x)))`. A gated network computes
    `narrow(activation(gate(x)) * wide(x))`. With the activation SiLU, the gated network is SwiGLU.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        has_biases = config.has_biases("feedforward")
        self.wide = nn.Linear(config.width, config.ffn_width, bias=has_biases)
        self.gate = None
        if config.gated_feedforward:
            self.gate = nn.Linear(config.width, config.ffn_width, bias=has_biases)
        self.narrow = nn.Linear(config.ffn_width, config.width, bias=has_biases)
        self.activation = config.activation
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output of the feed-forward network for each token."""
        activation = ACTIVATIONS[self.activation]
        wide = apply_linear(self.wide, x)
        if self.gate is None:
            hidden = activation(wide)
        else:
            hidden = activation(apply_linear(self.gate, x)) * wide
        return apply_linear(self.narrow, self.dropout(hidden))


def _make_norm(config: ModelConfig) -> nn.Module:
    """Create the normalization layer that `config.norm` selects."""
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.has_biases("norm"))


def _make_position_ids(
    tokens: Tensor, start_position: int | Tensor, segment_ids: Tensor | None
) -> Int[Tensor, "batch length"]:
    """Return the position of each token in its own segment (one document of a row with several documents).

    Args:
        tokens: The token ids, of shape (batch, length).
        start_position: The position of the first token: the number of tokens in the cache, for all rows or for each
            row of the batch. Negative positions belong to padding and become 0.
        segment_ids: The segment of each token, or None. Segments require that `start_position` is 0.

    Example:
        segment_ids     7 7 7 4 4 9
        position ids    0 1 2 0 1 0
    """
    if isinstance(start_position, Tensor):
        start_position = start_position.to(tokens.device)
    index_in_row = torch.arange(tokens.shape[1], device=tokens.device)
    position_ids = (index_in_row + start_position).clamp(min=0).expand(tokens.shape)
    if segment_ids is None:
        return position_ids

    is_segment_start = torch.ones_like(segment_ids, dtype=torch.bool)
    is_segment_start[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    # The running maximum copies the start of each segment to all tokens of the segment.
    segment_starts = position_ids.where(is_segment_start, 0).cummax(dim=1).values
    return position_ids - segment_starts


def _init_gpt2(block: nn.Module, num_layers: int) -> None:
    """Initialize the linear layers of a block as in GPT-2.

    Weights are normally distributed with standard deviation 0.02, and biases are zero. The layers that add to the
    residual stream (`out` and `narrow`) have smaller weights in deeper models: 0.02 / sqrt(2 * num_layers).
    """
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            adds_to_residual_stream = name.endswith((".out", ".narrow"))
            std = 0.02 / (2 * num_layers) ** 0.5 if adds_to_residual_stream else 0.02
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _init_fairseq(block: nn.Module, config: ModelConfig) -> None:
    """Initialize the attention layers of a block as in fairseq, the code of the ALiBi paper.

    The query, key and value matrices use Xavier initialization with gain 1 / sqrt(2). The output matrix uses Xavier
    initialization and a zero bias. The feed-forward layers keep PyTorch's default initialization.
    """
    attention = block.attention
    assert isinstance(attention, Attention)
    # The query, key and value matrices are stored in one matrix, one below the other.
    rows_per_matrix = [heads * config.head_width for heads in attention.qkv_heads]
    for weight in attention.qkv.weight.split(rows_per_matrix):
        nn.init.xavier_uniform_(weight, gain=2**-0.5)
    nn.init.xavier_uniform_(attention.out.weight)
    if attention.out.bias is not None:
        nn.init.zeros_(attention.out.bias)
