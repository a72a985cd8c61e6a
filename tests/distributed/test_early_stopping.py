"""A run ends with a checkpoint when its validation loss stops improving, at the same step after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray_ulysses.run.completion import record_completion
from ray_ulysses.run.preflight import prepare_run
from ray_ulysses.tracking.history import read_history
from tests.distributed.run_case import SMALL_FILES, make_config, make_corpus, train


def test_the_run_ends_early_and_continues_only_if_the_setting_is_changed(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, SMALL_FILES)

    def config(patience: int | None, **changes: Any) -> Any:
        # No loss of this run is lower by as much as min_delta.
        stopping = None if patience is None else {"patience": patience, "min_delta": 100.0, "corpus": "held_out"}
        settings: dict[str, Any] = {
            "data__eval_fraction": 0.3, "data__eval_rows": 1, "run__eval_every_steps": 2, "run__stop_step": 8,
            "checkpoint__every_steps": 3, "run__early_stopping": stopping,
        }  # fmt: skip
        return make_config(tmp_path, corpus, **{**settings, **changes})

    assert train(config(2, run__stop_step=3), "first") == ("finished", 3)
    other = {"cluster__workers": 2, "parallel__sp_size": 1, "memory__zero_stage": 1}
    # Evaluations at steps 0, 2, 3 (the last step of the first command).
    first = read_history(config(2).run_dir)
    assert first.attempts[-1].reason == "finished", "the last planned step is not early"
    assert train(config(3, **other), "second") == ("finished", 4)
    found = read_history(config(3).run_dir)
    assert found.status == "finished" and [one.step for one in found.checkpoints if one.committed] == [3, 4]
    reason = found.attempts[-1].reason or ""
    assert reason.startswith("finished: the validation loss was ")
    assert reason.endswith(" at step 0 and not lower by more than 100 in the next 3 evaluations")

    # The same command starts nothing, and an attempt that starts nevertheless trains nothing.
    complete = record_completion(prepare_run(config(3, **other), Path("/")))
    assert complete is not None and complete.step == 4
    assert train(config(3, **other), "third") == ("finished", 4)
    assert record_completion(prepare_run(config(None, **other), Path("/"))) is None
    assert train(config(4, **other), "fourth") == ("finished", 6)
    assert train(config(None, **other, run__stop_step=7), "fifth") == ("finished", 7)
    assert [step.step for step in read_history(config(None).run_dir).steps] == list(range(1, 8))
