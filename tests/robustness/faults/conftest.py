"""One corpus and one run that was never disturbed, shared by all fault tests."""

import subprocess
import sys

import pytest
from harness import ENVIRONMENT, HERE, ROOT, Runner, make_config, result


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    return make_config(tmp_path_factory.mktemp("faults"))


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
    """In the full tests a run that is hurt is a fresh process; in the quick ones a fork, which is there at once."""
    return Runner(config, zygote, fresh=request.node.get_closest_marker("fault") is not None)


@pytest.fixture(scope="session")
def sound(config, zygote, tmp_path_factory):
    """A run that was never stopped."""
    out = tmp_path_factory.mktemp("sound") / "run"
    Runner(config, zygote).finish(out)
    return out


@pytest.fixture(scope="session")
def undisturbed(sound):
    """What it ended in."""
    return result(sound)
