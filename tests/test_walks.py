"""The walks of docs/core.md, counted by a profiler: how many functions of the package one call goes through."""

import pytest
import torch
from table5_walk import files, table5, walk

import trainshort
from trainshort import alibi
from trainshort.attention import LinearBias, attend
from trainshort.attention.operator import unavailable
from trainshort.config import ModelConfig
from trainshort.model import TransformerLM


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
    """The second call of its kind: which backend is the best for it was found out by the first."""
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
    """Trained and evaluated, then reported."""
    ran, reported = table5(tmp_path)
    assert len(files(ran)) <= 35
    assert len(files(ran, reported)) <= 52
