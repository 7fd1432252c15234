"""Tests of the documentation: the examples run, and links, files and imports exist."""

import ast
import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trainshort
from trainshort.cli.main import run as command
from trainshort.config.position_config import methods
from trainshort.config.registries import backends
from trainshort.data.corpora import corpora
from trainshort.data.tokenizers.base import tokenizers
from trainshort.evaluate.analyses.base import analyses
from trainshort.model.positions import positions

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("*.md")), ROOT / "benchmarks" / "README.md"]
FILES_OF_THE_READER = {"sqrt_alibi.py"}
"""Files that a page names and a reader creates."""


def read_page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def code_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)


def make_tiny_run(folder: Path) -> None:
    """Create `runs/tiny` and `data/tiny` in the working directory."""
    lines = [f"on day {day} the owl and {day % 7} cats went to sea in a pea-green boat\n" for day in range(3000)]
    (folder / "text.txt").write_text("".join(lines))
    assert command(["prepare", "text.txt", "--tokenizer", "bytes", "--out", "data/tiny"]) == 0
    sizes = ["--layers", "1", "--width", "16", "--heads", "2", "--length", "16", "--batch", "4", "--steps", "2"]
    assert command(["train", "demo-alibi", "--data.folder", "data/tiny", "--out", "runs/tiny", "--quiet", *sizes]) == 0


def test_every_example_of_the_reference_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_tiny_run(tmp_path)
    tables = (positions, methods, backends, corpora, tokenizers, analyses)
    names_before = [set(table.names()) for table in tables]
    # Doctest would read the code fences as output.
    page = re.sub(r"^```.*$", "", read_page("reference.md"), flags=re.MULTILINE)
    try:
        examples = doctest.DocTestParser().get_doctest(page, {}, "reference.md", "docs/reference.md", 0)
        result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(examples)
    finally:
        new_names = [set(table.names()) - before for table, before in zip(tables, names_before, strict=True)]
        for table, names in zip(tables, new_names, strict=True):
            for name in names:
                table.remove(name)
    assert result.failed == 0
    assert result.attempted > 30
    assert [len(names) for names in new_names] == [1] * len(tables), "the page uses every decorator once"


def test_the_reference_names_every_public_name():
    page = read_page("reference.md")
    missing = [name for name in trainshort.__all__ if not re.search(rf"\b{name}\b", page)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_import_of_a_page_works(page):
    for block in code_blocks(page.read_text(encoding="utf-8"), "python"):
        code = "".join(example.source for example in doctest.DocTestParser().get_examples(block)) or block
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(ast.unparse(node), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_source_file_that_a_page_names_exists(page):
    files = [file for folder in ("trainshort", "tests") for file in (ROOT / folder).rglob("*.*")]
    paths = {f"/{file.relative_to(ROOT)}" for file in files}
    named = re.findall(r"`([\w/.-]+\.(?:py|c|h))`", page.read_text(encoding="utf-8"))
    named = [name for name in named if name not in FILES_OF_THE_READER]
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in paths)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in {heading_anchor(heading) for heading in headings}, f"{page.name}: {target}#{anchor}"


def heading_anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    letters = re.sub(r"[^\w\- ]", "", heading.lower())
    return letters.strip().replace(" ", "-")


def run_console_blocks(page: str, folder: Path) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for line in "".join(code_blocks(page, "console")).splitlines():
        done = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
def test_the_example_of_an_own_position_method_runs(tmp_path):
    page = read_page("positions.md")
    (code,) = code_blocks(page, "python")
    (tmp_path / "sqrt_alibi.py").write_text(code, encoding="utf-8")
    run_console_blocks(page, tmp_path)
    assert "sqrt-alibi" in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_first_run_of_the_training_page_runs(tmp_path):
    run_console_blocks(read_page("training.md"), tmp_path)
    assert (tmp_path / "report" / "index.html").exists()
