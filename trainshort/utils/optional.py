"""Packages that are not installed by default.

`pip install trainshort` installs only what the attention functions and the models need. Other features need more
packages, which the extras in `pyproject.toml` install. A module that uses such a package imports it inside a function,
and calls `require_package` before.
"""

import importlib
import importlib.util
import sys
from typing import Any

from trainshort.errors import InputError


def has_package(package: str) -> bool:
    """Return whether a package is installed. The package is not imported."""
    if package in sys.modules:
        # Tests set the entry to None to hide an installed package.
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def require_package(package: str, feature: str, install: str) -> None:
    """Check that an optional package is installed. The package is not imported.

    Args:
        package: The name that is imported, such as `lm_eval`.
        feature: What the user wanted to do. The error message starts with these words.
        install: What `pip install` must be given, such as `trainshort[hf]`.

    Raises:
        InputError: If the package is not installed.

    Example:
        >>> require_package("transformers", "Evaluating Hugging Face models", "trainshort[hf]")
        Traceback (most recent call last):
        InputError: Evaluating Hugging Face models requires transformers. Install it with: pip install 'trainshort[hf]'
    """
    if not has_package(package):
        raise InputError(f"{feature} requires {package}. Install it with: pip install '{install}'")


def import_optional(module: str, feature: str, install: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: The module to import, such as `lm_eval.tasks`.
        feature: What the user wanted to do. The error message starts with these words.
        install: What `pip install` must be given, such as `trainshort[hf]`.

    Returns:
        The imported module.

    Raises:
        InputError: If the package is not installed.
    """
    package = module.partition(".")[0]
    require_package(package, feature, install)
    return importlib.import_module(module)
