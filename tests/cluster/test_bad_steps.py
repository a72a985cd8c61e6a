"""A step that is not finite, through Ray: it is not tried again, and its rows are left out as often as configured."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.tracking.events import AttemptEnded, BadStep, RowsSkipped, RunFailed
from tests.cluster.test_train_job import train
from tests.distributed.run_case import make_config, make_corpus
from tests.unit.tracking.journals import read_events

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_run_that_is_not_finite_ends_after_the_steps_that_it_may_leave_out(tmp_path: Path, policy: str) -> None:
    # Finite after its first step, and in none after it.
    config = make_config(
        tmp_path / "runs", make_corpus(tmp_path, ("bisect.py", "cmd.py")), run__stop_step=6, parallel__sp_size=1,
        cluster__workers=2, cluster__cpus_per_worker=0.5, optimizer__lr=1e30, schedule__warmup_steps=0,
        checkpoint__every_steps=1, elastic__bad_steps=policy, elastic__max_skipped_steps=1,
    )  # fmt: skip
    code, said = train(config, tmp_path)
    assert code == 1, said
    events = read_events(config.run_dir)
    bad = [event for event in events if isinstance(event, BadStep)]
    skipped = [event for event in events if isinstance(event, RowsSkipped)]
    ends = [event for event in events if isinstance(event, AttemptEnded) and event.restarts is not None]
    num_attempts = 1 if policy == "stop" else 2
    assert [event.step for event in bad] == [2] * num_attempts and len(skipped) == num_attempts - 1
    # Final, and not counted among the failures of which a run survives some.
    assert [(event.restarts, event.failure) for event in ends] == [(False, None)] * num_attempts
    (failed,) = [event for event in events if isinstance(event, RunFailed)]
    assert "BadStepError: step 2: " in failed.reason and "is not finite" in failed.reason
    assert ("of bad step 2: the run continues from step 1" in said) == (policy == "skip")
