"""The schema of the journal: one frozen class per event kind.

Readers ignore unknown fields and event kinds. Add only fields and kinds that an older version can safely ignore.
docs/journal.md is generated from this file.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from ray_ulysses.validation import Digest, Number, Positive, Seconds, Whole


def _ascending(rows: tuple[int, int]) -> tuple[int, int]:
    if rows[0] > rows[1]:
        raise ValueError("must not end before it begins")
    return rows


RESIZED = "resized"
"""End reason of an attempt whose command continues with a different number of workers."""
STAGE = "stage"
"""End reason of an attempt that completed its stage and whose command continues with the next stage."""
STOP_REASONS = ("stopped", "finished", RESIZED, STAGE)
"""Prefixes of the end reasons of attempts that ended as intended."""
CONTINUED = (RESIZED, STAGE)
"""End reasons after which the same command starts another attempt."""

RowRange = Annotated[tuple[Whole, Whole], AfterValidator(_ascending)]
"""Half-open range of data rows: the first row, and the row after the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InheritedSteps:
    """Totals of the steps that a run inherits from another run's checkpoint (`model.resume_from`)."""

    step: Whole = 0
    """The last inherited step."""
    tokens: Whole = 0
    """Supervised tokens in the inherited steps."""
    rows: Whole = 0
    """Data rows in the inherited steps."""
    digest: Digest = 0
    """Sum of the data digests of the inherited steps."""
    origin: str = ""
    """The checkpoint that the run continues from."""

    def to_json(self) -> dict[str, Any]:
        """Return the ``taken_over`` object of an ``attempt_started`` event."""
        return {**asdict(self), "digest": f"{self.digest:016x}"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Event:
    """Fields common to all events."""

    time: Seconds
    """Time of the event, in seconds since the epoch."""
    attempt: Positive
    """Number of the attempt that the event belongs to, starting at 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandEvent(_Event):
    """An event that records which command it belongs to."""

    session: str | None = None
    """Id of the command."""
    command_started: Seconds | None = None
    """Time at which the command started."""
    workers_asked: Seconds | None = None
    """Time at which the command requested its workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseStarted(CommandEvent):
    """An attempt entered a new phase of its start, before its first step."""

    event: Literal["phase"] = "phase"
    phase: str
    """Description of the phase."""
    part: str | None = None
    """Category to which the phase's time is assigned: `build` or `load`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStarted(CommandEvent):
    """All ranks of an attempt have started and loaded the training state."""

    event: Literal["attempt_started"] = "attempt_started"
    world_size: Positive
    """Number of ranks."""
    sp_size: Positive
    """Sequence-parallel size: number of ranks that share a row."""
    dp_size: Positive
    """Data-parallel size: number of rows that are trained in parallel."""
    ring_size: Positive = 1
    """Size of the ring within `sp_size`; 1 if ring attention is not used."""
    nodes: tuple[str, ...]
    """Names of the nodes, without duplicates."""
    rank_nodes: tuple[str, ...]
    """Name of each rank's node."""
    resumed_step: Whole
    """Number of completed steps in the state that the attempt resumed from."""
    resumed_from: str | None
    """The loaded state: a checkpoint folder, `peer memory, step N`, or another run's checkpoint; None at step 0."""
    last_step: Whole
    """The step at which the attempt will end."""
    run_last_step: Whole | None = None
    """The step at which the run will end, if a later stage trains that step."""
    taken_over: InheritedSteps | None = None
    """Totals of the steps that the run inherits through `model.resume_from`."""
    plan_ids: tuple[str, ...]
    """Ids of the data plan's segments."""
    stage: str | None = None
    """Name of the stage that the attempt trains; None in a run without stages."""
    device_gib: Number | None = None
    """Memory of rank 0's GPU, in GiB; None on a CPU."""
    streams: bool = False
    """Whether Ray Data streams the rows to the ranks."""
    versions: dict[str, str]
    """Versions of ray-ulysses, Python and the libraries. Informational."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The seed and the settings of the model, data, optimizer, schedule and stages, by dotted path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamStarted(_Event):
    """All ranks switched from reading rows directly to receiving them from Ray Data."""

    event: Literal["stream_started"] = "stream_started"
    step: Positive
    """The first step whose rows all came from Ray Data."""
    direct_rows: Whole
    """Number of rows read directly before `step`. A row that only some of its ranks read directly counts in part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone(_Event):
    """An optimizer step completed.

    The journal line contains two further informational fields, ``tokens_per_s`` and ``world_size``.
    """

    event: Literal["step"] = "step"
    step: Whole
    """Number of completed steps, including this step."""
    loss: float
    """Mean loss over the step's supervised tokens, pairs of answers or documents, in nats."""
    tokens: Whole
    """Number of supervised tokens; for a masked language model, of all document tokens but the first."""
    rows: RowRange
    """The first row of the step, and the row after the last."""
    digest: Digest
    """Sum of the digests of the rows that the model received."""
    seconds: Seconds
    """Duration of the step."""
    saving_seconds: Seconds = 0.0
    """Time for which checkpoints blocked training since the previous step."""
    learning_rate: Number | None = None
    """Learning rate of the step."""
    grad_norm: float | None = None
    """Gradient norm before clipping."""
    peak_memory_gib: Number | None = None
    """Peak memory of rank 0 since the attempt started, in GiB: allocated on a GPU, resident on a CPU."""
    mfu: Number | None = None
    """Model FLOPs utilization, from 0 to 1; None if the device's peak FLOP/s is unknown."""
    z_loss: float | None = None
    """Mean z-loss over the supervised tokens, times its coefficient. Not included in `loss`."""
    router_loss: float | None = None
    """Mean load-balancing loss over the supervised tokens, times its coefficient. Not included in `loss`."""
    pair_accuracy: float | None = None
    """Fraction of the step's pairs whose chosen answer has the larger reward; None without pairs. For `kto`, fraction
    of answers whose reward is above beta times the KL divergence if they are desirable, and not above it otherwise."""
    pair_margin: float | None = None
    """Mean reward of the chosen answers minus that of the rejected ones; for `kto`, of desirable and other ones."""
    chosen_reward: float | None = None
    """Mean reward of the chosen or desirable answers."""
    pair_kl: float | None = None
    """Mean over the step's answers of the log-probability minus that of the reference model, in nats; None without a
    reference model. For `kto`, the mean over the step's answers of the KL divergence of their rows."""
    accuracy: float | None = None
    """Fraction of the step's documents whose class is predicted; None without classes."""
    router_imbalance: float | None = None
    """Tokens of the busiest expert over the mean of its layer's experts, in the layer where this ratio is largest."""
    dead_experts: Number | None = None
    """Number of experts, over all layers, that received none of the step's document tokens."""
    router_entropy: float | None = None
    """Mean entropy of the routers' probabilities over all document tokens and layers, in nats."""
    system: dict[str, float] | None = None
    """System metrics of rank 0's node; only in steps that are logged to trackers (`tracking.system_metrics`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutersMeasured(_Event):
    """How the routers of a mixture of experts distributed a step's document tokens, layer by layer.

    Recorded in steps that are logged to trackers, up to about a thousand times in a run.
    """

    event: Literal["routers"] = "routers"
    step: Whole
    """Number of completed steps, including this step."""
    layers: tuple[Whole, ...]
    """Numbers of the layers that have a router, from 0. The other lists have one value for each of these layers."""
    imbalance: tuple[float, ...]
    """Tokens of the busiest expert over the mean of the layer's experts."""
    dead: tuple[Whole, ...]
    """Number of experts that received no token."""
    entropy: tuple[float, ...]
    """Mean entropy of the router's probabilities over all tokens, in nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedCorpus:
    """Loss of a training corpus."""

    name: str
    """Name in metrics, such as `source/NAME/loss`."""
    loss: float
    """Mean training loss over the corpus's supervised tokens, documents or pairs, in nats."""
    tokens: Number
    """Number of these tokens, documents or pairs, or the sum of the tokens' label weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcesMeasured(_Event):
    """The training loss of each corpus of a mixture, over the steps since the attempt's previous record.

    Recorded in steps that are logged to trackers, up to about a thousand times in a run, and when an attempt ends
    without a failure.
    """

    event: Literal["sources"] = "sources"
    step: Whole
    """Number of completed steps, including this step."""
    corpora: tuple[TrainedCorpus, ...]
    """Objects with the `name`, `loss` and `tokens` of each corpus that was trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedCorpus:
    """Result of an evaluation on a validation corpus, or on the held-out documents of the training corpora."""

    name: str
    """Name in metrics, such as `eval/NAME/loss`; `held_out` for held-out documents."""
    path: str | None
    """Path of the corpus when the rows were planned; None for held-out documents."""
    loss: float
    """Mean loss over the supervised tokens, pairs or documents of the corpus's evaluation rows, in nats."""
    tokens: Whole
    """Number of supervised tokens in these rows."""
    pair_accuracy: float | None = None
    """Fraction of the pairs whose chosen answer has the larger reward; None without pairs."""
    accuracy: float | None = None
    """Fraction of the documents whose class is predicted; None without classes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated(_Event):
    """An evaluation of the model completed."""

    event: Literal["evaluation"] = "evaluation"
    step: Whole
    """Number of completed steps."""
    loss: float
    """Mean loss over the supervised tokens, pairs or documents of the evaluation rows, in nats."""
    tokens: Whole
    """Number of supervised tokens in the evaluation rows."""
    pair_accuracy: float | None = None
    """Fraction of the pairs whose chosen answer has the larger reward; None without pairs."""
    accuracy: float | None = None
    """Fraction of the documents whose class is predicted; None without classes."""
    seconds: Seconds = 0.0
    """Duration of the evaluation."""
    corpora: tuple[EvaluatedCorpus, ...] = ()
    """Results by corpus; empty without `data.validation`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A prompt of `run.sample_prompts` and its continuation."""

    prompt: str
    text: str
    """The continuation, without the prompt."""
    tokens: Whole
    """Number of tokens in the continuation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled(_Event):
    """The model continued the prompts of `run.sample_prompts` with its most probable tokens."""

    event: Literal["samples"] = "samples"
    step: Whole
    """Number of completed steps."""
    samples: tuple[Sample, ...]
    """Objects with a `prompt`, its continuation as `text`, and the continuation's number of `tokens`."""
    seconds: Seconds = 0.0
    """Duration of all continuations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEvent(_Event):
    """An event that describes a committed checkpoint."""

    step: Whole
    """Number of completed steps in the checkpoint."""
    path: str
    """Folder of the checkpoint, relative to the root of the checkpoint store."""
    world_size: Positive
    """Number of ranks that wrote the checkpoint."""
    digest: Digest
    """Sum of the data digests of all steps up to the checkpoint."""
    tokens: Whole
    """Number of supervised tokens in all steps up to the checkpoint."""
    next_row: Whole
    """The row after the last row trained on."""
    reason: str = ""
    """Trigger: `steps`, `minutes`, `end`, `stage`, `stop`, `request`, `resize`, `preemption` or `retry`."""
    sp_size: Positive = 1
    """Number of ranks that shared a row."""
    ring_size: Positive = 1
    """Size of the ring within `sp_size`."""
    zero_stage: Whole | None = None
    """ZeRO stage that the checkpoint was written with."""
    cursor: dict[str, Any] = field(default_factory=dict)
    """Position in the data at which training resumes."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics at the checkpoint's step: `loss` and, if an evaluation ran at that step, `eval_loss`."""
    parent: str | None = None
    """The checkpoint that the writing attempt resumed from."""
    written_at: Seconds = 0.0
    """Time at which the training state was copied."""
    stage: str = ""
    """Name of the stage that wrote the checkpoint; empty in a run without stages."""
    measured: str = ""
    """Identity of the data that the metrics were measured on; metrics with different identities are not comparable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCommitted(CheckpointEvent):
    """A checkpoint was committed. Readers can check the preceding steps against the event's totals."""

    event: Literal["checkpoint_committed"] = "checkpoint_committed"
    seconds: Seconds | None = None
    """Time from the request to the commit."""
    stall_seconds: Seconds | None = None
    """Time for which the checkpoint blocked training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointsFound(CheckpointEvent):
    """An attempt or a command listed the committed checkpoints. The event describes the newest checkpoint.

    The attempt that wrote the newest checkpoint may have died before it recorded the commit. All earlier commits are in
    the journal, which is synced before each commit.
    """

    event: Literal["checkpoints_found"] = "checkpoints_found"
    written_by: Positive
    """The attempt that wrote the newest checkpoint."""
    steps: tuple[Whole, ...]
    """The steps of all committed checkpoints, ascending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDeleted(_Event):
    """A checkpoint was deleted by the retention policy."""

    event: Literal["checkpoint_deleted"] = "checkpoint_deleted"
    step: Whole
    """Step of the checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSetAside(_Event):
    """A checkpoint was skipped on resume and is no longer part of the run."""

    event: Literal["checkpoint_set_aside"] = "checkpoint_set_aside"
    step: Whole
    """Step of the checkpoint."""
    reason: str
    """Reason why the checkpoint was skipped."""
    kind: str = "damaged"
    """`damaged`, `unreadable`, `superseded` (written by an older attempt after a newer attempt had started) or
    `foreign` (written by another version)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFailed(_Event):
    """Saving a checkpoint failed."""

    event: Literal["checkpoint_failed"] = "checkpoint_failed"
    step: Whole
    """Step of the checkpoint."""
    reason: str
    """The error message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionNoticed(_Event):
    """A worker received a notice that its node will be preempted."""

    event: Literal["preemption_notice"] = "preemption_notice"
    step: Whole | None = None
    """Number of completed steps when the notice was received."""
    deadline: Number | None = None
    """Time at which the node will shut down, in seconds since the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndEvent(CommandEvent):
    """The end of an attempt, a start or a command. For a failed attempt, the supervisor sets all fields."""

    kind: str = ""
    """Kind of failure: `preempted`, `lost` (a process died), `device`, `raised`, `consequence` (caused by another
    rank's failure), `start` or `controller`; empty if nothing failed."""
    reason: str
    """The reason for the end, in one line."""
    rank: Whole | None = None
    """The rank on which the failure started."""
    node: str | None = None
    """The node of the rank on which the failure started."""
    committed_step: Whole | None = None
    """Step of the newest committed checkpoint."""
    memory_step: Whole | None = None
    """The newest step with a complete copy in peer memory; None if there is none."""
    lost_steps: Whole | None = None
    """Number of steps trained after both `committed_step` and `memory_step`."""
    way_out: str = ""
    """Advice to the user on how to fix the problem."""
    failure: Positive | None = None
    """Number of failures counted against `elastic.max_failures`, including this failure; None if it is not counted."""
    max_failures: Whole = 0
    """Value of `elastic.max_failures`, the number of failures that the run tolerates."""
    restarts: bool | None = None
    """Whether the workers are restarted; None if undecided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartFailed(EndEvent):
    """A command failed to start its workers. Recorded under the newest attempt, even one from an earlier command."""

    event: Literal["start_failed"] = "start_failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailed(EndEvent):
    """A command ended with a failure. Recorded under the newest attempt."""

    event: Literal["run_failed"] = "run_failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class BadStep(_Event):
    """A step with a non-finite loss or gradient, or with a loss spike, ended the attempt."""

    event: Literal["bad_step"] = "bad_step"
    step: Positive
    """Number of the step, starting at 1."""
    rows: RowRange
    """The first row of the step, and the row after the last."""
    plan_id: str
    """Id of the data-plan segment that contains the rows."""
    reason: str
    """Description of the bad loss or gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsSkipped(_Event):
    """The data plan was branched to skip the rows of a bad step."""

    event: Literal["rows_skipped"] = "rows_skipped"
    step: Whole
    """Number of completed steps at which the branch begins."""
    rows: RowRange
    """The first skipped row, and the row after the last, as numbered before the branch."""
    plan_id: str
    """Id of the branch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerWarned(_Event):
    """A worker issued a warning to the user."""

    event: Literal["warning"] = "warning"
    text: str
    """Text of the warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHung(_Event):
    """The attempt was terminated because ranks made no progress for longer than ``elastic.hang_timeout_s``."""

    event: Literal["hang"] = "hang"
    text: str
    """The ranks that hang, where they hang, and for how long."""
    stacks: dict[str, str]
    """Thread stacks and last lines of stderr before the termination, by rank; empty if unavailable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnded(EndEvent):
    """An attempt ended. If an attempt has several of these records, the last one is authoritative.

    If the end was intended, ``reason`` begins with ``stopped``, ``finished``, ``resized`` or ``stage``.
    """

    event: Literal["attempt_ended"] = "attempt_ended"
    saving_seconds: Seconds = 0.0
    """Time for which checkpoints blocked training since the last step."""
    fault_at: Seconds | None = None
    """Time of the failure, or of the last heartbeat before the failure; None if unknown."""
    detected_at: Seconds | None = None
    """Time at which the failure was detected; None means the time of this event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinished(_Event):
    """The run completed its last step."""

    event: Literal["run_finished"] = "run_finished"
    step: Whole
    """The run's last step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandEnded(CommandEvent):
    """A command ended."""

    event: Literal["command_ended"] = "command_ended"


Event = (
    PhaseStarted
    | AttemptStarted
    | StreamStarted
    | StepDone
    | RoutersMeasured
    | SourcesMeasured
    | Evaluated
    | Sampled
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
    """Return the cached event validator, which takes milliseconds to build."""
    return TypeAdapter(Annotated[Event, Field(discriminator="event")])
