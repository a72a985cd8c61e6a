"""The events of a journal: one frozen class per kind, which is the schema of its line.

Readers ignore unknown fields and kinds, which a later version may have written: a new one must be one that an older
version can do without. docs/journal.md describes every kind and field, and a test compares the two.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from ray_ulysses.validation import Digest, Number, Positive, Seconds, Whole


def _ascending(rows: tuple[int, int]) -> tuple[int, int]:
    if rows[0] > rows[1]:
        raise ValueError("must end at or after its beginning")
    return rows


RESIZED = "resized"
"""Reason of an attempt that ended so that its command can continue with another number of workers."""
STAGE = "stage"
"""Reason of an attempt that ended with its stage, so that its command continues with the next one."""
STOP_REASONS = ("stopped", "finished", RESIZED, STAGE)
"""First words of the reasons of an attempt that ended because it was meant to."""
CONTINUED = (RESIZED, STAGE)
"""Those of them after which the command begins another attempt."""

RowRange = Annotated[tuple[Whole, Whole], AfterValidator(_ascending)]
"""The first row and the row after the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InheritedSteps:
    """The steps before a run's own, trained by the run whose checkpoint it continues; none by default."""

    step: Whole = 0
    tokens: Whole = 0
    rows: Whole = 0
    digest: Digest = 0
    origin: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the object in the journal's ``attempt_started``."""
        return {**asdict(self), "digest": f"{self.digest:016x}"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Event:
    """The fields of every event."""

    time: Seconds
    attempt: Positive


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandEvent(_Event):
    """An event that names the command it belongs to."""

    session: str | None = None
    command_started: Seconds | None = None
    workers_asked: Seconds | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseStarted(CommandEvent):
    """An attempt has started a phase before its first step."""

    event: Literal["phase"] = "phase"
    phase: str
    part: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStarted(CommandEvent):
    """An attempt has its ranks and its state, and is ready to train."""

    event: Literal["attempt_started"] = "attempt_started"
    world_size: Positive
    sp_size: Positive
    dp_size: Positive
    ring_size: Positive = 1
    nodes: tuple[str, ...]
    rank_nodes: tuple[str, ...]
    resumed_step: Whole
    resumed_from: str | None
    last_step: Whole
    run_last_step: Whole | None = None
    taken_over: InheritedSteps | None = None
    plan_ids: tuple[str, ...]
    stage: str | None = None
    device_gib: Number | None = None
    streams: bool = False
    versions: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamStarted(_Event):
    """Every rank receives its rows from its stream, instead of reading them itself."""

    event: Literal["stream_started"] = "stream_started"
    step: Positive
    direct_rows: Whole


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone(_Event):
    """An optimizer step is completed."""

    event: Literal["step"] = "step"
    step: Whole
    loss: float
    tokens: Whole
    rows: RowRange
    digest: Digest
    seconds: Seconds
    saving_seconds: Seconds = 0.0
    learning_rate: Number | None = None
    grad_norm: float | None = None
    peak_memory_gib: Number | None = None
    mfu: Number | None = None
    z_loss: float | None = None
    router_loss: float | None = None
    system: dict[str, float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated(_Event):
    """The model was evaluated after a step."""

    event: Literal["evaluation"] = "evaluation"
    step: Whole
    loss: float
    tokens: Whole
    seconds: Seconds = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEvent(_Event):
    """An event that describes a committed checkpoint."""

    step: Whole
    path: str
    world_size: Positive
    digest: Digest
    tokens: Whole
    next_row: Whole
    reason: str = ""
    sp_size: Positive = 1
    ring_size: Positive = 1
    zero_stage: Whole | None = None
    cursor: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    parent: str | None = None
    written_at: Seconds = 0.0
    stage: str = ""
    measured: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCommitted(CheckpointEvent):
    """A checkpoint was committed; its sums let a reader check the steps up to it."""

    event: Literal["checkpoint_committed"] = "checkpoint_committed"
    seconds: Seconds | None = None
    stall_seconds: Seconds | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointsFound(CheckpointEvent):
    """An attempt has found committed checkpoints of the run as it starts; the newest is described.

    Its own attempt may have died before it recorded the commit. The commits of those before it are in the journal,
    which is synced before each commit.
    """

    event: Literal["checkpoints_found"] = "checkpoints_found"
    written_by: Positive
    steps: tuple[Whole, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDeleted(_Event):
    """Retention has deleted a checkpoint."""

    event: Literal["checkpoint_deleted"] = "checkpoint_deleted"
    step: Whole


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSetAside(_Event):
    """A checkpoint was skipped on resume, and is no longer part of the run."""

    event: Literal["checkpoint_set_aside"] = "checkpoint_set_aside"
    step: Whole
    reason: str
    kind: str = "damaged"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFailed(_Event):
    """A checkpoint could not be saved."""

    event: Literal["checkpoint_failed"] = "checkpoint_failed"
    step: Whole
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionNoticed(_Event):
    """A node will be preempted."""

    event: Literal["preemption_notice"] = "preemption_notice"
    step: Whole | None = None
    deadline: Number | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EndEvent(CommandEvent):
    """The end of an attempt, a start or a command; the supervisor of a failed attempt fills in all fields."""

    kind: str = ""
    reason: str
    rank: Whole | None = None
    node: str | None = None
    committed_step: Whole | None = None
    memory_step: Whole | None = None
    lost_steps: Whole | None = None
    way_out: str = ""
    failure: Positive | None = None
    max_failures: Whole = 0
    restarts: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StartFailed(EndEvent):
    """A command could not start its workers; recorded beside the newest attempt, perhaps of an earlier command."""

    event: Literal["start_failed"] = "start_failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailed(EndEvent):
    """A failure has ended a command; recorded beside the newest attempt."""

    event: Literal["run_failed"] = "run_failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class BadStep(_Event):
    """A step whose loss or gradient is not finite, or whose loss spikes, has ended the attempt."""

    event: Literal["bad_step"] = "bad_step"
    step: Positive
    rows: RowRange
    plan_id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsSkipped(_Event):
    """The rows of a bad step are left out from now on, by a branch of the plan."""

    event: Literal["rows_skipped"] = "rows_skipped"
    step: Whole
    rows: RowRange
    plan_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerWarned(_Event):
    """A worker has warned of something that the user should know, in its text."""

    event: Literal["warning"] = "warning"
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHung(_Event):
    """Ranks of an attempt made no progress for too long."""

    event: Literal["hang"] = "hang"
    text: str
    stacks: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnded(EndEvent):
    """An attempt has ended; the first word of the reason is one of `STOP_REASONS` if that was intended."""

    event: Literal["attempt_ended"] = "attempt_ended"
    saving_seconds: Seconds = 0.0
    fault_at: Seconds | None = None
    detected_at: Seconds | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinished(_Event):
    """The run has trained its last step, ``step``."""

    event: Literal["run_finished"] = "run_finished"
    step: Whole


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandEnded(CommandEvent):
    """A command has ended."""

    event: Literal["command_ended"] = "command_ended"


Event = (
    PhaseStarted
    | AttemptStarted
    | StreamStarted
    | StepDone
    | Evaluated
    | CheckpointCommitted
    | CheckpointsFound
    | CheckpointDeleted
    | CheckpointSetAside
    | CheckpointFailed
    | PreemptionNoticed
    | BadStep
    | RowsSkipped
    | WorkerWarned
    | RunHung
    | AttemptEnded
    | StartFailed
    | RunFinished
    | RunFailed
    | CommandEnded
)


@functools.cache
def event_adapter() -> TypeAdapter[Event]:
    """Return the validator of events, which takes milliseconds to build."""
    return TypeAdapter(Annotated[Event, Field(discriminator="event")])
