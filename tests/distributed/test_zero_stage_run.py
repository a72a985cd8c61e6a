"""A run whose ZeRO stage, world and offload change at every resume is the run in which they did not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.config import Config
from ray_ulysses.tracking.events import Evaluated
from ray_ulysses.tracking.history import read_history
from tests.apart import losses_apart
from tests.distributed.run_case import assert_same_run, make_config, make_corpus, train
from tests.unit.tracking.journals import read_events

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

ANOTHER_LAYOUT = 1e-5
"""Law 2 over these few steps, fp32: layouts add in another order."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


def _run(storage: Path, corpus: Path, session: str, **settings: Any) -> Config:
    # With a z-loss: it too is a sum over tokens, whatever the layout.
    config = make_config(storage, corpus, checkpoint__every_steps=2, optimizer__z_loss=1e-2, **settings)
    train(config, session)
    return config


@pytest.mark.slow
def test_stage_offload_tiles_and_world_may_change_at_every_resume(corpus: Path, tmp_path: Path) -> None:
    wanted = read_history(_run(tmp_path / "unbroken", corpus, "unbroken", run__stop_step=8).run_dir)
    changing = tmp_path / "changing"
    _run(changing, corpus, "first", run__stop_step=2, memory__zero_stage=1, cluster__workers=2)
    _run(changing, corpus, "second", run__stop_step=4, memory__zero_stage=2, parallel__sp_size=1, memory__loss_tile=50)
    _run(changing, corpus, "third", run__stop_step=6, memory__zero_stage=1, memory__offload_optimizer="cpu")
    lean = {
        "memory__loss_tile": 30, "memory__mlp_tile": 40, "memory__offload_optimizer": "cpu",
        "memory__offload_param": "cpu",
    }  # fmt: skip
    _run(changing, corpus, "fourth", run__stop_step=7, cluster__workers=2, **lean)
    ours = read_history(_run(changing, corpus, "fifth", run__stop_step=8, memory__zero_stage=2).run_dir)
    assert_same_run(ours, wanted)
    assert ours.lost_steps == 0


@pytest.mark.slow
def test_compiled_layers_train_evaluate_and_go_on_as_others_do(corpus: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "memory__gradient_checkpointing": False, "memory__zero_stage": 2, "cluster__workers": 2,
        "run__eval_every_steps": 2, "data__eval_fraction": 0.3,
    }  # fmt: skip
    wanted = read_history(_run(tmp_path / "eager", corpus, "eager", run__stop_step=4, **settings).run_dir)
    compiled = settings | {"model__compile": True}
    _run(tmp_path / "compiled", corpus, "first", run__stop_step=2, **compiled)
    ours = read_history(_run(tmp_path / "compiled", corpus, "second", run__stop_step=4, **compiled).run_dir)
    assert 0 < losses_apart(ours, wanted) <= ANOTHER_LAYOUT, "the same bits: nothing was compiled"
    assert [attempt.first_step for attempt in ours.attempts] == [1, 3]
    losses = [
        [event.loss for event in read_events(tmp_path / name / "run") if isinstance(event, Evaluated)]
        for name in ("compiled", "eager")
    ]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=ANOTHER_LAYOUT)
