"""A rank whose row is shorter than a tile trains the same step as those whose rows are longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.tracking.history import read_history
from tests.distributed.run_case import SMALL_FILES, make_config, make_corpus, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
STEPS = 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"), SMALL_FILES)


def losses(folder: Path, corpus: Path, workers: int, zero_stage: int, mlp_tile: int | str) -> list[tuple[float, float]]:
    config = make_config(
        folder / "runs", corpus, run__stop_step=STEPS, cluster__workers=workers, parallel__sp_size=1,
        data__rows_per_step=2, checkpoint__every_steps=None, memory__zero_stage=zero_stage, memory__mlp_tile=mlp_tile,
        optimizer__lr=3e-3,
    )  # fmt: skip
    train(config)
    # With the norm: the optimizer hides a gradient that is scaled.
    return [(step.loss, step.grad_norm) for step in read_history(config.run_dir).steps]


def test_a_filler_changes_no_gradient_in_any_stage(corpus: Path, tmp_path: Path) -> None:
    """Two rows on three ranks: one trains a filler of a few tokens, while the others' MLPs go over tiles."""
    wanted = losses(tmp_path / "alone", corpus, 1, 1, "off")
    for stage in (1, 2, 3):
        found = losses(tmp_path / str(stage), corpus, 3, stage, 33)
        for one, other in zip(found, wanted, strict=True):
            assert one == pytest.approx(other, rel=1e-6), f"ZeRO-{stage}"
