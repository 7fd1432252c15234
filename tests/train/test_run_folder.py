"""The run folder: nothing is overwritten, what was stopped reads as if it never was."""

import json
import os

import pytest

from trainshort.config.run_config import RunConfig, load_config
from trainshort.errors import InputError
from trainshort.train import run_folder
from trainshort.utils import machine

CONFIG = RunConfig()


def start(path, config=CONFIG, *, resume=False):
    with run_folder.open_run(path, config, resume=resume) as folder:
        return folder


def test_a_new_run_has_its_config_and_a_place_for_checkpoints(tmp_path):
    folder = start(tmp_path / "a" / "run")
    assert load_config(folder.config) == CONFIG
    assert folder.checkpoints.is_dir()


def test_an_existing_run_is_refused_and_left_as_it_was(tmp_path):
    folder = start(tmp_path / "run")
    folder.metrics.write_text('{"step": 1}\n')
    before = {path: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
    with pytest.raises(InputError, match=r"run already exists\. Go on with it by --resume, or choose another --out\."):
        start(tmp_path / "run", CONFIG.replace(train={"steps": 7}))
    assert {path: path.read_bytes() for path in folder.path.iterdir() if path.is_file()} == before


def test_a_folder_that_is_no_run_is_refused_even_with_resume(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"holds files but no config\.json, so it is not a run"):
        start(tmp_path, resume=True)
    assert sorted(os.listdir(tmp_path)) == ["thesis.tex"]
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"config\.json"):
        run_folder.check_run_path_free(tmp_path, resume=True)
    with pytest.raises(InputError, match=r"is a file, but a run needs a folder"):
        start(tmp_path / "thesis.tex")


def test_an_empty_folder_and_one_that_a_kill_left_are_taken(tmp_path):
    start(tmp_path)
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "config.json.partial").write_text('{"form')
    (killed / "train.lock").touch()
    assert load_config(start(killed, resume=True).config) == CONFIG


def test_resume_refuses_another_run_and_names_the_setting(tmp_path):
    start(tmp_path / "run")
    with pytest.raises(InputError, match=r"started with model\.width=128, but model\.width=256 was asked for"):
        start(tmp_path / "run", CONFIG.replace(model={"width": 256}), resume=True)
    assert load_config(tmp_path / "run" / "config.json") == CONFIG


def test_resume_may_change_how_far_and_how_often(tmp_path):
    start(tmp_path / "run")
    longer = CONFIG.replace(train={"steps": 9999, "save_every": 3})
    assert load_config(start(tmp_path / "run", longer, resume=True).config) == longer


def test_every_changeable_setting_exists():
    known = run_folder.flatten(CONFIG.model_dump())
    assert set(known) >= run_folder.RESUME_CHANGEABLE_SETTINGS


def test_a_config_of_another_version_is_refused(tmp_path):
    folder = start(tmp_path / "run")
    folder.config.write_text(json.dumps({"format": 99, "colour": "red"}))
    with pytest.raises(InputError, match=r"format 99.*reads format 2"):
        start(tmp_path / "run", resume=True)
    folder.config.write_text('{"format": 2, "tra')
    with pytest.raises(InputError, match=r"not readable JSON"):
        start(tmp_path / "run", resume=True)


def test_two_cannot_write_at_once(tmp_path):
    with (
        run_folder.open_run(tmp_path / "run", CONFIG, resume=False),
        pytest.raises(InputError, match=r"Another process is training in"),
    ):
        start(tmp_path / "run", resume=True)
    start(tmp_path / "run", resume=True)


def test_metrics_are_cut_to_the_checkpoint_and_a_torn_line_goes(tmp_path):
    folder = start(tmp_path / "run")
    for step in (10, 20, 30):
        run_folder.append_line(folder.metrics, {"step": step, "loss": step / 7})
    kept = folder.metrics.read_bytes()
    run_folder.append_line(folder.metrics, {"step": 40, "loss": 1.0})
    with folder.metrics.open("a") as file:
        file.write('{"step": 50, "lo')
    assert [record["step"] for record in run_folder.read_lines(folder.metrics)] == [10, 20, 30, 40]
    run_folder.truncate_metrics(folder, 30)
    assert folder.metrics.read_bytes() == kept  # floats survive the round trip to the last bit
    run_folder.truncate_metrics(folder, 0)
    assert folder.metrics.read_bytes() == b""


def test_lines_missing_before_the_checkpoint_are_told_and_the_file_is_left(tmp_path):
    folder = start(tmp_path / "run")
    for step in (10, 20, 30):
        run_folder.append_line(folder.metrics, {"step": step})
    last = run_folder.last_checksum(folder.metrics)
    whole = folder.metrics.read_bytes()
    for torn in (whole[:-1], whole[: whole.index(b"\n") + 1], b""):
        folder.metrics.write_bytes(torn)
        with pytest.raises(InputError, match=r"metrics\.jsonl ends before step 30, at which the run was saved"):
            run_folder.truncate_metrics(folder, 30, last)
        assert folder.metrics.read_bytes() == torn
    folder.metrics.unlink()  # as the message says
    run_folder.truncate_metrics(folder, 30, last)
    run_folder.append_line(folder.metrics, {"step": 40})
    run_folder.truncate_metrics(folder, 30, last)
    assert folder.metrics.read_bytes() == b""


def test_metrics_that_end_before_the_last_checkpoint_are_told_to_whoever_reads_them(tmp_path):
    folder = start(tmp_path / "run")
    numbers = {"tokens": 1, "seconds": 1.0}
    for step in (10, 20, 30):
        run_folder.append_line(folder.metrics, {"step": step, **numbers})
        if step < 30:
            (folder.checkpoints / f"step-{step:09d}").mkdir()
            state = {"step": step, "metrics": run_folder.last_checksum(folder.metrics)}
            (folder.checkpoints / f"step-{step:09d}" / "state.json").write_text(json.dumps(state))
    whole = folder.metrics.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert [record["step"] for record in run_folder.read_metrics(folder)] == [10, 20, 30]
    folder.metrics.write_bytes(b"".join(lines[:2]))  # what came after the checkpoint may have gone with a kill
    assert [record["step"] for record in run_folder.read_metrics(folder)] == [10, 20]
    for cut in (lines[0] + lines[1][:-1], lines[0], b""):
        folder.metrics.write_bytes(cut)
        with pytest.raises(InputError, match=r"metrics\.jsonl ends before step 20, at which the run was saved"):
            run_folder.read_metrics(folder)
    folder.metrics.unlink()  # as the message says
    assert run_folder.read_metrics(folder) == []
    run_folder.append_line(folder.metrics, {"step": 30, **numbers})
    assert [record["step"] for record in run_folder.read_metrics(folder)] == [30]
    folder.metrics.write_bytes(lines[0])
    (folder.checkpoints / "step-000000020").rename(folder.checkpoints / "step-000000020.damaged")  # set aside
    assert [record["step"] for record in run_folder.read_metrics(folder)] == [10]


def test_tolerance_up_to_rounding_is_harmless_and_beyond_it_is_another_run(tmp_path):
    start(tmp_path / "run")
    start(tmp_path / "run", CONFIG.replace(model={"tolerance": 0}), resume=True)
    with pytest.raises(InputError, match=r"started with model\.tolerance=0\.0, but model\.tolerance=0\.9 was asked"):
        start(tmp_path / "run", CONFIG.replace(model={"tolerance": 0.9}), resume=True)


@pytest.mark.parametrize("place", ["/proc/foo", "file/run"])
def test_a_run_folder_that_cannot_be_made_is_one_sentence(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"Choose another --out\.$"):
        start(tmp_path / place)


def test_provenance_says_what_a_number_depends_on():
    record = json.loads(json.dumps(machine.collect_provenance(threads=3)))
    assert record["threads"] == 3
    assert record["versions"]["torch"]
    assert record["machine"]["cores"] == os.cpu_count()
    assert record["commit"] is None or len(record["commit"].removesuffix("+changes")) == 40
