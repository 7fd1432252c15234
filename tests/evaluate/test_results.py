"""Tests of stored evaluation results: sums, perplexities, confidence intervals and result files."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from helpers import evaluations

from trainshort.data.passes import Passes
from trainshort.errors import InputError
from trainshort.evaluate import results
from trainshort.evaluate.results import Evaluation, LengthScore, interval, sum_by_position, sum_by_span, summarize
from trainshort.utils.io import write_with_checksum


def make_evaluation(*rows: LengthScore, trained_at: int | None = 4) -> Evaluation:
    """Return an evaluation of a text with 5 words and 20 bytes."""
    return Evaluation(
        target={"name": "m", "kind": "run", "weights": "w", "trained_at": trained_at},
        corpus={"name": "text", "split": "valid", "sha256": "s", "tokenizer": "bytes", "words": 5, "bytes": 20},
        protocol={"name": "non-overlapping", "stride": None, "slopes": None},
        provenance={"time": "2026-01-01T00:00:00+00:00"},
        rows=rows,
    )


def test_losses_are_summed_in_float64():
    losses = np.full(10, 16_777_216.0, dtype=np.float32)
    losses[1::2] = 1.0  # A sum in float32 would lose these ones, because the other losses are large.
    row = summarize(Passes(10, 4, 2), losses)
    assert row.nll == 5 * 16_777_216.0 + 5
    assert (row.tokens, row.passes, row.tokens_read) == (10, 4, 16)


def test_losses_are_summed_by_position_in_the_pass():
    losses = np.arange(10, dtype=np.float64)  # The loss of each target equals its position in the text.
    assert sum_by_position(Passes(10, 4, 2), losses) == (
        (0, 1, 1, 0.0),
        (1, 2, 1, 1.0),
        (2, 3, 4, 2.0 + 4 + 6 + 8),
        (3, 4, 4, 3.0 + 5 + 7 + 9),
    )


def test_overlapping_passes_score_early_positions_once():
    row = summarize(Passes(100, 20, 2), np.ones(100, dtype=np.float32))
    counts = {first: count for first, _, count, _ in row.positions}
    assert counts[0] == counts[7] == 1, "only the first pass scores its first tokens"
    assert sum(counts.values()) == 100


def test_spans_cover_the_text_once():
    losses = np.random.default_rng(0).random(5000)
    spans = sum_by_span(losses)
    assert len(spans) == 100
    assert sum(count for count, _ in spans) == 5000
    assert sum(total for _, total in spans) == pytest.approx(losses.sum())
    assert len(sum_by_span(losses[:100])) == 3, "a span has at least 32 tokens"


def test_perplexity_and_bits_per_byte_are_computed_from_sums():
    row = LengthScore(length=4, stride=4, status="scored", tokens=10, nll=10 * math.log(8))
    evaluation = make_evaluation(row)
    assert row.perplexity == pytest.approx(8)
    assert evaluation.bits_per_byte(row) == pytest.approx(10 * 3 / 20)
    assert evaluation.word_perplexity(row) == pytest.approx(8 ** (10 / 5))


def test_interval_contains_the_true_mean_in_about_95_percent_of_cases():
    rng = np.random.default_rng(1)
    num_hits = 0
    for _ in range(200):
        losses = rng.exponential(2.0, 3200).astype(np.float32)
        low, high = interval(summarize(Passes(3200, 3200, 3200), losses)) or (0, 0)
        num_hits += low <= 2.0 <= high
    assert 0.88 <= num_hits / 200 <= 0.99


def test_interval_of_difference_is_narrow():
    losses = np.random.default_rng(2).exponential(2.0, 3200).astype(np.float32)
    row = summarize(Passes(3200, 64, 64), losses)
    slightly_better_row = summarize(Passes(3200, 128, 128), losses - np.float32(0.01))
    low, high = interval(row, slightly_better_row) or (0, 0)
    assert low == pytest.approx(0.01, abs=1e-5)
    assert high == pytest.approx(0.01, abs=1e-5)
    single_low, single_high = interval(row) or (0, 0)
    assert single_high - single_low > 0.05


def test_short_text_has_no_interval():
    row = summarize(Passes(40, 40, 40), np.ones(40, dtype=np.float32))
    assert interval(row) is None


def test_results_of_different_texts_cannot_be_compared():
    row = summarize(Passes(6400, 64, 64), np.ones(6400, dtype=np.float32))
    row_of_longer_text = summarize(Passes(6500, 64, 64), np.ones(6500, dtype=np.float32))
    with pytest.raises(InputError, match="same text"):
        interval(row, row_of_longer_text)


def test_saved_evaluation_can_be_loaded(tmp_path):
    row = summarize(Passes(100, 16, 4), np.random.default_rng(0).random(100).astype(np.float32))
    failed_row = LengthScore(length=32, stride=32, status="out of memory", reason="not enough memory")
    evaluation = make_evaluation(row, failed_row)
    results.save(evaluation, tmp_path / "eval" / "valid.json")
    assert results.load(tmp_path / "eval" / "valid.json") == evaluation
    assert evaluations(tmp_path) == [evaluation]


@pytest.mark.parametrize(
    ("content", "cause"),
    [("{", "invalid JSON"), ("[]", "expected a JSON object"), ('{"format": 9}', "Missing checksum")],
)
def test_invalid_file_is_rejected(tmp_path, content: str, cause: str):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(InputError, match=rf"{cause}.*Remove it and evaluate again\.") as caught:
        results.load(path)
    assert str(path) in str(caught.value)


def test_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="trainshort evaluate"):
        results.load(tmp_path / "x.json")


def test_other_format_version_is_rejected(tmp_path):
    write_with_checksum(tmp_path / "x.json", {"format": 9})
    with pytest.raises(InputError, match=f"format {results.EVALUATION_FORMAT}"):
        results.load(tmp_path / "x.json")


def test_unknown_field_is_rejected(tmp_path):
    path = tmp_path / "x.json"
    results.save(make_evaluation(), path)
    values = json.loads(path.read_text())
    write_with_checksum(path, {**values, "rowz": []})
    with pytest.raises(InputError, match=r"Unknown setting 'rowz'\. Did you mean 'rows'"):
        results.load(path)


def test_changed_number_is_detected(tmp_path):
    path = tmp_path / "x.json"
    results.save(make_evaluation(summarize(Passes(100, 16, 4), np.ones(100, dtype=np.float32))), path)
    results.load(path)
    path.write_text(path.read_text().replace('"nll": 100.0', '"nll": 90.0'))
    with pytest.raises(InputError, match=r"Checksum mismatch.* Remove it and evaluate again\."):
        results.load(path)


def test_new_row_replaces_row_of_same_length():
    rows = [LengthScore(length=length, stride=length, status="scored", tokens=1, nll=1.0) for length in (8, 4)]
    evaluation = make_evaluation().with_row(rows[0]).with_row(rows[1])
    assert [row.length for row in evaluation.rows] == [4, 8]
    evaluation = evaluation.with_row(rows[0].replace(nll=2.0))
    assert [(row.length, row.nll) for row in evaluation.rows] == [(4, 1.0), (8, 2.0)]


def test_results_are_read_without_torch():
    code = "import sys; from trainshort.evaluate import plot, results, significance; print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "False"
