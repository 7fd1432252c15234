"""Replace the attention of a loaded Hugging Face MPT, BLOOM or Falcon model by `trainshort.attend`.

    model = AutoModelForCausalLM.from_pretrained("mosaicml/mpt-7b")
    print(trainshort.patch(model))
    trainshort.unpatch(model)

The patched model accepts inputs of any length and never builds a mask or bias of shape (length, length). Padding, KV
caches, `generate`, beam search, peft and training work as before.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from trainshort.attention.call import TOLERANCE
from trainshort.errors import InputError
from trainshort.interop.patch.families import (
    FAMILIES,
    Part,
    original_class,
    unwrap_module_class,
    wrap_module_class,
)
from trainshort.interop.patch.forward import FFN_CHUNK
from trainshort.interop.patch.masks import SETTINGS, PatchSettings
from trainshort.interop.patch.self_check import SelfCheck
from trainshort.model.linear import is_onednn_faster

PatchedModules = list[tuple[nn.Module, Part]]


@dataclass(frozen=True)
class PatchReport:
    """What `patch` changed in a model.

    Attributes:
        model: The class name of the model.
        changes: One sentence for each kind of module that was changed.
        slopes: The ALiBi slope of each attention head.
        tolerance: The softmax mass that attention may skip for each query.
        parity: How much the outputs of a short test text differ before and after `patch`: the root mean square
            difference, in standard deviations of the outputs.
    """

    model: str
    changes: tuple[str, ...]
    slopes: tuple[float, ...]
    tolerance: float
    parity: float = 0.0

    def __str__(self) -> str:
        title = f"Patched {self.model}:"
        self_check = f"self-check: outputs before and after differ by {self.parity:.0e} standard deviations"
        return "\n  ".join([title, *self.changes, self_check])


def patch(model: nn.Module, *, tolerance: float = TOLERANCE) -> PatchReport:
    """Replace the attention of a loaded MPT, BLOOM or Falcon model with ALiBi by `trainshort.attend`.

    The model is changed in place. It may be inside a wrapper such as a peft model. A short text is run before and after
    the change. If the outputs differ by more than rounding errors, the change is undone.

    Calling `patch` again with the same tolerance changes nothing.

    Args:
        model: A loaded model of `transformers`.
        tolerance: The softmax mass (sum of attention weights) that may be skipped for each query. Keys are skipped only
            if their mass is proven to be at most this value. With 0, no key is skipped.

    Returns:
        A report of the changes. `print(report)` shows one line for each kind of module.

    Raises:
        InputError: If the model is not supported, if it is already patched with another tolerance, or if the outputs
            would change.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("mosaicml/mpt-7b")
        >>> report = trainshort.patch(model)
    """
    if not 0 <= tolerance < 1:
        raise InputError(f"tolerance must be at least 0 and less than 1, got {tolerance}.")
    existing_report = get_patch_report(model)
    if existing_report is not None:
        if existing_report.tolerance != tolerance:
            raise InputError(
                f"This model is already patched with tolerance {existing_report.tolerance:g}. "
                "Call unpatch(model) first."
            )
        return existing_report

    # The body is the model without its head, such as `MptModel`. It stores the settings of the patch.
    family_name, body = _find_body(model)
    self_check = SelfCheck(model, FAMILIES[family_name], body)
    expected = self_check.run_unpatched()
    report = apply_patch(model, tolerance)
    try:
        report = replace(report, parity=self_check.compare_patched(expected))
    except BaseException:  # Also if the user interrupts the check with Ctrl+C.
        unpatch(model)
        raise
    vars(body)[SETTINGS] = replace(vars(body)[SETTINGS], report=report)
    return report


def apply_patch(model: nn.Module, tolerance: float = TOLERANCE) -> PatchReport:
    """Patch a model without comparing its outputs before and after.

    Args:
        model: A loaded model of `transformers`.
        tolerance: The softmax mass that attention may skip for each query, as in `patch`.

    Returns:
        A report of the changes.

    Raises:
        InputError: If the model is not supported, or if another tool has already replaced one of its methods.
    """
    family_name, body = _find_body(model)
    family = FAMILIES[family_name]
    modules: PatchedModules = []
    for module in model.modules():
        part = family.find_part(module)
        if part is not None:
            modules.append((module, part))

    slopes = family.slopes(body.config)
    report = PatchReport(
        model=_outermost_class_name(modules),
        changes=_describe_changes(family_name, body, modules, tolerance),
        slopes=tuple(slopes.tolist()),
        tolerance=tolerance,
    )
    try:
        for module, part in modules:
            wrap_module_class(module, family_name, part)
    except InputError:
        # Restore the modules that are already patched.
        for module, _ in modules:
            unwrap_module_class(module)
        raise
    # The body (the model without its head) stores the settings, which its forward method reads.
    vars(body)[SETTINGS] = PatchSettings(slopes, tolerance, family.skips_padding_in_distances, report)
    return report


def unpatch(model: nn.Module) -> None:
    """Undo `patch`. Afterwards, the model computes exactly the same as before `patch`.

    Args:
        model: A patched model.

    Raises:
        InputError: If the model is not patched.
    """
    # The function restores the original class of a module, and returns whether the module was patched.
    was_patched = [unwrap_module_class(module) for module in model.modules()]
    if not any(was_patched):
        raise InputError("This model is not patched.")


def get_patch_report(model: nn.Module) -> PatchReport | None:
    """Return the report that `patch` returned for this model, or None if the model is not patched.

    Raises:
        InputError: If `model` is not a loaded model.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"Expected a loaded model, got {type(model).__name__}.")
    # The body of a patched model (the model without its head) stores the report as an attribute.
    for module in model.modules():
        if SETTINGS in vars(module):
            return vars(module)[SETTINGS].report
    return None


def _find_body(model: nn.Module) -> tuple[str, Any]:
    """Return the name of a model's family, such as "mpt", and its body (the model without its head).

    A family is a group of classes of transformers that belong together, such as `MptModel` and `MptForCausalLM`.

    Raises:
        InputError: If the model is not supported or does not use ALiBi.
    """
    for module in model.modules():
        for family_name, family in FAMILIES.items():
            if family.find_part(module) != "body":
                continue
            if not family.has_alibi(module.config):
                raise InputError(f"Cannot patch this {original_class(module).__name__}: its config disables ALiBi.")
            return family_name, module
    raise InputError(
        f"Cannot patch a {type(model).__name__}. Supported models: MPT, BLOOM and Falcon of Hugging Face, with ALiBi."
    )


def _outermost_class_name(modules: PatchedModules) -> str:
    """Return the class name of the complete model, such as `MptForCausalLM`.

    Args:
        modules: The modules that are patched, and which part of the model each module is. A module comes before the
            modules that it contains.
    """
    for module, part in modules:
        if part in ("head_model", "body"):
            return original_class(module).__name__
    raise AssertionError("A supported model has a body.")


def _describe_changes(family_name: str, body: Any, modules: PatchedModules, tolerance: float) -> tuple[str, ...]:
    """Describe the changes of `patch`, one line for each kind of module.

    Args:
        family_name: The family of the model, a key of `FAMILIES`.
        body: The model without its head.
        modules: All modules that are patched, and which part of the model each module is.
        tolerance: The softmax mass that attention may skip for each query.
    """

    def count_modules(kind: Part) -> str:
        """Return the number of modules of one kind and their class name, such as '24 MptBlock'."""
        class_names = [original_class(module).__name__ for module, part in modules if part == kind]
        return f"{len(class_names)} {class_names[0]}"

    if family_name == "mpt":
        slopes = f"ALiBi slopes for alibi_bias_max={body.config.attn_config.alibi_bias_max}"
    elif family_name == "falcon":
        slopes = "ALiBi slopes divided by the square root of the head width"
    else:
        slopes = "ALiBi slopes"

    changes = [
        f"{count_modules('attention')}: use trainshort.attend; {slopes}, in float32; tolerance {tolerance:g}",
        f"{count_modules('block')}: pass segment ids instead of a mask",
        f"{count_modules('body')}: accept any length; build no mask and no bias of shape (length, length)",
    ]
    if any(part == "head_model" for _, part in modules):
        changes.append(f"{count_modules('head_model')}: separate packed documents (position_ids, cu_seq_lens_q)")
    changes.append(
        f"{count_modules('ffn')}: recompute the activation in the backward pass; without gradients, process "
        f"{FFN_CHUNK} tokens at a time"
    )
    if is_onednn_faster():
        changes.append("linear layers of these modules: use oneDNN, which is faster than MKL on this processor")
    return tuple(changes)
