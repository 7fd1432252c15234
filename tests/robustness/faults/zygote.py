"""Starts `trainshort` processes quickly: it has imported torch once, and each run is a fork of it.

The forks are processes like any other: they have their own number, are killed by SIGKILL, and share nothing that
changes. Between this process and each run stands a nanny, which waits for the run's end and writes it down.
"""

import json
import os
import runpy
import signal
import sys
import traceback

import torch

import trainshort.cli.main
import trainshort.cli.train
import trainshort.train.loop  # so that the forks find it imported


def live(request: dict) -> None:
    """Be one run: arguments, environment, output, then the command line's own `main`."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(request["environment"])
    torch.set_num_threads(1)
    sys.argv = request["arguments"]
    try:
        if request["driver"]:
            runpy.run_path(request["driver"], run_name="__main__")
        else:
            trainshort.cli.main.main()
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(bool(exit.code))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write(path: str, text: str) -> None:
    with open(path + ".new", "w") as file:
        file.write(text)
    os.replace(path + ".new", path)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for nannies
    for line in sys.stdin:
        request = json.loads(line)
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        run = os.fork()
        if not run:
            live(request)
        write(request["output"] + ".pid", str(run))
        _, status = os.waitpid(run, 0)
        write(request["output"] + ".status", str(os.waitstatus_to_exitcode(status)))
        os._exit(0)


if __name__ == "__main__":
    main()
