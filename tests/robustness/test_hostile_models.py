"""Files that were made to do harm: nothing of them is executed, nothing crashes, each is one sentence."""

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path

import foreign
import pytest
import torch

from trainshort import InputError
from trainshort.data.tokenizers.builtin import ByteTokenizer
from trainshort.interop.import_model import ImportRequest, import_model

FAIRSEQ = Path(__file__).parents[1] / "interop" / "fairseq"


class Calls:
    """Pickled, it is a call of `function` that leaves a file behind if anybody makes it."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def calls(mark: str) -> dict[str, Calls]:
    import builtins
    import os
    import runpy
    import shutil
    import subprocess

    return {
        "os.system": Calls(os.system, f"touch {mark}"),
        "eval": Calls(builtins.eval, f"open({mark!r}, 'w')"),
        "exec": Calls(builtins.exec, f"open({mark!r}, 'w')"),
        "open": Calls(builtins.open, mark, "w"),
        "Popen": Calls(subprocess.Popen, ["touch", mark]),
        "mkdir": Calls(os.mkdir, mark),
        "copy": Calls(shutil.copy, "/etc/hostname", mark),
        "runpy": Calls(runpy.run_path, mark),
        "import": Calls(builtins.__import__, "antigravity"),
        "getattr": Calls(getattr, os, "system"),
        "torch.load": Calls(torch.load, mark),
        "compile": Calls(builtins.compile, "1", "x", "eval"),
    }


NAMES = list(calls(""))


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", NAMES)
def test_pickles_that_call_are_refused_by_name(name, legacy, tmp_path):
    path, mark = tmp_path / "it.pt", tmp_path / "executed"
    try:
        saved = {"model": {}, "args": calls(str(mark))[name]}
        torch.save(saved, path, _use_new_zipfile_serialization=not legacy)
    except (TypeError, pickle.PicklingError):  # a module cannot be pickled: it is named in the file all the same
        torch.save({"args": Calls(getattr, "", "join")}, path, _use_new_zipfile_serialization=not legacy)
    refuse(path, tmp_path)
    assert not mark.exists()


def refuse(source: Path, tmp_path: Path) -> str:
    with pytest.raises(InputError) as told:
        import_model(ImportRequest(str(source), training_length=8), tmp_path / "run")
    sentence = str(told.value)
    assert "\n" not in sentence
    assert len(sentence) < 700
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("run", ".run"))]
    return sentence


def test_the_name_is_told(tmp_path):
    torch.save({"args": Calls(eval, "1")}, tmp_path / "it.pt")
    assert "names eval, and no fairseq checkpoint does. Nothing was executed." in refuse(tmp_path / "it.pt", tmp_path)


def bomb() -> bytes:
    """A checkpoint of a few kilobytes that unpacks to a gigabyte."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (1 << 26))
        archive.writestr("archive/version", "3")
    return made.getvalue()


def good(name: str = "plain-cfg.pt") -> bytes:
    return (FAIRSEQ / name).read_bytes()


BROKEN = {
    "empty": b"",
    "text": b"hello, I am a model",
    "zeros": bytes(4096),
    "half a zip": good()[:30_000],
    "no directory": good()[:-200],
    "half a legacy": good("plain-legacy.pt")[:20_000],
    "its pickle alone": pickle.dumps({"model": {}}),
    "a list": pickle.dumps([1, 2], protocol=2) * 5,
    "a protocol of the future": b"\x80\xff" + b"}" * 50,
    "endless nesting": b"\x80\x02" + b"(" * 100_000 + b".",
    "a huge string": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "a memo of nothing": b"\x80\x02h\x05.",
    "stack global": pickle.dumps(Calls(eval, "1"), protocol=4),
    "a zip bomb": bomb(),
    "a zip of nothing": b"PK\x05\x06" + bytes(18),
    **{f"bytes turned at {at}": good()[:at] + bytes(b ^ 255 for b in good()[at : at + 40]) + good()[at + 40 :]
       for at in (60, 900, 2500, 61_500, 62_400)},
}  # fmt: skip


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_broken_checkpoints_are_a_sentence(content, tmp_path):
    (tmp_path / "it.pt").write_bytes(content)
    told = ""
    try:
        import_model(ImportRequest(str(tmp_path / "it.pt")), tmp_path / "run")
    except InputError as error:
        told = str(error)
    whole = (tmp_path / "run" / "import.json").exists()  # where the bytes that were turned mean nothing
    assert whole != bool(told)
    assert "\n" not in told


def header(values: object, size: int | None = None, data: bytes = b"") -> bytes:
    text = values if isinstance(values, bytes) else json.dumps(values).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


TENSOR = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
LYING = {
    "a length without end": header(b"{}", 2**63),
    "a longer header than file": header(b"{}", 10_000),
    "no JSON": header(b"not json at all"),
    "a list": header([1, 2, 3]),
    "offsets past the end": header({"a": {**TENSOR, "data_offsets": [0, 2**40]}}),
    "offsets backwards": header({"a": {**TENSOR, "data_offsets": [16, 0]}}, data=bytes(16)),
    "another shape": header({"a": {**TENSOR, "shape": [2**31, 2**31]}}, data=bytes(16)),
    "a negative shape": header({"a": {**TENSOR, "shape": [-2, -2]}}, data=bytes(16)),
    "an unknown dtype": header({"a": {**TENSOR, "dtype": "Q99"}}, data=bytes(16)),
    "overlap": header({"a": TENSOR, "b": TENSOR}, data=bytes(16)),
    "a hole": header({"a": {**TENSOR, "data_offsets": [8, 24]}}, data=bytes(24)),
    "nested without end": header(b'{"a":' * 20_000),
    "whole numbers": header({"transformer.wte.weight": {**TENSOR, "dtype": "I32"}}, data=bytes(16)),
    "empty": b"",
}


@pytest.mark.parametrize("content", LYING.values(), ids=LYING)
def test_safetensors_that_lie(content, tmp_path):
    config, _, _ = foreign.mpt()
    folder = foreign.save(tmp_path / "theirs", config, {})
    (folder / "model.safetensors").write_bytes(content)
    refuse(folder, tmp_path)


TRAPS = {
    "code": {"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"},
    "huge": {"d_model": 2**40},
    "negative": {"n_layers": -1},
    "many layers": {"n_layers": 2**31},
    "a fraction": {"n_heads": 2.5},
    "not a number": {"expansion_ratio": float("nan")},
    "infinity": {"logit_scale": float("inf")},
    "true": {"d_model": True},
    "a list": {"vocab_size": [131]},
    "text": {"layer_norm_epsilon": "1e-5; import os"},
    "a path": {"model_type": "../../etc/passwd"},
    "nothing": {"model_type": None},
    "a list of types": {"model_type": ["mpt"]},
    "a book of a type": {"model_type": "m" * 10_000},
    "layers without tensors": {"n_layers": 2**31 - 1},
    "wider than any": {"d_model": 2**30, "n_heads": 2},
    "beyond counting": {"expansion_ratio": 1e20},
    "a list inside": {"attn_config": {"alibi": True, "attn_type": ["multiquery_attention"]}},
    "a window in words": {"attn_config": {"alibi": True, "sliding_window_size": "8"}},
}


@pytest.mark.parametrize("changes", TRAPS.values(), ids=TRAPS)
def test_configs_with_traps(changes, tmp_path):
    config, weights, _ = foreign.mpt()
    folder = foreign.save(tmp_path / "theirs", {**config, **changes}, weights)
    refuse(folder, tmp_path)


def test_a_tensor_whose_name_is_a_program_for_the_terminal(tmp_path):
    config, weights, _ = foreign.mpt()
    folder = foreign.save(tmp_path / "theirs", config, {**weights, "evil\x1b[2J\n": torch.zeros(2)})
    assert r"is called 'evil\x1b[2J\n', which no mpt model has." in refuse(folder, tmp_path)


UNMEASURED = {
    "a length beyond counting": {"max_seq_len": 10**30},
    "a length that is true": {"max_seq_len": True},
    "a type that transformers refuses": {"logit_scale": 0},
    "a window that transformers passes over": {"attn_config": {"alibi": True, "sliding_window_size": 8}},
}


@pytest.mark.parametrize("changes", UNMEASURED.values(), ids=UNMEASURED)
def test_what_transformers_makes_of_a_config_does_not_end_an_import(changes, tmp_path):
    pytest.importorskip("transformers")
    config, weights, _ = foreign.mpt()
    folder = foreign.save(tmp_path / "theirs", {**config, **changes}, weights)
    run = import_model(ImportRequest(str(folder), training_length=8), tmp_path / "run")
    assert json.loads((run / "import.json").read_text())["parity"].startswith("not measured: ")


FIRST = "decoder.layers.0.fc1.weight"
VERSION = "decoder.version"
TABLES = ("decoder.embed_tokens.weight", "decoder.output_projection.weight")
UNREAL = {
    "without numbers": {FIRST: lambda weight: weight.to("meta")},
    "sparse": {FIRST: lambda weight: weight.to_sparse()},
    "complex": {FIRST: lambda weight: weight.to(torch.complex64)},
    "a kilobyte that is a gigabyte": dict.fromkeys(TABLES, lambda weight: weight[:1, :1].expand(2**23, 32)),
    "no version": {VERSION: lambda weight: weight[:0]},
    "a version without numbers": {VERSION: lambda weight: weight.to("meta")},
    "a complex version": {VERSION: lambda weight: weight.to(torch.complex64)},
    "a name for the terminal": {"decoder.\n\x1b[2J": lambda weight: torch.zeros(2)},
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("changes", UNREAL.values(), ids=UNREAL)
def test_tensors_that_are_not_what_they_say(changes, legacy, tmp_path):
    saved = torch.load(FAIRSEQ / "plain-cfg.pt", weights_only=False)  # our own file
    for name, change in changes.items():
        saved["model"][name] = change(saved["model"].get(name))
    torch.save(saved, tmp_path / "it.pt", _use_new_zipfile_serialization=not legacy)
    refuse(tmp_path / "it.pt", tmp_path)


def test_settings_that_are_tensors(tmp_path):
    saved = torch.load(FAIRSEQ / "plain-cfg.pt", weights_only=False)
    for name in ("activation_fn", "adaptive_softmax_cutoff", "decoder_layers"):
        changed = {**saved, "cfg": {**saved["cfg"], "model": {**saved["cfg"]["model"], name: torch.zeros(3)}}}
        torch.save(changed, tmp_path / "it.pt")
        assert f"has a tensor for the setting '{name}'" in refuse(tmp_path / "it.pt", tmp_path)


EVIL = {**json.loads(ByteTokenizer().to_json()), "pre_tokenizer": {"type": "Evil"}}
BAD_TOKENIZERS = ("", "{}", "[" * 100_000, '{"model": 3}', json.dumps(EVIL))


def test_there_are_many():
    assert 2 * len(NAMES) + len(BROKEN) + len(LYING) + len(TRAPS) + 2 * len(UNREAL) + len(BAD_TOKENIZERS) + 1 >= 95


def test_a_tokenizer_with_a_regular_expression_bomb(tmp_path, monkeypatch):
    """It may be kept, but importing a model encodes no text with it; a broken one is a sentence."""
    monkeypatch.setattr(foreign, "WORDS", 300)
    config, weights, _ = foreign.mpt()
    folder = foreign.save(tmp_path / "theirs", config, weights)
    layout = json.loads(ByteTokenizer().to_json())
    layout["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    import_model(ImportRequest(str(folder)), tmp_path / "ok")
    for text in BAD_TOKENIZERS:
        (folder / "tokenizer.json").write_text(text)
        refuse(folder, tmp_path)
