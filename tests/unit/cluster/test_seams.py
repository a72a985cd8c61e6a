"""What is private to Ray Train: it is looked for before a run, and a run does without Ray Train where it is gone."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.exceptions import TrainingFailedError

from ray_ulysses.cluster import plain_workers, train_job
from ray_ulysses.cluster.plain_workers import PlainWorkers
from ray_ulysses.cluster.seams import SEAMS, seams_missing
from ray_ulysses.elastic import reform
from ray_ulysses.tracking.events import RESIZED
from tests.distributed.run_case import make_config


def test_the_installed_ray_train_has_every_seam() -> None:
    """A canary of Ray Train 2.60."""
    assert seams_missing() == ()


@pytest.mark.parametrize(("owner", "part"), [(owner, part) for owner, parts in SEAMS.items() for part in parts])
def test_each_seam_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, owner: tuple[str, str], part: str) -> None:
    module, name = owner
    others = {one: None for one in SEAMS[owner] if one != part}
    monkeypatch.setattr(importlib.import_module(module), name, type(name, (), others))
    assert seams_missing() == (f"{name}.{part}",)


def test_a_class_or_a_module_that_is_gone_lacks_all_of_its_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = owner = next(iter(SEAMS))
    monkeypatch.delattr(importlib.import_module(module), name)
    monkeypatch.setitem(SEAMS, ("ray.train.gone", "Gone"), ("part",))
    assert seams_missing() == (*(f"{name}.{part}" for part in SEAMS[owner]), "Gone.part")


@pytest.mark.parametrize("missing", [(), ("WorkerStatus.error",)])
@pytest.mark.parametrize("workers", [2, {"min": 2, "max": 4}])
def test_without_a_seam_the_workers_run_without_ray_train(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, missing: tuple[str, ...], workers: Any
) -> None:
    for name in ("PlainWorkers", "WatchedTrainer", "WorkerScaling", "RunConfig"):
        monkeypatch.setattr(train_job, name, lambda *_, of=name, **given: (of, given))
    config = make_config(tmp_path, tmp_path, cluster__workers=workers)
    book: Any = train_job.failure_book(config, "session")
    run: Any = SimpleNamespace(config=config)
    monkeypatch.setattr(train_job.os, "environ", {})
    chosen: Any = train_job._trainer(run, book, lambda: None, {"session": "session"}, missing)
    assert chosen[0] == ("PlainWorkers" if missing else "WatchedTrainer")
    assert chosen[1]["book"].writer == train_job.CONTROLLER
    assert chosen[1]["scaling"][0] == "WorkerScaling"


LOST = RayActorError(error_msg="its node is gone")


def workers_of(
    monkeypatch: pytest.MonkeyPatch, *, gives_up: bool = False, gives_up_late: bool = True, phase: str = "training"
) -> Any:
    """Return workers whose calls to Ray return what the test gives, or raise it."""

    def get(result: Any) -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    def sleep(_: float) -> None:
        group.gave_up, group.phase = gives_up_late, "ended"

    living = {number: SimpleNamespace(is_lost=False) for number in range(2)}
    group = SimpleNamespace(gave_up=gives_up, phase=phase, workers=living)
    monkeypatch.setattr(plain_workers, "ray", SimpleNamespace(wait=lambda refs, timeout: (refs[:1], []), get=get))
    monkeypatch.setattr(plain_workers.time, "sleep", sleep)
    workers: Any = PlainWorkers.__new__(PlainWorkers)
    workers.told = []
    coordinator = SimpleNamespace(group=group, post=workers.told.append, close=lambda: workers.told.append("closed"))
    workers._watch = SimpleNamespace(coordinator=coordinator)
    workers._judge = SimpleNamespace(leave_to_ray=lambda: workers.told.append("left"))
    workers._scaling = SimpleNamespace(look=lambda: None)
    workers._look = lambda: None
    return workers


def test_a_worker_that_is_lost_is_done_without_while_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = workers_of(monkeypatch)
    assert workers._wait({LOST: 0, "finished": 1}) == "finished"
    assert [(one.worker, type(one)) for one in workers.told] == [(0, reform.WorkerLost)]


@pytest.mark.parametrize(
    ("error", "gives_up", "phase"),
    [(LOST, True, "ended"), (LOST, False, "gathering"), (RayTaskError("train", "", ValueError()), False, "training")],
)
def test_a_failure_that_the_coordinator_gives_up_on_ends_the_group(
    monkeypatch: pytest.MonkeyPatch, error: Any, gives_up: bool, phase: str
) -> None:
    workers = workers_of(monkeypatch, gives_up=gives_up, phase=phase)
    with pytest.raises(type(error)):
        workers._wait({error: 0, "finished": 1})
    assert workers.told == ["left"] * gives_up


def test_workers_that_were_all_given_up_end_the_group_as_the_coordinator_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a node that is gone, or of supervisors that are stopped, Ray knows nothing yet."""
    workers = workers_of(monkeypatch, gives_up=True, phase="ended")
    for one in workers._watch.coordinator.group.workers.values():
        one.is_lost = True
    monkeypatch.setattr(plain_workers, "ray", SimpleNamespace(wait=lambda refs, timeout: ([], refs)))
    with pytest.raises(RayError, match="every worker was lost"):
        workers._wait({"silent": 0, "silent too": 1})


def test_the_loss_of_every_worker_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the coordinator, a moment later."""
    workers = workers_of(monkeypatch)
    with pytest.raises(RayActorError):
        workers._wait({LOST: 0})
    assert workers.told[-1] == "left"


def test_those_that_have_joined_finish_a_run_whose_first_workers_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert workers_of(monkeypatch, gives_up_late=False)._wait({LOST: 0}) == RESIZED


@pytest.mark.parametrize("decision", [FailureDecision.RETRY, FailureDecision.RAISE])
def test_workers_are_started_again_after_a_resize_and_a_failure_that_is_survived(
    monkeypatch: pytest.MonkeyPatch, decision: FailureDecision
) -> None:
    workers = workers_of(monkeypatch)
    results: list[Any] = [RESIZED, LOST, "finished"]

    def train(nodes: list[str]) -> str:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return str(result)

    workers._train = train
    workers._placed = list
    workers._judge.make_decision = lambda error: decision
    if decision is FailureDecision.RETRY:
        workers.fit()
    else:
        with pytest.raises(TrainingFailedError, match="its node is gone"):
            workers.fit()
    assert len(results) == (decision is FailureDecision.RAISE) and workers.told == ["closed"]
