"""The checks of `doctor`. Each check runs a small copy of a Hugging Face model and reports bugs of its class.

A check observes what the class computes and never looks at a version number. If a version of transformers fixes a bug,
the check reports nothing.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainshort import alibi
from trainshort.interop.doctor.tiny_model import TinyModel, random_tokens
from trainshort.interop.patch import apply_patch
from trainshort.interop.patch.families import FAMILIES

SHORT_LENGTH = 48
LONG_LENGTH = 600
"""A length at which bfloat16 cannot represent all distances exactly."""
LIMITED_LENGTH = 64
"""The length limit of the copy with which the check of length limits runs."""
MAX_DIFFERENCE = 1e-3
"""The largest difference in float32 that rounding can explain, in standard deviations of the logits."""
MAX_HALF_PRECISION_DIFFERENCE = 0.05
"""The same limit for float16 and bfloat16."""
MEMORY_TEST_LENGTHS = (331, 661)
"""Two lengths that differ from all other sizes of the copy, to recognize tensors of shape (length, length)."""

LOGIT_DEVIATIONS = "standard deviations of the logits"
KL_UNIT = f"nats at {LONG_LENGTH} tokens"
PATCH_FIX = "trainshort.patch(model)"


@dataclass(frozen=True)
class Finding:
    """A bug that `doctor` found.

    Attributes:
        id: A short identifier such as `MPT-LENGTH`.
        sentence: What is wrong.
        measured: How large the effect of the bug is.
        unit: The unit of `measured`.
        fix: How to avoid the bug.
    """

    id: str
    sentence: str
    measured: float
    unit: str
    fix: str

    def __str__(self) -> str:
        return f"{self.id}: {self.sentence} ({self.measured:.3g} {self.unit}). Fix: {self.fix}."


Probe = Callable[[TinyModel], Iterator[Finding]]
Logits = Float[Tensor, "batch length vocab"]


@torch.no_grad()
def compute_logits(model: Any, tokens: Int[Tensor, "batch length"], **kwargs: Any) -> Logits:
    """Run a Hugging Face model without a KV cache and return its logits in float64."""
    options = {"use_cache": False}
    options.update(kwargs)
    return model(tokens, **options).logits.double()


def max_difference(a: Logits, b: Logits) -> float:
    """Return the largest difference between two tensors of logits, in standard deviations of the second one."""
    return float((a - b).abs().max() / b.std())


def kl_divergence(expected: Logits, actual: Logits) -> float:
    """Return the Kullback-Leibler divergence of the next-token probabilities, averaged over all positions."""
    expected_log_probs = expected.log_softmax(-1)
    actual_log_probs = actual.log_softmax(-1)
    divergence = (expected_log_probs.exp() * (expected_log_probs - actual_log_probs)).sum(-1)
    return float(divergence.mean().clamp(min=0))


def check_length_limit(case: TinyModel) -> Iterator[Finding]:
    """Check whether the model runs on inputs longer than the limit in its config."""
    setting = case.max_length_setting
    if setting is None:
        return
    model = case.build(max_length=LIMITED_LENGTH)
    for length in (LIMITED_LENGTH + 1, LIMITED_LENGTH + 2):
        try:
            compute_logits(model, random_tokens(length))
        except (RuntimeError, IndexError, ValueError) as error:
            limit = getattr(case.config, setting)
            sentence = f"inputs of more than {limit:,} tokens raise {type(error).__name__}"
            fix = f"{PATCH_FIX}, or increase {setting} in the config" if case.has_known_alibi else "none"
            yield Finding(f"{case.model_type.upper()}-LENGTH", sentence, limit, "tokens", fix)
            return


def check_slopes(case: TinyModel) -> Iterator[Finding]:
    """Check whether the ALiBi bias follows the config, with and without `output_attentions`."""
    if not case.has_known_alibi:
        return
    model = case.build()
    tokens = random_tokens(SHORT_LENGTH)
    expected = compute_logits(case.reference, tokens)
    actual = compute_logits(model, tokens)
    difference = max_difference(actual, expected)
    if difference > MAX_DIFFERENCE:
        yield _explain_wrong_slopes(case, actual, difference, condition="")

    # Some classes use other code if the caller asks for the attention weights.
    with_weights = compute_logits(model, tokens, output_attentions=True)
    difference_with_weights = max_difference(with_weights, expected)
    is_other_bug = max_difference(with_weights, actual) > MAX_DIFFERENCE
    if difference_with_weights > MAX_DIFFERENCE and is_other_bug:
        yield _explain_wrong_slopes(
            case, with_weights, difference_with_weights, condition=" with output_attentions=True"
        )


def _explain_wrong_slopes(case: TinyModel, actual: Logits, difference: float, condition: str) -> Finding:
    """Find out which wrong slopes explain the logits of a model.

    Args:
        case: The model.
        actual: The logits of the model for a short text.
        difference: The difference of these logits from those of the reference.
        condition: When the bug occurs, as the end of a sentence.
    """
    model_name = case.model_type.upper()
    correct_slopes = FAMILIES[case.model_type].slopes(case.reference.config)
    attention_config = getattr(case.config, "attn_config", None)
    max_bias = getattr(attention_config, "alibi_bias_max", 8)
    candidates = {
        "BIASMAX": (alibi.slopes(len(correct_slopes)), f"alibi_bias_max is {max_bias}, but the class uses 8"),
        "DOUBLE": (2 * correct_slopes, f"the ALiBi bias is added twice{condition}"),
        "LOST": (0 * correct_slopes, f"attention has no ALiBi bias{condition}"),
    }

    fix = PATCH_FIX
    if case.model_type == "falcon":
        fix = f"{PATCH_FIX}, or attn_implementation='sdpa' without output_attentions"
    for name, (slopes, sentence) in candidates.items():
        with case.reference_with_slopes(slopes) as model:
            candidate_logits = compute_logits(model, random_tokens(SHORT_LENGTH))
        if max_difference(actual, candidate_logits) <= MAX_DIFFERENCE:
            return Finding(f"{model_name}-{name}", sentence, difference, LOGIT_DEVIATIONS, fix)

    sentence = f"the logits differ from those of the ALiBi model that the config describes{condition}"
    return Finding(f"{model_name}-OTHER", sentence, difference, LOGIT_DEVIATIONS, PATCH_FIX)


def check_rounding(case: TinyModel) -> Iterator[Finding]:
    """Check whether the ALiBi bias is rounded so coarsely that nearby positions in a long text become equal."""
    if not case.has_known_alibi:
        return
    model_name = case.model_type.upper()
    tokens = random_tokens(LONG_LENGTH)
    expected = _reference_logits_with_same_slopes(case, tokens)

    float32_error = kl_divergence(expected, compute_logits(case.build(), tokens))
    if float32_error > 1e-8:
        sentence = (
            "the ALiBi bias is rounded to bfloat16 for every data type of the model, at more than about 260 tokens"
        )
        yield Finding(f"{model_name}-BF16", sentence, float32_error, KL_UNIT, PATCH_FIX)
        return

    if case.dtype not in (torch.bfloat16, torch.float16):
        return
    patched_model = case.without_patch().build(dtype=case.dtype)
    apply_patch(patched_model)
    patched_error = kl_divergence(expected, compute_logits(patched_model, tokens))
    actual_error = kl_divergence(expected, compute_logits(case.build(dtype=case.dtype), tokens))
    if actual_error > 5 * patched_error:
        dtype_name = str(case.dtype).removeprefix("torch.")
        ratio = actual_error / patched_error
        sentence = f"the ALiBi bias is rounded to {dtype_name}; the error is {ratio:.0f} times that of a float32 bias"
        fix = f"{PATCH_FIX}, or dtype=torch.float32"
        yield Finding(f"{model_name}-HALF", sentence, actual_error, KL_UNIT, fix)


def _reference_logits_with_same_slopes(case: TinyModel, tokens: Int[Tensor, "1 length"]) -> Logits:
    """Return the logits of the reference with the slopes that the model really uses.

    Wrong slopes are reported by another check. The difference from these logits is due to rounding only.
    """
    correct_slopes = FAMILIES[case.model_type].slopes(case.reference.config)
    actual = compute_logits(case.build(), random_tokens(SHORT_LENGTH))
    for slopes in (correct_slopes, alibi.slopes(len(correct_slopes)), 2 * correct_slopes, 0 * correct_slopes):
        with case.reference_with_slopes(slopes) as model:
            if max_difference(actual, compute_logits(model, random_tokens(SHORT_LENGTH))) <= MAX_DIFFERENCE:
                return compute_logits(model, tokens)
    return compute_logits(case.build(), tokens)


def check_packing(case: TinyModel) -> Iterator[Finding]:
    """Check whether documents that are packed into one row attend to each other.

    The start of a document is marked by `position_ids` that start again at 0.
    """
    model = case.build()
    first_document = random_tokens(SHORT_LENGTH - 7)
    second_document = random_tokens(SHORT_LENGTH)
    packed = torch.cat([first_document, second_document], dim=1)
    positions = torch.cat([torch.arange(SHORT_LENGTH - 7), torch.arange(SHORT_LENGTH)])

    alone = compute_logits(model, second_document)
    after_first = compute_logits(model, packed, position_ids=positions[None])[:, -SHORT_LENGTH:]
    difference = max_difference(after_first, alone)
    if difference > MAX_DIFFERENCE:
        sentence = "documents packed into one row (position_ids that start again at 0) attend to each other"
        fix = PATCH_FIX if case.has_known_alibi else "use one document per row"
        yield Finding("PACKED", sentence, difference, LOGIT_DEVIATIONS, fix)


def check_padding(case: TinyModel) -> Iterator[Finding]:
    """Check whether padding in front of a text changes the logits of the text."""
    if not case.has_known_alibi:
        return
    padding = 9
    model = case.build()
    tokens = random_tokens(SHORT_LENGTH)
    padded_tokens = torch.cat([random_tokens(padding), tokens], dim=1)
    batch = torch.cat([random_tokens(SHORT_LENGTH + padding), padded_tokens])
    attention_mask = torch.ones(2, SHORT_LENGTH + padding)
    attention_mask[1, :padding] = 0

    without_padding = compute_logits(model, tokens)
    with_padding = compute_logits(model, batch, attention_mask=attention_mask)[1:, padding:]
    difference = max_difference(with_padding, without_padding)
    if difference > MAX_DIFFERENCE:
        yield Finding(
            "PADDING", "padding in front of a text changes its logits", difference, LOGIT_DEVIATIONS, PATCH_FIX
        )


def check_cache(case: TinyModel) -> Iterator[Finding]:
    """Check whether a text that is read in two parts with a KV cache gives the same logits as in one pass."""
    if not case.has_known_alibi:
        return
    model = case.build()
    tokens = random_tokens(SHORT_LENGTH)
    one_pass = compute_logits(model, tokens)[:, -5:]
    with torch.no_grad():
        cache = model(tokens[:, :-5], use_cache=True).past_key_values
        second_part = model(tokens[:, -5:], past_key_values=cache, use_cache=True).logits.double()
    difference = max_difference(second_part, one_pass)
    if difference > MAX_DIFFERENCE:
        yield Finding("CACHE", "reading a text in parts changes its logits", difference, LOGIT_DEVIATIONS, PATCH_FIX)


def check_static_cache(case: TinyModel) -> Iterator[Finding]:
    """Check whether `generate` returns the same tokens with a static cache as with the default cache."""
    finding_id = f"{case.model_type.upper()}-STATIC"
    fix = PATCH_FIX if case.has_known_alibi else "use the default cache"
    model = case.build()
    prompt = random_tokens(SHORT_LENGTH)
    options = {
        "attention_mask": torch.ones_like(prompt),
        "do_sample": False,
        "pad_token_id": 0,
        "use_cache": True,
        "max_new_tokens": 8,
        "min_new_tokens": 8,
    }
    try:
        with_default_cache = model.generate(prompt, **options)
        with_static_cache = model.generate(prompt, **options, cache_implementation="static")
    except (RuntimeError, ValueError, TypeError) as error:
        sentence = f"generate with a default or static cache raises {type(error).__name__}"
        yield Finding(finding_id, sentence, 0, "of 8 tokens are equal", fix)
        return
    if not torch.equal(with_default_cache, with_static_cache):
        is_equal = (with_default_cache == with_static_cache)[0, SHORT_LENGTH:]
        sentence = "generate returns other tokens with a static cache"
        yield Finding(finding_id, sentence, int(is_equal.sum()), "of 8 tokens are equal", fix)


class _QuadraticTensorRecorder(TorchDispatchMode):
    """Record the size in bytes of the largest tensor with two dimensions of about `length`."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        outputs = output if isinstance(output, tuple | list) else (output,)
        for tensor in outputs:
            if isinstance(tensor, Tensor) and self._is_quadratic(tensor):
                self.largest_bytes = max(self.largest_bytes, tensor.numel() * tensor.element_size())
        return output

    def _is_quadratic(self, tensor: Tensor) -> bool:
        # Some implementations pad the length to a multiple of 8 or 16.
        long_dimensions = [size for size in tensor.shape if self.length <= size < self.length + 16]
        return len(long_dimensions) >= 2


def check_memory(case: TinyModel) -> Iterator[Finding]:
    """Check whether the model builds tensors of shape (length, length)."""
    model = case.build(dtype=case.dtype)
    largest_bytes = []
    for length in MEMORY_TEST_LENGTHS:
        with _QuadraticTensorRecorder(length) as recorder:
            compute_logits(model, random_tokens(length))
        largest_bytes.append(recorder.largest_bytes)
    if not all(largest_bytes):
        return
    growth = (4096 / MEMORY_TEST_LENGTHS[-1]) ** 2
    megabytes = largest_bytes[-1] * growth / 2**20
    sentence = "memory grows with the square of the length, because tensors of shape (length, length) are built"
    fix = PATCH_FIX if case.has_known_alibi else "attn_implementation='sdpa', if the class supports it"
    yield Finding("QUADRATIC", sentence, megabytes, "MB for each such tensor at 4,096 tokens", fix)


DEFAULT_MPT_SETTINGS: dict[str, Callable[[Any], Any]] = {
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
"""Settings of an MPT that a class may ignore, and a function that returns the value with which each has no effect."""

IMPORTED_MPT_SETTINGS = (
    "attn_config.kv_n_heads",
    "attn_config.attn_type",
    "attn_config.sliding_window_size",
    "logit_scale",
    "no_bias",
    "expansion_ratio",
)
"""The settings of `DEFAULT_MPT_SETTINGS` that `trainshort import` supports."""


def check_ignored_settings(case: TinyModel) -> Iterator[Finding]:
    """Check whether the MPT class ignores settings of its config."""
    if case.model_type != "mpt":
        return
    for name, get_default in DEFAULT_MPT_SETTINGS.items():
        default = get_default(case.config)
        value = _get_nested_setting(case.config, name, default)
        is_default = value == default
        if name == "attn_config.kv_n_heads":
            is_default = is_default or value == case.config.n_heads
        if is_default or not _is_setting_ignored(case, name, default):
            continue
        if name in IMPORTED_MPT_SETTINGS:
            fix = "trainshort import, which supports this setting"
        else:
            fix = "the code with which the model was trained"
        sentence = f"the config sets {name} = {value!r}, but the class ignores this setting"
        unit = f"{LOGIT_DEVIATIONS} between {value!r} and {default!r}"
        yield Finding("MPT-IGNORED", sentence, 0.0, unit, fix)


def _get_nested_setting(config: Any, name: str, default: Any) -> Any:
    """Return a setting such as `attn_config.alibi`, or `default` if the config does not have the setting."""
    value = config
    for attribute in name.split("."):
        value = getattr(value, attribute, default)
    return value


def _is_setting_ignored(case: TinyModel, name: str, default: Any) -> bool:
    """Return whether two copies, one with and one without the setting, have the same weights and logits."""
    with_setting = case.without_patch().build()
    without_setting = case.without_patch().build(**{name: default})
    shapes_with = {key: weight.shape for key, weight in with_setting.state_dict().items()}
    shapes_without = {key: weight.shape for key, weight in without_setting.state_dict().items()}
    if shapes_with != shapes_without:
        return False
    tokens = random_tokens(SHORT_LENGTH)
    return torch.equal(compute_logits(with_setting, tokens), compute_logits(without_setting, tokens))


def check_unused_biases(case: TinyModel) -> Iterator[Finding]:
    """Check whether the weight files contain bias tensors that the class does not load."""
    if not case.weight_names:
        return
    model_names = set(case.build(max_length=LIMITED_LENGTH).state_dict())
    # The body of a model can be saved alone. The first part of each name is then missing.
    body_names = {name.partition(".")[2] for name in model_names}
    loaded_patterns = {_replace_layer_numbers(name) for name in model_names | body_names}

    unused_biases = []
    for name in case.weight_names:
        is_old_bloom_mask = name.endswith("self_attention.bias")
        is_loaded = _replace_layer_numbers(name) in loaded_patterns
        if name.endswith(".bias") and not is_old_bloom_mask and not is_loaded:
            unused_biases.append(name)
    if unused_biases:
        sentence = f"the class does not load all stored bias tensors, for example {min(unused_biases)}"
        finding_id = f"{case.model_type.upper()}-IGNORED"
        yield Finding(finding_id, sentence, len(unused_biases), "tensors", "trainshort import, which loads them")


def _replace_layer_numbers(name: str) -> str:
    """Return a tensor name in which each number is replaced by `{}`, so that the layers have equal names."""
    return ".".join("{}" if part.isdigit() else part for part in name.split("."))


def check_saving(case: TinyModel) -> Iterator[Finding]:
    """Check whether a model is the same after `save_pretrained` and `from_pretrained`.

    Slopes in a buffer that is not saved can be lost when the model is loaded.
    """
    model = case.without_patch().build()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        load: Any = getattr(case.model_class, "from_pretrained")  # noqa: B009
        loaded_model = load(folder, dtype=case.dtype, **case.load_options).eval()

    tokens = random_tokens(SHORT_LENGTH)
    expected = compute_logits(model.to(case.dtype), tokens)
    difference = max_difference(compute_logits(loaded_model, tokens), expected)
    limit = MAX_DIFFERENCE if case.dtype == torch.float32 else MAX_HALF_PRECISION_DIFFERENCE
    finding_id = f"{case.model_type.upper()}-LOST"
    if not difference <= limit:  # This condition is also true for NaN.
        sentence = "a saved and loaded model computes other logits, because values such as slopes are not saved"
        fix = "compute the slopes in forward, as Python floats"
        yield Finding(finding_id, sentence, difference, LOGIT_DEVIATIONS, fix)
    yield from _check_slope_buffers(case, model, finding_id)


def _check_slope_buffers(case: TinyModel, new_model: Any, finding_id: str) -> Iterator[Finding]:
    """Compare the slopes of the loaded full-size model with those of a new model."""
    correct_buffers = dict(new_model.named_buffers())
    for name, loaded_slopes in case.slope_buffers.items():
        correct_slopes = correct_buffers.get(name)
        if correct_slopes is None or correct_slopes.shape != loaded_slopes.shape:
            continue
        if not torch.allclose(loaded_slopes.float(), correct_slopes, rtol=1e-6):
            relative_error = float((loaded_slopes.float() / correct_slopes - 1).abs().max())
            sentence = f"the slopes in {name} are wrong or were rounded"
            unit = "largest relative error of a slope"
            yield Finding(finding_id, sentence, relative_error, unit, "load the model again in float32")


PROBES: tuple[Probe, ...] = (
    check_length_limit,
    check_slopes,
    check_rounding,
    check_packing,
    check_padding,
    check_cache,
    check_static_cache,
    check_memory,
    check_ignored_settings,
    check_unused_biases,
    check_saving,
)
