"""Load plug-ins: Python files that the user names with `--plugin`, and installed packages.

An installed package is a plug-in if it has an entry point in the group `trainshort.plugins`. A plug-in adds entries to
the registries (registry.py) with the decorators of this package. Run folders contain no code. A run stores the name and
the SHA-256 of each plug-in that the run needs.
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

PLUGIN_OPTION = "--plugin"

PLUGIN_ENV_VAR = "TRAINSHORT_PLUGINS"
"""The environment variable with the paths of `--plugin`, separated as in PATH. Subprocesses load the same files."""

ENTRY_POINT_GROUP = "trainshort.plugins"
"""The entry point group of installed plug-ins."""

PATH_HINT = f"Give {PLUGIN_OPTION} the path of a Python file."


@dataclass(frozen=True)
class Plugin:
    """A file or an installed package that was loaded.

    Attributes:
        name: The file name, or the name of the entry point.
        sha256: The SHA-256 of the source code.
        source_path: The file, or the folder of the package. Empty if it is unknown.
        entries: What the plug-in registered, as pairs of a registry and a name.
    """

    name: str
    sha256: str
    source_path: str = ""
    entries: list[tuple["Registry[Any]", str]] = field(default_factory=list)


# The loaded plug-ins by path or entry point. Like `sys.modules`, this table belongs to the process.
_loaded: dict[str, Plugin] = {}

# The plug-ins whose code is being executed. A plug-in can load another plug-in.
_loading: list[Plugin] = []


def record_registration(registry: "Registry[Any]", name: str) -> None:
    """Record that a plug-in registered an entry.

    The plug-in is the one whose code is being executed. If no plug-in is being executed, nothing is recorded.

    Args:
        registry: The registry of the entry.
        name: The name of the entry.
    """
    # `_loading` holds the plug-ins whose code is being executed. The last plug-in is the innermost one.
    if _loading:
        _loading[-1].entries.append((registry, name))


# ---- loading


def load_plugin_arguments(words: Sequence[str]) -> list[str]:
    """Load the plug-ins that a command line names with `--plugin PATH` or `--plugin=PATH`.

    The paths are also stored in an environment variable, so that subprocesses load the same plug-ins.

    Args:
        words: The command line.

    Returns:
        The command line without the options `--plugin`.

    Raises:
        InputError: If a path is missing, or if a plug-in cannot be loaded.
    """
    remaining_words = []
    paths = []
    iterator = iter(words)
    for word in iterator:
        option, separator, value = word.partition("=")
        if option != PLUGIN_OPTION:
            remaining_words.append(word)
            continue
        # In `--plugin PATH`, the path is the next word.
        path = value if separator else next(iterator, "")
        if not path:
            raise InputError(f"{PLUGIN_OPTION} requires a path. {PATH_HINT}")
        paths.append(str(Path(path).absolute()))

    if paths:
        for path in paths:
            load_plugin(Path(path))
        unique_paths = dict.fromkeys([*_plugins_from_environment(), *paths])
        os.environ[PLUGIN_ENV_VAR] = os.pathsep.join(unique_paths)
    return remaining_words


def _plugins_from_environment() -> list[str]:
    """Return the paths of the plug-ins that this command or its parent process named with `--plugin`."""
    paths = os.environ.get(PLUGIN_ENV_VAR, "").split(os.pathsep)
    return [path for path in paths if path]


def load_plugins() -> None:
    """Load all plug-ins that are not loaded yet.

    A plug-in is one of the following:

    - a Python file that the user named with the option `--plugin`
    - an installed package with an entry point in the group `trainshort.plugins`

    Raises:
        InputError: If a plug-in cannot be loaded.
    """
    # This import is slow, and `trainshort --help` does not need plug-ins.
    from importlib.metadata import entry_points

    for path in _plugins_from_environment():
        load_plugin(Path(path))  # Does nothing if the file is already loaded.

    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        if _entry_point_key(entry_point) not in _loaded:
            _load_installed_plugin(entry_point)


def load_plugin(path: Path) -> Plugin:
    """Execute a plug-in file, if this file was not loaded before.

    Args:
        path: A Python file.

    Returns:
        The plug-in.

    Raises:
        InputError: If the file cannot be read, raises an error or registers nothing. Its entries are removed again.
    """
    key = os.path.realpath(path)
    if key in _loaded:
        return _loaded[key]

    source = read_bytes(path, hint=PATH_HINT)
    sha256 = hashlib.sha256(source).hexdigest()
    module_name = f"trainshort_plugin_{path.stem}_{sha256[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file. {PATH_HINT}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pydantic look up the module there.
    plugin = Plugin(path.name, sha256, str(path))

    def execute_file() -> None:
        exec(compile(source, str(path), "exec"), vars(module))

    _execute(key, plugin, str(path), execute_file)
    if not plugin.entries:
        del _loaded[key]
        raise InputError(f"The plug-in {path} registers nothing. See docs/positions.md for an example.")
    return plugin


def _load_installed_plugin(entry_point: "EntryPoint") -> None:
    """Import the module of an entry point, and record it as a plug-in with the SHA-256 of its source code.

    Raises:
        InputError: If the import fails.
    """
    source_path = _find_source(entry_point.module)
    if source_path is None:
        source_files = []
    elif source_path.is_dir():
        source_files = sorted(source_path.rglob("*.py"))
    else:
        source_files = [source_path]
    source = b"".join(file.read_bytes() for file in source_files)
    sha256 = hashlib.sha256(source).hexdigest()
    plugin = Plugin(entry_point.name, sha256, str(source_path or ""))
    description = f"{entry_point.name} (installed, {entry_point.value})"
    _execute(_entry_point_key(entry_point), plugin, description, entry_point.load)


def _entry_point_key(entry_point: "EntryPoint") -> str:
    """Return the key of an installed plug-in in the table of loaded plug-ins."""
    return f"{ENTRY_POINT_GROUP}:{entry_point.name}"


def _find_source(module: str) -> Path | None:
    """Return the file of a module, or the folder of a package. None if it is unknown. The module is not executed."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return None  # A parent package cannot be imported. Loading the plug-in reports the error.
    if spec is None or spec.origin is None:
        return None  # A folder without __init__.py has no origin.
    path = Path(spec.origin)
    return path.parent if path.name == "__init__.py" else path


def _execute(key: str, plugin: Plugin, description: str, execute: Callable[[], object]) -> None:
    """Execute the code of a plug-in. If the code raises an error, the entries of the plug-in are removed.

    Args:
        key: The key of the plug-in in the table of loaded plug-ins.
        plugin: The plug-in. It lists the entries that its code registers, such as new position methods.
        description: The name of the plug-in for error messages.
        execute: A function that executes the code.

    Raises:
        InputError: If the code raises an error.
    """
    # The plug-in counts as loaded while its code is executed. Otherwise a registry that the code uses would load the
    # plug-in again.
    _loaded[key] = plugin
    _loading.append(plugin)
    try:
        execute()
    except (Exception, SystemExit) as error:
        del _loaded[key]
        for registry, name in plugin.entries:
            registry.remove(name)
        if isinstance(error, InputError):
            raise InputError(f"The plug-in {description} cannot be used: {error}") from None
        line = _describe_line(error, plugin) or ""
        raise InputError(
            f"The plug-in {description} cannot be imported: {type(error).__name__}: {error}{line}."
        ) from None
    finally:
        _loading.pop()


# ---- errors in the code of plug-ins


def _describe_line(error: BaseException, plugin: Plugin) -> str | None:
    """Return the line of a plug-in's code in which an error was raised, such as " (line 12)".

    The result is None if the error was not raised in the code of the plug-in. The result is also None for a syntax
    error, because its message already names the line.

    Args:
        error: The error.
        plugin: The plug-in.
    """
    if not plugin.source_path or isinstance(error, SyntaxError):
        return None
    # The last frame of the plug-in in the traceback is the one closest to the error.
    last_line = None
    for frame in traceback.extract_tb(error.__traceback__):
        is_plugin_file = frame.filename == plugin.source_path
        is_in_plugin_folder = frame.filename.startswith(plugin.source_path + os.sep)
        if is_plugin_file or is_in_plugin_folder:
            last_line = frame.lineno
    return None if last_line is None else f" (line {last_line})"


@contextmanager
def plugin_errors(*names: tuple[str, str]) -> Iterator[None]:
    """Context manager: raise errors of a plug-in's code as `InputError` with the name and the line of the plug-in.

    A `TypeError` or an `AttributeError` also counts as an error of the plug-in, because it is raised if an entry is
    called with unsuitable arguments. Other errors are raised unchanged.

    Args:
        names: The entries that the block uses, as pairs of the kind of the registry and the name of the entry.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        for kind, name in names:
            for plugin in plugins_of([(kind, name)]):
                line = _describe_line(error, plugin)  # such as " (line 12)", or None
                is_call_error = isinstance(error, TypeError | AttributeError)
                if line is None and not is_call_error:
                    continue
                cause = f"{type(error).__name__}: {str(error).rstrip('.')}{line or ''}"
                raise InputError(f"The {kind} '{name}' of {plugin.name} failed: {cause}.") from error
        raise


# ---- plug-ins of a run


def plugins_of(names: Iterable[tuple[str, str]]) -> list[Plugin]:
    """Return the plug-ins that registered at least one of some entries, sorted by name.

    Args:
        names: The entries, as pairs of the kind of the registry and the name of the entry.
    """
    entry_names = set(names)  # for example {("position method", "alibi")}
    plugins = []
    for plugin in _loaded.values():
        registered_names = {(registry.kind, name) for registry, name in plugin.entries}
        if registered_names & entry_names:
            plugins.append(plugin)
    return sorted(plugins, key=lambda plugin: plugin.name)


def require_plugins(records: "Iterable[PluginRecord]", owner: str) -> None:
    """Check that the plug-ins with which a run was trained are loaded, and that their code has not changed.

    Args:
        records: The plug-ins that the run stored. Plug-ins that are only needed for the data are not checked.
        owner: The run, for error messages.

    Raises:
        InputError: If a plug-in is not loaded, or if its code has changed.
    """
    required_records = [record for record in records if not record.for_data]
    for record in required_records:
        load_plugins()
        loaded_digests = {plugin.sha256 for plugin in _loaded.values()}
        if record.sha256 in loaded_digests:
            continue

        # The plug-in may be loaded with other code.
        for plugin in _loaded.values():
            if plugin.name == record.name:
                raise InputError(
                    f"{owner} was trained with another version of {record.name}: expected the sha256 "
                    f"{record.sha256[:12]}..., got {plugin.sha256[:12]}.... Give the version that the run was trained "
                    "with. If the change does not matter, write the new sha256 into the config.json of the run."
                )

        if record.name.endswith(".py"):
            advice = f"Give {PLUGIN_OPTION} path/to/{record.name}, or install the package that contains it."
        else:
            advice = "Install the package that contains it."
        raise InputError(
            f"{owner} requires the plug-in {record.name} (sha256 {record.sha256[:12]}...), which is not loaded. "
            f"{advice}"
        )
