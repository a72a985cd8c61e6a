"""Measures the cost of each fault in a rehearsal from the run's journal: time to the next step, and lost steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from ray_ulysses.rehearsal.schedule import Fault
from ray_ulysses.tracking.events import AttemptEnded, AttemptStarted, Event, PhaseStarted, StartFailed, StepDone


@dataclass(frozen=True, kw_only=True, slots=True)
class InjectedFault:
    """A fault that was injected into the run."""

    fault: Fault
    at: float
    """Time of the injection, in seconds since the epoch."""
    what: str
    """Description of the target."""
    node: str | None = None
    """Address of the lost node; None if no node was lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """The recovery from a fault. Times are in seconds after the injection."""

    injected: InjectedFault
    attempt: int | None = None
    """The attempt that continued after the fault; None if the fault did not end the attempt."""
    detected_s: float | None = None
    """Time at which the failure was detected."""
    formed_s: float | None = None
    """Time at which all ranks of the next attempt had joined."""
    loaded_s: float | None = None
    """Time at which the ranks had loaded the training state."""
    first_step_s: float | None = None
    """Time at which the first step after the fault completed."""
    pause_s: float | None = None
    """Time from the last step before the fault to the first step after it."""
    lost_steps: int | None = None
    """Number of completed steps that were trained again."""
    workers: tuple[int | None, int | None] = (None, None)
    """World size before and after the fault."""
    is_shared: bool = False
    """Whether an earlier fault has the same `attempt`, so that both share one recovery."""

    @property
    def is_over(self) -> bool:
        """Whether the run resumed training, or was never interrupted."""
        return self.first_step_s is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class LossComparison:
    """Comparison of losses of the same steps."""

    steps: int = 0
    largest: float = 0.0
    """Largest relative difference; 0 if there are no steps."""
    at_step: int | None = None
    """Step of the largest difference; None if there are no steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalReport:
    """Results of a rehearsal."""

    name: str
    run_dir: str
    setting: tuple[str, ...]
    """Description of the cluster, the command and the machine."""
    steps: int
    """Number of completed steps."""
    seconds: float
    """Total time that the run's commands ran."""
    ettr: float | None
    """Effective training time ratio: fraction of `seconds` spent in steps that count; None if there are no steps."""
    rows: int
    rows_lost: int
    """Number of rows that no step trained, up to the last trained row."""
    rows_repeated: int
    """Number of rows that were trained more than once."""
    data_digest: str
    """Sum of the digests of the rows that the model received."""
    recoveries: tuple[Recovery, ...]
    retrained: LossComparison
    """Steps that were trained again after a fault, compared with their first training."""
    unbroken: LossComparison | None
    """All steps, compared with a run without faults; None if there is no such run."""
    samples: tuple[tuple[int, float, float], ...]
    """(step, loss, loss of the unbroken run) for selected steps."""
    tolerance: float
    """Largest allowed relative difference between losses of the same step."""
    problems: tuple[str, ...]
    """Failed checks."""

    @property
    def holds(self) -> bool:
        """Whether all checks passed."""
        return not self.problems

    @property
    def lost_steps(self) -> int:
        """Total number of completed steps that were trained again."""
        return sum(one.lost_steps or 0 for one in self.recoveries)

    def to_json(self) -> dict[str, Any]:
        """Return the report as stored in the rehearsal's JSON file."""
        return {"holds": self.holds, "lost_steps": self.lost_steps, **asdict(self)}


@dataclass(slots=True)
class _Attempt:
    formed: float | None
    """Time at which all ranks had joined; None if unknown."""
    started: AttemptStarted
    steps: list[StepDone] = field(default_factory=list)

    @property
    def reached(self) -> int:
        """Newest completed step of the attempt."""
        return self.steps[-1].step if self.steps else self.started.resumed_step


def recoveries(
    events: Iterable[Event], injected: Sequence[InjectedFault], *, most: int | None = None
) -> tuple[Recovery, ...]:
    """Return the recovery from each fault, in order. Fields that the journal does not record are None.

    ``most`` is the maximum number of workers of the run; None if unknown.
    """
    formed: dict[int, float] = {}
    attempts: dict[int, _Attempt] = {}
    ends: list[float] = []
    for event in events:
        if isinstance(event, PhaseStarted):
            formed.setdefault(event.attempt, event.time)
        elif isinstance(event, AttemptStarted):
            attempts[event.attempt] = _Attempt(formed.get(event.attempt), event)
        elif isinstance(event, StepDone) and event.attempt in attempts:
            attempts[event.attempt].steps.append(event)
        elif isinstance(event, AttemptEnded | StartFailed):
            detected = event.detected_at if isinstance(event, AttemptEnded) else None
            ends.append(event.time if detected is None else detected)
    in_order = [attempts[number] for number in sorted(attempts)]
    found: list[Recovery] = []
    for fault in injected:
        one = _recovery(fault, in_order, sorted(ends), most)
        is_shared = one.attempt is not None and any(one.attempt == other.attempt for other in found)
        # The lost steps are already counted for the earlier fault.
        found.append(replace(one, is_shared=True, lost_steps=0) if is_shared else one)
    return tuple(found)


def _recovery(
    injected: InjectedFault, attempts: Sequence[_Attempt], ends: Sequence[float], most: int | None
) -> Recovery:
    """Return the recovery from a fault: the first later attempt that completed a step."""
    was = next((one for one in reversed(attempts) if one.started.time <= injected.at), None)
    world = None if was is None else was.started.world_size
    grows = injected.fault.kind == "add-node"
    is_needless = injected.fault.kind == "kill-agent" or (grows and world is not None and world == most)
    if is_needless or (was is not None and _trains_elsewhere(was, injected.node)):
        # The fault does not interrupt training.
        later = (step.time - injected.at for one in attempts for step in one.steps if step.time > injected.at)
        return Recovery(injected=injected, first_step_s=min(later, default=None), lost_steps=0, workers=(world, world))
    for before, one in pairwise(attempts):
        size = before.started.world_size
        if one.started.time <= injected.at or not one.steps or (grows and one.started.world_size <= size):
            continue
        first = one.steps[0]
        old = before if grows or was is None else was
        last = old.steps[-1].time if old.steps else None
        # Growth is not a failure, so it is not detected.
        noticed = None if grows else next((at for at in ends if injected.at <= at <= one.started.time), None)
        return Recovery(
            injected=injected,
            attempt=one.started.attempt,
            detected_s=None if noticed is None else noticed - injected.at,
            formed_s=None if one.formed is None else one.formed - injected.at,
            loaded_s=one.started.time - injected.at,
            first_step_s=first.time - injected.at,
            pause_s=None if last is None else first.time - last,
            lost_steps=max(0, old.reached - one.started.resumed_step),
            workers=(old.started.world_size, one.started.world_size),
        )
    return Recovery(injected=injected, workers=(world, None))


def _trains_elsewhere(attempt: _Attempt, node: str | None) -> bool:
    """Return whether a lost node had no ranks of an attempt, for example because its workers had not joined yet."""
    ranks = attempt.started.rank_nodes
    return node is not None and not any(rank.endswith(f"/{node}") for rank in ranks)
