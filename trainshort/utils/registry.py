"""Tables of everything that can be chosen by name: position methods, attention backends, corpora, tokenizers and more.

A registry knows its built-in entries by name, module and description. The module is imported on first use, so that
`trainshort list` is quick and does not import torch:

    corpora = Registry("corpus", builtin={"sotu": ("trainshort.data.corpora:sotu", "US State of the Union addresses")})

    corpora.get("sotu")    # imports trainshort.data.corpora
    corpora.get("sotuu")   # InputError: Unknown corpus 'sotuu'. Did you mean 'sotu'? Known: sotu.

A plug-in adds an entry with a decorator:

    @corpora.register("mine")
    def mine() -> Corpus: ...
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

from trainshort.errors import InputError
from trainshort.utils import plugins

EntryT = TypeVar("EntryT")
RegisteredT = TypeVar("RegisteredT")
Builtin = Mapping[str, tuple[str, str]]
"""Built-in entries by name: where the entry is defined ("package.module:object"), and a description of one line."""

MAX_SUGGESTIONS = 12
"""The largest number of names that an error message lists."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests the most similar known name, or an empty string if no name is similar."""
    known_names = list(known)
    for spelling in (name, name.lower()):
        matches = difflib.get_close_matches(spelling, known_names, n=1)
        if matches:
            return f" Did you mean '{matches[0]}'?"
    return ""


class Registry(Generic[EntryT]):
    """A table of entries by name. Built-in entries are imported on first use.

    Args:
        kind: What one entry is called in messages, for example "corpus".
        builtin: The built-in entries, in the order in which they are listed.
        required_methods: The names of methods that every registered entry must have.
        on_register: The import path ("module:function") of a function, or None. The function is called with the name
            and the entry before `register` adds the entry. The function raises `InputError` to reject the entry.
    """

    def __init__(
        self,
        kind: str,
        *,
        builtin: Builtin | None = None,
        required_methods: tuple[str, ...] = (),
        on_register: str | None = None,
    ) -> None:
        """Create a table of objects that users choose by name. The built-in objects are imported when they are used."""
        self.kind = kind
        self.required_methods = required_methods
        self.on_register = on_register
        self._builtin = dict(builtin or {})
        self._entries: dict[str, EntryT] = {}
        self.changes: int = 0
        """How often an entry was added or removed. A cached entry is valid only for the same number."""

    def register(self, name: str) -> Callable[[RegisteredT], RegisteredT]:
        """Return a decorator that adds a class, a function or an object to the registry.

        Args:
            name: The name of the entry.

        Raises:
            InputError: If the name is already registered, or if the entry lacks a required method. The error is raised
                when the decorator is called.
        """

        def add(entry: RegisteredT) -> RegisteredT:
            """Add the decorated class, function or object under `name`, and return it unchanged."""
            # `on_register` is None, or the import path of a function that may raise `InputError` to reject the entry.
            if self.on_register is not None:
                _import_object(self.on_register)(name, entry)
            self.add(name, entry)  # pyright: ignore[reportArgumentType]
            plugins.record_registration(self, name)
            return entry

        return add

    def add(self, name: str, entry: EntryT) -> None:
        """Add an entry. Plug-ins use the decorator `register` instead, which also records the plug-in.

        Raises:
            InputError: If the name is already registered, or if the entry lacks a required method.
        """
        if name in self._builtin or name in self._entries:
            raise InputError(f"{self.kind} '{name}' is already registered; choose another name.")
        missing_methods = []
        for method in self.required_methods:
            if not callable(getattr(entry, method, None)):
                missing_methods.append(f"{method}()")
        if missing_methods:
            methods = " and ".join(missing_methods)
            raise InputError(f"{self.kind} '{name}' lacks {methods}.")
        self._entries[name] = entry
        self.changes += 1

    def remove(self, name: str) -> None:
        """Remove an entry that was added. This method is used if a plug-in fails after it has registered the entry."""
        del self._entries[name]
        self.changes += 1

    def get(self, name: str) -> EntryT:
        """Return the entry with a name. The module of a built-in entry is imported on first use.

        Raises:
            InputError: If no entry has this name. The message suggests a similar name.
        """
        if name not in self:
            names = self.names()
            # The message lists at most `MAX_SUGGESTIONS` names.
            known_names = ", ".join(names[:MAX_SUGGESTIONS])
            if len(names) > MAX_SUGGESTIONS:
                known_names += f" and {len(names) - MAX_SUGGESTIONS} more"
            raise InputError(f"Unknown {self.kind} '{name}'.{did_you_mean(name, names)} Known: {known_names}.")
        if name not in self._entries:
            import_path, _ = self._builtin[name]  # The second value is the description.
            self._entries[name] = _import_object(import_path)
        return self._entries[name]

    def describe(self, name: str) -> str:
        """Return the description that `trainshort list` shows. No module is imported for a built-in entry."""
        if name in self._builtin:
            return self._builtin[name][1]
        return _first_line(self.get(name))

    def names(self) -> list[str]:
        """Return all names. The built-in entries come first, and the entries that were added later follow."""
        added_names = [name for name in self._entries if name not in self._builtin]
        return [*self._builtin, *added_names]

    def items(self) -> Iterator[tuple[str, EntryT]]:
        """Return all names with their entries. The modules of all built-in entries are imported."""
        return iter([(name, self.get(name)) for name in self.names()])

    def load(self) -> None:
        """Import the modules of all built-in entries."""
        for name in self._builtin:
            self.get(name)

    def __contains__(self, name: object) -> bool:
        """Return whether an entry has this name. Unknown names load the plug-ins, which may register the name."""
        if name in self._builtin or name in self._entries:
            return True
        plugins.load_plugins()
        return name in self._entries


def _import_object(import_path: str) -> Any:
    """Import an object from a path "module:name". For example, `_import_object("math:pi")` returns 3.14159..."""
    module_name, _, object_name = import_path.partition(":")
    return getattr(import_module(module_name), object_name)


def _first_line(entry: object) -> str:
    """Return the first line of the description of a registry entry, for example of a position method.

    The description is the first of the attributes `summary`, `question`, `statement` and `name` that is a string. An
    entry without these attributes is described by its docstring.
    """
    description = entry.__doc__ or ""
    for attribute in ("summary", "question", "statement", "name"):
        value = getattr(entry, attribute, None)
        if isinstance(value, str):
            description = value
            break
    first_line, _, _ = description.strip().partition("\n")
    return first_line
