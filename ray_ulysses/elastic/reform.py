"""State machine of the coordinator: decides which workers train, and how a group recovers from failures.

A worker is a supervisor whose child process trains. Children that train together form a generation. If a child fails,
its generation is stopped, and the remaining workers form the next generation from complete sequence-parallel groups. If
too few workers remain, the group waits for replacements. Failures that can't be recovered this way are left to Ray
Train, which restarts the workers. A node whose GPU or network has failed is excluded from all later generations.

`reduce` maps every event to the next state and the coordinator's actions. A group gathers until all workers have
joined, and then trains. After a fault, the group stops and the failure is judged. The group then trains again, waiting
first if it is short of workers, or ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ray_ulysses.elastic.causes import RankError
from ray_ulysses.elastic.placement import WorkerRange, place_workers

CAUSE_S = 1.5
"""Longest wait for the root cause, in seconds, if all known errors are only consequences."""
MOST_FAILED_FORMS = 2
"""Consecutive generations that may fail before their first step; then Ray Train restarts the workers."""

END_S = 10.0
"""Longest wait for a killed process with little memory to end, in seconds."""
_S_PER_GIB = 0.25
"""Additional wait per GiB of host memory, in seconds. On an idle machine, the kernel takes 0.085 s to reclaim a GiB of
small pages that are not pinned. Pinned memory takes longer (not yet measured), and a node's ranks all end at once."""

Phase = Literal["gathering", "training", "stopping", "judging", "short", "ended"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Address at which other workers reach a worker."""

    node: str
    host: str
    port: int
    """Port on which the worker listens for the other ranks if its child becomes rank 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How a child ended, as reported by its supervisor."""

    status: str | None = None
    """Outcome of the attempt, or None if it failed."""
    error: RankError | None = None
    """The failure, whose rank is not set yet; None for a child that succeeded or was stopped on request."""
    step: int = 0
    """Step that the child was training; 0 before the first step."""
    stepped: bool = False
    is_final: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervised:
    """The coordinator's record of one worker."""

    place: Place | None = None
    """Address of the worker, or None before it has joined."""
    is_lost: bool = False
    report: Report | None = None
    """How the worker's child in this generation ended, or None while it runs."""

    @property
    def is_there(self) -> bool:
        """Whether the worker has joined and is not lost."""
        return self.place is not None and not self.is_lost


@dataclass(frozen=True, kw_only=True, slots=True)
class Raised:
    """An error that a rank raised during a step."""

    what: str
    step: int
    node: str | None
    """The rank's node if the error text points to a failed device, otherwise None."""

    def returns(self, before: Raised | None) -> bool:
        """Return whether this error repeats an earlier one at the same step, not merely on the same broken device."""
        if before is None or (before.what, before.step) != (self.what, self.step):
            return False
        return self.node is None or self.node != before.node


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """State of a worker group."""

    wanted: WorkerRange
    workers: Mapping[int, Supervised]
    """Workers by number: the rank in Ray Train's group, or a higher number for workers that joined later."""
    phase: Phase = "gathering"
    generation: int = 0
    members: tuple[int, ...] = ()
    """Worker numbers of the current generation, by rank."""
    errors: Mapping[int, RankError] = field(default_factory=dict)
    """Errors of the members that failed or were lost in this generation, by rank."""
    fault_at: float = 0.0
    failed_forms: int = 0
    """Number of consecutive generations that failed before their first step."""
    unusable: frozenset[str] = frozenset()
    """Nodes that are draining, dead or too slow."""
    draining: frozenset[str] = frozenset()
    """Unusable nodes that are still alive."""
    silent: frozenset[str] = frozenset()
    """Nodes that stopped answering: their last worker was lost because it fell silent, and none has joined since."""
    moves: bool = False
    """Whether the generation was asked to end, so that the next generation can avoid the unusable nodes."""
    broken: frozenset[str] = frozenset()
    """Nodes whose GPU or network has failed."""
    suspects: frozenset[str] = frozenset()
    """Nodes on which NCCL reported an error of their own network in the previous generation, if nothing else failed.
    The broken or disconnected node may be a different node."""
    tested: frozenset[int] = frozenset()
    """Workers that have passed the self-test and trained a step in some generation."""
    last_raised: Raised | None = None
    """Error that a rank raised in the previous generation, or None."""
    gave_up: bool = False
    """Whether the failure was left to Ray Train."""
    status: str | None = None
    """Outcome of the last generation, or None if it failed."""
    gather_until: float = math.inf
    """Monotonic time at which the wait for missing workers ends."""
    gather_s: float = math.inf
    """Longest wait for replacements of lost workers, in seconds."""
    end_s: float = END_S
    """Longest wait for a killed child to end, in seconds. The supervisor then kills the launcher too. A worker whose
    child has not ended after twice this time is lost."""

    @property
    def num_placed(self) -> Counter[str]:
        """Number of the current generation's workers on each node."""
        places = (self.workers[worker].place for worker in self.members)
        return Counter(place.node for place in places if place is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """A supervisor has connected. A worker that joins after the start becomes a member in the next generation."""

    worker: int
    place: Place


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildEnded:
    """A supervisor reports that its child has ended; ``port`` is the supervisor's port for the next generation."""

    worker: int
    generation: int
    report: Report
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLost:
    """A supervisor is gone: its connection was closed, or it was silent for too long."""

    worker: int
    what: str
    silent_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksHung:
    """Ranks of a generation make no progress, although their supervisors answer."""

    generation: int
    ranks: tuple[int, ...]
    what: str
    silent_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesUnusable:
    """Nodes that are dead, draining or too slow, and those that drain but are alive. Both replace earlier sets."""

    nodes: frozenset[str]
    draining: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveAsked:
    """The members were asked to save and end, so that the run can continue without the unusable nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A generation's failure was recorded, with the decision whether the run may continue."""

    generation: int
    may_continue: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """A periodic event that lets time limits expire."""


@dataclass(frozen=True, slots=True)
class NoReplacement:
    """No replacement can be started for the lost workers."""


Event = Joined | ChildEnded | WorkerLost | RanksHung | NodesUnusable | MoveAsked | Judged | NoReplacement | Tick


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Start a child on each member; a member's index is its rank."""

    generation: int
    members: tuple[int, ...]
    host: str
    port: int
    is_tested: bool = False
    """Whether every member has already passed the self-test and trained a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Kill the children of a generation."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """Record a generation's failure, which has at least one error, and decide whether the run may continue."""

    generation: int
    errors: tuple[RankError, ...]
    is_final: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """Report the outcome of a successful attempt to every supervisor."""

    status: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveUp:
    """Leave the failure to Ray Train: every supervisor raises its child's error."""

    reason: str


Action = Start | Stop | Judge | Finish | GiveUp


def reduce(group: Group, event: Event, now: float) -> tuple[Group, tuple[Action, ...]]:
    """Return the state after an event, and the actions to carry out."""
    if group.phase == "ended":
        return group, ()
    match event:
        case Joined():
            known = group.workers.get(event.worker, Supervised())
            group = _with(group, event.worker, replace(known, place=event.place))
            group = replace(group, silent=group.silent - {event.place.node})
        case ChildEnded():
            group = _child_ended(group, event)
        case WorkerLost():
            group = _worker_lost(group, event)
        case RanksHung():
            if event.generation == group.generation and group.phase == "training":
                hung = RankError(rank=0, kind="lost", what=event.what, silent_s=event.silent_s)
                group = replace(group, errors={rank: replace(hung, rank=rank) for rank in event.ranks})
        case NodesUnusable():
            group = replace(group, unusable=event.nodes, draining=event.draining)
        case MoveAsked():
            group = replace(group, moves=group.phase == "training")
        case Judged():
            return _judged(group, event, now)
        case NoReplacement():
            group = replace(group, gather_until=now) if group.phase == "short" else group
    return _advance(group, now)


def _advance(group: Group, now: float) -> tuple[Group, tuple[Action, ...]]:
    """Enter the next phase if there is nothing left to wait for."""
    # Events usually arrive in the order of the workers. Looking from the end finds a missing one at once, where a look
    # at all workers after every event would take a time that is quadratic in their number.
    if group.phase == "gathering" and all(worker.is_there for worker in reversed(tuple(group.workers.values()))):
        # Keep the order of Ray Train's ranks: the placement of workers has aligned them with the groups.
        return _start(group, tuple(sorted(group.workers)))
    if group.phase == "gathering" and now >= group.gather_until:
        missing = [worker for worker, one in sorted(group.workers.items()) if not one.is_there]
        reason = f"workers {missing} did not join within elastic.worker_start_timeout_s"
        return replace(group, phase="ended", gave_up=True), (GiveUp(reason=reason),)
    if group.phase == "training":
        if group.errors:
            stopping = replace(group, phase="stopping", fault_at=now)
            stopping, actions = _advance(stopping, now)
            return stopping, (Stop(generation=group.generation), *actions)
        if all(_status(group, one) is not None for one in reversed(group.members)):
            return _all_ended(group, {_status(group, one) for one in group.members})
    if group.phase == "stopping":
        return _stopping(group, now)
    if group.phase == "short":
        # Draining nodes may be used until replacements have joined.
        formed = _form(group) or _form(group, but=group.draining)
        if formed is None and now >= group.gather_until:
            reason = "the remaining workers do not form complete sequence-parallel groups"
            return replace(group, phase="ended", gave_up=True), (GiveUp(reason=reason),)
        return formed or (group, ())
    return group, ()


def _all_ended(group: Group, statuses: set[str | None]) -> tuple[Group, tuple[Action, ...]]:
    is_stage = statuses == {"stage"}
    if is_stage:
        # Earlier failures have not recurred.
        group = replace(group, failed_forms=0, last_raised=None)
    formed = _form(group) if is_stage or (group.moves and statuses == {"resized"}) else None
    # All members of a completed stage are present, so they can continue until they are able to move.
    formed = formed or (_start(group, group.members) if is_stage else None)
    if formed is not None:
        # Children that have ended wait to be killed, including those on nodes that are left behind.
        return formed[0], (Stop(generation=group.generation), *formed[1])
    status = min(str(status) for status in statuses)
    return replace(group, phase="ended", status=status), (Finish(status=status),)


def _status(group: Group, worker: int) -> str | None:
    report = group.workers[worker].report
    return None if report is None else report.status


def _stopping(group: Group, now: float) -> tuple[Group, tuple[Action, ...]]:
    waited_s = now - group.fault_at
    for worker in reversed(group.members):
        if group.workers[worker].is_there and group.workers[worker].report is None:
            if waited_s < 2 * group.end_s:
                return group, ()
            group = _worker_lost(group, WorkerLost(worker=worker, what="the supervisor does not respond"))
    errors = tuple(group.errors[rank] for rank in sorted(group.errors))
    if all(error.kind == "consequence" for error in errors) and waited_s < CAUSE_S:
        return group, ()
    errors, broken, suspects = _find_broken(group, errors)
    reports = [report for worker in group.members if (report := group.workers[worker].report) is not None]
    raised = _first_raised(group, errors)
    is_final = any(report.is_final for report in reports)
    if raised is not None and raised.returns(group.last_raised):
        is_final, broken, errors = True, frozenset(), _as_raised(errors)
    # Once a broken node is excluded, its failure does not count against the remaining workers.
    failed_forms = 0 if broken or any(report.stepped for report in reports) else group.failed_forms + 1
    group = replace(
        group, phase="judging", last_raised=raised, failed_forms=failed_forms, broken=group.broken | broken,
        suspects=suspects,
    )  # fmt: skip
    return group, (Judge(generation=group.generation, errors=errors, is_final=is_final),)


def _find_broken(
    group: Group, errors: tuple[RankError, ...]
) -> tuple[tuple[RankError, ...], frozenset[str], frozenset[str]]:
    """Return the errors, each reclassified in the light of the others; the broken node; and the suspected nodes."""
    if any(error.kind in ("preempted", "lost") for error in errors):
        # A lost worker may cause device and network errors on other ranks.
        return errors, frozenset(), frozenset()
    suspects = frozenset(_node(group, error.rank) for error in errors if error.is_of_network)
    if len(suspects) == 1 and suspects == group.suspects:
        # The same node was suspected in two consecutive generations, so the others are not at fault.
        errors = tuple(replace(error, kind="device") if error.is_of_network else error for error in errors)
    broken = frozenset(_node(group, error.rank) for error in errors if error.kind == "device")
    if len(broken) > 1:
        # Devices rarely fail on several nodes at once by chance: the computation makes them fail.
        return _as_raised(errors), frozenset(), suspects
    return errors, broken, suspects


def _as_raised(errors: tuple[RankError, ...]) -> tuple[RankError, ...]:
    return tuple(replace(error, kind="raised") if error.kind == "device" else error for error in errors)


def _first_raised(group: Group, errors: tuple[RankError, ...]) -> Raised | None:
    """Return the first error, by rank, that was raised during a step, or None."""
    for error in errors:
        report = group.workers[group.members[error.rank]].report
        if error.kind in ("device", "raised") and report is not None and report.step > 0:
            node = _node(group, error.rank) if error.kind == "device" else None
            return Raised(what=error.without_numbers, step=report.step, node=node)
    return None


def _node(group: Group, rank: int) -> str:
    place = group.workers[group.members[rank]].place
    assert place is not None
    return place.node


def _judged(group: Group, event: Judged, now: float) -> tuple[Group, tuple[Action, ...]]:
    if group.phase != "judging" or event.generation != group.generation:
        return group, ()
    reason = "the failure ends the run"
    if event.may_continue:
        if group.failed_forms < MOST_FAILED_FORMS:
            return _advance(replace(group, phase="short", gather_until=now + group.gather_s), now)
        reason = f"{group.failed_forms} consecutive attempts failed before their first step"
    return replace(group, phase="ended", gave_up=True), (GiveUp(reason=reason),)


def _form(group: Group, but: frozenset[str] = frozenset()) -> tuple[Group, tuple[Action, ...]] | None:
    """Start the next generation on usable nodes and on nodes in `but`; return None if there are too few workers."""
    unusable = (group.unusable - but) | group.broken
    by_node: dict[str, list[int]] = {}
    for number, worker in sorted(group.workers.items()):
        if worker.is_there and worker.place is not None and worker.place.node not in unusable:
            by_node.setdefault(worker.place.node, []).append(number)
    placed = place_workers({node: len(workers) for node, workers in by_node.items()}, group.wanted)
    if placed is None:
        return None
    return _start(group, tuple(worker for node, count in placed.items() for worker in by_node[node][:count]))


def _start(group: Group, members: tuple[int, ...]) -> tuple[Group, tuple[Action, ...]]:
    place = group.workers[members[0]].place
    assert place is not None
    reports = [report for worker in group.members if (report := group.workers[worker].report) is not None]
    # A child that succeeded may have had no step left to train.
    passed = any(report.stepped or report.status is not None for report in reports)
    tested = group.tested.union(group.members if passed else ())
    workers = {number: replace(worker, report=None) for number, worker in group.workers.items()}
    group = replace(
        group, workers=workers, phase="training", generation=group.generation + 1, members=members, errors={},
        moves=False, tested=tested,
    )  # fmt: skip
    start = Start(
        generation=group.generation, members=members, host=place.host, port=place.port,
        is_tested=tested.issuperset(members),
    )  # fmt: skip
    return group, (start,)


def _child_ended(group: Group, event: ChildEnded) -> Group:
    worker = group.workers[event.worker]
    if event.generation != group.generation or worker.place is None or worker.report is not None:
        # The report belongs to an earlier generation, or repeats a known report.
        return group
    place, error = replace(worker.place, port=event.port), event.report.error
    if error is not None and event.worker in group.members:
        rank = group.members.index(event.worker)
        # A lost worker's error is more informative than the one that it reported before.
        group = replace(group, errors={rank: replace(error, rank=rank), **group.errors})
    return _with(group, event.worker, replace(worker, place=place, report=event.report))


def _worker_lost(group: Group, event: WorkerLost) -> Group:
    worker = group.workers[event.worker]
    if worker.is_lost:
        return group
    group = _with(group, event.worker, replace(worker, is_lost=True))
    if worker.place is not None and event.silent_s > 0:
        there = {one.place.node for one in group.workers.values() if one.is_there and one.place is not None}
        group = replace(group, silent=group.silent | ({worker.place.node} - there))
    if event.worker not in group.members or group.phase not in ("training", "stopping"):
        return group
    is_announced = worker.place is not None and worker.place.node in group.unusable
    error = RankError(
        rank=group.members.index(event.worker),
        kind="preempted" if is_announced else "lost",
        what="the node was taken away" if is_announced else event.what,
        silent_s=event.silent_s,
    )
    return replace(group, errors={**group.errors, error.rank: error})


def _with(group: Group, number: int, worker: Supervised) -> Group:
    return replace(group, workers={**group.workers, number: worker})


def end_bound_s(host_bytes: int) -> float:
    """Return the longest wait for a killed process with this much host memory to end, in seconds."""
    return END_S + host_bytes / 2**30 * _S_PER_GIB
