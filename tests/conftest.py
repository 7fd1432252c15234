"""What every test shares: one torch thread, so that results repeat and two test processes do not fight for cores."""

import contextlib
import gc
import shutil
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from trainshort.cli.main import main

torch.set_num_threads(1)

# A shell's background jobs ignore Ctrl-C, and so would every process that the tests start from one.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples are chosen by the test's name, not by chance: a red run is red for everybody.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """Evaluation clears memory before each length; looking through all of torch's objects takes longer than a test."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


TINY_RUN = (
    "prepare text.txt --tokenizer bpe --vocab-size 280 --out data/tiny",
    "train demo-alibi --data.folder data/tiny "
    "--model.layers 1 --model.width 16 --model.heads 2 --train.length 16 --train.batch 4 --train.steps 8 "
    "--train.save-every 4 --train.valid-every 4 --train.log-every 2 --train.keep-checkpoints 1 "
    "--train.valid-tokens 256 "
    "--quiet --out runs/tiny",
    "evaluate runs/tiny --lengths 1x 2x",
    "analyze runs/tiny --only early-tokens reach --samples 8 --lengths 1x 2x",
)
"""The commands that make the folder of the fixture `tiny_run`."""


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> Path:
    """Return a folder with a text, its prepared data and a small run that was trained, evaluated and analyzed.

    Tests must copy the folder before they change files. The paths in the folder are:

    - text.txt
    - data/tiny
    - runs/tiny
    """
    folder = tmp_path_factory.mktemp("tiny_run")
    shutil.copy(Path(__file__).parent / "text.txt", folder)
    torch.manual_seed(0)
    with contextlib.chdir(folder):
        for command in TINY_RUN:
            with pytest.raises(SystemExit) as ended:
                main(command.split())
            assert not ended.value.code, command
    # data.json holds the absolute path of data/tiny. A copy of the folder must use its own data/tiny.
    (folder / "runs" / "tiny" / "data.json").unlink()
    return folder
