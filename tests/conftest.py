"""Settings and fixtures of all tests. Tests use one torch thread, so that results are reproducible."""

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

# Background jobs of a shell ignore SIGINT, and their subprocesses inherit this. Some tests need the default handler.
signal.signal(signal.SIGINT, signal.default_int_handler)

# hypothesis derives its examples from the name of the test. So a test that fails once fails in every run.
settings.register_profile("reproducible", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("reproducible")


def pytest_collection_finish() -> None:
    """Exclude all objects that exist now from garbage collection.

    The evaluation runs the garbage collector for each length. A collection of all torch objects takes longer than a
    test.
    """
    gc.freeze()


@pytest.fixture(autouse=True)
def _set_seed():
    """Give each test the same random numbers, independent of the tests before."""
    torch.manual_seed(0)


# The commands that create the folder of the fixture `tiny_run`.
TINY_RUN_COMMANDS = (
    "prepare text.txt --tokenizer bpe --vocab-size 280 --out data/tiny",
    "train demo-alibi --data.folder data/tiny "
    "--model.layers 1 --model.width 16 --model.heads 2 --train.length 16 --train.batch 4 --train.steps 8 "
    "--train.save-every 4 --train.valid-every 4 --train.log-every 2 --train.keep-checkpoints 1 "
    "--train.valid-tokens 256 "
    "--quiet --out runs/tiny",
    "evaluate runs/tiny --lengths 1x 2x",
    "analyze runs/tiny --only early-tokens reach --samples 8 --lengths 1x 2x",
)


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
        for command in TINY_RUN_COMMANDS:
            with pytest.raises(SystemExit) as caught:
                main(command.split())
            assert not caught.value.code, command
    # data.json holds the absolute path of data/tiny. A copy of the folder must use its own data/tiny.
    (folder / "runs" / "tiny" / "data.json").unlink()
    return folder
