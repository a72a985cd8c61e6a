"""A fault while the last state is being saved costs no checkpoint, although peer memory holds that state."""

from __future__ import annotations

from pathlib import Path

from ray_ulysses.tracking.history import read_history
from tests.distributed.faulty_launcher import plant
from tests.distributed.run_case import make_config
from tests.distributed.supervised import SupervisedRun


def test_the_last_state_is_saved_by_the_attempt_that_resumes_from_peer_memory(tmp_path: Path, corpus: Path) -> None:
    config = make_config(
        tmp_path / "runs", corpus, run__stop_step=6, parallel__sp_size=1, cluster__workers={"min": 1, "max": 2},
        checkpoint__every_steps=1000, memory__gradient_checkpointing=False,
    )  # fmt: skip
    with SupervisedRun(config, {0: "a", 1: "b"}, tmp_path, waits_for_copies=True) as run:
        plant(run.folder, {"number": 1, "rank": 1, "where": "save", "kind": "kill", "once_kept": True})
        run.wait_until_ended((0, 1), timeout_s=120.0)
        saved = read_history(config.run_dir)
        run.lose_driver()
        run.begin({0: "a", 1: "b"}, "next")
        run.wait_until_ended((0, 1), timeout_s=120.0)
    history = read_history(config.run_dir)
    assert [one.resumed_from for one in history.attempts] == [None, *["peer memory, step 6"] * 2]
    assert history.checkpoints == saved.checkpoints, "a committed state is not saved again"
    assert [one.step for one in history.checkpoints if one.committed] == [6]
    assert history.status == "finished" and history.step == 6
