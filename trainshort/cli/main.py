"""Entry point of the command line: find the command, parse its arguments, run it and report errors.

A command is a dataclass whose fields are its options and whose method `run` does the work. Only the module of the
chosen command is imported, so that `trainshort --help` is quick.
"""

import importlib
import os
import sys
from collections.abc import Callable
from json import JSONDecodeError
from typing import Any, NoReturn

from trainshort import __version__
from trainshort.errors import InputError
from trainshort.utils.io import describe_os_error
from trainshort.utils.optional import require_package
from trainshort.utils.plugins import load_plugin_arguments
from trainshort.utils.registry import did_you_mean
from trainshort.utils.terminal import preserve_signal_handlers, print_status, show_log_messages

# The module in trainshort/cli that defines each command, and the line that `trainshort --help` shows for the command.
# The class of a command has the name of the command with a capital letter, such as `Evaluate`.
COMMANDS = {
    "demo": ("paper", "train and compare four position methods in about ten minutes"),
    "analyze": ("evaluate", "analyze context use, attention distance and cost"),
    "bench": ("bench", "measure speed and memory against other implementations"),
    "convert": ("import_export", "convert a model to ALiBi"),
    "doctor": ("import_export", "check a Hugging Face ALiBi model for known bugs"),
    "evaluate": ("evaluate", "measure perplexity at several lengths"),
    "export": ("import_export", "export a run to Transformers, llama.cpp or CTranslate2"),
    "generate": ("generate", "continue a text of any length"),
    "harness": ("import_export", "run tasks of lm-evaluation-harness on a model"),
    "import": ("import_export", "import a model as a run folder"),
    "list": ("list_show", "list position methods, backends, recipes and more"),
    "prepare": ("train", "tokenize a text and store the tokens"),
    "report": ("paper", "write the HTML report from stored results"),
    "reproduce": ("paper", "reproduce the tables and figures of the paper"),
    "show": ("list_show", "show the settings of a recipe"),
    "train": ("train", "train a model with the settings of a recipe"),
    "tune": ("bench", "tune the laptop recipe"),
    "verify": ("import_export", "compare an export with its run"),
}

# Exit code after an error that the user can correct.
USAGE_ERROR = 2

# Exit code after Ctrl-C, as in shells.
INTERRUPTED = 130


def help_text() -> str:
    """Return the text of `trainshort --help`."""
    name_width = max(len(name) for name in COMMANDS)
    rows = []
    for name, (_, summary) in COMMANDS.items():
        rows.append(f"  {name:<{name_width}}  {summary}")
    command_table = "\n".join(rows)
    return f"""usage: trainshort COMMAND [options]

Train language models on short sequences and use them on long sequences

commands:
{command_table}

options:
  COMMAND --help      show the options of a command, with examples
  --plugin FILE.py    load position methods and more from a Python file (with any command)
  --version           show the version ({__version__})

examples:
  trainshort demo
  trainshort list positions
"""


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit.

    The exit code is 0 after success and 2 after an error that the user can correct. Such an error is printed in one
    line. If the environment variable TRAINSHORT_TRACEBACK is set, the traceback is printed instead.

    Args:
        argv: The command line after the name of the program. The default is the command line of this process. If
            `argv` is given, the signal handlers of the calling program are restored at the end.
    """
    if argv is None:
        exit_with(lambda: _run(sys.argv[1:]))
    else:
        # `run` restores the signal handlers, and `_run` does not.
        exit_with(lambda: run(argv))


def exit_with(work: Callable[[], int]) -> NoReturn:
    """Call `work` and exit with its result. An error that the user can correct is printed as one line.

    Args:
        work: Runs the command and returns the exit code.
    """
    shows_traceback = bool(os.environ.get("TRAINSHORT_TRACEBACK"))
    try:
        with show_log_messages():
            sys.exit(work())
    except InputError as error:
        if shows_traceback:
            raise
        usage = getattr(error, "usage", None)  # Only `UsageError` has a usage line.
        if usage:
            print(usage, file=sys.stderr)
        print_status(str(error))
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt as interrupt:
        # Training raises a subclass of KeyboardInterrupt that has its own exit code.
        sys.exit(getattr(interrupt, "code", INTERRUPTED))
    except BrokenPipeError:
        # `trainshort ... | head` closes the pipe early. The interpreter flushes standard output at exit, and the flush
        # must not fail. Therefore standard output is redirected to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        message = _message_for(error)
        if message is None or shows_traceback:
            raise
        print_status(message)
        sys.exit(USAGE_ERROR)


def _message_for(error: Exception) -> str | None:
    """Return a message of one line for an error of the operating system or of a file. Return None for other errors."""
    if isinstance(error, OSError):
        file_text = f" (file {error.filename})" if error.filename else ""
        return f"The operating system reported an error: {describe_os_error(error)}{file_text}."
    if isinstance(error, RecursionError):
        return "A file or a setting is nested too deeply."
    if isinstance(error, JSONDecodeError):
        return f"A file contains invalid JSON ({error})."

    from pydantic import ValidationError  # `trainshort --help` does not need pydantic.

    if isinstance(error, ValidationError):
        first_error = error.errors()[0]
        field = ".".join(str(part) for part in first_error["loc"])
        return f"Invalid value of '{field}' in {error.title}: {first_error['msg']}."
    return None


def run(argv: list[str]) -> int:
    """Run a command inside a program that goes on afterwards. The signal handlers of the program are restored.

    Args:
        argv: The command line after the name of the program, such as `["evaluate", "runs/demo-alibi"]`.

    Returns:
        The exit code.

    Raises:
        InputError: If the user can correct the error.
    """
    with preserve_signal_handlers():
        return _run(argv)


def _run(argv: list[str]) -> int:
    """Find the command that the first argument names, run the command and return its exit code."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(help_text(), end="")
        return 0
    if name == "--version":
        print(f"trainshort {__version__}")
        return 0

    if name.startswith("--plugin"):
        raise InputError(f"{name} must follow the command: trainshort COMMAND --plugin FILE.py.")
    if name not in COMMANDS:
        raise InputError(f"Unknown command '{name}'.{did_you_mean(name, COMMANDS)} See trainshort --help.")
    module_name, _ = COMMANDS[name]  # The second value is the description in the help text.
    module = importlib.import_module(f"trainshort.cli.{module_name}")
    command = getattr(module, name.capitalize())  # The command "evaluate" is the class `Evaluate`.
    return run_command(command, argv[1:])


def run_command(command: type[Any], words: list[str]) -> int:
    """Parse the arguments of a command and run the command.

    Args:
        command: The class of the command.
        words: The arguments, which may contain `--plugin FILE.py`.

    Returns:
        The exit code.
    """
    from trainshort.cli.parser import read_command  # `trainshort --help` does not need this import.

    words = load_plugin_arguments(words)
    # A command whose options are not only the fields of its class has its own method `parse`.
    if hasattr(command, "parse"):
        parsed_command = command.parse(words)
    else:
        parsed_command = read_command(command, words)
    require_package("rich", "The command line", "trainshort[train]")
    exit_code = parsed_command.run()
    return exit_code or 0  # A command without a return value was successful.
