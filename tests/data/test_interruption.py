"""Tests of interrupted preparations: they continue to byte-identical results, and no worker process stays behind."""

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
from corpus_files import data_config, file_hashes, verify_all_files

from trainshort.data import preparation
from trainshort.data.dataset import UNFINISHED_FILE, open_dataset
from trainshort.data.preparation import prepare
from trainshort.errors import InputError

ROOT = Path(__file__).parents[2]

# The chunks are small, and the state is stored after each chunk. A preparation can therefore be killed at many places.
SMALL_CHUNKS = """
import sys
from pathlib import Path
from trainshort.config.run_config import DataConfig
from trainshort.data import preparation
preparation.CHUNK_CHARACTERS = 5000
preparation.COMMIT_SECONDS = 0
"""

PREPARE = """
text, folder, workers = sys.argv[1:]
config = DataConfig(corpus=text, folder=Path(folder), vocab_size=300)
preparation.prepare(config, progress=False, workers=int(workers))
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Write a text of one megabyte, which has about two hundred chunks."""
    vocabulary = ["the", "people", "of", "this", "house", "é", "1,024", "\n\n", "said."]
    words = random.Random(1).choices(vocabulary, k=200_000)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(words))
    return path


def start_preparation(text: Path, folder: Path, workers: int, **options) -> subprocess.Popen:
    """Start a preparation in a new process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SMALL_CHUNKS + PREPARE, str(text), str(folder), str(workers)]
    return subprocess.Popen(command, env=environment, **options)


def find_workers(process: psutil.Process) -> list[psutil.Process]:
    """Return the child processes that encode text. Other tests may have left other child processes."""
    workers = []
    for child in process.children():
        with contextlib.suppress(psutil.Error):  # The child has ended.
            if any("trainshort.data.encode_workers" in argument for argument in child.cmdline()):
                workers.append(child)
    return workers


def state_time(folder: Path) -> int | None:
    """Return when the state of a preparation was stored, or None if there is no stored state."""
    try:
        return (folder / UNFINISHED_FILE).stat().st_mtime_ns
    except FileNotFoundError:
        return None


def kill_repeatedly(text: Path, folder: Path, kills: int, seed: int) -> int:
    """Kill a preparation `kills` times at random moments, and then let it finish.

    Returns:
        How many kills hit a running preparation. On a busy machine, a preparation can end before the signal arrives.
    """
    rng = random.Random(seed)
    hits = 0
    for number in range(kills):
        process = start_preparation(text, folder, workers=1 + number % 2)
        time_before = state_time(folder)
        while process.poll() is None and state_time(folder) == time_before:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            hits += 1
    last_process = start_preparation(text, folder, workers=1)
    assert last_process.wait() == 0
    return hits


def check_killed_preparation(text: Path, folder: Path, kills: int) -> int:
    """Check that a preparation that was killed gives the same files as an uninterrupted preparation.

    Returns:
        How many kills hit a running preparation.
    """
    prepare(data_config(text, folder / "uninterrupted"), progress=False)
    hits = kill_repeatedly(text, folder / "killed", kills, seed=int(folder.name))
    assert file_hashes(folder / "killed") == file_hashes(folder / "uninterrupted")
    verify_all_files(open_dataset(folder / "killed"))
    return hits


def check_until_hit(text: Path, tmp_path: Path, required_hits: int, kills: int) -> int:
    """Repeat `check_killed_preparation` until enough kills have hit a running preparation.

    Returns:
        The number of preparations.
    """
    hits = 0
    preparations = 0
    while hits < required_hits:
        assert preparations < 10 * required_hits, f"only {hits} of {kills * preparations} kills hit a preparation"
        folder = tmp_path / str(preparations)
        folder.mkdir()
        hits += check_killed_preparation(text, folder, kills)
        preparations += 1
    return preparations


def test_killed_preparation_continues_to_the_same_bytes(text: Path, tmp_path: Path) -> None:
    check_until_hit(text, tmp_path, required_hits=1, kills=3)


@pytest.mark.fault
def test_fifty_kills_do_not_change_the_result(text: Path, tmp_path: Path) -> None:
    preparations = check_until_hit(text, tmp_path, required_hits=50, kills=5)
    print(f"\nprepare: 50 kills in {preparations} preparations, all results are byte-identical")


class StoppedError(Exception):
    """Raised by tests to stop a preparation."""


@pytest.mark.parametrize("method", ["append", "commit"])
def test_preparation_can_stop_before_and_after_a_commit(
    method: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", 50_000)
    monkeypatch.setattr(preparation, "COMMIT_SECONDS", 0)
    config = data_config(text, tmp_path / "stopped", tokenizer="bytes")
    uninterrupted = prepare(data_config(text, tmp_path / "uninterrupted", tokenizer="bytes"), progress=False)
    original = getattr(preparation.TokenWriter, method)
    for _ in range(4):
        calls = 0

        def stop_at_third_call(writer, *arguments):
            nonlocal calls
            original(writer, *arguments)
            calls += 1
            if calls == 3:
                for file in writer._files.values():
                    file.flush()
                raise StoppedError

        with monkeypatch.context() as patch:
            patch.setattr(preparation.TokenWriter, method, stop_at_third_call)
            with pytest.raises(StoppedError):
                prepare(config, progress=False, workers=1)
        with pytest.raises(InputError, match=r"stopped .*same prepare command"):
            open_dataset(tmp_path / "stopped")
    prepare(config, progress=False)
    assert file_hashes(tmp_path / "stopped") == file_hashes(uninterrupted.folder)


def interrupt_preparation(text: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a preparation before it finishes, so that an unfinished folder remains."""

    def interrupt(context, state):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "CHUNK_CHARACTERS", 50_000)
        patch.setattr(preparation, "COMMIT_SECONDS", 0)
        patch.setattr(preparation, "_finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(data_config(text, folder), progress=False, workers=1)


def test_unfinished_dataset_is_not_continued_with_other_settings(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_preparation(text, tmp_path / "out", monkeypatch)
    with pytest.raises(InputError, match=r"out .*unfinished.* 300, not 301"):
        prepare(data_config(text, tmp_path / "out", vocab_size=301), progress=False)


def test_resume_false_starts_again(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_preparation(text, tmp_path / "out", monkeypatch)
    (tmp_path / "out" / "train.bin").write_bytes(b"")  # A preparation that continues notices the missing tokens.
    with pytest.raises(InputError, match=r"train\.bin .*unfinished\.json"):
        prepare(data_config(text, tmp_path / "out"), progress=False)
    verify_all_files(prepare(data_config(text, tmp_path / "out"), progress=False, resume=False))


def test_ctrl_c_says_how_to_continue(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    command = ["prepare", str(text), "--vocab-size", "300", "--workers", "2", "--out", str(folder)]
    # Each commit is followed by a pause, so that the preparation still runs when the signal arrives.
    code = (
        SMALL_CHUNKS
        + "import time\n"
        + "commit = preparation.TokenWriter.commit\n"
        + "preparation.TokenWriter.commit = lambda *arguments: (commit(*arguments), time.sleep(0.05))\n"
        + f"from trainshort.cli.main import main\nmain({command})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    first_time = None
    while process.poll() is None and (first_time is None or state_time(folder) == first_time):
        first_time = first_time or state_time(folder)
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)  # A terminal also sends the signal to the worker processes.
    _, stderr = process.communicate()
    assert process.returncode == 130
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    assert str(folder) in lines[0]
    verify_all_files(prepare(data_config(text, folder), progress=False))


def test_workers_exit_when_their_parent_is_killed(text: Path, tmp_path: Path) -> None:
    process = start_preparation(text, tmp_path / "out", workers=2, stderr=subprocess.PIPE, encoding="utf-8")
    parent = psutil.Process(process.pid)
    workers: list[psutil.Process] = []
    while process.poll() is None and len(workers) < 2:
        workers = find_workers(parent)
        time.sleep(0.005)
    assert len(workers) == 2
    process.kill()
    _, stderr = process.communicate()  # Returns when the last worker has closed its standard error.
    _, running_workers = psutil.wait_procs(workers, timeout=30)
    assert not running_workers
    assert "Traceback" not in stderr


def test_killed_worker_raises_error(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", 5000)
    original_append = preparation.TokenWriter.append
    # Another child process of the same parent must not be affected.
    unrelated_process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    killed_workers: list[psutil.Process] = []

    def append_and_kill_worker(writer, encoded) -> None:
        original_append(writer, encoded)
        if not killed_workers:
            worker = find_workers(psutil.Process())[0]
            worker.kill()
            killed_workers.append(worker)

    with monkeypatch.context() as patch:
        patch.setattr(preparation.TokenWriter, "append", append_and_kill_worker)
        with pytest.raises(InputError, match=r"worker process .*-9.*--workers"):
            prepare(data_config(text, tmp_path / "out"), progress=False, workers=2)
    assert unrelated_process.poll() is None
    unrelated_process.communicate()
    verify_all_files(prepare(data_config(text, tmp_path / "out"), progress=False, workers=2))


def test_preparation_continues_after_a_full_disk(text: Path, tmp_path: Path) -> None:
    """The test limits the size of files. Writing more bytes then fails as on a full disk."""
    folder = tmp_path / "out"
    ignore_signal = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit_file_size = "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
    code = ignore_signal + SMALL_CHUNKS + limit_file_size + PREPARE
    command = [sys.executable, "-c", code, str(text), str(folder), "1"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert f"InputError: The disk that holds {folder} is full." in process.stderr
    prepare(data_config(text, tmp_path / "uninterrupted"), progress=False)
    prepare(data_config(text, folder), progress=False)
    assert file_hashes(folder) == file_hashes(tmp_path / "uninterrupted")


def test_two_processes_can_prepare_the_same_folder(text: Path, tmp_path: Path) -> None:
    """The second process waits for the first process, as under torchrun."""
    processes = [start_preparation(text, tmp_path / "out", workers=1) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    verify_all_files(open_dataset(tmp_path / "out"))
