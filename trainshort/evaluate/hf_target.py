"""Evaluate causal language models of Hugging Face Transformers.

The logits of 16,384 tokens over 250,000 token types need 16 GB. Most models compute logits by applying the output layer
(the head) to the output of the body. For such models, the head is applied to a few positions at a time.

Code that comes with a model is never run. `trust_remote_code` is always False, and weights are only read from
safetensors files, because loading a pickle file can run code.
"""

import inspect
import math
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from trainshort.data.hub import is_hub_reachable
from trainshort.errors import InputError
from trainshort.evaluate.overrides import Override, set_attribute_temporarily
from trainshort.evaluate.targets import PRECISIONS, Target, TextTokenizer
from trainshort.model.embeddings import SLICE_ELEMENTS
from trainshort.utils.io import read_json_object
from trainshort.utils.optional import require_package
from trainshort.utils.terminal import first_sentence_of

# The settings of Hugging Face configs that contain the length that a model was made for. The first setting that is
# present counts.
LENGTH_SETTINGS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")

# Model types that compute an ALiBi table up to the length in this setting. ALiBi itself has no maximum length, so the
# setting is increased for longer inputs.
ALIBI_TABLE_SETTINGS = {"mpt": "max_seq_len"}

# The number of tokens in the test inputs that show how a model computes its logits.
PROBE_TOKENS = 8

# A config.json that asks for more layers is rejected. The largest models have a few hundred layers.
MAX_LAYERS = 10_000

CUSTOM_CODE_MESSAGE = (
    "'{name}' needs custom Python code for its {part}. trainshort never runs code that comes with a model. "
    "Save the model in a format that transformers supports without custom code."
)


class HuggingFaceTarget(Target):
    """A causal language model of transformers.

    Args:
        name: The folder of a saved model, or the name of a model on the Hugging Face Hub.
        device: The device of the model.
        precision: A key of `PRECISIONS`.

    Raises:
        InputError: If the model cannot be loaded, needs custom code, or is not a causal language model.
    """

    kind = "huggingface"

    def __init__(self, name: str, *, device: str = "cpu", precision: str = "float32") -> None:
        self.name = name
        self._source = _find_source(name)
        self.model = _load_model(self._source, precision).to(device).eval()
        self.module = self.model

        config = self.model.config.get_text_config()
        declared_length = _find_declared_length(config)
        # Models that trainshort exported store their training length as `trained_at`. For all other models, the best
        # guess is the maximum length that the config declares. Both can be missing.
        stored_length = getattr(config, "trained_at", None)
        self.trained_at = stored_length if isinstance(stored_length, int) else declared_length
        self.max_length = _find_position_table_length(self.model, declared_length)
        self.vocab_size = config.vocab_size

        short_name = Path(name).name if Path(name).is_dir() else name
        # The folder for results. Characters that are not safe in file names are replaced by hyphens.
        self.folder = Path("runs") / re.sub(r"[^\w.]+", "-", short_name)

        # A forward pass with a few tokens shows whether the logits are computed by a separate head.
        probe_tokens, probe_logits = _compute_probe_logits(name, self.model, self.vocab_size)
        self._body_and_head = _split_body_and_head(self.model, probe_tokens, probe_logits)

    @cached_property
    def bos(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the id of the token that the model reads before the first token of a text.

        The beginning-of-text token is preferred to the end-of-text token, as in lm-evaluation-harness. The tokenizer is
        preferred to the config. If none of them is defined, the id is 0.
        """
        config = self.model.config.get_text_config()
        for source in (self._tokenizer, config):
            for attribute in ("bos_token_id", "eos_token_id"):
                token = getattr(source, attribute, None)
                if isinstance(token, int):
                    return token
        return 0

    @torch.no_grad()
    def token_nll(
        self, tokens: Int[Tensor, "batch length"], targets: Int[Tensor, "batch length"], first: int
    ) -> Float[Tensor, "batch scored"]:
        """Return the negative log-likelihood of each target from position `first` on (see `Target.token_nll`).

        The head, which computes the logits, is applied to a few positions at a time to save memory.
        """
        if self._body_and_head is None:
            return self._token_nll_from_full_logits(tokens, targets, first)

        body, head = self._body_and_head
        hidden = body(input_ids=tokens, use_cache=False)[0][:, first:]  # shape (batch, scored, width)
        slice_size = max(1, SLICE_ELEMENTS // self.vocab_size)
        hidden_slices = hidden.flatten(0, 1).split(slice_size)
        target_slices = targets[:, first:].flatten().split(slice_size)
        losses = []
        for hidden_slice, target_slice in zip(hidden_slices, target_slices, strict=True):
            losses.append(_cross_entropy(head(hidden_slice), target_slice))
        return torch.cat(losses).view(hidden.shape[:2])

    def _token_nll_from_full_logits(
        self, tokens: Int[Tensor, "batch length"], targets: Int[Tensor, "batch length"], first: int
    ) -> Float[Tensor, "batch scored"]:
        """Compute the losses of a model whose body and head cannot be separated, one sequence at a time.

        The arguments are those of `token_nll`: the inputs, the targets, and the first position that is scored.
        """
        num_scored = tokens.shape[1] - first
        options: dict[str, Any] = {"use_cache": False}
        # Many models can compute the logits of the last positions only, which needs less memory.
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            options["logits_to_keep"] = num_scored
        losses: list[Tensor] = []
        for sequence, sequence_targets in zip(tokens, targets, strict=True):
            logits = self.model(input_ids=sequence[None], **options).logits[0, -num_scored:]  # shape (scored, vocab)
            losses.append(_cross_entropy(logits, sequence_targets[first:]))
        return torch.stack(losses)

    @contextmanager
    def for_length(self, override: Override | None, length: int) -> Iterator[None]:
        """Context manager: prepare the model for inputs of a given length (see `Target.for_length`).

        Models with an ALiBi table, such as MPT, compute a larger table if the length requires it.
        """
        with super().for_length(override, length), ExitStack() as stack:
            config = self.model.config
            setting = ALIBI_TABLE_SETTINGS.get(config.model_type)
            if setting is not None:
                table_length = max(getattr(config, setting), length)
                set_attribute_temporarily(stack, config, setting, table_length)
            yield

    def length_error_reason(self, error: Exception, length: int) -> str | None:
        """Return why the model does not support an input length, or None if an error has another cause.

        Inputs that are longer than the config declares make models fail in different ways, for example with an index
        outside of a table. An error at a shorter length has another cause.
        """
        exceeds_length = self.trained_at is not None and length > self.trained_at
        if not exceeds_length or not isinstance(error, IndexError | RuntimeError):
            return None
        first_line = str(error).strip().partition("\n")[0]
        return f"the model was made for {self.trained_at:,} tokens and fails for longer inputs: {first_line}"

    @cached_property
    def _tokenizer(self) -> Any:
        """The transformers tokenizer of the model, or None if the model has no tokenizer."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._source, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if "trust_remote_code" in str(error):
                raise InputError(CUSTOM_CODE_MESSAGE.format(name=self.name, part="tokenizer")) from None
            return None

    def tokenizer(self) -> TextTokenizer:
        """Return the tokenizer of the model. Raise `InputError` if the model has no tokenizer."""
        # For a folder without tokenizer files, transformers can return a tokenizer that has only special tokens.
        if self._tokenizer is None or not _has_normal_tokens(self._tokenizer):
            raise InputError(
                f"{self.name} has no tokenizer, which is required to read a text. Save a tokenizer with the model."
            )
        return HuggingFaceTokenizer(self.name, self._tokenizer)

    def extra_description(self) -> dict[str, Any]:
        """Return the class of the model and the simple settings of its config."""
        config_values = self.model.config.to_diff_dict()
        return {
            "class": type(self.model).__name__,
            "model": {key: value for key, value in config_values.items() if _is_json_scalar(value)},
        }


class HuggingFaceTokenizer:
    """A tokenizer of transformers that adds no special tokens to a text.

    Args:
        name: The name of the model.
        tokenizer: The transformers tokenizer.
    """

    ends_lines: ClassVar[bool] = False

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.end: int | None = tokenizer.eos_token_id

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text."""
        try:
            encoding = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
        except Exception as error:  # The tokenizers library raises plain `Exception`.
            reason = first_sentence_of(error)
            raise InputError(f"The tokenizer of {self.name} cannot tokenize this text ({reason}).") from None
        return np.array(encoding["input_ids"], dtype=np.int64)

    def decode(self, ids: Any) -> str:
        """Return the text of token ids."""
        return self.tokenizer.decode([int(token) for token in ids], clean_up_tokenization_spaces=False)

    def to_json(self) -> str:
        """Return the tokenizer in the format of the file tokenizer.json."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InputError(f"The tokenizer of {self.name} has no tokenizer.json. Give text files as --data.")
        return backend.to_str()


# ---- load a model


def load_causal(source: str | Path, dtype: torch.dtype) -> Any:
    """Load a causal language model with a class of transformers. Code that comes with the model is not run.

    Args:
        source: The folder of a saved model, or a name on the Hugging Face Hub.
        dtype: The dtype of the weights.

    Returns:
        The model.

    Raises:
        InputError: If a weight is missing, or if the config asks for custom code or too many layers.
        Exception: Any error that transformers raises.
    """
    from transformers import AutoModelForCausalLM, PreTrainedConfig
    from transformers.utils import logging

    if Path(source).is_dir() or not sys.stderr.isatty():
        logging.disable_progress_bar()
    settings, _ = PreTrainedConfig.get_config_dict(source)
    check_settings(str(source), settings)

    # transformers prints a table of missing weights. The error below reports them instead.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    options = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False, **options)
    finally:
        logging.set_verbosity(verbosity)
    model, loading_info = loaded

    # transformers initializes missing weights at random, so a model with missing weights must not be used.
    missing_weights = sorted(loading_info["missing_keys"])
    if missing_weights:
        num_others = len(missing_weights) - 1
        others = f" and {num_others} more" if num_others else ""
        raise InputError(f"'{source}' lacks weights ({missing_weights[0]}{others}). Save the model again.")
    return model


def check_settings(name: str, settings: Any) -> None:
    """Check the settings of a config.json before a model is created from them.

    Args:
        name: The name of the model, for error messages.
        settings: The content of the config.json, or a part of it. Nested settings are checked, too.

    Raises:
        InputError: If a setting names a repository on the Hugging Face Hub that contains attention code, or if the
            number of layers is larger than `MAX_LAYERS`.
    """
    if not isinstance(settings, dict):
        return
    for key, value in settings.items():
        # For example, the key "_attn_implementation" selects the code that computes the attention.
        selects_implementation = key.strip("_").startswith(("attn_implementation", "experts_implementation"))
        # transformers downloads and runs the code of an implementation of the form "owner/repository".
        if selects_implementation and "/" in str(value):
            raise InputError(CUSTOM_CODE_MESSAGE.format(name=name, part=f"attention ({value})"))
        if "layer" in key and isinstance(value, int) and value > MAX_LAYERS:
            raise InputError(f"The config.json of '{name}' asks for {value:,} layers ({key}). Restore it from a copy.")
        check_settings(name, value)


def _load_model(source: str, precision: str) -> Any:
    """Load a causal language model. Every error of transformers is raised as an `InputError`."""
    _reject_pickles(source)
    config_path = Path(source) / "config.json"
    if config_path.is_file() and read_json_object(config_path).get("model_type") == "trainshort":
        # This import registers the model class of `trainshort export --to hf`.
        import trainshort.hf  # noqa: F401
    try:
        return load_causal(source, PRECISIONS[precision])
    except InputError:
        raise
    except Exception as error:  # transformers raises many types of errors for invalid models.
        if "trust_remote_code" in str(error):
            raise InputError(CUSTOM_CODE_MESSAGE.format(name=source, part="model")) from None
        if Path(source).is_dir():
            problem = "The folder does not contain a causal language model"
        else:
            problem = "No folder and no causal language model on the Hugging Face Hub has this name"
        reason = first_sentence_of(error)
        raise InputError(
            f"Cannot load '{source}'. {problem} ({reason}). "
            "Give a run folder, the folder of a saved model, or check the name and the network."
        ) from None


def _find_source(name: str) -> str:
    """Return the folder or the name from which transformers can load a model.

    The name is returned unchanged if it is a folder, or if the Hugging Face Hub can be reached. If the Hub cannot be
    reached, the folder of an earlier download is returned, because transformers would try to reach the Hub for half a
    minute.
    """
    require_package("transformers", "Evaluating Hugging Face models", "trainshort[hf]")
    if Path(name).is_dir() or is_hub_reachable():
        return name
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, local_files_only=True)
    except (OSError, ValueError):
        raise InputError(
            f"Model '{name}' not found: there is no such folder, the Hugging Face Hub is not reachable, and the model "
            "was not downloaded before. Check the name and the network, or give the folder of a run or a saved model."
        ) from None


def _reject_pickles(name: str) -> None:
    """Raise `InputError` if a folder has weights as a pickle file only. Loading a pickle file can run code."""
    folder = Path(name)
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    pickle_names = []
    for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt"):
        pickle_names += [path.name for path in folder.glob(pattern)]
    if pickle_names:
        raise InputError(
            f"{name} stores its weights as a pickle file ({min(pickle_names)}). trainshort does not load pickle files, "
            "because they can run code. Save the model as safetensors."
        )


# ---- find out how a model works


def _find_declared_length(config: Any) -> int | None:
    """Return the maximum input length that a Hugging Face config declares, or None if it declares no length.

    The setting has different names, such as `max_position_embeddings`. The first name that the config contains counts.
    """
    for name in LENGTH_SETTINGS:
        length = getattr(config, name, None)
        if isinstance(length, int):
            return length
    return None


def _find_position_table_length(model: nn.Module, declared_length: int | None) -> int | None:
    """Return the longest input that the learned position table of a model allows.

    Args:
        model: The model.
        declared_length: The length that the config declares. A table can have more rows than the model can use.

    Returns:
        The length, or None if the model has no learned position table.
    """
    for name, module in model.named_modules():
        last_name = name.rpartition(".")[2]  # "wpe" for the name "transformer.wpe"
        is_position_table = "position" in last_name or last_name == "wpe"
        if isinstance(module, nn.Embedding) and is_position_table:
            if declared_length is None:
                return module.num_embeddings
            return min(declared_length, module.num_embeddings)
    return None


@torch.no_grad()
def _compute_probe_logits(
    name: str, model: Any, vocab_size: int
) -> tuple[Int[Tensor, "1 length"], Float[Tensor, "1 length vocab"]]:
    """Compute the logits of a model for a few tokens, and check that the model is causal.

    Two inputs are compared that differ in the last token only. A causal model gives equal logits at all earlier
    positions. transformers also loads encoders such as BERT as causal models, and only prints a warning.

    Args:
        name: The name of the model, for the error message.
        model: The model.
        vocab_size: The number of token types.

    Returns:
        The tokens and their logits.

    Raises:
        InputError: If the model is not causal.
    """
    device = next(model.parameters()).device
    # The token ids are spread evenly over the vocabulary.
    tokens = torch.arange(PROBE_TOKENS, device=device)[None] * (vocab_size // PROBE_TOKENS)
    changed_last_token = (tokens[:, -1:] + 1) % vocab_size
    changed_tokens = torch.cat([tokens[:, :-1], changed_last_token], dim=1)

    logits = model(input_ids=tokens, use_cache=False).logits.float()
    changed_logits = model(input_ids=changed_tokens, use_cache=False).logits.float()
    earlier_logits = logits[:, :-1]
    difference = (earlier_logits - changed_logits[:, :-1]).abs().max()
    if difference > _relative_rounding_error(model) * earlier_logits.abs().max():
        raise InputError(
            f"'{name}' ({type(model).__name__}) is not causal: its predictions depend on later tokens. "
            "Give a causal language model."
        )
    return tokens, logits


@torch.no_grad()
def _split_body_and_head(
    model: Any, tokens: Int[Tensor, "1 length"], logits: Float[Tensor, "1 length vocab"]
) -> tuple[nn.Module, nn.Module] | None:
    """Return the body and the head of a model, if the logits are the head applied to the output of the body.

    The body computes hidden vectors, and the head is the last linear layer, which computes logits from them.

    Args:
        model: The model.
        tokens: A test input.
        logits: The logits of the model for the test input.

    Returns:
        The body and the head. None if the model computes its logits in another way, for example with a soft cap.
    """
    body = model.base_model
    head = model.get_output_embeddings()
    if head is None or body is model:
        return None
    head_logits = head(body(input_ids=tokens, use_cache=False)[0]).float()
    if head_logits.shape != logits.shape:
        return None
    difference = (logits - head_logits).abs().max()
    if difference > _relative_rounding_error(model) * logits.abs().max():
        return None
    return body, head


def _relative_rounding_error(model: nn.Module) -> float:
    """Return by how much two computations of the same logits may differ, relative to the largest logit.

    Different orders of the same operations are rounded differently. The tolerance is 16 times the precision of the
    dtype of the model, because the rounding errors of many operations add up.
    """
    dtype = next(model.parameters()).dtype  # The first parameter stands for all parameters of the model.
    return 16 * torch.finfo(dtype).eps


def _cross_entropy(
    logits: Float[Tensor, "targets vocab"], targets: Int[Tensor, " targets"]
) -> Float[Tensor, " targets"]:
    """Return the loss of each target in float32."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


def _has_normal_tokens(tokenizer: Any) -> bool:
    """Return whether a transformers tokenizer has tokens other than special tokens."""
    normal_tokens = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    return len(normal_tokens) > 0


def _is_json_scalar(value: Any) -> bool:
    """Return whether a value is a string, a boolean, None or a finite number."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int | bool | None)
