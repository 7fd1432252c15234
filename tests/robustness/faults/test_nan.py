"""A loss that is not finite: the update is not made, the place is named, the last good checkpoint stays."""

import pytest
from harness import HERE, result

from trainshort.train import checkpoint_files

# update, value
PLACES = [(1, "nan"), (7, "nan"), (20, "inf"), (21, "nan"), (37, "-inf"), (60, "nan"), (79, "nan"), (80, "inf")]


@pytest.mark.parametrize("places", [PLACES[2:4], pytest.param(PLACES, marks=pytest.mark.fault)], ids=["2", "8"])
def test_a_loss_that_is_not_finite_stops_the_run(runner, undisturbed, tmp_path, places):
    out = tmp_path / "run"
    for step, value in places:
        injected = {"NAN_AT": str(step), "NAN_RANK": "0", "NAN_VALUE": value}
        process = runner.start(out, driver=HERE / "nan_at.py", **injected)
        text, _ = process.communicate(timeout=300)
        assert process.returncode == 2, text
        assert "Traceback" not in text
        assert f"The loss is {value} on rank 0 at step {step}. That step was not made" in text
        saved = checkpoint_files.list_checkpoints(out)
        assert [checkpoint_files.find_corruption(folder) for folder in saved] == [None] * len(saved)
        # A checkpoint is due at every 6th step, and when a validation, every 20th, finds a lower loss.
        last = max((step - 1) // 6 * 6, (step - 1) // 20 * 20)
        assert (f"the last good checkpoint is {saved[-1]}" if last else "none, since none was due") in text
        assert last == (int(saved[-1].name.removeprefix("step-")) if saved else 0)
    # Without the injection it goes on as if nothing had been: no trace of the bad losses was kept.
    runner.finish(out)
    assert result(out) == undisturbed
    print(
        f"\nNaN: {len(places)} of {len(places)} stopped before the update, checkpoint kept, bit-identical after resume"
    )
