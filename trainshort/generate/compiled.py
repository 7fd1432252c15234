"""A model's layers in the form that single tokens take: row.c for the products, torch for the few things around them.

The transformer is the one of model.py; `Decoder.hidden` reads line by line like its `Block`. It exists because reading
the weights is all that a token costs, and torch reads them with one core.
"""

import ctypes
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

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


@dataclass(frozen=True)
class _Layer:
    """One block's four products."""

    qkv: RowLinear
    out: RowLinear
    wide: RowLinear
    narrow: RowLinear


class Decoder:
    """Reads one token at a time, for one sequence, with the model's own weights where they lie in memory."""

    def __init__(self, model: TransformerLM) -> None:
        self.model = model
        self.layers = [_layer(block) for block in model.layers]  # pyright: ignore[reportArgumentType]
        vocabulary = model.vocabulary
        self.head = None
        if isinstance(vocabulary, Vocabulary):
            self.head = RowLinear(vocabulary.output_weight, None, model.final_norm)
        self._addresses = [weight.data_ptr() for weight in model.parameters()]

    def current(self) -> bool:
        """Whether the weights are still where it reads them; a model that was moved or loaded anew needs another."""
        return self._addresses == [weight.data_ptr() for weight in self.model.parameters()]

    def scores(self, token: Int[Tensor, "1 1"], cache: Cache) -> Float[Tensor, "1 vocabulary"]:
        x = self._blocks(token, cache)
        if self.head is not None:
            return self.head(x)[0]
        return self.model.vocabulary.log_scores(self.model.final_norm(x)[0])

    def _blocks(self, token: Tensor, cache: Cache) -> Float[Tensor, "1 1 width"]:
        model, config, position = self.model, self.model.config, self.model.position
        split = [config.heads, config.key_heads, config.key_heads]
        where = torch.tensor([[cache.length]])
        position.check_length(cache.length + 1)
        bias = position.score_bias()
        x = model.vocabulary.embed(token)
        if config.embedding_scale:
            x = x * config.width**0.5
        x = position.embed(model.embedding_norm(x), where)
        for index, layer in enumerate(self.layers):
            heads = layer.qkv(x).view(1, 1, -1, config.head_width).transpose(1, 2)
            q, k, v = heads.split(split, dim=1)
            q, k = position.rotate(q, k, where)
            y = cache.layer(index).attend(q, k, v, bias=bias, window=config.window, backend=config.backend)
            x = layer.out(y.transpose(1, 2).reshape(1, 1, -1), x)
            x = layer.narrow(layer.wide(x), x)
        return x


def decoder_of(model: TransformerLM) -> Decoder | None:
    """The decoder of a model; none where torch has to do: other devices and dtypes, or no C compiler."""
    plain = all(w.device.type == "cpu" and w.dtype == torch.float32 and w.is_contiguous() for w in model.parameters())
    return Decoder(model) if plain and unavailable() is None else None


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
