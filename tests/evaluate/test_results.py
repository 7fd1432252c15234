"""What is stored and what follows from it: sums in, divisions once, files that are read back or refused in words."""

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
from trainshort.evaluate.results import Evaluation, LengthScore, block_sums, interval, position_sums, summarize
from trainshort.utils.io import write_with_checksum


def evaluation(*rows: LengthScore, trained_at: int | None = 4) -> Evaluation:
    return Evaluation(
        target={"name": "m", "kind": "run", "weights": "w", "trained_at": trained_at},
        corpus={"name": "text", "split": "valid", "sha256": "s", "tokenizer": "bytes", "words": 5, "bytes": 20},
        protocol={"name": "non-overlapping", "stride": None, "slopes": None},
        provenance={"time": "2026-01-01T00:00:00+00:00"},
        rows=rows,
    )


def test_a_row_is_sums_and_counts_in_float64():
    losses = np.full(10, 16_777_216.0, dtype=np.float32)
    losses[1::2] = 1.0  # float32 would lose these ones beside the large numbers
    row = summarize(Passes(10, 4, 2), losses)
    assert row.nll == 5 * 16_777_216.0 + 5
    assert (row.tokens, row.passes, row.tokens_read) == (10, 4, 16)


def test_positions_are_those_inside_the_pass():
    losses = np.arange(10, dtype=np.float64)  # the loss is the target's number
    assert position_sums(Passes(10, 4, 2), losses) == (
        (0, 1, 1, 0.0),
        (1, 2, 1, 1.0),
        (2, 3, 4, 2.0 + 4 + 6 + 8),
        (3, 4, 4, 3.0 + 5 + 7 + 9),
    )


def test_a_pass_that_re_reads_scores_no_early_positions():
    row = summarize(Passes(100, 20, 2), np.ones(100, dtype=np.float32))
    counts = {first: count for first, _, count, _ in row.positions}
    assert counts[0] == counts[7] == 1, "only the first pass scores its beginning"
    assert sum(counts.values()) == 100


def test_blocks_cover_everything_once_and_are_the_same_for_all_lengths():
    losses = np.random.default_rng(0).random(5000)
    blocks = block_sums(losses)
    assert len(blocks) == 100
    assert sum(count for count, _ in blocks) == 5000
    assert sum(total for _, total in blocks) == pytest.approx(losses.sum())
    assert len(block_sums(losses[:100])) == 3, "stretches are not smaller than 32 tokens"


def test_perplexities_and_bits_are_divided_out_of_the_sums():
    row = LengthScore(length=4, stride=4, status="scored", tokens=10, nll=10 * math.log(8))
    one = evaluation(row)
    assert row.perplexity == pytest.approx(8)
    assert one.bits_per_byte(row) == pytest.approx(10 * 3 / 20)
    assert one.word_perplexity(row) == pytest.approx(8 ** (10 / 5))


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        row = summarize(Passes(3200, 3200, 3200), rng.exponential(2.0, 3200).astype(np.float32))
        low, high = interval(row) or (0, 0)
        hits += low <= 2.0 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_a_paired_interval_sees_a_small_difference_in_a_noisy_text():
    losses = np.random.default_rng(2).exponential(2.0, 3200).astype(np.float32)
    one = summarize(Passes(3200, 64, 64), losses)
    other = summarize(Passes(3200, 128, 128), losses - np.float32(0.01))
    low, high = interval(one, other) or (0, 0)
    assert low == pytest.approx(0.01, abs=1e-5)
    assert high == pytest.approx(0.01, abs=1e-5)
    alone = interval(one) or (0, 0)
    assert alone[1] - alone[0] > 0.05


def test_too_little_text_has_no_interval_and_other_texts_no_pairs():
    short = summarize(Passes(40, 40, 40), np.ones(40, dtype=np.float32))
    assert interval(short) is None
    long = summarize(Passes(6400, 64, 64), np.ones(6400, dtype=np.float32))
    longer = summarize(Passes(6500, 64, 64), np.ones(6500, dtype=np.float32))
    with pytest.raises(InputError, match="did not score the same text"):
        interval(long, longer)


def test_files_are_read_back_as_they_were(tmp_path):
    row = summarize(Passes(100, 16, 4), np.random.default_rng(0).random(100).astype(np.float32))
    missing = LengthScore(length=32, stride=32, status="out of memory", reason="2 GB were not enough")
    one = evaluation(row, missing)
    results.save(one, tmp_path / "eval" / "valid.json")
    assert results.load(tmp_path / "eval" / "valid.json") == one
    assert evaluations(tmp_path) == [one]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not readable JSON"),
        ("[]", "it holds a JSON list, and an object was expected"),
        ('{"format": 9}', "was changed after it was written"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(tmp_path, content: str, message: str):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        results.load(path)


def test_another_format_is_refused(tmp_path):
    write_with_checksum(tmp_path / "x.json", {"format": 9})
    with pytest.raises(InputError, match=f"of format {results.EVALUATION_FORMAT}"):
        results.load(tmp_path / "x.json")


def test_an_unknown_field_is_refused(tmp_path):
    path = tmp_path / "x.json"
    results.save(evaluation(), path)
    values = json.loads(path.read_text())
    write_with_checksum(path, {**values, "rowz": []})
    with pytest.raises(InputError, match=r"Unknown setting 'rowz'\. Did you mean 'rows'"):
        results.load(path)


def test_a_changed_number_is_refused(tmp_path):
    path = tmp_path / "x.json"
    results.save(evaluation(summarize(Passes(100, 16, 4), np.ones(100, dtype=np.float32))), path)
    results.load(path)
    path.write_text(path.read_text().replace('"nll": 100.0', '"nll": 90.0'))
    with pytest.raises(InputError, match=r"was changed after it was written.* Remove it and evaluate again\."):
        results.load(path)


def test_a_new_row_replaces_the_one_of_its_length():
    rows = [LengthScore(length=length, stride=length, status="scored", tokens=1, nll=1.0) for length in (8, 4)]
    one = evaluation().with_row(rows[0]).with_row(rows[1])
    assert [row.length for row in one.rows] == [4, 8]
    one = one.with_row(rows[0].replace(nll=2.0))
    assert [(row.length, row.nll) for row in one.rows] == [(4, 1.0), (8, 2.0)]


def test_results_cards_tables_and_pictures_are_read_without_torch():
    code = "import sys; from trainshort.evaluate import evidence, picture, results; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
