"""The ledger of a run's time as spans between two moments, so that it can be drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ray_ulysses.tracking.step_groups import Entry, group_steps
from ray_ulysses.tracking.time_spent import TimeLedger

Moments = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """The time of a run's commands by its use, in seconds since the epoch.

    Attributes:
        spans: The beginnings and ends of the spans of each part of `TimeSpent`, ascending; the parts of a start or a
            recovery have the names of `StartTime`. Steps that were lost later are still in ``steps_s``.
    """

    spans: dict[str, tuple[Moments, Moments]]

    @property
    def begin(self) -> float:
        """Return the beginning of the first span; 0 without one."""
        return min((float(begins[0]) for begins, _ in self.spans.values()), default=0.0)

    @property
    def end(self) -> float:
        """Return the end of the last span; 0 without one."""
        return max((float(ends.max()) for _, ends in self.spans.values()), default=0.0)

    def seconds_between(self, part: str, edges: Moments) -> Moments:
        """Return the seconds of a part between each two neighbors of ``edges``, which ascend."""
        if part not in self.spans:
            return np.zeros(len(edges) - 1)
        begins, ends = self.spans[part]
        moments = np.column_stack((begins, ends)).reshape(-1)
        passed = np.repeat(np.append(0.0, np.cumsum(ends - begins)), 2)[1:-1]
        return np.diff(np.interp(edges, moments, passed))


class _RecordingLedger(TimeLedger):
    """Keeps every span that it accounts for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[tuple[Moments, Moments]]] = {}

    def _note(self, part: str, begins: ArrayLike, ends: ArrayLike) -> None:
        self.found.setdefault(part, []).append((np.atleast_1d(begins), np.atleast_1d(ends)))


def run_timeline(events: Iterable[Entry]) -> Timeline:
    """Return the time of a run by its use (pure).

    Args:
        events: The run's journal.
    """
    ledger = _RecordingLedger()
    for event in group_steps(events):
        ledger.add(event)
    ledger.close()
    return Timeline(
        spans={part: spans for part, found in ledger.found.items() if (spans := _joined(found)) is not None}
    )


def _joined(found: list[tuple[Moments, Moments]]) -> tuple[Moments, Moments] | None:
    """Return the spans that have a length in ascending order; None if there are none."""
    begins = np.concatenate([one for one, _ in found])
    ends = np.concatenate([one for _, one in found])
    order = np.flatnonzero(ends > begins)
    order = order[np.argsort(begins[order], kind="stable")]
    return (begins[order], ends[order]) if len(order) else None
