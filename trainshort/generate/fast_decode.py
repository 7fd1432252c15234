"""The compiled decoder: it processes one token with all layers of a model in a single call of compiled code.

Decoding one token mainly costs the time to read all weights once. PyTorch reads the weights with a single core in this
case. The compiled code reads the weights with all cores.

kernels/decode/layers.c repeats the transformer block of model/transformer.py. Models and caches that the compiled code
does not support are run by PyTorch.
"""

import ctypes
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from trainshort.attention import LinearBias
from trainshort.model.cache import Cache, LayerCache
from trainshort.model.cache.ring_buffer import kernel_unavailable_reason, load_library
from trainshort.model.embeddings import Vocabulary
from trainshort.model.positions import zero_bias_for_nope_heads
from trainshort.model.transformer import Attention, Block, TransformerLM

ACTIVATION_CODES = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3}
"""The activations that the compiled code supports, with their numbers in layers.c."""

MIN_PARALLEL_WEIGHTS = 1 << 15
"""A linear layer uses a single thread up to this number of weights, because threads would not save time."""


class DecodeLinear(ctypes.Structure):
    """A linear layer for a single token: out = activation(weight * norm(x) + bias) + residual.

    The struct mirrors `LinearArgs` in kernels/decode/layers.c. The instance refers to the weights of the model, so
    changed weights take effect.

    Args:
        weight: The weight matrix, shape (out_features, in_features).
        bias: The bias of the linear layer, or None.
        norm: The norm before the linear layer. Modules other than `nn.LayerNorm` are treated as no norm.
        activation: The name of the activation, or None.
    """

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("norm_weight", ctypes.c_void_p),
        ("norm_bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("normalized", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("eps", ctypes.c_double),
        ("num_threads", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("has_norm", ctypes.c_int32),
    ]

    def __init__(
        self, weight: Tensor, bias: Tensor | None, norm: nn.Module | None = None, activation: str | None = None
    ) -> None:
        has_same_size = load_library().trainshort_linear_args_size() == ctypes.sizeof(DecodeLinear)
        assert has_same_size, "DecodeLinear differs from LinearArgs in layers.c"
        out_features, in_features = weight.shape
        # This object is the C struct that describes the layer. Keyword arguments set the fields of the struct.
        super().__init__(in_features=in_features, out_features=out_features, activation=ACTIVATION_CODES[activation])
        normalized = weight.new_empty(in_features)  # The C code writes the normalized input here.
        self.weight = weight.data_ptr()
        self.bias = _address(bias)
        self.normalized = normalized.data_ptr()
        if isinstance(norm, nn.LayerNorm):
            self.norm_weight = _address(norm.weight)
            self.norm_bias = _address(norm.bias)
            self.eps = norm.eps
            self.has_norm = 1
        self.is_small = weight.numel() <= MIN_PARALLEL_WEIGHTS
        # The fields of the struct are plain addresses. These references keep the memory alive.
        self.referenced_memory = (weight, bias, norm, normalized)

    def __call__(self, x: Float[Tensor, "1 1 in_features"]) -> Float[Tensor, "1 1 out_features"]:
        """Apply the layer to the hidden state of one token. This object is the C struct that describes the layer."""
        out = x.new_empty(1, 1, self.out_features)
        self.x = x.data_ptr()
        self.out = out.data_ptr()
        self.num_threads = 1 if self.is_small else torch.get_num_threads()
        load_library().trainshort_linear(ctypes.byref(self))
        return out

    def bind(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> "DecodeLinear":
        """Set fixed input and output tensors. The compiled decoder then calls the layer without Python.

        Args:
            x: The input.
            out: The tensor into which the output is written. It may be the same tensor as `residual`.
            residual: A tensor that is added to the output, or None.

        Returns:
            This layer.
        """
        self.x = x.data_ptr()
        self.out = out.data_ptr()
        self.residual = _address(residual)
        # 0 means that the layer uses the number of threads of the complete decode step.
        self.num_threads = 1 if self.is_small else 0
        return self


class LayerArgs(ctypes.Structure):
    """The addresses of the arguments of one transformer block. Mirrors `LayerArgs` in kernels/decode/layers.c.

    Attributes:
        qkv, out: The linear layers before and after the attention, as `DecodeLinear`.
        up, down: The linear layers of the feed-forward network, as `DecodeLinear`.
        decay_gate: The linear layer that computes the forget gates of FoX, or None.
        attention: The `DecodeArgs` of the attention.
    """

    _fields_ = [
        ("qkv", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("decay_gate", ctypes.c_void_p),
        ("attention", ctypes.c_void_p),
    ]


class _LayerAttention:
    """The attention settings of one layer that the compiled code needs in addition to the linear layers.

    Attributes:
        attention: The attention module.
        slopes: The ALiBi slopes, one per query head. 0 for heads without ALiBi.
        gate: The weights of the forget gates (FoX), or None if the layer has no forget gates.
        gates: The tensor into which the compiled code writes the forget gates of a token, before the sigmoid.
        query_scales: The factors that the queries of a token are multiplied by, one per query head.
    """

    def __init__(self, model: TransformerLM, layer_index: int) -> None:
        attention = model.layers[layer_index].attention
        assert isinstance(attention, Attention)
        num_heads = model.config.heads
        self.attention = attention
        self.slopes = _head_slopes(model, attention)
        self.gate = None if attention.is_nope_layer else model.position.gate(layer_index)
        # The forget gates of one token. Heads without positions have no gate. Their value stays infinite, so that
        # log(sigmoid(sign * gate)) is 0, and these heads forget nothing.
        gate_sign = 1 if self.gate is None else self.gate.sign
        self.gates = torch.full((num_heads,), math.inf * gate_sign, dtype=torch.float32)
        self.query_scales = torch.empty(num_heads, dtype=torch.float32)

    def query_scales_at(self, position: int) -> int | None:
        """Compute the factor of the query of each head, for the token at `position`.

        A model may scale its attention scores by a constant, and also by a factor that grows with the length of the
        text (`attention.growth`). Both factors are applied to the queries.

        Returns:
            The address of `query_scales`, or None if the queries are not multiplied by a factor.
        """
        attention = self.attention
        if attention.growth is None and attention.score_factor == 1:
            return None
        self.query_scales.fill_(attention.score_factor)
        if attention.growth is not None:
            length_factor = attention.growth.factor(torch.tensor([[position]]))  # (1, 1 or heads, 1)
            self.query_scales.mul_(length_factor.flatten())
        return self.query_scales.data_ptr()


def _head_slopes(model: TransformerLM, attention: Attention) -> Float[Tensor, " heads"]:
    """Return the ALiBi slopes of one layer, one per query head. The slope of a head without ALiBi is 0.

    NoPE layers and NoPE heads are layers and heads without positions.
    """
    no_slopes = torch.zeros(model.config.heads, dtype=torch.float32)
    slopes = model.position.linear_slopes()
    if slopes is None or attention.is_nope_layer:
        return no_slopes
    bias = zero_bias_for_nope_heads(LinearBias(slopes), model.config)
    return no_slopes if bias is None else bias.values


class FastDecoder:
    """Processes one token of one sequence at a time with compiled code.

    The decoder refers to the weights of the model. Weights that change in place take effect. If the weights are moved
    to other memory, a new decoder is needed (see `is_current`).

    Use `FastDecoder.create`, which checks whether the compiled code supports the model.
    """

    def __init__(self, model: TransformerLM) -> None:
        config = model.config
        self.model = model
        self.kv_shape = (config.key_heads, config.head_width)
        parameters = list(model.parameters())
        self._parameter_addresses = [parameter.data_ptr() for parameter in parameters]
        self._attentions = [_LayerAttention(model, index) for index in range(config.layers)]

        # The adaptive softmax has several output matrices. PyTorch computes the adaptive softmax.
        self.output_layer = None
        if isinstance(model.vocabulary, Vocabulary):
            self.output_layer = DecodeLinear(model.vocabulary.output_weight, None, model.final_norm)

        # All layers share these buffers. The method `new_empty` creates tensors with the dtype of the weights.
        new_empty = parameters[0].new_empty
        q_width = config.heads * config.head_width
        kv_width = config.key_heads * config.head_width
        self._hidden = new_empty(1, 1, config.width)
        self._qkv = new_empty(q_width + 2 * kv_width)
        self._attention_out = new_empty(q_width)
        self._ffn_hidden = new_empty(config.ffn_width)
        q, k, v = self._qkv.split([q_width, kv_width, kv_width])
        self._q = q.view(1, -1, 1, config.head_width)
        self._k = k.view(1, -1, 1, config.head_width)
        self._v = v.view(1, -1, 1, config.head_width)

        has_same_size = load_library().trainshort_layer_args_size() == ctypes.sizeof(LayerArgs)
        assert has_same_size, "LayerArgs differs between fast_decode.py and layers.c"
        self._layer_args = (LayerArgs * config.layers)()
        self._linear_layers: list[dict[str, DecodeLinear]] = []  # keeps the linear layers alive
        for block, attention, layer_args in zip(model.layers, self._attentions, self._layer_args, strict=True):
            linear_layers = self._make_linear_layers(block, attention)  # pyright: ignore[reportArgumentType]
            for name, linear_layer in linear_layers.items():
                setattr(layer_args, name, ctypes.addressof(linear_layer))
            self._linear_layers.append(linear_layers)

    @classmethod
    def create(cls, model: TransformerLM) -> "FastDecoder | None":
        """Return a compiled decoder for a model, or None if the compiled code does not support the model.

        The compiled code reads the weights directly from memory, so they must be contiguous float32 tensors on the CPU.
        """
        for parameter in model.parameters():
            is_cpu_float32 = parameter.device.type == "cpu" and parameter.dtype == torch.float32
            if not is_cpu_float32 or not parameter.is_contiguous():
                return None
        if unsupported_reason(model) is not None or kernel_unavailable_reason() is not None:
            return None
        return cls(model)

    def _make_linear_layers(self, block: Block, layer_attention: _LayerAttention) -> dict[str, DecodeLinear]:
        """Return the linear layers of a transformer block by their names in the C struct `LayerArgs`.

        Every layer reads from and writes to the buffers of this decoder. A model with forget gates (FoX) also has the
        layer "decay_gate", which computes the gates.
        """
        attention = block.attention
        ffn = block.ffn
        hidden = self._hidden
        qkv = DecodeLinear(attention.qkv.weight, attention.qkv.bias, block.attention_norm)
        out = DecodeLinear(attention.out.weight, attention.out.bias)
        up = DecodeLinear(ffn.wide.weight, ffn.wide.bias, block.ffn_norm, ffn.activation)
        down = DecodeLinear(ffn.narrow.weight, ffn.narrow.bias)
        linear_layers = {
            "qkv": qkv.bind(hidden, self._qkv),
            "out": out.bind(self._attention_out, hidden, residual=hidden),
            "up": up.bind(hidden, self._ffn_hidden),
            "down": down.bind(self._ffn_hidden, hidden, residual=hidden),
        }

        gate = layer_attention.gate
        if gate is not None:
            gate_weight = gate.weight
            if gate_weight is None:
                # The gate does not depend on the text, so only the bias of the gate counts.
                gate_weight = gate.bias.new_zeros(len(gate.bias), hidden.shape[2])
            decay_gate = DecodeLinear(gate_weight, gate.bias, block.attention_norm)
            linear_layers["decay_gate"] = decay_gate.bind(hidden, layer_attention.gates)
        return linear_layers

    def is_current(self) -> bool:
        """Return whether the weights of the model are still in the memory that this decoder reads."""
        addresses = [parameter.data_ptr() for parameter in self.model.parameters()]
        return self._parameter_addresses == addresses

    def logits(self, token: int, cache: Cache) -> Float[Tensor, "1 vocabulary"] | None:
        """Process one token and return the logits of the next token.

        Args:
            token: The id of the token.
            cache: The cache of the sequence. The token is added to the cache.

        Returns:
            The logits, or None if the compiled code does not support the cache. The token is then not processed.

        Raises:
            InputError: If the position method has a largest length, and the sequence exceeds this length.
        """
        model = self.model
        position = cache.length
        if model.position.max_length is not None:
            model.position.check_length(position + 1)

        is_supported = self._prepare_layers(cache, position)
        if not is_supported:
            return None
        embedding = model.embed(torch.tensor([[token]]), torch.tensor([[position]]))
        self._hidden.copy_(embedding)
        self._run_layers(cache.layers)

        scale = model.config.logit_scale
        if self.output_layer is None:
            return model.vocabulary.log_scores(model.final_norm(self._hidden)[0] * scale)
        logits = self.output_layer(self._hidden)[0]
        return logits if scale == 1 else logits * scale

    def _prepare_layers(self, cache: Cache, position: int) -> bool:
        """Set the arguments of all layers for the token at `position`.

        The arguments of a layer are C structs with addresses of the buffers of this decoder and of the KV cache.

        Returns:
            Whether the compiled code supports the cache.
        """
        num_layers = len(self._layer_args)
        if len(cache.layers) < num_layers:
            cache.layer(num_layers - 1)  # creates all layers up to this one
        for layer_args, layer, layer_attention in zip(self._layer_args, cache.layers, self._attentions, strict=True):
            decode_args = layer.decode_args(layer_attention.slopes, self.kv_shape, layer_attention.attention.window)
            if decode_args is None:
                return False
            # If `LayerCache.attend` has processed the last token, the arguments contain addresses of other tensors.
            if decode_args.q != self._qkv.data_ptr():
                decode_args.set_pointers(self._q, self._k, self._v, self._attention_out)
            decode_args.query_scales = layer_attention.query_scales_at(position)
            if layer_attention.gate is not None:
                layer.set_decay(decode_args, layer_attention.gates, layer_attention.gate.sign)
            layer_args.attention = ctypes.addressof(decode_args)
        return True

    def _run_layers(self, layers: list[LayerCache]) -> None:
        """Run all transformer blocks on the hidden state, and count the token in the caches of the layers."""
        num_layers = len(layers)
        num_done = 0
        while num_done < num_layers:
            first_layer = num_done
            # The compiled code runs the layers from `first_layer` on, and returns how many layers of the model are
            # done. It stops after a layer whose ring buffer must grow. `commit_token` then enlarges this ring buffer.
            num_done = load_library().trainshort_decode_layers(
                self._layer_args, first_layer, num_layers, torch.get_num_threads()
            )
            for layer in layers[first_layer:num_done]:
                layer.commit_token(self._k, self._v)


def unsupported_reason(model: TransformerLM) -> str | None:
    """Return why the compiled decoder does not support a model, or None if it supports the model."""
    config = model.config
    position = model.position
    # Maps each unsupported feature to whether the model uses the feature.
    unsupported_features = {
        "RMSNorm": config.norm == "rms",
        "gated feed-forward layers": config.gated_feedforward,
        "parallel blocks": config.parallel_blocks,
        f"the activation {config.activation}": config.activation not in ACTIVATION_CODES,
        "clip_qkv": config.clip_qkv is not None,
        f"the backend {config.backend}": config.backend != "auto",
        "biases that depend on the text": position.is_content_dependent() and position.gate(0) is None,
        "rotated queries and keys": position.rotates(),
        "biases that are not linear": position.adds_bias() and position.linear_slopes() is None,
    }
    for feature, is_used in unsupported_features.items():
        if is_used:
            return f"The compiled decoder does not support {feature}."
    return None


def _address(tensor: Tensor | None) -> int | None:
    """Return the memory address of a tensor, or None if there is no tensor."""
    return None if tensor is None else tensor.data_ptr()
