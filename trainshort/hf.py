"""Our models as Hugging Face models: one import, and AutoModelForCausalLM, generate, pipeline, Trainer take them.

    import trainshort.hf
    model = AutoModelForCausalLM.from_pretrained("exported")

The class carries every model there is here: adaptive vocabularies, all position methods, all settings. It holds a
`TransformerLM` and adds what transformers asks of a model: its kinds of caches, padding, packed documents.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from trainshort.attention import attend
from trainshort.config import ModelConfig
from trainshort.errors import InputError
from trainshort.model import TransformerLM
from trainshort.positions import PositionMethod

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
    def of(cls, config: ModelConfig, trained_at: int | None = None, **others: Any) -> "TrainshortConfig":
        return cls(
            model=config.model_dump(mode="json"),
            vocab_size=config.vocabulary,
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
        self.model = TransformerLM(ModelConfig.read(config.model))
        self.post_init()

    @classmethod
    def of(cls, model: TransformerLM, trained_at: int | None = None) -> "TrainshortForCausalLM":
        """A model that is in memory; the weights are the same tensors."""
        with torch.device("meta"):
            made = cls(TrainshortConfig.of(model.config, trained_at))
        made.model = model
        return made.eval()

    def _init_weights(self, module: nn.Module) -> None:
        """Weights come from a file. What is in none (ALiBi's slopes follow from the settings) is computed again, since
        transformers gives such buffers memory without content."""
        if isinstance(module, PositionMethod):
            stored = [weight.detach().clone() for weight in module.parameters()]
            module.fill()
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
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and not self.training:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is None:
            hidden = self.model.hidden(input_ids, documents=_documents(attention_mask, position_ids))
        else:
            cache = _Borrowed(past_key_values, attention_mask, input_ids.shape[1])
            with torch.no_grad():
                hidden = self.model.hidden(input_ids, cache=cache)  # pyright: ignore[reportArgumentType]
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.vocabulary.log_scores(hidden[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)  # pyright: ignore


def _documents(mask: Tensor | None, where: Tensor | None) -> Tensor | None:
    """Numbers of documents: padding is one of its own, and packed documents begin where positions do not go on."""
    if (padding := _padding(mask)) is not None:
        return padding
    if where is None or where.shape[1] < 2:
        return None
    jumps = torch.ones_like(where)
    jumps[:, 0], jumps[:, 1:] = 0, (where[:, 1:] != where[:, :-1] + 1).long()
    return jumps.cumsum(1) if bool(jumps.any()) else None


def _padding(mask: Tensor | None, total: int | None = None) -> Tensor | None:
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

    def __init__(self, cache: Cache, mask: Tensor | None, new: int) -> None:
        self.cache, self.length = cache, int(cache.get_seq_length())
        self.total = self.length + new
        self.documents = _padding(mask, self.total)

    def offset(self, batch: int) -> int | Tensor:
        """Text read so far, less the padding that is still to be read before the text goes on."""
        if self.documents is None:
            return self.length
        before, after = self.documents[:, : self.length], self.documents[:, self.length :]
        return before.sum(1, keepdim=True) - (1 - after).sum(1, keepdim=True)

    def layer(self, index: int) -> "_BorrowedLayer":
        return _BorrowedLayer(self, index)


class _BorrowedLayer:
    def __init__(self, whole: _Borrowed, index: int) -> None:
        self.whole, self.index = whole, index

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        k, v = self.whole.cache.update(k, v, self.index)
        total = self.whole.total  # static caches give back all their room
        out = attend(q, k[:, :, :total], v[:, :, :total], **{**settings, "documents": self.whole.documents})
        assert isinstance(out, Tensor)
        return out


AutoConfig.register(KIND, TrainshortConfig, exist_ok=True)
AutoModelForCausalLM.register(TrainshortConfig, TrainshortForCausalLM, exist_ok=True)
