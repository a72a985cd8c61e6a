"""A step of a real run whose process may have no more memory says what was planned, measured and needs less."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.config import Config
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.history import read_history
from ray_ulysses.trainer import step as step_module
from tests.distributed.harness import run_ranks_to_outcomes
from tests.distributed.run_case import make_config, make_corpus, prepare_attempt, run_worker, train

pytestmark = pytest.mark.distributed
MORE_BYTES = 1280 << 20
"""What the process may take beyond what it has when its first row comes: a fraction of what that row needs."""


def run_full_worker(*arguments: Any) -> tuple[str, int]:
    """Be a worker that the system gives no more than a little memory once its first row is there."""
    make_batch, (soft, hard) = step_module.batch_of, resource.getrlimit(resource.RLIMIT_AS)

    def batch_of(*row: Any) -> Any:
        taken = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (taken + MORE_BYTES, hard))
        return make_batch(*row)

    step_module.batch_of = batch_of
    try:
        return run_worker(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def config_for(storage: Path, corpus: Path, **changes: Any) -> Config:
    model = make_config(storage, corpus).model.config
    assert model is not None
    return make_config(
        storage, corpus, cluster__workers=1, parallel__sp_size=1, data__context_tokens=8192, data__rows_per_step=1,
        run__stop_step=1, memory__gradient_checkpointing=False, memory__mlp_tile="off",
        model__config={**model, "intermediate_size": 4096, "num_hidden_layers": 4}, **changes,
    )  # fmt: skip


@pytest.mark.slow
def test_a_step_that_the_system_gives_no_memory_ends_with_what_needs_less(tmp_path: Path) -> None:
    config = config_for(tmp_path, make_corpus(tmp_path))
    prepare_attempt(config, "one")
    (outcome,) = run_ranks_to_outcomes(run_full_worker, 1, config, "one", timeout_s=120)
    said = (outcome.error or "").partition("OutOfMemoryError: step 1 ran out of memory: ")[2]
    assert "GiB were resident" in said and "planned (largest: " in said and "memory.gradient_checkpointing" in said
    history = read_history(config.run_dir)
    assert history.status == "failed" and "step 1 ran out of memory" in (history.attempts[-1].reason or "")
    assert committed_steps(LocalStore(config.run_dir)) == ()
    # With memory the same run trains.
    assert train(config, "two") == ("finished", 1)
