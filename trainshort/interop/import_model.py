"""A model from elsewhere becomes a run folder of ours: settings, a verified checkpoint, tokenizer, and its origin.

    config.json, tokenizer.json, checkpoints/step-000000000/     as of any run
    import.json                                                  source, sha256, what was dropped, parity

The run folder appears when all of it is written. Tensors pass through one at a time.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
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
from trainshort.interop.formats.read_config import read_float, read_section, scaled_rotation
from trainshort.model.transformer import TransformerLM
from trainshort.train import checkpoint_files
from trainshort.train.checkpoint import UNSHARDED_FILE, load_model
from trainshort.train.checkpoint_files import STATE_FILE, TrainState
from trainshort.train.run_folder import RunFolder
from trainshort.utils.io import atomic_folder, read_json_object, sha256, write_atomic
from trainshort.utils.optional import has_package, require_package
from trainshort.utils.registry import Registry
from trainshort.utils.terminal import first_sentence_of

NATIVE = ("mpt", "bloom", "falcon")
"""Formats that transformers can run without code from the hub."""
LARGEST_MEASURED = 50_000_000
PROBE = 64
PATTERNS = ("*.json", "*.safetensors")
"""What is fetched from the hub: settings, weights, tokenizer; no code and no pickles."""


@dataclass(frozen=True)
class ImportRequest:
    """What to import, and what the source does not say itself."""

    source: str
    """A fairseq checkpoint file, a Hugging Face model's folder, or its name on the hub."""
    dictionary: Path | None = None
    tokenizer: Path | None = None
    training_length: int | None = None


@dataclass(frozen=True)
class ImportSource:
    """A model that was found, before any of it is copied."""

    format_name: str
    source_files: list[Path]
    weight_map: WeightMap
    tokenizer: Tokenizer | None


def import_model(request: ImportRequest, out: Path) -> Path:
    """Make a run folder of the model; returns it."""
    source = open_source(request)
    model = source.weight_map.model
    length = request.training_length or model.training_length
    if length is None:
        raise InputError(f"{request.source} does not say at which length it was trained. Give --trained-at.")
    data = DataConfig(tokenizer=str((out / TOKENIZER_FILE).resolve()))
    config = RunConfig(model=model.config, data=data, train=TrainConfig(length=length))
    write_run(source, config, out, lambda run: {"source": request.source, "parity": _check_parity(source, run)})
    return out


def write_run(
    source: ImportSource, config: RunConfig, out: Path, make_extra_record: Callable[[Path], dict[str, Any]]
) -> None:
    """The run folder, which appears when it is whole; `more` is told of the model when its weights are written."""
    with atomic_folder(out) as folder:
        save_config(config, folder / "config.json")
        if source.tokenizer is not None:
            write_atomic(folder / TOKENIZER_FILE, source.tokenizer.to_json())
        _write_checkpoint(folder, config, source.weight_map)
        record = _import_record(source) | make_extra_record(folder)
        write_atomic(RunFolder(folder).imported, json.dumps(record, indent=2) + "\n")


def load_in_memory(request: ImportRequest) -> tuple[TransformerLM, ImportSource]:
    """The model in memory, for one use and without a run folder; also one that turns in halves, with its rotary
    positions."""
    turns = _rotary_config(Path(request.source).expanduser())
    source = open_source(request) if turns is None else open_folder(Path(request.source), request, convertible)
    config = source.weight_map.model.config
    if turns is not None:
        config = config.replace(position="rotary", position_settings=turns)
    model = TransformerLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            theirs = source.weight_map.tensor(name)
            if turns is not None and ".attention.qkv." in name:
                theirs = _halves_to_pairs(theirs, config, turns.rotary_dims(config.head_width))
            weight.copy_(theirs)
    return model.eval(), source


def _rotary_config(folder: Path) -> RotaryConfig | None:
    """Its rotary positions, where a folder holds a model that turns in halves (Llama, GPT-NeoX); None for any other."""
    settings = read_json_object(folder / "config.json") if (folder / "config.json").exists() else {}
    kind = str(settings.get("model_type"))
    if kind not in convertible or not convertible.get(kind).rotary_halves:
        return None
    if stretched := scaled_rotation(settings):
        raise InputError(f"{folder}: {stretched[0].partition(';')[0]}, and only plain ones are known here.")
    given = read_section(settings, "rope_parameters") | settings
    share = {"gpt_neox": 0.25}.get(kind, 1.0)  # transformers' own default where a config is silent
    return RotaryConfig(
        base=read_float(given, "rope_theta", "rotary_emb_base", default=10_000.0),
        rotary_fraction=read_float(given, "partial_rotary_factor", "rotary_pct", default=share),
    )


def _halves_to_pairs(qkv: Tensor, config: ModelConfig, turning: int) -> Tensor:
    """Rows of q and k from halves to pairs: 0 1 2 3 of a head become 0 2 1 3; what does not turn stays, and v."""
    turned = (config.heads + config.key_heads) * config.head_width
    heads = qkv[:turned].unflatten(0, (-1, config.head_width))
    pairs = heads[:, :turning].unflatten(1, (2, turning // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([torch.cat([pairs, heads[:, turning:]], dim=1).flatten(0, 1), qkv[turned:]])


def open_source(request: ImportRequest) -> ImportSource:
    """The model that was asked for: its settings in our words, and where each tensor is."""
    path = Path(request.source).expanduser()
    if path.is_dir():
        return open_folder(path, request)
    if path.exists():
        settings, weights = fairseq.read_checkpoint(path)
        reading = map_weights(fairseq.FAIRSEQ, settings, weights)
        return ImportSource("fairseq", [path], reading, _words(request, reading))
    return open_folder(download_snapshot(request.source), request)


def _words(request: ImportRequest, reading: WeightMap) -> Tokenizer | None:
    vocabulary = reading.model.config.vocab_size
    if request.dictionary is not None:
        return fairseq.read_dictionary(request.dictionary, vocabulary)
    return None if request.tokenizer is None else _fitting(load_tokenizer(request.tokenizer), vocabulary)


def read_model_type(settings: dict[str, Any], folder: Path) -> Any:
    """The model_type in a config.json; None: it is of a run of ours."""
    kind = settings.get("model_type")
    if kind is None and "model" not in settings:
        raise InputError(f"{folder / 'config.json'} says no model_type. Give the folder of a saved Hugging Face model.")
    return kind


def open_folder(folder: Path, request: ImportRequest, known: Registry[Format] = formats) -> ImportSource:
    """A Hugging Face model's folder, of one of the kinds that are known."""
    if request.dictionary is not None:
        raise InputError("--dictionary is for fairseq checkpoints; a Hugging Face model has its tokenizer.json.")
    reject_foreign_export(folder)
    settings = read_json_object(folder / "config.json", hint="Give the folder of a saved Hugging Face model.")
    kind = read_model_type(settings, folder)
    if kind is None:
        raise InputError(f"{folder} is a run folder of trainshort already. Use it as it is.")
    if not isinstance(kind, str) or kind not in known or kind == "fairseq":
        raise InputError(f"{folder} is a model of type {str(kind)[:60]!r}, {_alternatives_hint(str(kind), known)}.")
    weights = safetensors_io.StoredWeights(folder)
    reading = map_weights(known.get(kind), settings, weights)
    given = request.tokenizer or (folder / TOKENIZER_FILE if (folder / TOKENIZER_FILE).exists() else None)
    tokenizer = None if given is None else _fitting(load_tokenizer(given), reading.model.config.vocab_size)
    return ImportSource(kind, [folder / "config.json", *weights.files], reading, tokenizer)


def _alternatives_hint(kind: str, known: Registry[Format]) -> str:
    """What can be done with a model that cannot be opened so."""
    if known is formats and kind in convertible:
        has = convertible.get(kind).position
        return (
            f"with {has} positions; trainshort convert makes an ALiBi model of it, trainshort import takes those alone"
        )
    if known is convertible and kind in formats:
        return "an ALiBi model already; trainshort import takes it as it is"
    names = ", ".join(sorted(name for name in known.names() if name != "fairseq"))
    return f"and these {'ALiBi models can be imported' if known is formats else 'can be converted'}: {names}"


def _fitting(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"The tokenizer makes {tokenizer.vocab_size:,} tokens and the model knows {vocab_size:,}; it is another's."
        )
    return tokenizer


def download_snapshot(name: str, patterns: tuple[str, ...] = PATTERNS) -> Path:
    """A model of the hub, in its local cache."""
    require_package("huggingface_hub", f"There is no folder {name} here. Downloading from the hub", "trainshort[hf]")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    answers = is_hub_reachable()  # if not: what an earlier download left here, in place of half a minute of retries
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), local_files_only=not answers))
    except (HfHubHTTPError, OSError, ValueError) as error:
        first = first_sentence_of(error) if answers else "it does not answer"
        raise InputError(
            f"There is no file or folder {name}, and the hub did not give a model ({first}). "
            "Check the name and the network."
        ) from None


def _write_checkpoint(run: Path, config: RunConfig, reading: WeightMap) -> None:
    """The run's beginning, as a checkpoint without optimizer state: there is none before the first step."""
    folder = run / "checkpoints" / checkpoint_files.checkpoint_name(0)
    (folder / "model").mkdir(parents=True)
    save_config(config, folder / "config.json")
    state = TrainState(step=0, tokens=0, seconds=0.0, window_nll=0.0, window_count=0)
    write_atomic(folder / STATE_FILE, state.model_dump_json(indent=2) + "\n")
    safetensors_io.write(folder / "model" / UNSHARDED_FILE, reading.shapes, reading.tensor)
    checkpoint_files.write_manifest(
        folder, {name: checkpoint_files.compute_digest(folder / name) for name in checkpoint_files.list_files(folder)}
    )


def _import_record(source: ImportSource) -> dict[str, Any]:
    """Where the model comes from, and what became of it."""
    return {
        "format": source.format_name,
        "files": {path.name: sha256(path) for path in source.source_files},
        "dropped": list(source.weight_map.dropped_names),
        "notes": list(source.weight_map.model.notes),
        "tokenizer": None if source.tokenizer is None else source.tokenizer.name,
    }


@torch.no_grad()
def _check_parity(source: ImportSource, run: Path) -> dict[str, Any] | str:
    """How far the logits of a few tokens are from those of transformers' own class, where it has one; a large model is
    not loaded a second time for it."""
    model = source.weight_map.model
    if source.format_name == "trainshort":
        return "not measured: it is a model of ours"
    if source.format_name not in NATIVE:
        return f"not measured: transformers has no class for {source.format_name}"
    if ignored := next((note for note in model.notes if "ignored by" in note), None):
        return f"not measured: {ignored}"
    if sum(math.prod(shape) for shape in source.weight_map.shapes.values()) > LARGEST_MEASURED:
        return "not measured: the model is large; trainshort evaluate reads both"
    if not has_package("transformers"):
        return "not measured: transformers is not installed"
    try:
        theirs = load_causal(source.source_files[0].parent, torch.float32).eval()
        tokens = torch.arange(min(model.training_length or PROBE, PROBE))[None] % model.config.vocab_size
        expected = theirs(tokens).logits
    except Exception as error:  # of its many checks of a config, stricter than ours, each with an exception of its own
        return f"not measured: transformers refuses it ({type(error).__name__})"
    ours = load_model(run)(tokens)
    off = float((ours - expected).abs().max() / expected.std())
    return {"engine": f"transformers {metadata.version('transformers')}", "tokens": tokens.shape[1], "off": off}
