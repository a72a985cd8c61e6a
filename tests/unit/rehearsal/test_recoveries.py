"""The cost of each fault is measured from the journal."""

from __future__ import annotations

from typing import Any

from ray_ulysses.rehearsal.recoveries import InjectedFault, recoveries
from ray_ulysses.rehearsal.schedule import Fault, FaultKind
from ray_ulysses.tracking.events import Event
from tests.unit.tracking.journals import event


def _started(attempt: int, time: float, world: int, resumed: int) -> list[Event]:
    phase = {"event": "phase", "phase": "building the model", "part": "build"}
    start = {"event": "attempt_started", "world_size": world, "resumed_step": resumed, "rank_nodes": ["a/10.0.0.1"]}
    return [event({"attempt": attempt, "time": time - 1, **phase}), event({"attempt": attempt, "time": time, **start})]


def _steps(attempt: int, time: float, first: int, last: int) -> list[Event]:
    """One step per second."""
    fields: dict[str, Any] = {"event": "step", "loss": 1.0, "tokens": 1, "digest": "1", "seconds": 1.0}
    return [
        event({"attempt": attempt, "time": time + step - first, "step": step, "rows": (step - 1, step), **fields})
        for step in range(first, last + 1)
    ]


def _ended(attempt: int, time: float, **fields: Any) -> Event:
    return event({"event": "attempt_ended", "attempt": attempt, "time": time, "reason": "lost worker 0", **fields})


def _inject(kind: FaultKind, at: float, node: str | None = None) -> InjectedFault:
    return InjectedFault(fault=Fault(at_s=at, kind=kind), at=at, what=kind, node=node)


LOST = [
    *_started(1, 100, 4, 0),
    *_steps(1, 101, 1, 10),
    _ended(1, 112.0, detected_at=111.5),
    *_started(2, 114, 2, 9),
    *_steps(2, 115, 10, 20),
]


def test_a_lost_node_costs_the_time_to_the_next_step_and_the_steps_that_are_trained_again() -> None:
    (one,) = recoveries(LOST, [_inject("kill-node", 111.0)])
    assert (one.attempt, one.lost_steps, one.workers, one.is_shared) == (2, 1, (4, 2), False)
    assert (one.detected_s, one.formed_s, one.loaded_s, one.first_step_s, one.pause_s) == (0.5, 2.0, 3.0, 4.0, 5.0)
    (late,) = recoveries(LOST, [_inject("kill-worker", 126.0)])
    assert not late.is_over and late.workers == (2, None) and late.lost_steps is None, "no step came after it"


def test_the_loss_of_an_agent_or_of_a_node_without_ranks_does_not_interrupt_training() -> None:
    early, late = recoveries(LOST, [_inject("kill-agent", 104.5), _inject("kill-agent", 130.0)])
    assert (early.attempt, early.first_step_s, early.lost_steps) == (None, 0.5, 0)
    assert not late.is_over
    faults = [_inject("kill-node", 104.5, f"{host}.0.0.1") for host in (0, 10)]
    beside, of_ranks = recoveries(LOST, faults)
    assert (beside.attempt, beside.first_step_s, beside.lost_steps) == (None, 0.5, 0)
    assert of_ranks.attempt == 2


def test_two_drains_of_one_restart_are_counted_once() -> None:
    first, second = recoveries(LOST, [_inject("drain-node", 110.0), _inject("drain-node", 111.0)])
    assert (first.attempt, second.attempt, first.is_shared, second.is_shared) == (2, 2, False, True)
    assert (first.lost_steps, second.lost_steps) == (1, 0)


def test_an_attempt_without_steps_is_skipped_but_lost_steps_are_counted() -> None:
    events = [*LOST[:-11], _ended(2, 115.0), *_started(3, 118, 2, 8), *_steps(3, 119, 9, 12)]
    (one,) = recoveries(events, [_inject("kill-node", 111.0)])
    assert (one.attempt, one.lost_steps, one.first_step_s) == (3, 2, 8.0)


def test_a_new_node_is_matched_with_growth_and_not_with_a_recovery() -> None:
    again = [*_started(3, 130, 2, 20), *_steps(3, 131, 21, 25)]
    grown = [*_started(4, 140, 4, 25), *_steps(4, 141, 26, 27)]
    events = [*LOST, *again, *grown]
    joins, dies = recoveries(events, [_inject("add-node", 126.0), _inject("kill-worker", 127.0)])
    assert (joins.attempt, joins.workers, joins.lost_steps, joins.pause_s) == (4, (2, 4), 0, 6.0)
    assert (dies.attempt, dies.workers, dies.first_step_s) == (3, (2, 2), 4.0)
    (alone,) = recoveries(events[:-4], [_inject("add-node", 126.0)])
    # A run with its maximum number of workers does not grow.
    (needless,) = recoveries(LOST, [_inject("add-node", 104.0)], most=4)
    assert needless.is_over and needless.attempt is None and needless.workers == (4, 4)
    assert not alone.is_over


def test_a_drain_loses_no_steps() -> None:
    events = [*_started(1, 100, 4, 0), *_steps(1, 101, 1, 10), *_started(2, 114, 2, 10), *_steps(2, 115, 11, 12)]
    (one,) = recoveries(events, [_inject("drain-node", 104.0)])
    assert (one.lost_steps, one.first_step_s, one.pause_s, one.detected_s) == (0, 11.0, 5.0, None)
