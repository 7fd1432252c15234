"""Text at any length, with a promise about memory and error.

Reading order: settings.py, sample.py (from scores to a token; one text), streaming.py (`stream`, and which cache a mode
means), one_row.py (a token in compiled code), session.py (the terminal).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainshort.generate.sample import Token
    from trainshort.generate.settings import GenerateConfig
    from trainshort.generate.streaming import TokenStream, stream, stream_batch

__all__ = ["GenerateConfig", "Token", "TokenStream", "stream", "stream_batch"]


def __getattr__(name: str) -> Any:
    """Imported on first use: the settings make the command's `--help`, which should not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'trainshort.generate' has no attribute {name!r}")
    from importlib import import_module

    home = {"GenerateConfig": "settings", "Token": "sample"}.get(name, "streaming")
    return getattr(import_module(f"trainshort.generate.{home}"), name)
