"""What can be wrong with a Hugging Face model of ALiBi's, each found by running a tiny copy of it.

A probe looks at what a class does, never at a version number: a library that has been repaired is healthy. Differences
are in deviations of the logits.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainshort import alibi
from trainshort.interop.doctor.tiny_model import MAX_ERROR, TinyModel, text
from trainshort.interop.patch import apply_patch
from trainshort.interop.patch.families import FAMILIES

SHORT, LONG, LIMIT = 48, 600, 64
"""Tokens: within any limit; past where eight bits tell positions apart; the limit that a copy is given."""
OFF = 1e-3
"""Of a copy in float32: more than rounding."""
LENGTHS = (331, 661)
"""At which tensors of length times length are looked for; odd, so that no width is taken for a length."""
DEVIATIONS = "deviations of the logits"
PATCH = "trainshort.patch(model)"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    id: str
    sentence: str
    measured: float
    unit: str
    fix: str

    def __str__(self) -> str:
        return f"{self.id}: {self.sentence} ({self.measured:.3g} {self.unit}). Cure: {self.fix}."


Probe = Callable[[TinyModel], Iterator[Finding]]


@torch.no_grad()
def logits(model: Any, tokens: Tensor, **asked: Any) -> Tensor:
    return model(tokens, **{"use_cache": False} | asked).logits.double()


def off(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.std())


def divergence(expected: Tensor, found: Tensor) -> float:
    """The mean divergence of the next token's probabilities."""
    expected, found = expected.log_softmax(-1), found.log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum(-1).mean().clamp(min=0))


def length_limit(case: TinyModel) -> Iterator[Finding]:
    """Does it run past the length in its config?"""
    if case.limit is None:
        return
    model = case.tiny(longest=LIMIT)
    for tokens in range(LIMIT + 1, LIMIT + 3):
        try:
            logits(model, text(tokens))
        except (RuntimeError, IndexError, ValueError) as error:
            sentence = f"more than {case.limit:,} tokens, and generating past them, end in {type(error).__name__}"
            cure = f"{PATCH}, or a larger {_limit_name(case)} in its config" if case.reference is not None else "none"
            yield Finding(f"{_name(case)}-LENGTH", sentence, case.limit, "tokens", cure)
            return


def _limit_name(case: TinyModel) -> str:
    return next(name for name in MAX_ERROR if hasattr(case.config, name))


def slopes(case: TinyModel) -> Iterator[Finding]:
    """Are the biases those that its settings describe, also where the weights are asked for?"""
    if case.reference is None:
        return
    model, tokens = case.tiny(), text(SHORT)
    expected, found = logits(case.reference, tokens), logits(model, tokens)
    if (difference := off(found, expected)) > OFF:
        yield _explained(case, found, difference, "")
    told = logits(model, tokens, output_attentions=True)
    if (again := off(told, expected)) > OFF and off(told, found) > OFF:
        yield _explained(case, told, again, " where the weights are asked for (output_attentions=True)")


def _explained(case: TinyModel, found: Tensor, difference: float, where: str) -> Finding:
    """Which other slopes give what the copy gives."""
    right, settings = FAMILIES[case.kind].slopes(case.reference.config), getattr(case.config, "attn_config", None)
    others = {
        "BIASMAX": (
            alibi.slopes(len(right)),
            f"alibi_bias_max {getattr(settings, 'alibi_bias_max', 8)} is taken for 8",
        ),
        "DOUBLE": (2 * right, f"ALiBi is counted twice{where}"),
        "LOST": (0 * right, f"there is no ALiBi in its attention{where}"),
    }
    cure = PATCH if case.kind != "falcon" else f"{PATCH}, or attn_implementation='sdpa' without output_attentions"
    for name, (other, sentence) in others.items():
        with case.with_slopes(other) as model:
            if off(found, logits(model, text(SHORT))) <= OFF:
                return Finding(f"{_name(case)}-{name}", sentence, difference, DEVIATIONS, cure)
    sentence = f"it computes something else than its settings describe{where}"
    return Finding(f"{_name(case)}-OTHER", sentence, difference, DEVIATIONS, PATCH)


def rounding(case: TinyModel) -> Iterator[Finding]:
    """Does it tell positions apart in a long text, in its number format?"""
    if case.reference is None:
        return
    tokens = text(LONG)
    expected = _alike(case, tokens)
    whole = divergence(expected, logits(case.tiny(), tokens))
    if whole > 1e-8:
        sentence = "slope times position is rounded to eight bits, whatever the number format"
        yield Finding(f"{_name(case)}-BF16", f"{sentence}; from about 260 tokens on", whole, _KL, PATCH)
    elif case.dtype in (torch.bfloat16, torch.float16):
        repaired = replace(case, patched=None).tiny(dtype=case.dtype)
        apply_patch(repaired)
        best = divergence(expected, logits(repaired, tokens))
        if (found := divergence(expected, logits(case.tiny(dtype=case.dtype), tokens))) > 5 * best:
            name = str(case.dtype).removeprefix("torch.")
            sentence = f"in {name} slope times position keeps too few bits; {found / best:.0f} times what {name} loses"
            yield Finding(f"{_name(case)}-HALF", sentence, found, _KL, f"{PATCH}, or dtype=torch.float32")


_KL = f"nats at {LONG} tokens"


def _alike(case: TinyModel, tokens: Tensor) -> Tensor:
    """The reference, with those slopes that the copy has: what else is wrong with them is another finding."""
    right = FAMILIES[case.kind].slopes(case.reference.config)
    found = logits(case.tiny(), text(SHORT))
    for other in (right, alibi.slopes(len(right)), 2 * right, 0 * right):
        with case.with_slopes(other) as model:
            if off(found, logits(model, text(SHORT))) <= OFF:
                return logits(model, tokens)
    return logits(case.tiny(), tokens)


def packed(case: TinyModel) -> Iterator[Finding]:
    """Do documents in one row, told by positions that begin again, see each other?"""
    model, one = case.tiny(), text(SHORT)
    both, where = torch.cat([text(SHORT - 7), one], 1), torch.cat([torch.arange(SHORT - 7), torch.arange(SHORT)])[None]
    alone = logits(model, one)
    if (difference := off(logits(model, both, position_ids=where)[:, -SHORT:], alone)) > OFF:
        sentence = "documents packed into one row (position_ids that begin again) see each other"
        yield Finding("PACKED", sentence, difference, DEVIATIONS, PATCH if case.reference is not None else "one a row")


def padding_and_cache(case: TinyModel) -> Iterator[Finding]:
    """Is a text the same with padding in front, and when it comes in pieces?"""
    if case.reference is None:
        return
    model, tokens = case.tiny(), text(SHORT)
    alone, mask = logits(model, tokens), torch.ones(2, SHORT + 9)
    mask[1, :9] = 0
    rows = torch.cat([text(SHORT + 9), torch.cat([text(9), tokens], 1)])
    if (difference := off(logits(model, rows, attention_mask=mask)[1:, 9:], alone)) > OFF:
        yield Finding("PADDING", "padding in front of a text changes it", difference, DEVIATIONS, PATCH)
    with torch.no_grad():
        past = model(tokens[:, :-5], use_cache=True).past_key_values
        last = model(tokens[:, -5:], past_key_values=past, use_cache=True).logits.double()
    if (difference := off(last, alone[:, -5:])) > OFF:
        yield Finding("CACHE", "a text that comes in pieces is read otherwise", difference, DEVIATIONS, PATCH)


def static_cache(case: TinyModel) -> Iterator[Finding]:
    """Does it generate the same text from a static cache?"""
    model, tokens, made = case.tiny(), text(SHORT), []
    asked = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "pad_token_id": 0, "use_cache": True}
    for kind in ({}, {"cache_implementation": "static"}):
        try:
            made.append(model.generate(tokens, **asked, **kind, max_new_tokens=8, min_new_tokens=8))
        except (RuntimeError, ValueError, TypeError) as error:
            sentence = f"generating from a {'static' if kind else 'growing'} cache ends in {type(error).__name__}"
            yield Finding(f"{_name(case)}-STATIC", sentence, 0, "tokens of 8", _cure(case))
            return
    if not torch.equal(*made):
        same = int((made[0] == made[1])[0, SHORT:].sum())
        yield Finding(f"{_name(case)}-STATIC", "a static cache gives another text", same, "tokens of 8", _cure(case))


def _cure(case: TinyModel) -> str:
    return PATCH if case.reference is not None else "a growing cache"


class _Squares(TorchDispatchMode):
    """Bytes of the largest tensor of length times length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.largest = length, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, Tensor) and sum(self.length <= n < self.length + 16 for n in one.shape) > 1:
                self.largest = max(self.largest, one.numel() * one.element_size())
        return made


def quadratic(case: TinyModel) -> Iterator[Finding]:
    """Are there tensors of length times length?"""
    model, largest = case.tiny(dtype=case.dtype), []
    for length in LENGTHS:
        with _Squares(length) as seen:
            logits(model, text(length))
        largest.append(seen.largest)
    if all(largest):
        share = largest[1] * (4096 / LENGTHS[1]) ** 2 / 2**20
        sentence = "memory grows with the square of the length, by several tensors of length times length at once"
        cure = PATCH if case.reference is not None else "attn_implementation='sdpa', where the class follows it"
        yield Finding("QUADRATIC", sentence, share, "MB for each of them at 4,096 tokens", cure)


MATTERS: dict[str, Callable[[Any], Any]] = {
    "attn_config.alibi": lambda config: True,
    "attn_config.qk_ln": lambda config: False,
    "attn_config.prefix_lm": lambda config: False,
    "attn_config.kv_n_heads": lambda config: None,
    "attn_config.attn_type": lambda config: "multihead_attention",
    "attn_config.sliding_window_size": lambda config: -1,
    "logit_scale": lambda config: None,
    "no_bias": lambda config: True,
    "expansion_ratio": lambda config: 4,
    "learned_pos_emb": lambda config: config.learned_pos_emb if config.attn_config.alibi else False,
}
"""Settings of an MPT, and the value with which each does nothing."""


def ignored(case: TinyModel) -> Iterator[Finding]:
    """Does the class follow each setting that matters?"""
    if case.kind != "mpt":
        return
    for name, neutral in MATTERS.items():
        value, usual = case.config, neutral(case.config)
        for part in name.split("."):
            value = getattr(value, part, usual)
        if value == usual or (name.endswith("kv_n_heads") and value == case.config.n_heads):
            continue
        bare = replace(case, patched=None)
        given, without = bare.tiny(), bare.tiny(**{name: usual})
        shapes = [{key: weight.shape for key, weight in model.state_dict().items()} for model in (given, without)]
        if shapes[0] == shapes[1] and torch.equal(logits(given, text(SHORT)), logits(without, text(SHORT))):
            sentence = f"{name} = {value!r} is in its config, and the class takes no notice of it"
            yield Finding("MPT-IGNORED", sentence, 0.0, f"{DEVIATIONS} between {value!r} and {usual!r}", _import(name))


def _import(name: str) -> str:
    inside = ("attn_config.kv_n_heads", "attn_config.attn_type", "attn_config.sliding_window_size")
    known = name in (*inside, "logit_scale", "no_bias", "expansion_ratio")
    return "trainshort import, which follows it" if known else "the code the model was trained with"


def unexpected(case: TinyModel) -> Iterator[Finding]:
    """Are biases stored for which the class has no place?"""
    if not case.weights:
        return
    known = set(case.tiny(longest=LIMIT).state_dict())
    inner = {name.partition(".")[2] for name in known}  # of a body that was saved alone
    kinds = {_general(name) for name in known | inner}
    biases = [name for name in case.weights if name.endswith(".bias") and _general(name) not in kinds]
    biases = [name for name in biases if not name.endswith("self_attention.bias")]  # an old mask of BLOOM's
    if biases:
        sentence = f"stored biases have no place in the class and are left out, {sorted(biases)[0]} the first"
        yield Finding(f"{_name(case)}-IGNORED", sentence, len(biases), "tensors", "trainshort import, which takes them")


def _general(name: str) -> str:
    return ".".join("{}" if part.isdigit() else part for part in name.split("."))


def saved(case: TinyModel) -> Iterator[Finding]:
    """Is it the same after it was saved and loaded, in its number format? Slopes in a buffer get lost there."""
    model = replace(case, patched=None).tiny()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        asked = {"dtype": case.dtype} | case.loading
        again = case.model_class.from_pretrained(folder, **asked).eval()  # pyright: ignore[reportAttributeAccessIssue]
    expected, found = logits(model.to(case.dtype), text(SHORT)), logits(again, text(SHORT))
    difference = off(found, expected)
    if not difference <= (OFF if case.dtype == torch.float32 else 0.05):
        sentence = "saved and loaded again it is another model: what is in no file, such as slopes, is lost"
        yield Finding(f"{_name(case)}-LOST", sentence, difference, DEVIATIONS, "slopes as floats, made in forward")
    fresh = {name: value for name, value in model.named_buffers() if name.endswith("slopes")}
    for name, value in case.slopes.items():
        right = fresh.get(name)
        if right is not None and right.shape == value.shape and not torch.allclose(value.float(), right, rtol=1e-6):
            worst = float((value.float() / right - 1).abs().max())
            sentence = f"the slopes in {name} are not ALiBi's, or were rounded"
            yield Finding(f"{_name(case)}-LOST", sentence, worst, "of a slope at most", "load it anew, in float32")


def _name(case: TinyModel) -> str:
    return case.kind.upper()


PROBES: tuple[Probe, ...] = (
    *(length_limit, slopes, rounding, packed, padding_and_cache, static_cache, quadratic, ignored, unexpected, saved),
)
