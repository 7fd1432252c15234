"""Tests of run folders: nothing is overwritten, and a resumed run continues its own log."""

import json
import os
from pathlib import Path

import pytest

from trainshort.config.run_config import RunConfig, load_config
from trainshort.errors import InputError
from trainshort.train import metrics_log, run_folder
from trainshort.train.run_folder import RunFolder
from trainshort.utils import machine

CONFIG = RunConfig()


def open_and_close_run(path: Path, config: RunConfig = CONFIG, *, resume: bool = False) -> RunFolder:
    """Create or resume a run folder, and release its lock."""
    with run_folder.open_run(path, config, resume=resume) as folder:
        return folder


def read_files(folder: Path) -> dict[Path, bytes]:
    """Return the content of all files in a folder by path."""
    return {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def logged_steps(folder: RunFolder) -> list[int]:
    """Return the steps in metrics.jsonl."""
    return [record["step"] for record in metrics_log.read_metrics(folder)]


def test_new_run_folder_contains_config_and_checkpoints_folder(tmp_path):
    folder = open_and_close_run(tmp_path / "a" / "run")
    assert load_config(folder.config) == CONFIG
    assert folder.checkpoints.is_dir()


def test_existing_run_is_not_changed_without_resume(tmp_path):
    folder = open_and_close_run(tmp_path / "run")
    folder.metrics.write_text('{"step": 1}\n')
    files_before = read_files(folder.path)
    with pytest.raises(InputError, match=r"run already exists\. .*--resume.*--out"):
        open_and_close_run(tmp_path / "run", CONFIG.replace(train={"steps": 7}))
    assert read_files(folder.path) == files_before


def test_folder_that_is_no_run_is_rejected(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"is not a run folder: .*no config\.json"):
        open_and_close_run(tmp_path, resume=True)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"config\.json"):
        run_folder.check_run_path_free(tmp_path, resume=True)


def test_file_at_the_path_of_the_run_is_rejected(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"Expected a folder at .*, found a file"):
        open_and_close_run(tmp_path / "thesis.tex")


def test_empty_folder_and_killed_start_are_accepted(tmp_path):
    open_and_close_run(tmp_path)
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "config.json.partial").write_text('{"form')
    (killed / "train.lock").touch()
    folder = open_and_close_run(killed, resume=True)
    assert load_config(folder.config) == CONFIG


def test_resume_with_another_model_is_rejected(tmp_path):
    open_and_close_run(tmp_path / "run")
    with pytest.raises(InputError, match=r"started with model\.width=128, but got model\.width=256"):
        open_and_close_run(tmp_path / "run", CONFIG.replace(model={"width": 256}), resume=True)
    assert load_config(tmp_path / "run" / "config.json") == CONFIG


def test_resume_may_change_number_of_steps_and_checkpoints(tmp_path):
    open_and_close_run(tmp_path / "run")
    longer_config = CONFIG.replace(train={"steps": 9999, "save_every": 3})
    folder = open_and_close_run(tmp_path / "run", longer_config, resume=True)
    assert load_config(folder.config) == longer_config


def test_all_changeable_settings_exist():
    known_settings = run_folder.flatten(CONFIG.model_dump())
    assert set(known_settings) >= run_folder.RESUME_CHANGEABLE_SETTINGS


def test_config_of_another_version_is_rejected(tmp_path):
    folder = open_and_close_run(tmp_path / "run")
    folder.config.write_text(json.dumps({"format": 99, "colour": "red"}))
    with pytest.raises(InputError, match=r"config\.json.*99"):
        open_and_close_run(tmp_path / "run", resume=True)


def test_incomplete_config_is_rejected(tmp_path):
    folder = open_and_close_run(tmp_path / "run")
    folder.config.write_text('{"format": 2, "tra')
    with pytest.raises(InputError, match=r"config\.json: invalid JSON"):
        open_and_close_run(tmp_path / "run", resume=True)


def test_only_one_process_can_open_a_run(tmp_path):
    with (
        run_folder.open_run(tmp_path / "run", CONFIG, resume=False),
        pytest.raises(InputError, match="Another process is training in"),
    ):
        open_and_close_run(tmp_path / "run", resume=True)
    open_and_close_run(tmp_path / "run", resume=True)


def test_truncate_metrics_removes_later_and_incomplete_lines(tmp_path):
    folder = open_and_close_run(tmp_path / "run")
    for step in (10, 20, 30):
        metrics_log.append_line(folder.metrics, {"step": step, "loss": step / 7})
    content_up_to_30 = folder.metrics.read_bytes()
    metrics_log.append_line(folder.metrics, {"step": 40, "loss": 1.0})
    with folder.metrics.open("a") as file:
        file.write('{"step": 50, "lo')
    assert [record["step"] for record in metrics_log.read_lines(folder.metrics)] == [10, 20, 30, 40]
    metrics_log.truncate_metrics(folder, 30)
    assert folder.metrics.read_bytes() == content_up_to_30
    metrics_log.truncate_metrics(folder, 0)
    assert folder.metrics.read_bytes() == b""


def test_truncate_metrics_rejects_missing_lines_and_leaves_the_file(tmp_path):
    folder = open_and_close_run(tmp_path / "run")
    for step in (10, 20, 30):
        metrics_log.append_line(folder.metrics, {"step": step})
    last_checksum = metrics_log.read_last_checksum(folder.metrics)
    content = folder.metrics.read_bytes()
    first_line = content[: content.index(b"\n") + 1]
    for truncated_content in (content[:-1], first_line, b""):
        folder.metrics.write_bytes(truncated_content)
        with pytest.raises(InputError, match=r"Lines are missing in .*metrics\.jsonl: .* step 30"):
            metrics_log.truncate_metrics(folder, 30, last_checksum)
        assert folder.metrics.read_bytes() == truncated_content


def test_deleted_metrics_file_is_accepted(tmp_path):
    folder = open_and_close_run(tmp_path / "run")
    for step in (10, 20, 30):
        metrics_log.append_line(folder.metrics, {"step": step})
    last_checksum = metrics_log.read_last_checksum(folder.metrics)
    folder.metrics.unlink()
    metrics_log.truncate_metrics(folder, 30, last_checksum)
    metrics_log.append_line(folder.metrics, {"step": 40})  # A new file that contains only later steps.
    metrics_log.truncate_metrics(folder, 30, last_checksum)
    assert folder.metrics.read_bytes() == b""


def test_read_metrics_detects_lines_missing_before_the_last_checkpoint(tmp_path):
    folder = open_and_close_run(tmp_path / "run")
    other_numbers = {"tokens": 1, "seconds": 1.0}
    for step in (10, 20, 30):
        metrics_log.append_line(folder.metrics, {"step": step, **other_numbers})
        if step < 30:
            checkpoint = folder.checkpoints / f"step-{step:09d}"
            checkpoint.mkdir()
            state = {"step": step, "metrics": metrics_log.read_last_checksum(folder.metrics)}
            (checkpoint / "state.json").write_text(json.dumps(state))
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    assert logged_steps(folder) == [10, 20, 30]

    # Lines after the last checkpoint may be missing, because the process may have been killed.
    folder.metrics.write_bytes(lines[0] + lines[1])
    assert logged_steps(folder) == [10, 20]

    for truncated_content in (lines[0] + lines[1][:-1], lines[0], b""):
        folder.metrics.write_bytes(truncated_content)
        with pytest.raises(InputError, match=r"Lines are missing in .*metrics\.jsonl: .* step 20"):
            metrics_log.read_metrics(folder)

    folder.metrics.unlink()
    assert metrics_log.read_metrics(folder) == []
    metrics_log.append_line(folder.metrics, {"step": 30, **other_numbers})
    assert logged_steps(folder) == [30]

    # A damaged checkpoint that was renamed does not count.
    folder.metrics.write_bytes(lines[0])
    (folder.checkpoints / "step-000000020").rename(folder.checkpoints / "step-000000020.damaged")
    assert logged_steps(folder) == [10]


def test_resume_may_change_tolerance_only_within_rounding(tmp_path):
    open_and_close_run(tmp_path / "run")
    open_and_close_run(tmp_path / "run", CONFIG.replace(model={"tolerance": 0}), resume=True)
    with pytest.raises(InputError, match=r"started with model\.tolerance=0\.0, but got model\.tolerance=0\.9"):
        open_and_close_run(tmp_path / "run", CONFIG.replace(model={"tolerance": 0.9}), resume=True)


@pytest.mark.parametrize("path", ["/proc/foo", "file/run"])
def test_run_folder_that_cannot_be_created_is_rejected(tmp_path, path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"Choose another --out\.$"):
        open_and_close_run(tmp_path / path)


def test_provenance_contains_versions_machine_and_commit():
    provenance = json.loads(json.dumps(machine.collect_provenance(threads=3)))
    assert provenance["threads"] == 3
    assert provenance["versions"]["torch"]
    assert provenance["machine"]["cores"] == os.cpu_count()
    commit = provenance["commit"]
    assert commit is None or len(commit.removesuffix("+changes")) == 40
