"""The exceptions for invalid user input.

An error message states what is wrong, what was expected and how to fix it. The command line prints the message and
exits with code 2. All other exceptions are bugs of trainshort and keep their traceback.
"""


class InputError(ValueError):
    """Invalid user input, such as a wrong shape, an unknown name or a corrupted file."""


class HuggingFaceConfigError(InputError):
    """A `config.json` belongs to a Hugging Face model instead of a trainshort run."""
