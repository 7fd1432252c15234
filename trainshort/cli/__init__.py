"""The commands of the command line, one file each: arguments as a typed dataclass, the work as its `run` method.

These files import torch only inside `run`, so that `trainshort <command> --help` answers at once.
"""
