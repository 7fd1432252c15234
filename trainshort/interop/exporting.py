"""A run becomes a folder that other programs load: weights, tokenizer, generation settings, model card.

    hf-mpt, hf-bloom   transformers' own classes, no code of ours
    hf                 our class (import trainshort.hf), which carries every model
    gguf               llama.cpp
    ctranslate2        CTranslate2

What a target has no word for is rewritten where that is exact and refused where it is not. The folder appears when it
is whole; `trainshort.json` in it says which run it was made of, for verify.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import trainshort
from trainshort.checkpoint import find, load_model, sha256_of
from trainshort.config import ModelConfig, load_config
from trainshort.data import of_run
from trainshort.data.tokenizer import END_OF_TEXT, Tokenizer
from trainshort.data.tokenizer import FILE as TOKENIZER
from trainshort.data.tokenizer.built import WordTokenizer
from trainshort.errors import InputError
from trainshort.evaluate import evidence
from trainshort.evaluate.target import EXPORTED as RECORD
from trainshort.files import new_folder, write_whole
from trainshort.interop import ctranslate, gguf_file, native, weight_files
from trainshort.interop.rewriting import Need, Plain, refuse_misfit
from trainshort.masking import refuse_encoder
from trainshort.registry import Registry


@dataclass(frozen=True)
class Exported:
    """What is exported: a run's best checkpoint, with what describes it."""

    path: Path
    model: Plain
    length: int
    tokenizer: Tokenizer | None
    dtype: str = "f32"
    card: dict[str, Any] | None = None
    """Its extrapolation card, if that is of these weights."""

    @property
    def name(self) -> str:
        return self.path.resolve().name


@dataclass(frozen=True)
class Destination:
    """Where a model can go."""

    summary: str
    needs: tuple[Need, ...]
    rewrite: Callable[[Plain], Plain]
    write: Callable[[Path, Exported], None]
    dtypes: tuple[str, ...] = ("f32",)
    tokenizer_misfit: Callable[[Tokenizer | None], str | None] = lambda _: None
    """Why it cannot carry a run's tokenizer, and what would have fitted."""


targets: Registry[Destination] = Registry("export target")


def open_run(path: Path, dtype: str = "f32") -> Exported:
    checkpoint = find(path)
    config = load_config(checkpoint / "config.json")
    if not config.model.causal:
        refuse_encoder("Exporting")
    model = load_model(checkpoint)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    reach = evidence.load_card(checkpoint.parent.parent)
    if reach is not None and reach["target"]["weights"] != sha256_of(weights):
        reach = None
    return Exported(path, Plain(model.config, weights), config.train.length, run_tokenizer(path), dtype, reach)


def run_tokenizer(path: Path) -> Tokenizer | None:
    """Load the tokenizer of a run or checkpoint. Return None for an imported model without a tokenizer."""
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    was_trained_here = (run / of_run.FILE).exists()
    if was_trained_here or (run / TOKENIZER).exists():
        return of_run.run_tokenizer(run)
    return None


def export(path: Path, to: str, out: Path, dtype: str | None = None) -> tuple[str, ...]:
    """Write a run for another program; returns what had to be rewritten, in words."""
    target = targets.get(to)
    dtype = dtype or target.dtypes[0]
    if dtype not in target.dtypes:
        raise InputError(f"--to {to} writes {', '.join(target.dtypes)}, not '{dtype}'.")
    run = open_run(path, dtype)
    refuse_misfit(to, run.model.config, target.needs)
    if problem := target.tokenizer_misfit(run.tokenizer):
        raise InputError(f"{to} cannot carry {problem}")
    run = replace(run, model=target.rewrite(run.model))
    with new_folder(out) as folder:
        target.write(folder, run)
        if run.tokenizer is not None:
            write_whole(folder / TOKENIZER, run.tokenizer.to_json())
        record = {"to": to, "run": str(path.resolve()), "dtype": dtype, "rewritten": list(run.model.done)}
        record |= {"trained_at": run.length, "trainshort": trainshort.__version__}
        write_whole(folder / RECORD, json.dumps(record, indent=2) + "\n")
        write_whole(folder / "README.md", _card(run, to))
    return run.model.done


def _card(run: Exported, to: str) -> str:
    """What a reader of the folder should know."""
    config, reach = run.model.config, run.card
    count = sum(weight.numel() for weight in run.model.weights.values())
    use = {
        "hf": "import trainshort.hf, then AutoModelForCausalLM.from_pretrained",
        "gguf": "llama.cpp",
        "ctranslate2": "ctranslate2.Generator; call it once with a short prompt before a long one",
    }.get(to, "AutoModelForCausalLM.from_pretrained, in float32")
    lines = [
        "---\nlibrary_name: trainshort\ntags: [alibi, length-extrapolation]\n---",
        f"# {run.name}",
        f"A language model trained with trainshort {trainshort.__version__}: {config.layers} layers, width "
        f"{config.width}, {config.heads} heads, {count:,} parameters, positions: {config.position}.",
        f"Trained at {run.length:,} tokens. " + ("" if reach else "Longer inputs: not measured."),
        *([] if reach is None else _extrapolation(reach)),
        f"Load with: {use}.",
        *(f"Rewritten for this format: {note}." for note in run.model.done),
    ]
    return "\n\n".join(lines) + "\n"


def _extrapolation(reach: dict[str, Any]) -> list[str]:
    """The extrapolation card: what was measured, on which text, length by length."""
    text, base = reach["corpus"], reach["base"]["length"]
    split = f", split {text['split']}" if text.get("split") else ""
    rows = ["| tokens read at once | perplexity | |", "|--:|--:|---|"]
    for one in reach["lengths"]:
        found = f"{one['perplexity']:.2f}" if one["status"] == "scored" else one["status"]
        rows.append(f"| {one['length']:,} | {found} | {'training length' if one['length'] == base else ''} |")
    marks = (("no worse than at the training length", "no_worse"), ("within 2 % of it", "within_2_percent"))
    far = [f"{words} to {reach[mark]['length']:,}{'+' if reach[mark]['open'] else ''}" for words, mark in marks]
    return [
        "## How far it is good",
        f"Measured: {reach['summary']}; {', '.join(far)}.",
        f"On {text['name']}{split}: {reach['base']['tokens']:,} tokens, each scored once at every length, passes "
        f"without overlap. Weights sha256 {str(reach['target']['weights'])[:16]}.",
        "\n".join(rows),
    ]


# ---- Hugging Face folders


def _write_native(
    config: Callable[[ModelConfig, int], dict[str, Any]], tensors: Callable[[Plain], dict[str, torch.Tensor]]
) -> Callable[[Path, Exported], None]:
    def write(folder: Path, run: Exported) -> None:
        _write_hugging_face(folder, run, config(run.model.config, run.length), tensors(run.model))

    return write


def _write_own(folder: Path, run: Exported) -> None:
    try:
        from trainshort.hf import TrainshortConfig
    except ImportError:
        raise InputError("--to hf needs the hf extra: pip install 'trainshort[hf]'.") from None
    config = TrainshortConfig.of(run.model.config, run.length).to_dict()
    names = ("TrainshortConfig", "TrainshortForCausalLM")
    auto = zip(("AutoConfig", "AutoModelForCausalLM"), names, strict=True)
    config |= {"architectures": [names[1]], "auto_map": {kind: f"modeling_trainshort.{name}" for kind, name in auto}}
    config["dtype"] = "float32"
    tensors = {f"model.{name}": weight for name, weight in run.model.weights.items()}
    _write_hugging_face(folder, run, config, tensors)
    text = f"from trainshort.hf import {', '.join(names)}\n\n__all__ = {list(names)!r}\n"
    write_whole(folder / "modeling_trainshort.py", text)


def _write_hugging_face(folder: Path, run: Exported, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    end = None if run.tokenizer is None else run.tokenizer.end
    ends = {} if end is None else {"bos_token_id": end, "eos_token_id": end}
    write_whole(folder / "config.json", json.dumps(config | ends, indent=2) + "\n")
    write_whole(folder / "generation_config.json", json.dumps({**ends, "use_cache": True}, indent=2) + "\n")
    shapes = {name: tuple(weight.shape) for name, weight in tensors.items()}
    weight_files.write(folder / weight_files.SINGLE, shapes, tensors.__getitem__, metadata={"format": "pt"})
    if run.tokenizer is not None:
        text = json.dumps(tokenizer_config(run.tokenizer, run.length), indent=2) + "\n"
        write_whole(folder / "tokenizer_config.json", text)


def tokenizer_config(tokenizer: Tokenizer, length: int) -> dict[str, Any]:
    """Text stays text: a special token's spelling inside a text is not the token, here and there."""
    made: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": native.REACH * length,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    if isinstance(tokenizer, WordTokenizer):
        word = WordTokenizer.SPECIAL[WordTokenizer.LINE_END]
        made |= {"bos_token": word, "eos_token": word, "unk_token": WordTokenizer.SPECIAL[WordTokenizer.UNKNOWN]}
    elif not gguf_file.is_bytes(tokenizer) and END_OF_TEXT in tokenizer.to_json():
        made |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    return made


def _write_gguf(folder: Path, run: Exported) -> None:
    assert run.tokenizer is not None
    gguf_file.write(
        folder, run.model, name=run.name, length=native.REACH * run.length, tokenizer=run.tokenizer, kind=run.dtype
    )


def _write_ctranslate(folder: Path, run: Exported) -> None:
    ctranslate.write(folder, run.model, tokenizer=run.tokenizer)


def _same(model: Plain) -> Plain:
    return model


_as_mpt = _write_native(native.mpt_config, native.mpt_tensors)
_as_bloom = _write_native(native.bloom_config, native.bloom_tensors)
targets.register("hf-mpt")(Destination("transformers, as an MPT", native.MPT_NEEDS, native.as_mpt, _as_mpt))
targets.register("hf-bloom")(Destination("transformers, as a BLOOM", native.BLOOM_NEEDS, native.as_bloom, _as_bloom))
targets.register("hf")(Destination("transformers, by trainshort's own class; any model", (), _same, _write_own))
targets.register("gguf")(
    Destination(
        "llama.cpp, as an MPT or a BLOOM (GGUF)",
        gguf_file.NEEDS,
        gguf_file.rewritten,
        _write_gguf,
        gguf_file.TYPES,
        gguf_file.tokenizer_misfit,
    )
)
targets.register("ctranslate2")(
    Destination("CTranslate2, as its own decoder", ctranslate.NEEDS, ctranslate.rewritten, _write_ctranslate)
)
