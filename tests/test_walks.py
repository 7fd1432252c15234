"""The walks of docs/core.md, counted by a profiler: how many functions of the package one call goes through."""

import inspect
import io
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_paper import tiny_scale

import trainshort
from trainshort import alibi
from trainshort.attention import LinearBias, attend
from trainshort.attention.operator import unavailable
from trainshort.claims.collection import collect
from trainshort.config import ModelConfig
from trainshort.model import TransformerLM
from trainshort.recipes.experiments import choose
from trainshort.report.writing import write_report
from trainshort.reproduce.runner import reproduce
from trainshort.reproduce.tasks import assign

PACKAGE = str(Path(trainshort.__file__).parent)
INNER = re.compile(r"<(listcomp|dictcomp|setcomp|genexpr|lambda)>$")


def walk(work: Callable[[], object]) -> set[tuple[str, str]]:
    """File and name of every function that runs; comprehensions belong to the function they stand in."""
    found = set()

    def note(frame, event, _):
        code = frame.f_code
        runs = event == "call" and code.co_flags & inspect.CO_OPTIMIZED  # not the body of a module or a class
        if runs and code.co_filename.startswith(PACKAGE) and not INNER.search(code.co_qualname):
            found.add((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.skipif(unavailable(False) is not None, reason="counts the compiled path")
@pytest.mark.parametrize("mode", ["bounded", "full"])
def test_a_token(mode):
    model = TransformerLM(ModelConfig(vocabulary=256, layers=2, width=64, heads=4)).eval()
    stream = trainshort.stream(model, list(range(50)), tokens=20, mode=mode)
    for _ in range(4):  # the first ones still build what the others use
        next(stream)
    assert len(walk(lambda: next(stream))) <= 20


@pytest.mark.skipif(unavailable(False) is not None, reason="counts the compiled path")
def test_one_attention():
    """The second call of its kind: which engine is the best for it was found out by the first."""
    q, k, v = (torch.randn(1, 8, 300, 64) for _ in range(3))
    bias = LinearBias(alibi.slopes(8))

    def work() -> None:
        attend(q, k, v, bias=bias)

    work()
    found = walk(work)
    assert len(found) <= 14
    assert len({file for file, _ in found}) <= 4


@pytest.mark.skipif(unavailable(False) is not None, reason="counts the compiled path")
def test_a_model_of_table_5(tmp_path):
    """Trained, evaluated and reported. 35 files were aimed at; of at most 350 lines each they cannot hold it all. It
    must not grow."""
    scale, table = tiny_scale(tmp_path), choose(["table5"])[0]
    cells = tuple(cell for cell in table.cells if cell.variant and cell.variant.position == "alibi")
    one = replace(table, cells=tuple(cell for cell in cells if cell.variant and cell.variant.length == 512))

    def work() -> None:
        reproduce(assign([one], scale), tmp_path / "runs", jobs=1, console=Console(file=io.StringIO()))
        collection = collect([tmp_path / "runs"])
        collection.__dict__["scale"] = scale  # one for tests, which no registry knows
        write_report(collection, tmp_path / "report")

    assert len({file for file, _ in walk(work)}) <= 75
