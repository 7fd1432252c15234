"""Plug-ins: a method from outside the package, through every command; what is wrong with one, in one sentence."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainshort.cli.main import COMMANDS, run
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

HERE = Path(__file__).parents[1] / "plugins"
KERPLE, GATE, EACH = HERE / "kerple_log.py", HERE / "forget_gate.py", HERE / "one_of_each.py"


@pytest.fixture(scope="module", autouse=True)
def loaded():
    found = [plugins.load_plugin(KERPLE), plugins.load_plugin(GATE)]
    yield
    for plugin in found:  # other tests count the package's own methods
        for table, name in plugin.entries:
            table.remove(name)
    plugins._loaded.clear()


def command(folder: Path, *words: str, code: int = 0, plugin: Path | None = KERPLE) -> str:
    """What a command says, run from an empty folder in a process of its own."""
    given = () if plugin is None else ("--plugin", str(plugin))
    environment = {name: value for name, value in os.environ.items() if name != plugins.PLUGIN_ENV_VAR}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "trainshort", *words, *given]
    done = subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a run of the method from outside."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "text.txt").write_text("the owl and the pussy-cat went to sea in a beautiful pea-green boat. " * 2000)
    small = "--layers 1 --width 32 --heads 4 --length 16 --batch 4 --steps 3 --tokenizer bytes"
    told = command(folder, "train", "demo-alibi", *small.split(), "--corpus", "text.txt", "--position", "kerple-log",
                   "--position-settings.a", "0.5", "--out", "run")  # fmt: skip
    assert "3 steps" in told
    return folder


def test_kerple_is_short_and_outside():
    assert len(KERPLE.read_text().splitlines()) <= 40
    assert "kerple-log" in positions.names()


def test_a_run_remembers_what_it_needs(trained):
    config = load_config(trained / "run" / "config.json")
    assert [(p.name, p.sha256) for p in config.plugins] == [("kerple_log.py", plugins.load_plugin(KERPLE).sha256)]
    assert config.model.position_settings.model_dump() == {"a": 0.5, "b": 1.0}


def test_it_is_read_far_past_its_length_and_goes_on_falling(trained):
    command(trained, "evaluate", "run", "--lengths", "16", "256", "--max-tokens", "600")
    stored = [json.loads(path.read_text()) for path in (trained / "run").rglob("*.json") if "eval" in str(path)]
    assert stored
    bias = TransformerLM(ModelConfig(vocab_size=8, heads=4, width=16, position="kerple-log")).position.score_bias(300)
    assert (bias.table.diff(dim=1) < 0).all()
    assert bias.table.shape == (4, 300)


def test_it_is_in_the_report_with_its_own_colour(trained):
    command(trained, "evaluate", "run", "--lengths", "16", "256", "--max-tokens", "600")
    command(trained, "report", ".", "--out", "page", plugin=None)  # reads results, and needs no code for it
    page = (trained / "page" / "index.html").read_text(encoding="utf-8")
    assert "kerple-log" in page
    assert method_color("kerple-log") in page
    assert method_color("kerple-log") not in {method_color(name) for name in positions.names()[:6]}


def test_reproduce_takes_it(trained):
    told = command(trained, "reproduce", "--only", "table2", "--methods", "alibi,kerple-log", "--plan")
    assert "kerple-log" in told


def test_analyze_takes_it(trained):
    words = "analyze run --only reach recall --samples 2 --max-tokens 600"
    told = " ".join(command(trained, *words.split()).split())
    for name in ("reach", "recall"):
        assert json.loads((trained / "run" / "analysis" / f"{name}.json").read_text())["result"]["summary"] in told


def test_it_generates(trained):
    assert len(command(trained, "generate", "run", "the owl", "--tokens", "9").strip()) > 5


def test_its_settings_are_in_the_help_and_in_the_list(trained):
    told = command(trained, "train", "demo-alibi", "--position", "kerple-log", "--help")
    assert "Initial factor on the logarithm" in " ".join(told.split())
    assert "A penalty that grows with the logarithm of the distance" in command(trained, "list", "positions")


def test_a_missing_plugin_is_one_sentence_and_a_run_brings_no_code(trained):
    told = command(trained, "generate", "run", "the", "--tokens", "2", code=2, plugin=None)
    digest = plugins.load_plugin(KERPLE).sha256[:12]
    assert told == (
        f"trainshort: run needs the plug-in kerple_log.py (sha256 {digest}...), which is not loaded. "
        "Give --plugin path/to/kerple_log.py, or install the package it came with.\n"
    )


def test_a_changed_plugin_is_told_by_its_hash(trained):
    other = trained / "kerple_log.py"
    other.write_text(KERPLE.read_text() + "\n# changed\n")
    before = plugins.load_plugin(KERPLE).sha256[:12]
    for words in (["generate", "run", "the"], ["train", "run", "--resume"]):
        told = command(trained, *words, code=2, plugin=other)
        assert "run was trained with another kerple_log.py: its sha256 was " + before in told
        assert told.count("\n") == 1


BAD = {
    "nonsense(": "does not import: SyntaxError: '(' was never closed",
    "import no_such_module\n": "does not import: ModuleNotFoundError: No module named 'no_such_module' (line 1).",
    "x = 1\ny = 1 / 0\n": "does not import: ZeroDivisionError: division by zero (line 2).",
    "import sys\nsys.exit(0)\n": "does not import: SystemExit: 0 (line 2).",
    "x = 1\n": "registers nothing; see docs/positions.md",
    "from trainshort.model.positions import *\n@positions.register('alibi')\nclass A(PositionMethod):\n"
    "    def score_bias(self, length): return None\n": "cannot be used: position method 'alibi' is already registered",
    "from trainshort.model.positions import *\n@positions.register('new')\nclass A(PositionMethod): ...\n": "position "
    "method 'new' must define at least one of embed, rotate, score_bias, content_bias.",
    "from trainshort.model.positions import *\n@positions.register('new')\nclass A: ...\n": "position method 'new' "
    "must be a class that extends PositionMethod.",
    "from trainshort.attention import backends\n@backends.register('new')\nclass A: ...\n": "attention backend 'new' "
    "lacks unsupported_reason() and run().",
    "from trainshort.evaluate.analyses.base import analyses\n@analyses.register('new')\ndef ask(c): ...\n": "analysis "
    "'new' lacks run() and table().",
    "from trainshort.data.corpora import corpora\ncorpora.register('new')('text.txt')\n": "corpus 'new' lacks "
    "__call__().",
}


@pytest.mark.parametrize("code", BAD, ids=[message[:40] for message in BAD.values()])
def test_a_bad_plugin_is_one_sentence_and_leaves_nothing(tmp_path, code):
    path = tmp_path / "mine.py"
    path.write_text(code)
    known = positions.names()
    for _ in range(2):  # a bad one is not taken for loaded afterwards
        with pytest.raises(InputError) as told:
            plugins.load_plugin(path)
        assert BAD[code] in str(told.value)
        assert str(path) in str(told.value)
    assert positions.names() == known
    assert methods.names() == known


@pytest.mark.parametrize("ending", ["", "1 / 0"])
def test_what_a_plugin_is_the_first_to_import_stays_the_packages(tmp_path, ending):
    """Modules that register as they are imported did so while the plug-in was loaded, and were taken for its own:
    withdrawn with a bad one, and a good one was needed by every run with a method of the package."""
    path = tmp_path / "mine.py"
    path.write_text(
        KERPLE.read_text().replace("kerple-log", "mine") + f"\nimport trainshort.evaluate.analyses\n{ending}\n"
    )
    code = (
        "import sys, contextlib; from pathlib import Path; from trainshort.utils import plugins\n"
        "with contextlib.suppress(plugins.InputError): plugins.load_plugin(Path(sys.argv[1]))\n"
        "from trainshort.evaluate.analyses import analyses; from trainshort.model.positions import positions\n"
        "names = [('position method', name) for name in positions.names() if name != 'mine']\n"
        "print('alibi' in positions, len(analyses.names()), plugins.origins(names))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "True 6 []\n", done.stderr


def test_a_bad_plugin_touches_nothing(tmp_path):
    (tmp_path / "mine.py").write_text("1 / 0\n")
    told = command(tmp_path, "train", "demo-alibi", code=2, plugin=tmp_path / "mine.py")
    assert told.startswith(f"trainshort: The plug-in {tmp_path}/mine.py does not import: ZeroDivisionError")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    told = command(tmp_path, "train", "demo-alibi", code=2, plugin=tmp_path / "none.py")
    assert "none.py" in told
    assert told.count("\n") == 1
    assert "--plugin needs a path" in command(tmp_path, "list", "positions", "--plugin", code=2, plugin=None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--position t5 --max-bias 4", "Position method 't5' has no setting 'max_bias'; it has buckets, max_distance. "
         "It belongs to alibi."),
        ("--buckets 4", "Position method 'alibi' has no setting 'buckets'; it has max_bias, learned_slopes, "
         "slopes. It belongs to t5."),
        ("--position kerple-log --position_settings.a -1", "Setting 'model.position_settings.a' cannot be -1.0"),
        ("--position alibbi", "Unknown position method 'alibbi'. Did you mean 'alibi'?"),
    ],
)  # fmt: skip
def test_settings_of_a_method_that_is_not_chosen(words, message):
    with pytest.raises(InputError) as told:
        Train.parse(["demo-alibi", *words.split()])
    assert message in str(told.value)


def test_a_report_can_read_a_run_whose_method_is_not_here():
    values = {"model": {"position": "gone", "position_settings": {"depth": 3}}}
    config = RunConfig.parse(values)
    assert config.model_dump()["model"]["position_settings"] == {"depth": 3}
    with pytest.raises(InputError, match="Unknown position method 'gone'"):
        TransformerLM(config.model.replace(vocab_size=9))


def test_a_bias_that_looks_at_the_text_has_a_place_in_the_cache():
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(vocab_size=50, layers=2, width=32, heads=4, position="forget-gate")).eval()
    tokens = torch.randint(50, (2, 40))
    with torch.no_grad():
        for gate in model.position.gates:
            gate.weight.mul_(9)
        whole, cache = model(tokens), Cache()
        parts = [model(part, cache=cache) for part in tokens.split([25, 1, 1, 13], dim=1)]
        assert not torch.equal(whole, TransformerLM(model.config.replace(position="none"))(tokens))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-5, rtol=0)
    total, _ = model.train()(tokens, tokens)
    total.backward()
    assert all(gate.weight.grad.abs().sum() > 0 for gate in model.position.gates)


def test_float32_stays_by_the_base_class():
    model = TransformerLM(ModelConfig(vocab_size=8, heads=4, width=16, position="kerple-log")).bfloat16()
    assert model.position.a.dtype == torch.float32
    assert model.layers[0].attention.out.weight.dtype == torch.bfloat16


def test_worker_processes_find_the_same_plugins(tmp_path):
    code = "from trainshort.config.position_config import methods; print(methods.get('kerple-log').summary)"
    environment = os.environ | {plugins.PLUGIN_ENV_VAR: str(KERPLE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith("A penalty"), done.stderr


def test_an_installed_package_is_a_plugin(tmp_path):
    package = tmp_path / "my_kerple"
    package.mkdir()
    (package / "__init__.py").write_text(KERPLE.read_text().replace("kerple-log", "kerple-installed"))
    info = tmp_path / "my_kerple-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-kerple\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[trainshort.plugins]\nkerple = my_kerple\n")
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from trainshort.utils import plugins; from trainshort.config.position_config import methods\n"
        "print(methods.get('kerple-installed').summary)\n"
        "print([p.name for p in plugins.origins([('position method', 'kerple-installed')])])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "A penalty that grows with the logarithm of the distance, trained for each head.",
        "['kerple']",
    ], done.stderr


def test_an_installed_plugin_whose_package_is_gone_is_one_sentence(tmp_path):
    info = tmp_path / "gone-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gone\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[trainshort.plugins]\ngone = no_such_package.part:thing\n")
    code = "import sys; sys.path.insert(0, '.'); from trainshort.cli.main import main; main(['list', 'positions'])"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "trainshort: The plug-in gone (installed, no_such_package.part:thing) does not import: ModuleNotFoundError: No "
        "module named 'no_such_package'.\n"
    )


def test_the_same_file_by_another_path_is_the_same_plugin(tmp_path):
    link = tmp_path / "link.py"
    link.symlink_to(KERPLE)
    dotted = KERPLE.parent / ".." / KERPLE.parent.name / KERPLE.name
    assert all(plugins.load_plugin(path) is plugins.load_plugin(KERPLE) for path in (link, dotted))


def test_a_link_to_itself_is_no_plugin(tmp_path):
    (tmp_path / "loop.py").symlink_to(tmp_path / "loop.py")
    with pytest.raises(InputError, match=r"loop\.py"):
        plugins.load_plugin(tmp_path / "loop.py")


def test_an_error_that_is_not_a_plugins_stays_what_it_is():
    kerple = ("position method", "kerple-log")
    for error in (RuntimeError("out of memory"), ValueError("elsewhere")):
        with pytest.raises(type(error)), plugins.plugin_errors(kerple):
            raise error
    refused = pytest.raises(InputError, match=r"of kerple_log\.py failed: TypeError: no such call\.$")
    with refused, plugins.plugin_errors(kerple):
        raise TypeError("no such call")


def test_a_task_reaches_another_process_with_a_plugins_settings(tmp_path):
    """Workers and cluster jobs get it pickled, before anything is loaded there."""
    config = RunConfig(model=ModelConfig(position="kerple-log", position_settings={"a": 0.25}))
    (tmp_path / "task").write_bytes(pickle.dumps(jobs.Job("mine", config)))
    code = "import pickle; print(pickle.load(open('task', 'rb')).config.model.position_settings.a)"
    environment = os.environ | {plugins.PLUGIN_ENV_VAR: str(KERPLE), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "0.25\n", done.stderr


def test_every_commands_help_tells_of_plugins(capfd):
    for name in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            run([name, "--help"])
        assert "--plugin FILE.py" in capfd.readouterr().out, name


SMALL = ["--layers", "1", "--width", "32", "--heads", "4", "--length", "16", "--batch", "4", "--steps", "2"]
NO_BIAS = "    def score_bias(self, length): return None\n"
FAILED = "The position method 'mine' of mine.py failed: "
FAILING = [
    (
        "    def __init__(self, config): super().__init__(config, None)\n" + NO_BIAS,
        FAILED + "TypeError: A.__init__() takes 2 positional arguments but 3 were given.",
    ),
    (
        "    def score_bias(self): return None\n",
        FAILED + "TypeError: A.score_bias() takes 1 positional argument but 2 were given.",
    ),
    (NO_BIAS.replace("None", "1 / 0"), FAILED + "ZeroDivisionError: division by zero (line 4)."),
    ("    float32 = ('gone',)\n" + NO_BIAS, FAILED + "AttributeError: 'A' object has no attribute 'gone'."),
    (
        NO_BIAS.replace("None", "'steep'"),
        "bias must be LinearBias, DistanceBias, DecayBias, DenseBias or None, got str.",
    ),
]


@pytest.mark.parametrize(("body", "message"), FAILING, ids=[message[-30:] for _, message in FAILING])
def test_a_method_that_fails_is_one_sentence_before_a_folder_is_made(tmp_path, body, message):
    (tmp_path / "owl.txt").write_text("the owl and the pussy-cat went to sea in a beautiful pea-green boat. " * 200)
    text = "from trainshort.model.positions import *\n@positions.register('mine')\nclass A(PositionMethod):\n" + body
    (tmp_path / "mine.py").write_text(text)
    words = ("--position", "mine", "--corpus", "owl.txt", "--tokenizer", "bytes", "--out", "run", "--quiet")
    told = command(tmp_path, "train", "demo-alibi", *SMALL, *words, code=2, plugin=tmp_path / "mine.py")
    assert message in told
    assert "Traceback" not in told
    assert not (tmp_path / "run").exists()


def test_a_backend_that_cannot_is_told_before_a_folder_is_made(tmp_path):
    (tmp_path / "owl.txt").write_text("the owl and the pussy-cat went to sea in a beautiful pea-green boat. " * 200)
    words = ("--position", "t5", "--backend", "windowed", "--corpus", "owl.txt", "--tokenizer", "bytes", "--out", "run")
    told = command(tmp_path, "train", "demo-alibi", *SMALL, *words, "--quiet", code=2, plugin=None)
    assert "Attention backend 'windowed' does not support this call" in told
    assert not (tmp_path / "run").exists()


def test_a_run_whose_corpus_alone_came_from_a_plugin_does_without_it(tmp_path):
    (tmp_path / "owl.txt").write_text("the owl and the pussy-cat went to sea in a beautiful pea-green boat. " * 200)
    words = ("--corpus", "owl", "--tokenizer", "bytes", "--out", "run", "--quiet")
    command(tmp_path, "train", "demo-alibi", *SMALL, *words, plugin=EACH)
    (record,) = load_config(tmp_path / "run" / "config.json").plugins
    assert record.for_data
    command(tmp_path, "generate", "run", "the", "--tokens", "2", plugin=None)
    command(tmp_path, "evaluate", "run", "--data", "owl.txt", "--lengths", "16", "--max-tokens", "64", plugin=None)
    command(tmp_path, "train", "run", "--resume", "--train.steps", "3", "--quiet", plugin=None)
    assert load_config(tmp_path / "run" / "config.json").plugins == (record,)
    other = tmp_path / EACH.name
    other.write_text(EACH.read_text() + "# another hash\n")
    command(tmp_path, "train", "run", "--resume", "--train.steps", "4", "--quiet", plugin=other)
    command(tmp_path, "train", "run", "--corpus", "owl.txt", "--out", "again", "--quiet", plugin=None)
    assert load_config(tmp_path / "again" / "config.json").plugins == ()


def test_one_file_may_bring_one_of_each(tmp_path):
    (tmp_path / "owl.txt").write_text("the owl and the pussy-cat went to sea in a beautiful pea-green boat. " * 2000)
    small = "--layers 1 --width 32 --heads 4 --length 16 --batch 4 --steps 2 --corpus owl --tokenizer letters"
    more = ("--data.vocab-size", "40", "--backend", "echo", "--out", "run", "--quiet")
    command(tmp_path, "train", "demo-alibi", *small.split(), *more, plugin=EACH)
    config = load_config(tmp_path / "run" / "config.json")
    assert [p.name for p in config.plugins] == ["one_of_each.py"]
    assert (
        config.model.vocab_size == len({*"the owl and the pussy-cat went to sea in a beautiful pea-green boat. "}) + 1
    )
    assert "there are" in command(tmp_path, "analyze", "run", "--only", "count", plugin=EACH)
    told = command(tmp_path, "list", plugin=EACH)
    assert all(name in told for name in ("echo", "owl", "letters", "count"))
