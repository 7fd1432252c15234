"""Parse the command line of a command, and write its help text.

A command is a dataclass. Each field is an option, and the docstring below the field is its help text:

    @dataclass(frozen=True)
    class Evaluate:
        target: Annotated[str, Arg(metavar="RUN", positional=True)]
        max_tokens: int | None = None
        \"\"\"Use only the first tokens of the text\"\"\"

A config, such as `RunConfig`, can add one option for each of its settings. This module does not import torch.
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
from trainshort.utils.plugins import PLUGIN_OPTION
from trainshort.utils.registry import did_you_mean

# The default of an option that the user must give.
REQUIRED = MISSING

# The placeholder of a value in usage and help texts, such as N in "--steps N".
TYPE_PLACEHOLDERS: dict[type, str] = {int: "N", float: "X", Path: "PATH", str: "TEXT"}

# Help texts are not wider than this number of characters, because long lines are hard to read.
MAX_HELP_WIDTH = 110

# The width of the first column in a help text, which shows the names of the options. A longer name gets its own line.
MAX_NAME_COLUMN_WIDTH = 26

# The second column, which shows the help texts, has at least this width, also in a very narrow terminal.
MIN_TEXT_COLUMN_WIDTH = 20


@dataclass(frozen=True, kw_only=True)
class Arg:
    """Extra information for a field of a command: `Annotated[str, Arg(metavar="RUN", positional=True)]`.

    Attributes:
        metavar: The placeholder of the value in help texts. The default depends on the type.
        positional: Whether the value is given without the name of the option.
        help: The help text. The default is the docstring below the field.
        comma_separated: Whether a value such as "alibi,none" stands for two values.
    """

    metavar: str = ""
    positional: bool = False
    help: str = ""
    comma_separated: bool = False


@dataclass(frozen=True, kw_only=True)
class Option(Arg):
    """One option or positional argument of a command.

    Attributes:
        field: The name of the field of the command, or the dotted name of a setting, such as "train.steps".
        type_hint: The type annotation of the field, such as `int | None`.
        default: The value if the user does not give the option, or `REQUIRED`.
    """

    field: str
    type_hint: Any
    default: Any

    @property
    def name(self) -> str:
        """Return the name without leading dashes, such as "prompt-file" or "train.micro_batch"."""
        is_setting = "." in self.field
        return self.field if is_setting else self.field.replace("_", "-")

    @property
    def label(self) -> str:
        """Return how error messages call the option: "--prompt-file", or "RUN" for a positional argument."""
        return self.placeholder if self.positional else f"--{self.name}"

    @property
    def allows_none(self) -> bool:
        """Return whether the value may be None, as in `int | None`."""
        return NoneType in _union_members(self.type_hint)

    @property
    def value_type(self) -> Any:
        """Return the type annotation without None: `int | None` becomes `int`."""
        members = [member for member in _union_members(self.type_hint) if member is not NoneType]
        return Union[tuple(members)]  # noqa: UP007

    @property
    def item_types(self) -> tuple[Any, ...]:
        """Return the types of the words that the option takes.

        Example:
            `int` becomes `(int,)`, `tuple[float, float]` becomes `(float, float)`, and `tuple[int, ...]` becomes
            `(int, ...)`. The last element `...` means that the option takes any number of words.
        """
        arguments = get_args(self.value_type)
        container = get_origin(self.value_type)
        if container is tuple:
            return arguments
        if container is list:
            return (*arguments, ...)
        return (self.value_type,)

    @property
    def value_count(self) -> int | None:
        """Return how many words the option takes, or None for any number of words."""
        takes_any_number = self.item_types[-1] is Ellipsis
        return None if takes_any_number else len(self.item_types)

    @property
    def placeholder(self) -> str:
        """Return the placeholder of one value in help texts, such as "N", "PATH" or "low|high"."""
        if self.metavar:
            return self.metavar
        if self.positional:
            return self.name.upper()
        first_type = self.item_types[0]
        if get_origin(first_type) is Literal:
            return "|".join(str(choice) for choice in get_args(first_type))
        return TYPE_PLACEHOLDERS.get(first_type, "VALUE")

    @property
    def placeholders(self) -> str:
        """Return the placeholders of all values: "X X" for two values, "PATH ..." for any number of values."""
        if self.value_count is None:
            return f"{self.placeholder} ..."
        return " ".join([self.placeholder] * self.value_count)


def _union_members(type_hint: Any) -> tuple[Any, ...]:
    """Return the types that a union consists of: `int | None` becomes `(int, NoneType)`, `int` becomes `(int,)`."""
    is_union = get_origin(type_hint) in (Union, UnionType)
    return get_args(type_hint) if is_union else (type_hint,)


def options_from_dataclass(command: type) -> list[Option]:
    """Return one option for each field of a command.

    Args:
        command: The dataclass of the command. The docstring below each field is the help text of the option.
    """
    help_texts = _field_docstrings(command)
    type_hints = get_type_hints(command, include_extras=True)
    options = []
    for field in fields(command):  # pyright: ignore[reportArgumentType]
        type_hint = type_hints[field.name]
        # A field such as `path: Annotated[Path, Arg(positional=True)]` has further properties of its option.
        arg = Arg()
        if get_origin(type_hint) is Annotated:
            type_hint, arg = get_args(type_hint)
        option = Option(
            field=field.name,
            type_hint=type_hint,
            default=field.default,
            metavar=arg.metavar,
            positional=arg.positional,
            help=arg.help or help_texts.get(field.name, ""),
            comma_separated=arg.comma_separated,
        )
        options.append(option)
    return options


def _field_docstrings(command: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass, by the name of the field.

    Python does not store these docstrings, so the source code is parsed. Fields of base classes are included.
    """
    docstrings: dict[str, str] = {}
    base_classes = command.__mro__[:-1]  # The last class is `object`.
    for base_class in reversed(base_classes):
        source = textwrap.dedent(inspect.getsource(base_class))
        class_body = ast.parse(source).body[0].body  # pyright: ignore[reportAttributeAccessIssue]
        for statement, next_statement in pairwise(class_body):
            # A field is a statement such as `steps: int = 3`. Its docstring is the expression in the next statement.
            if not isinstance(statement, ast.AnnAssign) or not isinstance(next_statement, ast.Expr):
                continue
            if isinstance(next_statement.value, ast.Constant):
                one_line = " ".join(str(next_statement.value.value).split())
                docstrings[statement.target.id] = one_line  # pyright: ignore[reportAttributeAccessIssue]
    return docstrings


def options_from_config(config: StrictConfig, prefix: str = "", *, exclude: Sequence[str] = ()) -> list[Option]:
    """Return one option for each setting of a config.

    Args:
        config: The config. Its values are the defaults of the options.
        prefix: Text before the names of the options, such as "train." for the settings of `RunConfig.train`.
        exclude: Settings that get no option, by their dotted names. A group such as "model" excludes its settings.
    """
    options = []
    for name, field_info in type(config).model_fields.items():
        value = getattr(config, name)
        if prefix + name in exclude:
            continue
        if isinstance(value, StrictConfig):
            options += options_from_config(value, f"{prefix}{name}.", exclude=exclude)
            continue
        if _is_config_type(field_info.annotation):
            continue  # An optional group without a value, such as `AdaptiveConfig | None`, has no options.
        option = Option(
            field=prefix + name,
            type_hint=field_info.annotation,
            default=value,
            help=field_info.description or "",
        )
        options.append(option)
    return options


def _is_config_type(type_hint: Any) -> bool:
    """Return whether a type annotation contains a config class, as `AdaptiveConfig | None` does."""
    classes = [member for member in _union_members(type_hint) if isinstance(member, type)]
    return any(issubclass(member_class, StrictConfig) for member_class in classes)


def read_command(
    command: type[Any], words: Sequence[str], extra_options: Sequence[Option] = (), description: str = ""
) -> Any:
    """Create a command from its command line.

    Args:
        command: The dataclass of the command.
        words: The command line after the name of the command.
        extra_options: Options besides the fields of the command. The values that the user gave are passed to the
            field `settings` of the command, as a dictionary by `Option.field`.
        description: The description in the help text. The default is the docstring of the command.

    Returns:
        An instance of `command`.

    Raises:
        UsageError: If the command line is invalid.
    """
    own_options = [option for option in options_from_dataclass(command) if option.field != "settings"]
    program = f"trainshort {command.__name__.lower()}"
    parser = Parser(program, [*own_options, *extra_options], description or command.__doc__ or "")
    values = parser.parse(words)
    if extra_options:
        settings = {}
        for option in extra_options:
            if option.field in values:
                settings[option.field] = values.pop(option.field)
        values["settings"] = settings
    return command(**values)


def check_minimum(minimum: int, **values: float | None) -> None:
    """Raise `InputError` for the first option whose value is smaller than a minimum.

    Args:
        minimum: The smallest allowed value.
        values: The values by the name of the field. None is always allowed.

    Example:
        >>> check_minimum(1, batch_tokens=0)
        Traceback (most recent call last):
        InputError: --batch-tokens must be at least 1, got 0.
    """
    for field, value in values.items():
        if value is not None and value < minimum:
            option_name = field.replace("_", "-")
            raise InputError(f"--{option_name} must be at least {minimum}, got {value}.")


class UsageError(InputError):
    """An invalid command line.

    Attributes:
        usage: The usage line, which is printed before the message.
    """

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message)
        self.usage = usage


@dataclass
class Parser:
    """Parse the command line of one command.

    Attributes:
        program: The name of the command in messages, such as "trainshort train".
        options: The options and positional arguments.
        description: The text that `--help` shows before the options.
    """

    program: str
    options: list[Option]
    description: str

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """Parse a command line.

        Args:
            words: The command line after the name of the command. `--help` prints the help text and exits.

        Returns:
            The values of the options that the user gave, by `Option.field`. Options that were not given are missing.

        Raises:
            UsageError: If the command line is invalid.
        """
        remaining_words = list(words)
        positional_words: list[str] = []
        values: dict[str, Any] = {}
        while remaining_words:
            word = remaining_words.pop(0)
            if word in ("-h", "--help"):
                print(self.help(), end="")
                raise SystemExit(0)
            if word == "--":
                # All words after "--" are positional, even if they start with a dash.
                positional_words += remaining_words
                break
            if not _is_option(word):
                positional_words.append(word)
                continue
            option, is_negated, inline_value = self._find_option(word)
            if option.value_type is bool:
                values[option.field] = self._parse_bool(option, inline_value, is_negated)
            else:
                option_words = self._take_option_words(option, inline_value, remaining_words)
                values[option.field] = self._convert_words(option, option_words)
        self._parse_positional(positional_words, values)
        self._check_required(values)
        return values

    def _find_option(self, word: str) -> tuple[Option, bool, str | None]:
        """Find the option that a word of the command line names.

        The word can contain the full name, such as "--train.steps". The last part of the name, "--steps", is enough
        if only one option ends with it. A prefix "no-" before the last part turns a boolean option off.

        Args:
            word: A word that starts with a dash, such as "--train.steps=3".

        Returns:
            Three values: the option, whether the word has the prefix "no-", and the text after the equals sign. The
            text is None if the word has no equals sign.

        Raises:
            UsageError: If no option or more than one option has this name.
        """
        typed_name, equals_sign, text_after_sign = word.removeprefix("--").partition("=")
        inline_value = text_after_sign if equals_sign else None

        matches = self._options_named(typed_name)
        is_negated = False
        if not matches:
            # "model.no-biases" becomes "model.biases".
            name_without_no = re.sub(r"(^|\.)no[-_]", r"\1", typed_name, count=1)
            matches = [option for option in self._options_named(name_without_no) if option.value_type is bool]
            is_negated = True

        if len(matches) > 1:
            full_names = " or ".join(f"--{option.name}" for option in matches)
            raise self.error(f"Ambiguous option '{typed_name}'. Write {full_names}.")
        if matches:
            return matches[0], is_negated, inline_value

        full_names = [_normalize_name(option.name) for option in self.options if not option.positional]
        last_parts = [name.rpartition(".")[2] for name in full_names]
        suggestion = did_you_mean(_normalize_name(typed_name), [*full_names, *last_parts])
        raise self.error(f"Unknown setting '{typed_name}'.{suggestion} See {self.program} --help.")

    def _options_named(self, name: str) -> list[Option]:
        """Return the option with this full name, or else all options whose name ends with a dot and this name.

        For example, "steps" stands for "train.steps". Several matches mean that the short name is ambiguous.
        """
        name = _normalize_name(name)
        suffix_matches = []
        for option in self.options:
            if option.positional:
                continue
            full_name = _normalize_name(option.name)
            if full_name == name:
                return [option]
            if full_name.endswith("." + name):
                suffix_matches.append(option)
        return suffix_matches

    def _parse_bool(self, option: Option, inline_value: str | None, is_negated: bool) -> bool:
        """Return the value of a boolean option.

        Args:
            option: The option, such as `--resume`.
            inline_value: The text after the equals sign, as in "--resume=false". None if there is no equals sign.
            is_negated: Whether the user typed the option with the prefix "no-", as in "--no-resume".

        Raises:
            UsageError: If `inline_value` is neither true nor false.
        """
        if inline_value not in (None, "true", "false", "True", "False"):
            raise self.error(f"Invalid {option.label}: expected true or false, got '{inline_value}'.")
        value = inline_value in (None, "true", "True")
        return not value if is_negated else value

    def _take_option_words(self, option: Option, inline_value: str | None, remaining_words: list[str]) -> list[str]:
        """Remove the values of an option from the remaining words of the command line, and return the values.

        Args:
            option: An option that is not boolean.
            inline_value: The text after "=", which is the first value, or None.
            remaining_words: The words after the option. The function removes the values from this list.
        """
        option_words = [] if inline_value is None else [inline_value]
        # `option.value_count` is the number of values that the option takes. None means any number of values.
        while remaining_words and not _is_option(remaining_words[0]):
            if len(option_words) == option.value_count:
                break
            option_words.append(remaining_words.pop(0))

        required_count = option.value_count or 1
        if len(option_words) < required_count:
            count_text = "a value" if required_count == 1 else f"{required_count} values"
            placeholders = " ".join([option.placeholder] * required_count)
            raise self.error(f"{option.label} requires {count_text}: {option.label} {placeholders}.")
        return option_words

    def _convert_words(self, option: Option, words: list[str]) -> Any:
        """Convert the words of an option or positional argument to its type.

        Args:
            option: The option.
            words: The words that the user typed. There is at least one word.

        Returns:
            One value, or a tuple of values if the option is a list or a tuple.
        """
        if words == ["None"] and option.allows_none:
            return None
        if option.positional and words == [""] and option.value_type is str:
            raise self.error(f"Invalid {option.label}: expected a value, got an empty argument.")

        is_number_list = option.value_count is None and option.item_types[0] in (int, float)
        if option.comma_separated or is_number_list:
            typed_text = " ".join(words)
            words = _split_at_commas(words)
            if not words:
                raise self.error(f"{option.label} requires at least one value, got '{typed_text}'.")

        if option.value_count is None:
            # With any number of words, all words have the same type.
            item_types = [option.item_types[0]] * len(words)
        else:
            item_types = option.item_types
        values = []
        for item_type, word in zip(item_types, words, strict=True):
            values.append(self._convert_word(option.label, item_type, word))
        is_sequence = get_origin(option.value_type) in (tuple, list)
        return tuple(values) if is_sequence else values[0]

    def _convert_word(self, label: str, item_type: Any, word: str) -> Any:
        """Convert one word to a type.

        Args:
            label: The name of the option for error messages.
            item_type: The type, such as `int`, `Path`, `Literal["low", "high"]` or a union of types.
            word: The word that the user typed.
        """
        if get_origin(item_type) is Literal:
            choices = {str(choice): choice for choice in get_args(item_type)}
            if word not in choices:
                suggestion = did_you_mean(word, choices)
                raise self.error(f"Invalid {label}: expected one of {', '.join(choices)}, got '{word}'.{suggestion}")
            return choices[word]
        if item_type is Path and not word:
            raise self.error(f"Invalid {label}: expected a path, got an empty argument.")
        # The word is converted to the first type of the union that accepts the word.
        for member_type in _union_members(item_type):
            if member_type not in TYPE_PLACEHOLDERS:
                return word  # The config validates settings of other types.
            try:
                return member_type(word)
            except ValueError:
                continue
        expected = {int: "an integer", float: "a number"}.get(item_type, "another value")
        raise self.error(f"Invalid {label}: expected {expected}, got '{word}'.")

    def _parse_positional(self, words: list[str], values: dict[str, Any]) -> None:
        """Assign the words that belong to no option to the positional arguments.

        Args:
            words: The words in the order of the command line.
            values: The parsed values by `Option.field`. The function adds the positional arguments.

        Raises:
            UsageError: If there are more words than positional arguments, or a word has the wrong type.
        """
        remaining_words = words
        for option in self.options:
            if not option.positional:
                continue
            # An argument with any number of values takes all remaining words. Every other argument takes one word.
            word_count = len(remaining_words) if option.value_count is None else 1
            argument_words = remaining_words[:word_count]
            remaining_words = remaining_words[word_count:]
            if argument_words:
                values[option.field] = self._convert_words(option, argument_words)
        if remaining_words:
            raise self.error(f"Unexpected argument '{remaining_words[0]}'. See {self.program} --help.")

    def _check_required(self, values: dict[str, Any]) -> None:
        """Raise `UsageError` if a required option has no value."""
        for option in self.options:
            if option.default is REQUIRED and option.field not in values:
                help_text = option.help.removesuffix(".")
                raise self.error(f"{option.label} is required: {help_text}.")

    def error(self, message: str) -> UsageError:
        """Return an exception with this message and the usage line of the command."""
        return UsageError(message, self.usage())

    def usage(self) -> str:
        """Return the usage line, such as "usage: trainshort generate RUN [PROMPT ...] [options]"."""
        parts = ["usage:", self.program]
        for option in self.options:
            if not option.positional:
                continue
            is_required = option.default is REQUIRED
            parts.append(option.placeholders if is_required else f"[{option.placeholders}]")
        parts.append("[options]")
        return " ".join(parts)

    def help(self) -> str:
        """Return the help text: the usage line, the description, and a table of all options with their defaults."""
        width = min(shutil.get_terminal_size().columns, MAX_HELP_WIDTH)
        # Rows of option and help text, by the heading of the table.
        tables: dict[str, list[tuple[str, str]]] = {}
        for option in self.options:
            if option.positional:
                heading = "arguments"
            else:
                # Settings are grouped by the part before the last dot, such as "train".
                heading = option.name.rpartition(".")[0] or "options"
            tables.setdefault(heading, []).append((_format_option(option), _option_help(option)))
        plugin_row = (f"{PLUGIN_OPTION} FILE.py", "Load position methods, backends and more from this Python file")
        tables.setdefault("options", []).append(plugin_row)

        sections = [self.usage(), _wrap_paragraphs(self.description, width)]
        sections += [f"{heading}:\n{_format_table(rows, width)}" for heading, rows in tables.items()]
        return "\n\n".join(sections) + "\n"


def _is_option(word: str) -> bool:
    """Return whether a word names an option. A single dash (standard input) and negative numbers are values."""
    is_negative_number = re.fullmatch(r"-\.?\d.*", word) is not None
    return word.startswith("-") and word != "-" and not is_negative_number


def _normalize_name(name: str) -> str:
    """Return the name of an option without leading dashes and with underscores, so that names can be compared."""
    return name.lstrip("-").replace("-", "_")


def _split_at_commas(words: list[str]) -> list[str]:
    """Split words at commas and drop empty parts: ["a,b", "c"] becomes ["a", "b", "c"]."""
    parts = []
    for word in words:
        parts += [part.strip() for part in word.split(",")]
    return [part for part in parts if part]


def _format_option(option: Option) -> str:
    """Return the option as the help text shows it, such as "--steps N". A boolean that is on is shown as "--no-..."."""
    if option.positional:
        return option.placeholder
    if option.value_type is not bool:
        return f"--{option.name} {option.placeholders}"
    if option.default is True:
        # "model.biases" becomes "--model.no-biases".
        group, dot, last_part = option.name.rpartition(".")
        return f"--{group}{dot}no-{last_part}"
    return f"--{option.name}"


def _option_help(option: Option) -> str:
    """Return the help text of an option, followed by the default value.

    The default value is left out if the option has none, or if the help text already states the default.
    """
    text = option.help.removesuffix(".")
    default = option.default
    if option.value_type is bool:
        return f"Turn off: {text}" if default is True else text
    has_default = default is not REQUIRED and default not in (None, (), "")
    states_default = "default:" in text.lower()
    if not has_default or states_default:
        return text
    if isinstance(default, tuple | list):
        default_text = " ".join(str(value) for value in default)
    else:
        default_text = str(default)
    return f"{text} (default: {default_text})"


def _format_table(rows: list[tuple[str, str]], width: int) -> str:
    """Format the options of a help text in two columns.

    Args:
        rows: Pairs of the option and its help text.
        width: The number of characters in a line.
    """
    longest_name = max(len(name) for name, _ in rows)
    # There are two spaces before a name, and at least two spaces after it.
    name_column_width = min(MAX_NAME_COLUMN_WIDTH, longest_name + 4)
    text_column_width = max(MIN_TEXT_COLUMN_WIDTH, width - name_column_width)
    indent = " " * name_column_width
    lines = []
    for name, text in rows:
        text_lines = textwrap.wrap(text, text_column_width) or [""]
        fits_into_column = len(name) + 4 <= name_column_width
        if fits_into_column:
            padded_name = f"  {name}".ljust(name_column_width)
            first_line = text_lines.pop(0)
            lines.append(f"{padded_name}{first_line}".rstrip())
        else:
            lines.append(f"  {name}")  # The help text starts in the next line.
        lines += [indent + line for line in text_lines]
    return "\n".join(lines)


def _wrap_paragraphs(text: str, width: int) -> str:
    """Wrap the paragraphs of a docstring. Paragraphs with indented lines, such as examples, are not changed."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    wrapped = []
    for paragraph in paragraphs:
        has_indented_lines = "\n  " in paragraph
        wrapped.append(paragraph if has_indented_lines else textwrap.fill(paragraph, width))
    return "\n\n".join(wrapped)
