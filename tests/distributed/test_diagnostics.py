"""What explains a slow rank, a hang or a lack of memory is left in the run's directory or said in the error."""

from __future__ import annotations

import gzip
import json
import resource
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.flight_recorder.components.loader import read_dir

from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.config import Config
from ray_ulysses.elastic.causes import root_cause
from ray_ulysses.run_names import flight_record_key, profile_key
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.events import RunHung, WorkerWarned
from ray_ulysses.tracking.history import read_history
from ray_ulysses.trainer import compute_watch
from ray_ulysses.trainer import step as step_module
from ray_ulysses.trainer.diagnostics import Diagnostics
from tests.distributed.faulty_launcher import plant
from tests.distributed.harness import run_ranks, run_ranks_to_outcomes
from tests.distributed.run_case import make_config, prepare_attempt, run_worker, train
from tests.distributed.supervised import SupervisedRun
from tests.polling import wait_until
from tests.unit.tracking.journals import read_events


def leaves_a_record(rank: int, world_size: int, folder: str) -> str | None:
    dist.all_reduce(torch.ones(3))
    run = Diagnostics(run_dir=Path(folder), attempt=3, rank=rank, device=torch.device("cpu"))
    return run.leave_flight_record()


def test_each_rank_leaves_its_collectives_for_pytorch_s_analyzer(tmp_path: Path) -> None:
    left = run_ranks(leaves_a_record, 2, str(tmp_path))
    assert left == [flight_record_key(3, rank) for rank in range(2)]
    # What `torchfrtrace FOLDER --prefix rank-` begins with.
    folder = (tmp_path / flight_record_key(3, 0)).parent
    found, _ = read_dir(Namespace(trace_dir=str(folder), prefix="rank-"))
    assert {details["rank"] for details in found.values()} == {0, 1}
    for details in found.values():
        assert any(entry["profiling_name"] == "gloo:all_reduce" for entry in details["entries"])


@pytest.mark.slow
def test_the_steps_and_ranks_of_run_profile_are_traced_and_no_others(tmp_path: Path, corpus: Path) -> None:
    steps = {}
    for name, profile in (("plain", None), ("traced", {"steps": [2, 3], "ranks": [1]})):
        config = make_config(
            tmp_path / name, corpus, run__stop_step=3, run__profile=profile, cluster__workers=2, data__rows_per_step=2,
            checkpoint__every_steps=None,
        )  # fmt: skip
        train(config)
        steps[name] = [(step.loss, step.digest) for step in read_history(config.run_dir).steps]
    assert steps["plain"] == steps["traced"]
    run_dir = tmp_path / "traced" / "run"
    traces = [profile_key(1, step, 1) for step in (2, 3)]
    assert sorted(str(file.relative_to(run_dir)) for file in run_dir.glob("diagnostics/**/*.gz")) == traces
    for trace in traces:
        names = {
            event.get("name") for event in json.loads(gzip.decompress((run_dir / trace).read_bytes()))["traceEvents"]
        }
        # The whole step: forward, backward and what is exchanged.
        assert {"aten::embedding", "aten::embedding_dense_backward"} <= names
        assert any(str(name).startswith("gloo:") for name in names)


@pytest.mark.slow
def test_a_hang_leaves_the_flight_record_of_every_rank_and_the_failure_names_them(tmp_path: Path, corpus: Path) -> None:
    config = make_config(
        tmp_path / "runs", corpus, run__stop_step=3000, data__epochs=650, data__rows_per_step=2,
        cluster__workers=2, schedule__horizon_steps=4000, elastic__hang_timeout_s=10.0, elastic__peer_memory=False,
    )  # fmt: skip
    with SupervisedRun(config, {0: "a", 1: "a"}, tmp_path, pace_s=0.2) as run:
        wait_until(lambda: read_history(config.run_dir).step >= 2, "it trains", timeout_s=180.0, said=run.logs)
        plant(tmp_path, {"number": 1, "rank": 1, "where": "step", "kind": "hang", "run_dir": str(config.run_dir)})
        wait_until(lambda: run.judged, "the hang is noticed", timeout_s=120.0, said=run.logs)
    folder = (config.run_dir / flight_record_key(1, 0)).parent
    assert sorted(file.name for file in folder.iterdir()) == ["rank-0", "rank-1"], run.logs()
    said = f"; flight records: {folder.relative_to(config.run_dir)}"
    cause = root_cause(run.judged[0].errors)
    assert cause.kind == "lost" and cause.reason.endswith(f"{said})")
    (hang,) = [event for event in read_events(config.run_dir) if isinstance(event, RunHung)]
    assert hang.text in cause.reason


def run_slow_worker(rank: int, world_size: int, config: Config, session: str) -> tuple[str, int]:
    """Train as a rank among which the second takes twice as long as the others."""
    compute_watch.WINDOW_S = 0.0
    compute_watch.compute_s = lambda device: 2.0 if rank == 1 else 1.0
    return run_worker(rank, world_size, config, session)


@pytest.mark.slow
def test_a_slow_rank_is_reported_once(tmp_path: Path, corpus: Path) -> None:
    config = make_config(
        tmp_path, corpus, run__stop_step=8, parallel__sp_size=1, data__rows_per_step=3, cluster__workers=3
    )
    train(config, worker=run_slow_worker)
    (told,) = [event.text for event in read_events(config.run_dir) if isinstance(event, WorkerWarned)]
    assert told.startswith("rank 1 on ") and " computes 2.0 times as long " in told


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


@pytest.mark.slow
def test_a_step_that_the_system_gives_no_memory_ends_with_what_needs_less(tmp_path: Path, corpus: Path) -> None:
    model = make_config(tmp_path, corpus).model_dump()["model"]["config"]
    config = make_config(
        tmp_path, corpus, cluster__workers=1, parallel__sp_size=1, data__context_tokens=8192, data__rows_per_step=1,
        run__stop_step=1, memory__gradient_checkpointing=False, memory__mlp_tile="off",
        model__config={**model, "intermediate_size": 4096, "num_hidden_layers": 4},
    )  # fmt: skip
    prepare_attempt(config, "one")
    (outcome,) = run_ranks_to_outcomes(run_full_worker, 1, config, "one", timeout_s=120)
    said = (outcome.error or "").partition("OutOfMemoryError: step 1 ran out of memory: ")[2]
    assert "GiB were resident" in said and "planned (largest: " in said and "memory.gradient_checkpointing" in said
    history = read_history(config.run_dir)
    assert history.status == "failed" and "step 1 ran out of memory" in (history.attempts[-1].reason or "")
    assert committed_steps(LocalStore(config.run_dir)) == ()
    # With memory the same run trains.
    assert train(config, "two") == ("finished", 1)
