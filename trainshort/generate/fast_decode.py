"""One token through the layers in compiled code: reading the weights is all that a token costs, and torch reads them
with one core.

The transformer block is model.py's; step.c is its only other copy, for models whose queries and keys meet as they come
but for a factor, under a linear bias, a gated clock (FoX) or none. All others, and caches that only know `attend`, go
through the model itself.
"""

import ctypes
import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from trainshort.attention import LinearBias
from trainshort.model.cache import Cache
from trainshort.model.cache.ring_buffer import kernel_unavailable_reason, library
from trainshort.model.embeddings import Vocabulary
from trainshort.model.positions import Gate, zero_bias_for_nope_heads
from trainshort.model.transformer import Attention, Block, TransformerLM

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3}
MIN_PARALLEL_WEIGHTS = 1 << 15
"""Weights below which one thread is quicker than two."""


class DecodeLinear(ctypes.Structure):
    """out = activation(weight · norm(x) + bias) + residual, of one row."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "gain", "shift", "residual", "out", "scratch")),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("threads", "activation", "normed")),
    ]

    def __init__(
        self, weight: Tensor, bias: Tensor | None, norm: nn.Module | None = None, activation: str | None = None
    ) -> None:
        assert library().trainshort_linear_size() == ctypes.sizeof(DecodeLinear), "step.c and one_row.py disagree"
        scratch = weight.new_empty(weight.shape[1])
        super().__init__(inputs=weight.shape[1], outputs=weight.shape[0], activation=ACTIVATIONS[activation])
        self.weight, self.bias, self.scratch = weight.data_ptr(), _address(bias), scratch.data_ptr()
        if isinstance(norm, nn.LayerNorm):
            self.gain, self.shift = _address(norm.weight), _address(norm.bias)
            self.normed, self.eps = 1, norm.eps
        self.few = weight.numel() <= MIN_PARALLEL_WEIGHTS
        self.kept = (weight, bias, norm, scratch)  # the struct holds bare addresses

    def __call__(self, x: Float[Tensor, "1 1 inputs"]) -> Float[Tensor, "1 1 outputs"]:
        out = x.new_empty(1, 1, self.outputs)
        self.x, self.out = x.data_ptr(), out.data_ptr()
        self.threads = 1 if self.few else torch.get_num_threads()
        library().trainshort_linear(ctypes.byref(self))
        return out

    def bind(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> "DecodeLinear":
        """From one fixed buffer to another, for step.c, which says how many threads many weights get."""
        self.x, self.out, self.residual = x.data_ptr(), out.data_ptr(), _address(residual)
        self.threads = 1 if self.few else 0
        return self


class _Layer(ctypes.Structure):
    """One block: its four products, its call on the cache, and its gates, where a clock has some."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("qkv", "out", "wide", "narrow", "gate", "token")]


class _AttentionOfRow(NamedTuple):
    """What the compiled step asks of one layer's attention, beside its products."""

    attention: Attention
    slopes: Float[Tensor, " heads"]
    gate: Gate | None
    gates: Float[Tensor, " heads"]
    """What the gate says to a token; of plain heads, that their clocks stand still."""
    factors: Float[Tensor, " heads"]

    @classmethod
    def of(cls, model: TransformerLM, index: int) -> "_AttentionOfRow":
        config, attention = model.config, model.layers[index].attention
        assert isinstance(attention, Attention)
        slopes, gate = model.position.linear_slopes(), None if attention.is_nope_layer else model.position.gate(index)
        none = torch.zeros(config.heads, dtype=torch.float32)
        if slopes is not None:  # the method's own tensor: what changes it changes this
            bias = zero_bias_for_nope_heads(LinearBias(slopes), config)
            slopes = none if attention.is_nope_layer or bias is None else bias.values
        open_ = torch.full_like(none, math.inf * (1 if gate is None else gate.sign))
        return cls(attention, none if slopes is None else slopes, gate, open_, torch.empty_like(none))

    def factors_at(self, where: int) -> int:
        """The address of what the queries of a token at this place are multiplied by."""
        self.factors.fill_(self.attention.score_factor)
        if self.attention.growth is not None:
            self.factors.mul_(self.attention.growth.factor(torch.tensor([[where]])).flatten())
        return self.factors.data_ptr()


class FastDecoder:
    """Reads one token at a time, for one sequence, with the model's own weights where they lie in memory."""

    def __init__(self, model: TransformerLM) -> None:
        config = model.config
        self.model, self.shape = model, (config.key_heads, config.head_width)
        self._weights = list(model.parameters())
        self._attentions = [_AttentionOfRow.of(model, index) for index in range(config.layers)]
        self._addresses = [weight.data_ptr() for weight in self._weights]
        vocabulary = model.vocabulary
        self.head = None
        if isinstance(vocabulary, Vocabulary):
            self.head = DecodeLinear(vocabulary.output_weight, None, model.final_norm)
        # One set of buffers for all layers; x is rewritten in place by each. Float32, whatever torch's default is.
        empty = self._weights[0].new_empty
        width, keys = config.heads * config.head_width, config.key_heads * config.head_width
        self._x, self._qkv = empty(1, 1, config.width), empty(width + 2 * keys)
        self._y, self._wide = empty(width), empty(config.ffn_width)
        self._parts = [part.view(1, -1, 1, config.head_width) for part in self._qkv.split([width, keys, keys])]
        assert library().trainshort_layer_size() == ctypes.sizeof(_Layer), "step.c and one_row.py disagree"
        self._calls = [
            self._calls_of(block, own)  # pyright: ignore[reportArgumentType]
            for block, own in zip(model.layers, self._attentions, strict=True)
        ]
        addresses = [{name: ctypes.addressof(call) for name, call in calls.items()} for calls in self._calls]
        self._layers = (_Layer * config.layers)(*(_Layer(**of_layer) for of_layer in addresses))

    @classmethod
    def create(cls, model: TransformerLM) -> "FastDecoder | None":
        """None where the model itself has to do."""
        plain = all(
            w.device.type == "cpu" and w.dtype == torch.float32 and w.is_contiguous() for w in model.parameters()
        )
        return (
            cls(model) if plain and unsupported_reason(model) is None and kernel_unavailable_reason() is None else None
        )

    def _calls_of(self, block: Block, own: _AttentionOfRow) -> dict[str, DecodeLinear]:
        attention, ffn, x = block.attention, block.ffn, self._x
        gates = {}
        if own.gate is not None:
            shift, given = own.gate.bias, own.gate.weight
            weight = shift.new_zeros(len(shift), x.shape[2]) if given is None else given
            gates["gate"] = DecodeLinear(weight, shift, block.attention_norm).bind(x, own.gates)
        qkv = DecodeLinear(attention.qkv.weight, attention.qkv.bias, block.attention_norm)
        out = DecodeLinear(attention.out.weight, attention.out.bias)
        wide = DecodeLinear(ffn.wide.weight, ffn.wide.bias, block.ffn_norm, ffn.activation)
        narrow = DecodeLinear(ffn.narrow.weight, ffn.narrow.bias)
        return {
            "qkv": qkv.bind(x, self._qkv),
            "out": out.bind(self._y, x, x),
            "wide": wide.bind(x, self._wide),
            "narrow": narrow.bind(self._wide, x, x),
            **gates,
        }

    def is_current(self) -> bool:
        """Whether the weights are still where it reads them; a model that was moved or loaded anew needs another."""
        return self._addresses == [weight.data_ptr() for weight in self.model.parameters()]

    def logits(self, token: int, cache: Cache) -> Float[Tensor, "1 vocabulary"] | None:
        """Scores of the token after this one; None, and nothing done, where the cache only knows `attend`."""
        model, where = self.model, cache.length
        if model.position.max_length is not None:
            model.position.check_length(where + 1)
        if len(cache.layers) < len(self._layers):
            cache.layer(len(self._layers) - 1)
        caches, (q, k, v) = cache.layers, self._parts
        for made, layer, own in zip(self._layers, caches, self._attentions, strict=True):
            call = layer.decode_args(own.slopes, self.shape, own.attention.window)
            if call is None:
                return None
            if call.q != self._qkv.data_ptr():  # a new call, or one that read another row in between
                call.set_pointers(q, k, v, self._y)
            plain = own.attention.growth is None and own.attention.score_factor == 1
            call.factors = None if plain else own.factors_at(where)
            if own.gate is not None:
                layer.set_decay(call, own.gates, own.gate.sign)
            made.token = ctypes.addressof(call)
        self._x.copy_(model.embed(torch.tensor([[token]]), torch.tensor([[where]])))
        done = 0
        while done < len(caches):
            before = done
            done = library().trainshort_layers(self._layers, done, len(caches), torch.get_num_threads())
            for layer in caches[before:done]:  # only the last of them can want to keep this token itself
                layer.commit_token(*self._parts[1:])
        scale = model.config.logit_scale
        if self.head is None:
            return model.vocabulary.log_scores(model.final_norm(self._x)[0] * scale)
        scores = self.head(self._x)[0]
        return scores if scale == 1 else scores * scale


def unsupported_reason(model: TransformerLM) -> str | None:
    """What the compiled layers cannot do of a model, and model.py has to; None when they can do all."""
    config, position = model.config, model.position
    settings = {
        "RMSNorm": config.norm == "rms",
        "gated feed-forward layers": config.gated_feedforward,
        "parallel blocks": config.parallel_blocks,
        f"the activation {config.activation}": config.activation not in ACTIVATIONS,
        "clip_qkv": config.clip_qkv is not None,
        f"backend {config.backend}": config.backend != "auto",
        "biases that look at the text": position.is_content_dependent() and position.gate(0) is None,
        "turned queries and keys": position.rotates(),
        "bias that is not linear": position.adds_bias() and position.linear_slopes() is None,
    }
    return next((f"compiled layers have no {name}" for name, set_ in settings.items() if set_), None)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
