"""What every test shares: one torch thread, so that results repeat and two test processes do not fight for cores."""

import gc
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

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
