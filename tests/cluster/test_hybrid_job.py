"""``ray-ulysses train`` of a hybrid on bytes: killed, resumed with another sp, exported, and loaded by Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.config import Config
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.history import read_history
from tests.cluster.test_train_job import Command, check_against_unbroken, kill_in_the_middle, train
from tests.distributed.run_case import make_config, make_corpus
from tests.distributed.test_hybrid_run import QWEN3_NEXT, check_exported

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 12


def test_a_hybrid_is_trained_killed_resumed_with_another_sp_and_exported(tmp_path: Path, ray_folder: Path) -> None:
    corpus = make_corpus(tmp_path)

    def config_for(workers: int, sp_size: int, zero_stage: int, name: str = "run") -> Config:
        return make_config(
            tmp_path / "runs", corpus, model__config=QWEN3_NEXT, run__name=name, run__stop_step=STEPS,
            parallel__sp_size=sp_size, parallel__allowed_sp=[1, 2, 4], cluster__workers=workers,
            cluster__cpus_per_worker=0.25, memory__zero_stage=zero_stage, checkpoint__every_steps=2,
        )  # fmt: skip

    kill_in_the_middle(config_for(2, 2, 3), 5, tmp_path / "first")
    newest = committed_steps(LocalStore(tmp_path / "runs" / "run"))[-1]
    assert newest < STEPS, "the command was killed after its last step"
    config = config_for(4, 4, 2)
    code, text = train(config, tmp_path / "second")
    assert code == 0, text
    ours = read_history(config.run_dir)
    assert ours.status == "finished" and [attempt.sp_size for attempt in ours.attempts] == [2, 4]
    assert ours.attempts[1].first_step == newest + 1
    check_against_unbroken(ours, config_for(1, 1, 2, name="unbroken"))

    command = Command("export", config.run_dir, log=tmp_path / "export.txt")
    assert command.wait() == 0, command.text
    check_exported(config.run_dir, STEPS)
