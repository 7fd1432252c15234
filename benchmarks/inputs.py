"""Create the queries, keys and values of the attention benchmark.

The inputs are random, or they are recorded from a trained model. The number of keys that the kernel can skip depends on
the norms of the queries and keys. So only recorded inputs show how much is skipped for a trained model.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainshort import alibi
from trainshort.attention import DecayBias, LinearBias, decay
from trainshort.errors import InputError
from trainshort.evaluate.attention_inputs import attention_calls
from trainshort.evaluate.targets import RunTarget
from trainshort.evaluate.text import open_text
from trainshort.train.checkpoint import fingerprint

# The values of `--inputs` that stand for random inputs.
SYNTHETIC = ("normal", "scaled")

# The shape of random inputs.
HEADS = 8
HEAD_WIDTH = 64

# The number of tokens that a model reads at once while its queries, keys and values are recorded.
RECORD_CHUNK = 4096


@dataclass(frozen=True)
class Inputs:
    """The inputs of one attention call, and the gradient of its output.

    Attributes:
        q: The queries.
        k: The keys.
        v: The values.
        bias: The ALiBi slopes, or a decay bias.
        grad_out: The gradient of the output, where the backward pass starts.
    """

    q: Float[Tensor, "1 heads length dim"]
    k: Float[Tensor, "1 heads length dim"]
    v: Float[Tensor, "1 heads length dim"]
    bias: LinearBias | DecayBias
    grad_out: Float[Tensor, "1 heads length dim"]

    def with_decay_bias(self) -> "Inputs":
        """Return a copy whose ALiBi slopes are expressed as a decay bias. Both biases add the same to the scores."""
        if isinstance(self.bias, DecayBias):
            return self
        length = self.q.shape[2]
        cumulative_decay = decay.decay_from_slopes(self.bias.slopes, length)
        return replace(self, bias=DecayBias(cumulative_decay))


def make_inputs(source: str, length: int) -> Inputs:
    """Create the inputs of the attention benchmark.

    Args:
        source: "normal" for random normal values, "scaled" for random values with larger queries in later heads, or
            the path of a file with recorded inputs.
        length: The number of tokens. Recorded inputs are cut to this length.

    Raises:
        InputError: If the file does not exist, is not valid, or holds fewer than `length` tokens.
    """
    generator = torch.Generator().manual_seed(0)
    if source not in SYNTHETIC:
        return _load_inputs(Path(source), length, generator)
    shape = (1, HEADS, length, HEAD_WIDTH)
    q, k, v, grad_out = (torch.randn(shape, generator=generator) for _ in range(4))
    if source == "scaled":
        q *= torch.linspace(0.5, 3, HEADS)[:, None, None]
    return Inputs(q, k, v, LinearBias(alibi.slopes(HEADS)), grad_out)


def _load_inputs(path: Path, length: int, generator: torch.Generator) -> Inputs:
    """Load recorded inputs from a safetensors file.

    Args:
        path: A file with the tensors `q`, `k` and `v`. The file can also hold `slopes` (the ALiBi slopes) or `clock`
            (a cumulative decay). Without both, the slopes of the ALiBi paper are used.
        length: The number of tokens to use.
        generator: Creates the random gradient of the output.
    """
    if not path.is_file():
        raise InputError(
            f"Invalid --inputs: {path} does not exist. Use normal, scaled, a .safetensors file or a run folder."
        )
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise InputError(f"{path} is not a valid safetensors file ({error}).") from None
    _check_recorded_tensors(tensors, path, length)

    q, k, v = (tensors[name][:1, :, :length].float().contiguous() for name in ("q", "k", "v"))
    heads = q.shape[1]
    if "clock" in tensors:
        cumulative_decay = tensors["clock"][:1, :, :length].double().contiguous()
        bias = DecayBias(cumulative_decay)
    else:
        bias = LinearBias(tensors.get("slopes", alibi.slopes(heads)))
    return Inputs(q, k, v, bias, torch.randn(q.shape, generator=generator))


def _check_recorded_tensors(tensors: dict[str, Tensor], path: Path, length: int) -> None:
    """Raise `InputError` if the tensors of a file cannot be used as inputs of `length` tokens."""
    shapes = [tensors[name].shape for name in ("q", "k", "v") if name in tensors]
    is_complete = len(shapes) == 3
    have_same_shape = len(set(shapes)) == 1
    if not is_complete or not have_same_shape or len(shapes[0]) != 4:
        raise InputError(f"{path} must hold q, k and v of one shape (batch, heads, length, dim).")

    stored_length = shapes[0][2]
    if stored_length < length:
        raise InputError(f"{path} holds {stored_length} tokens, but {length} are required. Use shorter --lengths.")

    if "clock" in tensors:
        expected_shape = shapes[0][:3]
        if tensors["clock"].shape != expected_shape:
            raise InputError(
                f"Invalid tensor 'clock' in {path}: expected shape {tuple(expected_shape)} (batch, heads, length), "
                f"got {tuple(tensors['clock'].shape)}."
            )
        if not tensors["clock"].isfinite().all():
            raise InputError(f"Invalid tensor 'clock' in {path}: all values must be finite.")


def require_error_bound(run: Path, feature: str) -> RunTarget:
    """Load a run, and check that its position method bounds the attention to distant tokens.

    Args:
        run: The run folder.
        feature: What needs the bound, for the error message.

    Raises:
        InputError: If the run does not exist, or its position method has no bound.
    """
    target = RunTarget(run)
    if not target.model.position.has_error_bound():
        position = target.model.config.position
        raise InputError(
            f"Cannot measure {feature} with {run}: the run has {position} positions. Use a run with ALiBi or FoX."
        )
    return target


def select_layer(run: Path, layer: int | None) -> tuple[RunTarget, int]:
    """Load a run, and select the layer whose queries, keys and values are recorded.

    Args:
        run: The run folder.
        layer: The index of the layer. None selects the middle layer.

    Returns:
        The model of the run and the index of the layer.

    Raises:
        InputError: If the run cannot be recorded, or has no such layer.
    """
    target = require_error_bound(run, "attention")
    layer_count = target.model.config.layers
    layer_index = layer_count // 2 if layer is None else layer
    if layer_index >= layer_count:
        raise InputError(f"--layer {layer_index} is not in {run}, whose layers are 0 to {layer_count - 1}.")
    return target, layer_index


def record_inputs(target: RunTarget, layer_index: int, length: int, path: Path) -> dict[str, object]:
    """Record the queries, keys and values of one layer while the model reads its validation text.

    The text is repeated until it has `length` tokens. The model reads these tokens as one sequence.

    Args:
        target: The model of a run.
        layer_index: The layer that is recorded.
        length: The number of tokens.
        path: The safetensors file that is written. The file holds `q`, `k`, `v` and either `slopes` or `clock` (the
            cumulative decay of a decay bias).

    Returns:
        A description of the recorded model, layer and text, which is stored with the benchmark result.

    Raises:
        InputError: If the layer uses no positions.
    """
    model = target.model
    text = open_text(target, ())
    tokens = torch.from_numpy(np.resize(text.tokens, length).astype(np.int64))
    call = attention_calls(model, tokens[None], RECORD_CHUNK)[layer_index]

    # Shared key heads are repeated, because not all implementations support grouped-query attention.
    keys = call.k.repeat_interleave(call.heads_per_kv_head, dim=1)
    values = call.v.repeat_interleave(call.heads_per_kv_head, dim=1)
    tensors = {
        "q": call.q.float().contiguous(),
        "k": keys.float().contiguous(),
        "v": values.float().contiguous(),
    }
    match call.bias:
        case LinearBias(slopes):
            tensors["slopes"] = slopes.detach().clone()
        case DecayBias(cumulative_decay):
            tensors["clock"] = cumulative_decay.contiguous()
        case _:
            raise InputError(f"Layer {layer_index} of {target.name} uses no positions. Choose another --layer.")
    save_file(tensors, path)
    return {
        "run": target.name,
        "weights": fingerprint(model),
        "layer": layer_index,
        "text": text.name,
        "text_sha256": text.sha256,
        "heads": model.config.heads,
        "dim": model.config.head_width,
    }
