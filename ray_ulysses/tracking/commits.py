"""What a tracker is told of checkpoints, and which of them it must still be told of (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

CheckpointState = Literal["committed", "superseded", "deleted", "damaged"]
"""What became of a checkpoint: it is there, its step was committed again by a later attempt, retention deleted it, or
it was set aside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedCheckpoint:
    """A checkpoint whose manifest is there.

    Attributes:
        step: Completed steps that it holds.
        attempt: The attempt that wrote it; None in what a version before attempts were tracked has spooled.
        path: Its folder, as anybody can find it: an absolute path, or a URI.
        store: Root of the store that it lies in, a path or a URI; a checkpoint is loaded from there by its step.
        topology: World size, and how it was laid out.
        cursor: Where the data stand.
        metrics: Its numbers by name, such as ``loss``.
        digest: Sum of the data digests of all its steps, 16 hexadecimal digits.
        tokens: Supervised tokens that it was trained on.
        reason: What triggered it.
        plan_id: The newest segment of the plan that it was trained by.
        zero_stage: ZeRO stage of the ranks that wrote it.
        parent: The checkpoint that its attempt went on from; empty where there was none.
        written_at: When, in seconds since the epoch; 0 where that is not known.
    """

    step: int
    attempt: int | None
    path: str
    store: str
    topology: Mapping[str, Any]
    cursor: Mapping[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)
    digest: str = ""
    tokens: int = 0
    reason: str = ""
    plan_id: str = ""
    zero_stage: int | None = None
    parent: str = ""
    written_at: float = 0.0

    def to_event(self) -> dict[str, Any]:
        """Return what is spooled."""
        metrics = {name: float(value) for name, value in self.metrics.items()}
        return {"kind": "checkpoint", **asdict(self), "metrics": metrics}

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> CommittedCheckpoint:
        """Read back what was spooled, also by a version that knew fewer fields."""
        known = {name: event[name] for name in cls.__dataclass_fields__ if name in event}
        return cls(**{"attempt": None, "store": store_of(str(event["path"])), **known})


@dataclass(frozen=True, kw_only=True, slots=True)
class GoneCheckpoint:
    """A checkpoint that was committed and is not to be used any more.

    Attributes:
        step: Its step.
        attempt: The attempt that wrote it; None if it is not known.
        state: Whether retention deleted it, it was set aside as damaged, or an attempt went on from one before it.
        reason: Why.
    """

    step: int
    attempt: int | None
    state: Literal["deleted", "damaged", "superseded"]
    reason: str = ""

    def to_event(self) -> dict[str, Any]:
        """Return what is spooled."""
        return {"kind": "checkpoint_gone", **asdict(self)}

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> GoneCheckpoint:
        """Read back what was spooled."""
        return cls(**{name: event[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInventory:
    """All checkpoints that are committed in a store at the start of an attempt.

    It makes good what a death between a commit or a deletion and the note of it has lost.

    Attributes:
        attempt: The attempt that starts; what it commits itself later is not its business.
        store: The store.
        checkpoints: What is committed there.
        unread: Steps that are committed there too, of which no more can be said now.
    """

    attempt: int
    store: str
    checkpoints: tuple[CommittedCheckpoint, ...]
    unread: tuple[int, ...] = ()

    def to_event(self) -> dict[str, Any]:
        """Return what is spooled."""
        return {
            "kind": "checkpoint_inventory",
            "attempt": self.attempt,
            "store": self.store,
            "checkpoints": [asdict(checkpoint) for checkpoint in self.checkpoints],
            "unread": list(self.unread),
        }

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> CheckpointInventory:
        """Read back what was spooled."""
        checkpoints = tuple(CommittedCheckpoint.from_event(fields) for fields in event["checkpoints"])
        unread = tuple(event.get("unread", ()))
        return cls(attempt=event["attempt"], store=event["store"], checkpoints=checkpoints, unread=unread)


CheckpointNews = CommittedCheckpoint | GoneCheckpoint | CheckpointInventory


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedCheckpoint:
    """A checkpoint as the tracker has it; what loads it takes `store` and `step`.

    Attributes:
        model_id: The tracker's id of it.
        run_id: The tracker's id of its run.
        is_complete: Whether everything about it was recorded.
        step: Completed steps that it holds.
        attempt: The attempt that wrote it; None in the records of a version that did not say.
        state: What became of it.
        path: Its folder, a path or a URI.
        store: Root of its store, a path or a URI.
        topology: World size, and how it was laid out.
        cursor: Where the data stood.
        digest: Sum of the data digests of all its steps, 16 hexadecimal digits; empty where it is not known.
        metrics: Its numbers by name, such as ``loss``.
    """

    model_id: str
    run_id: str
    is_complete: bool
    step: int
    attempt: int | None
    state: CheckpointState
    path: str
    store: str
    topology: Mapping[str, Any]
    cursor: Mapping[str, Any]
    digest: str
    metrics: Mapping[str, float]

    def is_of(self, step: int, attempt: int | None) -> bool:
        """Return whether it is this step of this attempt; an attempt that is not known is any."""
        return self.step == step and (self.attempt is None or attempt is None or self.attempt == attempt)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconciliation:
    """What the tracker must be told so that it shows what there is.

    Attributes:
        missing: Committed ones that it does not have, or has in part.
        vanished: Ones that it shows as committed and that are gone.
    """

    missing: tuple[CommittedCheckpoint, ...]
    vanished: tuple[TrackedCheckpoint, ...]


def reconcile(inventory: CheckpointInventory, tracked: Sequence[TrackedCheckpoint]) -> Reconciliation:
    """Return what differs between what is committed and what the tracker has (pure).

    What the attempt of the inventory, or a later one, has committed since then is left alone: an inventory may be
    delivered late, and more than once.

    Args:
        inventory: What was committed when an attempt started.
        tracked: Everything that the tracker has of the run.
    """
    committed = inventory.checkpoints
    there = {checkpoint.step for checkpoint in committed} | set(inventory.unread)
    complete = [one for one in tracked if one.is_complete]
    missing = [
        checkpoint
        for checkpoint in committed
        if not any(one.is_of(checkpoint.step, checkpoint.attempt) and one.attempt is not None for one in complete)
    ]
    vanished = [
        one
        for one in complete
        if one.state == "committed"
        and one.store == inventory.store
        and (one.attempt is None or one.attempt < inventory.attempt)
        # One whose step was committed again is superseded, which is said with the new one.
        and one.step not in there
    ]
    return Reconciliation(missing=tuple(missing), vanished=tuple(vanished))


def store_of(path: str) -> str:
    """Return the root of the store of a checkpoint's folder, ``<root>/checkpoints/step-00000200``."""
    return path.rpartition("/checkpoints/")[0] or path
