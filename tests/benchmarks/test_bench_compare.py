"""Two results side by side: a slowdown is marked, noise is not, and files that are none are told."""

import json

import pytest

from benchmarks.compare import compare
from trainshort.cli.main import main
from trainshort.utils.bench_results import (
    BENCH_FORMAT,
    BenchResult,
    Measure,
    Measurement,
    load_bench_result,
    save_bench_result,
)
from trainshort.utils.io import write_with_checksum

MADE = {
    "time": "2030-01-01T00:00:00+00:00",
    "machine": {"cpu": "a processor", "cores": 2, "system": "Linux"},
    "threads": 2,
}


def row(engine: str, ms: float, speed: float = 10.0, peak: float = 100.0, spread: float = 0.03) -> Measurement:
    return Measurement(
        case={"engine": engine, "tokens": 1024},
        measured={
            "forward": Measure(value=ms, unit="ms", spread=spread, better="lower"),
            "speed": Measure(value=speed, unit="tokens/s", spread=spread, better="higher"),
            "peak": Measure(value=peak, unit="MB", better="lower"),
        },
    )


def bench(*rows: Measurement, suite: str = "attention", **changes) -> BenchResult:
    values = {"made": MADE, "settings": {"attention": {"tolerance": 1e-6, "lengths": [1024]}}, "finished": True}
    return BenchResult(**{**values, **changes}, suites={suite: rows})


def test_a_slowdown_is_marked_and_noise_is_not():
    old = bench(row("windowed", 10.0), row("plain", 20.0))
    new = bench(row("windowed", 12.0, speed=13.0, peak=101.0), row("plain", 20.9, peak=90.0))
    found = {(one.case, one.name): one for one in compare(old, new).changes}
    slower = found["windowed, 1,024 tokens", "forward"]
    assert (slower.verdict, slower.relative) == ("worse", pytest.approx(0.2))
    assert found["windowed, 1,024 tokens", "speed"].verdict == "better"
    assert found["windowed, 1,024 tokens", "peak"].verdict == ""
    assert found["plain, 1,024 tokens", "forward"].verdict == ""  # 4.5 % apart, with spreads of 3 % each
    assert found["plain, 1,024 tokens", "peak"].verdict == "better"
    assert compare(old, new).summary == "2 better, 1 worse by more than their spreads; 3 within them."
    assert compare(old, old).summary == "0 better, 0 worse by more than their spreads; 6 within them."


def test_what_only_one_side_has_is_named():
    result = compare(bench(row("squares", 1.0), row("plain", 2.0)), bench(row("windowed", 1.0), row("plain", 2.0)))
    assert result.only_old == ("attention: squares, 1,024 tokens",)
    assert result.only_new == ("attention: windowed, 1,024 tokens",)
    assert {one.case for one in result.changes} == {"plain, 1,024 tokens"}
    assert not result.warnings


def test_another_machine_or_setting_warns():
    old = bench(row("plain", 1.0))
    new = bench(
        row("plain", 1.0),
        made={**MADE, "threads": 1},
        settings={"attention": {"tolerance": 1e-4, "lengths": [1024, 4096]}},
        finished=False,
    )
    assert compare(old, new).warnings == (
        "Measured on different machines: a processor, 2 cores, 2 threads then, a processor, 2 cores, 1 thread now; "
        "compare ratios only.",
        "Measured with other settings: attention.tolerance 1e-06 then, 0.0001 now.",
        "The new result is of a run that was stopped before its end.",
    )


def test_stored_files_are_compared_without_measuring(tmp_path, capsys):
    save_bench_result(bench(row("windowed", 10.0)), tmp_path / "old.json")
    save_bench_result(bench(row("windowed", 15.0), made={**MADE, "threads": 1}), tmp_path / "new.json")
    assert load_bench_result(tmp_path / "old.json") == bench(row("windowed", 10.0))
    words = ["bench", "--against", str(tmp_path / "old.json"), "--results", str(tmp_path / "new.json")]
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = capsys.readouterr()
    assert ended.value.code == 0
    assert "+50.0 %" in told.out
    assert "worse" in told.out
    assert "trainshort: Measured on different machines" in told.err
    with pytest.raises(SystemExit) as ended:
        main([*words, "--rounds", "3", "--quick"])
    assert ended.value.code == 2
    assert "measures nothing; leave out rounds, quick" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:100], "it is not readable JSON"),
        (lambda text: '{"format": 1, "entries": {}}\n', "is not a result of `trainshort bench`"),
        (lambda text: "[1]", "it holds a JSON list, and an object was expected"),
        (
            lambda text: text.replace(f'"format": {BENCH_FORMAT}', '"format": 9'),
            f"of format 9; this version reads {BENCH_FORMAT}",
        ),
        (lambda text: text.replace('"value": 10.0', '"value": "ten"', 1), "is a damaged benchmark result"),
        (lambda text: text.replace('"value": 10.0', '"value": NaN', 1), "is a damaged benchmark result"),
        (lambda text: text.replace('"value": 10.0', '"value": 9.0', 1), "was changed after it was written"),
        (None, "There is no benchmark result at"),
    ],
)
def test_a_file_that_is_none_is_told(tmp_path, capsys, change, message):
    path = tmp_path / "old.json"
    save_bench_result(bench(row("windowed", 10.0)), path)
    text = path.read_text()
    assert json.loads(text)["format"] == BENCH_FORMAT
    path.write_text(change(text)) if change else path.unlink()
    if change and "changed" not in message and path.read_text().endswith("}\n"):
        write_with_checksum(path, json.loads(path.read_text()))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--against", str(path)])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
