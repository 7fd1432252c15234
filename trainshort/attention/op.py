"""`attend`: the one attention call of this package, for training, prefill, chunked prefill and decoding alike.

This file is the contract: what a call may ask for, what is refused, and which engine answers. The engines live beside
it and register themselves; each says in words what it cannot do.
"""

import logging
import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trainshort import alibi
from trainshort.errors import InputError
from trainshort.registry import Registry

log = logging.getLogger("trainshort.attention")


@dataclass(frozen=True)
class LinearBias:
    """score(h, i, j) −= slopes[h] · (i − j); engines compute it on the fly."""

    slopes: Float[Tensor, " heads"]


@dataclass(frozen=True)
class DistanceBias:
    """score(h, i, j) += table[h, i − j]; distances past the table use its last column (T5)."""

    table: Float[Tensor, "heads distances"]


@dataclass(frozen=True)
class DenseBias:
    """score(b, h, i, j) += values[b, h, i, j]: whatever else a method wants, written out by the caller; without a batch
    dimension it is the same for all."""

    values: Float[Tensor, "*batch heads q_len k_len"]


Bias = LinearBias | DistanceBias | DenseBias

SMALLEST = 1e-30
"""Tolerances below it are 0: nothing is left out. So small a mass has no room in a float's exponent."""
TOLERANCE = 1e-6
"""Softmax mass that a row may leave out where that is proven and saves work. Float32 loses as much by rounding."""


@dataclass(frozen=True)
class Call:
    """One checked request. Everything an engine needs to know, and all it may look at."""

    q: Float[Tensor, "batch heads q_len dim"]
    k: Float[Tensor, "batch kv_heads k_len dim"]
    v: Float[Tensor, "batch kv_heads k_len dim"]
    bias: Bias | None = None
    window: int | None = None
    documents: Int[Tensor, "batch k_len"] | None = None
    dropout: float = 0.0
    needs_lse: bool = False
    tolerance: float = TOLERANCE

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def bias_needs_grad(self) -> bool:
        match self.bias:
            case LinearBias(values) | DistanceBias(values) | DenseBias(values):
                return values.requires_grad and torch.is_grad_enabled()
        return False

    @property
    def needs_grad(self) -> bool:
        inputs = torch.is_grad_enabled() and any(x.requires_grad for x in (self.q, self.k, self.v))
        return inputs or self.bias_needs_grad


class Engine(Protocol):
    """A way to compute a call."""

    def unsupported(self, call: Call) -> str | None:
        """Why this engine cannot, in words a user can act on; None when it can."""
        ...

    def run(self, call: Call) -> tuple[Tensor, Float[Tensor, "batch heads q_len"] | None]:
        """The output in q's dtype, and the rows' log-sum-exp in float32 (None unless the call needs it)."""
        ...


@runtime_checkable
class CertifiedEngine(Engine, Protocol):
    """An engine that may leave out what provably does not matter, and says how much that can have been."""

    def run_certified(self, call: Call) -> tuple[Tensor, Tensor | None, Float[Tensor, "batch heads"]]:
        """`run`, and the largest softmax mass that any row of a head can have left out, at most call.tolerance."""
        ...


engines: Registry[Engine] = Registry("attention engine", needs=("unsupported", "run"))

# First that can, first served. On GPUs only flex adds the bias to float32 scores without writing it out.
PREFERENCE = {"cpu": ("windowed", "compiled", "sdpa", "reference"), "cuda": ("flex", "sdpa", "reference")}
PREFERENCE_ELSEWHERE = ("sdpa", "reference")
# Our kernel's vectors are those of AVX2. Where torch has wider ones, plain attention is left to it (not measured).
PREFERENCE_PLAIN_WIDE = ("sdpa", "compiled", "reference")
_announced: set[str] = set()


def attend(
    q: Float[Tensor, "batch heads q_len dim"],
    k: Float[Tensor, "batch kv_heads k_len dim"],
    v: Float[Tensor, "batch kv_heads k_len dim"],
    *,
    bias: Bias | None = None,
    window: int | None = None,
    documents: Int[Tensor, "batch k_len"] | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    tolerance: float = TOLERANCE,
    return_lse: bool = False,
    return_certificate: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Causal attention; the last query is aligned with the last key.

        q_len=2, k_len=5, distance:   3 2 1 0 .      '.' = masked
                                      4 3 2 1 0

    Fewer key than query heads share them in consecutive groups (GQA). `window` n: a query sees its own key and the
    n − 1 before it. `documents` gives each key position the number of its document; queries, being the last positions,
    take theirs from it, and see only keys of the same number. With `return_lse` the log-sum-exp of each row's scores
    comes too (natural log, float32, without gradient), so that results over ranges of keys can be put together by
    `merge`. `tolerance` is the softmax mass that an engine may leave out of a row where it proves that it is no more
    (0: nothing); with `return_certificate` the largest mass so left out, per batch entry and head, comes last.
    """
    call = Call(q, k, v, bias, window, documents, dropout, return_lse, 0.0 if 0 < tolerance < SMALLEST else tolerance)
    check(call)
    name = choose(call) if backend == "auto" else backend
    engine = engines.get(name)
    if backend != "auto" and (reason := engine.unsupported(call)):
        raise InputError(f"Attention engine '{name}' cannot do this: {reason}.")
    if return_certificate and isinstance(engine, CertifiedEngine):
        out, lse, certificate = engine.run_certified(call)
    else:
        out, lse = engine.run(call)
        certificate = q.new_zeros(q.shape[:2], dtype=torch.float32)  # the others leave out nothing
    results = [out]
    if return_lse:
        assert lse is not None, f"engine '{name}' promised a log-sum-exp"
        results.append(lse.detach())
    if return_certificate:
        results.append(certificate)
    return tuple(results) if len(results) > 1 else out


def alibi_attention(
    q: Float[Tensor, "batch heads q_len dim"],
    k: Float[Tensor, "batch kv_heads k_len dim"],
    v: Float[Tensor, "batch kv_heads k_len dim"],
    slopes: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "batch heads q_len dim"]:
    """ALiBi attention for anybody's model: causal, fast, exact. Slopes default to the paper's for this many heads."""
    _check_tensors(q, k, v)
    bias = LinearBias(alibi.slopes(q.shape[1]).to(q.device) if slopes is None else slopes)
    out = attend(q, k, v, bias=bias)
    assert isinstance(out, Tensor)
    return out


def merge(
    out: Float[Tensor, "batch heads q_len dim"],
    lse: Float[Tensor, "batch heads q_len"],
    other_out: Float[Tensor, "batch heads q_len dim"],
    other_lse: Float[Tensor, "batch heads q_len"],
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint ranges of keys, put together as if it had been one."""
    share = torch.sigmoid(other_lse - lse)[..., None].to(out.dtype)
    return out + (other_out - out) * share, torch.logaddexp(lse, other_lse)


def choose(call: Call) -> str:
    """The first engine in the device's order of preference that can do it; said once in the log."""
    order = PREFERENCE.get(call.q.device.type, PREFERENCE_ELSEWHERE)
    if call.bias is None and call.q.device.type == "cpu" and _torch_is_wider():
        order = PREFERENCE_PLAIN_WIDE
    reasons = []
    for name in order:
        if name not in engines:
            continue
        reason = engines.get(name).unsupported(call)
        if reason is None:
            _announce(name, f" ({'; '.join(reasons)})" if reasons else "")
            return name
        reasons.append(f"not {name}: {reason}")
    raise InputError(f"No attention engine can do this: {'; '.join(reasons)}.")


@torch.compiler.assume_constant_result  # torch.compile would trace the log
def _announce(name: str, passed_over: str) -> None:
    if name not in _announced:
        _announced.add(name)
        log.info("attention engine: %s%s", name, passed_over)


@torch.compiler.assume_constant_result
def _torch_is_wider() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def check(call: Call) -> None:
    """Refuse what no engine should see."""
    q, k = call.q, call.k
    _check_tensors(q, k, call.v)
    _check_bias(call.bias, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if call.window is not None and call.window < 1:
        raise InputError(f"window must be at least 1 (a token sees itself), got {call.window}.")
    if not 0 <= call.tolerance < 1:
        raise InputError(f"tolerance is a share of softmax mass, at least 0 and less than 1; got {call.tolerance}.")
    if not 0 <= call.dropout < 1:
        raise InputError(f"dropout must be in [0, 1), got {call.dropout}.")
    documents = call.documents
    if documents is not None and documents.shape != (q.shape[0], k.shape[2]):
        raise InputError(
            f"documents must number every key position, shape (batch, k_len) = {(q.shape[0], k.shape[2])}; "
            f"got {tuple(documents.shape)}."
        )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise InputError(f"{name} must have shape (batch, heads, length, dim), got {tuple(x.shape)}.")
        if 0 in x.shape:
            raise InputError(f"{name} is empty, shape {tuple(x.shape)}; attention needs at least one token.")
        if not x.is_floating_point() or x.dtype != q.dtype or x.device != q.device:
            raise InputError(
                f"q, k and v must share one floating-point dtype and device; q is {q.dtype} on {q.device}, "
                f"{name} is {x.dtype} on {x.device}."
            )
    if k.shape != v.shape:
        raise InputError(f"k and v must have the same shape, got {tuple(k.shape)} and {tuple(v.shape)}.")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InputError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch and dim.")
    if q.shape[1] % k.shape[1]:
        raise InputError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads; give a divisor of them.")
    if q.shape[2] > k.shape[2]:
        raise InputError(
            f"q has {q.shape[2]} tokens but k only {k.shape[2]}; queries are the last tokens of the keys, "
            "so pass the keys of the past along with the new ones."
        )


def _check_bias(bias: Bias | None, batch: int, heads: int, q_len: int, k_len: int) -> None:
    match bias:
        case None:
            return
        case LinearBias(slopes):
            # Non-finite slopes would turn every row to NaN far from here. Read only where that costs no waiting.
            if slopes.shape != (heads,):
                raise InputError(f"slopes must be one per query head, shape ({heads},); got {tuple(slopes.shape)}.")
            if slopes.device.type == "cpu" and not torch.compiler.is_compiling() and not slopes.isfinite().all():
                raise InputError(f"slopes must be finite, got {slopes.tolist()}.")
        case DistanceBias(table):
            if table.dim() != 2 or table.shape[0] != heads or table.shape[1] < 1:
                raise InputError(f"a distance bias has shape (heads={heads}, distances); got {tuple(table.shape)}.")
        case DenseBias(values):
            shape = (heads, q_len, k_len)
            if values.shape not in (shape, (batch, *shape)):
                raise InputError(
                    f"a dense bias has shape {shape} here, or that for each text; got {tuple(values.shape)}."
                )
        case _:
            raise InputError(f"bias must be LinearBias, DistanceBias, DenseBias or None, got {type(bias).__name__}.")


def distance_between(call: Call, rows: slice, keys: slice) -> Int[Tensor, "rows keys"]:
    """How far some keys lie behind some query rows; negative in the future."""
    past, device = call.k.shape[2] - call.q.shape[2], call.q.device
    queries = torch.arange(past + rows.start, past + rows.stop, device=device)
    return queries[:, None] - torch.arange(keys.start, keys.stop, device=device)


def written_bias(call: Call, rows: slice, keys: slice) -> Float[Tensor, "*batch heads rows keys"] | None:
    """The bias of some query rows on some keys, for engines that need it written out."""
    match call.bias:
        case LinearBias(slopes):
            return -slopes.float()[:, None, None] * distance_between(call, rows, keys)
        case DistanceBias(table):
            return table[:, distance_between(call, rows, keys).clamp(0, table.shape[1] - 1)]
        case DenseBias(values):
            return values[..., rows, keys]
    return None


def visible(call: Call, rows: slice, keys: slice) -> Bool[Tensor, "one_or_batch 1 rows keys"]:
    """Which of some keys some query rows may see."""
    distance = distance_between(call, rows, keys)
    seen = distance >= 0
    if call.window is not None:
        seen &= distance < call.window
    if call.documents is None:
        return seen[None, None]
    queries = call.documents[:, -call.q.shape[2] :][:, rows]
    return (seen & (queries[:, :, None] == call.documents[:, None, keys]))[:, None]


def contiguous_rows(x: Tensor) -> Tensor:
    """`x`, copied only where the numbers of a row do not lie side by side."""
    return x if has_contiguous_rows(x) else x.contiguous()


def has_contiguous_rows(x: Tensor) -> bool:
    return x.stride(3) == 1 or x.shape[3] == 1  # the stride of a single number says nothing


def wide(x: Tensor) -> torch.dtype:
    """What sums over `x` are made in: its own precision, and float32 at the least."""
    return torch.promote_types(x.dtype, torch.float32)


def scale(call: Call) -> float:
    return 1 / math.sqrt(call.q.shape[-1])
