"""A method from a file outside the package, through the demo: trained, evaluated, in the report with its own colour."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainshort.utils.figures import method_color

TESTS = Path(__file__).parents[1]
PLUGIN = TESTS / "plugins" / "kerple_log.py"
SCRIPT = """
import sys
from pathlib import Path
from tiny_experiments import tiny_scale
from trainshort.cli.main import main
from trainshort.recipes.scales import scales
if __name__ == "__main__":
    scales.register("tiny")(tiny_scale(Path.cwd()))
    main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_plugin_goes_through_the_demo(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["reproduce", "--scale", "tiny", "--only", "demo", "--methods", "alibi,kerple-log", "--jobs", "2"]
    path = os.pathsep.join((str(TESTS), str(TESTS.parent)))
    done = subprocess.run(
        [sys.executable, "script.py", *words, "--plugin", str(PLUGIN)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "report" / "tiny" / "index.html").read_text(encoding="utf-8")
    figures = json.loads(page.partition('id="figures">')[2].partition("</script>")[0])
    headline = next(one for one in figures if one["name"] == "headline")
    lines = {one["name"]: one["line"]["color"] for one in headline["data"] if one.get("meta") != "band"}
    assert lines["kerple-log"] == method_color("kerple-log") != lines["ALiBi"]
    assert max(at for one in headline["data"] if one.get("name") == "kerple-log" for at in one["x"]) == 16


def test_unknown_methods_are_told_before_anything_is_computed(tmp_path):
    words = ["reproduce", "--only", "demo", "--methods", "alibi,alibbi"]
    env = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "trainshort", *words], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "Unknown position method 'alibbi'. Did you mean 'alibi'?" in done.stderr
    assert not list(tmp_path.iterdir())
