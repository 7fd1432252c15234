"""The budgets of the house, measured: how long files and functions are, what is annotated, what a word means."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "trainshort"
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE, LONGEST_FUNCTION = 350, 45
Function = ast.FunctionDef | ast.AsyncFunctionDef


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in FILES:
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))


def functions() -> Iterator[tuple[str, Function]]:
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield f"{name}:{node.lineno} {node.name}", node


def parameters(function: Function) -> Iterator[ast.arg]:
    given = function.args
    yield from (*given.posonlyargs, *given.args, *given.kwonlyargs)
    yield from (extra for extra in (given.vararg, given.kwarg) if extra)


def test_no_file_is_too_long():
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > LONGEST_FILE} == {}


def test_no_function_is_too_long():
    sizes = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in functions()}
    assert {name: size for name, size in sizes.items() if size > LONGEST_FUNCTION} == {}


def test_every_module_says_why_it_exists():
    assert [name for name, tree in trees() if tree.body and not ast.get_docstring(tree)] == []


def test_every_parameter_is_annotated():
    bare = [
        f"{name}({parameter.arg})"
        for name, node in functions()
        for parameter in parameters(node)
        if parameter.annotation is None and parameter.arg not in ("self", "cls")
    ]
    assert bare == []


def meanings() -> dict[str, set[str]]:
    """Every word among names of folders, files and classes, with the things it stands for. A class and the file it is
    in are one thing, and so are a command, the folder that does its work, and the suite that measures it."""
    found: dict[str, set[str]] = {}

    def note(word: str, thing: str) -> None:
        found.setdefault(word.lower().strip("_").replace("_", ""), set()).add(thing)

    for name, tree in trees():
        room, _, file = name.rpartition("/")
        word = file.removesuffix(".py")
        if word == "__init__":
            word = room.rpartition("/")[2] or "trainshort"
        if not word.startswith("__"):
            note(word, word if room in ("", "commands", "bench") or file == "__init__.py" else name)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                own = node.name.lower() == word.replace("_", "")
                note(node.name, (word if room in ("", "commands", "bench") else name) if own else f"{name} {node.name}")
    return found


def test_no_word_has_more_than_two_meanings():
    assert {word: things for word, things in meanings().items() if len(things) > 2} == {}


def test_no_model_or_tokenizer_is_loaded_without_refusing_its_code():
    """Left out, transformers asks at the terminal, and a "y" runs the folder's code."""
    loading = {
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(r"Auto\w+\.from_pretrained\(", line) and not line.startswith("    model = ")  # a docstring's
        if "trust_remote_code=False" not in line
    }
    assert loading == set()
