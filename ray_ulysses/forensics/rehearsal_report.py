"""The result of a rehearsal: what each fault cost, and whether the run is the one that it would have been."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ray_ulysses.forensics.recoveries import Recovery


@dataclass(frozen=True, kw_only=True, slots=True)
class LossComparison:
    """Losses of steps that were trained twice.

    Attributes:
        steps: Number of steps.
        largest: Largest relative difference; 0 without a step.
        at_step: Its step; None without one.
    """

    steps: int = 0
    largest: float = 0.0
    at_step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalReport:
    """What a rehearsal has shown.

    Attributes:
        name: The rehearsal's run.
        run_dir: Its directory.
        setting: The cluster, the command and the machine, in words.
        steps: Completed steps.
        seconds: How long its commands ran.
        ettr: Share of that time that went into steps that count, of 1; None without a step.
        rows: Rows that were trained on.
        rows_lost: Rows before the last trained one that no step has trained.
        rows_repeated: Rows that more than one step has trained.
        data_digest: Sum of the digests of the rows that the model received.
        recoveries: What followed each fault.
        retrained: Steps that were trained again after a fault, against the first time.
        unbroken: All steps against an unbroken run; None if there was none.
        samples: Step, loss, and loss of the unbroken run, for some steps.
        tolerance: Largest relative difference of a loss that holds.
        problems: Everything that does not hold.
    """

    name: str
    run_dir: str
    setting: tuple[str, ...]
    steps: int
    seconds: float
    ettr: float | None
    rows: int
    rows_lost: int
    rows_repeated: int
    data_digest: str
    recoveries: tuple[Recovery, ...]
    retrained: LossComparison
    unbroken: LossComparison | None
    samples: tuple[tuple[int, float, float], ...]
    tolerance: float
    problems: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether everything holds."""
        return not self.problems

    @property
    def lost_steps(self) -> int:
        """Steps that were trained and thrown away."""
        return sum(one.lost_steps or 0 for one in self.recoveries)

    def to_json(self) -> dict[str, Any]:
        """Return the object that is stored."""
        return {"holds": self.holds, "lost_steps": self.lost_steps, **asdict(self)}
