"""What counts as complete: a committed last step, or a finished journal; never a step that was not saved."""

from __future__ import annotations

from pathlib import Path

from ray_ulysses.storage.lock import RunLock
from ray_ulysses.tracking.journal import AttemptJournal
from ray_ulysses.trainer.preflight import claim_directory, completed, prepare_run
from tests.distributed.run_case import make_config, make_corpus


def test_a_last_step_that_was_trained_and_not_saved_is_not_complete(tmp_path: Path) -> None:
    prepared = prepare_run(make_config(tmp_path / "runs", make_corpus(tmp_path), run__stop_step=1), Path("/"))
    run_dir = prepared.config.run_dir
    claim_directory(prepared)
    journal = AttemptJournal.claim(run_dir)
    sizes = {"world_size": 1, "sp_size": 1, "dp_size": 1}
    journal.append({"event": "attempt_started", **sizes, "nodes": [], "resumed_step": 0, "resumed_from": None})
    step = {"step": 1, "loss": 1.0, "tokens": 9, "rows": [0, 6], "digest": "0" * 16, "seconds": 1.0}
    journal.append({"event": "step", **step})
    with RunLock(run_dir):
        assert completed(prepared) is None
        journal.append({"event": "attempt_ended", "reason": "failed: CheckpointError: disk full"})
        assert completed(prepared) is None
        journal.append({"event": "attempt_ended", "reason": "finished"})
        journal.append({"event": "run_finished", "step": 1})
        history = completed(prepared)
    assert history is not None and history.status == "finished"
