"""A loss or a gradient that is not finite: every rank ends at its step, and no checkpoint holds anything of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.config import Config
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.history import read_history
from tests.breadth import fast_only
from tests.distributed.harness import run_ranks_to_outcomes
from tests.distributed.run_case import make_config, make_corpus, prepare_attempt, run_worker

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
WORLD = 2
CASES = [(kind, stage, dtype) for kind in ("loss", "gradient") for stage in (1, 2, 3) for dtype in ("fp32", "bf16")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


def config_for(storage: Path, corpus: Path, **changes: Any) -> Config:
    settings = {
        "cluster__workers": WORLD, "run__stop_step": 8, "checkpoint__every_steps": 1, "checkpoint__keep_last": 99,
        "data__rows_per_step": 2,
    }  # fmt: skip
    return make_config(storage, corpus, **{**settings, **changes})


@pytest.mark.parametrize("case", fast_only(CASES, ("loss", 3, "fp32"), ("gradient", 3, "fp32")), ids=str)
def test_a_bad_row_ends_every_rank_at_its_step_and_is_in_no_checkpoint(
    tmp_path: Path, corpus: Path, case: tuple[str, int, str]
) -> None:
    kind, stage, dtype = case
    # Row 9 of step 5, and on rank 0 alone: the other has it from the agreement.
    config = config_for(tmp_path, corpus, memory__zero_stage=stage, model__dtype=dtype)
    prepare_attempt(config, "one")
    outcomes = run_ranks_to_outcomes(run_worker, WORLD, config, "one", poison=(9, kind), timeout_s=200)
    what = {
        "loss": "step 5: the loss of row 9 of 8 to 9 is not finite.",
        "gradient": "step 5: the gradient of rows 8 to 9 is not finite (their loss is ",
    }[kind]
    assert all(f"BadStepError: {what}" in (outcome.error or "") for outcome in outcomes), outcomes
    assert committed_steps(LocalStore(config.run_dir)) == (1, 2, 3, 4)
    history = read_history(config.run_dir)
    assert [step.step for step in history.steps] == [1, 2, 3, 4]
    assert history.status == "failed"
