"""Tests of files that were made to do harm: nothing is executed, nothing crashes, and the error is one line."""

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


class Call:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def make_calls(created_file: str) -> dict[str, Call]:
    """Return harmful calls by name. Most of them create the file `created_file` when they are executed."""
    import builtins
    import os
    import runpy
    import shutil
    import subprocess

    return {
        "os.system": Call(os.system, f"touch {created_file}"),
        "eval": Call(builtins.eval, f"open({created_file!r}, 'w')"),
        "exec": Call(builtins.exec, f"open({created_file!r}, 'w')"),
        "open": Call(builtins.open, created_file, "w"),
        "Popen": Call(subprocess.Popen, ["touch", created_file]),
        "mkdir": Call(os.mkdir, created_file),
        "copy": Call(shutil.copy, "/etc/hostname", created_file),
        "runpy": Call(runpy.run_path, created_file),
        "import": Call(builtins.__import__, "antigravity"),
        "getattr": Call(getattr, os, "system"),
        "torch.load": Call(torch.load, created_file),
        "compile": Call(builtins.compile, "1", "x", "eval"),
    }


CALL_NAMES = list(make_calls(""))


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", CALL_NAMES)
def test_pickle_with_a_call_is_not_executed(name, legacy, tmp_path):
    path = tmp_path / "model.pt"
    created_file = tmp_path / "executed"
    try:
        saved = {"model": {}, "args": make_calls(str(created_file))[name]}
        torch.save(saved, path, _use_new_zipfile_serialization=not legacy)
    except (TypeError, pickle.PicklingError):
        # Modules cannot be pickled. The file then names another function.
        torch.save({"args": Call(getattr, "", "join")}, path, _use_new_zipfile_serialization=not legacy)
    assert_import_fails(path, tmp_path)
    assert not created_file.exists()


def assert_import_fails(source: Path, tmp_path: Path) -> str:
    """Assert that importing a model raises an error of one line and leaves no run folder.

    Returns:
        The error message.
    """
    with pytest.raises(InputError) as raised:
        import_model(ImportRequest(str(source), training_length=8), tmp_path / "run")
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 700
    run_folders = [path for path in tmp_path.iterdir() if path.name.startswith(("run", ".run"))]
    assert run_folders == []
    return message


def test_error_names_the_function_in_a_pickle(tmp_path):
    torch.save({"args": Call(eval, "1")}, tmp_path / "model.pt")
    message = assert_import_fails(tmp_path / "model.pt", tmp_path)
    assert "eval" in message


def make_zip_bomb() -> bytes:
    """Return a checkpoint of a few kilobytes that unpacks to a gigabyte."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (1 << 26))
        archive.writestr("archive/version", "3")
    return buffer.getvalue()


def read_checkpoint(name: str = "plain-cfg.pt") -> bytes:
    """Return the content of a valid fairseq checkpoint."""
    return (FAIRSEQ / name).read_bytes()


def invert_bytes(content: bytes, start: int) -> bytes:
    """Return the content with 40 inverted bytes."""
    end = start + 40
    inverted = bytes(byte ^ 255 for byte in content[start:end])
    return content[:start] + inverted + content[end:]


BROKEN_CHECKPOINTS = {
    "empty": b"",
    "text": b"hello, I am a model",
    "zeros": bytes(4096),
    "half a zip": read_checkpoint()[:30_000],
    "no directory": read_checkpoint()[:-200],
    "half a legacy": read_checkpoint("plain-legacy.pt")[:20_000],
    "its pickle alone": pickle.dumps({"model": {}}),
    "a list": pickle.dumps([1, 2], protocol=2) * 5,
    "a protocol of the future": b"\x80\xff" + b"}" * 50,
    "endless nesting": b"\x80\x02" + b"(" * 100_000 + b".",
    "a huge string": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "a memo of nothing": b"\x80\x02h\x05.",
    "stack global": pickle.dumps(Call(eval, "1"), protocol=4),
    "a zip bomb": make_zip_bomb(),
    "a zip of nothing": b"PK\x05\x06" + bytes(18),
    **{f"inverted at {start}": invert_bytes(read_checkpoint(), start) for start in (60, 900, 2500, 61_500, 62_400)},
}


@pytest.mark.parametrize("content", BROKEN_CHECKPOINTS.values(), ids=BROKEN_CHECKPOINTS)
def test_broken_checkpoint_raises_error_or_is_imported_completely(content, tmp_path):
    """Some of the inverted bytes have no meaning. The checkpoint is then imported."""
    (tmp_path / "model.pt").write_bytes(content)
    message = ""
    try:
        import_model(ImportRequest(str(tmp_path / "model.pt")), tmp_path / "run")
    except InputError as error:
        message = str(error)
    is_imported = (tmp_path / "run" / "import.json").exists()
    assert is_imported != bool(message)
    assert "\n" not in message


def safetensors_file(header: object, header_size: int | None = None, data: bytes = b"") -> bytes:
    """Return the content of a safetensors file.

    Args:
        header: The header as bytes, or as a value that is written as JSON.
        header_size: The size that the file states for the header. By default, the real size.
        data: The bytes after the header.
    """
    header_bytes = header if isinstance(header, bytes) else json.dumps(header).encode()
    if header_size is None:
        header_size = len(header_bytes)
    return struct.pack("<Q", header_size) + header_bytes + data


TENSOR = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
BROKEN_SAFETENSORS = {
    "a length without end": safetensors_file(b"{}", 2**63),
    "a longer header than file": safetensors_file(b"{}", 10_000),
    "no JSON": safetensors_file(b"not json at all"),
    "a list": safetensors_file([1, 2, 3]),
    "offsets past the end": safetensors_file({"a": {**TENSOR, "data_offsets": [0, 2**40]}}),
    "offsets backwards": safetensors_file({"a": {**TENSOR, "data_offsets": [16, 0]}}, data=bytes(16)),
    "another shape": safetensors_file({"a": {**TENSOR, "shape": [2**31, 2**31]}}, data=bytes(16)),
    "a negative shape": safetensors_file({"a": {**TENSOR, "shape": [-2, -2]}}, data=bytes(16)),
    "an unknown dtype": safetensors_file({"a": {**TENSOR, "dtype": "Q99"}}, data=bytes(16)),
    "overlap": safetensors_file({"a": TENSOR, "b": TENSOR}, data=bytes(16)),
    "a hole": safetensors_file({"a": {**TENSOR, "data_offsets": [8, 24]}}, data=bytes(24)),
    "nested without end": safetensors_file(b'{"a":' * 20_000),
    "whole numbers": safetensors_file({"transformer.wte.weight": {**TENSOR, "dtype": "I32"}}, data=bytes(16)),
    "empty": b"",
}


@pytest.mark.parametrize("content", BROKEN_SAFETENSORS.values(), ids=BROKEN_SAFETENSORS)
def test_broken_safetensors_file_raises_error(content, tmp_path):
    config, _, _ = foreign.mpt()
    folder = foreign.save(tmp_path / "theirs", config, {})
    (folder / "model.safetensors").write_bytes(content)
    assert_import_fails(folder, tmp_path)


INVALID_CONFIGS = {
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


@pytest.mark.parametrize("changes", INVALID_CONFIGS.values(), ids=INVALID_CONFIGS)
def test_invalid_config_raises_error(changes, tmp_path):
    config, weights, _ = foreign.mpt()
    folder = foreign.save(tmp_path / "theirs", {**config, **changes}, weights)
    assert_import_fails(folder, tmp_path)


def test_control_characters_in_a_tensor_name_are_escaped(tmp_path):
    config, weights, _ = foreign.mpt()
    folder = foreign.save(tmp_path / "theirs", config, {**weights, "evil\x1b[2J\n": torch.zeros(2)})
    assert r"evil\x1b[2J\n" in assert_import_fails(folder, tmp_path)


UNMEASURABLE_CONFIGS = {
    "a length beyond counting": {"max_seq_len": 10**30},
    "a length that is true": {"max_seq_len": True},
    "a type that transformers refuses": {"logit_scale": 0},
    "a window that transformers passes over": {"attn_config": {"alibi": True, "sliding_window_size": 8}},
}


@pytest.mark.parametrize("changes", UNMEASURABLE_CONFIGS.values(), ids=UNMEASURABLE_CONFIGS)
def test_import_succeeds_if_transformers_cannot_load_the_model(changes, tmp_path):
    """The parity with transformers is then not measured."""
    pytest.importorskip("transformers")
    config, weights, _ = foreign.mpt()
    folder = foreign.save(tmp_path / "theirs", {**config, **changes}, weights)
    run = import_model(ImportRequest(str(folder), training_length=8), tmp_path / "run")
    assert json.loads((run / "import.json").read_text())["parity"].startswith("not measured")


# Names of tensors in a fairseq checkpoint
FIRST = "decoder.layers.0.fc1.weight"
VERSION = "decoder.version"
TABLES = ("decoder.embed_tokens.weight", "decoder.output_projection.weight")
UNUSUAL_TENSORS = {
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
@pytest.mark.parametrize("changes", UNUSUAL_TENSORS.values(), ids=UNUSUAL_TENSORS)
def test_unusual_tensor_raises_error(changes, legacy, tmp_path):
    saved = torch.load(FAIRSEQ / "plain-cfg.pt", weights_only=False)  # A file of the tests.
    for name, change in changes.items():
        saved["model"][name] = change(saved["model"].get(name))
    torch.save(saved, tmp_path / "model.pt", _use_new_zipfile_serialization=not legacy)
    assert_import_fails(tmp_path / "model.pt", tmp_path)


def test_tensor_as_setting_raises_error(tmp_path):
    saved = torch.load(FAIRSEQ / "plain-cfg.pt", weights_only=False)
    for name in ("activation_fn", "adaptive_softmax_cutoff", "decoder_layers"):
        model_settings = {**saved["cfg"]["model"], name: torch.zeros(3)}
        changed = {**saved, "cfg": {**saved["cfg"], "model": model_settings}}
        torch.save(changed, tmp_path / "model.pt")
        assert name in assert_import_fails(tmp_path / "model.pt", tmp_path)


UNKNOWN_PRE_TOKENIZER = {**json.loads(ByteTokenizer().to_json()), "pre_tokenizer": {"type": "Evil"}}
INVALID_TOKENIZERS = ("", "{}", "[" * 100_000, '{"model": 3}', json.dumps(UNKNOWN_PRE_TOKENIZER))


def test_tokenizers_of_hostile_models(tmp_path, monkeypatch):
    """A tokenizer with a slow regular expression is kept, because the import encodes no text."""
    monkeypatch.setattr(foreign, "WORDS", 300)
    config, weights, _ = foreign.mpt()
    folder = foreign.save(tmp_path / "theirs", config, weights)
    layout = json.loads(ByteTokenizer().to_json())
    layout["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    import_model(ImportRequest(str(folder)), tmp_path / "ok")
    for text in INVALID_TOKENIZERS:
        (folder / "tokenizer.json").write_text(text)
        assert_import_fails(folder, tmp_path)
