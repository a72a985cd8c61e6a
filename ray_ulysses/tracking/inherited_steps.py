"""The steps that a run has inherited from another one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ray_ulysses.validation import Digest, Whole


@dataclass(frozen=True, kw_only=True, slots=True)
class InheritedSteps:
    """The steps before a run's own, trained by the run whose checkpoint it continues; none by default.

    Attributes:
        step: The last of them.
        tokens: Supervised tokens that they trained on.
        rows: Rows that they trained on.
        digest: Sum of their data digests, modulo 2**64.
        origin: The checkpoint that contains them.
    """

    step: Whole = 0
    tokens: Whole = 0
    rows: Whole = 0
    digest: Digest = 0
    origin: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the object in the journal's ``attempt_started``."""
        return {**asdict(self), "digest": f"{self.digest:016x}"}
