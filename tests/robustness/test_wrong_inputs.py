"""Tests of wrong inputs for all commands: exit code 2, one line that names the wrong input, and no written files."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

from trainshort.cli.main import COMMANDS, main
from trainshort.data.corpora import corpora

RUN = "runs/tiny"
TRAIN = "train demo-alibi --data.folder data/tiny"

# Command lines, and what the error message must contain: the wrong option, setting, file or value, and suggestions.
WRONG_INPUTS = [
    # no command, or an unknown command
    ("trian demo-alibi", ["trian", "'train'"]),
    ("--plugin mine.py list", ["--plugin"]),
    ("--halp", ["--halp"]),
    ("PREPARE text.txt", ["PREPARE", "'prepare'"]),
    # prepare
    ("prepare", ["CORPUS"]),
    ("prepare sotuu", ["'sotuu'", "'sotu'"]),
    ("prepare empty", ["empty", ".txt"]),
    ("prepare nothing.txt", ["nothing.txt"]),
    ("prepare blank.txt", ["'blank.txt'"]),
    ("prepare text.txt --tokenizer no/tokenizer.json", ["no/tokenizer.json"]),
    ("prepare five --plugin five.py", ["'five'"]),
    ("prepare nowhere/*.txt", ["nowhere/*.txt"]),
    ("prepare text.txt --tokenizer byte", ["'byte'", "'bytes'"]),
    ("prepare text.txt --tokenizer hf/config.json", ["hf/config.json"]),
    ("prepare text.txt --out ''", ["--out"]),
    ("prepare text.txt --vocab-size many", ["--vocab-size", "many"]),
    ("prepare text.txt --vocab-size -5", ["vocab_size", "-5"]),
    ("prepare text.txt --vocab-size 99999999999", ["vocab_size", "99999999999"]),
    ("prepare someone/nowhere", ["'someone/nowhere'"]),
    ("prepare text.txt --vocab-size 3", ["bpe", "257", "3"]),
    ("prepare text.txt --workers 0", ["workers", "0"]),
    ("prepare text.txt --errors ignore", ["--errors", "ignore"]),
    ("prepare text.txt --out /proc/foo", ["/proc/foo", "--out"]),
    ("prepare text.txt --out text.txt", ["text.txt", "--out"]),
    ("prepare number.jsonl", ["number.jsonl, line 2", "'text'"]),
    ("prepare broken.jsonl", ["broken.jsonl, line 2", "JSON"]),
    ("prepare latin.txt --tokenizer bytes", ["latin.txt", "byte 3"]),
    ("prepare text.txt --tokeniser bytes", ["tokeniser", "'tokenizer'"]),
    ("prepare text.txt other.txt", ["other.txt"]),
    ("prepare archive.zip", ["archive.zip"]),
    ("prepare text.txt --tokenizer bytes --out data/tiny", ["data/tiny", "'bpe'", "'bytes'"]),
    # train
    ("train", ["RECIPE"]),
    ("train --steps 3", ["RECIPE"]),
    ("train nowhere.json", ["nowhere.json"]),
    ("train ''", ["RECIPE"]),
    (f"{TRAIN} --data.tokenizer wrds", ["--data.folder", "--data.tokenizer"]),
    (f"{TRAIN} --corpus text.txt", ["--data.folder", "--data.corpus"]),
    ("train demo-alibbi", ["'demo-alibbi'", "'demo-alibi'"]),
    ("train empty", ["empty/config.json"]),
    (f"{TRAIN} --model.position alibbi", ["'alibbi'", "'alibi'"]),
    (f"{TRAIN} --train.stepz 3", ["train.stepz", "'train.steps'"]),
    (f"{TRAIN} --stepz 3", ["stepz", "'steps'"]),
    (f"{TRAIN} --steps many", ["--train.steps", "'many'"]),
    (f"{TRAIN} --colour red", ["colour"]),
    (f"{TRAIN} --vocab-size 3", ["model.vocab_size", "data.vocab_size"]),
    (f"{TRAIN} --format 2", ["'format'"]),
    (f"{TRAIN} --model.positon alibi", ["model.positon", "'model.position'"]),
    (f"{TRAIN} --model.heads 7", ["model", "heads 7"]),
    (f"{TRAIN} --model.layers 0", ["model.layers", "0"]),
    (f"{TRAIN} --model.width 1.5", ["--model.width", "'1.5'"]),
    (f"{TRAIN} --model.width 99999999", ["model", "width 99999999"]),
    (f"{TRAIN} --model.dropout 2", ["model.dropout", "2"]),
    (f"{TRAIN} --train.steps -1", ["train.steps", "-1"]),
    (f"{TRAIN} --train.length 0", ["train.length", "0"]),
    (f"{TRAIN} --train.length 100000", ["4754", "100000"]),
    (f"{TRAIN} --train.seed 99999999999999999999", ["train.seed", "99999999999999999999"]),
    (f"{TRAIN} --optim.lr inf", ["optim.lr", "inf"]),
    (f"{TRAIN} --optim.betas 0.9 2", ["optim.betas", "0.9", "2"]),
    (f"{TRAIN} --model 5", ["'model'"]),
    (f"{TRAIN} --model.adaptive 5", ["'model.adaptive'"]),
    (f"{TRAIN} --modle.width 5", ["modle.width", "'model.width'"]),
    (f"{TRAIN} --learning-rate 1", ["learning-rate"]),
    (f"{TRAIN} --train.lr nan", ["'train.lr'"]),
    (f"{TRAIN} --train.batch 0", ["train.batch", "0"]),
    (f"{TRAIN} --out /proc/foo", ["/proc/foo", "--out"]),
    ("train demo-alibi --corpus text.txt --out /proc/foo", ["/proc/foo", "--out"]),
    (f"{TRAIN} --out runs/tiny", ["runs/tiny", "--resume", "--out"]),
    (f"{TRAIN} --parallel magic", ["--train.parallel", "'magic'"]),
    (f"{TRAIN} --plugin nowhere.py", ["nowhere.py", "--plugin"]),
    (f"{TRAIN} --plugin broken.py", ["broken.py", "ZeroDivisionError", "line 2"]),
    (f"{TRAIN} --plugin", ["--plugin"]),
    ("train demo-alibi --data.folder data/tinny", ["data.folder", "data/tinny"]),
    ("train demo-alibi --data.folder text.txt", ["data.folder", "text.txt", "trainshort prepare text.txt"]),
    ("train demo-alibi --data.folder empty", ["data.folder", "empty"]),
    ("train demo-alibi --data.folder runs", ["data.folder runs", "meta.json"]),
    ("train text.txt", ["text.txt", "--data.corpus"]),
    ("train odd.json", ["odd.json", "'model'", "5"]),
    ("train runs/cut --resume --train.steps 20", ["runs/cut", "step-000000008", "model/whole.safetensors"]),
    (f"train {RUN} --resume --train.steps 3", ["runs/tiny", "8", "train.steps", "3"]),
    ("train hf", ["hf/config.json", "trainshort import"]),
    ("train hf/config.json", ["hf/config.json", "trainshort import"]),
    # evaluate
    ("evaluate", ["RUN"]),
    ("evaluate ''", ["RUN"]),
    ("evaluate runs/cut", ["runs/cut", "step-000000008", "model/whole.safetensors"]),
    (f"evaluate {RUN} --device mps", ["'mps'"]),
    (f"evaluate {RUN} --device meta", ["'meta'"]),
    (f"evaluate {RUN} --data ''", ["corpus", "0 characters"]),
    (f"evaluate {RUN} --lengths 1x --split valdi --out new", ["data/tiny", "'valdi'", "train, valid, test"]),
    ("evaluate .", ["'.'"]),
    ("evaluate runs", ["'runs'"]),
    ("evaluate runs/tinny", ["'runs/tinny'"]),
    ("evaluate data/tiny", ["'data/tiny'"]),
    ("evaluate text.txt", ["text.txt"]),
    ("evaluate hf --lengths 16", ["'hf'"]),
    (f"evaluate {RUN} --lengths", ["--lengths"]),
    (f"evaluate {RUN} --lengths 0", ["'0'"]),
    (f"evaluate {RUN} --lengths 0x", ["'0x'"]),
    (f"evaluate {RUN} --lengths long", ["'long'"]),
    (f"evaluate {RUN} --lengths 1e99", ["'1e99'"]),
    (f"evaluate {RUN} --lengths 999999999 9999999999", ["304", "9,999,999,999"]),
    (f"evaluate {RUN} --lengths 16 64 --max-tokens 10", ["10 tokens", "64"]),
    (f"evaluate {RUN} --lengths 1x --split valdi", ["data/tiny", "'valdi'", "train, valid, test"]),
    (f"evaluate {RUN} --lengths 1x --data nowhere", ["'nowhere'"]),
    (f"evaluate {RUN} --lengths 1x --stride 0", ["stride", "16", "0"]),
    (f"evaluate {RUN} --lengths 1x --stride 99", ["stride", "16", "99"]),
    (f"evaluate {RUN} --lengths 1x --slopes max_bias=x", ["max_bias=x"]),
    (f"evaluate {RUN} --lengths 1x --slopes steep", ["steep", "ntk=4"]),
    (f"evaluate {RUN} --lengths 1x --precision float8", ["precision", "float8"]),
    (f"evaluate {RUN} --lengths 1x --device gpu", ["'gpu'"]),
    (f"evaluate {RUN} --lengths 1x --device cuda:7", ["'cuda:7'"]),
    (f"evaluate {RUN} --lengths 1x --max-tokens 0", ["--max-tokens", "0"]),
    (f"evaluate {RUN} --lengths 1x --memory -1", ["--memory", "-1"]),
    (f"evaluate {RUN} --lengths 1x --batch-tokens 0", ["--batch-tokens", "0"]),
    # analyze
    ("analyze", ["RUN"]),
    ("analyze runs/tinny", ["'runs/tinny'"]),
    (f"analyze {RUN} --only recal", ["'recal'", "'recall'"]),
    (f"analyze {RUN} --only reach,recal", ["'recal'", "'recall'"]),
    (f"analyze {RUN} --only ''", ["--only"]),
    (f"analyze {RUN} --only", ["--only"]),
    ("analyze runs/cut", ["runs/cut", "step-000000008", "model/whole.safetensors"]),
    (f"analyze {RUN} --only reach recall --lengths 9999", ["304", "9,999"]),
    (f"analyze {RUN} --only reach recall --lengths 4", ["recall", "32", "4"]),
    (f"analyze {RUN} --only recall --lengths 100 --trained-at 900", ["recall", "100", "566"]),
    (f"analyze {RUN} --only far-context --lengths 2", ["length 2", "--lengths"]),
    (f"analyze {RUN} --only reach --samples 0", ["--samples", "0"]),
    (f"analyze {RUN} --only reach --lengths -4", ["'-4'"]),
    (f"analyze {RUN} --only reach --split all", ["data/tiny", "'all'", "train, valid, test"]),
    (f"analyze {RUN} --only reach --out text.txt/inside", ["text.txt/inside", "--out"]),
    (f"analyze {RUN} --only reach --trained-at 0", ["--trained-at", "0"]),
    (f"analyze {RUN} --only recall --seed -1", ["--seed", "-1"]),
    (f"analyze {RUN} --only reach --seed x", ["--seed", "'x'"]),
    ("analyze hf --only reach", ["'hf'"]),
    # generate
    ("generate", ["RUN"]),
    ("generate runs/cut the", ["runs/cut", "step-000000008", "model/whole.safetensors"]),
    (f"generate {RUN} the --tokenizer nowhere.json", ["nowhere.json"]),
    (f"generate {RUN} the --slopes steep", ["steep", "ntk=4"]),
    (f"generate {RUN} the --rotary linear=2", ["--rotary"]),
    ("generate hf the", ["hf", "'gpt2'", "trainshort convert"]),
    ("generate runs/tinny the", ["runs/tinny"]),
    (f"generate {RUN} the --seed 99999999999999999999", ["seed", "99999999999999999999"]),
    ("generate text.txt the", ["text.txt"]),
    (f"generate {RUN}", ["prompt", "--prompt-file"]),
    (f"generate {RUN} ''", ["prompt", "--prompt-file"]),
    (f"generate {RUN} the --endless --tokens 3", ["--endless", "--tokens"]),
    (f"generate {RUN} the --tokens -1", ["tokens", "-1"]),
    (f"generate {RUN} the --temperature -1", ["temperature", "-1"]),
    (f"generate {RUN} the --temperature nan", ["temperature", "nan"]),
    (f"generate {RUN} the --top-p 2", ["top_p", "2"]),
    (f"generate {RUN} the --top-k 0", ["top_k", "0"]),
    (f"generate {RUN} the --mode bounden", ["--mode", "bounden", "'bounded'"]),
    (f"generate {RUN} the --mode window", ["mode", "window"]),
    (f"generate {RUN} the --mode window --window 0", ["'window'", "0"]),
    (f"generate {RUN} the --tolerance 2", ["tolerance", "2"]),
    (f"generate {RUN} the --prompt-file text.txt", ["--prompt-file"]),
    (f"generate {RUN} --prompt-file nowhere.txt", ["nowhere.txt"]),
    (f"generate {RUN} the --interactive --samples 2", ["--interactive", "--samples"]),
    (f"generate {RUN} the --samples 0", ["--samples", "0"]),
    (f"generate {RUN} the --tokenizer hf/config.json", ["hf/config.json"]),
    (f"generate {RUN} the --chunk 0", ["chunk", "0"]),
    # report
    ("report", ["RUN"]),
    ("report nowhere", ["nowhere"]),
    ("report empty", ["empty"]),
    ("report .", ["folder"]),
    ("report text.txt", ["text.txt"]),
    ("report runs --out /proc/foo", ["/proc/foo", "--out"]),
    ("report runs --out text.txt", ["text.txt", "--out"]),
    # reproduce
    ("reproduce --scale laptops", ["scale", "'laptops'", "'laptop'"]),
    ("reproduce --only table55", ["'table55'", "'table5'"]),
    ("reproduce --only demo --methods alibbi", ["'alibbi'", "'alibi'"]),
    ("reproduce --only demo --seeds 0", ["--seeds", "0"]),
    ("reproduce --only demo --jobs 0", ["--jobs"]),
    ("reproduce --only demo --launcher ssh", ["launcher", "'ssh'"]),
    ("reproduce --only demo --launcher slurm --site nowhere.toml", ["nowhere.toml", "--site"]),
    ("reproduce --only demo --launcher slurm --site text.txt", ["text.txt"]),
    ("reproduce --only demo --out /proc/foo", ["/proc/foo", "--out"]),
    ("reproduce --only demo --launcher slurm --site list.toml", ["list.toml", "'setup'", "module load x"]),
    ("reproduce --only demo --launcher slurm --site odd.toml", ["odd.toml", "options.constraint", "[1]"]),
    ("reproduce --only ,", ["--only", "','"]),
    ("reproduce --only demo --launcher slurm --site site.toml", ["site.toml", "partitoin", "'partition'"]),
    # demo
    ("demo --report /proc/self/x", ["/proc/self/x", "--report"]),
    # reproduce
    ("reproduce --only ''", ["--only"]),
    ("reproduce table5", ["'table5'"]),
    # demo
    ("demo --methods rotery", ["'rotery'", "'rotary'"]),
    ("demo --methods ,", ["--methods", "','"]),
    ("demo --out ''", ["--out"]),
    # reproduce
    ("reproduce --only demo --methods ''", ["--methods"]),
    # demo
    ("demo --out text.txt", ["--out", "text.txt"]),
    ("demo --report text.txt", ["--report", "text.txt"]),
    ("demo now", ["'now'"]),
    # bench
    ("bench --quick", ["source checkout"]),
    # tune
    ("tune --tokens 5", ["source checkout"]),
    # list
    ("list position", ["'position'", "'positions'"]),
    ("list ''", ["KIND"]),
    ("list positions backends", ["'backends'"]),
    ("list positions --plugin text.txt", ["text.txt", "--plugin"]),
    # show
    ("show", ["RECIPE"]),
    ("show demo-alibbi", ["'demo-alibbi'", "'demo-alibi'"]),
    ("show DEMO-ALIBI", ["'DEMO-ALIBI'", "'demo-alibi'"]),
    ("show runs/tinny", ["'runs/tinny'"]),
    # import
    ("import", ["MODEL"]),
    ("import nowhere.pt --out runs/new", ["nowhere.pt"]),
    ("import text.txt --out runs/new", ["text.txt"]),
    ("import hf --out runs/new", ["hf", "'gpt2'", "trainshort convert"]),
    ("import empty --out runs/new", ["empty/config.json"]),
    (f"import hf --out {RUN}", ["hf", "'gpt2'", "trainshort convert"]),
    ("import hf --out runs/new --trained-at 0", ["--trained-at", "0"]),
    ("import hf --out runs/new --trained-at -4", ["--trained-at", "-4"]),
    ("import hf", ["--out"]),
    (f"import {RUN} --out runs/new", ["runs/tiny"]),
    # export
    ("export", ["RUN"]),
    (f"export {RUN}", ["--to"]),
    (f"export {RUN} --to gguff --out exported", ["'gguff'", "'gguf'"]),
    (f"export {RUN} --to gguf --dtype q3 --out exported", ["--to gguf", "q3", "q8_0"]),
    (f"export {RUN} --to hf --out link", ["--out", "link"]),
    (f"export {RUN} --to hf --out text.txt", ["--out", "text.txt"]),
    ("export runs/tinny --to hf --out exported", ["'runs/tinny'"]),
    (f"export {RUN} --to hf --out /proc/foo", ["--out", "/proc/foo"]),
    ("export hf --to gguf --out exported", ["hf", "trainshort import"]),
    # convert
    ("convert", ["MODEL"]),
    ("convert hf --to alibi --out runs/new", ["--data.corpus"]),
    ("convert hf --to rope --out runs/new --corpus text.txt", ["--to", "'rope'"]),
    ("convert hf --to alibi --out runs/new --corpus text.txt", ["hf", "model.safetensors"]),
    ("convert hf --to alibi --out runs/new --corpus text.txt --length 0", ["--length", "0"]),
    ("convert hf --to alibi --out runs/new --corpus text.txt --max-tokens 0", ["--max-tokens", "0"]),
    ("convert hf --to alibi --out runs/new --corpus sotuu", ["'sotuu'", "'sotu'"]),
    (f"convert hf --to alibi --out {RUN} --corpus text.txt", ["runs/tiny", "--resume", "--out"]),
    (f"convert {RUN} --to alibi --out runs/new --corpus text.txt", ["runs/tiny"]),
    (f"convert hf --to alibi --out {RUN} --corpus text.txt --resume", ["runs/tiny", "--out"]),
    ("convert empty --to alibi --out runs/new --corpus text.txt", ["'empty'"]),
    # harness
    (f"harness {RUN}", ["--tasks"]),
    (f"harness {RUN} --tasks boook --include-path nowhere", ["--include-path", "nowhere"]),
    (f"harness {RUN} --tasks boook --include-path text.txt --out new", ["--include-path", "text.txt"]),
    (f"harness {RUN} --tasks boook --limit 0", ["--limit", "0"]),
    (f"harness {RUN} --tasks ,", ["--tasks", "','"]),
    ("harness runs/tinny --tasks wikitext", ["'runs/tinny'"]),
    # verify
    ("verify", ["FOLDER"]),
    ("verify nowhere", ["nowhere/trainshort.json"]),
    ("verify empty", ["empty/trainshort.json"]),
    (f"verify {RUN}", ["runs/tiny/trainshort.json"]),
    ("verify text.txt", ["text.txt/trainshort.json"]),
    # doctor
    ("doctor", ["MODEL"]),
    ("doctor nowhere", ["nowhere"]),
    ("doctor text.txt", ["text.txt"]),
    ("doctor empty", ["empty/config.json"]),
    (f"doctor {RUN}", ["runs/tiny"]),
    ("doctor hf/untyped", ["untyped/config.json", "model_type"]),
    # import
    ("import hf/untyped --out runs/new", ["untyped/config.json", "model_type"]),
    # doctor
    ("doctor minus", ["minus/config.json", "num_hidden_layers", "-2"]),
    ("doctor uneven", ["uneven/config.json", "5", "32"]),
    ("doctor two", ["two/config.json", "n_layers"]),
    ("doctor t5", ["t5"]),
    ("doctor hf --jsn", ["jsn", "'json'"]),
]


@pytest.fixture(scope="module")
def workspace(tiny_run, tmp_path_factory) -> Path:
    """Return a folder with a text, a dataset, a run, and files that are invalid in many ways."""
    folder = tmp_path_factory.mktemp("workspace") / "here"
    shutil.copytree(tiny_run, folder)

    # Corpora
    (folder / "empty").mkdir()
    (folder / "nothing.txt").touch()
    (folder / "blank.txt").write_text(" \n\n\t\n" * 50)
    (folder / "latin.txt").write_bytes("café au lait".encode("latin-1"))
    (folder / "number.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "archive.zip").write_bytes(b"PK\x03\x04" + bytes(range(256)))
    (folder / "link").symlink_to("nowhere")

    # Configs of Hugging Face models
    mpt = {"model_type": "mpt", "d_model": 32, "n_heads": 4}
    model_configs = {
        "hf": {"model_type": "gpt2", "n_layer": 1},
        "hf/untyped": {"n_layer": 1},
        "minus": mpt | {"n_layers": -2},
        "uneven": mpt | {"n_heads": 5},
        "two": mpt | {"n_layers": "two"},
        "t5": {"model_type": "t5"},
    }
    for name, values in model_configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(values))

    # Configs of runs and clusters
    (folder / "odd.json").write_text('{"model": 5}')
    (folder / "site.toml").write_text("partitoin = 'x'\n")
    (folder / "list.toml").write_text("setup = 'module load x'\n")
    (folder / "odd.toml").write_text("options = {constraint = [1]}\n")

    # Plug-ins: one has a corpus function that returns a number, the other raises an error.
    (folder / "five.py").write_text(
        "from trainshort.data.corpora import corpora\n\n@corpora.register('five')\ndef five():\n    return 5\n"
    )
    (folder / "broken.py").write_text("import trainshort\n1 / 0\n")

    # A run with a checkpoint that was cut
    shutil.copytree(folder / RUN, folder / "runs" / "cut")
    weights = folder / "runs" / "cut" / "checkpoints" / "step-000000008" / "model" / "whole.safetensors"
    os.truncate(weights, 1000)
    return folder


def file_times(folder: Path) -> dict[Path, int]:
    """Return the modification time of each file, and 0 for each folder.

    checked.json is left out, because commands that only read may write this cache.
    """
    times = {}
    for path in folder.rglob("*"):
        if path.name != "checked.json":
            times[path] = path.lstat().st_mtime_ns if path.is_file() else 0
    return times


@pytest.mark.parametrize(("command", "message_parts"), WRONG_INPUTS, ids=[command for command, _ in WRONG_INPUTS])
def test_wrong_input_exits_with_2_and_one_line(workspace, monkeypatch, capsys, command, message_parts):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(corpora, "_entries", dict(corpora._entries))  # The entries of plug-ins are removed afterwards.
    times_before = file_times(workspace)
    with pytest.raises(SystemExit) as exit_info:
        main(shlex.split(command))
    output = capsys.readouterr()
    assert exit_info.value.code == 2, output.err
    assert output.out == ""

    error_lines = [line for line in output.err.splitlines() if not line.startswith("usage: trainshort ")]
    assert len(error_lines) == 1, output.err
    assert error_lines[0].startswith("trainshort: ")
    assert error_lines[0].endswith((".", "?")), error_lines[0]
    for part in message_parts:
        assert part in error_lines[0]
    # Neither a traceback nor a box that rich draws around tracebacks
    assert not re.search("Traceback|[\u2500-\u257f]", output.err)
    assert file_times(workspace) == times_before


def test_all_commands_are_tested():
    assert len(WRONG_INPUTS) >= 250
    tested_commands = {command.split()[0] for command, _ in WRONG_INPUTS}
    assert tested_commands >= set(COMMANDS)
