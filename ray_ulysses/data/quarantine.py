"""Documents that are left out of a corpus: which, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A document that is left out.

    Attributes:
        source: File or data set that it is in.
        offset: Line (from 1) or row (from 0) in it; 0 for a whole file.
        reason: Why it is left out.
    """

    source: str
    offset: int
    reason: str
