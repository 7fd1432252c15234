"""The walks of docs/core.md, counted by a profiler: how many functions of the package one call goes through."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import trainshort
from trainshort import alibi
from trainshort.attention import LinearBias, attend
from trainshort.attention.operator import unavailable
from trainshort.config import ModelConfig
from trainshort.model import TransformerLM

PACKAGE = str(Path(trainshort.__file__).parent)
INNER = re.compile(r"<(listcomp|dictcomp|setcomp|genexpr|lambda)>$")


def walk(work: Callable[[], object]) -> set[tuple[str, str]]:
    """File and name of every function that runs; comprehensions belong to the function they stand in."""
    found = set()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not INNER.search(code.co_qualname):
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
