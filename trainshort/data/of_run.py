"""The data of a run: what it is trained on, and what its folder keeps of it, to be whole wherever it is moved.

    runs/NAME/
      tokenizer.json   the same bytes as in the data folder
      data.json        the data folder's meta.json, and where that folder was

Runs of 0.1.0 have neither; their data folder is opened where they were trained.
"""

from pathlib import Path
from typing import Any

from trainshort.config import DataConfig
from trainshort.data.meta import META_FILE, UNFINISHED_FILE, Prepared, is_data, open_data
from trainshort.data.pipeline import prepare
from trainshort.data.tokenizer import FILE as TOKENIZER
from trainshort.data.tokenizer import Tokenizer, load_tokenizer
from trainshort.errors import InputError
from trainshort.files import MissingFileError, read_bytes, read_sealed, sha256, write_sealed, write_whole
from trainshort.runs import RunFolder, read_lines

FILE = "data.json"


def open_or_prepare(config: DataConfig, **options: Any) -> Prepared:
    """What training needs: a folder that was named as it is, else the one that the settings describe."""
    if config.folder is None:
        return prepare(config, **options)
    if config.folder.is_file():
        raise InputError(
            f"data.folder {config.folder} is a file. Turn it into tokens by `trainshort prepare {config.folder}`, and "
            "give the folder that this makes."
        )
    if not is_data(config.folder) and not (config.folder / UNFINISHED_FILE).exists():
        make = f"Make it by `trainshort prepare {config.corpus} --out {config.folder}`"
        if config.folder.is_dir() and any(config.folder.iterdir()):  # where prepare would not write
            make = "Name one that `trainshort prepare` made"
        raise InputError(
            f"data.folder {config.folder} is not a prepared data folder (it has no {META_FILE}). {make}, or "
            "leave data.folder out."
        )
    return open_data(config.folder)


def really(config: DataConfig, prepared: Prepared) -> DataConfig:
    """The settings with what a named folder really holds, whatever corpus and tokenizer the settings say."""
    if config.folder is None:
        return config
    held = prepared.meta.request
    return config.replace(corpus=held.corpus, tokenizer=held.tokenizer, vocabulary=held.vocabulary or config.vocabulary)


def keep(run: Path, prepared: Prepared) -> None:
    """Copy what describes the data into the run folder, unless it is there."""
    if not (run / TOKENIZER).exists():
        write_whole(run / TOKENIZER, read_bytes(prepared.folder / TOKENIZER))
    if not (run / FILE).exists():
        meta = prepared.meta.model_dump(mode="json")
        write_sealed(run / FILE, {"folder": str(prepared.folder.resolve()), "meta": meta})


def _kept(run: Path) -> dict[str, Any]:
    try:
        return read_sealed(run / FILE, mend="Restore it from a copy of the run.")
    except MissingFileError:
        return {}


def run_tokenizer(run: Path, config: DataConfig) -> Tokenizer:
    """The tokenizer of a run: its own, or in 0.1.0's that of its data."""
    meta = _kept(run).get("meta", {})
    if not (run / TOKENIZER).exists():
        if meta:
            raise InputError(
                f"{run} was copied without its {TOKENIZER}, and without it its tokens mean nothing. Copy that file too."
            )
        return open_own(run, config).tokenizer()
    if meta and sha256(run / TOKENIZER) != meta["tokenizer_sha256"]:
        raise InputError(f"{run / TOKENIZER} is not the tokenizer that the run was trained with. Restore it.")
    tokenizer = load_tokenizer(run / TOKENIZER)
    if meta:
        tokenizer.name = meta["tokenizer"]  # its file does not say what it was called
    return tokenizer


def open_own(run: Path, config: DataConfig) -> Prepared:
    """The data that the run was trained on, from any working directory. If it was prepared anew from a text that has
    changed since, its tokens have other meanings, and every number would be wrong."""
    folder = Path(_kept(run).get("folder", ""))
    if folder.is_absolute() and is_data(folder):
        prepared = open_data(folder)
    else:
        try:
            prepared = open_or_prepare(config)
        except InputError as error:
            raise InputError(f"The training data of {run} is not here: {error} Or give a text: --data FILE.") from None
    sessions = read_lines(RunFolder(run).sessions)
    trained_on = sessions[0].get("data") if sessions else None
    if trained_on not in (None, prepared.meta.splits["train"].sha256):
        raise InputError(
            f"{prepared.folder} is not the data that {run} was trained on: its train.bin has another sha256 than "
            "the one noted in sessions.jsonl. Restore that data, so that tokens mean what they meant."
        )
    return prepared
