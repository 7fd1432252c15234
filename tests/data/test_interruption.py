"""A preparation that is killed continues to byte-identical results; no worker stays behind; a full disk is told."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from corpus_files import content, settings, verify

from trainshort.data import preparation as pipeline_module
from trainshort.data.dataset import UNFINISHED_FILE, open_dataset
from trainshort.data.preparation import prepare
from trainshort.errors import InputError

ROOT = Path(__file__).parents[2]

CHILD = """
import sys
from pathlib import Path
from trainshort.config import DataConfig
from trainshort.data import preparation as pipeline
pipeline.PIECE_CHARACTERS = 5000   # many pieces, and a note after each: many places to be killed at
pipeline.COMMIT_SECONDS = 0
text, folder, workers = sys.argv[1:]
config = DataConfig(corpus=text, folder=Path(folder), vocab_size=300)
pipeline.prepare(config, progress=False, workers=int(workers))
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """One megabyte, about two hundred pieces."""
    words = random.Random(1).choices(["the", "people", "of", "this", "house", "é", "1,024", "\n\n", "said."], k=200_000)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(words))
    return path


def start(text: Path, folder: Path, workers: int, **options) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, str(text), str(folder), str(workers)]
    return subprocess.Popen(command, env=environment, **options)


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    """The children that encode, by what they run: other tests of this process may have left children of their own."""
    found = []
    for child in process.children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if any("trainshort.data.encode_workers" in part for part in child.cmdline()):
                found.append(child)
    return found


def kill_until_done(text: Path, folder: Path, kills: int, seed: int) -> int:
    """Kill `kills` times at random moments after work has begun, then let it finish; how many kills hit it at work."""
    chance = random.Random(seed)
    hit = 0
    for number in range(kills):
        child = start(text, folder, workers=1 + number % 2)
        before = _note(folder)
        while child.poll() is None and _note(folder) == before:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.3))
        child.send_signal(signal.SIGKILL)
        hit += child.wait() == -signal.SIGKILL
    last = start(text, folder, workers=1)
    assert last.wait() == 0
    return hit


def _note(folder: Path) -> int | None:
    path = folder / UNFINISHED_FILE
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def check_kills(text: Path, tmp_path: Path, kills: int) -> int:
    prepare(settings(text, tmp_path / "whole"), progress=False)
    hit = kill_until_done(text, tmp_path / "killed", kills, seed=int(tmp_path.name))
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    verify(open_dataset(tmp_path / "killed"))
    return hit


def kill_at_work(text: Path, tmp_path: Path, wanted: int, kills: int) -> int:
    """Preparations that are killed `kills` times each, until so many kills hit one at work: on a busy machine it may be
    through before the next signal comes. Returns how many preparations that took."""
    hit = rounds = 0
    while hit < wanted:
        assert rounds < 10 * wanted, f"only {hit} of {kills * rounds} kills hit it at work"
        folder = tmp_path / str(rounds)
        folder.mkdir()
        hit += check_kills(text, folder, kills)
        rounds += 1
    return rounds


def test_a_killed_preparation_continues_to_the_same_bytes(text: Path, tmp_path: Path) -> None:
    kill_at_work(text, tmp_path, wanted=1, kills=3)


@pytest.mark.fault
def test_fifty_kills_change_nothing(text: Path, tmp_path: Path) -> None:
    rounds = kill_at_work(text, tmp_path, wanted=50, kills=5)
    print(f"\nprepare: 50 kills hit it at work, in {rounds} preparations, all results byte-identical")


def test_every_moment_between_two_notes_is_safe(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops at each kind of moment: after tokens were written but before the note, and after the note."""
    monkeypatch.setattr(pipeline_module, "PIECE_CHARACTERS", 50_000)
    monkeypatch.setattr(pipeline_module, "COMMIT_SECONDS", 0)
    config = settings(text, tmp_path / "stopped", tokenizer="bytes")
    whole = prepare(settings(text, tmp_path / "whole", tokenizer="bytes"), progress=False)
    append, commit = pipeline_module.TokenWriter.append, pipeline_module.TokenWriter.commit

    class StoppedError(Exception):
        pass

    for method, original in (("append", append), ("commit", commit)):
        for _ in range(4):
            calls = iter(range(3))

            def stopping(writer, *given, original=original, calls=calls):
                original(writer, *given)
                if next(calls) == 2:
                    for file in writer._files.values():
                        file.flush()
                    raise StoppedError

            monkeypatch.setattr(pipeline_module.TokenWriter, method, stopping)
            with pytest.raises(StoppedError):
                prepare(config, progress=False, workers=1)
            monkeypatch.setattr(pipeline_module.TokenWriter, method, original)
            with pytest.raises(InputError, match=r"preparation of .*stopped did not finish\. Run the same prepare"):
                open_dataset(tmp_path / "stopped")
    prepare(config, progress=False)
    assert content(tmp_path / "stopped") == content(whole.folder)


def interrupted(text: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave an unfinished folder behind."""
    with monkeypatch.context() as patch:
        patch.setattr(pipeline_module, "PIECE_CHARACTERS", 50_000)
        patch.setattr(pipeline_module, "COMMIT_SECONDS", 0)
        patch.setattr(pipeline_module, "_finish", lambda job, note: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(settings(text, folder), progress=False, workers=1)


def test_unfinished_data_of_other_settings_is_refused(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(text, tmp_path / "out", monkeypatch)
    with pytest.raises(InputError, match=r"out holds an unfinished preparation from vocabulary 300, not 301"):
        prepare(settings(text, tmp_path / "out", vocab_size=301), progress=False)


def test_without_resume_it_begins_anew(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(text, tmp_path / "out", monkeypatch)
    (tmp_path / "out" / "train.bin").write_bytes(b"")  # damage that continuing would notice
    with pytest.raises(InputError, match=r"train\.bin is shorter than unfinished\.json says"):
        prepare(settings(text, tmp_path / "out"), progress=False)
    verify(prepare(settings(text, tmp_path / "out"), progress=False, resume=False))


def test_ctrl_c_says_how_to_continue(text: Path, tmp_path: Path) -> None:
    command = f"['prepare', {str(text)!r}, '--vocab-size', '300', '--workers', '2', '--out', {str(tmp_path / 'out')!r}]"
    # A pause after each note, so that it is still at work when the signal comes, however busy the machine is.
    slow = "import time\ncommit = pipeline.Writer.commit\n"
    slow += "pipeline.Writer.commit = lambda *given: (commit(*given), time.sleep(0.05))\n"
    code = CHILD.partition("text, folder")[0] + slow + f"from trainshort.cli.main import main\nmain({command})"
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    first = None
    while child.poll() is None and (first is None or _note(tmp_path / "out") == first):
        first = first or _note(tmp_path / "out")
        time.sleep(0.005)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to the workers too
    _, said = child.communicate()
    assert child.returncode == 130
    assert said.strip() == f"Stopped. The same command continues in {tmp_path / 'out'}."
    verify(prepare(settings(text, tmp_path / "out"), progress=False))


def test_workers_leave_when_their_parent_is_killed(text: Path, tmp_path: Path) -> None:
    child = start(text, tmp_path / "out", workers=2, stderr=subprocess.PIPE, encoding="utf-8")
    process = psutil.Process(child.pid)
    workers: list[psutil.Process] = []
    while child.poll() is None and len(workers) < 2:
        workers = workers_of(process)
        time.sleep(0.005)
    assert len(workers) == 2
    child.kill()
    _, said = child.communicate()  # ends when the last worker has closed its stderr
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
    assert "Traceback" not in said


def test_a_killed_worker_is_told(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_module, "PIECE_CHARACTERS", 5000)
    original = pipeline_module.TokenWriter.append
    # An older child that has nothing to do with it, as another test's server would be.
    bystander = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    killed: list[psutil.Process] = []

    def kill_one(writer, parts) -> None:
        original(writer, parts)
        if not killed:
            killed.append(workers_of(psutil.Process())[0])
            killed[0].kill()

    monkeypatch.setattr(pipeline_module.TokenWriter, "append", kill_one)
    with pytest.raises(InputError, match=r"A worker process ended by itself \(exit code -9; .* Run the same command"):
        prepare(settings(text, tmp_path / "out"), progress=False, workers=2)
    assert bystander.poll() is None
    bystander.communicate()
    monkeypatch.setattr(pipeline_module.TokenWriter, "append", original)
    verify(prepare(settings(text, tmp_path / "out"), progress=False, workers=2))


def test_a_full_disk_is_told_and_nothing_is_lost(text: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: writing beyond it fails as on a full one."""
    code = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" + CHILD.replace(
        "pipeline.prepare(", "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\npipeline.prepare("
    )
    command = [sys.executable, "-c", code, str(text), str(tmp_path / "out"), "1"]
    stopped = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert stopped.returncode == 1
    assert f"InputError: The disk that holds {tmp_path / 'out'} is full. Free some space, and run" in stopped.stderr
    prepare(settings(text, tmp_path / "whole"), progress=False)
    prepare(settings(text, tmp_path / "out"), progress=False)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_two_processes_share_one_folder(text: Path, tmp_path: Path) -> None:
    """As under torchrun: the second waits for the first, and opens what it made."""
    both = [start(text, tmp_path / "out", workers=1) for _ in range(2)]
    assert [child.wait() for child in both] == [0, 0]
    verify(open_dataset(tmp_path / "out"))
