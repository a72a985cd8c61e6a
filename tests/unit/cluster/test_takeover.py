"""A command whose run another one has taken ends at once, and its workers do not begin again."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import ray_ulysses.cluster.train_job as train_job
import ray_ulysses.supervision.child as child
from ray_ulysses.checkpoint import FencedError
from ray_ulysses.cluster.failures import Ended
from ray_ulysses.cluster.train_job import end_if_lost
from ray_ulysses.cluster.worker import supervise
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run.takeover import refusal
from ray_ulysses.storage import Claim, LocalStore, run_claim
from ray_ulysses.supervision.order import Job, Order
from ray_ulysses.supervision.shared_progress import SharedProgress
from ray_ulysses.supervision.supervisor import Announcement
from tests.distributed.run_case import make_config
from tests.polling import wait_until

THEIR_NOTE = '{"host": "other", "pid": 7, "since": 1700000000.0}'


def take(run_dir: Path) -> None:
    """Take a run's claim, like a store at one stroke, in a generation that no late heartbeat reaches."""
    note = run_dir / "lock" / "note"
    note.write_text(THEIR_NOTE)
    note.replace(run_dir / "lock" / "holder-0000009.json")


def test_a_command_whose_run_was_taken_ends_while_its_workers_still_train(tmp_path: Path) -> None:
    with Claim(LocalStore(tmp_path), run="run", lease_s=1.0) as claim:
        end_if_lost([claim], tmp_path, "one")
        assert refusal(tmp_path, "one") is None
        take(tmp_path)
        wait_until(lambda: claim.problem is not None, "the loss of the claim is seen")
        with pytest.raises(RunError) as ended:
            end_if_lost([claim], tmp_path, "one")
    text = str(ended.value)
    assert "taken over by process 7 on host other since 2023-11-14 22:13:20 UTC" in text
    # Whatever Ray starts of this session after that says the same, and trains nothing.
    assert refusal(tmp_path, "one") == text


def run_workers(monkeypatch: pytest.MonkeyPatch, config: Any, claim: Any, fit: Callable[..., None]) -> Ended | None:
    """Run the workers of a command whose trainer is this function; it is given the look at the cluster."""
    monkeypatch.setattr(train_job, "_trainer", lambda run, book, look, command: SimpleNamespace(fit=partial(fit, look)))
    monkeypatch.setattr(train_job, "session_logs", lambda: "logs")
    monkeypatch.setattr(train_job, "WorkerWatch", lambda *a, **k: SimpleNamespace(check=int, is_whole=True, nodes={}))
    signals: Any = SimpleNamespace(workers_start=int, check=lambda workers_are_whole: None)
    arguments: Any = (
        SimpleNamespace(config=config),
        SimpleNamespace(wanted=SimpleNamespace(least=4)),
        SimpleNamespace(session="one", command_started=None),
        SimpleNamespace(console=Console(file=io.StringIO(), width=200), awaits_workers=False),
    )
    return train_job._run_workers(*arguments, signals, [claim])


@pytest.mark.parametrize("error", [ConnectionError("the head is gone"), RuntimeError("no"), OSError(28, "full")])
def test_what_ends_ray_train_is_judged_and_what_is_of_this_machine_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    config = make_config(tmp_path, tmp_path / "corpus")

    def fit(look: object) -> None:
        raise error

    with run_claim(config.run_dir) as claim:
        if isinstance(error, ConnectionError | RuntimeError):
            ended = run_workers(monkeypatch, config, claim, fit)
            assert ended is not None and (ended.error, ended.logs) == (error, "logs")
        else:
            with pytest.raises(OSError, match="full"):
                run_workers(monkeypatch, config, claim, fit)


@pytest.mark.parametrize("is_anothers", [True, False])
def test_a_worker_that_was_fenced_by_another_command_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_anothers: bool
) -> None:
    """The child leaves word, and a worker that Ray starts again after that begins nothing."""
    config = make_config(tmp_path, tmp_path / "corpus")
    job = {"config": config.model_dump(mode="json"), "session": "one"}

    def run_attempt(config: Any, worker: Any) -> None:
        if is_anothers:
            with run_claim(config.run_dir, "two"):
                pass
        raise FencedError("a newer attempt has taken the run over")

    monkeypatch.setattr(child, "_join", lambda *_: None)
    # What a child does to its process is not to be done to this one.
    monkeypatch.setattr(child, "configure_logging", lambda: None)
    monkeypatch.setattr(child.signal, "signal", lambda *_: None)
    monkeypatch.setattr(child, "HangDump", lambda stacks: SimpleNamespace(on_hang=None))
    monkeypatch.setattr(child, "run_attempt", run_attempt)
    order = Order(
        job=Job(
            config=job["config"], session="one", command_started=None, workers_asked=None, node="a", local_rank=0,
            device="cpu",
        ),
        generation=1, rank=0, rank_nodes=("a",), host="127.0.0.1", port=1,
    )  # fmt: skip
    with run_claim(config.run_dir, "one"):
        pass
    result = child.run_child(order, SharedProgress.create(), stacks=os.memfd_create("stacks"), listener=0, streams=0)
    assert isinstance(result.error, FencedError)
    if not is_anothers:
        assert refusal(config.run_dir, "one") is None
        return
    with pytest.raises(UserError, match="another command has taken over the run"):
        supervise(job, Announcement(host="", port=0, token="", group=0), worker=0, local_rank=0)


def test_workers_of_a_run_that_was_taken_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Train asks all the while that it waits; what is raised then ends its wait."""
    config = make_config(tmp_path, tmp_path / "corpus")
    with run_claim(config.run_dir) as claim:

        def fit(look: Callable[[], None]) -> None:
            for number in range(1000):
                look()
                if number == 2:
                    take(config.run_dir)
                    claim.beat()
                time.sleep(0.02)

        with pytest.raises(RunError, match="taken over by process 7 on host other"):
            run_workers(monkeypatch, config, claim, fit)
    assert "this command ends immediately" in str(refusal(config.run_dir, "one"))
