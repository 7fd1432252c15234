"""The commands of docs/interop.md run, on small models of the same names."""

import json
import re
import shlex
from pathlib import Path

import foreign
import pytest
import torch
from helpers import prose, save_hugging_face

from trainshort.cli.main import run as command
from trainshort.data.tokenizers.builtin import ByteTokenizer

ROOT = Path(__file__).parents[2]
FAIRSEQ = Path(__file__).parent / "fairseq" / "adaptive-cfg.pt"
SMALLER = {"steps": "5"}
"""Options whose numbers are for real models."""
MORE = {
    "train portable-128": "--data.corpus book.txt --data.tokenizer bytes --layers 1 --length 32 --batch 4 --steps 5"
}
OTHERS = ("doctor",)
"""Commands with pages of tests of their own."""


def commands() -> list[str]:
    page = (ROOT / "docs" / "interop.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    lines = [line for line in lines if line.startswith("trainshort ")]
    return [line for line in lines if line.split()[1] not in OTHERS]


@pytest.mark.slow
def test_the_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(foreign, "WORDS", 300)
    torch.manual_seed(0)
    config, weights, _ = foreign.mpt()
    foreign.save(Path("mpt-7b"), config, weights)
    Path("mpt-7b/tokenizer.json").write_text(ByteTokenizer().to_json())
    save_hugging_face(Path("gpt2"), "gpt2")
    Path("alibi_wt103_L512.pt").write_bytes(FAIRSEQ.read_bytes())
    Path("dict.txt").write_text("".join(f"word{i} {1000 - i}\n" for i in range(100)))
    Path("book.txt").write_text(prose(1500))
    Path("book.json").write_text(json.dumps({"text": prose(20)}) + "\n")
    page = (ROOT / "docs" / "interop.md").read_text(encoding="utf-8")
    Path("tasks").mkdir()
    Path("tasks/book.yaml").write_text(re.search(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1])
    found = commands()
    assert len(found) > 12
    for line in found:
        words = shlex.split(line, comments=True)[1:]
        for option, number in SMALLER.items():
            if f"--{option}" in words:
                words[words.index(f"--{option}") + 1] = number
        words += next((extra.split() for start, extra in MORE.items() if line.startswith(f"trainshort {start}")), [])
        assert command(words) == 0, line
