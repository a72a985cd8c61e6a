"""``ray-ulysses train`` when another process takes its run: the command and its workers end at once, and say so."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.storage import LocalStore
from tests.cluster.test_train_job import start, wait_for_step, worker_processes
from tests.distributed.run_case import make_config, make_corpus

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_command_whose_run_was_taken_over_ends_with_its_workers_and_says_by_whom(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, ("bisect.py", "cmd.py", "copy.py", "dis.py"))
    config = make_config(
        tmp_path / "runs", corpus, run__stop_step=3000, run__self_test=False, data__epochs=200, parallel__sp_size=1,
        cluster__workers=1, cluster__cpus_per_worker=0.25, checkpoint__every_steps=4,
    )  # fmt: skip
    command = start(config, tmp_path / "command")
    try:
        wait_for_step(config, 5)
        assert command.process.poll() is None, command.text
        workers = worker_processes(config)
        assert workers
        # As when another host has seen no sign of life of this one.
        (config.run_dir / "lock/holder-0000002.json").write_text('{"host": "other", "pid": 7, "since": 1700000000.0}')
        assert command.wait() == 1, command.text
    finally:
        command.kill()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
    text = " ".join(command.text.split())
    assert (
        "was taken over by process 7 on host other since 2023-11-14 22:13:20 UTC; this command ends immediately" in text
    )
    assert "All committed checkpoints are kept" in text
    # Nobody tried again, and the other's note is untouched.
    assert read_lineage(LocalStore(config.run_dir)).newest_attempt == 1
    assert '"other"' in (config.run_dir / "lock/holder-0000002.json").read_text()
