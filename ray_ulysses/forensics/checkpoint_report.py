"""What is told of a run's checkpoints, as values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

CheckpointCondition = Literal[
    "whole", "damaged", "unreadable", "superseded", "foreign", "set_aside", "being_written", "not_committed"
]
"""``whole`` and ``damaged`` go by the files' sizes; ``unreadable`` is what the storage does not give now;
``superseded`` is what a dead attempt committed after its successor had started before that step; ``set_aside`` was
found damaged and taken out of the way; the last two have no manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetAside:
    """A checkpoint of a step that was found damaged and taken out of the way.

    Attributes:
        attempt: The attempt that did.
        reason: Why.
        at: When, in seconds since the epoch; None where the journal does not say.
    """

    attempt: int
    reason: str
    at: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReport:
    """One checkpoint directory; what is not known is None or empty.

    Attributes:
        step: Completed steps.
        path: The directory's key in its store.
        committed: Whether its manifest is there.
        condition: What state it is in.
        why: Why it can't be used.
        attempt: The attempt that wrote it.
        world_size: Ranks that wrote it.
        sp_size: Ranks that shared a row.
        ring_size: Ring part of `sp_size`.
        dp_size: Rows in flight at once.
        zero_stage: ZeRO stage.
        num_bytes: Size of what the manifest names, and of the manifest; without one, of all files.
        leftover_bytes: Size of the files beside those: what dead attempts have left, and notes.
        written_at: When its state was taken, in seconds since the epoch.
        reason: What made it be saved.
        metrics: Its numbers.
        kept: The rules that keep it.
        set_aside: What was there before and was taken out of the way, oldest first.
        is_swept: Whether it has shards that no manifest names, which a later commit deletes; only said of a directory
            that is not committed.
    """

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
    leftover_bytes: int = 0
    written_at: float | None = None
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    set_aside: tuple[SetAside, ...] = ()
    is_swept: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointListing:
    """All checkpoint directories of a run.

    Attributes:
        name: The run's name.
        location: Root of the store that they lie in, a path or a URI.
        checkpoints: One a directory, by step.
        resumes_from: Step of the one that the next attempt starts from, as far as sizes tell; None for none.
        unless: Newer steps that the storage does not give now: the newest that it gives by then is taken instead.
        refusal: Why the next attempt would refuse to start; None if it would not.
    """

    name: str
    location: str
    checkpoints: tuple[CheckpointReport, ...]
    resumes_from: int | None
    unless: tuple[int, ...] = ()
    refusal: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``inspect RUN --checkpoints --json`` prints."""
        return _to_json(asdict(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class FileVerdict:
    """One file of a checkpoint, read from front to back.

    Attributes:
        file: Its key, relative to the checkpoint's directory.
        num_bytes: Its size, as the manifest says.
        num_tensors: How many tensors it holds a part of.
        problem: What is wrong with it, with the tensor and the bytes; None if it is what was written.
        is_unread: Whether that is only that the storage does not give it now.
    """

    file: str
    num_bytes: int
    num_tensors: int
    problem: str | None
    is_unread: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointVerdict:
    """A checkpoint of which every byte was read.

    Attributes:
        name: The run's name.
        location: Root of its store, a path or a URI.
        step: Its step.
        path: Its directory's key in the store.
        problem: What is wrong with it as a whole: its manifest, the cover of its tensors, or that it is not part of the
            run; None for nothing.
        kind: What kind of problem that is.
        attempt: The attempt that wrote it; None if the manifest can't be read, as the rest.
        world_size: Ranks that wrote it.
        num_tensors: Tensors of its state.
        num_elements: Elements of its state, each of which is stored exactly once.
        files: Its files, in the order of the ranks.
        seconds: How long the reading took.
    """

    name: str
    location: str
    step: int
    path: str
    problem: str | None
    kind: Literal["damaged", "unreadable", "superseded", "foreign"] = "damaged"
    attempt: int | None = None
    world_size: int | None = None
    num_tensors: int = 0
    num_elements: int = 0
    files: tuple[FileVerdict, ...] = ()
    seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether it can be loaded."""
        return self.problem is None and all(file.problem is None for file in self.files)

    @property
    def condition(self) -> CheckpointCondition:
        """What state it is in; only what was read and is not what was written is ``damaged``."""
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
    """Return a JSON object; JSON has no number for what is not finite, so it becomes its name."""
    text = json.dumps(fields)
    constants: dict[str, Any] = json.loads(text, parse_constant=str)
    return constants
