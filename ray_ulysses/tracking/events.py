"""The events of a journal: a frozen class for each kind, which is the schema of its line.

Fields that a class does not know are passed over, and so is a whole event of an unknown kind: a later version may have
written it. A field or kind that is added must therefore be one that an older version can do without.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from ray_ulysses.validation import Digest, Number, Positive, Seconds, Whole, read_json


def _ascending(rows: tuple[int, int]) -> tuple[int, int]:
    if rows[0] > rows[1]:
        raise ValueError("must end at or after its beginning")
    return rows


STOP_REASONS = ("stopped", "finished", "resized")
"""First words of the reasons of an attempt that ended because it was meant to."""

RowRange = Annotated[tuple[Whole, Whole], AfterValidator(_ascending)]
"""The first row and the row after the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenOver:
    """The steps before a run's own, trained by the run whose checkpoint it went on from; nothing by default.

    Attributes:
        step: The last of them.
        tokens: Supervised tokens that they trained on.
        rows: Rows that they trained on.
        digest: Sum of their data digests, modulo 2**64.
        origin: The checkpoint that vouches for them.
    """

    step: Whole = 0
    tokens: Whole = 0
    rows: Whole = 0
    digest: Digest = 0
    origin: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return what the journal's ``attempt_started`` holds."""
        return {**asdict(self), "digest": f"{self.digest:016x}"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Event:
    """What every event has.

    Attributes:
        time: When it happened, seconds since the epoch.
        attempt: The attempt that tells it.
    """

    time: Seconds
    attempt: Positive


@dataclass(frozen=True, kw_only=True, slots=True)
class OfCommand(_Event):
    """What an event has that says which command it is of.

    Attributes:
        session: The command's name.
        command_started: When it began, in seconds since the epoch; None where that is not known.
        workers_asked: When it asked for its workers.
    """

    session: str | None = None
    command_started: Seconds | None = None
    workers_asked: Seconds | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseBegun(OfCommand):
    """An attempt does something before its first step.

    Attributes:
        phase: What it does.
    """

    event: Literal["phase"] = "phase"
    phase: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStarted(OfCommand):
    """An attempt has its ranks and its state.

    Attributes:
        world_size: Ranks.
        sp_size: Ranks that share a row.
        dp_size: Rows in flight at once.
        ring_size: Ring part of ``sp_size``.
        nodes: Their nodes.
        rank_nodes: Each rank's node, by rank; empty in the journal of a version that did not note them.
        resumed_step: Completed steps of the state that it started from.
        resumed_from: Where that state came from; None where the run began.
        last_step: Step at which it will end.
        taken_over: What the run has taken over from another one, if anything.
        plan_ids: The segments of its data plan; None in the journal of a version that did not note them.
    """

    event: Literal["attempt_started"] = "attempt_started"
    world_size: Positive
    sp_size: Positive
    dp_size: Positive
    ring_size: Positive = 1
    nodes: tuple[str, ...]
    rank_nodes: tuple[str, ...] = ()
    resumed_step: Whole
    resumed_from: str | None
    last_step: Whole | None = None
    taken_over: TakenOver | None = None
    plan_ids: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone(_Event):
    """An optimizer step is completed.

    Attributes:
        step: Completed steps, from 1.
        loss: Mean loss over its supervised tokens, in nats; may be infinite or not a number.
        tokens: Supervised tokens.
        rows: Global rows.
        digest: Sum of the digests of the rows that the model received.
        seconds: Its duration.
        saving_seconds: How long training stood still for checkpoints since the step before.
        learning_rate: Its rate; None in the journal of a version that did not note it.
        grad_norm: Norm of its gradient before clipping; None as above; may be infinite or not a number.
        peak_memory_gib: Largest peak over the ranks, in GiB.
        mfu: Share of the peak FLOP/s; None where that is not known.
    """

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated(_Event):
    """The model was evaluated after a step.

    Attributes:
        step: Completed steps.
        loss: Mean loss over the evaluation's tokens, in nats.
        tokens: Its tokens.
        seconds: Its duration.
    """

    event: Literal["evaluation"] = "evaluation"
    step: Whole
    loss: float
    tokens: Whole
    seconds: Seconds = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCommitted(_Event):
    """A checkpoint was committed.

    The sums let a reader make good a step whose record is damaged.

    Attributes:
        step: Completed steps that it holds.
        path: Its folder.
        world_size: Ranks that wrote it.
        digest: Sum of the data digests of all steps so far; None in the journal of a version that did not note it, as
            are the next two.
        tokens: Supervised tokens of all steps so far.
        next_row: The row after the last one that was trained.
        reason: What triggered it.
        seconds: From the request to the commit.
        stall_seconds: How long training stood still for it.
    """

    event: Literal["checkpoint_committed"] = "checkpoint_committed"
    step: Whole
    path: str
    world_size: Positive
    digest: Digest | None = None
    tokens: Whole | None = None
    next_row: Whole | None = None
    reason: str = ""
    seconds: Seconds | None = None
    stall_seconds: Seconds | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSetAside(_Event):
    """A checkpoint was passed over, and is not part of the run from now on.

    Attributes:
        step: Its step.
        reason: Why.
    """

    event: Literal["checkpoint_set_aside"] = "checkpoint_set_aside"
    step: Whole
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFailed(_Event):
    """A save came to nothing.

    Attributes:
        step: Its step.
        reason: Why.
    """

    event: Literal["checkpoint_failed"] = "checkpoint_failed"
    step: Whole
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionNoticed(_Event):
    """A node will be taken away.

    Attributes:
        step: Completed steps when it was noticed; None where that is not known.
        deadline: When, in seconds since the epoch; None where that is not known.
    """

    event: Literal["preemption_notice"] = "preemption_notice"
    step: Whole | None = None
    deadline: Number | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EndEvent(OfCommand):
    """What an event has that tells of an end; all but the reason where that was a failure which somebody judged.

    Attributes:
        kind: Which kind of failure it was; see `elastic.causes`.
        reason: Why, in one line.
        rank: The rank that it began on; None where it was none's, or is not known.
        node: That rank's node.
        committed_step: The newest committed step.
        lost_steps: Steps that were trained beyond it.
        hint: What a person can do.
        failure: How many failures count, with this one; None for one that is not counted.
        max_failures: How many the run survives.
        restarts: Whether the workers are started again; None where nobody judged.
    """

    kind: str = ""
    reason: str
    rank: Whole | None = None
    node: str | None = None
    committed_step: Whole | None = None
    lost_steps: Whole | None = None
    hint: str = ""
    failure: Positive | None = None
    max_failures: Whole = 0
    restarts: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StartFailed(EndEvent):
    """A command could not start its workers; told beside the newest attempt, which may be of an earlier command."""

    event: Literal["start_failed"] = "start_failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailed(EndEvent):
    """A failure has ended a command; told beside the newest attempt."""

    event: Literal["run_failed"] = "run_failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerWarned(_Event):
    """A worker has warned of something that a person should know.

    Attributes:
        text: The warning.
    """

    event: Literal["warning"] = "warning"
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnded(EndEvent):
    """An attempt has ended; the first word of the reason is one of `STOP_REASONS` if that was meant.

    Attributes:
        saving_seconds: How long training stood still for checkpoints since the last step.
    """

    event: Literal["attempt_ended"] = "attempt_ended"
    saving_seconds: Seconds = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinished(_Event):
    """The run has trained its last step.

    Attributes:
        step: That step.
    """

    event: Literal["run_finished"] = "run_finished"
    step: Whole


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandEnded(OfCommand):
    """A command is at its end."""

    event: Literal["command_ended"] = "command_ended"


Event = (
    PhaseBegun
    | AttemptStarted
    | StepDone
    | Evaluated
    | CheckpointCommitted
    | CheckpointSetAside
    | CheckpointFailed
    | PreemptionNoticed
    | WorkerWarned
    | AttemptEnded
    | StartFailed
    | RunFinished
    | RunFailed
    | CommandEnded
)


@functools.cache
def event_adapter() -> TypeAdapter[Event]:
    """Return what validates an event; made when it is first needed, which takes milliseconds."""
    return TypeAdapter(Annotated[Event, Field(discriminator="event")])


def encode_event(fields: Mapping[str, Any]) -> bytes:
    """Return an event as a JSON object; numbers that JSON has none for become their names ("nan", "inf")."""
    return json.dumps(_writable(fields), allow_nan=False).encode()


def event_of(fields: Mapping[str, Any]) -> Event:
    """Return the event that some fields are once they are written.

    Raises:
        ContentError: A field is missing or wrong.
    """
    return read_json(event_adapter(), encode_event(fields))


def _writable(value: Any) -> Any:
    """Return a value as JSON can hold it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        # Halves of characters, as undecodable file names in the texts of errors have, are no text to a reader.
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {key: _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    return value
