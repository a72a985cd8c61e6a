"""What a run has taken over from another one whose checkpoint it went on from, beside what its own journal records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenOver:
    """The steps before a run's own; nothing by default.

    Attributes:
        step: The last of them.
        tokens: Supervised tokens that they trained on.
        rows: Rows that they trained on.
        digest: Sum of their data digests, modulo 2**64.
        origin: The checkpoint that vouches for them.
    """

    step: int = 0
    tokens: int = 0
    rows: int = 0
    digest: int = 0
    origin: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return what the journal's ``attempt_started`` holds."""
        return {**asdict(self), "digest": f"{self.digest:016x}"}


def taken_over(records: Iterable[Mapping[str, Any]]) -> TakenOver:
    """Return what the newest attempts of a run build on (pure).

    Args:
        records: As `tracking.journal.read_records` gives them.
    """
    found = TakenOver()
    for record in records:
        if record["event"] != "attempt_started":
            continue
        fields = record.get("taken_over")
        if isinstance(fields, Mapping):
            found = TakenOver(**{**fields, "digest": int(fields["digest"], 16)})
        elif record["resumed_step"] == 0:
            found = TakenOver()
    return found
