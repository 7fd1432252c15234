"""Export target `hf`: a Hugging Face folder that uses trainshort's own model class. Every model can be exported."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainshort.data.tokenizers.base import END_OF_TEXT, Tokenizer
from trainshort.data.tokenizers.builtin import ByteTokenizer, WordTokenizer
from trainshort.evaluate.hf_target import load_causal
from trainshort.interop import safetensors_io
from trainshort.interop.export.base import (
    EXPORT_AGAIN_HINT,
    MAX_LENGTH_MULTIPLE,
    ExportSource,
    ExportTarget,
    MaxError,
    Runtime,
    identity,
    last_log_probabilities,
)
from trainshort.utils.io import read_json_object, write_atomic
from trainshort.utils.optional import require_package


def write(folder: Path, run: ExportSource) -> None:
    """Write the Hugging Face folder and a Python file that registers the model class."""
    require_package("transformers", "Exporting to Hugging Face", "trainshort[hf]")
    from trainshort.hf import TrainshortConfig

    config = TrainshortConfig.from_model_config(run.model.config, run.length).to_dict()
    names = ("TrainshortConfig", "TrainshortForCausalLM")
    auto = zip(("AutoConfig", "AutoModelForCausalLM"), names, strict=True)
    config |= {"architectures": [names[1]], "auto_map": {kind: f"modeling_trainshort.{name}" for kind, name in auto}}
    config["dtype"] = "float32"
    tensors = {f"model.{name}": weight for name, weight in run.model.weights.items()}
    write_hugging_face_folder(folder, run, config, tensors)
    text = f"from trainshort.hf import {', '.join(names)}\n\n__all__ = {list(names)!r}\n"
    write_atomic(folder / "modeling_trainshort.py", text)


def write_hugging_face_folder(
    folder: Path, run: ExportSource, config: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Write config, generation config, weights and tokenizer config.

    Args:
        folder: The folder to write to.
        run: The run, for its tokenizer and its training length.
        config: The content of `config.json`. The ids of the special tokens are added.
        tensors: The weights under the names of the Hugging Face class.
    """
    end = None if run.tokenizer is None else run.tokenizer.end
    ends = {} if end is None else {"bos_token_id": end, "eos_token_id": end}
    write_atomic(folder / "config.json", json.dumps(config | ends, indent=2) + "\n")
    write_atomic(folder / "generation_config.json", json.dumps({**ends, "use_cache": True}, indent=2) + "\n")
    shapes = {name: tuple(weight.shape) for name, weight in tensors.items()}
    safetensors_io.write(folder / safetensors_io.SINGLE, shapes, tensors.__getitem__, metadata={"format": "pt"})
    if run.tokenizer is not None:
        text = json.dumps(tokenizer_config(run.tokenizer, run.length), indent=2) + "\n"
        write_atomic(folder / "tokenizer_config.json", text)


def tokenizer_config(tokenizer: Tokenizer, length: int) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`.

    The text of a special token inside a document stays text and does not become that token.
    """
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH_MULTIPLE * length,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    if isinstance(tokenizer, WordTokenizer):
        word = WordTokenizer.SPECIAL[WordTokenizer.LINE_END]
        config |= {"bos_token": word, "eos_token": word, "unk_token": WordTokenizer.SPECIAL[WordTokenizer.UNKNOWN]}
    elif not isinstance(tokenizer, ByteTokenizer) and END_OF_TEXT in tokenizer.to_json():
        config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    return config


class Transformers(Runtime):
    """The model class of transformers, also for the targets `hf-mpt` and `hf-bloom`."""

    package = "transformers"
    ends = True

    def __init__(self, folder: Path, longest: int) -> None:
        from transformers import AutoTokenizer

        if read_json_object(folder / "config.json", hint=EXPORT_AGAIN_HINT).get("model_type") == "trainshort":
            import trainshort.hf  # noqa: F401  (registers the class)
        self.model: Any = load_causal(folder, torch.float32).eval()
        if hasattr(self.model.config, "max_seq_len"):
            self.model.config.max_seq_len = max(self.model.config.max_seq_len, longest)
        has = (folder / "tokenizer_config.json").exists()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False) if has else None

    @torch.no_grad()
    def log_probabilities(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        return last_log_probabilities(self.model(torch.tensor([tokens]), use_cache=False).logits[0])

    @torch.no_grad()
    def greedy(self, tokens: list[int], count: int) -> list[int]:
        asked = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        prompt = torch.tensor([tokens])
        made = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), eos_token_id=None, **asked)
        return made[0, len(tokens) :].tolist()

    def encode(self, text: str) -> list[int] | None:
        return None if self.tokenizer is None else self.tokenizer(text, add_special_tokens=False)["input_ids"]


MAX_ERRORS = {"f32": MaxError(logits=1e-4, kl=1e-6)}

HF = ExportTarget(
    summary="transformers, by trainshort's own class; any model",
    requirements=(),
    transform=identity,
    write=write,
    runtime=Transformers,
    max_errors=MAX_ERRORS,
    loading="import trainshort.hf, then AutoModelForCausalLM.from_pretrained",
)
