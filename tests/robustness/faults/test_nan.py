"""Tests of a loss that is not finite: the step is not made, and the run can resume from its last checkpoint."""

import pytest
from harness import HERE, assert_checkpoints_are_complete, read_result

from trainshort.train import checkpoint_files

# Training steps, and the factor of the loss in the step.
NON_FINITE_LOSSES = [
    (1, "nan"),
    (7, "nan"),
    (20, "inf"),
    (21, "nan"),
    (37, "-inf"),
    (60, "nan"),
    (79, "nan"),
    (80, "inf"),
]


def expected_checkpoint(step: int) -> int:
    """Return the step of the last checkpoint before a step, or 0 if there is no checkpoint.

    A checkpoint is saved after every 6th step. It is also saved after every 20th step, if the validation loss is lower
    than before. This is always the case in these runs.
    """
    last_regular_step = (step - 1) // 6 * 6
    last_validation_step = (step - 1) // 20 * 20
    return max(last_regular_step, last_validation_step)


@pytest.mark.parametrize(
    "losses",
    [NON_FINITE_LOSSES[2:4], pytest.param(NON_FINITE_LOSSES, marks=pytest.mark.fault)],
    ids=["2", "8"],
)
def test_non_finite_loss_stops_the_run(runner, undisturbed_result, tmp_path, losses):
    out = tmp_path / "run"
    for step, value in losses:
        environment = {"NAN_AT": str(step), "NAN_RANK": "0", "NAN_VALUE": value}
        process = runner.start(out, driver=HERE / "nan_at.py", **environment)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 2, output
        assert "Traceback" not in output
        for part in (value, "rank 0", f"step {step}"):
            assert part in output

        assert_checkpoints_are_complete(out)
        checkpoints = checkpoint_files.list_checkpoints(out)
        last_step = int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0
        assert last_step == expected_checkpoint(step)
        if checkpoints:
            assert str(checkpoints[-1]) in output
    # Without the faulty losses, the run ends like a run that was never disturbed.
    runner.finish(out)
    assert read_result(out) == undisturbed_result
    print(f"\nNaN: {len(losses)} of {len(losses)} stopped before the step, bit-identical after resume")
