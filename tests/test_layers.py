"""The layer contract of pyproject.toml, checked with the tests as well as by `make check`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_layers_are_kept():
    """In a process of its own: the linter writes to the terminal in ways that pytest's capturing does not survive."""
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
