"""Fixtures of the fault tests: one config, and one run that was not disturbed."""

import subprocess
import sys

import pytest
from harness import ENVIRONMENT, HERE, ROOT, Runner, make_config, read_result


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    """Write the config of a small run, and return its path."""
    return make_config(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def zygote():
    """Start the process whose forks are the runs (zygote.py)."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "zygote.py")], cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, text=True
    )
    yield process
    process.stdin.close()
    process.wait()


@pytest.fixture
def runner(request, config, zygote):
    """Return a runner. Tests with the marker "fault" start new processes. All other tests use forks, which are fast."""
    is_fault_test = request.node.get_closest_marker("fault") is not None
    return Runner(config, zygote, uses_new_processes=is_fault_test)


@pytest.fixture(scope="session")
def undisturbed_run(config, zygote, tmp_path_factory):
    """Return the folder of a run that was not interrupted."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    Runner(config, zygote).finish(out)
    return out


@pytest.fixture(scope="session")
def undisturbed_result(undisturbed_run):
    """Return the result of a run that was not interrupted."""
    return read_result(undisturbed_run)
