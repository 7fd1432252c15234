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
from trainshort.train.metrics_log import read_lines
from trainshort.train.run_folder import RunFolder
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
    """Copy the tokenizer and the description of a dataset into a run folder. Existing files are not changed.

    With the copies, the run can be used after the dataset was removed.

    Args:
        run: The run folder.
        prepared: The dataset, whose text was tokenized before ("prepared").
    """
    if not (run / TOKENIZER).exists():
        write_atomic(run / TOKENIZER, read_bytes(prepared.folder / TOKENIZER))
    if not (run / RUN_DATA_FILE).exists():
        description = {
            "folder": str(prepared.folder.resolve()),
            "meta": prepared.meta.model_dump(mode="json"),
        }
        write_with_checksum(run / RUN_DATA_FILE, description)


def _read_data_description(run: Path) -> dict[str, Any]:
    """Return the content of data.json in a run folder, or an empty dictionary if the file does not exist."""
    try:
        return read_with_checksum(run / RUN_DATA_FILE, hint="Restore it from a copy of the run.")
    except MissingFileError:
        return {}


def run_tokenizer(run: Path) -> Tokenizer:
    """Load the tokenizer from a run folder.

    Args:
        run: The run folder.

    Raises:
        InputError: If the run folder has no tokenizer, or a tokenizer that the run was not trained with.
    """
    meta = _read_data_description(run).get("meta", {})
    if not (run / TOKENIZER).exists():
        if meta:
            raise InputError(
                f"{run} was copied without its {TOKENIZER}, which is required to encode and decode text. "
                "Copy that file, too."
            )
        raise InputError(f"{run} has no {TOKENIZER}. Copy the tokenizer of the model into the run folder.")
    if meta and sha256(run / TOKENIZER) != meta["tokenizer_sha256"]:
        raise InputError(f"{run / TOKENIZER} is not the tokenizer that the run was trained with. Restore it.")
    return load_tokenizer(run / TOKENIZER, name=meta.get("tokenizer"))


def open_run_data(run: Path, config: DataConfig) -> PreparedDataset:
    """Open the dataset that a run was trained on. The dataset is prepared again if it does not exist.

    Args:
        run: The run folder.
        config: The data settings of the run.

    Raises:
        InputError: If the dataset cannot be opened, or is not the dataset that the run was trained on. This happens if
            the text was changed and prepared again.
    """
    # data.json stores an absolute path, so the dataset is found from any working directory.
    stored_folder = Path(_read_data_description(run).get("folder", ""))
    if stored_folder.is_absolute() and is_dataset_folder(stored_folder):
        prepared = open_dataset(stored_folder)
    else:
        try:
            prepared = open_or_prepare(config)
        except InputError as error:
            raise InputError(
                f"Cannot open the training data of {run}: {error} Or choose a text with --data FILE."
            ) from None

    # In a dataset that was prepared from another text, token ids can have other meanings.
    # The first line of sessions.jsonl holds the SHA-256 of the training split.
    sessions = read_lines(RunFolder(run).sessions)
    trained_sha256 = sessions[0].get("data") if sessions else None
    if trained_sha256 is not None and trained_sha256 != prepared.meta.splits["train"].sha256:
        raise InputError(
            f"{prepared.folder} is not the data that {run} was trained on: the SHA-256 of its train.bin differs from "
            "the SHA-256 in sessions.jsonl. Restore the original data."
        )
    return prepared
