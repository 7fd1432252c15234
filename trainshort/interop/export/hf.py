"""Export target `hf`: a Hugging Face folder that uses trainshort's own model class. Every model can be exported."""

import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
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

# With `trust_remote_code=True`, transformers loads the model class from this file in the exported folder.
MODELING_FILE = "modeling_trainshort.py"
MODELING_CODE = """\
from trainshort.hf import TrainshortConfig, TrainshortForCausalLM

__all__ = ['TrainshortConfig', 'TrainshortForCausalLM']
"""


def write(folder: Path, run: ExportSource) -> None:
    """Write a Hugging Face folder for trainshort's own model class.

    Args:
        folder: The folder to write to.
        run: The model to export.

    Raises:
        InputError: If transformers is not installed.
    """
    require_package("transformers", "Exporting to Hugging Face", "trainshort[hf]")
    from trainshort.hf import TrainshortConfig

    config = TrainshortConfig.from_model_config(run.model.config, run.training_length).to_dict()
    config["architectures"] = ["TrainshortForCausalLM"]
    # transformers reads this entry if the user loads the folder with `trust_remote_code=True`.
    config["auto_map"] = {
        "AutoConfig": "modeling_trainshort.TrainshortConfig",
        "AutoModelForCausalLM": "modeling_trainshort.TrainshortForCausalLM",
    }
    config["dtype"] = "float32"
    tensors = {f"model.{name}": weight for name, weight in run.model.weights.items()}
    write_hugging_face_folder(folder, run, config, tensors)
    write_atomic(folder / MODELING_FILE, MODELING_CODE)


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
    # trainshort uses the same token at the beginning and at the end of a text.
    special_tokens = {}
    if run.tokenizer is not None and run.tokenizer.end is not None:
        special_tokens["bos_token_id"] = run.tokenizer.end
        special_tokens["eos_token_id"] = run.tokenizer.end
    _write_json(folder / "config.json", config | special_tokens)
    _write_json(folder / "generation_config.json", {**special_tokens, "use_cache": True})
    shapes = {name: tuple(weight.shape) for name, weight in tensors.items()}
    weight_path = folder / safetensors_io.SINGLE_FILE
    # transformers requires this metadata, which says that the tensors are from PyTorch.
    safetensors_io.write(weight_path, shapes, lambda name: tensors[name], metadata={"format": "pt"})
    if run.tokenizer is not None:
        _write_json(folder / "tokenizer_config.json", tokenizer_config(run.tokenizer, run.training_length))


def _write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a dictionary to a JSON file."""
    write_atomic(path, json.dumps(values, indent=2) + "\n")


def tokenizer_config(tokenizer: Tokenizer, training_length: int) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`.

    The text of a special token inside a document stays text and does not become that token.

    Args:
        tokenizer: The tokenizer.
        training_length: The training length of the model.
    """
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH_MULTIPLE * training_length,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    # The byte tokenizer has no special tokens.
    if isinstance(tokenizer, WordTokenizer):
        line_end = WordTokenizer.SPECIAL[WordTokenizer.LINE_END]
        config["bos_token"] = line_end
        config["eos_token"] = line_end
        config["unk_token"] = WordTokenizer.SPECIAL[WordTokenizer.UNKNOWN]
    elif not isinstance(tokenizer, ByteTokenizer) and END_OF_TEXT in tokenizer.to_json():
        config["bos_token"] = END_OF_TEXT
        config["eos_token"] = END_OF_TEXT
        config["unk_token"] = END_OF_TEXT
    return config


class Transformers(Runtime):
    """An export that is loaded in transformers, for the targets `hf`, `hf-mpt` and `hf-bloom`."""

    package = "transformers"
    allows_end_token = True

    def __init__(self, folder: Path, max_length: int) -> None:
        """Load an export with transformers. `max_length` is the length of the longest input that will be read."""
        from transformers import AutoTokenizer

        config = read_json_object(folder / "config.json", hint=EXPORT_AGAIN_HINT)
        if config.get("model_type") == "trainshort":
            import trainshort.hf  # noqa: F401  (The import registers trainshort's model class in transformers.)
        self.model: Any = load_causal(folder, torch.float32).eval()
        # MPT builds its bias table for `max_seq_len` tokens.
        if hasattr(self.model.config, "max_seq_len"):
            self.model.config.max_seq_len = max(self.model.config.max_seq_len, max_length)
        self.tokenizer: Any = None
        if (folder / "tokenizer_config.json").exists():
            self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

    @torch.no_grad()
    def log_probabilities(
        self, tokens: list[int]
    ) -> tuple[Int64[Tensor, " positions"], Float[Tensor, "positions vocab"]]:
        """Return the log-probabilities of the next token at the last positions of an input."""
        output = self.model(torch.tensor([tokens]), use_cache=False)
        return last_log_probabilities(output.logits[0])

    @torch.no_grad()
    def generate_greedy(self, tokens: list[int], count: int) -> list[int]:
        """Return the `count` tokens that the program generates after a prompt without sampling."""
        prompt = torch.tensor([tokens])
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0, len(tokens) :].tolist()

    def encode(self, text: str) -> list[int] | None:
        """Return the token ids of a text, or None if the export has no tokenizer."""
        if self.tokenizer is None:
            return None
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


MAX_ERRORS = {"f32": MaxError(logits=1e-4, kl=1e-6)}

HF = ExportTarget(
    requirements=(),
    transform=identity,
    write=write,
    runtime=Transformers,
    max_errors=MAX_ERRORS,
    loading="import trainshort.hf, then AutoModelForCausalLM.from_pretrained",
)
