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

from trainshort.config.base import StrictConfig
from trainshort.errors import InputError
from trainshort.utils.plugins import PLUGIN_OPTION as PLUGIN
from trainshort.utils.registry import did_you_mean

REQUIRED = MISSING
"""The default of an argument that must be given."""
SHOWN = {int: "N", float: "X", Path: "PATH", str: "TEXT"}


@dataclass(frozen=True, kw_only=True)
class Arg:
    """What a field's annotation can add: `Annotated[str, Arg(metavar="RUN", positional=True)]`."""

    metavar: str = ""
    positional: bool = False
    help: str = ""
    """In place of the text under the field, where a setting has said it already."""
    names: bool = False
    """It takes names, which may also be written with commas between them: `alibi,none`."""


@dataclass(frozen=True, kw_only=True)
class Option(Arg):
    """One argument of a command."""

    field: str
    kind: Any
    default: Any

    @property
    def name(self) -> str:
        """As it is written: prompt-file, train.micro_batch."""
        return self.field if "." in self.field else self.field.replace("_", "-")

    @property
    def plain(self) -> Any:
        """Its type, without None."""
        return Union[tuple(kind for kind in _alternatives(self.kind) if kind is not NoneType)]  # noqa: UP007

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types of its words; a last `...` for any number of them."""
        parts = get_args(self.plain)
        return {tuple: parts, list: (*parts, ...)}.get(get_origin(self.plain), (self.plain,))

    @property
    def count(self) -> int | None:
        """How many words it takes; None for any number."""
        return None if self.kinds[-1] is Ellipsis else len(self.kinds)

    @property
    def words(self) -> str:
        """What stands for all its words: X X, PATH ..."""
        return " ".join([self.shown] * self.count) if self.count else f"{self.shown} ..."

    @property
    def label(self) -> str:
        """What a sentence calls it."""
        return self.shown if self.positional else f"--{self.name}"

    @property
    def shown(self) -> str:
        """What stands for its value: N, PATH, a|b."""
        if self.metavar:
            return self.metavar
        if self.positional:
            return self.name.upper()
        one = self.kinds[0]
        return "|".join(map(str, get_args(one))) if get_origin(one) is Literal else SHOWN.get(one, "VALUE")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def options_from_dataclass(kind: type) -> list[Option]:
    """The fields of a command."""
    texts, hints = _field_texts(kind), get_type_hints(kind, include_extras=True)
    found = []
    for field in fields(kind):  # pyright: ignore[reportArgumentType]
        annotation, extra = hints[field.name], Arg()
        if get_origin(annotation) is Annotated:
            annotation, extra = get_args(annotation)
        own: dict[str, Any] = vars(extra) | {"help": extra.help or texts.get(field.name, "")}
        found.append(Option(field=field.name, kind=annotation, default=field.default, **own))
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


def options_from_config(settings: StrictConfig, prefix: str = "", *, leave: Sequence[str] = ()) -> list[Option]:
    """The fields of a config with their present values as defaults; groups inside it by dotted names, as in `leave`."""
    found = []
    for name, info in type(settings).model_fields.items():
        value = getattr(settings, name)
        group = any(
            isinstance(part, type) and issubclass(part, StrictConfig) for part in _alternatives(info.annotation)
        )
        if prefix + name in leave or (group and value is None):  # one that may be absent, as `AdaptiveConfig | None`
            continue
        if isinstance(value, StrictConfig):
            found += options_from_config(value, f"{prefix}{name}.", leave=leave)
        else:
            text = info.description or ""
            found.append(Option(field=prefix + name, kind=info.annotation, default=value, help=text))
    return found


def read_command(kind: type[Any], words: Sequence[str], more: Sequence[Option] = (), text: str = "") -> Any:
    """A command as its words say. What they give of `more` than its fields becomes its `settings`, by field."""
    own = [option for option in options_from_dataclass(kind) if option.field != "settings"]
    given = Parser(f"trainshort {kind.__name__.lower()}", [*own, *more], text or kind.__doc__ or "").parse(words)
    if more:
        given["settings"] = {option.field: given.pop(option.field) for option in more if option.field in given}
    return kind(**given)


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


@dataclass
class Parser:
    """Reads the words of one command."""

    prog: str
    options: list[Option]
    description: str

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """Values by field, of the options that the words give."""
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
        return values

    def _find(self, word: str) -> tuple[Option, bool, str | None]:
        """The option that a word names, by its full name or, where only one has it, by the last part of it."""
        typed, equals, given = word.removeprefix("--").partition("=")
        named = {_plain_name(one.name): one for one in self.options if not one.positional}
        for negated in (False, True):
            name = _plain_name(re.sub(r"(^|\.)no[-_]", r"\1", typed, count=1) if negated else typed)
            matches = [one for full, one in named.items() if full.endswith("." + name)]
            matches = [named[name]] if name in named else matches
            matches = [one for one in matches if one.plain is bool] if negated else matches
            if len(matches) > 1:
                raise self.error(f"'{typed}' could be {' or '.join(one.name for one in matches)}; write one of them.")
            if matches:
                return matches[0], negated, given if equals else None
        last_parts = [full.rpartition(".")[2] for full in named]
        suggestion = did_you_mean(_plain_name(typed), [*named, *last_parts])
        raise self.error(f"Unknown setting '{typed}'.{suggestion} See {self.prog} --help.")

    def _value(self, option: Option, given: str | None, left: list[str], *, negated: bool) -> Any:
        if option.plain is bool:
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
        name = option.label
        if words == ["None"] and NoneType in _alternatives(option.kind):
            return None
        if option.positional and words == [""] and option.plain is str:
            raise self.error(f"{name} is empty: {option.help}")
        if option.names or (option.count is None and option.kinds[0] in (int, float)):
            apart = [part.strip() for word in words for part in word.split(",") if part.strip()]
            if not apart:
                raise self.error(f"{name} names nothing, got '{' '.join(words)}': {option.help}")
            words = apart
        kinds = option.kinds if option.count else option.kinds[:1] * len(words)
        made = tuple(self._one(name, kind, word) for kind, word in zip(kinds, words, strict=True))
        return made if get_origin(option.plain) in (tuple, list) else made[0]

    def _one(self, name: str, kind: Any, word: str) -> Any:
        if get_origin(kind) is Literal:
            choices = {str(choice): choice for choice in get_args(kind)}
            if word not in choices:
                raise self.error(f"{name} is one of {', '.join(choices)}; got '{word}'.{did_you_mean(word, choices)}")
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
        if words:
            raise self.error(f"'{words[0]}' is one word too many. See {self.prog} --help.")
        for option in self.options:
            if option.default is REQUIRED and option.field not in values:
                raise self.error(f"{option.label} is missing: {option.help}")

    def error(self, message: str) -> UsageError:
        return UsageError(message, self.usage())

    def usage(self) -> str:
        places = [one for one in self.options if one.positional]
        shown = (one.words if one.default is REQUIRED else f"[{one.words}]" for one in places)
        return " ".join(["usage:", self.prog, *shown, "[options]"])

    def help(self) -> str:
        """Usage, what the command does, and every option with its one default."""
        width = min(shutil.get_terminal_size().columns, 110)
        groups: dict[str, list[tuple[str, str]]] = {}
        for one in self.options:
            group = "arguments" if one.positional else one.name.rpartition(".")[0] or "options"
            groups.setdefault(group, []).append((_format_option(one), _option_help(one)))
        groups.setdefault("options", []).append((f"{PLUGIN} FILE.py", "Methods, backends and more of your own."))
        tables = [f"{group}:\n{_table(rows, width)}" for group, rows in groups.items()]
        return "\n\n".join([self.usage(), _paragraphs(self.description, width), *tables]) + "\n"


def _is_option(word: str) -> bool:
    """`--steps` and `-x`, but neither `-` (standard input) nor `-3`."""
    return word.startswith("-") and word != "-" and not re.fullmatch(r"-\.?\d.*", word)


def _plain_name(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _format_option(option: Option) -> str:
    if option.positional:
        return option.shown
    if option.plain is bool:
        head, dot, tail = option.name.rpartition(".")
        return f"--{head}{dot}no-{tail}" if option.default is True else f"--{option.name}"
    return f"--{option.name} {option.words}"


def _option_help(option: Option) -> str:
    """The help text with the default, unless the text tells it or there is none."""
    default, text = option.default, option.help
    if option.plain is bool and default is True:
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
