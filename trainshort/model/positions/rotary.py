"""Position methods that rotate queries and keys by angles that are proportional to the position."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trainshort.config.position_config import RotaryConfig, XposConfig
from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.model.positions.base import PositionMethod, collapse_equal_rows, exact_float_dtype

MAX_XPOS_DECAYS = 64
"""xPos supports `MAX_XPOS_DECAYS * scale_base` positions.

The smallest factor of xPos is (0.4 / 1.4)^64 = 1e-35 at the last position. The smallest normal number of float32 is
1e-38.
"""

YARN_FAST_ROTATIONS = 32
"""YaRN does not change pairs that rotate more often than this over the training length."""

YARN_SLOW_ROTATIONS = 1
"""YaRN fully interpolates pairs that rotate less often than this over the training length."""


class Rotary(PositionMethod):
    """Rotary position embeddings (RoPE): rotates queries and keys, so that scores depend on distances only.

    The dimensions of a head are grouped into interleaved pairs (x0, x1), (x2, x3), ... Pair i is rotated by the angle
    `position / base**(2 * i / dim)`. If `settings.rotary_fraction` is less than 1, only the first dimensions of each
    head are rotated.

    Attributes:
        dim: The number of dimensions of each head that are rotated.
        scaling: A change of the frequencies for long inputs, or None. Evaluations set this attribute.
    """

    Config = RotaryConfig

    def __init__(self, config: ModelConfig, settings: RotaryConfig) -> None:
        super().__init__(config, settings)
        self.base = settings.base
        self.dim = settings.rotary_dims(config.head_width)
        self.scaling: RotaryScaling | None = None

    def rotate(
        self,
        q: Float[Tensor, "batch heads length dim"],
        k: Float[Tensor, "batch kv_heads length dim"],
        position_ids: Int[Tensor, "batch length"],
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by angles that are proportional to their positions."""
        cos, sin = self.cos_sin(q, collapse_equal_rows(position_ids))
        compute_dtype = torch.promote_types(q.dtype, torch.float32)
        cos = cos.to(compute_dtype)
        sin = sin.to(compute_dtype)
        return _apply_rotation(q, cos, sin), _apply_rotation(k, cos, sin)

    def cos_sin(
        self, q: Tensor, position_ids: Int[Tensor, "batch length"]
    ) -> tuple[Float[Tensor, "batch 1 length pairs"], Float[Tensor, "batch 1 length pairs"]]:
        """Return the cosine and the sine of the rotation angle of each position and pair of dimensions.

        The angles are computed in float64. In float32, an angle at position 16,384 would have an error of 1e-3. If
        `self.scaling` is set, cosine and sine are multiplied by the factor of the scaling method.

        Args:
            q: The queries. Only their device matters.
            position_ids: The position of each token in its own document.
        """
        even_indices = _even_indices(self.dim, q.device)
        if self.scaling is None:
            frequencies = self.base ** (-even_indices / self.dim)  # radians per token
            factor = 1.0
        else:
            frequencies, factor = scaled_frequencies(self.scaling, self.base, self.dim)
            frequencies = frequencies.to(even_indices)
        positions = position_ids.to(even_indices.dtype)[:, None, :, None]  # (batch, 1, length, 1)
        angles = positions * frequencies
        return factor * angles.cos(), factor * angles.sin()


class XPos(Rotary):
    """xPos: rotary position embeddings with a decay of the scores that grows with the distance.

    Pair n of a query at position i is multiplied by `zeta**(i / scale_base)`, and pair n of a key at position j by
    `zeta**(-j / scale_base)`, with `zeta = (2 * n / dim + 0.4) / 1.4`. The contribution of the pair to a score
    therefore decays by `zeta**((i - j) / scale_base)`. Pairs that rotate fast decay most.
    """

    Config = XposConfig

    def __init__(self, config: ModelConfig, settings: XposConfig) -> None:
        super().__init__(config, settings)
        self.scale_base = settings.scale_base
        # The factors depend on absolute positions. At larger positions, keys could leave the range of float32.
        self.max_length = int(MAX_XPOS_DECAYS * settings.scale_base)

    def rotate(
        self,
        q: Float[Tensor, "batch heads length dim"],
        k: Float[Tensor, "batch kv_heads length dim"],
        position_ids: Int[Tensor, "batch length"],
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys, and multiply each pair of dimensions by a factor that depends on the position.

        The factor of pair n is `zeta**(position / scale_base)` for queries and its inverse for keys, with
        `zeta = (2 * n / dim + 0.4) / 1.4`.
        """
        position_ids = collapse_equal_rows(position_ids)
        cos, sin = self.cos_sin(q, position_ids)
        # Each even index 2 * n gives the zeta of pair n.
        zeta = (_even_indices(self.dim, q.device) / self.dim + 0.4) / 1.4
        positions = position_ids.to(zeta.dtype)[:, None, :, None]  # (batch, 1, length, 1)
        q_factor = zeta ** (positions / self.scale_base)

        compute_dtype = torch.promote_types(q.dtype, torch.float32)
        rotated_q = _apply_rotation(q, (q_factor * cos).to(compute_dtype), (q_factor * sin).to(compute_dtype))
        rotated_k = _apply_rotation(k, (cos / q_factor).to(compute_dtype), (sin / q_factor).to(compute_dtype))
        return rotated_q, rotated_k

    def check_length(self, length: int) -> None:
        """Raise `InputError` if the factors at the last position would leave the range of float32."""
        if self.max_length is not None and length > self.max_length:
            raise InputError(
                f"xpos leaves the range of float32 past {self.max_length:,} positions, but this input "
                f"reaches {length:,}. Use position='alibi', or train with a larger scale_base."
            )


def _even_indices(dim: int, device: torch.device) -> Float[Tensor, " pairs"]:
    """Return 0, 2, 4, ...: the index of the first dimension of each pair. The dtype is float64 if possible."""
    return torch.arange(0, dim, 2, dtype=exact_float_dtype(device), device=device)


@dataclass(frozen=True)
class RotaryScaling:
    """A change of the rotation frequencies, for inputs that are longer than the training length.

    Attributes:
        kind: The method. `scaled_frequencies` explains the methods.
        factor: The scaling factor.
        trained_at: The training length in tokens.
        length: The length of the input. Only the method "dynamic" uses the length.
    """

    kind: Literal["linear", "ntk", "dynamic", "yarn"]
    factor: float
    trained_at: int
    length: int


def scaled_frequencies(scaling: RotaryScaling, base: float, dim: int) -> tuple[Float[Tensor, " pairs"], float]:
    """Return the rotation frequencies of a scaling method, as Transformers defines the method in `rope_scaling`.

    The methods are:

    - "linear" (position interpolation): All pairs rotate `factor` times slower.
    - "ntk": The base is increased. The slowest pair rotates `factor` times slower, and the fastest pair is unchanged.
    - "dynamic": As "ntk", with a factor that grows with the input. Inputs up to the training length are unchanged.
    - "yarn": Slow pairs are interpolated, fast pairs are unchanged, and pairs between are mixed. Queries and keys are
      multiplied by `0.1 * ln(factor) + 1`.

    Args:
        scaling: The method and its numbers.
        base: The base of the rotation frequencies.
        dim: The number of rotated dimensions of a head.

    Returns:
        The frequency of each pair in float64, and a factor by which queries and keys are multiplied.
    """
    even_indices = torch.arange(0, dim, 2, dtype=torch.float64)
    factor = scaling.factor
    base_exponent = dim / (dim - 2) if dim > 2 else 1.0
    match scaling.kind:
        case "linear":
            return base ** (-even_indices / dim) / factor, 1.0
        case "ntk":
            scaled_base = base * factor**base_exponent
            return scaled_base ** (-even_indices / dim), 1.0
        case "dynamic":
            length_ratio = max(scaling.length, scaling.trained_at) / scaling.trained_at
            dynamic_factor = factor * length_ratio - (factor - 1)
            scaled_base = base * dynamic_factor**base_exponent
            return scaled_base ** (-even_indices / dim), 1.0
        case "yarn":
            interpolated_share = _yarn_interpolated_share(even_indices / 2, scaling.trained_at, base, dim)
            frequency_factor = interpolated_share / factor + 1 - interpolated_share
            return base ** (-even_indices / dim) * frequency_factor, 0.1 * math.log(factor) + 1


def _yarn_interpolated_share(
    pairs: Float[Tensor, " pairs"], trained_at: int, base: float, dim: int
) -> Float[Tensor, " pairs"]:
    """Return how much YaRN interpolates each pair of dimensions, as a number from 0 to 1.

    Pairs that rotate fast have the number 0 and are not changed. Pairs that rotate slowly have the number 1. The
    numbers of the pairs between them are a linear ramp.

    Args:
        pairs: The indices 0, 1, 2, ... of the pairs.
        trained_at: The training length in tokens.
        base: The base of the rotation frequencies.
        dim: The number of rotated dimensions of a head.
    """
    ramp_start = max(math.floor(_pair_for_rotations(YARN_FAST_ROTATIONS, trained_at, base, dim)), 0)
    ramp_end = min(math.ceil(_pair_for_rotations(YARN_SLOW_ROTATIONS, trained_at, base, dim)), dim - 1)
    # transformers also uses 0.001 to avoid a division by zero.
    ramp_width = ramp_end - ramp_start if ramp_end > ramp_start else 0.001
    return ((pairs - ramp_start) / ramp_width).clamp(0, 1)


def _pair_for_rotations(rotations: float, length: int, base: float, dim: int) -> float:
    """Return the index of the pair of dimensions that rotates `rotations` times over `length` tokens.

    Pair n rotates by base**(-2 * n / dim) radians per token. The function solves
    length * base**(-2 * n / dim) = rotations * 2 * pi for n. The index is a float, because the exact solution usually
    lies between two pairs.

    Args:
        rotations: The number of full rotations.
        length: The number of tokens.
        base: The base of the rotation frequencies.
        dim: The number of rotated dimensions of a head.
    """
    return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))


def _apply_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of queries or keys. The other dimensions are unchanged.

    Args:
        x: The queries or keys, of shape (batch, heads, length, dim).
        cos: The cosines of the angles, with one value per rotated pair of dimensions.
        sin: The sines of the angles.
    """
    rotary_dim = 2 * cos.shape[-1]  # Two neighboring dimensions form a pair.
    rotary_part = x
    if rotary_dim < x.shape[-1]:
        rotary_part = x[..., :rotary_dim]
    even, odd = rotary_part.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    rotated_pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    rotated = rotated_pairs.flatten(-2).to(x.dtype)
    if rotary_dim == x.shape[-1]:
        return rotated
    return torch.cat([rotated, x[..., rotary_dim:]], dim=-1)
