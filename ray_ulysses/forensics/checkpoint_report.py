"""The results of listing a run's checkpoints and of verifying one, as plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

CheckpointCondition = Literal[
    "whole", "damaged", "unreadable", "superseded", "foreign", "set_aside", "being_written", "not_committed"
]
"""``whole`` and ``damaged`` are judged by the files' sizes; ``unreadable`` can't be read now; ``superseded`` was
committed by a dead attempt after its successor had resumed before that step; ``foreign`` was written by another
version; ``set_aside`` was found damaged and moved out of the way; the last two have no manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetAside:
    """A checkpoint of a step that was found damaged and moved out of the way."""

    attempt: int
    reason: str
    at: float | None
    """When, in seconds since the epoch; None if it is not in the journal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReport:
    """One checkpoint folder; unknown values are None or empty."""

    step: int
    path: str
    committed: bool
    condition: CheckpointCondition
    why: str | None = None
    attempt: int | None = None
    world_size: int | None = None
    sp_size: int | None = None
    ring_size: int | None = None
    dp_size: int | None = None
    zero_stage: int | None = None
    num_bytes: int = 0
    """Size of the manifest and the files that it names; without a manifest, of all files."""
    leftover_bytes: int = 0
    """Size of the other files: leftovers of dead attempts, and notes."""
    written_at: float | None = None
    """When its state was captured, in seconds since the epoch."""
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    stage: str = ""
    measured: str = ""
    """Identity of what its metrics were measured on: those of equal ones compare."""
    plan_id: str = ""
    kept: tuple[str, ...] = ()
    """The retention rules that keep it."""
    set_aside: tuple[SetAside, ...] = ()
    is_swept: bool = False
    """Whether a later commit deletes its shards, which no manifest names; only for an uncommitted folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointListing:
    """All checkpoint folders of a run."""

    name: str
    location: str
    checkpoints: tuple[CheckpointReport, ...]
    resumes_from: int | None
    """Step that the next attempt resumes from, judged by the files' sizes; None for none."""
    unless: tuple[int, ...] = ()
    """Newer steps that can't be read now; the next attempt uses the newest that is readable by then."""
    refusal: str | None = None
    """Why the next attempt would refuse to start; None if it would not."""

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``inspect RUN --checkpoints --json`` prints."""
        return _to_json(asdict(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class FileVerdict:
    """The verification of one file of a checkpoint."""

    file: str
    num_bytes: int
    num_tensors: int
    problem: str | None
    """The damage, with the tensor and the bytes; None if it is intact."""
    is_unread: bool = False
    """Whether the only problem is that it can't be read now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointVerdict:
    """The verification of a checkpoint, of which every byte was read."""

    name: str
    location: str
    step: int
    path: str
    problem: str | None
    """The problem of the whole checkpoint (its manifest, the coverage of its tensors, or that it is not part of the
    run); None for none."""
    kind: Literal["damaged", "unreadable", "superseded", "foreign"] = "damaged"
    attempt: int | None = None
    """The attempt that wrote it; None, like the following, if the manifest can't be read."""
    world_size: int | None = None
    num_tensors: int = 0
    num_elements: int = 0
    """Elements of its state, each of which is stored exactly once."""
    files: tuple[FileVerdict, ...] = ()
    seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        """True if it can be loaded."""
        return self.problem is None and all(file.problem is None for file in self.files)

    @property
    def condition(self) -> CheckpointCondition:
        """Its condition; only bytes that were read and differ from what was written make it ``damaged``."""
        bad = [file for file in self.files if file.problem is not None]
        if any(not file.is_unread for file in bad):
            return "damaged"
        if bad:
            return "unreadable"
        return "whole" if self.problem is None else self.kind

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``inspect RUN --verify-checkpoint STEP --json`` prints."""
        fields = asdict(self)
        del fields["kind"]
        return {"whole": self.is_whole, "condition": self.condition, **_to_json(fields)}


def _to_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object, in which numbers that are not finite become their names."""
    text = json.dumps(fields)
    constants: dict[str, Any] = json.loads(text, parse_constant=str)
    return constants
