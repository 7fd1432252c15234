"""Which tasks of lm-evaluation-harness there can be, told from the text of its definitions in a second or two.

The harness itself parses its fourteen thousand definitions before it knows a name, which takes half a minute, and two
on a busy machine. A name that stands in no line that could name a task is none; of others it decides. No torch.
"""

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from trainshort.errors import InputError
from trainshort.registry import did_you_mean

_NAMED = re.compile(rb"^[\"']?(?:task|group)[\"']?[ \t]*:[ \t]*[\"']?([\w.-]+)", re.MULTILINE)
_NAMING = re.compile(
    rb"^[ \t]*(?:(?:-[ \t]*)?[\"']?(?:task|group|tag)[\"']?[ \t]*:|-|[\"'\w.-]+,?[ \t]*$).*$", re.MULTILINE
)
"""Lines that can hold a name: of a task, a group or a tag, or an item of a list."""
_WORD = re.compile(rb"[\w./()-]+")


def refuse_unknown(tasks: Sequence[str], include: Path | None) -> None:
    """Stop at a task that neither the user's folder nor the harness can have."""
    if find_spec("lm_eval") is None:
        return  # which is told when it is needed
    left, known = set(tasks), list[str]()
    for text in _definitions(include):
        left -= {word.decode(errors="replace") for line in _NAMING.findall(text) for word in _WORD.findall(line)}
        if not left:
            return
        known += [name.decode() for name in _NAMED.findall(text)]
    if unknown := next((name for name in tasks if name in left), None):
        raise InputError(unknown_task(unknown, known))


def unknown_task(name: str, known: Sequence[str]) -> str:
    return (
        f"Unknown task '{name}'.{did_you_mean(name, known)} `lm_eval ls tasks` names all; give your own by "
        "--include FOLDER."
    )


def _definitions(include: Path | None) -> Iterator[bytes]:
    """The user's own first, since they are few; with the templates that they include, which have no ending."""
    harness = find_spec("lm_eval")
    places = (harness.submodule_search_locations if harness else None) or []
    for folder in ([include] if include else []) + [Path(place) / "tasks" for place in places]:
        for path in sorted(folder.rglob("*")):
            if path.suffix in ("", ".yaml", ".yml") and path.is_file():
                yield path.read_bytes()
