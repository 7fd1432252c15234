"""`trainshort bench`: what it stores, what it refuses, on sizes that take seconds."""

import json
import re
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
from benchmarks.suites import FULL, QUICK, AttentionPlan, DecodePlan, choose
from trainshort.attention.call import TOLERANCE
from trainshort.config.run_config import load_config
from trainshort.data.dataset import open_dataset
from trainshort.errors import InputError
from trainshort.train.checkpoint import load_model
from trainshort.utils import plugins
from trainshort.utils.bench_results import load_bench_result, median_of
from trainshort.utils.timing import run_in_subprocess, time_interleaved

ATTENTION = ("attention", "--lengths", "64", "128", "--engines", "windowed", "windowed-torch", "--rounds", "2")


def run(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0


def fails(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_attention_is_stored_with_its_origin(tmp_path, capsys):
    out = tmp_path / "deep" / "a.json"
    run(*ATTENTION, "--memory", "longest", "--tolerance", "1e-5", "--out", str(out))
    stored = json.loads(out.read_text())
    assert stored["format"] == 2
    assert stored["finished"]
    assert stored["settings"]["dtype"] == "float32"
    assert stored["settings"]["attention"]["tolerance"] == 1e-5
    assert {"cpu", "cores", "memory", "matmul_rate", "read_rate"} <= stored["made"]["machine"].keys()
    assert min(stored["made"]["machine"][rate] for rate in ("matmul_rate", "read_rate")) > 1e8
    assert stored["made"]["threads"] == torch.get_num_threads()
    assert {"trainshort", "torch", "python", "transformers", "x-transformers"} <= stored["made"]["versions"].keys()
    rows = load_bench_result(out).suites["attention"]
    assert [(row.case["engine"], row.case["tokens"]) for row in rows] == [
        (engine, tokens) for tokens in (64, 128) for engine in ("plain", "windowed", "windowed-torch")
    ]
    for row in rows:
        assert len(row.seconds["forward"]) == 2
        assert row.measured["forward"].value == pytest.approx(1e3 * np.median(row.seconds["forward"]))
        assert 0 < row.measured["error"].value < 1e-5
        assert ("peak" in row.measured) == (row.case["tokens"] == 128)
    told = capsys.readouterr()
    assert f"Results: {out}" in told.out
    assert "windowed" in told.out
    assert "attention 2/2: attention at 128 tokens" in told.err
    assert "memory of windowed, 2 of 3" in told.err


def test_every_engine_can_be_named(tmp_path, capsys, monkeypatch):
    """Also a plug-in's, which the process that measures memory finds too; one that cannot says why."""
    monkeypatch.setenv(plugins.PLUGIN_ENV_VAR, "")
    monkeypatch.setattr(plugins, "_loaded", {})
    plugin, out = Path(__file__).parents[1] / "plugins" / "one_of_each.py", tmp_path / "a.json"
    words = "attention --lengths 64 128 --engines sdpa echo flex compiled --rounds 1 --memory none"
    try:
        run(*words.split(), "--out", str(out), "--plugin", str(plugin))
        asked = {"source": "normal", "length": 64, "name": "echo", "tolerance": 0.0, "causal": True}
        assert run_in_subprocess("benchmarks.attention", **asked)["peak"] > 0
    finally:
        for table, name in plugins._loaded[str(plugin)].entries:
            table.remove(name)
    rows = load_bench_result(out).suites["attention"]
    measured = [(row.case["engine"], row.case["tokens"]) for row in rows]
    assert measured == [
        *((name, 64) for name in ("plain", "sdpa", "echo", "compiled")),
        *((name, 128) for name in ("plain", "sdpa", "compiled")),
    ]
    assert all(row.measured["error"].value < 1e-5 for row in rows)
    told = capsys.readouterr().err
    assert "without echo: is for tests with at most 99 keys" in told
    assert "without flex: FlexAttention has no backward on the CPU" in told


def test_a_position_method_of_a_plugin_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv(plugins.PLUGIN_ENV_VAR, "")
    monkeypatch.setattr(plugins, "_loaded", {})
    plugin, out = Path(__file__).parents[1] / "plugins" / "kerple_log.py", tmp_path / "result.json"
    words = "training evaluate --quick --methods kerple-log --preset tiny --lengths 64 --memory none --rounds 1"
    try:
        run(*words.split(), "--out", str(out), "--plugin", str(plugin))
    finally:
        for table, name in plugins._loaded[str(plugin)].entries:
            table.unregister(name)
    measured_models = {
        suite: [row.case["model"] for row in rows] for suite, rows in load_bench_result(out).suites.items()
    }
    assert "kerple-log" in measured_models["training"]
    assert "kerple-log" in measured_models["evaluate"]


def test_work_is_counted_without_a_clock(tmp_path):
    out = tmp_path / "w.json"
    run("attention", "--lengths", "1024", "--measure", "work", "--out", str(out))
    (row,) = load_bench_result(out).suites["attention"]
    assert not row.seconds
    assert 0 < row.measured["work needed"].value <= row.measured["work"].value <= 100


@pytest.mark.parametrize("memory", ["none", pytest.param("all", marks=pytest.mark.slow)])
def test_mpt_before_and_after_a_patch(memory, tmp_path):
    """Memory is measured in four processes of their own, half a minute of starting: a slow test."""
    out = tmp_path / "p.json"
    run(
        *["patch", "--quick", "--preset", "tiny", "--lengths", "64", "--rounds", "2", "--memory", memory, "--out"],
        str(out),
    )
    before, after, _ = rows = load_bench_result(out).suites["patch"]
    names = ["mpt", "patched", "without attention"]
    assert [row.case["model"] for row in rows] == names
    assert all(len(row.seconds[work]) == 2 for row in rows for work in ("forward", "step"))
    assert after.measured["same greedy tokens"].value == 32
    for work in ("forward", "step"):
        ratios = [a / b for a, b in zip(before.seconds[work], after.seconds[work], strict=True)]
        assert after.measured[f"{work} speed to mpt"].value == pytest.approx(np.median(ratios))
        assert (f"{work} peak" in after.measured) == (memory == "all")
        if memory == "none":
            continue
        share = after.measured[f"{work} peak"].value / before.measured[f"{work} peak"].value
        assert after.measured[f"{work} peak to mpt"].value == pytest.approx(share)


def test_training_and_evaluation_keep_their_ratios(tmp_path):
    out = tmp_path / "t.json"
    words = "training evaluate --quick --preset tiny --lengths 32 64 --rounds 1 --memory none --out"
    run(*words.split(), str(out))
    suites = load_bench_result(out).suites
    trained = {(row.case["model"], row.case["tokens"]): row for row in suites["training"]}
    for length in (32, 64):
        ours, none = trained["alibi", length], trained["none", length]
        expected = none.seconds["step"][0] / ours.seconds["step"][0]
        assert ours.measured["speed to none"].value == pytest.approx(expected)
        assert ours.measured["speed"].value == pytest.approx(2048 / ours.seconds["step"][0])
    short, long = (row for row in suites["evaluate"] if row.case["model"] == "alibi")
    kept = 100 * short.seconds["reading"][0] / long.seconds["reading"][0]
    assert long.measured["of 32"].value == pytest.approx(kept)
    assert short.measured["of 32"].value == 100


def test_decoding_by_context_weights_and_without_end(tmp_path):
    words = "decode --preset tiny --contexts 64 1024 --parts context weights endless --tokens 200 --rounds 2 --out"
    run(*words.split(), str(tmp_path / "d.json"))
    rows = load_bench_result(tmp_path / "d.json").suites["decode"]
    context = {(row.case["cache"], row.case["context"]): row for row in rows if row.case["part"] == "context"}
    assert set(context) == {(kind, at) for kind in ("full", "bounded") for at in (64, 1024)}
    full = context["full", 1024]
    assert full.measured["time per token"].value == pytest.approx(1e3 * np.mean(full.seconds["turns"]) / 16)
    assert full.measured["cache"].value == pytest.approx(2 * 2 * 1024 * 64 * 4 / 2**20)
    assert context["bounded", 1024].measured["cache to full"].value < 90
    assert "error certificate" in context["bounded", 1024].note
    assert [row.case["cache"] for row in rows if row.case["part"] == "weights"] == ["full", "bounded"]
    (endless,) = (row for row in rows if row.case["part"] == "endless")
    assert endless.measured["certificate"].value <= 1e-6
    assert len(endless.seconds["turns"]) == 10


def test_greedy_tokens_are_those_of_mpt():
    pytest.importorskip("transformers")
    from benchmarks.decode import make_model

    theirs, ours = peers.pair(make_model("tiny"), 200)
    write = partial(peers.bounded_greedy, ours, 1e-6)
    assert peers.same_greedy_tokens(theirs, write, 100) == peers.GREEDY
    with torch.no_grad():
        ours.vocabulary.embedding.weight.mul_(-1)  # another model: the check can fail
    assert peers.same_greedy_tokens(theirs, write, 100) < peers.GREEDY


def test_prepare_is_measured(tmp_path):
    run("prepare", "--quick", "--rounds", "1", "--out", str(tmp_path / "p.json"))
    rows = load_bench_result(tmp_path / "p.json").suites["prepare"]
    assert {"bpe 2048", "words", "bytes"} == {row.case["tokenizer"] for row in rows}
    assert all(row.measured["speed"].value > 0 for row in rows)


def test_a_run_is_recorded_as_its_model_computes(tmp_path):
    """The recorded q, k and v of the first layer are the model's own, of the repeated validation text."""
    folder = make_run(tmp_path)
    config = load_config(folder / "config.json")
    text = open_dataset(Path(config.data.folder or "")).split("valid")
    length = len(text) + 50
    told = inputs.record(*inputs.recordable(folder, 0), length, tmp_path / "r.safetensors")
    assert (told["layer"], told["heads"], told["dim"]) == (0, 4, 8)
    found = load_file(tmp_path / "r.safetensors")
    model = load_model(folder)
    tokens = torch.from_numpy(np.concatenate([text, text])[:length].astype(np.int64))[None]
    with torch.no_grad():
        block = model.layers[0]
        qkv = block.attention.qkv(block.attention_norm(model.vocabulary.embed(tokens)))
    expected = qkv.unflatten(-1, (12, 8)).transpose(1, 2).split(4, dim=1)
    for name, exact in zip("qkv", expected, strict=True):
        torch.testing.assert_close(found[name], exact, atol=1e-5, rtol=1e-5)
    words = ("--inputs", str(folder), "--lengths", "64", "--engines", "windowed", "--rounds", "1", "--memory", "none")
    run("attention", *words, "--out", str(tmp_path / "a.json"))
    stored = load_bench_result(tmp_path / "a.json")
    assert stored.settings["attention"]["recorded"]["layer"] == 1  # the middle one of two
    assert {row.case["inputs"] for row in stored.suites["attention"]} == {"recorded"}


@pytest.mark.parametrize("position", ["alibi", "fox"])
def test_what_a_trained_run_keeps_of_its_text(position, tmp_path):
    """At tolerance 0 everything; else fewer keys, under a certificate. A text that is shorter is read to its end."""
    folder = make_run(tmp_path, position=position)
    shares = {}
    for tolerance in ("0", "0.01"):
        out = tmp_path / f"{tolerance}.json"
        words = ("--parts", "trained", "--run", str(folder), "--contexts", "512", "100000", "--tolerance", tolerance)
        run("decode", *words, "--out", str(out))
        rows = load_bench_result(out).suites["decode"]
        text = open_dataset(Path(load_config(folder / "config.json").data.folder or ""))
        counts = {name: len(text.split(name)) for name in text.meta.splits}
        assert {(row.case["split"], row.case["context"]) for row in rows} == {
            (name, min(context, counts[name])) for name in counts for context in (512, 100_000)
        }
        assert all(row.measured["certificate"].value <= float(tolerance) for row in rows)
        shares[tolerance] = [row.measured["keys kept"].value for row in rows]
    assert set(shares["0"]) == {100}
    assert all(share < 100 for share in shares["0.01"])


def test_mistakes_are_explained(tmp_path, capsys):
    short = tmp_path / "short.safetensors"
    save_file({name: torch.randn(1, 2, 30, 8) for name in "qkv"}, short)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(short.read_bytes()[:40])
    sinusoidal = make_run(tmp_path, "other", "sinusoidal")
    trained = make_run(tmp_path)
    taken = tmp_path / "taken.json"
    taken.write_text("{}")
    for words, message in (
        ("atention", r"Unknown suite 'atention'\. Did you mean 'attention'\? Known: attention, training"),
        (
            "decode --lengths 64",
            r"--lengths concerns attention, training, evaluate and patch, and only decode was chosen",
        ),
        ("attention training --tokens 5", r"--tokens concerns decode, and only attention and training was chosen"),
        ("attention --rounds 0", r"--rounds must be at least 1, got 0"),
        ("attention --tolerance 1", r"--tolerance is a share of softmax mass"),
        (
            "attention --engines window",
            r"--engines knows no 'window'\. Did you mean 'windowed'\?.* x-transformers, .*sdpa",
        ),
        ("decode --parts trained", r"--parts trained reads a run's own text with its trained model; give --run RUN"),
        ("decode --run nowhere", r"There is no run at 'nowhere'"),
        ("decode --parts contexts", r"--parts knows no 'contexts'\. Did you mean 'context'"),
        ("attention --memory some", r"--memory knows no 'some'"),
        ("attention --measure wrok", r"--measure knows no 'wrok'\. Did you mean 'work'"),
        ("training --preset smal", r"Unknown preset 'smal'\. Did you mean 'small'"),
        ("training --methods alibbi", r"Unknown position method 'alibbi'\. Did you mean 'alibi'"),
        ("evaluate --lengths 64 100", r"--lengths of evaluate must divide the longest"),
        ("evaluate --run nowhere", r"There is no run at 'nowhere'"),
        ("attention --layer 1", r"--layer chooses what is recorded from a run; give --inputs RUN"),
        ("attention --inputs nowhere", r"--inputs is normal, scaled, .* there is no nowhere"),
        (f"attention --lengths 31 --inputs {short}", r"holds 30 tokens; asked for 31\. Give shorter --lengths"),
        (f"attention --lengths 31 --inputs {cut}", r"cut\.safetensors is not a whole safetensors file"),
        (
            f"attention --lengths 31 --inputs {sinusoidal}",
            r"has sinusoidal positions; attention is measured with ALiBi",
        ),
        (f"attention --inputs {trained} --layer 99", r"--layer 99 is not in .*, whose layers are 0 to 1"),
        ("decode,attentoin", r"Unknown suite 'attentoin'"),
        ("training --lengths 128,long", r"Invalid --lengths: expected an integer, got 'long'"),
        ("prepare --vocabularies 3", r"--vocabularies must be at least 257, got 3"),
        ("attention --against nowhere.json", r"There is no benchmark result at nowhere\.json"),
        ("attention --quick --out /proc/foo/a.json", r"The folder /proc/foo cannot be made"),
        (f"attention --out {taken}", r"taken\.json already exists, and results are kept"),
    ):
        assert re.search(message, " ".join(fails(capsys, *words.split()).split())), words


def test_plans_take_the_options_that_concern_them():
    plans = choose((), True, {"rounds": 7, "contexts": (5,), "lengths": None, "engines": ()})
    assert list(plans) == list(FULL)
    assert all(getattr(plan, "rounds") == 7 for plan in plans.values())  # noqa: B009
    assert isinstance(plans["decode"], DecodePlan)
    assert plans["decode"].contexts == (5,)
    assert isinstance(plans["attention"], AttentionPlan)
    assert plans["attention"].lengths == QUICK["attention"].lengths  # pyright: ignore
    assert {AttentionPlan().tolerance, DecodePlan().tolerance} == {TOLERANCE}
    assert choose(("attention",), False, {})["attention"] == AttentionPlan()
    with pytest.raises(InputError, match="Unknown suite"):
        choose(("x",), False, {})


def test_contestants_take_turns():
    calls: list[str] = []
    timings = time_interleaved({name: lambda name=name: calls.append(name) for name in "ab"}, 2, 1, Progress().round)
    assert "".join(calls) == "ab" + "abab"
    assert [len(one.seconds) for one in timings.values()] == [2, 2]


def test_the_median_and_its_spread():
    one = median_of([1, 2, 3, 4, 100], "ms", "lower")
    assert (one.value, one.spread) == (3, pytest.approx((52 - 1.5) / 2 / 3))
    assert median_of([5.0], "ms", "lower").spread is None
    assert median_of([1.0, 3.0], "ms", "lower").spread == pytest.approx(0.5)


def test_results_alone_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"--results is compared with another file; give it by --against"):
        Bench(results=tmp_path / "x.json").run()
