"""`patch(model)`: our attention in a loaded Hugging Face MPT, BLOOM or Falcon; `unpatch(model)` takes it out again.

    model = AutoModelForCausalLM.from_pretrained("mosaicml/mpt-7b")
    print(trainshort.patch(model))

Slopes are those of the settings, in float32; inputs may be of any length; packed documents do not see each other;
nothing of length times length is built. Padding, caches, generate, beam search, peft, training are as before. The model
is compared with itself on a few tokens, before and after, and left as it was if it computes something else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from trainshort.attention.call import TOLERANCE
from trainshort.errors import InputError
from trainshort.interop.patch.families import (
    FAMILIES,
    Family,
    Part,
    original_class,
    unwrap_module_class,
    wrap_module_class,
)
from trainshort.interop.patch.forward import FFN_CHUNK
from trainshort.interop.patch.masks import SETTINGS, PatchSettings
from trainshort.model.linear import is_onednn_faster

TOKENS = 10
"""Of the probe's longer text; the other has fewer, with padding in front."""
LIMIT = 1e-4
"""Largest difference that rounding explains, in deviations of what the model gives; in half precision more."""


@dataclass(frozen=True)
class PatchReport:
    """What was changed, and how far the model is from what it was on a few tokens."""

    model: str
    changes: tuple[str, ...]
    slopes: tuple[float, ...]
    tolerance: float
    parity: float = 0.0
    """Root of the mean squared difference, in deviations of what the model gives."""

    def __str__(self) -> str:
        lines = (f"{self.model}, patched:", *self.changes, f"before and after differ by {self.parity:.0e} on a probe")
        return "\n  ".join(lines)


def patch(model: nn.Module, *, tolerance: float = TOLERANCE) -> PatchReport:
    """Put `attend` into a loaded MPT, BLOOM or Falcon (with ALiBi), also inside a wrapper such as peft's.

    `tolerance` is the softmax mass that a row may leave out where it is proven to be no more (0: nothing). Patching
    again with the same tolerance changes nothing.
    """
    if not 0 <= tolerance < 1:
        raise InputError(f"tolerance is a share of softmax mass, at least 0 and less than 1; got {tolerance}.")
    if (done := get_patch_report(model)) is not None:
        if done.tolerance != tolerance:
            raise InputError(
                f"This model is patched already, with tolerance {done.tolerance:g}. Call unpatch(model) first."
            )
        return done
    name, body = _find(model)
    probe = _SelfCheck(model, FAMILIES[name], body)
    expected = probe.before()
    report = apply_patch(model, tolerance)
    try:
        report = replace(report, parity=probe.after(expected))
    except BaseException:
        unpatch(model)
        raise
    vars(body)[SETTINGS] = replace(vars(body)[SETTINGS], report=report)
    return report


def apply_patch(model: nn.Module, tolerance: float = TOLERANCE) -> PatchReport:
    """The same without a probe."""
    name, body = _find(model)
    family = FAMILIES[name]
    parts: list[tuple[nn.Module, Part]] = [
        (module, part) for module in model.modules() if (part := family.find_part(module)) is not None
    ]
    slopes = family.slopes(body.config)
    report = PatchReport(
        model=next(original_class(module).__name__ for module, part in parts if part in ("head_model", "body")),
        changes=_changes(name, body, parts, tolerance),
        slopes=tuple(slopes.tolist()),
        tolerance=tolerance,
    )
    try:
        for module, part in parts:
            wrap_module_class(module, name, part)
    except InputError:
        for module, _ in parts:
            unwrap_module_class(module)
        raise
    vars(body)[SETTINGS] = PatchSettings(slopes, tolerance, family.skips_padding_in_distances, report)
    return report


def unpatch(model: nn.Module) -> None:
    """Undo `patch`; the model is what it was, to the bit."""
    if not sum(unwrap_module_class(module) for module in model.modules()):
        raise InputError("This model is not patched, so there is nothing to undo.")


def get_patch_report(model: nn.Module) -> PatchReport | None:
    """What `patch` gave back for this model; None where it is not patched."""
    if not isinstance(model, nn.Module):
        raise InputError(f"patch takes a loaded model; this is a {type(model).__name__}.")
    return next((vars(module)[SETTINGS].report for module in model.modules() if SETTINGS in vars(module)), None)


def _find(model: nn.Module) -> tuple[str, Any]:
    """The family of a model, and its body."""
    for module in model.modules():
        for name, family in FAMILIES.items():
            if family.find_part(module) == "body":
                if not family.has_alibi(module.config):
                    raise InputError(f"The config of this {original_class(module).__name__} says that it has no ALiBi.")
                return name, module
    raise InputError(
        f"patch knows Hugging Face's MPT, BLOOM and Falcon (with ALiBi), and this is a {type(model).__name__}."
    )


def _changes(name: str, body: Any, parts: list[tuple[nn.Module, Part]], tolerance: float) -> tuple[str, ...]:
    def called(part: str) -> str:
        found = [original_class(module).__name__ for module, one in parts if one == part]
        return f"{len(found)} {found[0]}" if len(found) > 1 else found[0]

    slopes = {
        "mpt": lambda: f"slopes of alibi_bias_max {body.config.attn_config.alibi_bias_max}",
        "bloom": lambda: "ALiBi's slopes",
        "falcon": lambda: "ALiBi's slopes, divided by the root of the heads' width",
    }[name]()
    changes = [
        f"{called('attention')}: attend with {slopes}, in float32; tolerance {tolerance:g}",
        f"{called('block')}: hands on what may be seen",
        f"{called('body')}: any length; no mask and no biases of length times length",
    ]
    if any(part == "head_model" for _, part in parts):
        changes.append(f"{called('head_model')}: packed documents (position_ids, cu_seq_lens_q) are kept apart")
    changes.append(
        f"{called('ffn')}: in training the activation's output is made again and not kept; without gradients "
        f"{FFN_CHUNK} tokens at a time"
    )
    if is_onednn_faster():
        changes.append("linear layers of these: oneDNN's products, which are quicker than MKL's on this processor")
    return tuple(changes)


# ---- the probe


class _SelfCheck:
    """Two short texts through the model: beside each other, packed, and from a cache."""

    def __init__(self, model: nn.Module, family: Family, body: Any) -> None:
        whole = [
            module
            for module in model.modules()
            if family.find_part(module) == "head_model" and hasattr(module, "lm_head")
        ]
        self.model = whole[0] if whole else body  # a classifier has no numbers for every token
        self.body = body
        table = body.get_input_embeddings().weight
        if any(weight.is_meta for weight in body.parameters()):
            raise InputError("The model's weights are not loaded (device meta); patch it when they are.")
        longest = getattr(body.config, "max_seq_len", TOKENS)
        self.length = max(2, min(TOKENS, longest))
        self.hidden = self.length // 3
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(len(table), (2, self.length), generator=generator).to(table.device)
        self.mask = torch.ones_like(self.tokens)
        self.mask[1, : self.hidden] = 0
        self.texts = [self.tokens[:1], self.tokens[1:, self.hidden :]]
        self.limit = max(LIMIT, 8 * torch.finfo(table.dtype).eps) if table.is_floating_point() else LIMIT

    def before(self) -> list[Tensor]:
        """What the class itself gives for each text alone, made right where it is known to be wrong."""
        with _fix_known_bugs(self.body), self._calm():
            try:
                return [self._run(text)[0] for text in self.texts]
            except Exception as error:
                raise InputError(f"The model does not run as it is: {error}") from error

    def after(self, expected: list[Tensor]) -> float:
        """The largest difference of the three ways; refused where rounding does not explain it."""
        where = torch.cat([torch.arange(text.shape[1]) for text in self.texts])[None].to(self.tokens.device)
        with self._calm():
            beside = self._run(self.tokens, attention_mask=self.mask)
            together = self._run(torch.cat(self.texts, 1), position_ids=where)
            first = self.model(self.tokens[:1, :-1], use_cache=True)
            last = self._run(self.tokens[:1, -1:], use_cache=True, past_key_values=first.past_key_values)
        ways = {
            "with padding": (torch.cat([beside[0], beside[1, self.hidden :]]), torch.cat(expected)),
            "packed documents": (together[0], torch.cat(expected)),
            "with a cache": (last[0], expected[0][-1:]),
        }
        deviation = float(torch.cat(expected).double().std())
        found = {way: _difference(a, b) / deviation for way, (a, b) in ways.items()}
        worst = max(found, key=lambda way: float("inf") if found[way] != found[way] else found[way])
        if not found[worst] <= self.limit:
            raise InputError(
                f"Patched, this {original_class(self.model).__name__} differs by {found[worst]:.1e} deviations on some "
                f"tokens ({worst}; allowed {self.limit:.0e}), so it was left as it was. trainshort may not know this "
                "version of transformers."
            )
        return found[worst]

    def _run(self, tokens: Tensor, **asked: Any) -> Tensor:
        asked = {"use_cache": False, "output_attentions": False, "return_dict": True} | asked
        return self.model(tokens, **asked)[0]

    @contextmanager
    def _calm(self) -> Iterator[None]:
        """Without gradients and dropout; each module's own mode comes back."""
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).square().mean().sqrt())


@contextmanager
def _fix_known_bugs(body: Any) -> Iterator[None]:
    """MPT's class forgets alibi_bias_max, and Falcon's counts the bias twice unless it runs by sdpa."""
    config, own = body.config, vars(body)
    implementation = config._attn_implementation
    try:
        if hasattr(body, "build_mpt_alibi_tensor"):
            most, build = config.attn_config.alibi_bias_max, type(body).build_mpt_alibi_tensor
            own["build_mpt_alibi_tensor"] = lambda heads, length, _=None, device=None: build(
                body, heads, length, most, device
            )
        if hasattr(body, "use_alibi") and implementation == "eager":
            config._attn_implementation = "sdpa"
        yield
    finally:
        own.pop("build_mpt_alibi_tensor", None)
        if config._attn_implementation != implementation:
            config._attn_implementation = implementation
