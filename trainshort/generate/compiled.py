"""A model's layers in the form that single tokens take: compiled products, torch for the few things around them.

The transformer is the one of model.py; `Decoder._by_layer` reads line by line like its `Block`. It exists because
reading the weights is all that a token costs, and torch reads them with one core. Where nothing but ALiBi stands
between a layer's product and its attention, step.c runs through all layers in one call.
"""

import ctypes
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from trainshort.attention import Bias
from trainshort.cache import Cache
from trainshort.cache.ring import library, unavailable
from trainshort.model import Block, TransformerLM
from trainshort.vocabulary import Vocabulary

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3}
FEW = 1 << 15
"""Weights below which one thread is quicker than two."""


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "gain", "shift", "residual", "out", "scratch")),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("threads", "activation", "normed")),
    ]


class RowLinear:
    """out = activation(weight · norm(x) + bias) + residual, of one row."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, norm: nn.Module | None = None, activation: str | None = None
    ) -> None:
        call = _Linear(inputs=weight.shape[1], outputs=weight.shape[0], activation=ACTIVATIONS[activation])
        call.weight, call.bias = weight.data_ptr(), _address(bias)
        if isinstance(norm, nn.LayerNorm):
            call.gain, call.shift = _address(norm.weight), _address(norm.bias)
            call.normed, call.eps = 1, norm.eps
        assert library().trainshort_linear_size() == ctypes.sizeof(_Linear), "row.c and compiled.py disagree"
        self._scratch = torch.empty(weight.shape[1])
        call.scratch = self._scratch.data_ptr()
        self.outputs = weight.shape[0]
        self._many = weight.numel() > FEW
        self._call, self._run = call, library().trainshort_linear
        self._keep = (weight, bias, norm)  # the struct holds bare addresses

    def __call__(self, x: Float[Tensor, "1 1 inputs"], residual: Tensor | None = None) -> Float[Tensor, "1 1 outputs"]:
        call = self._call
        out = x.new_empty(1, 1, call.outputs)
        call.x, call.out, call.residual = x.data_ptr(), out.data_ptr(), _address(residual)
        call.threads = torch.get_num_threads() if self._many else 1
        self._run(ctypes.byref(call))
        return out

    def between(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> _Linear:
        """The same as a call from one fixed buffer to another, for step.c; it lives no longer than this object."""
        call = _Linear.from_buffer_copy(self._call)
        call.x, call.out, call.residual = x.data_ptr(), out.data_ptr(), _address(residual)
        call.threads = 0 if self._many else 1
        return call


@dataclass(frozen=True)
class _Layer:
    """One block's four products."""

    qkv: RowLinear
    out: RowLinear
    wide: RowLinear
    narrow: RowLinear


class _CompiledLayer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("qkv", "out", "wide", "narrow", "token")]


class AllLayers:
    """All layers in one call, on buffers of their own: see step.c."""

    def __init__(self, model: TransformerLM, layers: list[_Layer]) -> None:
        config = model.config
        self.shape, self.window = (config.key_heads, config.head_width), config.window
        width, keys = config.heads * config.head_width, config.key_heads * config.head_width
        self.x = torch.empty(1, 1, config.width)
        self._qkv, self._y = torch.empty(width + 2 * keys), torch.empty(width)
        wide = torch.empty(max(layer.wide.outputs for layer in layers))
        parts = self._qkv.split([width, keys, keys])
        self.k, self.v = (part.view(1, config.key_heads, 1, config.head_width) for part in parts[1:])
        self._q, self._k, self._v = ((part.data_ptr(), config.head_width) for part in parts)
        assert library().trainshort_layer_size() == ctypes.sizeof(_CompiledLayer), "step.c and compiled.py disagree"
        self._layers = (_CompiledLayer * len(layers))()
        self._calls = []
        for made, layer in zip(self._layers, layers, strict=True):
            calls = {
                "qkv": layer.qkv.between(self.x, self._qkv),
                "out": layer.out.between(self._y, self.x, self.x),
                "wide": layer.wide.between(self.x, wide),
                "narrow": layer.narrow.between(wide, self.x, self.x),
            }
            for name, call in calls.items():
                setattr(made, name, ctypes.addressof(call))
            self._calls.append(calls)  # the structs hold bare addresses
        self._wide = wide

    def run(self, x: Float[Tensor, "1 1 width"], cache: Cache, bias: Bias | None) -> Float[Tensor, "1 1 width"] | None:
        """The row after the last layer; None, and nothing done, where the cache has to be asked layer by layer."""
        count = len(self._layers)
        caches = [cache.layer(index) for index in range(count)]
        for made, layer in zip(self._layers, caches, strict=True):
            token = layer.next_token(bias, self.shape, self.window)
            if token is None:
                return None
            token.reads(self._q, self._k, self._v, self._y.data_ptr())
            made.token = ctypes.addressof(token)
        self.x.copy_(x)
        done = 0
        while done < count:
            before = done
            done = library().trainshort_layers(self._layers, done, count, torch.get_num_threads())
            for layer in caches[before:done]:  # only the last of them can want to keep this token itself
                layer.took_token(self.k, self.v)
        return self.x.clone()


class Decoder:
    """Reads one token at a time, for one sequence, with the model's own weights where they lie in memory."""

    def __init__(self, model: TransformerLM) -> None:
        self.model = model
        self.layers: list[_Layer] = [_layer(block) for block in model.layers]  # pyright: ignore[reportArgumentType]
        vocabulary = model.vocabulary
        self.head, self.logit_scale = None, model.config.logit_scale
        if isinstance(vocabulary, Vocabulary):
            self.head = RowLinear(vocabulary.output_weight, None, model.final_norm)
        self.at_once = AllLayers(model, self.layers) if _nothing_in_between(model) else None
        self._addresses = [weight.data_ptr() for weight in model.parameters()]

    def current(self) -> bool:
        """Whether the weights are still where it reads them; a model that was moved or loaded anew needs another."""
        return self._addresses == [weight.data_ptr() for weight in self.model.parameters()]

    def scores(self, token: Int[Tensor, "1 1"], cache: Cache) -> Float[Tensor, "1 vocabulary"]:
        x = self._blocks(token, cache)
        if self.head is not None:
            return self.head(x)[0] if self.logit_scale == 1 else self.head(x)[0] * self.logit_scale
        return self.model.vocabulary.log_scores(self.model.final_norm(x)[0] * self.logit_scale)

    def _blocks(self, token: Tensor, cache: Cache) -> Float[Tensor, "1 1 width"]:
        position = self.model.position
        where = torch.tensor([[cache.length]])
        position.check_length(cache.length + 1)
        bias = position.score_bias(cache.length + 1)
        x = self.model.embed(token, where)
        after = self.at_once.run(x, cache, bias) if self.at_once is not None else None
        return self._by_layer(x, where, cache, bias) if after is None else after

    def _by_layer(self, x: Tensor, where: Tensor, cache: Cache, bias: Bias | None) -> Float[Tensor, "1 1 width"]:
        config, position = self.model.config, self.model.position
        for index, (block, layer) in enumerate(zip(self.model.layers, self.layers, strict=True)):
            q, k, v = block.attention.project(x, position, where, layer.qkv)  # pyright: ignore
            y = cache.layer(index).attend(q, k, v, bias=bias, window=config.window, backend=config.backend)
            x = layer.out(y.transpose(1, 2).reshape(1, 1, -1), x)
            x = layer.narrow(layer.wide(x), x)
        return x


def _nothing_in_between(model: TransformerLM) -> bool:
    """Whether a layer's queries and keys meet as they come, under a linear bias and no chosen engine."""
    position = model.position
    return not position.rotates() and position.linear_slopes() is not None and model.config.backend == "auto"


def decoder_of(model: TransformerLM) -> Decoder | None:
    """The decoder of a model; none where torch has to do: other devices and dtypes, parts that row.c lacks, or no C
    compiler."""
    plain = all(w.device.type == "cpu" and w.dtype == torch.float32 and w.is_contiguous() for w in model.parameters())
    return Decoder(model) if plain and lacks(model) is None and unavailable() is None else None


def lacks(model: TransformerLM) -> str | None:
    """What the compiled layers cannot do of a model, and model.py has to; None when they can do all."""
    config = model.config
    settings = {
        "RMSNorm": config.norm == "rms",
        "gated feed-forward layers": config.gated,
        f"the activation {config.activation}": config.activation not in ACTIVATIONS,
        "clip_qkv": config.clip_qkv is not None,
        "softmax_scale": config.softmax_scale is not None,
        "biases that look at the text": model.position.reads_text(),
    }
    return next((f"compiled layers have no {name}" for name, set_ in settings.items() if set_), None)


def _layer(block: Block) -> _Layer:
    attention, ffn = block.attention, block.ffn
    return _Layer(
        qkv=RowLinear(attention.qkv.weight, attention.qkv.bias, block.attention_norm),
        out=RowLinear(attention.out.weight, attention.out.bias),
        wide=RowLinear(ffn.wide.weight, ffn.wide.bias, block.ffn_norm, ffn.activation),
        narrow=RowLinear(ffn.narrow.weight, ffn.narrow.bias),
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
