"""A position method from a plug-in can be used in the demo: it is trained, evaluated and part of the report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainshort.utils.figures import method_color

TESTS = Path(__file__).parents[1]
PLUGIN = TESTS / "plugins" / "kerple_log.py"

# Run the command line with an additional scale that trains tiny models.
SCRIPT = """
import sys
from pathlib import Path
from tiny_experiments import tiny_scale
from trainshort.cli.main import main
from trainshort.experiments.scales import scales
if __name__ == "__main__":
    scales.register("tiny")(tiny_scale(Path.cwd()))
    main(sys.argv[1:])
"""


@pytest.mark.slow
def test_plugin_method_is_part_of_the_demo(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--scale", "tiny", "--only", "demo", "--methods", "alibi,kerple-log", "--jobs", "2"]
    import_path = os.pathsep.join((str(TESTS), str(TESTS.parent)))
    process = subprocess.run(
        [sys.executable, "script.py", "reproduce", *options, "--plugin", str(PLUGIN)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": import_path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr

    page = (tmp_path / "report" / "tiny" / "index.html").read_text(encoding="utf-8")
    figures = json.loads(page.partition('id="figures">')[2].partition("</script>")[0])
    headline = next(figure for figure in figures if figure["name"] == "headline")
    traces = {trace["name"]: trace for trace in headline["data"] if trace.get("meta") != "band"}
    color = traces["kerple-log"]["line"]["color"]
    assert color == method_color("kerple-log")
    assert color != traces["ALiBi"]["line"]["color"]
    assert max(traces["kerple-log"]["x"]) == 16  # 16 times the training length


def test_unknown_method_is_an_error_before_anything_is_computed(tmp_path):
    process = subprocess.run(
        [sys.executable, "-m", "trainshort", "reproduce", "--only", "demo", "--methods", "alibi,alibbi"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2
    assert "Unknown position method 'alibbi'. Did you mean 'alibi'?" in process.stderr
    assert not list(tmp_path.iterdir())
