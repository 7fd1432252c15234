"""Where a number comes from: the JSON files behind a report are copied beside it, so that every link works anywhere.

Names are made here and never taken from a run: a number, and what is left of the name when only plain letters stay.
"""

import re
from pathlib import Path

from trainshort.files import make_folder, read_bytes, write_whole

FOLDER = "data"


class Sources:
    """Files behind the page, each copied once."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.links: dict[Path, str] = {}
        folder = out / FOLDER
        if folder.exists():
            for old in folder.glob("[0-9][0-9][0-9]-*.json"):
                old.unlink()
        make_folder(folder)

    def link(self, path: Path) -> str:
        """A relative address of the copy of a file: data/003-alibi-128-valid.json"""
        if path not in self.links:
            near = f"{path.parent.parent.name}-{path.stem}" if path.parent.name == "eval" else path.stem
            plain = re.sub(r"[^A-Za-z0-9.]+", "-", near).strip("-.")[:80] or "result"
            name = f"{len(self.links) + 1:03d}-{plain}.json"
            write_whole(self.out / FOLDER / name, read_bytes(path))
            self.links[path] = f"{FOLDER}/{name}"
        return self.links[path]
