"""Tests of `trainshort bench` with sizes that take seconds: stored results, plug-ins and invalid options."""

import json
import re
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_run
from safetensors.torch import load_file, save_file

from benchmarks import inputs, peers
from benchmarks.__main__ import Bench, main
from benchmarks.run import Progress
from benchmarks.suites import FULL_PLANS, QUICK_PLANS, AttentionPlan, DecodePlan, choose_plans
from trainshort.attention.call import TOLERANCE
from trainshort.config.run_config import load_config
from trainshort.data.dataset import PreparedDataset, open_dataset
from trainshort.errors import InputError
from trainshort.train.checkpoint import load_model
from trainshort.utils import plugins
from trainshort.utils.bench_results import load_bench_result, median_of
from trainshort.utils.timing import run_in_subprocess, time_interleaved

PLUGIN_FOLDER = Path(__file__).parents[1] / "plugins"


def run_bench(*words: str) -> None:
    """Run `trainshort bench` and check that it succeeds."""
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    assert caught.value.code == 0


def run_failing_bench(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run `trainshort bench`, check that it rejects its arguments, and return the error message as one line."""
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    assert caught.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def open_run_dataset(run: Path) -> PreparedDataset:
    """Return the dataset that a run was trained on."""
    config = load_config(run / "config.json")
    return open_dataset(Path(config.data.folder or ""))


@pytest.fixture
def _unload_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove everything that plug-ins have registered during the test."""
    monkeypatch.setenv(plugins.PLUGIN_ENV_VAR, "")
    monkeypatch.setattr(plugins, "_loaded", {})
    yield
    for plugin in plugins._loaded.values():
        for registry, name in plugin.entries:
            registry.remove(name)


def test_attention_result_contains_its_origin(tmp_path, capsys):
    out = tmp_path / "deep" / "a.json"
    words = "attention --lengths 64 128 --backends windowed windowed-torch --rounds 2 --memory longest --tolerance 1e-5"
    run_bench(*words.split(), "--out", str(out))

    stored = json.loads(out.read_text())
    assert stored["format"] == 2
    assert stored["finished"]
    assert stored["settings"]["dtype"] == "float32"
    assert stored["settings"]["attention"]["tolerance"] == 1e-5
    provenance = stored["made"]
    assert {"cpu", "cores", "memory", "matmul_rate", "read_rate"} <= provenance["machine"].keys()
    assert provenance["machine"]["matmul_rate"] > 1e8
    assert provenance["machine"]["read_rate"] > 1e8
    assert provenance["threads"] == torch.get_num_threads()
    assert {"trainshort", "torch", "python", "transformers", "x-transformers"} <= provenance["versions"].keys()

    rows = load_bench_result(out).suites["attention"]
    cases = [(row.case["engine"], row.case["tokens"]) for row in rows]
    names = ("plain", "windowed", "windowed-torch")
    assert cases == [(name, tokens) for tokens in (64, 128) for name in names]
    for row in rows:
        assert len(row.seconds["forward"]) == 2
        assert row.measured["forward"].value == pytest.approx(1e3 * np.median(row.seconds["forward"]))
        assert 0 < row.measured["error"].value < 1e-5
        has_peak = "peak" in row.measured
        assert has_peak == (row.case["tokens"] == 128)

    output = capsys.readouterr()
    assert f"Results: {out}" in output.out
    assert "windowed" in output.out
    assert "attention 2/2: attention at 128 tokens" in output.err
    assert "memory of windowed, 2 of 3" in output.err


@pytest.mark.usefixtures("_unload_plugins")
def test_any_attention_backend_can_be_measured(tmp_path, capsys):
    # The plug-in registers the backend "echo", which supports at most 99 keys.
    plugin = PLUGIN_FOLDER / "one_of_each.py"
    out = tmp_path / "a.json"
    words = "attention --lengths 64 128 --backends sdpa echo flex compiled --rounds 1 --memory none"
    run_bench(*words.split(), "--out", str(out), "--plugin", str(plugin))
    # The subprocess that measures the memory loads the plug-in as well.
    task = {"source": "normal", "length": 64, "name": "echo", "tolerance": 0.0, "causal": True}
    assert run_in_subprocess("benchmarks.attention", **task)["peak"] > 0

    rows = load_bench_result(out).suites["attention"]
    names_at_64 = [row.case["engine"] for row in rows if row.case["tokens"] == 64]
    names_at_128 = [row.case["engine"] for row in rows if row.case["tokens"] == 128]
    assert names_at_64 == ["plain", "sdpa", "echo", "compiled"]
    assert names_at_128 == ["plain", "sdpa", "compiled"]
    assert all(row.measured["error"].value < 1e-5 for row in rows)
    messages = capsys.readouterr().err
    assert "without echo: " in messages
    assert "without flex: " in messages


@pytest.mark.usefixtures("_unload_plugins")
def test_position_method_of_a_plugin_can_be_measured(tmp_path):
    plugin = PLUGIN_FOLDER / "kerple_log.py"
    out = tmp_path / "result.json"
    words = "training evaluate --quick --methods kerple-log --preset tiny --lengths 64 --memory none --rounds 1"
    run_bench(*words.split(), "--out", str(out), "--plugin", str(plugin))
    suites = load_bench_result(out).suites
    for suite in ("training", "evaluate"):
        assert "kerple-log" in {row.case["model"] for row in suites[suite]}


def test_measuring_only_the_work_times_nothing(tmp_path):
    out = tmp_path / "w.json"
    run_bench("attention", "--lengths", "1024", "--measure", "work", "--out", str(out))
    (row,) = load_bench_result(out).suites["attention"]
    assert not row.seconds
    assert 0 < row.measured["work needed"].value <= row.measured["work"].value <= 100


# Memory is measured in four subprocesses, which take half a minute to start.
@pytest.mark.parametrize("memory", ["none", pytest.param("all", marks=pytest.mark.slow)])
def test_patched_mpt_is_compared_with_the_original(memory, tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "p.json"
    words = "patch --quick --preset tiny --lengths 64 --rounds 2 --memory"
    run_bench(*words.split(), memory, "--out", str(out))
    rows = load_bench_result(out).suites["patch"]
    assert [row.case["model"] for row in rows] == ["mpt", "patched", "without attention"]
    mpt, patched, _ = rows
    assert patched.measured["same greedy tokens"].value == 32
    for work in ("forward", "step"):
        assert all(len(row.seconds[work]) == 2 for row in rows)
        ratios = [before / after for before, after in zip(mpt.seconds[work], patched.seconds[work], strict=True)]
        assert patched.measured[f"{work} speed to mpt"].value == pytest.approx(statistics.median(ratios))
        if memory == "none":
            assert f"{work} peak" not in patched.measured
        else:
            peak_ratio = patched.measured[f"{work} peak"].value / mpt.measured[f"{work} peak"].value
            assert patched.measured[f"{work} peak to mpt"].value == pytest.approx(peak_ratio)


def test_speed_ratios_agree_with_the_stored_times(tmp_path):
    out = tmp_path / "t.json"
    words = "training evaluate --quick --preset tiny --lengths 32 64 --rounds 1 --memory none --out"
    run_bench(*words.split(), str(out))
    suites = load_bench_result(out).suites

    training_rows = {(row.case["model"], row.case["tokens"]): row for row in suites["training"]}
    for length in (32, 64):
        alibi = training_rows["alibi", length]
        alibi_seconds = alibi.seconds["step"][0]
        none_seconds = training_rows["none", length].seconds["step"][0]
        assert alibi.measured["speed to none"].value == pytest.approx(none_seconds / alibi_seconds)
        assert alibi.measured["speed"].value == pytest.approx(2048 / alibi_seconds)

    short, long = (row for row in suites["evaluate"] if row.case["model"] == "alibi")
    percentage = 100 * short.seconds["reading"][0] / long.seconds["reading"][0]
    assert long.measured["of 32"].value == pytest.approx(percentage)
    assert short.measured["of 32"].value == 100


def test_decode_parts_are_measured(tmp_path):
    out = tmp_path / "d.json"
    words = "decode --preset tiny --contexts 64 1024 --parts context weights endless --tokens 200 --rounds 2 --out"
    run_bench(*words.split(), str(out))
    rows = load_bench_result(out).suites["decode"]

    context_rows = {(row.case["cache"], row.case["context"]): row for row in rows if row.case["part"] == "context"}
    assert set(context_rows) == {("full", 64), ("full", 1024), ("bounded", 64), ("bounded", 1024)}
    full = context_rows["full", 1024]
    # One round generates 16 tokens.
    assert full.measured["time per token"].value == pytest.approx(1e3 * np.mean(full.seconds["turns"]) / 16)
    # Keys and values of 2 layers, 1,024 tokens of width 64, 4 bytes each. The unit is MB (2**20 bytes).
    assert full.measured["cache"].value == pytest.approx(2 * 2 * 1024 * 64 * 4 / 2**20)
    assert context_rows["bounded", 1024].measured["cache to full"].value < 90
    assert "error certificate" in context_rows["bounded", 1024].note

    assert [row.case["cache"] for row in rows if row.case["part"] == "weights"] == ["full", "bounded"]
    (endless,) = (row for row in rows if row.case["part"] == "endless")
    assert endless.measured["certificate"].value <= 1e-6
    assert len(endless.seconds["turns"]) == 10


def test_greedy_tokens_equal_those_of_mpt():
    pytest.importorskip("transformers")
    from benchmarks.decode import make_model

    mpt, model = peers.make_model_pair(make_model("tiny"), 200)
    generate = partial(peers.generate_with_bounded_cache, model, 1e-6)
    assert peers.count_same_greedy_tokens(mpt, generate, 100) == peers.GREEDY_TOKENS
    # With other weights, the model generates other tokens.
    with torch.no_grad():
        model.vocabulary.embedding.weight.mul_(-1)
    assert peers.count_same_greedy_tokens(mpt, generate, 100) < peers.GREEDY_TOKENS


def test_tokenizers_are_measured(tmp_path):
    out = tmp_path / "p.json"
    run_bench("prepare", "--quick", "--rounds", "1", "--out", str(out))
    rows = load_bench_result(out).suites["prepare"]
    assert {row.case["tokenizer"] for row in rows} == {"bpe 2048", "words", "bytes"}
    assert all(row.measured["speed"].value > 0 for row in rows)


def test_recorded_inputs_equal_the_computation_of_the_model(tmp_path):
    run = make_run(tmp_path)
    text = open_run_dataset(run).split("valid")
    length = len(text) + 50  # The text is repeated.
    recorded_path = tmp_path / "r.safetensors"
    target, layer_index = inputs.select_layer(run, 0)
    description = inputs.record_inputs(target, layer_index, length, recorded_path)
    assert (description["layer"], description["heads"], description["dim"]) == (0, 4, 8)

    model = load_model(run)
    tokens = torch.from_numpy(np.concatenate([text, text])[:length].astype(np.int64))[None]
    with torch.no_grad():
        block = model.layers[0]
        qkv = block.attention.qkv(block.attention_norm(model.vocabulary.embed(tokens)))
    # (batch, length, 3 * 4 heads * 8) -> three tensors of (batch, 4 heads, length, 8)
    expected = qkv.unflatten(-1, (12, 8)).transpose(1, 2).split(4, dim=1)
    recorded = load_file(recorded_path)
    for name, expected_tensor in zip(("q", "k", "v"), expected, strict=True):
        torch.testing.assert_close(recorded[name], expected_tensor, atol=1e-5, rtol=1e-5)


def test_attention_is_measured_with_inputs_of_a_run(tmp_path):
    run = make_run(tmp_path)
    out = tmp_path / "a.json"
    words = "attention --lengths 64 --backends windowed --rounds 1 --memory none"
    run_bench(*words.split(), "--inputs", str(run), "--out", str(out))
    result = load_bench_result(out)
    # The model has two layers. The middle one has the index 1.
    assert result.settings["attention"]["recorded"]["layer"] == 1
    assert {row.case["inputs"] for row in result.suites["attention"]} == {"recorded"}


@pytest.mark.parametrize("position", ["alibi", "fox"])
def test_bounded_cache_of_a_trained_run_is_measured(position, tmp_path):
    run = make_run(tmp_path, position=position)
    dataset = open_run_dataset(run)
    # Splits that are shorter than the context are read to their end.
    expected_cases = set()
    for split in dataset.meta.splits:
        for context in (512, 100_000):
            expected_cases.add((split, min(context, len(dataset.split(split)))))

    shares = {}
    for tolerance in ("0", "0.01"):
        out = tmp_path / f"{tolerance}.json"
        words = "decode --parts trained --contexts 512 100000"
        run_bench(*words.split(), "--run", str(run), "--tolerance", tolerance, "--out", str(out))
        rows = load_bench_result(out).suites["decode"]
        assert {(row.case["split"], row.case["context"]) for row in rows} == expected_cases
        assert all(row.measured["certificate"].value <= float(tolerance) for row in rows)
        shares[tolerance] = [row.measured["keys kept"].value for row in rows]
    assert set(shares["0"]) == {100}
    assert all(share < 100 for share in shares["0.01"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("atention", r"Unknown suite 'atention'\. Did you mean 'attention'\? Known: attention, training"),
        ("decode,attentoin", r"Unknown suite 'attentoin'"),
        ("decode --lengths 64", r"--lengths .*attention, training, evaluate and patch.* only decode was chosen"),
        ("attention training --tokens 5", r"--tokens .*decode.* only attention and training was chosen"),
        ("attention --rounds 0", r"--rounds must be at least 1, got 0"),
        ("attention --tolerance 1", r"--tolerance must be .*less than 1"),
        ("attention --backends window", r"'window' of --backends.* Did you mean 'windowed'\?.* x-transformers, .*sdpa"),
        ("attention --memory some", r"'some' of --memory"),
        ("attention --measure wrok", r"'wrok' of --measure\. Did you mean 'work'"),
        ("attention --measure work --sides both", r"--measure work requires causal attention"),
        ("attention --layer 1", r"--layer .*--inputs RUN"),
        ("attention --inputs nowhere", r"Invalid --inputs: nowhere does not exist"),
        ("attention --baseline nowhere.json", r"There is no benchmark result at nowhere\.json"),
        ("attention --quick --out /proc/foo/a.json", r"/proc/foo"),
        ("decode --parts trained", r"--parts trained .*--run RUN"),
        ("decode --parts contexts", r"'contexts' of --parts\. Did you mean 'context'"),
        ("decode --run nowhere", r"'?nowhere'?"),
        ("evaluate --lengths 64 100", r"--lengths: .*evaluate.* must divide the longest length"),
        ("evaluate --run nowhere", r"'?nowhere'?"),
        ("training --preset smal", r"Unknown preset 'smal'\. Did you mean 'small'"),
        ("training --methods alibbi", r"Unknown position method 'alibbi'\. Did you mean 'alibi'"),
        ("training --lengths 128,long", r"Invalid --lengths: expected an integer, got 'long'"),
        ("prepare --vocabularies 3", r"--vocabularies must be at least 257, got 3"),
    ],
)
def test_invalid_option_is_rejected(words, message, capsys):
    assert re.search(message, run_failing_bench(capsys, *words.split()))


def test_invalid_input_file_is_rejected(tmp_path, capsys):
    short = tmp_path / "short.safetensors"
    save_file({name: torch.randn(1, 2, 30, 8) for name in ("q", "k", "v")}, short)
    truncated = tmp_path / "truncated.safetensors"
    truncated.write_bytes(short.read_bytes()[:40])
    error = run_failing_bench(capsys, "attention", "--lengths", "31", "--inputs", str(short))
    assert re.search(r"holds 30 tokens, but 31 are required\..*--lengths", error)
    error = run_failing_bench(capsys, "attention", "--lengths", "31", "--inputs", str(truncated))
    assert "truncated.safetensors is not a valid safetensors file" in error


def test_unsuitable_run_is_rejected(tmp_path, capsys):
    sinusoidal_run = make_run(tmp_path, "other", "sinusoidal")
    alibi_run = make_run(tmp_path)
    error = run_failing_bench(capsys, "attention", "--inputs", str(sinusoidal_run))
    assert "the run has sinusoidal positions" in error
    error = run_failing_bench(capsys, "attention", "--inputs", str(alibi_run), "--layer", "99")
    assert re.search(r"--layer 99 is not in .*, whose layers are 0 to 1", error)


def test_existing_result_is_not_overwritten(tmp_path, capsys):
    path = tmp_path / "taken.json"
    path.write_text("{}")
    error = run_failing_bench(capsys, "attention", "--out", str(path))
    assert "taken.json already exists" in error
    assert path.read_text() == "{}"


def test_options_change_only_the_plans_that_have_them():
    options = {"rounds": 7, "contexts": (5,), "lengths": None, "backends": ()}
    plans = choose_plans((), True, options)
    assert list(plans) == list(FULL_PLANS)
    assert all(plan.rounds == 7 for plan in plans.values())
    assert isinstance(plans["decode"], DecodePlan)
    assert plans["decode"].contexts == (5,)
    # None and an empty tuple change nothing.
    assert isinstance(plans["attention"], AttentionPlan)
    assert plans["attention"].lengths == QUICK_PLANS["attention"].lengths  # pyright: ignore
    assert plans["attention"].backends == ()


def test_plans_without_options_are_the_defaults():
    assert choose_plans(("attention",), False, {})["attention"] == AttentionPlan()
    assert AttentionPlan().tolerance == TOLERANCE
    assert DecodePlan().tolerance == TOLERANCE
    with pytest.raises(InputError, match="Unknown suite"):
        choose_plans(("x",), False, {})


def test_functions_are_timed_once_per_round():
    calls: list[str] = []
    functions = {"a": partial(calls.append, "a"), "b": partial(calls.append, "b")}
    timings = time_interleaved(functions, rounds=2, warmup=1, on_round=Progress().report_round)
    assert "".join(calls) == "ab" + "abab"
    assert [len(timing.seconds) for timing in timings.values()] == [2, 2]


def test_spread_of_the_median():
    measure = median_of([1, 2, 3, 4, 100], "ms", "lower")
    assert measure.value == 3
    assert measure.spread == pytest.approx((52 - 1.5) / 2 / 3)
    assert median_of([5.0], "ms", "lower").spread is None
    assert median_of([1.0, 3.0], "ms", "lower").spread == pytest.approx(0.5)


def test_results_without_a_baseline_are_rejected(tmp_path):
    with pytest.raises(InputError, match=r"--results requires .*--baseline"):
        Bench(results=tmp_path / "x.json").run()
