"""A rank that computes slowly is told of by a run, whose steps tell nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.config import Config
from ray_ulysses.tracking.events import WorkerWarned
from ray_ulysses.trainer import compute_watch
from tests.distributed.run_case import make_config, make_corpus, run_worker, train
from tests.unit.tracking.journals import read_events

pytestmark = pytest.mark.distributed


def run_slow_worker(rank: int, world_size: int, config: Config, session: str) -> tuple[str, int]:
    """Train as a rank among which the second takes twice as long as the others."""
    compute_watch.WINDOW_S = 0.0
    compute_watch.compute_s = lambda device: 2.0 if rank == 1 else 1.0
    return run_worker(rank, world_size, config, session)


def test_a_run_tells_of_a_slow_rank_once(tmp_path: Path) -> None:
    config = make_config(
        tmp_path / "runs",
        make_corpus(tmp_path),
        run__stop_step=8,
        parallel__sp_size=1,
        data__rows_per_step=3,
        cluster__workers=3,
    )
    train(config, worker=run_slow_worker)
    (told,) = [event.text for event in read_events(config.run_dir) if isinstance(event, WorkerWarned)]
    assert told.startswith("rank 1 on ") and " computes 2.0 times as long " in told
