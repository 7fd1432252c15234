"""All commands of docs/interop.md run, on small models with the same names."""

import json
import re
import shlex
from pathlib import Path

import foreign
import pytest
import torch
from helpers import prose, save_hugging_face

from trainshort.cli.main import run as run_command
from trainshort.data.tokenizers.builtin import ByteTokenizer

PAGE = Path(__file__).parents[2] / "docs" / "interop.md"
FAIRSEQ_CHECKPOINT = Path(__file__).parent / "fairseq" / "adaptive-cfg.pt"

REPLACED_OPTIONS = {"--steps": "5"}
"""Options whose values on the page are for models of normal size."""

ADDED_OPTIONS = {
    "trainshort train portable-128": (
        "--data.corpus book.txt --data.tokenizer bytes --layers 1 --length 32 --batch 4 --steps 5"
    )
}
"""Options that are added to the commands that begin with these words."""

SKIPPED_COMMANDS = ("doctor",)
"""Commands that are tested elsewhere."""


def read_commands() -> list[str]:
    """Return the lines of the page's code blocks without a language that call trainshort."""
    page = PAGE.read_text(encoding="utf-8")
    code_blocks = re.findall(r"^```(\w*)\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    commands = []
    for language, code in code_blocks:
        for line in code.splitlines():
            is_command = language == "" and line.startswith("trainshort ")
            if is_command and line.split()[1] not in SKIPPED_COMMANDS:
                commands.append(line)
    return commands


def parse_command(line: str) -> list[str]:
    """Return the words of a command after `trainshort`, with options for small models."""
    words = shlex.split(line, comments=True)[1:]
    for option, value in REPLACED_OPTIONS.items():
        if option in words:
            words[words.index(option) + 1] = value
    for beginning, options in ADDED_OPTIONS.items():
        if line.startswith(beginning):
            words += options.split()
    return words


def write_inputs() -> None:
    """Write the models and texts that the commands of the page read."""
    torch.manual_seed(0)
    config, weights, _ = foreign.mpt()
    foreign.save(Path("mpt-7b"), config, weights)
    Path("mpt-7b/tokenizer.json").write_text(ByteTokenizer().to_json())
    save_hugging_face(Path("gpt2"), "gpt2")
    Path("alibi_wt103_L512.pt").write_bytes(FAIRSEQ_CHECKPOINT.read_bytes())
    Path("dict.txt").write_text("".join(f"word{i} {1000 - i}\n" for i in range(100)))
    Path("book.txt").write_text(prose(1500))
    Path("book.json").write_text(json.dumps({"text": prose(20)}) + "\n")
    page = PAGE.read_text(encoding="utf-8")
    task = re.search(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert task is not None
    Path("tasks").mkdir()
    Path("tasks/book.yaml").write_text(task[1])


@pytest.mark.slow
def test_commands_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(foreign, "WORDS", 300)
    write_inputs()
    commands = read_commands()
    assert len(commands) > 12
    for line in commands:
        assert run_command(parse_command(line)) == 0, line
