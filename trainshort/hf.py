"""Our models as Hugging Face models: one import, and AutoModelForCausalLM, generate, pipeline, Trainer take them.

    import trainshort.hf
    model = AutoModelForCausalLM.from_pretrained("exported")

The class carries every model there is here: adaptive vocabularies, all position methods, all settings. It holds a
`TransformerLM` and adds what transformers asks of a model: its kinds of caches, padding, packed documents.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from trainshort.attention import Bias, attend, attend_in_blocks
from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.model.cache.full import ContentBiasFunction
from trainshort.model.positions import PositionMethod
from trainshort.model.transformer import TransformerLM

KIND = "trainshort"


class TrainshortConfig(PreTrainedConfig):
    """Our settings under `model`; the rest is what transformers sizes its caches by."""

    model_type = KIND
    model: dict[str, Any] | None = None
    vocab_size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    trained_at: int | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = False  # our one matrix has one name, so there is nothing to tie

    @classmethod
    def from_model_config(cls, config: ModelConfig, trained_at: int | None = None, **others: Any) -> "TrainshortConfig":
        return cls(
            model=config.model_dump(mode="json"),
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.key_heads,
            trained_at=trained_at,
            **others,
        )


class TrainshortForCausalLM(PreTrainedModel, GenerationMixin):
    """A `TransformerLM` in transformers' clothes."""

    config_class = TrainshortConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = False

    def __init__(self, config: TrainshortConfig) -> None:
        super().__init__(config)
        if not isinstance(config.model, dict):
            raise InputError("A trainshort model's config.json should hold its settings under 'model'.")
        self.model = TransformerLM(ModelConfig.parse(config.model))
        self.post_init()

    @classmethod
    def from_trainshort(cls, model: TransformerLM, trained_at: int | None = None) -> "TrainshortForCausalLM":
        """A model that is in memory; the weights are the same tensors."""
        with torch.device("meta"):
            made = cls(TrainshortConfig.from_model_config(model.config, trained_at))
        made.model = model
        return made.eval()

    def _init_weights(self, module: nn.Module) -> None:
        """Weights come from a file. What is in none (ALiBi's slopes follow from the settings) is computed again, since
        transformers gives such buffers memory without content."""
        if isinstance(module, PositionMethod):
            stored = [weight.detach().clone() for weight in module.parameters()]
            module.init_float32_tensors()
            for weight, value in zip(module.parameters(), stored, strict=True):
                weight.data.copy_(value)

    def get_input_embeddings(self) -> nn.Module:
        return getattr(self.model.vocabulary, "embedding", self.model.vocabulary)  # pyright: ignore[reportReturnType]

    def get_output_embeddings(self) -> None:
        return None

    def resize_token_embeddings(self, *_: Any, **__: Any) -> Any:
        raise InputError("The vocabulary of a trained model is fixed; train another with more tokens.")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        past = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        segment_ids = _segment_ids(attention_mask, position_ids, input_ids.shape[1]) if past == 0 else None
        packed = segment_ids is not None and _several(segment_ids)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and not self.training and not packed:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is None:
            hidden = self.model.hidden(input_ids, segment_ids=segment_ids)
        elif packed:
            raise InputError("Documents packed into one row have no one past. Read them without past_key_values.")
        else:
            cache = _Borrowed(past_key_values, attention_mask, past, input_ids.shape[1])
            hidden = self.model.hidden(input_ids, cache=cache)  # pyright: ignore[reportArgumentType]
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.vocabulary.log_scores(hidden[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)  # pyright: ignore


def _segment_ids(mask: Tensor | None, where: Tensor | None, length: int) -> Tensor | None:
    """Numbers of documents, which begin where positions do not go on; 0 is padding. None where all is one text."""
    text = _text(mask, length)
    if where is None or where.shape[1] < 2:
        return text
    numbers = nn.functional.pad((where[:, 1:] != where[:, :-1] + 1).cumsum(1), (1, 0)) + 1
    if text is not None:
        return numbers * text
    return numbers if bool((numbers > 1).any()) else None


def _several(segment_ids: Tensor) -> bool:
    """Whether a row holds more than one, beside padding."""
    least = segment_ids.where(segment_ids > 0, segment_ids.max()).amin(1)
    return bool((segment_ids.amax(1) > least).any())


def _text(mask: Tensor | None, total: int) -> Tensor | None:
    """1 for text and 0 for padding, (batch, keys); none where all is text. A mask that is written out for every query
    (static caches bring one) says it in its last row."""
    if mask is None:
        return None
    if mask.dim() == 4:
        mask = mask[:, 0, -1] if mask.dtype == torch.bool else mask[:, 0, -1] > -1
    mask = mask[:, :total].long()
    return None if bool(mask.all()) else mask


class _Borrowed:
    """A cache of transformers, in the three words in which our model asks for one."""

    def __init__(self, cache: Cache, mask: Tensor | None, past: int, new: int) -> None:
        self.cache, self.length, self.total = cache, past, past + new
        self.segment_ids = _text(mask, self.total)

    def offset(self, batch: int) -> int | Tensor:
        """What to add to each new token's index to have its place in its own text, padding not counted."""
        if self.segment_ids is None:
            return self.length
        places = self.segment_ids.cumsum(1)[:, self.length :] - 1
        return places - torch.arange(places.shape[1], device=places.device)

    def layer(self, index: int) -> "_BorrowedLayer":
        return _BorrowedLayer(self, index)


class _BorrowedLayer:
    """One layer of it. A clock (FoX) lies behind each key, in further channels and to the bit: so it goes wherever beam
    search, cropping or a static cache put the key."""

    def __init__(self, whole: _Borrowed, index: int) -> None:
        self.whole, self.index = whole, index
        self.clock: Tensor | None = None

    def content_bias(self, ask: ContentBiasFunction) -> Bias | None:
        """The bias of a method that looks at the text."""
        place, past = {}, self.whole.length
        kept: Any = self.whole.cache.layers[self.index]
        if past and kept.keys.shape[3] > (dim := kept.values.shape[3]):
            place["clock"] = _laid_out(kept.keys[:, :, :past, dim:]).view(torch.float64).transpose(2, 3).flatten(1, 2)
        bias = ask(slice(None), past, place)
        self.clock = place.pop("clock", None)
        if place:
            raise InputError("Caches of transformers keep clocks and nothing else of a method. Set use_cache=False.")
        return bias

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, blocks: int | None = None, **settings: Any) -> Tensor:
        kept_k, kept_v = self.whole.cache.update(self._with_clock(k), v, self.index)
        if self.whole.length:  # else there is nothing but these, and the cache's are copies
            k, v = kept_k[:, :, : self.whole.total, : k.shape[3]], kept_v[:, :, : self.whole.total]
        settings["segment_ids"] = self.whole.segment_ids
        out = attend(q, k, v, **settings) if blocks is None else attend_in_blocks(q, k, v, blocks=blocks, **settings)
        assert isinstance(out, Tensor)
        return out

    def _with_clock(self, k: Float[Tensor, "batch kv_heads new dim"]) -> Float[Tensor, "batch kv_heads new more"]:
        if self.clock is None:
            return k
        clock = self.clock[..., -k.shape[2] :].detach().unflatten(1, (k.shape[1], -1)).transpose(2, 3)
        return torch.cat([k, _laid_out(clock).view(k.dtype)], dim=3)


def _laid_out(x: Tensor) -> Tensor:
    """A copy whose last dimension lies in one piece, also where it is 1 long, which `contiguous` passes over."""
    return x.clone(memory_format=torch.contiguous_format)


AutoConfig.register(KIND, TrainshortConfig, exist_ok=True)
AutoModelForCausalLM.register(TrainshortConfig, TrainshortForCausalLM, exist_ok=True)
