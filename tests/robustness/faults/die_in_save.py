"""Run `trainshort`, and kill the process with SIGKILL at a given call of fsync or rename.

The environment variable DIE_AT is the number of the call. With DIE_AT = 1, 2, 3, ..., the process dies at every stage
of saving a checkpoint.
"""

import os
import signal
from pathlib import Path

calls_left = int(os.environ["DIE_AT"])


def kill_at_last_call(function):
    """Return a function that calls `function`, or kills the process if no calls are left."""

    def call(*arguments, **options):
        global calls_left
        calls_left -= 1
        if calls_left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return call


os.fsync = kill_at_last_call(os.fsync)
os.rename = kill_at_last_call(os.rename)
Path.rename = kill_at_last_call(Path.rename)

# The command line must be imported after the functions were replaced.
from trainshort.cli.main import main  # noqa: E402

main()
