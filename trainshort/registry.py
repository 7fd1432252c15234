"""Names for things that can be chosen: positions, engines, corpora, tokenizers, recipes. No torch.

One class for all of them, so that adding is always a decorator and an unknown name always helps:

    positions = Registry("position method")

    @positions.register("alibi")
    class Alibi(PositionMethod): ...

    positions.get("alibbi")   # InputError: Unknown position method 'alibbi'. Did you mean 'alibi'? Known: alibi, ...
"""

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from trainshort import plugins
from trainshort.errors import InputError

Entry = TypeVar("Entry")
Given = TypeVar("Given")

SHOWN = 12
"""Names an error lists; there are many recipes, and a sentence should stay one."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence naming the closest known word, or nothing when none is close."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(name.lower(), known, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


class Registry(Generic[Entry]):
    """An ordered table from names to entries; registration order is the order of preference where one is needed.

    `needs` are the methods that every entry must have. A name that is missing may be a plug-in's (plugins.py).
    """

    def __init__(self, kind: str, needs: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self.needs = needs
        self._entries: dict[str, Entry] = {}
        self.changes = 0
        """How often an entry came or went: for those who remember what they were answered."""

    def register(self, name: str) -> Callable[[Given], Given]:
        """Decorator that files a class or function under `name`; a name can be taken once only."""

        def add(entry: Given) -> Given:
            if name in self._entries:
                raise InputError(f"{self.kind} '{name}' is already registered; choose another name.")
            if lacking := [method for method in self.needs if not callable(getattr(entry, method, None))]:
                raise InputError(f"{self.kind} '{name}' lacks {' and '.join(f'{method}()' for method in lacking)}.")
            self._entries[name] = entry  # pyright: ignore[reportArgumentType]
            self.changes += 1
            plugins.note(self, name)
            return entry

        return add

    def get(self, name: str) -> Entry:
        """The entry called `name`; an unknown name says which are known."""
        if name not in self:
            names = self.names()
            known = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
            raise InputError(f"Unknown {self.kind} '{name}'.{did_you_mean(name, names)} Known: {known}.")
        return self._entries[name]

    def forget(self, name: str) -> None:
        """Take a name back, where a plug-in that registered it failed later."""
        del self._entries[name]
        self.changes += 1

    def names(self) -> list[str]:
        return list(self._entries)

    def items(self) -> Iterator[tuple[str, Entry]]:
        return iter(self._entries.items())

    def __contains__(self, name: object) -> bool:
        if name not in self._entries:
            plugins.load_named()
        return name in self._entries
