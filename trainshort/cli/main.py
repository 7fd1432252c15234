"""`trainshort <command> ...`: finds the command, parses its arguments, turns mistakes into one sentence.

A command is a dataclass whose fields are its arguments and whose `run()` does the work
(trainshort.cli.parser).
Only the chosen command's module is imported, which keeps `--help` quick.
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

COMMANDS = {
    "demo": ("paper", "four position methods past their length, in ten minutes"),
    "analyze": ("evaluate", "why a model is good as far as it is: context, attention, cost"),
    "bench": ("bench", "speed and memory against peers, stored and compared"),
    "convert": ("import_export", "a model with other positions, made an ALiBi model"),
    "doctor": ("import_export", "what a Hugging Face model with ALiBi gets wrong"),
    "evaluate": ("evaluate", "how good a model is at each length"),
    "export": ("import_export", "a run for transformers, llama.cpp or CTranslate2"),
    "generate": ("generate", "continue a text, at any length"),
    "harness": ("import_export", "tasks of lm-evaluation-harness on a model"),
    "import": ("import_export", "a model from elsewhere, as a run folder"),
    "list": ("list_show", "all that can be chosen by name: positions, backends, recipes and more"),
    "prepare": ("train", "turn text into tokens on disk"),
    "report": ("paper", "one page from stored results"),
    "reproduce": ("paper", "the paper's tables and figures, at a scale"),
    "show": ("list_show", "a recipe's settings"),
    "train": ("train", "train a model by a recipe, into a run folder"),
    "tune": ("bench", "the search behind the laptop's recipe"),
    "verify": ("import_export", "whether an export computes what its run computes"),
}
"""Each with its file in trainshort/cli, where it is the class of that name, and the line `--help` shows for it."""

USAGE_ERROR = 2
INTERRUPTED = 130  # what shells use for Ctrl-C


def help_text() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items())
    return f"""usage: trainshort COMMAND [options]

Train language models on short sequences, run them on long ones.

commands:
{rows}

  trainshort COMMAND --help    what a command takes, with examples
  --plugin FILE.py             with any command: position methods and more of your own
  trainshort --version         {__version__}

examples:
  trainshort demo
  trainshort list positions
"""


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit.

    The exit code is 0 after success and 2 after an error that the user can correct. Such an error is printed in one
    line. If the environment variable TRAINSHORT_TRACEBACK is set, the traceback is printed instead.
    """
    exit_with(lambda: _run(sys.argv[1:]) if argv is None else run(argv))


def exit_with(work: Callable[[], int]) -> NoReturn:
    """Call `work` and exit with its result. An error that the user can correct is printed as one line.

    Args:
        work: Runs the command and returns the exit code.
    """
    try:
        with show_log_messages():
            sys.exit(work())
    except InputError as error:
        if os.environ.get("TRAINSHORT_TRACEBACK"):
            raise
        if usage := getattr(error, "usage", None):
            print(usage, file=sys.stderr)
        print_status(str(error))
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt as interrupt:
        sys.exit(getattr(interrupt, "code", INTERRUPTED))
    except BrokenPipeError:
        # `trainshort ... | head` closes our output early; point stdout elsewhere so the interpreter's flush is quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        message = _message_for(error)
        if message is None or os.environ.get("TRAINSHORT_TRACEBACK"):
            raise
        print_status(message)
        sys.exit(USAGE_ERROR)


def _message_for(error: Exception) -> str | None:
    """Return one line for an error that comes from the system or from a file, and None for every other error."""
    if isinstance(error, OSError):
        place = f" with {error.filename}" if error.filename else ""
        return f"Cannot go on{place}: {describe_os_error(error)}."
    if isinstance(error, RecursionError):
        return "A file or a setting is nested too deeply."
    if isinstance(error, JSONDecodeError):
        return f"A file is not readable JSON ({error})."

    from pydantic import ValidationError  # `trainshort --help` does not need pydantic.

    if isinstance(error, ValidationError):
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        return f"A {error.title} has an invalid value at '{field}': {first['msg']}."
    return None


def run(argv: list[str]) -> int:
    """A command, called by a program that goes on afterwards: its signal handlers stay its own."""
    with preserve_signal_handlers():
        return _run(argv)


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(help_text(), end="")
        return 0
    if argv[0] == "--version":
        print(f"trainshort {__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    if name.startswith("--plugin"):
        raise InputError(f"{name} comes after the command: trainshort COMMAND --plugin FILE.py.")
    if name not in COMMANDS:
        raise InputError(f"Unknown command '{name}'.{did_you_mean(name, COMMANDS)} See trainshort --help.")
    command = getattr(importlib.import_module(f"trainshort.cli.{COMMANDS[name][0]}"), name.capitalize())
    return run_command(command, rest)


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
    # A command with a method `parse` has options besides the fields of its class.
    parsed = command.parse(words) if hasattr(command, "parse") else read_command(command, words)
    require_package("rich", "The command line", "trainshort[train]")
    return parsed.run() or 0
