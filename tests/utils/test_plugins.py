"""Tests of plug-ins: commands work with a method that a plug-in registers, and errors of plug-ins are one line."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainshort.cli.main import COMMANDS, main
from trainshort.cli.train import Train
from trainshort.config.position_config import methods
from trainshort.config.run_config import ModelConfig, RunConfig, load_config
from trainshort.errors import InputError
from trainshort.experiments.reproduce import jobs
from trainshort.model.cache import Cache
from trainshort.model.positions import positions
from trainshort.model.transformer import TransformerLM
from trainshort.utils import plugins
from trainshort.utils.figures import method_color

ROOT = Path(__file__).parents[2]
PLUGIN_FOLDER = ROOT / "tests" / "plugins"
KERPLE = PLUGIN_FOLDER / "kerple_log.py"
FORGET_GATE = PLUGIN_FOLDER / "forget_gate.py"
ONE_OF_EACH = PLUGIN_FOLDER / "one_of_each.py"

RHYME = "the owl and the pussy-cat went to sea in a beautiful pea-green boat. "


@pytest.fixture(scope="module", autouse=True)
def load_test_plugins():
    """Load two plug-ins for the tests of this file, and remove their entries afterwards."""
    loaded_plugins = [plugins.load_plugin(KERPLE), plugins.load_plugin(FORGET_GATE)]
    yield
    for plugin in loaded_plugins:
        for registry, name in plugin.entries:
            registry.remove(name)
    plugins._loaded.clear()


def run_python(code: str, *arguments: str, folder: Path, plugin: Path | None = None) -> subprocess.CompletedProcess:
    """Run Python code in a folder, in a new process. The plug-in is named by the environment variable."""
    environment = {name: value for name, value in os.environ.items() if name != plugins.PLUGIN_ENV_VAR}
    environment["PYTHONPATH"] = str(ROOT)
    if plugin is not None:
        environment[plugins.PLUGIN_ENV_VAR] = str(plugin)
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def run_command(folder: Path, *words: str, code: int = 0, plugin: Path | None = KERPLE) -> str:
    """Run a command of trainshort with a plug-in in a folder, in a new process.

    Returns:
        The standard output if the command succeeds. If an error is expected (`code` is not 0), the standard error.
    """
    plugin_option = () if plugin is None else ("--plugin", str(plugin))
    environment = {name: value for name, value in os.environ.items() if name != plugins.PLUGIN_ENV_VAR}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainshort", *words, *plugin_option]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == code, process.stderr
    return process.stdout if code == 0 else process.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Train a model with the method of a plug-in, and return the folder that contains the run."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "text.txt").write_text(RHYME * 2000)
    small = "--layers 1 --width 32 --heads 4 --length 16 --batch 4 --steps 3 --tokenizer bytes"
    method = "--position kerple-log --position-settings.a 0.5"
    options = (*small.split(), *method.split(), "--corpus", "text.txt", "--out", "run")
    output = run_command(folder, "train", "demo-alibi", *options)
    assert "3 steps" in output
    return folder


def test_example_plugin_is_short():
    assert len(KERPLE.read_text().splitlines()) <= 40
    assert "kerple-log" in positions.names()


def test_run_stores_the_plugin(trained):
    config = load_config(trained / "run" / "config.json")
    assert [(record.name, record.sha256) for record in config.plugins] == [
        ("kerple_log.py", plugins.load_plugin(KERPLE).sha256)
    ]
    assert config.model.position_settings.model_dump() == {"a": 0.5, "b": 1.0}


def test_method_of_plugin_is_evaluated_at_long_lengths(trained):
    run_command(trained, "evaluate", "run", "--lengths", "16", "256", "--max-tokens", "600")
    stored = [json.loads(path.read_text()) for path in (trained / "run").rglob("*.json") if "eval" in str(path)]
    assert stored
    bias = TransformerLM(ModelConfig(vocab_size=8, heads=4, width=16, position="kerple-log")).position.score_bias(300)
    assert (bias.table.diff(dim=1) < 0).all()
    assert bias.table.shape == (4, 300)


def test_method_of_plugin_has_its_own_color_in_the_report(trained):
    run_command(trained, "evaluate", "run", "--lengths", "16", "256", "--max-tokens", "600")
    run_command(trained, "report", ".", "--out", "page", plugin=None)  # The report only reads stored results.
    page = (trained / "page" / "index.html").read_text(encoding="utf-8")
    assert "kerple-log" in page
    assert method_color("kerple-log") in page
    assert method_color("kerple-log") not in {method_color(name) for name in positions.names()[:6]}


def test_reproduce_accepts_method_of_plugin(trained):
    output = run_command(trained, "reproduce", "--only", "table2", "--methods", "alibi,kerple-log", "--plan")
    assert "kerple-log" in output


def test_analyze_accepts_method_of_plugin(trained):
    words = "analyze run --only reach recall --samples 2 --max-tokens 600"
    output = run_command(trained, *words.split())
    output_without_line_breaks = " ".join(output.split())
    for name in ("reach", "recall"):
        stored = json.loads((trained / "run" / "analysis" / f"{name}.json").read_text())
        assert stored["result"]["summary"] in output_without_line_breaks


def test_model_with_method_of_plugin_generates_text(trained):
    assert len(run_command(trained, "generate", "run", "the owl", "--tokens", "9").strip()) > 5


def test_help_and_list_describe_the_method_of_plugin(trained):
    output = run_command(trained, "train", "demo-alibi", "--position", "kerple-log", "--help")
    assert "Initial factor on the logarithm" in " ".join(output.split())
    assert "A penalty that grows with the logarithm of the distance" in run_command(trained, "list", "positions")


def assert_one_line_with(stderr: str, *parts: str) -> None:
    """Assert that an error message is one line that contains all parts."""
    assert len(stderr.splitlines()) == 1, stderr
    for part in parts:
        assert part in stderr


def test_run_without_its_plugin_raises_error(trained):
    stderr = run_command(trained, "generate", "run", "the", "--tokens", "2", code=2, plugin=None)
    sha256 = plugins.load_plugin(KERPLE).sha256[:12]
    assert_one_line_with(stderr, "run ", "kerple_log.py", sha256, "--plugin")


def test_run_with_a_changed_plugin_raises_error(trained):
    changed_plugin = trained / "kerple_log.py"
    changed_plugin.write_text(KERPLE.read_text() + "\n# changed\n")
    sha256 = plugins.load_plugin(KERPLE).sha256[:12]
    for words in (["generate", "run", "the"], ["train", "run", "--resume"]):
        stderr = run_command(trained, *words, code=2, plugin=changed_plugin)
        assert_one_line_with(stderr, "run ", "kerple_log.py", sha256)


# Source code of plug-ins that cannot be loaded, and parts of the error messages.
BAD_PLUGINS = {
    "syntax error": ("nonsense(", ["SyntaxError"]),
    "missing module": ("import no_such_module\n", ["ModuleNotFoundError", "no_such_module", "line 1"]),
    "error": ("x = 1\ny = 1 / 0\n", ["ZeroDivisionError", "line 2"]),
    "exit": ("import sys\nsys.exit(0)\n", ["SystemExit", "line 2"]),
    "nothing registered": ("x = 1\n", ["registers nothing", "docs/positions.md"]),
    "name is taken": (
        "from trainshort.model.positions import *\n"
        "@positions.register('alibi')\n"
        "class A(PositionMethod):\n"
        "    def score_bias(self, length): return None\n",
        ["position method 'alibi'", "already registered"],
    ),
    "method without a hook": (
        "from trainshort.model.positions import *\n@positions.register('new')\nclass A(PositionMethod): ...\n",
        ["position method 'new'", "embed", "rotate", "score_bias"],
    ),
    "method without base class": (
        "from trainshort.model.positions import *\n@positions.register('new')\nclass A: ...\n",
        ["position method 'new'", "PositionMethod"],
    ),
    "backend without methods": (
        "from trainshort.config.registries import backends\n@backends.register('new')\nclass A: ...\n",
        ["attention backend 'new'", "unsupported_reason()", "run()"],
    ),
    "analysis without methods": (
        "from trainshort.evaluate.analyses.base import analyses\n@analyses.register('new')\ndef ask(c): ...\n",
        ["analysis 'new'", "run()", "table()"],
    ),
    "corpus is no function": (
        "from trainshort.data.corpora import corpora\ncorpora.register('new')('text.txt')\n",
        ["corpus 'new'", "__call__()"],
    ),
}


@pytest.mark.parametrize("case", BAD_PLUGINS)
def test_bad_plugin_raises_error_and_registers_nothing(tmp_path, case):
    code, message_parts = BAD_PLUGINS[case]
    path = tmp_path / "mine.py"
    path.write_text(code)
    known_names = positions.names()
    for _ in range(2):  # A plug-in that failed does not count as loaded.
        with pytest.raises(InputError) as raised:
            plugins.load_plugin(path)
        assert_one_line_with(str(raised.value), str(path), *message_parts)
    assert positions.names() == known_names
    assert methods.names() == known_names


@pytest.mark.parametrize("last_line", ["", "1 / 0"])
def test_entries_of_the_package_do_not_belong_to_the_plugin_that_imports_them_first(tmp_path, last_line):
    """Modules of the package register entries when they are imported, also if a plug-in imports them first."""
    path = tmp_path / "mine.py"
    plugin_code = KERPLE.read_text().replace("kerple-log", "mine")
    path.write_text(f"{plugin_code}\nimport trainshort.evaluate.analyses\n{last_line}\n")
    code = """
import sys, contextlib
from pathlib import Path
from trainshort.utils import plugins
with contextlib.suppress(plugins.InputError):
    plugins.load_plugin(Path(sys.argv[1]))
from trainshort.evaluate.analyses import analyses
from trainshort.model.positions import positions
names = [("position method", name) for name in positions.names() if name != "mine"]
print("alibi" in positions, len(analyses.names()), plugins.plugins_of(names))
"""
    process = run_python(code, str(path), folder=tmp_path)
    assert process.stdout == "True 6 []\n", process.stderr


def test_command_with_a_bad_plugin_writes_nothing(tmp_path):
    (tmp_path / "mine.py").write_text("1 / 0\n")
    stderr = run_command(tmp_path, "train", "demo-alibi", code=2, plugin=tmp_path / "mine.py")
    assert_one_line_with(stderr, f"{tmp_path}/mine.py", "ZeroDivisionError")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    stderr = run_command(tmp_path, "train", "demo-alibi", code=2, plugin=tmp_path / "none.py")
    assert_one_line_with(stderr, "none.py")
    stderr = run_command(tmp_path, "list", "positions", "--plugin", code=2, plugin=None)
    assert_one_line_with(stderr, "--plugin")


@pytest.mark.parametrize(
    ("words", "message_parts"),
    [
        ("--position t5 --max-bias 4", ["'t5'", "'max_bias'", "buckets, max_distance", "alibi"]),
        ("--buckets 4", ["'alibi'", "'buckets'", "max_bias, learned_slopes, slopes", "t5"]),
        ("--position kerple-log --position_settings.a -1", ["'model.position_settings.a'", "-1.0"]),
        ("--position alibbi", ["'alibbi'", "'alibi'"]),
    ],
)
def test_invalid_settings_of_position_methods_raise_errors(words, message_parts):
    with pytest.raises(InputError) as raised:
        Train.parse(["demo-alibi", *words.split()])
    for part in message_parts:
        assert part in str(raised.value)


def test_config_with_an_unknown_method_can_be_read():
    values = {"model": {"position": "gone", "position_settings": {"depth": 3}}}
    config = RunConfig.parse(values)
    assert config.model_dump()["model"]["position_settings"] == {"depth": 3}
    with pytest.raises(InputError, match="Unknown position method 'gone'"):
        TransformerLM(config.model.replace(vocab_size=9))


def test_bias_that_depends_on_the_text_works_with_the_cache():
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(vocab_size=50, layers=2, width=32, heads=4, position="forget-gate")).eval()
    tokens = torch.randint(50, (2, 40))
    with torch.no_grad():
        for gate in model.position.gates:
            gate.weight.mul_(9)
        expected = model(tokens)
        cache = Cache()
        parts = [model(part, cache=cache) for part in tokens.split([25, 1, 1, 13], dim=1)]
        assert not torch.equal(expected, TransformerLM(model.config.replace(position="none"))(tokens))
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=2e-5, rtol=0)
    total, _ = model.train()(tokens, tokens)
    total.backward()
    assert all(gate.weight.grad.abs().sum() > 0 for gate in model.position.gates)


def test_base_class_keeps_parameters_in_float32():
    model = TransformerLM(ModelConfig(vocab_size=8, heads=4, width=16, position="kerple-log")).bfloat16()
    assert model.position.a.dtype == torch.float32
    assert model.layers[0].attention.out.weight.dtype == torch.bfloat16


def test_subprocesses_load_the_same_plugins(tmp_path):
    code = "from trainshort.config.position_config import methods; print(methods.get('kerple-log').summary)"
    process = run_python(code, folder=tmp_path, plugin=KERPLE)
    assert process.stdout.startswith("A penalty"), process.stderr


def write_entry_point(folder: Path, package: str, entry_point: str) -> None:
    """Write the metadata of an installed package with one entry point, such as "name = module"."""
    info_folder = folder / f"{package}-1.dist-info"
    info_folder.mkdir()
    (info_folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info_folder / "entry_points.txt").write_text(f"[trainshort.plugins]\n{entry_point}\n")


def test_installed_package_is_loaded_as_plugin(tmp_path):
    package = tmp_path / "my_kerple"
    package.mkdir()
    (package / "__init__.py").write_text(KERPLE.read_text().replace("kerple-log", "kerple-installed"))
    write_entry_point(tmp_path, "my_kerple", "kerple = my_kerple")
    code = """
import sys
sys.path.insert(0, ".")
from trainshort.utils import plugins
from trainshort.config.position_config import methods
print(methods.get("kerple-installed").summary)
print([plugin.name for plugin in plugins.plugins_of([("position method", "kerple-installed")])])
"""
    process = run_python(code, folder=tmp_path)
    summary, names = process.stdout.splitlines()
    assert summary.startswith("A penalty"), process.stderr
    assert names == "['kerple']"


def test_entry_point_of_a_missing_package_raises_error(tmp_path):
    write_entry_point(tmp_path, "gone", "gone = no_such_package.part:thing")
    code = "import sys; sys.path.insert(0, '.'); from trainshort.cli.main import main; main(['list', 'positions'])"
    process = run_python(code, folder=tmp_path)
    assert process.returncode == 2
    assert_one_line_with(process.stderr, "gone", "no_such_package.part:thing", "ModuleNotFoundError")


def test_plugin_file_is_loaded_once_under_different_paths(tmp_path):
    link = tmp_path / "link.py"
    link.symlink_to(KERPLE)
    path_with_dots = KERPLE.parent / ".." / KERPLE.parent.name / KERPLE.name
    for path in (link, path_with_dots):
        assert plugins.load_plugin(path) is plugins.load_plugin(KERPLE)


def test_link_to_itself_raises_error(tmp_path):
    (tmp_path / "loop.py").symlink_to(tmp_path / "loop.py")
    with pytest.raises(InputError, match=r"loop\.py"):
        plugins.load_plugin(tmp_path / "loop.py")


def test_only_errors_of_plugins_become_input_errors():
    kerple = ("position method", "kerple-log")
    for error in (RuntimeError("out of memory"), ValueError("elsewhere")):
        with pytest.raises(type(error)), plugins.plugin_errors(kerple):
            raise error
    plugin_error = pytest.raises(InputError, match=r"kerple_log\.py .*TypeError: no such call\.$")
    with plugin_error, plugins.plugin_errors(kerple):
        raise TypeError("no such call")


def test_pickled_job_with_settings_of_a_plugin_is_loaded_in_another_process(tmp_path):
    config = RunConfig(model=ModelConfig(position="kerple-log", position_settings={"a": 0.25}))
    (tmp_path / "task").write_bytes(pickle.dumps(jobs.Job("mine", config)))
    code = "import pickle; print(pickle.load(open('task', 'rb')).config.model.position_settings.a)"
    process = run_python(code, folder=tmp_path, plugin=KERPLE)
    assert process.stdout == "0.25\n", process.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_mentions_plugins(name, capfd):
    with pytest.raises(SystemExit) as exit_info:
        main([name, "--help"])
    assert not exit_info.value.code
    assert "--plugin FILE.py" in capfd.readouterr().out


SMALL_MODEL = ["--layers", "1", "--width", "32", "--heads", "4", "--length", "16", "--batch", "4", "--steps", "2"]

# The body of the class of a position method that fails, and parts of the error message.
FAILING_METHODS = {
    "wrong __init__": (
        "    def __init__(self, config): super().__init__(config, None)\n"
        "    def score_bias(self, length): return None\n",
        ["'mine' of mine.py", "TypeError", "__init__()"],
    ),
    "wrong score_bias": (
        "    def score_bias(self): return None\n",
        ["'mine' of mine.py", "TypeError", "score_bias()"],
    ),
    "error in score_bias": (
        "    def score_bias(self, length): return 1 / 0\n",
        ["'mine' of mine.py", "ZeroDivisionError", "line 4"],
    ),
    "unknown parameter in float32": (
        "    float32 = ('gone',)\n    def score_bias(self, length): return None\n",
        ["'mine' of mine.py", "AttributeError", "'gone'"],
    ),
    "bias of a wrong type": (
        "    def score_bias(self, length): return 'steep'\n",
        ["LinearBias", "DistanceBias", "DecayBias", "DenseBias", "str"],
    ),
}


@pytest.mark.parametrize("case", FAILING_METHODS)
def test_failing_method_raises_error_before_a_folder_is_created(tmp_path, case):
    body, message_parts = FAILING_METHODS[case]
    (tmp_path / "owl.txt").write_text(RHYME * 200)
    header = "from trainshort.model.positions import *\n@positions.register('mine')\nclass A(PositionMethod):\n"
    (tmp_path / "mine.py").write_text(header + body)
    options = ("--position", "mine", "--corpus", "owl.txt", "--tokenizer", "bytes", "--out", "run", "--quiet")
    stderr = run_command(tmp_path, "train", "demo-alibi", *SMALL_MODEL, *options, code=2, plugin=tmp_path / "mine.py")
    assert "Traceback" not in stderr
    for part in message_parts:
        assert part in stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_unsupported_backend_raises_error_before_a_folder_is_created(tmp_path):
    (tmp_path / "owl.txt").write_text(RHYME * 200)
    words = ("--position", "t5", "--backend", "windowed", "--corpus", "owl.txt", "--tokenizer", "bytes", "--out", "run")
    output = run_command(tmp_path, "train", "demo-alibi", *SMALL_MODEL, *words, "--quiet", code=2, plugin=None)
    assert "backend 'windowed'" in output
    assert not (tmp_path / "run").exists()


def test_run_does_not_need_the_plugin_of_its_corpus(tmp_path):
    (tmp_path / "owl.txt").write_text(RHYME * 200)
    words = ("--corpus", "owl", "--tokenizer", "bytes", "--out", "run", "--quiet")
    run_command(tmp_path, "train", "demo-alibi", *SMALL_MODEL, *words, plugin=ONE_OF_EACH)
    (record,) = load_config(tmp_path / "run" / "config.json").plugins
    assert record.for_data
    run_command(tmp_path, "generate", "run", "the", "--tokens", "2", plugin=None)
    run_command(tmp_path, "evaluate", "run", "--data", "owl.txt", "--lengths", "16", "--max-tokens", "64", plugin=None)
    run_command(tmp_path, "train", "run", "--resume", "--train.steps", "3", "--quiet", plugin=None)
    assert load_config(tmp_path / "run" / "config.json").plugins == (record,)
    changed_plugin = tmp_path / ONE_OF_EACH.name
    changed_plugin.write_text(ONE_OF_EACH.read_text() + "# another hash\n")
    run_command(tmp_path, "train", "run", "--resume", "--train.steps", "4", "--quiet", plugin=changed_plugin)
    run_command(tmp_path, "train", "run", "--corpus", "owl.txt", "--out", "again", "--quiet", plugin=None)
    assert load_config(tmp_path / "again" / "config.json").plugins == ()


def test_one_plugin_can_register_entries_of_all_kinds(tmp_path):
    (tmp_path / "owl.txt").write_text(RHYME * 2000)
    small = "--layers 1 --width 32 --heads 4 --length 16 --batch 4 --steps 2 --corpus owl --tokenizer letters"
    more = ("--data.vocab-size", "40", "--backend", "echo", "--out", "run", "--quiet")
    run_command(tmp_path, "train", "demo-alibi", *small.split(), *more, plugin=ONE_OF_EACH)
    config = load_config(tmp_path / "run" / "config.json")
    assert [record.name for record in config.plugins] == ["one_of_each.py"]
    assert config.model.vocab_size == len(set(RHYME)) + 1
    assert "there are" in run_command(tmp_path, "analyze", "run", "--only", "count", plugin=ONE_OF_EACH)
    output = run_command(tmp_path, "list", plugin=ONE_OF_EACH)
    assert all(name in output for name in ("echo", "owl", "letters", "count"))
