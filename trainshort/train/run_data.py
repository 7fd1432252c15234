"""Store and load the description of the training data in a run folder.

runs/NAME/
  tokenizer.json   a copy of the tokenizer of the dataset
  data.json        the path of the dataset folder and a copy of its meta.json
"""

from pathlib import Path
from typing import Any

from trainshort.config.run_config import DataConfig
from trainshort.data.dataset import PreparedDataset, is_dataset_folder, open_dataset
from trainshort.data.preparation import open_or_prepare
from trainshort.data.tokenizers.base import TOKENIZER_FILE as TOKENIZER
from trainshort.data.tokenizers.base import Tokenizer, load_tokenizer
from trainshort.errors import InputError
from trainshort.train.run_folder import RunFolder, read_lines
from trainshort.utils.io import (
    MissingFileError,
    read_bytes,
    read_with_checksum,
    sha256,
    write_atomic,
    write_with_checksum,
)

RUN_DATA_FILE = "data.json"


def copy_data_description(run: Path, prepared: PreparedDataset) -> None:
    """Copy what describes the data into the run folder, unless it is there."""
    if not (run / TOKENIZER).exists():
        write_atomic(run / TOKENIZER, read_bytes(prepared.folder / TOKENIZER))
    if not (run / RUN_DATA_FILE).exists():
        meta = prepared.meta.model_dump(mode="json")
        write_with_checksum(run / RUN_DATA_FILE, {"folder": str(prepared.folder.resolve()), "meta": meta})


def _read_data_description(run: Path) -> dict[str, Any]:
    try:
        return read_with_checksum(run / RUN_DATA_FILE, hint="Restore it from a copy of the run.")
    except MissingFileError:
        return {}


def run_tokenizer(run: Path) -> Tokenizer:
    """Load the tokenizer from a run folder.

    Raises:
        InputError: If the run folder has no tokenizer, or a tokenizer that the run was not trained with.
    """
    meta = _read_data_description(run).get("meta", {})
    if not (run / TOKENIZER).exists():
        if meta:
            raise InputError(
                f"{run} was copied without its {TOKENIZER}, and without it its tokens mean nothing. Copy that file too."
            )
        raise InputError(f"{run} has no {TOKENIZER}. Copy the tokenizer of the model into the run folder.")
    if meta and sha256(run / TOKENIZER) != meta["tokenizer_sha256"]:
        raise InputError(f"{run / TOKENIZER} is not the tokenizer that the run was trained with. Restore it.")
    return load_tokenizer(run / TOKENIZER, name=meta.get("tokenizer"))


def open_run_data(run: Path, config: DataConfig) -> PreparedDataset:
    """The data that the run was trained on, from any working directory. If it was prepared anew from a text that has
    changed since, its tokens have other meanings, and every number would be wrong."""
    folder = Path(_read_data_description(run).get("folder", ""))
    if folder.is_absolute() and is_dataset_folder(folder):
        prepared = open_dataset(folder)
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
