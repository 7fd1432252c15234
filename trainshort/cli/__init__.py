"""The commands of the command line.

Each module defines one or more commands. A command is a dataclass: its fields are the options, and its method `run`
does the work. The modules import torch only inside `run`, so that `trainshort COMMAND --help` is quick.
"""
