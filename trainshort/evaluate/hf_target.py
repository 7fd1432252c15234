"""Any Hugging Face causal language model as a target, without its key-value cache and without all logits at once.

The logits of 16,384 tokens over 250,000 words would be 16 GB. Where a model's logits are its body's output times its
head, which is tried on a few tokens, the head is applied in slices; a model that does more (soft caps, scales) keeps
its own way, one sequence at a time.

A model brings numbers, never code: nothing that lies beside the weights is executed (no `trust_remote_code`, no
question), and weights are read from safetensors only, since loading a pickle runs what is in it.
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
from torch import Tensor, nn

from trainshort.data.hub import is_hub_reachable
from trainshort.errors import InputError
from trainshort.evaluate.overrides import Override, set_attribute_temporarily
from trainshort.evaluate.targets import PRECISIONS, Target, TextTokenizer
from trainshort.model.embeddings import SLICE_ELEMENTS
from trainshort.utils.io import read_json_object
from trainshort.utils.optional import require_package
from trainshort.utils.terminal import first_sentence_of

LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
"""Where configurations tell the length a model was made for; the first that is there counts."""

TABLE_SETTINGS = {"mpt": "max_seq_len"}
"""Model types whose ALiBi has no limit but is written out as far as a setting says; longer inputs need a larger one."""

PROBE_TOKENS = 8
MAX_LAYERS = 10_000
"""Layers that a config.json may ask for; models of the hub have up to some hundred."""


class HuggingFaceTarget(Target):
    """A transformers model, from a local folder or by its name on the hub."""

    kind = "huggingface"

    def __init__(self, name: str, *, device: str = "cpu", precision: str = "float32") -> None:
        self.name = name
        self._source = _source(name)
        self.module = self.model = _load(self._source, precision).to(device).eval()
        config = self.model.config.get_text_config()
        declared = next((size for key in LENGTH_NAMES if isinstance(size := getattr(config, key, None), int)), None)
        own = getattr(config, "trained_at", None)  # our exports say it; the others are what a table has room for
        self.trained_at = own if isinstance(own, int) else declared
        self.max_length = _table_length(self.model, declared)
        self.vocab_size = config.vocab_size
        self.folder = Path("runs") / re.sub(r"[^\w.]+", "-", Path(name).name if Path(name).is_dir() else name)
        self._head = _split_body_and_head(self.model, *_probe_logits(name, self.model, self.vocab_size))

    @cached_property
    def bos(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Beginning-of-text token, else end-of-text, as lm-evaluation-harness has it."""
        config, own = self.model.config.get_text_config(), self._tokenizer
        names = ("bos_token_id", "eos_token_id")
        known = [getattr(holder, name, None) for holder in (own, config) if holder is not None for name in names]
        return next((token for token in known if isinstance(token, int)), 0)

    @torch.no_grad()
    def token_nll(self, tokens: Tensor, targets: Tensor, first: int) -> Tensor:
        if self._head is not None:
            body, head = self._head
            hidden = body(input_ids=tokens, use_cache=False)[0][:, first:]
            size = max(1, SLICE_ELEMENTS // self.vocab_size)
            parts = hidden.flatten(0, 1).split(size), targets[:, first:].flatten().split(size)
            rows = [_nll(head(part), wanted) for part, wanted in zip(*parts, strict=True)]
            return torch.cat(rows).view(hidden.shape[:2])
        keep = tokens.shape[1] - first
        known = inspect.signature(self.model.forward).parameters
        only = {"logits_to_keep": keep} if "logits_to_keep" in known else {}
        rows = []
        for row, wanted in zip(tokens, targets, strict=True):
            logits = self.model(input_ids=row[None], use_cache=False, **only).logits[0, -keep:]
            rows.append(_nll(logits, wanted[first:]))
        return torch.stack(rows)

    @contextmanager
    def for_length(self, change: Override | None, length: int) -> Iterator[None]:
        with super().for_length(change, length), ExitStack() as held:
            config = self.model.config
            if (setting := TABLE_SETTINGS.get(config.model_type)) is not None:
                set_attribute_temporarily(held, config, setting, max(getattr(config, setting), length))
            yield

    def length_error_reason(self, error: Exception, length: int) -> str | None:
        """Past the length that its configuration declares, a model may fail in its own way: a table that ends, a mask
        that is too small. Below it, or out of memory, an error is an error."""
        if self.trained_at is None or length <= self.trained_at or not isinstance(error, IndexError | RuntimeError):
            return None
        first_line = str(error).strip().partition("\n")[0]
        return f"the model is made for {self.trained_at:,} tokens and fails past them: {first_line}"

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._source, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if "trust_remote_code" in str(error):
                raise InputError(_CODE.format(name=self.name, part="tokenizer")) from None
            return None

    def tokenizer(self) -> TextTokenizer:
        found = self._tokenizer
        if found is None or not set(found.get_vocab()) - set(found.all_special_tokens):  # it makes one of no files, too
            raise InputError(
                f"{self.name} comes without a tokenizer, which reading plain text needs. Save one with it."
            )
        return HuggingFaceTokenizer(self.name, found)

    def describe(self) -> dict[str, Any]:
        return {
            "class": type(self.model).__name__,
            "model": {key: value for key, value in self.model.config.to_diff_dict().items() if _plain(value)},
        }


class HuggingFaceTokenizer:
    """A transformers tokenizer; text becomes tokens with nothing added."""

    ends_lines: ClassVar[bool] = False

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.end: int | None = tokenizer.eos_token_id

    def encode(self, text: str) -> np.ndarray:
        try:
            ids = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        except Exception as error:  # the tokenizers library raises nothing more exact
            raise InputError(
                f"The tokenizer of {self.name} cannot read this text ({first_sentence_of(error)})."
            ) from None
        return np.array(ids, dtype=np.int64)

    def decode(self, ids: Any) -> str:
        return self.tokenizer.decode([int(token) for token in ids], clean_up_tokenization_spaces=False)

    def to_json(self) -> str:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InputError(f"{self.name} has a tokenizer without a tokenizer.json; give plain text files as --data.")
        return backend.to_str()


def _load(name: str, precision: str) -> Any:
    _refuse_pickles(name)
    config = Path(name) / "config.json"
    if config.is_file() and read_json_object(config).get("model_type") == "trainshort":
        import trainshort.hf  # noqa: F401  (the class of `export --to hf`, known to transformers once it is imported)
    try:
        return load_causal(name, PRECISIONS[precision])
    except InputError:
        raise
    except Exception as error:  # of its many checks, each with an exception of its own
        if "trust_remote_code" in str(error):
            raise InputError(_CODE.format(name=name, part="model")) from None
        reason = first_sentence_of(error)
        where = "the folder" if Path(name).is_dir() else f"there is no folder '{name}' here, and the hub"
        raise InputError(
            f"Cannot load '{name}': {where} did not give a causal language model ({reason}). "
            "Give a run folder, a saved model's folder, or check the name and the network."
        ) from None


def load_causal(source: str | Path, dtype: torch.dtype) -> Any:
    """A model of transformers' own classes, with the numbers of a folder or of the hub and nothing else of theirs.
    Every weight must be there: those that are not, transformers makes up, and shows a table."""
    from transformers import AutoModelForCausalLM, PreTrainedConfig
    from transformers.utils import logging

    if Path(source).is_dir() or not sys.stderr.isatty():
        logging.disable_progress_bar()
    check_settings(str(source), PreTrainedConfig.get_config_dict(source)[0])
    settings = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    said = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False, **settings)
    finally:
        logging.set_verbosity(said)
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise InputError(f"'{source}' lacks weights ({missing[0]}{more}); save the model anew.")
    return model


def check_settings(name: str, settings: Any) -> None:
    """Stop at what no config.json may ask for: a repository, owner/name, that transformers would fetch attention from
    and run; more layers than can be built before the first missing weight is noticed."""
    for key, value in settings.items() if isinstance(settings, dict) else ():
        if key.strip("_").startswith(("attn_implementation", "experts_implementation")) and "/" in str(value):
            raise InputError(_CODE.format(name=name, part=f"attention ({value})"))
        if "layer" in key and isinstance(value, int) and value > MAX_LAYERS:
            raise InputError(f"The config.json of '{name}' asks for {value:,} layers ({key}). Restore it from a copy.")
        check_settings(name, value)


_CODE = (
    "'{name}' needs Python code of its own for its {part}, and trainshort never runs code that comes with a model. "
    "Save it in a form that transformers knows by itself."
)


def _source(name: str) -> str:
    """Where a model is loaded from: its folder; the hub; or, where the hub does not answer, what an earlier download
    left on this machine, in place of half a minute of retries."""
    require_package("transformers", "Evaluating Hugging Face models", "trainshort[hf]")
    if Path(name).is_dir() or is_hub_reachable():
        return name
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, local_files_only=True)
    except (OSError, ValueError):
        raise InputError(
            f"There is no folder '{name}' here, the hub does not answer, and no earlier download of '{name}' is on "
            "this machine. Check the name and the network, or give a run folder or a saved model's folder."
        ) from None


def _refuse_pickles(name: str) -> None:
    folder = Path(name)
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    found = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if found:
        raise InputError(
            f"{name} holds its weights as a pickle ({found[0]}), which can run code when it is opened, so it is not. "
            "Save the model as safetensors."
        )


def _table_length(model: nn.Module, declared: int | None) -> int | None:
    """Rows of a learned position table, which no input can pass; None for models without one."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and ("position" in last or last == "wpe"):
            return module.num_embeddings if declared is None else min(declared, module.num_embeddings)
    return None


@torch.no_grad()
def _probe_logits(name: str, model: Any, vocab_size: int) -> tuple[Tensor, Tensor]:
    """A few tokens, and the model's logits for them. An encoder is refused: transformers loads BERT and its like as
    causal models, too, and only warns that they see what comes."""
    device = next(model.parameters()).device
    tokens = torch.arange(PROBE_TOKENS, device=device)[None] * (vocab_size // PROBE_TOKENS)
    other = torch.cat([tokens[:, :-1], (tokens[:, -1:] + 1) % vocab_size], dim=1)
    own, others = (model(input_ids=each, use_cache=False).logits.float() for each in (tokens, other))
    if (own - others)[:, :-1].abs().max() > _rounding(model) * own[:, :-1].abs().max():
        raise InputError(
            f"'{name}' ({type(model).__name__}) sees the tokens it should predict: its predictions change with what "
            "comes after them. Give a causal language model."
        )
    return tokens, own


@torch.no_grad()
def _split_body_and_head(model: Any, tokens: Tensor, own: Tensor) -> tuple[nn.Module, nn.Module] | None:
    """The model's body and head, if its own logits are the one applied to the other's output."""
    body, head = model.base_model, model.get_output_embeddings()
    if head is None or body is model:
        return None
    ours = head(body(input_ids=tokens, use_cache=False)[0]).float()
    if own.shape != ours.shape:
        return None
    return (body, head) if (own - ours).abs().max() <= _rounding(model) * own.abs().max() else None


def _rounding(model: nn.Module) -> float:
    """The share of the largest logit by which equal logits may differ."""
    return 16 * torch.finfo(next(model.parameters()).dtype).eps


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="none")


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | bool | None) or (isinstance(value, float) and math.isfinite(value))
