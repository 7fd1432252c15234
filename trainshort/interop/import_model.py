"""Import a model of another program as a run folder.

    config.json, tokenizer.json, checkpoints/step-000000000/     as in any run folder
    import.json                                                  source files with SHA-256, dropped tensors, parity

The run folder appears when all of its files are written. Tensors are copied one at a time.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from trainshort.config.position_config import RotaryConfig
from trainshort.config.registries import convertible, formats
from trainshort.config.run_config import DataConfig, ModelConfig, RunConfig, TrainConfig, save_config
from trainshort.data.hub import is_hub_reachable
from trainshort.data.tokenizers.base import TOKENIZER_FILE, Tokenizer, load_tokenizer
from trainshort.errors import InputError
from trainshort.evaluate.hf_target import load_causal
from trainshort.evaluate.targets import reject_foreign_export
from trainshort.interop import safetensors_io
from trainshort.interop.formats import fairseq
from trainshort.interop.formats.base import Format, WeightMap, map_weights
from trainshort.interop.formats.mpt import IGNORED_SETTINGS_NOTE
from trainshort.interop.formats.read_config import read_float, read_section, rope_scaling_type
from trainshort.model.transformer import TransformerLM
from trainshort.train import checkpoint_files
from trainshort.train.checkpoint import UNSHARDED_FILE, load_model
from trainshort.train.checkpoint_files import STATE_FILE, TrainState
from trainshort.train.run_folder import RunFolder
from trainshort.utils.io import atomic_folder, read_json_object, sha256, write_atomic
from trainshort.utils.optional import has_package, require_package
from trainshort.utils.registry import Registry
from trainshort.utils.terminal import first_sentence_of

TRANSFORMERS_FORMATS = ("mpt", "bloom", "falcon")
"""ALiBi formats that transformers supports without code from the hub."""

# Larger models are not loaded a second time to compare their logits with transformers.
MAX_PARITY_PARAMETERS = 50_000_000

# The number of tokens at which the logits of an imported model are compared with transformers.
PARITY_TOKENS = 64

DOWNLOAD_PATTERNS = ("*.json", "*.safetensors")
"""The files that are downloaded from the hub: config, tokenizer and weights. Code and pickles are not downloaded."""

MODEL_FOLDER_HINT = "Give the folder of a saved Hugging Face model."

# The fraction of rotated dimensions in transformers if the config of a GPT-NeoX model does not state the fraction.
GPT_NEOX_ROTARY_FRACTION = 0.25


@dataclass(frozen=True)
class ImportRequest:
    """The model to import, and values that the user gave because the model does not contain them.

    Attributes:
        source: A fairseq checkpoint file, the folder of a Hugging Face model, or the name of a model on the hub.
        dictionary: The `dict.txt` of a fairseq model. None imports the model without a tokenizer.
        tokenizer: A `tokenizer.json` that replaces the tokenizer of the model.
        training_length: The training length. None means the training length in the config of the model.
    """

    source: str
    dictionary: Path | None = None
    tokenizer: Path | None = None
    training_length: int | None = None


@dataclass(frozen=True)
class ImportSource:
    """A model of another program that was opened, but not copied yet.

    Attributes:
        format_name: The name of the model format.
        source_files: The config file and the weight files.
        weight_map: The weights as trainshort tensors.
        tokenizer: The tokenizer, or None if the model has no tokenizer.
    """

    format_name: str
    source_files: list[Path]
    weight_map: WeightMap
    tokenizer: Tokenizer | None


def import_model(request: ImportRequest, out: Path) -> Path:
    """Import a model as a run folder.

    Args:
        request: The model to import.
        out: The run folder. It must not exist, or must be empty.

    Returns:
        `out`.

    Raises:
        InputError: If the model is not supported or damaged, or if the run folder cannot be written.
    """
    source = open_source(request)
    model = source.weight_map.model
    length = request.training_length or model.training_length
    if length is None:
        raise InputError(f"{request.source} does not state its training length. Give --trained-at.")
    data = DataConfig(tokenizer=str((out / TOKENIZER_FILE).resolve()))
    config = RunConfig(model=model.config, data=data, train=TrainConfig(length=length))

    def describe_import(run_folder: Path) -> dict[str, Any]:
        """Return the entries of `import.json` that only an imported model has."""
        # The parity check compares the logits of the imported model with those of transformers.
        return {"source": request.source, "parity": _check_parity(source, run_folder)}

    write_run(source, config, out, describe_import)
    return out


def write_run(
    source: ImportSource, config: RunConfig, out: Path, make_extra_record: Callable[[Path], dict[str, Any]]
) -> None:
    """Write a run folder with the config, the tokenizer, a checkpoint and `import.json`.

    Args:
        source: The opened model.
        config: The config of the run.
        out: The run folder. It appears when all of its files are written.
        make_extra_record: A function that returns further entries for `import.json`. The function is called with the
            temporary run folder after the checkpoint is written, so that it can load the model.

    Raises:
        InputError: If the weights are invalid, or if the run folder cannot be written.
    """
    with atomic_folder(out) as folder:
        save_config(config, folder / "config.json")
        if source.tokenizer is not None:
            write_atomic(folder / TOKENIZER_FILE, source.tokenizer.to_json())
        _write_checkpoint(folder, config, source.weight_map)
        record = _import_record(source) | make_extra_record(folder)
        write_atomic(RunFolder(folder).imported, json.dumps(record, indent=2) + "\n")


def load_in_memory(request: ImportRequest) -> tuple[TransformerLM, ImportSource]:
    """Load a model of another program without writing a run folder.

    In addition to the models that can be imported, Llama, Mistral, Qwen2 and GPT-NeoX folders can be loaded with their
    rotary positions.

    Args:
        request: The model to load.

    Returns:
        The model, in evaluation mode, and the opened source.

    Raises:
        InputError: If the model is not supported or damaged.
    """
    folder = Path(request.source).expanduser()
    rotary_config = _read_rotary_config(folder)
    if rotary_config is None:
        source = open_source(request)
        config = source.weight_map.model.config
    else:
        # An opened source always describes a model with ALiBi. Replace ALiBi by the original rotary positions.
        source = open_folder(folder, request, convertible)
        alibi_config = source.weight_map.model.config
        config = alibi_config.replace(position="rotary", position_settings=rotary_config)

    model = TransformerLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = source.weight_map.tensor(name)
            if rotary_config is not None and ".attention.qkv." in name:
                rotary_dims = rotary_config.rotary_dims(config.head_width)
                weight = _halves_to_pairs(weight, config, rotary_dims)
            parameter.copy_(weight)
    return model.eval(), source


def _read_rotary_config(folder: Path) -> RotaryConfig | None:
    """Return the rotary settings of a Hugging Face model folder.

    Returns:
        The settings, or None if the path is not the folder of a Llama, Mistral, Qwen2 or GPT-NeoX model.

    Raises:
        InputError: If the rotary embeddings are scaled for long inputs.
    """
    config_path = folder / "config.json"
    if not config_path.exists():
        return None
    source_config = read_json_object(config_path)
    model_type = str(source_config.get("model_type"))
    has_rotary_positions = model_type in convertible and convertible.get(model_type).rotary_halves
    if not has_rotary_positions:
        return None

    scaling_type = rope_scaling_type(source_config)
    if scaling_type is not None:
        raise InputError(f"{folder} has scaled rotary positions ({scaling_type}). Only unscaled ones are supported.")
    # Newer versions of transformers have a section for rotary settings. Older versions have them at the top level.
    rope_settings = read_section(source_config, "rope_parameters") | source_config
    default_fraction = GPT_NEOX_ROTARY_FRACTION if model_type == "gpt_neox" else 1.0
    return RotaryConfig(
        base=read_float(rope_settings, "rope_theta", "rotary_emb_base", default=10_000.0),
        rotary_fraction=read_float(rope_settings, "partial_rotary_factor", "rotary_pct", default=default_fraction),
    )


def _halves_to_pairs(
    qkv: Float[Tensor, "rows ..."], config: ModelConfig, rotary_dims: int
) -> Float[Tensor, "rows ..."]:
    """Reorder the rows of a QKV projection from Llama's rotary layout to the layout of trainshort.

    Llama rotates dimension i of a head together with dimension i + rotary_dims / 2. trainshort rotates neighboring
    dimensions together. For rotary_dims = 4, the dimensions 0 1 2 3 of each head become 0 2 1 3.

    Args:
        qkv: The weight or the bias of the projection. The rows of q come first, then the rows of k and of v.
        config: The config of the model.
        rotary_dims: The number of dimensions of each head that are rotated. The other dimensions keep their order.
    """
    num_q_and_k_rows = (config.heads + config.key_heads) * config.head_width
    q_and_k = qkv[:num_q_and_k_rows]
    v = qkv[num_q_and_k_rows:]  # The values are not rotated.

    heads = q_and_k.unflatten(0, (-1, config.head_width))  # (q heads + k heads, head width, ...)
    rotated = heads[:, :rotary_dims]
    not_rotated = heads[:, rotary_dims:]
    two_halves = rotated.unflatten(1, (2, rotary_dims // 2))  # (heads, 2, rotary_dims / 2, ...)
    pairs = two_halves.transpose(1, 2).flatten(1, 2)  # (heads, rotary_dims, ...)
    reordered_heads = torch.cat([pairs, not_rotated], dim=1)
    return torch.cat([reordered_heads.flatten(0, 1), v])


# ---- opening a model


def open_source(request: ImportRequest) -> ImportSource:
    """Open a model of another program: read its config and find the source of each tensor.

    Args:
        request: The model to open. If `request.source` is not a local path, a model of this name is downloaded from the
            Hugging Face hub.

    Returns:
        The opened model. Its weights are not copied yet.

    Raises:
        InputError: If the model is not supported or damaged.
    """
    path = Path(request.source).expanduser()
    if path.is_dir():
        return open_folder(path, request)
    if path.exists():  # A single file can only be a fairseq checkpoint.
        settings, weights = fairseq.read_checkpoint(path)
        weight_map = map_weights(fairseq.FAIRSEQ, settings, weights)
        tokenizer = _load_fairseq_tokenizer(request, weight_map.model.config.vocab_size)
        return ImportSource("fairseq", [path], weight_map, tokenizer)
    return open_folder(download_snapshot(request.source), request)


def _load_fairseq_tokenizer(request: ImportRequest, vocab_size: int) -> Tokenizer | None:
    """Return the tokenizer of a fairseq model, or None if the user gave no file for it.

    A fairseq checkpoint contains no tokenizer. The user can give the `dict.txt` of the model or a `tokenizer.json`.
    """
    if request.dictionary is not None:
        return fairseq.read_dictionary(request.dictionary, vocab_size)
    if request.tokenizer is not None:
        return _load_matching_tokenizer(request.tokenizer, vocab_size)
    return None


def read_model_type(settings: dict[str, Any], folder: Path) -> Any:
    """Return the `model_type` of a Hugging Face config, or None if the config belongs to a run of trainshort.

    Args:
        settings: The content of `config.json`. The type of its values is not checked.
        folder: The folder of the model, for the error message.

    Raises:
        InputError: If the config has no `model_type` and does not belong to a run.
    """
    model_type = settings.get("model_type")
    is_run_config = "model" in settings
    if model_type is None and not is_run_config:
        raise InputError(f"{folder / 'config.json'} has no model_type. {MODEL_FOLDER_HINT}")
    return model_type


def open_folder(folder: Path, request: ImportRequest, known_formats: Registry[Format] = formats) -> ImportSource:
    """Open the folder of a Hugging Face model.

    Args:
        folder: The folder, with a `config.json` and safetensors files.
        request: The values that the user gave.
        known_formats: The formats that are accepted. Default: the formats that can be imported.

    Raises:
        InputError: If the format of the model is not accepted, or if the folder is damaged.
    """
    if request.dictionary is not None:
        raise InputError("--dictionary requires a fairseq checkpoint. A Hugging Face model has a tokenizer.json.")
    # A folder that `trainshort export` wrote for a program such as llama.cpp is not a Hugging Face model.
    reject_foreign_export(folder)
    source_config = read_json_object(folder / "config.json", hint=MODEL_FOLDER_HINT)
    model_type = read_model_type(source_config, folder)
    if model_type is None:
        raise InputError(f"{folder} is already a run folder of trainshort. Use the folder as it is.")
    # The format "fairseq" is a single file and never a folder.
    is_known = isinstance(model_type, str) and model_type in known_formats and model_type != "fairseq"
    if not is_known:
        shortened_type = str(model_type)[:60]  # A damaged config may contain a very long value.
        hint = _unknown_format_hint(str(model_type), known_formats)
        raise InputError(f"{folder} is a model of type {shortened_type!r}{hint}")

    weights = safetensors_io.StoredWeights(folder)
    weight_map = map_weights(known_formats.get(model_type), source_config, weights)
    # A tokenizer that the user gave replaces the tokenizer of the model.
    tokenizer_path = request.tokenizer
    if tokenizer_path is None and (folder / TOKENIZER_FILE).exists():
        tokenizer_path = folder / TOKENIZER_FILE
    tokenizer = None
    if tokenizer_path is not None:
        tokenizer = _load_matching_tokenizer(tokenizer_path, weight_map.model.config.vocab_size)
    return ImportSource(model_type, [folder / "config.json", *weights.files], weight_map, tokenizer)


def _unknown_format_hint(model_type: str, known_formats: Registry[Format]) -> str:
    """Return the end of an error message for a model type that `trainshort import` or `convert` does not accept.

    Args:
        model_type: The model type.
        known_formats: The formats that the command accepts: `formats` for the import, `convertible` for the conversion.
    """
    if known_formats is formats and model_type in convertible:
        position = convertible.get(model_type).position
        return (
            f", with {position} positions; trainshort convert makes an ALiBi model of it. "
            "`trainshort import` supports ALiBi models only."
        )
    if known_formats is convertible and model_type in formats:
        return ", which is already an ALiBi model. Use `trainshort import`."
    names = sorted(name for name in known_formats.names() if name != "fairseq")
    action = "imported" if known_formats is formats else "converted"
    return f", which is not supported. Models of these types can be {action}: {', '.join(names)}."


def _load_matching_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """Load a tokenizer for a model. Raise `InputError` if the tokenizer has more tokens than the model."""
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"The tokenizer {path} does not belong to this model: it has {tokenizer.vocab_size:,} tokens, "
            f"but the vocabulary of the model has {vocab_size:,}."
        )
    return tokenizer


def download_snapshot(name: str, patterns: tuple[str, ...] = DOWNLOAD_PATTERNS) -> Path:
    """Download a model from the Hugging Face hub. If the hub is not reachable, use the local cache.

    Args:
        name: The name of the model on the hub.
        patterns: Name patterns of the files to download.

    Returns:
        The folder of the model in the local cache.

    Raises:
        InputError: If the model does not exist, or if the hub is not reachable and the cache has no copy.
    """
    # The error message is: "There is no folder ... Downloading a model from the hub requires huggingface_hub."
    feature = f"There is no folder {name}. Downloading a model from the hub"
    require_package("huggingface_hub", feature, "trainshort[hf]")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # Without this check, huggingface_hub tries to reach the hub for half a minute.
    is_reachable = is_hub_reachable()
    try:
        snapshot = snapshot_download(name, allow_patterns=list(patterns), local_files_only=not is_reachable)
    except (HfHubHTTPError, OSError, ValueError) as error:
        cause = first_sentence_of(error) if is_reachable else "the hub is not reachable"
        raise InputError(
            f"There is no file or folder {name}, and the model could not be downloaded from the hub ({cause}). "
            "Check the name and the network."
        ) from None
    return Path(snapshot)


# ---- writing a run folder


def _write_checkpoint(run_folder: Path, config: RunConfig, weight_map: WeightMap) -> None:
    """Write the imported weights as the checkpoint of step 0, without optimizer state.

    Args:
        run_folder: The new run folder.
        config: The config of the run.
        weight_map: The shape of each trainshort tensor, and a function that computes the tensor from the source model.
    """
    folder = run_folder / "checkpoints" / checkpoint_files.checkpoint_name(0)
    (folder / "model").mkdir(parents=True)
    save_config(config, folder / "config.json")
    # The model was not trained here, so all counters of the training are zero.
    state = TrainState(step=0, tokens=0, seconds=0.0, window_nll=0.0, window_count=0)
    write_atomic(folder / STATE_FILE, state.model_dump_json(indent=2) + "\n")
    safetensors_io.write(folder / "model" / UNSHARDED_FILE, weight_map.shapes, weight_map.tensor)
    # The manifest lists the checksum of each file, so that a damaged checkpoint is recognized.
    digests = {name: checkpoint_files.compute_digest(folder / name) for name in checkpoint_files.list_files(folder)}
    checkpoint_files.write_manifest(folder, digests)


def _import_record(source: ImportSource) -> dict[str, Any]:
    """Return the entries of `import.json` that describe the source of a model and the changes of the import.

    Returns:
        A dictionary that can be written as JSON: the name of the format, the SHA-256 of each source file, the names of
        the unused tensors, notes for users, and the name of the tokenizer.
    """
    return {
        "format": source.format_name,
        "files": {path.name: sha256(path) for path in source.source_files},
        "dropped": list(source.weight_map.dropped_names),
        "notes": list(source.weight_map.model.notes),
        "tokenizer": None if source.tokenizer is None else source.tokenizer.name,
    }


@torch.no_grad()
def _check_parity(source: ImportSource, run_folder: Path) -> dict[str, Any] | str:
    """Compare the logits of an imported model with the logits of the same model in transformers.

    Args:
        source: The source of the model.
        run_folder: The run folder of the imported model.

    Returns:
        The version of transformers, the number of tokens, and the largest difference of two logits (`off`), in standard
        deviations of the logits. If the comparison is not possible, a sentence that says why.
    """
    reason = _parity_unsupported_reason(source)
    if reason is not None:
        return f"not measured: {reason}"

    model = source.weight_map.model
    num_tokens = PARITY_TOKENS
    if model.training_length:
        num_tokens = min(model.training_length, PARITY_TOKENS)
    # The input is 0, 1, 2 and so on. It starts again at 0 if the vocabulary is small.
    tokens = torch.arange(num_tokens)[None] % model.config.vocab_size
    try:
        hugging_face_model = load_causal(source.source_files[0].parent, torch.float32).eval()
        expected_logits = hugging_face_model(tokens).logits
    except Exception as error:  # transformers checks configs more strictly, and raises many kinds of exceptions.
        return f"not measured: transformers cannot run the model ({type(error).__name__})"

    logits = load_model(run_folder)(tokens)
    largest_difference = (logits - expected_logits).abs().max()
    difference = float(largest_difference / expected_logits.std())
    version = metadata.version("transformers")
    return {"engine": f"transformers {version}", "tokens": num_tokens, "off": difference}


def _parity_unsupported_reason(source: ImportSource) -> str | None:
    """Return why an imported model cannot be compared with transformers, or None if it can be compared.

    The comparison ("parity check") runs the same input through the imported model and through the model class of
    transformers, and compares their logits.
    """
    if source.format_name == "trainshort":
        return "the model was trained with trainshort"
    if source.format_name not in TRANSFORMERS_FORMATS:
        return f"transformers has no class for {source.format_name}"
    # If transformers ignores settings of the model, the logits are expected to differ.
    for note in source.weight_map.model.notes:
        if note.startswith(IGNORED_SETTINGS_NOTE):
            return note
    num_parameters = sum(math.prod(shape) for shape in source.weight_map.shapes.values())
    if num_parameters > MAX_PARITY_PARAMETERS:
        return "the model is large; use `trainshort evaluate` on both models to compare them"
    if not has_package("transformers"):
        return "transformers is not installed"
    return None
