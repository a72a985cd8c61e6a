"""Law 2 and law 3 over kills, stops and resizes: the same rows, the same digest, the same losses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.config import Config
from ray_ulysses.tracking.history import RunHistory, read_history
from tests.apart import losses_apart
from tests.distributed.run_case import make_config, make_corpus, train, train_to_death

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
ROWS = 3
"""Rows per step: two data parallel groups, and four, take a filler."""
STEPS = 14


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def unbroken(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, RunHistory]:
    """A run of 14 steps on 4 workers that nothing disturbs, every checkpoint kept."""
    config = config_for(tmp_path_factory.mktemp("unbroken"), corpus, checkpoint__keep_last=100)
    train(config, "unbroken")
    return config, read_history(config.run_dir)


def config_for(storage: Path, corpus: Path, **overrides: Any) -> Config:
    settings = {"data__rows_per_step": ROWS, "run__stop_step": STEPS, "checkpoint__every_steps": 3}
    return make_config(storage, corpus, **{**settings, **overrides})


def test_a_run_that_was_killed_stopped_and_resized_is_the_run_that_was_not(
    corpus: Path, unbroken: tuple[Config, RunHistory], tmp_path: Path
) -> None:
    wanted = unbroken[1]
    config = config_for(tmp_path, corpus)

    # 4 workers, sp=2: rank 2 is killed in the middle of the save of step 6, when others have written their shards.
    # Step 3's is committed by then, as it is where steps last longer than a save.
    train_to_death(config, "first", (2, "save", 6))
    assert not (config.run_dir / "checkpoints/step-00000006/manifest.json").exists()

    # 2 workers, sp=2, stopped by a request; 4 with sp=4; 4 with sp=1.
    assert train(config_for(tmp_path, corpus, cluster__workers=2), "second", stop_at=7) == ("stopped", 8)
    four = config_for(tmp_path, corpus, parallel__sp_size=4, run__stop_step=11)
    assert train(four, "third") == ("finished", 11)
    assert train(config_for(tmp_path, corpus, parallel__sp_size=1), "fourth") == ("finished", STEPS)

    ours = read_history(config.run_dir)
    difference = losses_apart(ours, wanted)
    if difference > 1e-5:
        reversed_config = config_for(tmp_path / "reversed", corpus)
        train(reversed_config, "reversed", reverse=True)
        drift = losses_apart(read_history(reversed_config.run_dir), wanted)
        print(f"difference {difference:.2e}, drift of the same world with micro-batches reversed {drift:.2e}")
        assert difference <= 3 * drift
    assert [(step.rows, step.tokens) for step in ours.steps] == [(step.rows, step.tokens) for step in wanted.steps]
    assert [step.rows[0] for step in ours.steps] == [ROWS * index for index in range(STEPS)]
    assert ours.data_digest == wanted.data_digest
    assert ours.lost_steps == 3
    assert [(a.world_size, a.sp_size, a.dp_size) for a in ours.attempts] == [(4, 2, 2), (2, 2, 1), (4, 4, 1), (4, 1, 4)]
    assert [(a.first_step, a.last_step) for a in ours.attempts] == [(1, 6), (4, 8), (9, 11), (12, 14)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 1), (3, 1), (4, 4)], ids=str)
def test_one_step_from_the_same_state_has_the_same_loss_at_another_layout(
    corpus: Path, unbroken: tuple[Config, RunHistory], tmp_path: Path, layout: tuple[int, int]
) -> None:
    workers, sp_size = layout
    source, wanted = unbroken
    losses = {step.step: step.loss for step in wanted.steps}
    for saved in (3, 12):
        config = config_for(
            tmp_path / str(saved), corpus, cluster__workers=workers, parallel__sp_size=sp_size, run__stop_step=saved + 2
        )
        shutil.copytree(source.run_dir, config.run_dir)
        for folder in (config.run_dir / "checkpoints").iterdir():
            if int(folder.name.removeprefix("step-")) > saved:
                shutil.rmtree(folder)
        train(config, "resumed")
        ours = {step.step: step.loss for step in read_history(config.run_dir).steps}
        for step in (saved + 1, saved + 2):
            assert abs(ours[step] - losses[step]) / losses[step] <= 1e-5


@pytest.mark.slow
def test_the_last_step_may_be_short_and_every_row_is_trained_on_once(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, ("bisect.py", "cmd.py"))
    config = make_config(tmp_path, corpus, data__rows_per_step=30, run__stop_step=None, checkpoint__every_steps=None)
    assert train(config, "all")[0] == "finished"
    history = read_history(config.run_dir)
    plan = json.loads((config.run_dir / "plan/segment-0000/plan.json").read_text())
    assert history.rows_consumed == plan["num_rows"]
    *whole, last = [step.rows[1] - step.rows[0] for step in history.steps]
    assert set(whole) == {30} and 0 < last < 30
