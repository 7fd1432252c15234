"""The one exception a user can cause.

Everything that is the caller's to hint (a wrong shape, an unknown name, a damaged file) raises `InputError` with a
sentence that says what was expected, what came and what to do. The command line prints that sentence and exits with 2;
any other exception is a fault of ours and keeps its traceback.
"""


class InputError(ValueError):
    """A mistake in what was asked for, told in words the user can act on."""


class HuggingFaceConfigError(InputError):
    """A config.json of a Hugging Face model, where one of ours was expected."""
