"""Parses fault schedules, checks that a run can survive them, and generates random schedules."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

FaultKind = Literal[
    "kill-worker",
    "crash-worker",
    "stop-worker",
    "kill-agent",
    "kill-driver",
    "kill-node",
    "drain-node",
    "add-node",
]

KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
MEANINGS: Mapping[FaultKind, str] = {
    "kill-worker": "a training process is killed (SIGKILL)",
    "crash-worker": "a training process crashes (SIGSEGV)",
    "stop-worker": "a training process is stopped (SIGSTOP)",
    "kill-agent": "an agent that holds peer memory is killed",
    "kill-driver": "the command is killed (SIGKILL) and restarted immediately",
    "kill-node": "a node is lost without notice",
    "drain-node": "a node is drained, and lost at the drain deadline",
    "add-node": "a lost node is replaced",
}
LOSES_A_NODE: tuple[FaultKind, ...] = ("kill-node", "drain-node")
_LIKELIHOOD: Mapping[FaultKind, int] = {
    "kill-worker": 4,
    "crash-worker": 3,
    "stop-worker": 3,
    "kill-agent": 2,
    "kill-driver": 1,
    "kill-node": 4,
    "drain-node": 4,
    "add-node": 8,
}
"""Relative weight of each kind of fault in random schedules."""

_TIME = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
_FORM = "specify a time and a kind, such as '40s kill-node, 1m30s drain-node'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A scheduled fault."""

    at_s: float
    """Time of the fault, in seconds after the run's first step."""
    kind: FaultKind

    def __str__(self) -> str:
        return f"{self.at_s:g}s {self.kind}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultTargets:
    """The cluster that faults are injected into."""

    rooms: tuple[int, ...]
    """For each node that may be lost, the number of workers that fit, in complete sequence-parallel groups."""
    elsewhere: int
    """Number of workers that fit on all other nodes."""
    least: int
    """Minimum number of workers (``cluster.workers.min``)."""
    impossible: Mapping[FaultKind, str] = field(default_factory=dict)
    """Kinds of faults that can't be injected into this cluster, with the reason."""


def parse_seconds(text: str) -> float | None:
    """Parse a duration such as ``90s``, ``1m30s``, ``2h`` or ``90`` to seconds; return None if it is invalid."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    found = _TIME.fullmatch(text)
    if found is None or not text:
        return None
    return sum(float(part) * unit for part, unit in zip(found.groups(), (3600.0, 60.0, 1.0), strict=True) if part)


def parse_faults(text: str) -> tuple[tuple[Fault, ...], tuple[str, ...]]:
    """Parse a schedule. Return the faults, ordered by time, and the problems found.

    Faults such as ``40s kill-node`` are separated by commas or line breaks, and ``#`` starts a comment.
    """
    faults, problems = [], []
    lines = (line.partition("#")[0] for line in text.splitlines())
    for entry in (part.strip() for line in lines for part in line.split(",")):
        if not entry:
            continue
        words = entry.split()
        at_s = parse_seconds(words[0])
        if len(words) != 2 or at_s is None:
            problems.append(f"{entry!r} is not a fault: {_FORM}")
            continue
        kind = next((kind for kind in KINDS if kind == words[1]), None)
        if kind is None:
            problems.append(f"{entry!r}: there is no fault {words[1]!r}; use {', '.join(KINDS)}")
        else:
            faults.append(Fault(at_s=at_s, kind=kind))
    if not faults and not problems:
        problems.append(f"the schedule contains no fault: {_FORM}")
    return tuple(sorted(faults, key=lambda fault: fault.at_s)), tuple(problems)


def schedule_problems(faults: Sequence[Fault], targets: FaultTargets) -> tuple[str, ...]:
    """Return a problem for each fault that can't be injected or would leave too few workers for the run.

    The faults are ordered by time. The largest remaining node is assumed to be lost first.
    """
    problems = []
    left, lost = sorted(targets.rooms), []
    for fault in faults:
        if fault.kind in targets.impossible:
            problems.append(f"{fault}: {targets.impossible[fault.kind]}")
        elif fault.kind in LOSES_A_NODE:
            room = targets.elsewhere + sum(left[:-1])
            if left and room >= targets.least:
                lost.append(left.pop())
                continue
            problems.append(
                f"{fault}: only {room} workers would still fit, but the run needs {targets.least} "
                "(cluster.workers.min); insert an earlier add-node, lower cluster.workers.min, or use more nodes"
            )
        elif fault.kind == "add-node":
            if not lost:
                problems.append(f"{fault}: no node is missing at that time; insert an earlier kill-node or drain-node")
                continue
            left = sorted([*left, lost.pop()])
    return tuple(problems)


def random_schedule(
    seed: int, *, every_s: float, for_s: float, targets: FaultTargets, kinds: Collection[FaultKind] = KINDS
) -> tuple[Fault, ...]:
    """Generate a random schedule that a run can survive. The result is deterministic.

    The mean time between faults is ``every_s``, and each interval is 0.5 to 1.5 times as long. The latest time of a
    fault is ``for_s`` after the run's first step. Kinds that are impossible at a given time are skipped.
    """
    draw = random.Random(seed)
    faults: tuple[Fault, ...] = ()
    at_s = 0.0
    while True:
        at_s += every_s * draw.uniform(0.5, 1.5)
        if at_s > for_s or not math.isfinite(at_s):
            return faults
        candidates = [Fault(at_s=round(at_s, 1), kind=kind) for kind in KINDS if kind in kinds]
        possible = [one for one in candidates if not schedule_problems((*faults, one), targets)]
        if not possible:
            return faults
        faults += (*draw.choices(possible, [_LIKELIHOOD[one.kind] for one in possible]),)
