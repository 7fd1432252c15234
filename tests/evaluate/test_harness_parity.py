"""Our non-overlapping loss is that of lm-evaluation-harness's `loglikelihood_rolling` on the same text."""

from pathlib import Path

import numpy as np
import pytest
from helpers import prose, save_hugging_face

from trainshort.data.passes import Passes
from trainshort.evaluate.sweep import score
from trainshort.evaluate.targets import open_target
from trainshort.evaluate.text import open_text

LENGTH = 64


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_rolling_log_likelihood_agrees(tmp_path: Path, kind: str):
    """The harness reads its last block with as much context as fits, ours alone; so the text is a whole number of
    blocks, where both are the same."""
    from lm_eval.api.instance import Instance
    from lm_eval.models import huggingface as harness

    save_hugging_face(tmp_path / kind, kind)
    target = open_target(str(tmp_path / kind))
    text = prose(40)[: 5 * LENGTH]
    (tmp_path / "story.txt").write_text(text)
    tokens = open_text(target, (str(tmp_path / "story.txt"),)).tokens
    assert len(tokens) == 5 * LENGTH
    ours = np.concatenate(list(score(target, tokens, Passes(len(tokens), LENGTH, LENGTH)))).sum()

    model = harness.HFLM(str(tmp_path / kind), device="cpu", dtype="float32", max_length=LENGTH, batch_size=2)
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
    (theirs,) = model.loglikelihood_rolling([request], disable_tqdm=True)
    assert float(ours) == pytest.approx(-theirs, rel=1e-5)
