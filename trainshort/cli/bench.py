"""`trainshort bench` and `trainshort tune`: run programs that are only part of a source checkout."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from trainshort.cli.parser import Parser
from trainshort.errors import InputError
from trainshort.utils.terminal import print_line


@dataclass(frozen=True)
class Bench:
    """Measure speed and memory against other implementations

    This command requires a source checkout of trainshort. In the folder of the checkout, `trainshort bench --help`
    shows all options.

    Example:
      trainshort bench --quick
    """

    words: tuple[str, ...]  # The arguments after the name of the command.
    module: ClassVar[str] = "benchmarks"

    @classmethod
    def parse(cls, words: list[str]) -> Self:
        """Create the command without parsing its arguments. `run` passes the arguments to the benchmark program.

        Args:
            words: The arguments after the name of the command.
        """
        return cls(tuple(words))

    def run(self) -> int:
        """Run the benchmark program in a subprocess and return its exit code.

        Raises:
            InputError: If the current folder is not a source checkout. `--help` works in every folder.
        """
        is_checkout = Path("benchmarks/__main__.py").is_file() and Path("trainshort/__init__.py").is_file()
        if is_checkout:
            process = subprocess.run([sys.executable, "-m", self.module, *self.words])
            return process.returncode

        command_name = f"trainshort {type(self).__name__.lower()}"
        if "-h" in self.words or "--help" in self.words:
            parser = Parser(command_name, [], self.__doc__ or "")
            print_line(parser.help().rstrip())
            return 0
        raise InputError(
            f"{command_name} requires a source checkout of trainshort. Change into the folder of the checkout first."
        )


class Tune(Bench):
    """Search the training settings of the laptop scale

    This command requires a source checkout of trainshort. In the folder of the checkout, `trainshort tune --help` shows
    all options.

    Example:
      trainshort tune --methods alibi,t5
    """

    module: ClassVar[str] = "benchmarks.tune_laptop"
