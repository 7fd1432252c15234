"""Plug-ins: Python files named by `--plugin`, and installed packages with an entry point in `trainshort.plugins`.

A plug-in adds entries to the registries (registry.py) with the decorators of this package. A run folder contains no
code: the run stores the name and the sha256 of each plug-in that the run needs.

`--plugin` also sets an environment variable, so that subprocesses load the same files.
"""

import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainshort.errors import InputError
from trainshort.utils.io import read_bytes

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from trainshort.config.run_config import PluginRecord
    from trainshort.utils.registry import Registry

PLUGIN_ENV_VAR = "TRAINSHORT_PLUGINS"
"""Environment variable with the plug-in files of this command, as PATH has folders."""
ENTRY_POINT_GROUP = "trainshort.plugins"
"""Entry point group of installed plug-ins."""
PLUGIN_OPTION = "--plugin"
MEND = f"Give {PLUGIN_OPTION} the path of a Python file."


@dataclass(frozen=True)
class Plugin:
    """One file or package that was loaded, and what it registered."""

    name: str
    sha256: str
    source_path: str = ""
    """Its file, or the folder of its package."""
    entries: list[tuple["Registry[Any]", str]] = field(default_factory=list)


_loaded: dict[str, Plugin] = {}  # by path or entry point; like sys.modules, one per process
_loading: list[Plugin] = []


def record_registration(registry: "Registry[Any]", name: str) -> None:
    """Note that the plug-in that is being loaded registered this entry. Without such a plug-in, do nothing."""
    if _loading:
        _loading[-1].entries.append((registry, name))


def load_plugin_arguments(words: Sequence[str]) -> list[str]:
    """A command line without its `--plugin PATH`s, whose files are loaded, here and in every process to come."""
    rest, paths, given = [], [], iter(words)
    for word in given:
        option, equals, value = word.partition("=")
        if option != PLUGIN_OPTION:
            rest.append(word)
            continue
        path = value if equals else next(given, "")
        if not path:
            raise InputError(f"{PLUGIN_OPTION} needs a path. {MEND}")
        paths.append(str(Path(path).absolute()))
    if paths:
        for path in paths:
            load_plugin(Path(path))
        os.environ[PLUGIN_ENV_VAR] = os.pathsep.join(dict.fromkeys([*_plugins_from_environment(), *paths]))
    return rest


def _plugins_from_environment() -> list[str]:
    return [path for path in os.environ.get(PLUGIN_ENV_VAR, "").split(os.pathsep) if path]


def load_plugins() -> None:
    """Load what this command named and what is installed, each once."""
    from importlib.metadata import entry_points  # a quarter of the time that `--help` takes, which needs none of it

    for path in _plugins_from_environment():
        load_plugin(Path(path))
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if f"{ENTRY_POINT_GROUP}:{point.name}" not in _loaded:
            _load_installed(point)


def load_plugin(path: Path) -> Plugin:
    """Execute a plug-in file, if this file was not loaded before.

    Raises:
        InputError: If the file cannot be read, raises an error or registers nothing. Its entries are removed again.
    """
    key = os.path.realpath(path)
    if key in _loaded:
        return _loaded[key]
    code = read_bytes(path, hint=MEND)
    digest = hashlib.sha256(code).hexdigest()
    name = f"trainshort_plugin_{path.stem}_{digest[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is no Python file. {MEND}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pydantic look their modules up there
    plugin = Plugin(path.name, digest, str(path))
    _load(key, plugin, str(path), lambda: exec(compile(code, str(path), "exec"), vars(module)))
    if not plugin.entries:
        del _loaded[key]
        raise InputError(f"The plug-in {path} registers nothing; see docs/positions.md for how it is done.")
    return plugin


def _load_installed(point: "EntryPoint") -> None:
    try:
        spec = importlib.util.find_spec(point.module)
    except ImportError:  # of the package that it is said to be in; loading it says so
        spec = None
    origin = Path(spec.origin) if spec and spec.origin else None  # a folder without an __init__.py has none
    place = origin.parent if origin and origin.name == "__init__.py" else origin
    files = [] if place is None else sorted(place.rglob("*.py")) if place.is_dir() else [place]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    plugin = Plugin(point.name, digest, str(place or ""))
    key, what = f"{ENTRY_POINT_GROUP}:{point.name}", f"{point.name} (installed, {point.value})"
    _load(key, plugin, what, point.load)


def _load(key: str, plugin: Plugin, what: str, run: Callable[[], object]) -> None:
    _loaded[key] = plugin  # before it runs: while it does, a registry may ask for what is named
    _loading.append(plugin)
    try:
        run()
    except (Exception, SystemExit) as error:
        del _loaded[key]
        for table, name in plugin.entries:
            table.remove(name)
        if isinstance(error, InputError):
            raise InputError(f"The plug-in {what} cannot be used: {error}") from None
        line = _line_of(error, plugin) or ""
        raise InputError(f"The plug-in {what} does not import: {type(error).__name__}: {error}{line}.") from None
    finally:
        _loading.pop()


def _line_of(error: BaseException, plugin: Plugin) -> str | None:
    """Where in a plug-in's own code an error came up; None if it was not there, or names its line itself."""
    known = plugin.source_path and not isinstance(error, SyntaxError)
    frames = traceback.extract_tb(error.__traceback__) if known else []
    own = (plugin.source_path, plugin.source_path + os.sep)
    lines = [one.lineno for one in frames if one.filename == own[0] or one.filename.startswith(own[1])]
    return f" (line {lines[-1]})" if lines else None


@contextmanager
def plugin_errors(*names: tuple[str, str]) -> Iterator[None]:
    """Inside, an error in the code of a plug-in that registered one of these (kind, name)s, or in how it is called,
    becomes one sentence; any other stays what it is."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        for kind, name in names:
            for plugin in plugins_of([(kind, name)]):
                line = _line_of(error, plugin)
                if line is not None or isinstance(error, TypeError | AttributeError):
                    told = f"{type(error).__name__}: {str(error).rstrip('.')}{line or ''}"
                    raise InputError(f"The {kind} '{name}' of {plugin.name} failed: {told}.") from error
        raise


def plugins_of(names: Iterable[tuple[str, str]]) -> list[Plugin]:
    """The plug-ins that registered some of these (kind, name)s."""
    wanted = set(names)
    found = (p for p in _loaded.values() if any((table.kind, name) in wanted for table, name in p.entries))
    return sorted(found, key=lambda plugin: plugin.name)


def require_plugins(needed: "Iterable[PluginRecord]", who: str) -> None:
    """Stop unless the plug-ins that `who` was made with are here as they were then."""
    for name, digest in [(plugin.name, plugin.sha256) for plugin in needed if not plugin.for_data]:
        load_plugins()
        if any(plugin.sha256 == digest for plugin in _loaded.values()):
            continue
        if other := [plugin.sha256 for plugin in _loaded.values() if plugin.name == name]:
            raise InputError(
                f"{who} was trained with another {name}: its sha256 was {digest[:12]}..., that of the one given is "
                f"{other[0][:12]}.... Give the one it was trained with; if the change does not matter, write the "
                "new sha256 into its config.json."
            )
        give = f"Give {PLUGIN_OPTION} path/to/{name}, or install" if name.endswith(".py") else "Install"
        raise InputError(
            f"{who} needs the plug-in {name} (sha256 {digest[:12]}...), which is not loaded. "
            f"{give} the package it came with."
        )
