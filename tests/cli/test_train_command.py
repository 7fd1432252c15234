"""Tests of `trainshort train`: options, recipes, run folders and errors."""

import signal

import pytest

from trainshort.cli.main import main
from trainshort.cli.train import Train
from trainshort.config.run_config import AdaptiveConfig, ModelConfig, RunConfig, save_config
from trainshort.experiments.recipes import recipes


def test_options_change_only_the_named_settings():
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


def test_recipe_without_options():
    command = Train.parse(["demo-t5"])
    assert command.config == recipes.get("demo-t5")()
    assert str(command.out) == "runs/demo-t5"


def test_unambiguous_setting_needs_no_group():
    words = "demo-alibi --steps 7 --optim.name adamw --parallel fsdp --micro_batch 3 --no-final-norm"
    command = Train.parse(words.split())
    assert command.config.train.steps == 7
    assert command.config.train.parallel == "fsdp"
    assert command.config.train.micro_batch == 3
    assert not command.config.model.final_norm


CONFIG_WITH_OPTIONAL_GROUP = RunConfig(model=ModelConfig(width=64, adaptive=AdaptiveConfig(cutoffs=(10, 20), factor=2)))


def test_config_file_can_replace_a_recipe(tmp_path):
    save_config(CONFIG_WITH_OPTIONAL_GROUP, tmp_path / "mine.json")
    command = Train.parse([str(tmp_path / "mine.json")])
    assert command.config == CONFIG_WITH_OPTIONAL_GROUP
    assert str(command.out) == "runs/mine"


def test_run_folder_can_replace_a_recipe(tmp_path):
    save_config(CONFIG_WITH_OPTIONAL_GROUP, tmp_path / "config.json")
    command = Train.parse([str(tmp_path), "--resume", "--model.adaptive.cutoffs", "5", "9", "11"])
    assert command.out == tmp_path
    assert command.config.model.adaptive == AdaptiveConfig(cutoffs=(5, 9, 11), factor=2)


def test_help_shows_the_settings_of_the_recipe_as_defaults(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "demo-rotary", "--help"])
    assert caught.value.code == 0
    help_text = " ".join(capsys.readouterr().out.split())
    assert "Examples: trainshort train demo-alibi" in help_text
    position_help = help_text.partition("--model.position TEXT ")[2].partition(" --model.")[0]
    assert position_help.endswith("(default: rotary)")
    assert "--train.length N" in help_text
    assert "(default: runs/demo-rotary)" in help_text


def test_run_is_trained_protected_and_resumed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "text" / f"{split}.txt").write_text("a man a plan a canal panama\n" * 100)
    command_line = (
        "train demo-alibi --corpus text --tokenizer bytes --width 16 --heads 2 --layers 1 --length 16 "
        "--batch 4 --out run"
    )

    def run_command(*more_words: str) -> int:
        with pytest.raises(SystemExit) as caught:
            main([*command_line.split(), *more_words])
        return caught.value.code or 0

    assert run_command("--steps", "4") == 0
    assert "run: 4 steps, 256 tokens. Validation loss" in capsys.readouterr().out
    assert run_command("--steps", "4") == 2
    assert "trainshort: run already exists." in capsys.readouterr().err
    assert run_command("--steps", "6", "--resume") == 0
    assert "run: 6 steps" in capsys.readouterr().out


def test_calling_program_keeps_its_signal_handlers(tmp_path, monkeypatch):
    """The command ignores signals after everything is saved. A program that calls the command must not ignore them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the owl and the pussy-cat went to sea. " * 500)
    handlers_before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    options = "--layers 1 --width 16 --heads 2 --length 16 --batch 2 --steps 1 --tokenizer bytes"
    with pytest.raises(SystemExit, match="0"):
        main(["train", "demo-alibi", *options.split(), "--corpus", "text.txt", "--out", "run"])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers_before
