"""`trainshort train`: options, recipes, run folders, mistakes."""

import signal

import pytest

from trainshort.cli.main import main
from trainshort.cli.train import Train
from trainshort.config.run_config import AdaptiveConfig, ModelConfig, RunConfig, save_config
from trainshort.experiments.recipes import recipes


def test_options_change_the_recipe_and_nothing_else():
    words = (
        "demo-alibi --model.position t5 --train.steps=100 --optim.betas 0.8 0.9 --train.micro-batch 3 "
        "--train.compile --model.no-biases --data.folder d --out here --resume"
    )
    command = Train.parse(words.split())
    base = recipes.get("demo-alibi")()
    assert command.config == base.replace(
        model={"position": "t5", "biases": False},
        train={"steps": 100, "micro_batch": 3, "compile": True},
        optim={"betas": (0.8, 0.9)},
        data={"folder": "d"},
    )
    assert str(command.out) == "here"
    assert command.resume
    assert Train.parse(["demo-t5"]).config == recipes.get("demo-t5")()
    assert str(Train.parse(["demo-t5"]).out) == "runs/demo-t5"


def test_a_name_that_only_one_setting_has_may_stand_alone():
    words = "demo-alibi --steps 7 --optim.name adamw --parallel fsdp --micro_batch 3 --no-final-norm"
    command = Train.parse(words.split())
    assert command.config.train.steps == 7
    assert command.config.train.parallel == "fsdp"
    assert command.config.train.micro_batch == 3
    assert not command.config.model.final_norm


def test_a_config_or_a_run_folder_stands_for_a_recipe(tmp_path):
    config = RunConfig(model=ModelConfig(width=64, adaptive=AdaptiveConfig(cutoffs=(10, 20), factor=2)))
    save_config(config, tmp_path / "mine.json")
    assert Train.parse([str(tmp_path / "mine.json")]).config == config
    assert str(Train.parse([str(tmp_path / "mine.json")]).out) == "runs/mine"
    run = tmp_path / "run"
    run.mkdir()
    save_config(config, run / "config.json")
    command = Train.parse([str(run), "--resume", "--model.adaptive.cutoffs", "5", "9", "11"])
    assert command.out == run
    assert command.config.model.adaptive == AdaptiveConfig(cutoffs=(5, 9, 11), factor=2)


def test_help_shows_settings_with_the_recipes_values(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "demo-rotary", "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Examples: trainshort train demo-alibi" in text
    assert "--model.position TEXT Position method; `trainshort list positions` names them. Default: rotary." in text
    assert "--train.length N The paper's L" in text
    assert "Default: runs/demo-rotary." in text


def test_a_run_from_the_command_line(tmp_path, capsys, monkeypatch):
    """The whole way once: the words of the command line, a corpus, a run folder, its refusal, its resume."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "text" / f"{split}.txt").write_text("a man a plan a canal panama\n" * 100)
    words = "train demo-alibi --corpus text --tokenizer bytes --width 16 --heads 2 --layers 1 --length 16 --batch 4"
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), "--steps", "4", "--out", "run"])
    assert ended.value.code == 0
    assert "run: 4 steps, 256 tokens. Validation loss" in capsys.readouterr().out
    for more, code in ((["--steps", "4"], 2), (["--steps", "6", "--resume"], 0)):
        with pytest.raises(SystemExit) as ended:
            main([*words.split(), "--out", "run", *more])
        assert ended.value.code == code
    told = capsys.readouterr()
    assert "trainshort: run already exists. Go on with it by --resume, or choose another --out." in told.err
    assert "run: 6 steps" in told.out


def test_a_program_that_calls_it_keeps_its_signal_handlers(tmp_path, monkeypatch):
    """The command itself ignores signals once all is saved; a program that goes on must still be stopped by them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the owl and the pussy-cat went to sea. " * 500)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    small = "--layers 1 --width 16 --heads 2 --length 16 --batch 2 --steps 1 --tokenizer bytes"
    with pytest.raises(SystemExit, match="0"):
        main(["train", "demo-alibi", *small.split(), "--corpus", "text.txt", "--out", "run"])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
