"""The list of a checkpoint's files with their sha256: a checkpoint is valid when every byte is the one written.

The manifest is written last, in exactly one form, with a digest of itself, so that a change to any byte of any file,
the manifest's own included, is noticed before a weight is used. No torch.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from trainshort.errors import InputError
from trainshort.files import MissingFileError, parse_json, read_text, reason, sha256, write_whole

MANIFEST = "manifest.json"

READ = (".safetensors", ".json")
"""What a checkpoint may hold, and all that is ever read from one; neither can execute code."""

Digests = dict[str, dict[str, Any]]
"""File name inside the checkpoint to {"bytes": ..., "sha256": ...}."""


def files(folder: Path) -> list[str]:
    """Names of all files inside, in a fixed order, without the manifest."""
    inside = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(name for name in inside if name != MANIFEST)


def digest(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path, mend="")}


def write(folder: Path, digests: Digests) -> None:
    write_whole(folder / MANIFEST, _text(digests))


def _text(digests: Digests) -> str:
    """The one form a manifest can have."""
    listed = json.dumps(digests, sort_keys=True)
    own = hashlib.sha256(listed.encode()).hexdigest()
    return json.dumps({"files": digests, "sha256": own}, sort_keys=True, indent=1) + "\n"


def damage(folder: Path, only: str | None = None) -> str | None:
    """What is wrong with a checkpoint, in words; None when nothing is. `only` checks one file (and the manifest)."""
    if not folder.is_dir():
        return "it is a file, and a checkpoint is a folder"
    try:
        return _damage(folder, only)
    except InputError as error:  # of a file that cannot be opened
        message = str(error).removesuffix(".")
        return message[0].lower() + message[1:]
    except OSError as error:
        return f"{error.filename or folder} cannot be read ({reason(error)})"


def _damage(folder: Path, only: str | None) -> str | None:
    digests = _read(folder)
    if isinstance(digests, str):
        return digests
    present = files(folder)
    for name in present:
        if not name.endswith(READ):
            return f"{name} is neither safetensors nor JSON, and nothing else is ever opened"
        if name not in digests:
            return f"{name} is not in the manifest"
    for name, expected in digests.items():
        if only not in (None, name):
            continue
        if name not in present:
            return f"{name} is missing"
        found = digest(folder / name)
        if found["bytes"] != expected["bytes"]:
            return f"{name} has {found['bytes']} bytes instead of {expected['bytes']}"
        if found != expected:
            return f"{name} has another sha256 than when it was written"
    return None


def _read(folder: Path) -> Digests | str:
    """The manifest's content, or why it cannot be believed."""
    try:
        text = read_text(folder / MANIFEST, mend="")
    except MissingFileError:
        return f"{MANIFEST} is missing"
    try:
        digests = parse_json(text, MANIFEST, mend="")["files"]
        believed = text == _text(digests) and all(entry.keys() == {"bytes", "sha256"} for entry in digests.values())
    except (InputError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not readable"
    return digests if believed else f"{MANIFEST} was changed after it was written"
