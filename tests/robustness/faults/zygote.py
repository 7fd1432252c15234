"""Start `trainshort` processes quickly: this process has imported torch, and each run is a fork of it.

The forks are normal processes. They have their own process id and can be killed with SIGKILL. For each run there are
two forks: the run itself, and a supervisor that waits for the run and stores its exit code in a file.
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
import trainshort.train.loop  # The forks do not have to import this module again.


def run_command(request: dict) -> None:
    """Run one command of trainshort in this process, and exit.

    Args:
        request: The arguments, the environment variables, the file for the output, and optionally a driver (a script
            that runs instead of the command line).
    """
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


def write_atomic(path: str, text: str) -> None:
    """Write a file such that readers see the complete text."""
    with open(path + ".new", "w") as file:
        file.write(text)
    os.replace(path + ".new", path)


def main() -> None:
    """Read requests as lines of JSON from standard input, and run each of them in a fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The supervisors leave no zombie processes.
    for line in sys.stdin:
        request = json.loads(line)
        is_parent = os.fork() != 0
        if is_parent:
            continue
        # This fork is the supervisor of the run.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        run_pid = os.fork()
        if run_pid == 0:
            run_command(request)
        write_atomic(request["output"] + ".pid", str(run_pid))
        _, status = os.waitpid(run_pid, 0)
        write_atomic(request["output"] + ".status", str(os.waitstatus_to_exitcode(status)))
        os._exit(0)


if __name__ == "__main__":
    main()
