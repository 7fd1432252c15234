"""The Forgetting Transformer (FoX): forget gates that are computed from the text."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from trainshort import alibi
from trainshort.attention import DecayBias
from trainshort.config.position_config import FoxConfig
from trainshort.config.run_config import ModelConfig
from trainshort.model.positions.base import CUMULATIVE_DECAY_KEY, Gate, LayerInput, PositionMethod


class Fox(PositionMethod):
    """Forgetting Transformer (FoX): a forget gate at each token reduces the attention to all earlier tokens.

    The gate of token t is `f(t) = sigmoid(w @ x(t) + b)`, with a weight w and a bias b for each layer and head. The
    score of query i and key j changes by `log f(j + 1) + ... + log f(i)`. A gate that does not depend on the text
    (w = 0) is the same as ALiBi with the slope -log sigmoid(b).

    Attributes:
        shift: The biases b of all layers and heads.
        weight: The weights w, or None if the gates do not depend on the text.
    """

    Config = FoxConfig
    uses_cumulative_decay = True
    float32 = ("shift",)
    shift: Tensor

    def __init__(self, config: ModelConfig, settings: FoxConfig) -> None:
        super().__init__(config, settings)
        # The gate of a token with the hidden state x is sigmoid(weight @ x + shift). The setting `gate` is "full" (both
        # are trained), "bias_only" (no weight, the shift is trained) or "fixed" (no weight, nothing is trained).
        self.settings = settings
        self.heads = config.heads
        self.nope_heads = config.nope_heads
        # The gate biases of all layers and heads. The tensor has one dimension, because the optimizer applies weight
        # decay to matrices.
        shift = torch.empty(config.layers * config.heads)
        if settings.gate == "fixed":
            self.register_buffer("shift", shift, persistent=False)
        else:
            self.shift = nn.Parameter(shift)
        self.weight = None
        if settings.gate == "full":
            self.weight = nn.Parameter(torch.zeros(config.layers, config.heads, config.width))
            nn.init.normal_(self.weight, std=0.02)
        self.init_float32_tensors()

    def init_float32_tensors(self) -> None:
        """Set the initial gate biases.

        The last heads of each layer are NoPE heads (heads without positions). Their biases are 0 and are not used.
        """
        num_gates = self.heads - self.nope_heads  # the number of heads with a gate
        biases = self.shift.data.zero_().view(-1, self.heads)  # (layers, heads)
        biases[:, :num_gates].copy_(self._initial_gate_biases(num_gates))

    def _initial_gate_biases(self, num_gates: int) -> Float[Tensor, " heads"]:
        """Return the initial bias b of the gate sigmoid(b) of each head.

        The setting `init` selects one of three methods:

        - "half": All gates are 0.5.
        - "alibi": The scores fall with the distance as with ALiBi's slopes.
        - "decay_times": Each head has a decay time, the number of tokens over which its scores fall by 1. The decay
          times are spaced logarithmically between two settings.

        Args:
            num_gates: The number of heads with a gate.
        """
        init = self.settings.init
        if init is None:
            init = "half" if self.settings.gate == "full" else "decay_times"

        match init:
            case "half":
                return torch.zeros(num_gates)
            case "alibi":
                slopes = alibi.slopes(num_gates).double()
            case "decay_times":
                log_min_time = math.log(self.settings.min_decay_time)
                log_max_time = math.log(self.settings.max_decay_time)
                log_times = torch.linspace(log_min_time, log_max_time, num_gates, dtype=torch.float64)
                slopes = log_times.neg().exp()  # 1 / time
        # The log of the gate must be -slope. The solution of sigmoid(b) = exp(-slope) is b = -log(exp(slope) - 1).
        biases = -torch.log(torch.expm1(slopes)).float()
        return -biases if self.settings.negate_gate else biases

    def gate(self, layer: int) -> Gate:
        """Return the forget gate of a layer, without the NoPE heads (heads without positions).

        The gate of a token with the hidden state x is sigmoid(sign * (weight @ x + bias)).
        """
        num_gates = self.heads - self.nope_heads
        weight = None if self.weight is None else self.weight[layer, :num_gates]
        bias = self.shift.view(-1, self.heads)[layer, :num_gates]
        sign = -1.0 if self.settings.negate_gate else 1.0
        return Gate(weight, bias, sign)

    def content_bias(self, layer_input: LayerInput) -> DecayBias:
        """Compute the forget gates of the new tokens, and return the bias for the new and the cached tokens.

        The bias is given by the cumulative sums c of the log gates. The score of query i and key j changes by
        c[i] - c[j].
        """
        x = layer_input.x
        weight, bias, sign = self.gate(layer_input.layer)
        gate_logits = bias.expand(*x.shape[:2], -1)  # (batch, new tokens, heads with a gate)
        if weight is not None:
            gate_logits = gate_logits + F.linear(x, weight.to(x.dtype)).float()

        log_gates = F.logsigmoid(sign * gate_logits).transpose(1, 2).double()  # (batch, heads, new tokens)
        # NoPE heads (heads without positions) have no gate. The padding appends zeros for these heads.
        cumulative = F.pad(log_gates.cumsum(-1), (0, 0, 0, self.nope_heads))

        # With a KV cache, the cumulative sums continue after the last cached token.
        cached = layer_input.method_cache.get(CUMULATIVE_DECAY_KEY)
        if cached is not None:
            cumulative = torch.cat([cached, cached[..., -1:] + cumulative], dim=-1)
        layer_input.method_cache[CUMULATIVE_DECAY_KEY] = cumulative
        return DecayBias(cumulative)
