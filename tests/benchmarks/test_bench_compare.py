"""Tests of the comparison of two benchmark results."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.compare import compare
from trainshort.utils.bench_results import (
    BENCH_FORMAT,
    BenchResult,
    Measure,
    Measurement,
    load_bench_result,
    save_bench_result,
)
from trainshort.utils.io import write_with_checksum

PROVENANCE = {
    "time": "2030-01-01T00:00:00+00:00",
    "machine": {"cpu": "a processor", "cores": 2, "system": "Linux"},
    "threads": 2,
}


def make_row(
    implementation: str, milliseconds: float, speed: float = 10.0, peak: float = 100.0, spread: float = 0.03
) -> Measurement:
    """Return a measurement at 1,024 tokens. The peak memory has no spread, because it is measured once."""
    return Measurement(
        case={"engine": implementation, "tokens": 1024},
        measured={
            "forward": Measure(value=milliseconds, unit="ms", spread=spread, better="lower"),
            "speed": Measure(value=speed, unit="tokens/s", spread=spread, better="higher"),
            "peak": Measure(value=peak, unit="MB", better="lower"),
        },
    )


def make_result(*rows: Measurement, **changes) -> BenchResult:
    """Return a finished result of the attention benchmark. `changes` replaces fields of the result."""
    values = {"made": PROVENANCE, "settings": {"attention": {"tolerance": 1e-6, "lengths": [1024]}}, "finished": True}
    return BenchResult(**{**values, **changes}, suites={"attention": rows})


def run_bench(*words: str) -> int:
    """Run `trainshort bench` and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    return int(caught.value.code or 0)


def test_only_changes_beyond_the_spreads_get_a_verdict():
    old = make_result(make_row("windowed", 10.0), make_row("plain", 20.0))
    new = make_result(make_row("windowed", 12.0, speed=13.0, peak=101.0), make_row("plain", 20.9, peak=90.0))
    comparison = compare(old, new)
    differences = {(difference.case, difference.name): difference for difference in comparison.differences}
    slower = differences["windowed, 1,024 tokens", "forward"]
    assert slower.verdict == "worse"
    assert slower.relative_change == pytest.approx(0.2)
    assert differences["windowed, 1,024 tokens", "speed"].verdict == "better"
    assert differences["windowed, 1,024 tokens", "peak"].verdict == ""
    # The change is 4.5 %, and the two spreads are 3 % each.
    assert differences["plain, 1,024 tokens", "forward"].verdict == ""
    assert differences["plain, 1,024 tokens", "peak"].verdict == "better"
    assert comparison.summary == "2 better, 1 worse by more than their spreads; 3 within them."
    assert compare(old, old).summary == "0 better, 0 worse by more than their spreads; 6 within them."


def test_cases_of_only_one_result_are_listed():
    old = make_result(make_row("squares", 1.0), make_row("plain", 2.0))
    new = make_result(make_row("windowed", 1.0), make_row("plain", 2.0))
    comparison = compare(old, new)
    assert comparison.only_old == ("attention: squares, 1,024 tokens",)
    assert comparison.only_new == ("attention: windowed, 1,024 tokens",)
    assert {difference.case for difference in comparison.differences} == {"plain, 1,024 tokens"}
    assert not comparison.warnings


def test_different_machine_or_setting_causes_a_warning():
    old = make_result(make_row("plain", 1.0))
    new = make_result(
        make_row("plain", 1.0),
        made={**PROVENANCE, "threads": 1},
        # Different lengths cause no warning, because they only choose the cases.
        settings={"attention": {"tolerance": 1e-4, "lengths": [1024, 4096]}},
        finished=False,
    )
    machine_warning, settings_warning, incomplete_warning = compare(old, new).warnings
    assert "a processor, 2 cores, 2 threads then, a processor, 2 cores, 1 thread now" in machine_warning
    assert "attention.tolerance 1e-06 then, 0.0001 now." in settings_warning
    assert "lengths" not in settings_warning
    assert "new result is incomplete" in incomplete_warning


def test_renamed_setting_of_older_results_causes_no_warning():
    old = make_result(make_row("plain", 1.0), settings={"attention": {"engines": []}})
    new = make_result(make_row("plain", 1.0), settings={"attention": {"backends": ["windowed"]}})
    assert not compare(old, new).warnings


def test_stored_results_are_compared_without_measuring(tmp_path, capsys):
    old_path = tmp_path / "old.json"
    new_path = tmp_path / "new.json"
    save_bench_result(make_result(make_row("windowed", 10.0)), old_path)
    save_bench_result(make_result(make_row("windowed", 15.0), made={**PROVENANCE, "threads": 1}), new_path)
    assert load_bench_result(old_path) == make_result(make_row("windowed", 10.0))

    words = ["--baseline", str(old_path), "--results", str(new_path)]
    assert run_bench(*words) == 0
    output = capsys.readouterr()
    assert "+50.0 %" in output.out
    assert "worse" in output.out
    assert "trainshort: Measured on different machines" in output.err

    # Options of a measurement are rejected.
    assert run_bench(*words, "--rounds", "3", "--quick") == 2
    assert "rounds, quick" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message", "update_checksum"),
    [
        (lambda text: text[:100], "JSON", False),
        (lambda text: '{"format": 1, "entries": {}}\n', "is not a result of `trainshort bench`", True),
        (lambda text: "[1]", "expected a JSON object", False),
        (lambda text: text.replace(f'"format": {BENCH_FORMAT}', '"format": 9'), "format 9", True),
        (lambda text: text.replace('"value": 10.0', '"value": "ten"', 1), "is a damaged benchmark result", True),
        (lambda text: text.replace('"value": 10.0', '"value": NaN', 1), "is a damaged benchmark result", True),
        (lambda text: text.replace('"value": 10.0', '"value": 9.0', 1), "hecksum", False),
    ],
)
def test_invalid_baseline_is_rejected(tmp_path, capsys, change, message, update_checksum):
    path = tmp_path / "old.json"
    save_bench_result(make_result(make_row("windowed", 10.0)), path)
    path.write_text(change(path.read_text()))
    if update_checksum:
        write_with_checksum(path, json.loads(path.read_text()))
    assert run_bench("--baseline", str(path)) == 2
    # The message may be wrapped into several lines.
    error_text = " ".join(capsys.readouterr().err.split())
    assert str(path) in error_text
    assert message in error_text


def test_missing_baseline_is_rejected(tmp_path, capsys):
    path = tmp_path / "old.json"
    assert run_bench("--baseline", str(path)) == 2
    assert "There is no benchmark result at" in capsys.readouterr().err
