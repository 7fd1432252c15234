"""`attend`: the one attention call of this package, for training, prefill, chunked prefill and decoding alike.

The engines live beside it and register themselves; each says in words what it cannot do, and has a rank among them.
"""

import logging
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.autograd.forward_ad as forward_mode
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trainshort import alibi
from trainshort.attention.call import SMALLEST, TOLERANCE, Bias, Call, LinearBias, check, check_tensors, tracer
from trainshort.errors import InputError
from trainshort.registries import engines

log = logging.getLogger("trainshort.attention")


class Result(NamedTuple):
    """What an engine gives back."""

    out: Tensor
    """In q's dtype."""
    lse: Float[Tensor, "batch heads q_len"] | None = None
    """The rows' log-sum-exp, in float32 or wider; None unless the call needs it."""
    left_out: Float[Tensor, "batch heads"] | None = None
    """The largest softmax mass that any row of a head can have left out, at most call.tolerance; None: nothing."""


@runtime_checkable
class Engine(Protocol):
    """A way to compute a call: one file beside this one, or a plug-in's, that ends in

    engines.register("mine")(Mine())

    It may have two things more. `rank`, a number: the higher, the sooner 'auto' asks it; without one it is taken by
    name only. `passed_over(call)`: why 'auto' should ask the next one although this one can, in words, or None.
    """

    def unsupported(self, call: Call) -> str | None:
        """Why this engine cannot, in words a user can act on; None when it can.

        Asked once for all calls of one `Call.signature`: it does not depend on numbers in tensors.
        """
        ...

    def run(self, call: Call) -> Result: ...


_announced: set[str] = set()
_chosen: dict[tuple[object, ...], Engine] = {}
MOST_CHOSEN = 4096
"""Choices that are remembered; a text that grows token by token asks for a new one each time."""
FEW_KEYS = 16


def attend(
    q: Float[Tensor, "batch heads q_len dim"],
    k: Float[Tensor, "batch kv_heads k_len dim"],
    v: Float[Tensor, "batch kv_heads k_len dim"],
    *,
    bias: Bias | None = None,
    window: int | None = None,
    documents: Int[Tensor, "batch k_len"] | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
    tolerance: float = TOLERANCE,
    return_lse: bool = False,
    return_certificate: bool = False,
    causal: bool = True,
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
    `scale` multiplies the products of queries and keys; by default 1/√dim. Without `causal` (an encoder) keys on the
    right are seen as well: biases count the distance to either side, and a `window` n reaches n − 1 tokens each way.
    """
    allowed = 0.0 if 0 < tolerance < SMALLEST else tolerance
    call = Call(q, k, v, bias, window, documents, dropout, return_lse, allowed, scale, causal)
    check(call)
    result = (choose(call) if backend == "auto" else _named(backend, call)).run(call)
    results = [result.out]
    if return_lse:
        assert result.lse is not None, "an engine that can has a log-sum-exp"
        results.append(result.lse.detach().to(torch.promote_types(q.dtype, torch.float32)))
    if return_certificate:
        nothing = q.new_zeros(q.shape[:2], dtype=torch.float32)
        results.append(nothing if result.left_out is None else result.left_out)
    return tuple(results) if len(results) > 1 else result.out


def choose(call: Call) -> Engine:
    """The engine for a call under 'auto', remembered for all that are like it."""
    if tracer() is not None or forward_mode._current_level >= 0:
        return _best(call)
    key = (engines.changes, call.signature)
    engine = _chosen.get(key)  # one look: another thread may clear the memory at any time
    if engine is None:
        if len(_chosen) >= MOST_CHOSEN:
            _chosen.clear()
        engine = _chosen[key] = _best(call)
    return engine


def _named(name: str, call: Call) -> Engine:
    if reason := engines.get(name).unsupported(call):
        raise InputError(f"Attention engine '{name}' cannot do this: {reason}.")
    return _unless_short(name, call)


def _unless_short(name: str, call: Call) -> Engine:
    """The engine of this name; but the formula itself where one trains through a few keys.

    A kernel's backward pass recomputes the weights from a rounded log-sum-exp. Among a few keys that is most of its
    error, and shows where the formula is exact: one key alone has weight 1 and passes no gradient to its query. So few
    keys are no slower to compute plainly.
    """
    return engines.get("reference" if call.needs_grad and call.k.shape[2] <= FEW_KEYS else name)


def _best(call: Call) -> Engine:
    """The engine of the highest rank that can do it; said once in the log.

    Derivatives of any order and direction, and graphs for elsewhere, need plain operations of torch: the formula.
    """
    if tracer() == "export" or call.is_transformed:
        say_once("attention engine: reference", "reference", logging.INFO)
        return engines.get("reference")
    reasons = []
    ranks = {name: _rank(name, engine) for name, engine in engines.items()}
    for name in sorted((name for name in ranks if ranks[name] > 0), key=lambda name: -ranks[name]):
        engine = engines.get(name)
        reason = engine.unsupported(call)
        if reason is None and (passed_over := getattr(engine, "passed_over", None)):
            reason = passed_over(call)
        if reason is None:
            passed = f" ({'; '.join(reasons)})" if reasons else ""
            say_once(f"attention engine: {name}{passed}", name, logging.INFO)
            return _unless_short(name, call)
        reasons.append(f"not {name}: {reason.partition('; use ')[0]}")  # advice for those who named it, not for 'auto'
    raise InputError(f"No attention engine can do this: {'; '.join(reasons)}.")


def _rank(name: str, engine: Engine) -> int | float:
    rank = getattr(engine, "rank", 0)
    if not isinstance(rank, int | float):
        raise InputError(f"The rank of attention engine '{name}' is {type(rank).__name__}; it must be a number.")
    return rank


@torch.compiler.assume_constant_result  # torch.compile would trace the log
def say_once(message: str, about: str | None = None, level: int = logging.WARNING) -> None:
    if (about or message) not in _announced:
        _announced.add(about or message)
        log.log(level, message)


def alibi_attention(
    q: Float[Tensor, "batch heads q_len dim"],
    k: Float[Tensor, "batch kv_heads k_len dim"],
    v: Float[Tensor, "batch kv_heads k_len dim"],
    slopes: Float[Tensor, " heads"] | None = None,
    *,
    key_padding_mask: Bool[Tensor, "batch k_len"] | None = None,
    documents: Int[Tensor, "batch k_len"] | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    tolerance: float = TOLERANCE,
    causal: bool = True,
) -> Float[Tensor, "batch heads q_len dim"]:
    """ALiBi attention for anybody's model: causal, fast, and off by no more than `tolerance` of any row's softmax mass
    beside rounding (0: nothing is left out). Slopes default to the paper's for this many heads. Without `causal` it is
    an encoder's, −slope · |i − j|.

    Fewer key than query heads share them (GQA). `key_padding_mask` is True where a key is padding, in front or behind,
    as in torch.nn.MultiheadAttention (Hugging Face's attention_mask is its opposite: pass `attention_mask == 0`); rows
    that are padding themselves get numbers that mean nothing. `documents`, `window` and `scale` are those of `attend`.
    Under autocast q, k and v are brought to its dtype, as torch's scaled_dot_product_attention does.
    """
    q, k, v = _cast_by_autocast(q, k, v)
    check_tensors(q, k, v)
    if key_padding_mask is not None:
        documents = _padding_apart(key_padding_mask, documents, (k.shape[0], k.shape[2]))
    bias = LinearBias(alibi.slopes(q.shape[1]).to(q.device) if slopes is None else slopes)
    allowed = {"window": window, "documents": documents, "tolerance": tolerance, "causal": causal}
    out = attend(q, k, v, bias=bias, dropout=dropout_p, scale=scale, **allowed)
    assert isinstance(out, Tensor)
    return out


def _cast_by_autocast(*tensors: Tensor) -> list[Tensor]:
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def _padding_apart(mask: Tensor, documents: Tensor | None, shape: tuple[int, int]) -> Int[Tensor, "batch k_len"]:
    """Padding as documents of its own: nobody else sees it, distances stay true, and no row is left without a key.

    mask 1 1 0 0 0 1   ->   documents 1 1 0 0 0 2
    """
    if mask.dtype != torch.bool or mask.shape != shape:
        raise InputError(
            f"key_padding_mask must be boolean, True where a key is padding, of shape (batch, k_len) = {shape}; got "
            f"{mask.dtype} of shape {tuple(mask.shape)}. From a mask that is 1 for tokens, pass `mask == 0`."
        )
    begins = mask.clone()
    begins[:, 1:] &= ~mask[:, :-1]
    runs = begins.cumsum(1)  # each of its own: a document in one piece is what every engine can do
    if documents is None:
        return torch.where(mask, runs, 0)
    return torch.where(mask, documents.amin() - runs, documents)


def attend_in_blocks(
    q: Float[Tensor, "batch heads q_len dim"],
    k: Float[Tensor, "batch kv_heads k_len dim"],
    v: Float[Tensor, "batch kv_heads k_len dim"],
    *,
    blocks: int,
    **options: Any,
) -> Float[Tensor, "batch heads q_len dim"]:
    """`attend` in which a query sees its own block of keys and the one before (xPos's blockwise causal attention).

    blocks of 2:   query 0 1 | 2 3 | 4 5    first key 0 0 | 0 0 | 2 2
    """
    total, past, parts = k.shape[2], k.shape[2] - q.shape[2], []
    for first in range(past - past % blocks, total, blocks):
        rows = q[:, :, max(first, past) - past : first + blocks - past]
        keys = slice(max(0, first - blocks), min(first + blocks, total))
        parts.append(attend(rows, k[:, :, keys], v[:, :, keys], **options))
    return torch.cat(parts, dim=2)


def _refuse_script() -> None:
    raise InputError(
        "torch.jit.script reads Python of a kind that this function is not written in; use torch.jit.trace or "
        "torch.export, which give a graph of torch's own operators."
    )


for _function in (attend, alibi_attention):  # torch.jit.script asks what it is given, and what that calls, for this
    _function.__prepare_scriptable__ = _refuse_script  # pyright: ignore[reportFunctionMemberAccess]
