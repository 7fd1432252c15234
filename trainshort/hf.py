"""trainshort models as Hugging Face models.

Import this module, and the `Auto` classes of Transformers load the folders that `trainshort export --to hf` writes:

    import trainshort.hf
    model = AutoModelForCausalLM.from_pretrained("exported")

`TrainshortForCausalLM` wraps a `TransformerLM` of any configuration. It adds what Transformers expects of a model:
the cache classes of Transformers, attention masks for padding, and position ids for packed documents.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from trainshort.attention import Bias, attend, attend_in_blocks
from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.model.positions import PositionMethod
from trainshort.model.positions.base import CUMULATIVE_DECAY_KEY
from trainshort.model.transformer import TransformerLM

MODEL_TYPE = "trainshort"
"""The `model_type` in the `config.json` of a Hugging Face folder."""

ComputeBias = Callable[[slice, int, dict[str, Tensor]], Bias | None]
"""A function that computes the attention bias of a position method.

Its arguments are the rows of the batch, the number of cached keys, and a dictionary. The position method stores tensors
in the dictionary that the next call needs.
"""


class TrainshortConfig(PreTrainedConfig):
    """The Hugging Face config of a trainshort model.

    Attributes:
        model: The settings of the model (`ModelConfig`) as a dictionary.
        trained_at: The training length in tokens, or None if it is unknown.

    The other attributes repeat settings under the names that Transformers uses, for example to allocate caches.
    """

    model_type = MODEL_TYPE
    model: dict[str, Any] | None = None
    vocab_size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    trained_at: int | None = None
    use_cache: bool = True
    # A tied matrix is stored once under one name, so Transformers must not tie two parameters.
    tie_word_embeddings: bool = False

    @classmethod
    def from_model_config(cls, config: ModelConfig, trained_at: int | None = None, **kwargs: Any) -> "TrainshortConfig":
        """Create the Hugging Face config of a model.

        Args:
            config: The settings of the model.
            trained_at: The training length in tokens.
            **kwargs: Further attributes, which are passed to `PreTrainedConfig`.
        """
        return cls(
            model=config.model_dump(mode="json"),
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.key_heads,
            trained_at=trained_at,
            **kwargs,
        )


class TrainshortForCausalLM(PreTrainedModel, GenerationMixin):
    """A `TransformerLM` with the interface of a Hugging Face causal language model."""

    config_class = TrainshortConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = False

    def __init__(self, config: TrainshortConfig) -> None:
        super().__init__(config)
        if not isinstance(config.model, dict):
            raise InputError(
                "Invalid config.json of a trainshort model: expected the model settings under the key 'model'."
            )
        self.model = TransformerLM(ModelConfig.parse(config.model))
        self.post_init()  # Transformers requires this call at the end of `__init__`.

    @classmethod
    def from_trainshort(cls, model: TransformerLM, trained_at: int | None = None) -> "TrainshortForCausalLM":
        """Wrap a model. The wrapper uses the weights of the model without copying them.

        Args:
            model: The model.
            trained_at: The training length in tokens.

        Returns:
            The Hugging Face model in evaluation mode.
        """
        # On the device "meta", no memory is allocated for the weights that are replaced.
        with torch.device("meta"):
            hf_model = cls(TrainshortConfig.from_model_config(model.config, trained_at))
        hf_model.model = model
        return hf_model.eval()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize the buffers of a position method, such as ALiBi's slopes.

        Transformers calls this function for every module after the weights are loaded. The buffers are not stored in
        the file, and Transformers allocates them without values. Loaded parameters keep their values.
        """
        if isinstance(module, PositionMethod):
            loaded_values = [parameter.detach().clone() for parameter in module.parameters()]
            module.init_float32_tensors()  # Initializes the buffers, but also the parameters.
            for parameter, value in zip(module.parameters(), loaded_values, strict=True):
                parameter.data.copy_(value)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding matrix, or the whole vocabulary module if the embeddings are adaptive."""
        return getattr(self.model.vocabulary, "embedding", self.model.vocabulary)  # pyright: ignore[reportReturnType]

    def get_output_embeddings(self) -> None:
        """Return None. The output matrix may be the embedding matrix or consist of several matrices."""
        return None

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `InputError`, because the vocabulary of a trained model cannot be resized."""
        raise InputError("The vocabulary of a trained model is fixed. Train a new model with a larger vocabulary.")

    def forward(
        self,
        input_ids: Int[Tensor, "batch length"],
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "batch length"] | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        labels: Int[Tensor, "batch length"] | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits, and the loss if labels are given.

        Args:
            input_ids: The token ids.
            attention_mask: 1 for text and 0 for padding. The cached tokens are included.
            position_ids: The position of each token in its document. Several documents can be packed into one row.
            past_key_values: The cache of previous tokens.
            use_cache: Whether a cache is created and returned if `past_key_values` is None.
            labels: The token ids from which the loss is computed.
            logits_to_keep: The number of positions at the end for which logits are computed, or the indices of the
                positions. 0 stands for all positions.
            **kwargs: Options of the loss function.

        Returns:
            The loss, the logits and the cache.

        Raises:
            InputError: If packed documents are combined with a cache.
        """
        length = input_ids.shape[1]
        past_length = 0
        if past_key_values is not None:
            past_length = int(past_key_values.get_seq_length())

        # The segment ids separate packed documents and padding.
        segment_ids = None
        if past_length == 0:
            segment_ids = _make_segment_ids(attention_mask, position_ids, length)
        is_packed = segment_ids is not None and _has_several_segments(segment_ids)

        if use_cache is None:
            use_cache = self.config.use_cache
        can_create_cache = past_key_values is None and not self.training and not is_packed
        if use_cache and can_create_cache:
            past_key_values = DynamicCache(config=self.config)

        if past_key_values is None:
            hidden = self.model.hidden(input_ids, segment_ids=segment_ids)
        elif is_packed:
            raise InputError("Packed documents cannot be combined with a cache. Do not pass past_key_values.")
        else:
            cache = _TransformersCache(past_key_values, attention_mask, past_length, length)
            hidden = self.model.hidden(input_ids, cache=cache)  # pyright: ignore[reportArgumentType]

        if isinstance(logits_to_keep, int):
            output_positions = slice(-logits_to_keep, None)  # A slice that starts at -0 selects all positions.
        else:
            output_positions = logits_to_keep
        logits = self.model.vocabulary.log_scores(hidden[:, output_positions])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)  # pyright: ignore


def _make_segment_ids(
    attention_mask: Tensor | None, position_ids: Tensor | None, length: int
) -> Int[Tensor, "batch length"] | None:
    """Return a segment id for each token, or None if every row of the batch is a single text without padding.

    Tokens attend only to tokens with the same segment id. A row can contain several texts (packing).

    A new segment starts at every token whose position does not continue the position of the token before. Text has
    segment ids from 1 on, and padding has segment id 0.

    Args:
        attention_mask: The attention mask of Transformers, or None.
        position_ids: The position of each token in its document, or None.
        length: The number of tokens in each row.
    """
    text_mask = _make_text_mask(attention_mask, length)  # None if there is no padding
    if position_ids is None or position_ids.shape[1] < 2:
        return text_mask  # The mask serves as segment ids: 1 for the text and 0 for padding.
    starts_segment = position_ids[:, 1:] != position_ids[:, :-1] + 1
    num_started = nn.functional.pad(starts_segment.cumsum(1), (1, 0))  # The first token starts no new segment.
    segment_ids = num_started + 1
    if text_mask is not None:
        return segment_ids * text_mask
    has_several_segments = bool((segment_ids > 1).any())
    return segment_ids if has_several_segments else None


def _has_several_segments(segment_ids: Int[Tensor, "batch length"]) -> bool:
    """Return whether a row contains more than one segment. Padding (segment id 0) does not count."""
    largest_ids = segment_ids.amax(1)
    # Replace the 0 of padding by a large number before the minimum is computed.
    without_padding = segment_ids.where(segment_ids > 0, segment_ids.max())
    smallest_ids = without_padding.amin(1)
    return bool((largest_ids > smallest_ids).any())


def _make_text_mask(attention_mask: Tensor | None, num_keys: int) -> Int[Tensor, "batch num_keys"] | None:
    """Return 1 for each key that is text and 0 for each key that is padding, or None if there is no padding.

    Args:
        attention_mask: The attention mask of Transformers. A mask of shape (batch, keys) contains 1 for text. A mask of
            shape (batch, 1, queries, keys), which belongs to a static cache, is boolean or contains large negative
            numbers for hidden keys.
        num_keys: The number of keys, including cached keys. A static cache has further unused keys.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() == 4:
        # The last query sees all keys that are not padding.
        attention_mask = attention_mask[:, 0, -1]
        if attention_mask.dtype != torch.bool:
            attention_mask = attention_mask > -1  # 0 for visible keys, a large negative number for hidden keys
    text_mask = attention_mask[:, :num_keys].long()
    has_padding = not bool(text_mask.all())
    return text_mask if has_padding else None


class _TransformersCache:
    """Give a cache of Transformers the interface of `trainshort.Cache`, for one forward pass.

    Args:
        cache: The cache of Transformers.
        attention_mask: The attention mask of Transformers, or None.
        past_length: The number of cached tokens.
        new_length: The number of new tokens.
    """

    def __init__(self, cache: Cache, attention_mask: Tensor | None, past_length: int, new_length: int) -> None:
        self.cache = cache
        self.length = past_length
        self.total_length = past_length + new_length
        # Padding has segment id 0, so that no text attends to padding.
        self.segment_ids = _make_text_mask(attention_mask, self.total_length)

    def offset(self, batch: int) -> int | Tensor:
        """Return the number that must be added to the index of each new token to get the position of the token.

        Without padding, the result is the number of cached tokens. With padding, the result is a tensor with one number
        for each new token, because padding does not count for positions.

        Args:
            batch: The number of sequences. Not used, but the caches of trainshort have this parameter.
        """
        if self.segment_ids is None:
            return self.length
        # Text has segment id 1, so the cumulative sum counts the text tokens.
        num_text_tokens = self.segment_ids.cumsum(1)
        position_ids = num_text_tokens[:, self.length :] - 1
        token_indices = torch.arange(position_ids.shape[1], device=position_ids.device)
        return position_ids - token_indices

    def layer(self, index: int) -> "_TransformersLayerCache":
        """Return the cache of one layer."""
        return _TransformersLayerCache(self, index)


class _TransformersLayerCache:
    """Give one layer of a cache of Transformers the interface of `trainshort.model.cache.LayerCache`.

    The Forgetting Transformer also needs the cumulative log decay of each key. The decays (float64) are appended to
    each cached key as additional dimensions, with their bits unchanged. They therefore stay with their key when
    Transformers reorders the cache for beam search or crops the cache.

    Args:
        model_cache: The cache of all layers.
        index: The index of the layer.
    """

    def __init__(self, model_cache: _TransformersCache, index: int) -> None:
        self.model_cache = model_cache
        self.index = index
        self.cumulative_decay: Float[Tensor, "batch heads total"] | None = None

    def content_bias(self, compute_bias: ComputeBias) -> Bias | None:
        """Return the attention bias of a position method whose bias depends on the text.

        The Forgetting Transformer (FoX) is such a method. Its bias is computed from the cumulative log decay of each
        token: the sum of the log forget gates of all tokens so far. The new cumulative decays are kept in this object
        until `attend` stores them with the new keys.

        Args:
            compute_bias: The function of the position method that computes the bias.

        Raises:
            InputError: If the position method stores other values than the cumulative decay.
        """
        past_length = self.model_cache.length
        method_cache: dict[str, Tensor] = {}
        cached_decay = self._read_cumulative_decay()
        if cached_decay is not None:
            method_cache[CUMULATIVE_DECAY_KEY] = cached_decay

        all_rows = slice(None)
        bias = compute_bias(all_rows, past_length, method_cache)
        self.cumulative_decay = method_cache.pop(CUMULATIVE_DECAY_KEY, None)
        if method_cache:
            raise InputError(
                "This position method stores values that the caches of Transformers cannot hold. Set use_cache=False."
            )
        return bias

    def attend(
        self,
        q: Float[Tensor, "batch heads new dim"],
        k: Float[Tensor, "batch kv_heads new dim"],
        v: Float[Tensor, "batch kv_heads new dim"],
        *,
        blocks: int | None = None,
        **options: Any,
    ) -> Float[Tensor, "batch heads new dim"]:
        """Add the new keys and values to the cache, and compute attention over all keys.

        Args:
            q: The queries of the new tokens.
            k: The keys of the new tokens.
            v: The values of the new tokens.
            blocks: The block size for `attend_in_blocks`, or None for normal attention.
            **options: The options of `attend`.
        """
        extended_k = self._append_cumulative_decay(k)
        cached_k, cached_v = self.model_cache.cache.update(extended_k, v, self.index)
        # Without cached tokens, the new keys and values are used directly. The cache holds copies of them.
        if self.model_cache.length > 0:
            total_length = self.model_cache.total_length
            head_width = k.shape[3]
            # Drop the appended decays and the unused keys of a static cache.
            k = cached_k[:, :, :total_length, :head_width]
            v = cached_v[:, :, :total_length]
        options["segment_ids"] = self.model_cache.segment_ids
        if blocks is None:
            out = attend(q, k, v, **options)
        else:
            out = attend_in_blocks(q, k, v, blocks=blocks, **options)
        assert isinstance(out, Tensor)
        return out

    def _append_cumulative_decay(
        self, k: Float[Tensor, "batch kv_heads new dim"]
    ) -> Float[Tensor, "batch kv_heads new extended_dim"]:
        """Append the cumulative log decays of the Forgetting Transformer to the new keys, as additional dimensions.

        Several query heads can share a key. The decays of all these query heads are appended to the key. Without
        decays, the keys are returned unchanged.
        """
        if self.cumulative_decay is None:
            return k
        num_kv_heads = k.shape[1]
        num_new = k.shape[2]
        new_decay = self.cumulative_decay[..., -num_new:].detach()
        # (batch, heads, new) becomes (batch, kv_heads, new, heads per kv_head).
        decay_per_key = new_decay.unflatten(1, (num_kv_heads, -1)).transpose(2, 3)
        # `view` reads the bits of the float64 numbers as several numbers of the dtype of the keys.
        decay_bits = _contiguous_copy(decay_per_key).view(k.dtype)
        return torch.cat([k, decay_bits], dim=3)

    def _read_cumulative_decay(self) -> Float[Tensor, "batch heads past"] | None:
        """Return the cumulative log decays of the cached keys, or None if the model does not store decays.

        `_append_cumulative_decay` appended the decays to the keys as additional dimensions.
        """
        past_length = self.model_cache.length
        if past_length == 0:
            return None
        layer_cache: Any = self.model_cache.cache.layers[self.index]
        head_width = layer_cache.values.shape[3]
        if layer_cache.keys.shape[3] == head_width:
            return None
        # The float64 numbers were stored as several numbers of the dtype of the keys. `view` restores them.
        decay_bits = layer_cache.keys[:, :, :past_length, head_width:]
        decay_per_key = _contiguous_copy(decay_bits).view(torch.float64)
        # (batch, kv_heads, past, heads per kv_head) becomes (batch, heads, past).
        return decay_per_key.transpose(2, 3).flatten(1, 2)


def _contiguous_copy(x: Tensor) -> Tensor:
    """Return a contiguous copy, whose last dimension can be viewed as another dtype.

    `x.contiguous()` would not copy a tensor whose last dimension has size 1, even if its stride is not 1.
    """
    return x.clone(memory_format=torch.contiguous_format)


AutoConfig.register(MODEL_TYPE, TrainshortConfig, exist_ok=True)
AutoModelForCausalLM.register(TrainshortConfig, TrainshortForCausalLM, exist_ok=True)
