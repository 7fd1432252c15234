"""Command lines: words to values, a help text, and one sentence for every mistake. No torch.

A command is a dataclass whose fields are its arguments (`of_class`); a group of settings is a config whose fields are
(`of_settings`). Both become the same list of options, so a setting that is added somewhere is on the command line, with
its help and its one default, and nothing is written twice.
"""

import ast
import inspect
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from trainshort.errors import InputError
from trainshort.registry import did_you_mean
from trainshort.strict import Settings

OWN = ("format",)
"""Settings that the program writes, not the user."""
REQUIRED = object()
"""The default of an argument that must be given."""
SHOWN = {int: "N", float: "X", Path: "PATH", str: "TEXT"}


@dataclass(frozen=True)
class Arg:
    """What a field's annotation can add: `Annotated[str, Arg(metavar="RUN", positional=True)]`."""

    metavar: str | None = None
    name: str | None = None
    positional: bool = False
    help: str | None = None
    """In place of the text under the field, where a setting has said it already."""
    names: bool = False
    """It takes names, which may also be written with commas between them: `alibi,none`."""


@dataclass(frozen=True)
class Option:
    """One argument of a command."""

    name: str
    kind: Any
    help: str
    default: Any = REQUIRED
    field: str = ""
    metavar: str | None = None
    positional: bool = False
    names: bool = False

    @property
    def plain(self) -> Any:
        """Its type, without None."""
        kinds = [kind for kind in _alternatives(self.kind) if kind is not NoneType]
        return kinds[0] if len(kinds) == 1 else Union[tuple(kinds)]  # noqa: UP007  (made at run time)

    @property
    def flag(self) -> bool:
        return self.plain is bool

    @property
    def count(self) -> int | None:
        """How many words it takes; None for any number."""
        parts = get_args(self.plain) if get_origin(self.plain) in (tuple, list) else None
        return 1 if parts is None else None if parts[-1] is Ellipsis or get_origin(self.plain) is list else len(parts)

    @property
    def kind_of_one(self) -> Any:
        """The type of one of its words."""
        return get_args(self.plain)[0] if get_origin(self.plain) in (tuple, list) else self.plain

    @property
    def shown(self) -> str:
        """What stands for its value: N, PATH, a|b."""
        if self.metavar:
            return self.metavar
        if self.positional:
            return self.name.upper()
        one = self.kind_of_one
        if get_origin(one) is Literal:
            return "|".join(map(str, get_args(one)))
        return SHOWN.get(one, "VALUE")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def of_class(kind: type) -> list[Option]:
    """The fields of a command."""
    texts, hints = _field_texts(kind), get_type_hints(kind, include_extras=True)
    found = []
    for field in fields(kind):  # pyright: ignore[reportArgumentType]
        annotation, extra = hints[field.name], Arg()
        if get_origin(annotation) is Annotated:
            extra = next((one for one in get_args(annotation)[1:] if isinstance(one, Arg)), extra)
            annotation = get_args(annotation)[0]
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        default = REQUIRED if default is MISSING else default
        name = (extra.name or field.name).replace("_", "-")
        text = extra.help or texts.get(field.name, "")
        found.append(Option(name, annotation, text, default, field.name, extra.metavar, extra.positional, extra.names))
    return found


def _field_texts(kind: type) -> dict[str, str]:
    """The strings that follow a class's fields; Python keeps them in the source only."""
    texts: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0].body  # pyright: ignore[reportAttributeAccessIssue]
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                texts[field.target.id] = " ".join(str(text.value.value).split())  # pyright: ignore[reportAttributeAccessIssue]
    return texts


def of_settings(settings: Settings, prefix: str = "", *, leave: Sequence[str] = ()) -> list[Option]:
    """The fields of a config with their present values as defaults; groups inside it by dotted names."""
    found = []
    for name, info in type(settings).model_fields.items():
        value = getattr(settings, name)
        if name in (*OWN, *leave) or (value is None and _is_group(info.annotation)):
            continue
        if isinstance(value, Settings):
            found += of_settings(value, f"{prefix}{name}.")
        else:
            dotted = prefix + name
            found.append(Option(dotted, info.annotation, info.description or "", value, dotted))
    return found


def _is_group(annotation: Any) -> bool:
    """Whether a setting is a group of settings that may be absent, as `AdaptiveConfig | None`."""
    return any(isinstance(part, type) and issubclass(part, BaseModel) for part in _alternatives(annotation))


def at_least(least: int, **numbers: float | None) -> None:
    """Refuse the first of these options, by their fields, that is given and smaller."""
    for name, number in numbers.items():
        if number is not None and number < least:
            raise InputError(f"--{name.replace('_', '-')} must be at least {least}, got {number}.")


class UsageError(InputError):
    """A command line that cannot be read; the usage line is shown before the sentence."""

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message)
        self.usage = usage


class Parser:
    """Reads the words of one command."""

    def __init__(self, prog: str, options: list[Option], description: str) -> None:
        self.prog, self.options, self.description = prog, options, description

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """Values by field, defaults included."""
        left, plain = list(words), []
        values: dict[str, Any] = {}
        while left:
            word = left.pop(0)
            if word in ("-h", "--help"):
                print(self.help(), end="")
                raise SystemExit(0)
            if word == "--":
                plain += left
                break
            if not _is_option(word):
                plain.append(word)
                continue
            option, negated, given = self._find(word)
            values[option.field] = self._value(option, given, left, negated=negated)
        self._place(plain, values)
        return {one.field: values.get(one.field, one.default) for one in self.options}

    def _find(self, word: str) -> tuple[Option, bool, str | None]:
        """The option that a word names, by its full name or, where only one has it, by the last part of it."""
        typed, equals, given = word.removeprefix("--").partition("=")
        named = [one for one in self.options if not one.positional]
        for negated in (False, True):
            name = _plain_name(re.sub(r"(^|\.)no[-_]", r"\1", typed, count=1) if negated else typed)
            matches = [one for one in named if _plain_name(one.name) == name]
            matches = matches or [one for one in named if _plain_name(one.name).endswith("." + name)]
            matches = [one for one in matches if one.flag] if negated else matches
            if len(matches) > 1:
                raise self.error(f"'{typed}' could be {' or '.join(one.name for one in matches)}; write one of them.")
            if matches:
                return matches[0], negated, given if equals else None
        known = [_plain_name(one.name) for one in named]
        raise self.error(f"Unknown setting '{typed}'.{_nearest(_plain_name(typed), known)} See {self.prog} --help.")

    def _value(self, option: Option, given: str | None, left: list[str], *, negated: bool) -> Any:
        if option.flag:
            if given not in (None, "true", "false", "True", "False"):
                raise self.error(f"--{option.name} is true or false, got '{given}'.")
            return (given in (None, "true", "True")) != negated
        taken = [] if given is None else [given]
        while left and not _is_option(left[0]) and (option.count is None or len(taken) < option.count):
            taken.append(left.pop(0))
        least = option.count or 1
        if len(taken) < least:
            wanted = "a value" if least == 1 else f"{least} values"
            raise self.error(f"--{option.name} needs {wanted}: --{option.name} {' '.join([option.shown] * least)}.")
        return self._converted(option, taken)

    def _converted(self, option: Option, words: list[str]) -> Any:
        name = option.shown if option.positional else f"--{option.name}"
        if words == ["None"] and NoneType in _alternatives(option.kind):
            return None
        if option.positional and words == [""] and option.plain is str:
            raise self.error(f"{name} is empty: {option.help}".rstrip(".") + ".")
        if option.names or (option.count is None and option.kind_of_one in (int, float)):
            apart = [part.strip() for word in words for part in word.split(",") if part.strip()]
            if not apart:
                raise self.error(f"{name} names nothing, got '{' '.join(words)}': {option.help}".rstrip(".") + ".")
            words = words if option.count else apart
        parts = get_args(option.plain) if get_origin(option.plain) in (tuple, list) else (option.plain,)
        kinds = [parts[0]] * len(words) if option.count is None else list(parts)
        made = tuple(self._one(name, kind, word) for kind, word in zip(kinds, words, strict=True))
        return made if get_origin(option.plain) in (tuple, list) else made[0]

    def _one(self, name: str, kind: Any, word: str) -> Any:
        if get_origin(kind) is Literal:
            choices = {str(choice): choice for choice in get_args(kind)}
            if word not in choices:
                close = did_you_mean(word, choices)
                raise self.error(f"{name} is one of {', '.join(choices)}; got '{word}'.{close}")
            return choices[word]
        if kind is Path and not word:
            raise self.error(f"{name} is a path, got an empty word.")
        for one in _alternatives(kind):
            try:
                return one(word) if one in SHOWN else word
            except ValueError:
                continue
        wanted = {int: "a whole number", float: "a number"}.get(kind, "another value")
        raise self.error(f"{name} is {wanted}, got '{word}'.")

    def _place(self, words: list[str], values: dict[str, Any]) -> None:
        """Give the words that belong to no option to the positional ones."""
        for option in (one for one in self.options if one.positional):
            taken, words = (words, []) if option.count is None else (words[:1], words[1:])
            if taken:
                values[option.field] = self._converted(option, taken)
            elif option.default is REQUIRED:
                raise self.error(f"{option.shown} is missing: {option.help}".rstrip(".") + ".")
        if words:
            raise self.error(f"'{words[0]}' is one word too many. See {self.prog} --help.")
        for option in self.options:
            if option.default is REQUIRED and option.field not in values and not option.positional:
                raise self.error(f"--{option.name} is missing: {option.help}".rstrip(".") + ".")

    def error(self, message: str) -> UsageError:
        return UsageError(message, self.usage())

    def usage(self) -> str:
        places = []
        for one in (one for one in self.options if one.positional):
            shown = f"{one.shown} ..." if one.count is None else one.shown
            places.append(shown if one.default is REQUIRED else f"[{shown}]")
        return " ".join(["usage:", self.prog, *places, "[options]"])

    def help(self) -> str:
        """Usage, what the command does, and every option with its one default."""
        width = min(shutil.get_terminal_size().columns, 110)
        rows = [(one.shown, one.help) for one in self.options if one.positional]
        parts = [self.usage(), _paragraphs(self.description, width)]
        if rows:
            parts.append("arguments:\n" + _table(rows, width))
        groups: dict[str, list[tuple[str, str]]] = {}
        for one in (one for one in self.options if not one.positional):
            groups.setdefault(one.name.rpartition(".")[0], []).append((_spelled(one), _described(one)))
        parts += [f"{group or 'options'}:\n" + _table(rows, width) for group, rows in groups.items()]
        return "\n\n".join(parts) + "\n"


def _is_option(word: str) -> bool:
    """`--steps` and `-x`, but neither `-` (standard input) nor `-3`."""
    return word.startswith("-") and word != "-" and not re.fullmatch(r"-\.?\d.*", word)


def _plain_name(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _nearest(name: str, known: list[str]) -> str:
    """A sentence naming the setting that was meant: of the same last word (train.lr: optim.lr) or its first letters
    (learning_rate), else of the closest spelling, in its own section first."""
    section, _, typed = name.rpartition(".")
    words = [part for part in typed.split("_") if part]
    short = "".join(part[0] for part in words) if len(words) > 1 else typed
    last = {full: full.rpartition(".")[2] for full in known}
    if same := [full for full, end in last.items() if end in (typed, short)]:
        return did_you_mean(same[0], same)
    if inside := [full for full in known if full.startswith(name + ".")]:
        return f" It is a group of settings: {', '.join(f'--{full}' for full in inside[:3])} and more."
    own = [full for full in known if full.rpartition(".")[0] == section]
    for names in (own, known):
        if close := did_you_mean(typed, [last[full] for full in names]):
            word = close.split("'")[1]
            return close.replace(word, next(full for full in names if last[full] == word))
    return ""


def _spelled(option: Option) -> str:
    if option.flag:
        head, dot, tail = option.name.rpartition(".")
        return f"--{head}{dot}no-{tail}" if option.default is True else f"--{option.name}"
    many = f"{option.shown} ..." if option.count is None else " ".join([option.shown] * option.count)
    return f"--{option.name} {many}"


def _described(option: Option) -> str:
    """The help text with the default, unless the text tells it or there is none."""
    default, text = option.default, option.help
    if option.flag and default is True:
        return f"Turn this off: {text[:1].lower()}{text[1:]}"
    if default in (REQUIRED, None, (), "") or default is False or "Default:" in text:
        return text
    shown = " ".join(map(str, default)) if isinstance(default, tuple | list) else str(default)
    return f"{text.rstrip()} Default: {shown}."


def _table(rows: list[tuple[str, str]], width: int) -> str:
    column = min(26, max(len(name) for name, _ in rows) + 4)
    lines = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, max(20, width - column)) or [""]
        if len(name) + 4 > column:
            lines.append(f"  {name}")
        else:
            lines.append(f"  {name:<{column - 2}}{wrapped.pop(0)}".rstrip())
        lines += [" " * column + line for line in wrapped]
    return "\n".join(lines)


def _paragraphs(text: str, width: int) -> str:
    """The text with its paragraphs filled; indented ones (examples) stay as they are."""
    blocks = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(block if "\n  " in block else textwrap.fill(block, width) for block in blocks)
