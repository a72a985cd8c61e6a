"""The events of a journal: one frozen class per kind, which is the schema of its line.

Readers ignore unknown fields and kinds, which a later version may have written: a new one must be one that an older
version can do without. docs/journal.md is generated from this file.
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
    """The last of them."""
    tokens: Whole = 0
    """Supervised tokens that they trained on."""
    rows: Whole = 0
    """Rows that they trained on."""
    digest: Digest = 0
    """Sum of their data digests."""
    origin: str = ""
    """The checkpoint that contains them."""

    def to_json(self) -> dict[str, Any]:
        """Return the object in the journal's ``attempt_started``."""
        return {**asdict(self), "digest": f"{self.digest:016x}"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Event:
    """The fields of every event."""

    time: Seconds
    """When it happened, in seconds since the epoch."""
    attempt: Positive
    """The attempt that recorded it, from 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandEvent(_Event):
    """An event that names the command it belongs to."""

    session: str | None = None
    """Id of the command."""
    command_started: Seconds | None = None
    """When the command started."""
    workers_asked: Seconds | None = None
    """When the command requested its workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseStarted(CommandEvent):
    """An attempt has started a phase before its first step."""

    event: Literal["phase"] = "phase"
    phase: str
    """The phase, in words."""
    part: str | None = None
    """The part of a start or a recovery that its time belongs to: `build` or `load`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStarted(CommandEvent):
    """An attempt has its ranks and its state, and is ready to train."""

    event: Literal["attempt_started"] = "attempt_started"
    world_size: Positive
    """Number of ranks."""
    sp_size: Positive
    """Number of ranks that share a row."""
    dp_size: Positive
    """Number of rows in flight at once."""
    ring_size: Positive = 1
    """Size of the ring within `sp_size`; 1 without one."""
    nodes: tuple[str, ...]
    """Names of the nodes, each once."""
    rank_nodes: tuple[str, ...]
    """The node of each rank."""
    resumed_step: Whole
    """Completed steps of the state that it started from."""
    resumed_from: str | None
    """Its source: the folder of a checkpoint, `peer memory, step N`, or another run's checkpoint; None at step 0."""
    last_step: Whole
    """The step at which it will end."""
    run_last_step: Whole | None = None
    """The step at which the run will end, if a later stage trains it."""
    taken_over: InheritedSteps | None = None
    """The steps before the run's own, from `model.resume_from`."""
    plan_ids: tuple[str, ...]
    """Ids of the segments of its data plan."""
    stage: str | None = None
    """Name of the stage that it trains; None in a run without stages."""
    device_gib: Number | None = None
    """Memory of rank 0's GPU, in GiB; None on a CPU."""
    streams: bool = False
    """Whether Ray Data streams its rows."""
    versions: dict[str, str]
    """Versions of ray-ulysses, Python and libraries; for information only."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the model, the data, the optimizer, the schedule and the stages, by dotted path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamStarted(_Event):
    """Every rank now receives its rows from Ray Data instead of reading them itself."""

    event: Literal["stream_started"] = "stream_started"
    step: Positive
    """The first step whose rows all came through the stream."""
    direct_rows: Whole
    """Rows that the attempt's ranks had read themselves; of a shared row the share of its ranks that did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone(_Event):
    """An optimizer step is completed.

    Its line also has ``tokens_per_s`` and ``world_size``, for information only.
    """

    event: Literal["step"] = "step"
    step: Whole
    """Completed steps, from 1."""
    loss: float
    """Mean loss over its supervised tokens, in nats."""
    tokens: Whole
    """Number of supervised tokens."""
    rows: RowRange
    """The first row that it trained on, and the row after the last."""
    digest: Digest
    """Sum of the digests of the rows that the model received."""
    seconds: Seconds
    """Its duration."""
    saving_seconds: Seconds = 0.0
    """How long checkpoints blocked training since the previous step."""
    learning_rate: Number | None = None
    """Its learning rate."""
    grad_norm: float | None = None
    """Norm of its gradient before clipping."""
    peak_memory_gib: Number | None = None
    """Peak memory of rank 0 so far, in GiB: allocated on a GPU, resident on a CPU."""
    mfu: Number | None = None
    """Share of the peak FLOP/s that was reached; None if the device's peak is unknown."""
    z_loss: float | None = None
    """Mean z-loss over its supervised tokens, times its coefficient. Not part of `loss`."""
    router_loss: float | None = None
    """Mean load-balancing loss over its supervised tokens, times its coefficient. Not part of `loss`."""
    system: dict[str, float] | None = None
    """Load of rank 0's node by metric, for steps that are logged to trackers (`tracking.system_metrics`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated(_Event):
    """The model was evaluated after a step."""

    event: Literal["evaluation"] = "evaluation"
    step: Whole
    """Completed steps."""
    loss: float
    """Mean loss over the supervised tokens of the evaluation, in nats."""
    tokens: Whole
    """Number of these tokens."""
    seconds: Seconds = 0.0
    """Its duration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEvent(_Event):
    """An event that describes a committed checkpoint."""

    step: Whole
    """Completed steps that it holds."""
    path: str
    """Its folder, relative to the root of the checkpoint store."""
    world_size: Positive
    """Number of ranks that wrote it."""
    digest: Digest
    """Sum of the data digests of all steps so far."""
    tokens: Whole
    """Supervised tokens of all steps so far."""
    next_row: Whole
    """The row after the last trained one."""
    reason: str = ""
    """What triggered it: `steps`, `minutes`, `end`, `stage`, `stop`, `request`, `resize`, `preemption` or `retry`."""
    sp_size: Positive = 1
    """Number of ranks that shared a row."""
    ring_size: Positive = 1
    """Size of the ring within `sp_size`."""
    zero_stage: Whole | None = None
    """ZeRO stage of the ranks that wrote it."""
    cursor: dict[str, Any] = field(default_factory=dict)
    """Its position in the data."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Its `loss` and, if it was evaluated, its `eval_loss`."""
    parent: str | None = None
    """The checkpoint that its attempt resumed from."""
    written_at: Seconds = 0.0
    """When the state was copied."""
    stage: str = ""
    """Name of the stage that trained it; empty in a run without stages."""
    measured: str = ""
    """Identity of the data that its metrics were measured on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCommitted(CheckpointEvent):
    """A checkpoint was committed; its sums let a reader check the steps up to it."""

    event: Literal["checkpoint_committed"] = "checkpoint_committed"
    seconds: Seconds | None = None
    """From the request to the commit."""
    stall_seconds: Seconds | None = None
    """How long it blocked training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointsFound(CheckpointEvent):
    """An attempt or a command has found the committed checkpoints of the run; the newest is described.

    The attempt that wrote it may have died before it recorded the commit. Earlier commits are in the journal, which is
    synced before each commit.
    """

    event: Literal["checkpoints_found"] = "checkpoints_found"
    written_by: Positive
    """The attempt that wrote the newest."""
    steps: tuple[Whole, ...]
    """The steps of all committed checkpoints, ascending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDeleted(_Event):
    """Retention has deleted a checkpoint."""

    event: Literal["checkpoint_deleted"] = "checkpoint_deleted"
    step: Whole
    """Its step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSetAside(_Event):
    """A checkpoint was skipped on resume, and is no longer part of the run."""

    event: Literal["checkpoint_set_aside"] = "checkpoint_set_aside"
    step: Whole
    """Its step."""
    reason: str
    """Why it was skipped."""
    kind: str = "damaged"
    """`damaged`, `unreadable`, `superseded` (written too late by an older attempt) or `foreign` (of another
    version)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFailed(_Event):
    """A checkpoint could not be saved."""

    event: Literal["checkpoint_failed"] = "checkpoint_failed"
    step: Whole
    """Its step."""
    reason: str
    """The error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionNoticed(_Event):
    """A node will be preempted."""

    event: Literal["preemption_notice"] = "preemption_notice"
    step: Whole | None = None
    """Completed steps when the notice was read."""
    deadline: Number | None = None
    """When the node will be gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndEvent(CommandEvent):
    """The end of an attempt, a start or a command; the supervisor of a failed attempt fills in all fields."""

    kind: str = ""
    """Kind of failure: `preempted`, `lost` (a process is gone), `device`, `raised`, `consequence` (of another rank's
    end), `start` or `controller`; empty otherwise."""
    reason: str
    """The reason, in one line."""
    rank: Whole | None = None
    """The rank on which the failure started."""
    node: str | None = None
    """The node of that rank."""
    committed_step: Whole | None = None
    """The newest committed step."""
    memory_step: Whole | None = None
    """The newest step whose state was whole in peer memory; None without one."""
    lost_steps: Whole | None = None
    """Steps that were trained beyond the newer of the two."""
    way_out: str = ""
    """What to do about it."""
    failure: Positive | None = None
    """Number of failures so far that count, including this one; None if this one does not count."""
    max_failures: Whole = 0
    """Number of failures that the run survives (`elastic.max_failures`)."""
    restarts: bool | None = None
    """Whether the workers are started again; None if undecided."""


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
    """The step, from 1."""
    rows: RowRange
    """Its first row, and the row after the last."""
    plan_id: str
    """Id of the segment of the data plan that the rows belong to."""
    reason: str
    """What is wrong with the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsSkipped(_Event):
    """The rows of a bad step are left out from now on, by a branch of the plan."""

    event: Literal["rows_skipped"] = "rows_skipped"
    step: Whole
    """Completed steps where the branch begins."""
    rows: RowRange
    """The first skipped row of the plan before the branch, and the row after the last."""
    plan_id: str
    """Id of the branch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerWarned(_Event):
    """A worker has a warning for the user."""

    event: Literal["warning"] = "warning"
    text: str
    """The warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHung(_Event):
    """Ranks made no progress for longer than ``elastic.hang_timeout_s``, and the attempt was ended."""

    event: Literal["hang"] = "hang"
    text: str
    """Which ranks, where, and for how long."""
    stacks: dict[str, str]
    """Stacks of every rank's threads before the end and the end of its stderr, by rank; empty if unavailable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnded(EndEvent):
    """An attempt has ended; the last such record of an attempt counts.

    ``reason`` begins with ``stopped``, ``finished``, ``resized`` or ``stage`` if that was intended.
    """

    event: Literal["attempt_ended"] = "attempt_ended"
    saving_seconds: Seconds = 0.0
    """How long checkpoints blocked training since the last step."""
    fault_at: Seconds | None = None
    """When the failure happened, or the last sign of life before it; None if unknown."""
    detected_at: Seconds | None = None
    """When the failure was noticed; None means at the time of this record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinished(_Event):
    """The run has trained its last step."""

    event: Literal["run_finished"] = "run_finished"
    step: Whole
    """That step."""


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
