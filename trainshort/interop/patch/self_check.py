"""Compare the logits of a Hugging Face model before and after it is patched."""

import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from trainshort import alibi
from trainshort.errors import InputError
from trainshort.interop.patch.families import Family, original_class

TEST_LENGTH = 10
"""The number of tokens of the longer one of the two test texts."""

MAX_LOGIT_DIFFERENCE = 1e-4
"""The largest allowed difference, in standard deviations of the outputs. The limit is larger in half precision."""


class SelfCheck:
    """Run two short texts through a model before and after it is patched, and compare the logits.

    The unpatched model reads each text alone. The patched model reads the texts in three ways: in one batch with
    padding, packed into one row, and with a KV cache.

    Args:
        model: The model to check.
        family: The family of the model.
        body: The model without its head, such as the `MptModel` inside an `MptForCausalLM`.

    Raises:
        InputError: If the weights of the model are not loaded.
    """

    def __init__(self, model: nn.Module, family: Family, body: Any) -> None:
        """Make two short random texts, and choose how much the outputs of the patched model may differ."""
        # Tensors on the device "meta" have shapes, but no values.
        if any(weight.is_meta for weight in body.parameters()):
            raise InputError("Cannot patch a model on the device 'meta'. Load the weights of the model first.")
        self.body = body
        self.model = _find_model_with_token_outputs(model, family, body)

        embedding_weight = body.get_input_embeddings().weight
        vocab_size = len(embedding_weight)
        max_length = getattr(body.config, "max_seq_len", TEST_LENGTH)  # the length limit of MPT
        self.length = max(2, min(TEST_LENGTH, max_length))
        self.padding = self.length // 3  # The number of padding tokens in front of the second text.

        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocab_size, (2, self.length), generator=generator)
        self.tokens = tokens.to(embedding_weight.device)
        self.attention_mask = torch.ones_like(self.tokens)
        self.attention_mask[1, : self.padding] = 0
        # The two texts without padding, shapes (1, length) and (1, length - padding).
        self.texts = [self.tokens[:1], self.tokens[1:, self.padding :]]

        self.max_difference = MAX_LOGIT_DIFFERENCE
        if embedding_weight.is_floating_point():
            rounding_error = torch.finfo(embedding_weight.dtype).eps
            # The outputs contain the rounding errors of several operations.
            self.max_difference = max(MAX_LOGIT_DIFFERENCE, 8 * rounding_error)

    def run_unpatched(self) -> list[Float[Tensor, "length outputs"]]:
        """Return the outputs of the unpatched model for each text.

        Known bugs of the transformers class are corrected while the model runs, because the patch corrects them too.

        Raises:
            InputError: If the model raises an exception.
        """
        with _fix_known_bugs(self.body), self._evaluation_mode():
            try:
                return [self._run(text)[0] for text in self.texts]
            except Exception as error:
                raise InputError(f"Cannot patch this model, because running it fails: {error}") from error

    def compare_patched(self, expected: list[Float[Tensor, "length outputs"]]) -> float:
        """Run the patched model in three ways and compare its outputs with those of the unpatched model.

        Args:
            expected: The outputs of the unpatched model for each text.

        Returns:
            The largest root mean square difference, in standard deviations of the expected outputs.

        Raises:
            InputError: If the difference is larger than rounding errors can explain.
        """
        differences = self._measure_differences(expected)
        worst_way = max(differences, key=lambda way: _nan_to_infinity(differences[way]))
        worst_difference = differences[worst_way]
        if not worst_difference <= self.max_difference:  # This condition is also true for NaN.
            raise InputError(
                f"Cannot patch this {original_class(self.model).__name__}: its outputs would change by "
                f"{worst_difference:.1e} standard deviations ({worst_way}). At most {self.max_difference:.0e} is "
                "allowed. The model was not changed. This version of transformers may not be supported."
            )
        return worst_difference

    def _measure_differences(self, expected: list[Float[Tensor, "length outputs"]]) -> dict[str, float]:
        """Run the patched model in three ways and measure how much its outputs differ from the expected outputs.

        The ways are: both texts in one batch with padding, both texts packed into one row, and with a KV cache.

        Args:
            expected: The outputs of the unpatched model for each text.

        Returns:
            A description of each way, and the root mean square difference in standard deviations of the expected
            outputs.
        """
        packed_texts = torch.cat(self.texts, dim=1)
        positions = torch.cat([torch.arange(text.shape[1]) for text in self.texts])
        position_ids = positions[None].to(self.tokens.device)

        with self._evaluation_mode():
            padded = self._run(self.tokens, attention_mask=self.attention_mask)
            packed = self._run(packed_texts, position_ids=position_ids)
            # Store all tokens of the first text but the last one in a KV cache. Then run the last token.
            prefill = self.model(self.tokens[:1, :-1], use_cache=True)
            decoded = self._run(self.tokens[:1, -1:], use_cache=True, past_key_values=prefill.past_key_values)

        all_expected = torch.cat(expected)
        without_padding = torch.cat([padded[0], padded[1, self.padding :]])
        last_expected = expected[0][-1:]  # the last token of the first text
        standard_deviation = float(all_expected.double().std())
        return {
            "with padding": _rms_difference(without_padding, all_expected) / standard_deviation,
            "packed documents": _rms_difference(packed[0], all_expected) / standard_deviation,
            "with a KV cache": _rms_difference(decoded[0], last_expected) / standard_deviation,
        }

    def _run(self, tokens: Int[Tensor, "batch length"], **kwargs: Any) -> Float[Tensor, "batch length outputs"]:
        """Run the model and return its first output: the logits, or the hidden states of a model without a head."""
        options = {"use_cache": False, "output_attentions": False, "return_dict": True}
        options.update(kwargs)
        return self.model(tokens, **options)[0]

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Context manager: disable gradients and dropout. At the end, restore the training mode of each module."""
        training_modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, is_training in training_modes.items():
                module.training = is_training


def _find_model_with_token_outputs(model: nn.Module, family: Family, body: Any) -> nn.Module:
    """Return the causal language model inside `model`, or the body if there is none.

    Other heads, such as that of a classifier, do not return one output per token.
    """
    for module in model.modules():
        if family.find_part(module) == "head_model" and hasattr(module, "lm_head"):
            return module
    return body


def _rms_difference(a: Tensor, b: Tensor) -> float:
    """Return the root mean square of the differences between two tensors."""
    difference = a.double() - b.double()
    return float(difference.square().mean().sqrt())


def _nan_to_infinity(value: float) -> float:
    """Return infinity for NaN, so that a NaN counts as the largest difference."""
    return math.inf if math.isnan(value) else value


@contextmanager
def _fix_known_bugs(body: Any) -> Iterator[None]:
    """Context manager: correct three known bugs of transformers while the unpatched model runs.

    - MPT ignores the setting `alibi_bias_max`.
    - Falcon adds the ALiBi bias twice with the attention implementation `eager`.
    - Falcon rounds the slopes and the ALiBi bias to bfloat16.
    """
    config = body.config
    implementation = config._attn_implementation
    # The Python module of transformers that defines the class of the model.
    modeling_module = sys.modules[original_class(body).__module__]
    is_falcon = hasattr(body, "use_alibi")  # Only Falcon has this attribute.
    build_falcon_alibi = getattr(modeling_module, "build_alibi_tensor", None)
    try:
        if hasattr(body, "build_mpt_alibi_tensor"):
            max_bias = config.attn_config.alibi_bias_max
            build_mpt_alibi = type(body).build_mpt_alibi_tensor

            def build_mpt_alibi_tensor(heads: int, length: int, _max_bias: Any = None, device: Any = None) -> Any:
                """Build the ALiBi bias with the `alibi_bias_max` of the config instead of the argument."""
                return build_mpt_alibi(body, heads, length, max_bias, device)

            vars(body)["build_mpt_alibi_tensor"] = build_mpt_alibi_tensor
        if is_falcon and implementation == "eager":
            config._attn_implementation = "sdpa"
        if is_falcon and build_falcon_alibi is not None:
            vars(modeling_module)["build_alibi_tensor"] = functools.partial(_build_unrounded_alibi, build_falcon_alibi)
        yield
    finally:
        vars(body).pop("build_mpt_alibi_tensor", None)
        if config._attn_implementation != implementation:
            config._attn_implementation = implementation
        if is_falcon and build_falcon_alibi is not None:
            vars(modeling_module)["build_alibi_tensor"] = build_falcon_alibi


def _build_unrounded_alibi(
    original_build: Callable[..., Tensor], attention_mask: Tensor, num_heads: int, dtype: torch.dtype
) -> Tensor:
    """Build Falcon's ALiBi bias without rounding to bfloat16.

    Args:
        original_build: The function of transformers. It rounds the slopes, and then the product of slope and position.
        attention_mask: 1 for tokens and 0 for padding, shape (batch, length).
        num_heads: The number of attention heads.
        dtype: The data type of the result.

    Returns:
        The bias without rounding, shape (batch * num_heads, 1, length). The result of `original_build` is returned
        instead if it differs by more than rounding can explain. The self-check then reports the difference.
    """
    rounded_bias = original_build(attention_mask, num_heads, dtype)
    slopes = alibi.slopes(num_heads).to(attention_mask.device)
    positions = (attention_mask.cumsum(dim=-1) - 1) * attention_mask
    exact_bias = slopes[None, :, None] * positions[:, None, :]
    exact_bias = exact_bias.reshape(rounded_bias.shape).to(dtype)

    max_rounding_error = 2 * torch.finfo(torch.bfloat16).eps * exact_bias.abs()
    is_rounded_alibi = (rounded_bias - exact_bias).abs() <= max_rounding_error
    return exact_bias if bool(is_rounded_alibi.all()) else rounded_bias
