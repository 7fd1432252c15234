"""One corpus and one run that was never disturbed, shared by all fault tests."""

import subprocess
import sys

import pytest
from harness import ENVIRONMENT, HERE, ROOT, Runner, make_runner, result


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    return make_runner(tmp_path_factory.mktemp("faults")).config


@pytest.fixture(scope="session")
def zygote():
    process = subprocess.Popen(
        [sys.executable, str(HERE / "zygote.py")], cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, text=True
    )
    yield process
    process.stdin.close()
    process.wait()


@pytest.fixture
def runner(request, config, zygote):
    """In the full tests each run is a fresh process; in the quick ones a fork, which saves importing torch."""
    return Runner(config) if request.node.get_closest_marker("fault") else Runner(config, zygote)


@pytest.fixture(scope="session")
def sound(config, tmp_path_factory):
    """A run that was never stopped."""
    out = tmp_path_factory.mktemp("sound") / "run"
    Runner(config).finish(out)
    return out


@pytest.fixture(scope="session")
def undisturbed(sound):
    """What it ended in."""
    return result(sound)
