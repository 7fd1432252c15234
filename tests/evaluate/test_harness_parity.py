"""Test that losses without overlap equal `loglikelihood_rolling` of lm-evaluation-harness."""

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
def test_losses_equal_rolling_log_likelihood(tmp_path: Path, kind: str):
    """The text consists of complete windows. In an incomplete last window, the harness adds earlier context."""
    from lm_eval.api.instance import Instance
    from lm_eval.models import huggingface as harness

    save_hugging_face(tmp_path / kind, kind)
    target = open_target(str(tmp_path / kind))
    text = prose(40)[: 5 * LENGTH]
    (tmp_path / "story.txt").write_text(text)
    tokens = open_text(target, (str(tmp_path / "story.txt"),)).tokens
    assert len(tokens) == 5 * LENGTH
    losses = np.concatenate(list(score(target, tokens, Passes(len(tokens), LENGTH, LENGTH))))

    harness_model = harness.HFLM(str(tmp_path / kind), device="cpu", dtype="float32", max_length=LENGTH, batch_size=2)
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
    (log_likelihood,) = harness_model.loglikelihood_rolling([request], disable_tqdm=True)
    assert float(losses.sum()) == pytest.approx(-log_likelihood, rel=1e-5)
