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
from trainshort.interop.doctor.tiny_model import TinyModelBuilder, random_tokens
from trainshort.interop.patch import apply_patch
from trainshort.interop.patch.families import FAMILIES

SHORT_LENGTH = 48
"""The length of the text that most checks run."""
LONG_LENGTH = 600
"""A length at which bfloat16 cannot represent all distances exactly."""
LIMITED_LENGTH = 64
"""The length limit of the copy with which the check of length limits runs."""
MAX_DIFFERENCE = 1e-3
"""The largest difference in float32 that rounding can explain, in standard deviations of the logits."""
MAX_HALF_PRECISION_DIFFERENCE = 0.05
"""The same limit for float16 and bfloat16."""
MAX_ROUNDING_KL = 1e-8
"""The largest Kullback-Leibler divergence that rounding to float32 can explain."""
MAX_ERROR_RATIO = 5
"""How many times larger than the error of a patched model the error of an unpatched model may be."""
MEMORY_TEST_LENGTHS = (331, 661)
"""Two lengths that differ from all other sizes of the copy, to recognize tensors of shape (length, length)."""

# Units of measured values, and the fix that helps against most bugs.
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


Probe = Callable[[TinyModelBuilder], Iterator[Finding]]
Logits = Float[Tensor, "batch length vocab"]


@torch.no_grad()
def compute_logits(model: Any, tokens: Int[Tensor, "batch length"], **kwargs: Any) -> Logits:
    """Run a Hugging Face model without a KV cache and return its logits in float64.

    Args:
        model: The model.
        tokens: The token ids.
        **kwargs: Further arguments of the model, such as `attention_mask`.
    """
    return model(tokens, use_cache=False, **kwargs).logits.double()


def max_difference(a: Logits, b: Logits) -> float:
    """Return the largest difference between two tensors of logits, in standard deviations of the second one."""
    return float((a - b).abs().max() / b.std())


def kl_divergence(expected: Logits, actual: Logits) -> float:
    """Return the Kullback-Leibler divergence of the next-token probabilities, averaged over all positions."""
    expected_log_probs = expected.log_softmax(-1)  # (batch, length, vocab)
    actual_log_probs = actual.log_softmax(-1)
    # One value for each position, shape (batch, length). Rounding can make it slightly negative, hence the clamp.
    divergence = (expected_log_probs.exp() * (expected_log_probs - actual_log_probs)).sum(-1)
    return float(divergence.mean().clamp(min=0))


def check_length_limit(builder: TinyModelBuilder) -> Iterator[Finding]:
    """Check whether the model runs on inputs longer than the limit in its config.

    Args:
        builder: Builds small copies of the examined model, with random weights.

    Yields:
        One finding (the description of a bug) for each bug that the check observes.
    """
    setting = builder.max_length_setting
    if setting is None:
        return
    model = builder.build(max_length=LIMITED_LENGTH)
    # Two lengths, because a class may accept one token more than its limit.
    for length in (LIMITED_LENGTH + 1, LIMITED_LENGTH + 2):
        try:
            compute_logits(model, random_tokens(length))
        except (RuntimeError, IndexError, ValueError) as error:
            limit = getattr(builder.config, setting)
            sentence = f"inputs of more than {limit:,} tokens raise {type(error).__name__}"
            fix = f"{PATCH_FIX}, or increase {setting} in the config" if builder.has_known_alibi else "none"
            finding_id = f"{builder.model_type.upper()}-LENGTH"
            yield Finding(finding_id, sentence, measured=limit, unit="tokens", fix=fix)
            return


def check_slopes(builder: TinyModelBuilder) -> Iterator[Finding]:
    """Check whether the ALiBi bias follows the config, with and without `output_attentions`.

    Args:
        builder: Builds small copies of the examined model, with random weights.

    Yields:
        One finding (the description of a bug) for each bug that the check observes.
    """
    if not builder.has_known_alibi:
        return
    model = builder.build()
    tokens = random_tokens(SHORT_LENGTH)
    expected_logits = compute_logits(builder.reference, tokens)
    logits = compute_logits(model, tokens)
    difference = max_difference(logits, expected_logits)
    if difference > MAX_DIFFERENCE:
        yield _explain_wrong_slopes(builder, logits, difference, condition="")

    # Some classes run other attention code if the caller asks for the attention weights. Report a bug of that code only
    # if it is not the bug that was reported above.
    logits_with_weights = compute_logits(model, tokens, output_attentions=True)
    difference_with_weights = max_difference(logits_with_weights, expected_logits)
    is_wrong = difference_with_weights > MAX_DIFFERENCE
    is_other_bug = max_difference(logits_with_weights, logits) > MAX_DIFFERENCE
    if is_wrong and is_other_bug:
        yield _explain_wrong_slopes(
            builder, logits_with_weights, difference_with_weights, condition=" with output_attentions=True"
        )


def _explain_wrong_slopes(
    builder: TinyModelBuilder, actual_logits: Logits, difference: float, condition: str
) -> Finding:
    """Find out which wrong ALiBi slopes explain the logits of a model, and return the finding.

    The reference model (a correct copy) is run with each of a few wrong slopes. If its logits equal the logits of the
    examined model, the examined model uses these slopes.

    Args:
        builder: The builder of the copies.
        actual_logits: The logits of the examined model for a short text.
        difference: How much these logits differ from the correct logits.
        condition: When the bug occurs, as the end of a sentence. Empty if the bug always occurs.
    """
    model_name = builder.model_type.upper()
    correct_slopes = FAMILIES[builder.model_type].slopes(builder.reference.config)
    attention_config = getattr(builder.config, "attn_config", None)
    max_bias = getattr(attention_config, "alibi_bias_max", 8)
    # For each identifier of a bug: the slopes that the bug causes, and a sentence about the bug.
    wrong_slopes = {
        "BIASMAX": (alibi.slopes(len(correct_slopes)), f"alibi_bias_max is {max_bias}, but the class uses 8"),
        "DOUBLE": (2 * correct_slopes, f"the ALiBi bias is added twice{condition}"),
        "LOST": (0 * correct_slopes, f"attention has no ALiBi bias{condition}"),
    }

    fix = PATCH_FIX
    if builder.model_type == "falcon":
        fix = f"{PATCH_FIX}, or attn_implementation='sdpa' without output_attentions"
    for bug_name, (slopes, sentence) in wrong_slopes.items():
        with builder.reference_with_slopes(slopes) as reference:
            logits_with_slopes = compute_logits(reference, random_tokens(SHORT_LENGTH))
        if max_difference(actual_logits, logits_with_slopes) <= MAX_DIFFERENCE:
            return Finding(f"{model_name}-{bug_name}", sentence, difference, LOGIT_DEVIATIONS, fix)

    sentence = f"the logits differ from those of the ALiBi model that the config describes{condition}"
    return Finding(f"{model_name}-OTHER", sentence, difference, LOGIT_DEVIATIONS, PATCH_FIX)


def check_rounding(builder: TinyModelBuilder) -> Iterator[Finding]:
    """Check whether the ALiBi bias is rounded so coarsely that nearby positions in a long text become equal.

    Args:
        builder: Builds small copies of the examined model, with random weights.

    Yields:
        One finding (the description of a bug) for each bug that the check observes.
    """
    if not builder.has_known_alibi:
        return
    model_name = builder.model_type.upper()
    tokens = random_tokens(LONG_LENGTH)
    expected_logits = _reference_logits_with_same_slopes(builder, tokens)

    # The copy runs in float32, so a larger error means that the class rounds the bias to a coarser data type.
    float32_error = kl_divergence(expected_logits, compute_logits(builder.build(), tokens))
    if float32_error > MAX_ROUNDING_KL:
        sentence = (
            "the ALiBi bias is rounded to bfloat16 for every data type of the model, at more than about 260 tokens"
        )
        yield Finding(f"{model_name}-BF16", sentence, measured=float32_error, unit=KL_UNIT, fix=PATCH_FIX)
        return

    # In half precision, all computations cause errors. A patched copy shows how large they are with a float32 bias.
    if builder.dtype not in (torch.bfloat16, torch.float16):
        return
    patched_model = builder.without_patch().build(dtype=builder.dtype)
    apply_patch(patched_model)
    patched_error = kl_divergence(expected_logits, compute_logits(patched_model, tokens))
    half_precision_model = builder.build(dtype=builder.dtype)
    actual_error = kl_divergence(expected_logits, compute_logits(half_precision_model, tokens))
    if actual_error > MAX_ERROR_RATIO * patched_error:
        dtype_name = str(builder.dtype).removeprefix("torch.")
        ratio = actual_error / patched_error
        sentence = f"the ALiBi bias is rounded to {dtype_name}; the error is {ratio:.0f} times that of a float32 bias"
        fix = f"{PATCH_FIX}, or dtype=torch.float32"
        yield Finding(f"{model_name}-HALF", sentence, measured=actual_error, unit=KL_UNIT, fix=fix)


def _reference_logits_with_same_slopes(builder: TinyModelBuilder, tokens: Int[Tensor, "1 length"]) -> Logits:
    """Return the logits of the reference model with the slopes that the examined model actually uses.

    `check_slopes` reports wrong slopes. If the reference model has the same slopes as the examined model, their logits
    differ by rounding only.

    Args:
        builder: The builder of the copies.
        tokens: The text for which the logits are returned.

    Returns:
        The logits of the reference model. If no known slopes explain the logits of the examined model, the logits of
        the examined model itself.
    """
    correct_slopes = FAMILIES[builder.model_type].slopes(builder.reference.config)
    default_slopes = alibi.slopes(len(correct_slopes))
    short_text = random_tokens(SHORT_LENGTH)
    actual_logits = compute_logits(builder.build(), short_text)
    # Known bugs: the class ignores the setting of the slopes, adds the ALiBi bias twice, or adds no ALiBi bias.
    for slopes in (correct_slopes, default_slopes, 2 * correct_slopes, 0 * correct_slopes):
        with builder.reference_with_slopes(slopes) as reference:
            reference_logits = compute_logits(reference, short_text)
            if max_difference(actual_logits, reference_logits) <= MAX_DIFFERENCE:
                return compute_logits(reference, tokens)
    return compute_logits(builder.build(), tokens)


def check_packing(builder: TinyModelBuilder) -> Iterator[Finding]:
    """Check whether documents that are packed into one row attend to each other.

    The start of a document is marked by `position_ids` that start again at 0.

    Args:
        builder: Builds small copies of the examined model, with random weights.

    Yields:
        One finding (the description of a bug) for each bug that the check observes.
    """
    model = builder.build()
    first_length = SHORT_LENGTH - 7  # The two documents have different lengths.
    second_length = SHORT_LENGTH
    first_document = random_tokens(first_length)
    second_document = random_tokens(second_length)
    packed_tokens = torch.cat([first_document, second_document], dim=1)
    position_ids = torch.cat([torch.arange(first_length), torch.arange(second_length)])[None]

    logits_alone = compute_logits(model, second_document)
    packed_logits = compute_logits(model, packed_tokens, position_ids=position_ids)
    logits_of_second = packed_logits[:, first_length:]
    difference = max_difference(logits_of_second, logits_alone)
    if difference > MAX_DIFFERENCE:
        sentence = "documents packed into one row (position_ids that start again at 0) attend to each other"
        fix = PATCH_FIX if builder.has_known_alibi else "use one document per row"
        yield Finding("PACKED", sentence, measured=difference, unit=LOGIT_DEVIATIONS, fix=fix)


def check_padding(builder: TinyModelBuilder) -> Iterator[Finding]:
    """Check whether padding in front of a text changes the logits of the text.

    Args:
        builder: Builds small copies of the examined model, with random weights.

    Yields:
        One finding (the description of a bug) for each bug that the check observes.
    """
    if not builder.has_known_alibi:
        return
    num_padding = 9
    padded_length = num_padding + SHORT_LENGTH
    model = builder.build()
    tokens = random_tokens(SHORT_LENGTH)
    padded_tokens = torch.cat([random_tokens(num_padding), tokens], dim=1)
    # The first sequence of the batch has no padding.
    batch = torch.cat([random_tokens(padded_length), padded_tokens])
    attention_mask = torch.ones(2, padded_length)
    attention_mask[1, :num_padding] = 0

    logits_without_padding = compute_logits(model, tokens)
    batch_logits = compute_logits(model, batch, attention_mask=attention_mask)
    logits_with_padding = batch_logits[1:, num_padding:]
    difference = max_difference(logits_with_padding, logits_without_padding)
    if difference > MAX_DIFFERENCE:
        sentence = "padding in front of a text changes its logits"
        yield Finding("PADDING", sentence, measured=difference, unit=LOGIT_DEVIATIONS, fix=PATCH_FIX)


def check_cache(builder: TinyModelBuilder) -> Iterator[Finding]:
    """Check whether a text that is read in two parts with a KV cache gives the same logits as in one forward pass.

    Args:
        builder: Builds small copies of the examined model, with random weights.

    Yields:
        One finding (the description of a bug) for each bug that the check observes.
    """
    if not builder.has_known_alibi:
        return
    model = builder.build()
    tokens = random_tokens(SHORT_LENGTH)
    first_part = tokens[:, :-5]
    second_part = tokens[:, -5:]
    expected_logits = compute_logits(model, tokens)[:, -5:]
    with torch.no_grad():
        cache = model(first_part, use_cache=True).past_key_values
        logits = model(second_part, past_key_values=cache, use_cache=True).logits.double()
    difference = max_difference(logits, expected_logits)
    if difference > MAX_DIFFERENCE:
        sentence = "reading a text in parts changes its logits"
        yield Finding("CACHE", sentence, measured=difference, unit=LOGIT_DEVIATIONS, fix=PATCH_FIX)


def check_static_cache(builder: TinyModelBuilder) -> Iterator[Finding]:
    """Check whether `generate` returns the same tokens with a static cache as with the default cache.

    Args:
        builder: Builds small copies of the examined model, with random weights.

    Yields:
        One finding (the description of a bug) for each bug that the check observes.
    """
    finding_id = f"{builder.model_type.upper()}-STATIC"
    fix = PATCH_FIX if builder.has_known_alibi else "use the default cache"
    model = builder.build()
    prompt = random_tokens(SHORT_LENGTH)
    options = {
        "attention_mask": torch.ones_like(prompt),
        "do_sample": False,
        "pad_token_id": 0,
        "use_cache": True,
        "max_new_tokens": 8,
        "min_new_tokens": 8,
    }
    unit = "of 8 tokens are equal"
    try:
        tokens_with_default_cache = model.generate(prompt, **options)
        tokens_with_static_cache = model.generate(prompt, **options, cache_implementation="static")
    except (RuntimeError, ValueError, TypeError) as error:
        sentence = f"generate with a default or static cache raises {type(error).__name__}"
        yield Finding(finding_id, sentence, measured=0, unit=unit, fix=fix)
        return
    if not torch.equal(tokens_with_default_cache, tokens_with_static_cache):
        is_equal = tokens_with_default_cache == tokens_with_static_cache
        num_equal = int(is_equal[0, SHORT_LENGTH:].sum())  # without the prompt
        sentence = "generate returns other tokens with a static cache"
        yield Finding(finding_id, sentence, measured=num_equal, unit=unit, fix=fix)


class _QuadraticTensorRecorder(TorchDispatchMode):
    """Context manager that records the largest tensor of shape (length, length) which an operation returns.

    Args:
        length: The input length of the model.

    Attributes:
        largest_bytes: The size of the largest such tensor in bytes, or 0 if there was none.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of PyTorch, and record the size of the largest output of shape (length, length).

        PyTorch calls this method for each operation while the recorder is active. `func` is the operation.
        """
        output = func(*args, **(kwargs or {}))
        outputs = output if isinstance(output, tuple | list) else (output,)
        for tensor in outputs:
            if isinstance(tensor, Tensor) and self._is_quadratic(tensor):
                self.largest_bytes = max(self.largest_bytes, tensor.numel() * tensor.element_size())
        return output

    def _is_quadratic(self, tensor: Tensor) -> bool:
        """Return whether at least two dimensions of a tensor have about the size of the input length."""
        # Some implementations pad the length to a multiple of 8 or 16.
        long_dimensions = [size for size in tensor.shape if self.length <= size < self.length + 16]
        return len(long_dimensions) >= 2


def check_memory(builder: TinyModelBuilder) -> Iterator[Finding]:
    """Check whether the model builds tensors of shape (length, length).

    Args:
        builder: Builds small copies of the examined model, with random weights.

    Yields:
        One finding (the description of a bug) for each bug that the check observes.
    """
    model = builder.build(dtype=builder.dtype)
    largest_bytes = []
    for length in MEMORY_TEST_LENGTHS:
        with _QuadraticTensorRecorder(length) as recorder:
            compute_logits(model, random_tokens(length))
        largest_bytes.append(recorder.largest_bytes)
    # 0 bytes mean that the model built no tensor of shape (length, length).
    if 0 in largest_bytes:
        return
    # Compute the size of the tensor at 4,096 tokens from its size at the longer test length.
    growth = (4096 / MEMORY_TEST_LENGTHS[-1]) ** 2
    megabytes = largest_bytes[-1] * growth / 2**20
    sentence = "memory grows with the square of the length, because tensors of shape (length, length) are built"
    fix = PATCH_FIX if builder.has_known_alibi else "attn_implementation='sdpa', if the class supports it"
    unit = "MB for each such tensor at 4,096 tokens"
    yield Finding("QUADRATIC", sentence, measured=megabytes, unit=unit, fix=fix)


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
"""Settings that an MPT class may ignore.

For each setting, a function of the config returns the value with which the setting has no effect.
"""

IMPORTED_MPT_SETTINGS = (
    "attn_config.kv_n_heads",
    "attn_config.attn_type",
    "attn_config.sliding_window_size",
    "logit_scale",
    "no_bias",
    "expansion_ratio",
)
"""The settings of `DEFAULT_MPT_SETTINGS` that `trainshort import` supports."""


def check_ignored_settings(builder: TinyModelBuilder) -> Iterator[Finding]:
    """Check whether the MPT class ignores settings of its config.

    Args:
        builder: Builds small copies of the examined model, with random weights.

    Yields:
        One finding (the description of a bug) for each bug that the check observes.
    """
    if builder.model_type != "mpt":
        return
    for name, get_default in DEFAULT_MPT_SETTINGS.items():
        default = get_default(builder.config)
        value = _get_nested_setting(builder.config, name, default)
        has_no_effect = value == default
        # As many key-value heads as query heads are the same as no grouped-query attention.
        if name == "attn_config.kv_n_heads" and value == builder.config.n_heads:
            has_no_effect = True
        if has_no_effect or not _is_setting_ignored(builder, name, default):
            continue
        if name in IMPORTED_MPT_SETTINGS:
            fix = "trainshort import, which supports this setting"
        else:
            fix = "the code with which the model was trained"
        sentence = f"the config sets {name} = {value!r}, but the class ignores this setting"
        # The measured difference of the logits is 0, because the setting is ignored.
        unit = f"{LOGIT_DEVIATIONS} between {value!r} and {default!r}"
        yield Finding("MPT-IGNORED", sentence, measured=0.0, unit=unit, fix=fix)


def _get_nested_setting(config: Any, name: str, default: Any) -> Any:
    """Return a setting such as `attn_config.alibi`, or `default` if the config does not have the setting."""
    value = config
    for attribute in name.split("."):
        value = getattr(value, attribute, default)
    return value


def _is_setting_ignored(builder: TinyModelBuilder, name: str, default: Any) -> bool:
    """Return whether a setting changes neither the shapes of the weights nor the logits.

    Args:
        builder: The builder of the copies. One copy is built with the setting of the model, and one with the default.
        name: The name of the setting.
        default: The value with which the setting has no effect.
    """
    model = builder.without_patch().build()
    default_model = builder.without_patch().build(**{name: default})
    weight_shapes = {key: weight.shape for key, weight in model.state_dict().items()}
    default_weight_shapes = {key: weight.shape for key, weight in default_model.state_dict().items()}
    if weight_shapes != default_weight_shapes:
        return False
    tokens = random_tokens(SHORT_LENGTH)
    return torch.equal(compute_logits(model, tokens), compute_logits(default_model, tokens))


def check_unused_biases(builder: TinyModelBuilder) -> Iterator[Finding]:
    """Check whether the weight files contain bias tensors that the class does not load.

    Args:
        builder: Builds small copies of the examined model, with random weights.

    Yields:
        One finding (the description of a bug) for each bug that the check observes.
    """
    if not builder.weight_names:
        return
    model_names = set(builder.build(max_length=LIMITED_LENGTH).state_dict())
    # The body (the model without its head) can be saved alone. The first part of each name is then missing.
    body_names = {name.partition(".")[2] for name in model_names}
    # A pattern stands for the names of all layers, because the small copy has fewer layers than the examined model.
    loaded_patterns = {_replace_layer_numbers(name) for name in model_names | body_names}

    unused_biases = []
    for name in builder.weight_names:
        # Old BLOOM files store the attention mask under this name.
        is_old_bloom_mask = name.endswith("self_attention.bias")
        is_loaded = _replace_layer_numbers(name) in loaded_patterns
        if name.endswith(".bias") and not is_old_bloom_mask and not is_loaded:
            unused_biases.append(name)
    if unused_biases:
        sentence = f"the class does not load all stored bias tensors, for example {min(unused_biases)}"
        finding_id = f"{builder.model_type.upper()}-IGNORED"
        fix = "trainshort import, which loads them"
        yield Finding(finding_id, sentence, measured=len(unused_biases), unit="tensors", fix=fix)


def _replace_layer_numbers(name: str) -> str:
    """Return a tensor name in which each number is replaced by `{}`, so that the layers have equal names."""
    return ".".join("{}" if part.isdigit() else part for part in name.split("."))


def check_saving(builder: TinyModelBuilder) -> Iterator[Finding]:
    """Check whether a model is the same after `save_pretrained` and `from_pretrained`.

    Slopes in a buffer that is not saved can be lost when the model is loaded.

    Args:
        builder: Builds small copies of the examined model, with random weights.

    Yields:
        One finding (the description of a bug) for each bug that the check observes.
    """
    model = builder.without_patch().build()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        # `getattr` with a fixed name, because the type checker does not know this method.
        from_pretrained: Any = getattr(builder.model_class, "from_pretrained")  # noqa: B009
        loaded_model = from_pretrained(folder, dtype=builder.dtype, **builder.load_options).eval()

    tokens = random_tokens(SHORT_LENGTH)
    expected_logits = compute_logits(model.to(builder.dtype), tokens)
    difference = max_difference(compute_logits(loaded_model, tokens), expected_logits)
    max_allowed = MAX_DIFFERENCE if builder.dtype == torch.float32 else MAX_HALF_PRECISION_DIFFERENCE
    finding_id = f"{builder.model_type.upper()}-LOST"
    if not difference <= max_allowed:  # This condition is also true for NaN.
        sentence = "a saved and loaded model computes other logits, because values such as slopes are not saved"
        fix = "compute the slopes in forward, as Python floats"
        yield Finding(finding_id, sentence, measured=difference, unit=LOGIT_DEVIATIONS, fix=fix)
    yield from _check_slope_buffers(builder, model, finding_id)


def _check_slope_buffers(builder: TinyModelBuilder, new_model: Any, finding_id: str) -> Iterator[Finding]:
    """Compare the ALiBi slopes of the model that `doctor` examines with the slopes of a new model.

    Args:
        builder: Holds the buffers of the examined model that store slopes.
        new_model: A small copy, which has the same number of heads and correct slopes.
        finding_id: The identifier of a finding.
    """
    correct_buffers = dict(new_model.named_buffers())
    for name, loaded_slopes in builder.slope_buffers.items():
        correct_slopes = correct_buffers.get(name)
        if correct_slopes is None or correct_slopes.shape != loaded_slopes.shape:
            continue
        if not torch.allclose(loaded_slopes.float(), correct_slopes, rtol=1e-6):
            relative_error = float((loaded_slopes.float() / correct_slopes - 1).abs().max())
            sentence = f"the slopes in {name} are wrong or were rounded"
            unit = "largest relative error of a slope"
            fix = "load the model again in float32"
            yield Finding(finding_id, sentence, measured=relative_error, unit=unit, fix=fix)


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
