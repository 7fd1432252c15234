"""The documents' code runs: public names with their examples, the walk with a method that is not in the package. And
what else they name is there: imports, files, pages."""

import ast
import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trainshort
from trainshort.analyze.lab import analyses
from trainshort.attention import backends
from trainshort.data.corpus import corpora
from trainshort.data.tokenizer import tokenizers
from trainshort.positions import positions
from trainshort.settings import methods

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_every_public_name_has_an_example_that_runs(tiny_run, tmp_path, monkeypatch):
    shutil.copytree(tiny_run, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    tables = (positions, methods, backends, corpora, tokenizers, analyses)
    before = [set(table.names()) for table in tables]
    try:
        # Without the code fences, which doctest would read as output.
        page = re.sub(r"^```.*$", "", text("api.md"), flags=re.MULTILINE)
        test = doctest.DocTestParser().get_doctest(page, {}, "api.md", "docs/api.md", 0)
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
        result = runner.run(test)
    finally:
        added = [set(table.names()) - names for table, names in zip(tables, before, strict=True)]
        for table, names in zip(tables, added, strict=True):
            for name in names:
                table.forget(name)
    assert result.failed == 0
    assert result.attempted > 30
    used = set(re.findall(r"trainshort\.(\w+)", page))
    assert set(trainshort.__all__) <= used, "every public name is used in an example"
    assert [len(names) for names in added] == [1] * len(tables), "and so is every decorator"
    for name in trainshort.__all__:
        assert getattr(trainshort, name) is not None


PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_import_of_a_page_works(page):
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE):
        code = "".join(one.source for one in doctest.DocTestParser().get_examples(block)) or block
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(ast.unparse(node), {})


THEIRS = {"sqrt_alibi.py"}
"""Files that a page names and a reader writes."""


def test_every_source_file_that_a_page_names_is_there():
    """`trainshort/passes.py`, `attention/sides.py` and `step.c` alike: by the end of its path."""
    there = {
        f"/{file.relative_to(ROOT)}"
        for room in ("trainshort", "tests", "benchmarks")
        for file in (ROOT / room).rglob("*.*")
    }
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"`([\w/.-]+\.(?:py|c|h))`", text) + re.findall(r"\btrainshort/[\w/]+\.(?:py|c|h)\b", text)
        gone = [name for name in named if name not in THEIRS and not any(file.endswith(f"/{name}") for file in there)]
        assert gone == [], f"{page.name} names files that are gone"


def test_the_core_is_eleven_files_that_are_there():
    files = re.findall(r"^\| \d+ \| `([^`]+)`", text("core.md"), flags=re.MULTILINE)
    assert len(files) == 11
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_the_glossary_is_in_order_and_says_each_word_once():
    words = re.findall(r"^\| ([^|]+) \|", text("glossary.md"), flags=re.MULTILINE)[1:]
    assert words == sorted(set(words), key=str.lower)


def test_links_between_pages_lead_somewhere():
    for page in [*DOCS.glob("*.md"), ROOT / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"


def run_as_written(page: str, folder: Path) -> None:
    """Every command of a page."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    blocks = re.findall(r"```console\n(.*?)```", page, flags=re.DOTALL)
    for command in "".join(blocks).splitlines():
        done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
def test_my_text_my_method_my_curve(tmp_path):
    page = text("own-method.md")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "sqrt_alibi.py").write_text(code, encoding="utf-8")
    run_as_written(page, tmp_path)
    report = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "sqrt-alibi" in report


@pytest.mark.slow
def test_the_first_hour_runs_as_written(tmp_path):
    page = text("first-hour.md")
    assert page.count("```console\n") == 1
    run_as_written(page, tmp_path)
    assert (tmp_path / "report" / "index.html").exists()
