"""Settings of how a run is executed: parallel, memory, checkpoint, elastic, tracking and cluster."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, get_args
from urllib.parse import urlsplit

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from ray_ulysses.config.credentials import steers_programs
from ray_ulysses.config.section import (
    LocalPath,
    OnResume,
    PlacePath,
    Section,
    StoragePlace,
    base_of,
    fixed,
    free,
    refusal,
)
from ray_ulysses.errors import without_secret
from ray_ulysses.storage.location import SQLITE, absolute_location

KeptActivation = Literal["layer_inputs", "attention_outputs"]
"""Activations of a layer that gradient checkpointing keeps until the backward pass."""

MOST_WORKERS = 65_536
_MOVED_CHECKPOINTS = free(
    "if the checkpoints were moved there; a run that has saved ends with an error, and does not restart from step 0, "
    "if its checkpoints are missing or all damaged"
)
_RAY_ADDRESS = re.compile(r"auto|(?:\[[0-9A-Fa-f:.]+\]|[^\s/:@?#]+)(?::[0-9]{1,5})?")


class ParallelSection(Section):
    """How the workers share a row. The world size is dp x sp; dp follows from `cluster.workers`."""

    on_resume: ClassVar[OnResume] = fixed("it determines how rows are padded")

    sp_size: Annotated[int, free("any value of `parallel.allowed_sp`")] = Field(default=1, ge=1, le=65_536)
    """Ranks that share one row, each with a slice of its tokens (the `sp` axis). It must divide `cluster.workers`; the
    ranks have equal work where it also divides the model's attention heads. Default 1: rows are not shared."""

    ring_size: Annotated[
        int | None, free("any size that divides the rows, which are padded for `parallel.allowed_sp`")
    ] = Field(default=None, ge=1, le=65_536)
    """Ring factor of `sp_size`: keys and values are passed around this many ranks, and heads are exchanged among
    `sp_size / ring_size` ranks, at most the number of the model's attention heads. Default null: 1 for up to as many
    ranks as heads; beyond that, the smallest ring for which the remaining factor divides the heads."""

    allowed_sp: tuple[Annotated[int, Field(ge=1, le=65_536)], ...] | None = Field(default=None, strict=False)
    """All values of `sp_size` that the run may use, in ascending order. Rows are padded to their least common
    multiple (to twice a size that needs a ring) for the whole run. Default null: every divisor of the model's attention
    heads, and `sp_size`."""

    @field_validator("allowed_sp")
    @classmethod
    def _is_ascending(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and (not value or list(value) != sorted(set(value))):
            raise refusal("must be different numbers in ascending order", "write it as [1, 2, 4], or null")
        return value


class MemorySection(Section):
    """Trade-offs between memory and speed, and the limits that `plan` compares its estimate with."""

    on_resume: ClassVar[OnResume] = free()

    plan: Annotated[Literal["auto", "off"], free("the stored choice is kept as long as it fits")] = "off"
    """With `auto`, the planner chooses the settings of this section that the file omits (except tiles, the ZeRO stage
    and limits): the fastest that fit `device_gib` and `host_gib`, by modelled time if `cluster.device` is set, else by
    a fixed order of costs. The choice is stored with the run, and a resume keeps it as long as it fits. Default `off`:
    omitted settings take their defaults."""

    gradient_checkpointing: bool = True
    """Whether a layer's activations are recomputed in the backward pass instead of kept. Default true, since they don't
    fit in memory at long context."""

    attention_output: Literal["auto", "both", "kernel", "none"] = "auto"
    """Attention outputs that gradient checkpointing keeps: in the kernel's and in the model's layout (`both`: 5
    collectives per layer), only in the kernel's (`kernel`: 6 collectives, one output less), or none (`none`: attention
    is computed twice). Default `auto`: `both`, the fastest, if it fits `device_gib` by the estimate of `plan`, else
    `kernel`, decided before a worker starts; a resume keeps the stored choice if it fits."""

    offload_activations: tuple[KeptActivation, ...] = Field(default=(), strict=False)
    """Kept activations that wait for the backward pass in host memory instead of on the device, in this order:
    `layer_inputs`, `attention_outputs` (the outputs that `attention_output` keeps). Copies overlap with computation,
    and those of two layers are on the device at once. `plan` adds them to its host memory. Default none, which needs no
    copies."""

    attention_head_groups: int = Field(default=1, ge=1)
    """Number of groups of key-value heads that are exchanged and attended to one after another: more groups need
    smaller exchange buffers but more collectives. Default 1: all heads at once."""

    loss_tile: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto", "off"], free("gradients agree within rounding")
    ] = "auto"
    """Tokens per rank whose logits are computed at once. The loss is computed tile by tile, so the logits of a whole
    row never exist together. `auto` uses tiles of 512 tokens, fewer if the vocabulary is above 131,072, and more if
    logits are small; `off` computes all logits at once. Default `auto`."""

    mlp_tile: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto", "off"], free("gradients agree within rounding")
    ] = "auto"
    """Tokens per rank that an MLP, dense or of experts, processes at once. Tiles cost one more matrix product per layer
    (12 instead of 11 under gradient checkpointing). Norms are tiled too, since their fp32 values would be the memory
    peak of a long row. `auto` uses up to 4,096 tokens and 2**26 inner values per tile, and tiles only with
    `gradient_checkpointing`; `off` processes all tokens at once. Default `auto`."""

    zero_stage: Annotated[Literal["auto", 1, 2, 3], free("a checkpoint of any stage loads at any other")] = "auto"
    """DeepSpeed's ZeRO stage: sharded over the workers is the optimizer state (1), also the gradients (2), or also the
    weights (3). `auto` is 3, except for a run in fp32 on a single worker without `offload_optimizer`: nothing is
    sharded there, and 1 has less overhead per layer, which matters for short rows. Default `auto`; where the weights
    fit, 1 communicates less in a step of several micro-batches."""

    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where the optimizer state is kept: `none` leaves it on the GPU, `cpu` moves it to host memory, `nvme` to files
    under `nvme_path` (`zero_stage` 3 only). Default `none`, which is faster where it fits."""

    offload_param: Literal["none", "cpu"] = "none"
    """Where each rank's share of the weights is kept between uses: `none` leaves it on the GPU, `cpu` keeps it in host
    memory, from which each use of a layer fetches it (only with `zero_stage` 3 and `offload_optimizer: cpu`). Default
    `none`."""

    nvme_path: LocalPath | None = None
    """Directory on a local disk of each node for `offload_optimizer: nvme`. Default null."""

    device_gib: float | None = Field(default=None, gt=0.0)
    """Memory of one GPU, in GiB, that `plan` compares its estimate with; a run that does not fit is refused. Default
    null: the estimate is printed and nothing is refused."""

    host_gib: float | None = Field(default=None, gt=0.0)
    """Host memory for one worker, in GiB, that `plan` compares its estimate with. Default null: nothing is refused."""

    @field_validator("offload_activations")
    @classmethod
    def _is_in_order(cls, value: tuple[KeptActivation, ...]) -> tuple[KeptActivation, ...]:
        if list(value) != [one for one in get_args(KeptActivation) if one in value]:
            kinds = ", ".join(get_args(KeptActivation))
            raise refusal(f"must be different kinds in the order {kinds}", "write one of them, both, or []")
        return value


class CheckpointSection(Section):
    """When and how the state is saved, and which checkpoints are kept."""

    on_resume: ClassVar[OnResume] = free()

    storage: Annotated[StoragePlace | None, _MOVED_CHECKPOINTS] = None
    """Where checkpoints are stored, if not in the run's directory: a path that every node can access, or the URI of an
    object store such as `s3://bucket/prefix`; they are stored there under the run's name. Credentials come from the
    environment of every node, or from `cluster.secrets_file`. Default null: `checkpoints/` in the run's directory."""

    every_steps: int | None = Field(default=100, ge=1)
    """Steps between two checkpoints; null turns this rule off. Default 100."""

    every_minutes: float | None = Field(default=None, gt=0.0)
    """Minutes between two checkpoints, in addition to `every_steps`; whichever comes first triggers a save. Default
    null: no such rule."""

    keep_last: int = Field(default=3, ge=1)
    """Number of newest committed checkpoints to keep. An older one is deleted only after its successor is committed.
    Default 3: one to use, one in case it is damaged, and one to look back at."""

    keep_every_steps: int | None = Field(default=None, ge=1)
    """Checkpoints whose step is a multiple of this number are kept forever. Default null: none."""

    keep_best: int = Field(default=0, ge=0)
    """Number of checkpoints with the lowest `best_metric` to keep as well, for each of the `stages` if there are any,
    and for each branch that holds out other documents. Default 0."""

    best_metric: Literal["eval_loss", "loss"] = "eval_loss"
    """Metric of `keep_best`: the evaluation loss at the checkpoint's step, or the training loss. Default `eval_loss`; a
    checkpoint without the metric is never among the best."""

    save_at_end: bool = True
    """Whether a run saves before it stops, at its stop step or on a signal. Default true, so that it can be resumed."""

    host_buffers: int = Field(default=2, ge=0, le=2)
    """Copies of a rank's state in host memory from which checkpoints are written while training continues: with 2, a
    copy can be made while another is being written; with 1, it waits for the other; with 0, there is no copy, and
    training pauses until the checkpoint is committed. Default 2; the second is allocated when first needed."""

    save_timeout_s: float = Field(default=3600.0, gt=0.0)
    """Maximum time to write one checkpoint, in seconds; a run whose storage hangs for longer ends. Default 3600, enough
    for 360 GB per rank at 100 MB/s; raise it for slower storage."""

    max_failed_saves: int = Field(default=2, ge=0)
    """Consecutive saves that may fail, because of a full disk or unreachable storage, before the run ends, provided
    that saves have also been failing for `failed_saves_patience_s`; each is retried with the state of the next step.
    Default 2: a short outage costs nothing, and training does not continue far into a long one."""

    failed_saves_patience_s: float = Field(default=300.0, ge=0.0)
    """How long saves may keep failing before the run ends, in seconds, regardless of their number: with fast steps,
    `max_failed_saves` is reached in a moment. Beyond that number, retries become less frequent, up to 30 s apart.
    Training also continues for this time, at least a minute, while `run.storage` does not answer. Default 300."""


class ElasticSection(Section):
    """How many failures and how much waiting a run tolerates before it ends, and how it learns of lost nodes."""

    on_resume: ClassVar[OnResume] = free()

    max_failures: Annotated[int, free("counted from the resume on")] = Field(default=3, ge=0)
    """Failures that a command survives by restarting its workers. A failure counts only if it occurred within
    `failure_window_s` and since the last new checkpoint. A failure after which the remaining workers continue without
    restarting does not count if the attempt made progress, that is, if storage or peer memory has a newer state than
    the one it started from. Default 3: enough for workers that can't be started, few enough that a bug ends the run."""

    failure_window_s: Annotated[float, free("failures are counted per command")] = Field(default=86400.0, gt=0.0)
    """How long a failure counts against `max_failures`, in seconds. Default 86400: one day."""

    worker_start_timeout_s: float = Field(default=300.0, gt=0.0)
    """Maximum wait for all workers, at the start and after a loss, in seconds. Default 300, enough to pull an image."""

    grow_interval_s: float = Field(default=600.0, gt=0.0)
    """Minimum time between two attempts of an elastic run (`cluster.workers` with `min` and `max`) to continue on more
    workers, in seconds. A run grows only if that saves ten times the cost of a start. Default 600."""

    peer_memory: bool = True
    """Whether the newest state is also kept in host memory, each worker's part on its own node and on a partner node,
    so that the run continues from there after a failure. It is saved after every step, or less often if copying is
    slow. It takes 4 times a worker's part of the state; `plan` shows how much. Default true. Checkpoints are saved to
    storage either way."""

    peer_memory_gib: Annotated[
        float | None, free("the limit is set when a node's peer memory is first used, and stays while it is in use")
    ] = Field(default=None, gt=0.0)
    """Maximum host memory per node for `peer_memory`, in GiB; a run whose state needs more trains without peer memory,
    and reports it. Default null: a third of the memory that is free on the node when the run starts."""

    collective_timeout_s: float = Field(default=600.0, gt=0.0)
    """Maximum duration of one collective, in seconds, before the attempt counts as failed; a rank waits for a row for
    0.8 of it. Default 600, well above the longest legitimate time between two collectives."""

    hang_timeout_s: float = Field(default=120.0, gt=0.0)
    """Time without progress within a step, in seconds, after which ranks may count as hung: all are then killed, their
    stacks are recorded in the journal, and the run continues as after a failure. A rank makes progress with every
    micro-batch; the wait for its row is limited by `collective_timeout_s` instead. Slow steps raise the limit, to five
    times the longest recent one. Default 120."""

    start_hang_timeout_s: float = Field(default=3600.0, gt=0.0)
    """The same limit until the end of an attempt's first step, while the model is built, a state is loaded and kernels
    are compiled. Default 3600."""

    bad_steps: Literal["stop", "skip"] = "stop"
    """Response to a step whose loss or gradient is not finite, or whose loss spikes (`loss_spike_mads`): `stop`
    ends the run; `skip` continues from the newest checkpoint with a branch of the data plan that leaves out the rows of
    that step, which the journal records. Default `stop`: such a step may have a cause that recurs."""

    max_skipped_steps: int = Field(default=3, ge=1)
    """Steps that `bad_steps: skip` leaves out within `failure_window_s` before the run ends. Default 3, since a bad
    document affects few steps."""

    loss_spike_mads: float | None = Field(default=None, gt=0.0)
    """A step's loss is a spike if it is above the median of the last 50 steps of the attempt by more than this multiple
    of their median absolute deviation (or of a hundredth of the median, if that is more); the first 20 steps never
    count. Default null: only a loss that is not finite is bad."""

    slow_ranks: Literal["report", "exclude"] = "report"
    """Response to a rank whose device takes more than 1.3 times as long as the median rank's for the same small
    computation, in five measurements in a row, at least 30 s apart: `report` reports it; `exclude` also moves the
    workers off its node, as if it were drained, if the run is faster without it. Default `report`: a slow node is often
    better than none."""

    cloud_notices: Literal["auto", "none", "aws", "gcp", "azure"] = "auto"
    """Cloud whose termination notices (spot interruption, preemption, maintenance) each node watches for; on a notice,
    Ray drains the node, and the run saves before the node ends. Default `auto`: the cloud that the machine's firmware
    names, if any. `none` leaves draining to Ray and to operators."""

    drain_on_rebalance: bool = False
    """Whether AWS's rebalance recommendation (the instance has an elevated risk of interruption) counts as such a
    notice. Default false: the instance may stay."""

    cloud_metadata_url: str | None = Field(default=None, pattern=r"^https?://[^\s/@?#]+/?$")
    """Address of the metadata service, the same on every node, such as that of a mock to rehearse a notice with,
    `http://127.0.0.1:1338`. Default null: the provider's, `http://169.254.169.254`."""


class WorkerLimits(Section):
    """The number of workers: fixed, or limits within which it follows the nodes."""

    short_form = "integer \\| "

    min: int = Field(ge=1, le=MOST_WORKERS)
    """Minimum number of workers to train on."""

    max: int = Field(ge=1, le=MOST_WORKERS)
    """Maximum number of workers to train on."""

    @model_validator(mode="before")
    @classmethod
    def _from_one_number(cls, value: Any) -> Any:
        if isinstance(value, dict | cls):
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_WORKERS:
            rule = f"must be a whole number from 1 to {MOST_WORKERS:,}, or a mapping of min and max"
            raise refusal(rule, "write a number of workers, such as 8, or limits, such as {min: 4, max: 16}")
        return {"min": value, "max": value}

    @model_serializer(mode="wrap")
    def _to_one_number(self, serialize: SerializerFunctionWrapHandler) -> Any:
        return self.min if self.is_fixed else serialize(self)

    @property
    def is_fixed(self) -> bool:
        """Whether both limits are the same."""
        return self.min == self.max

    def __str__(self) -> str:
        return str(self.min) if self.is_fixed else f"{self.min} to {self.max}"


class ClusterSection(Section):
    """The resources that are requested from Ray."""

    on_resume: ClassVar[OnResume] = free()

    address: str | None = Field(default=None, min_length=1)
    """Address of a Ray cluster. Default null: the cluster that `RAY_ADDRESS` names, else Ray is started on this
    machine."""

    workers: Annotated[WorkerLimits, free("any multiple of `parallel.sp_size`")]
    """Number of training workers, one per GPU: a multiple of `parallel.sp_size`, or two of them for an elastic run, as
    `{min: 4, max: 16}`. An elastic run starts on as many workers as the nodes have room for, continues on fewer when
    nodes are lost or drained, and on more when nodes join (`elastic.grow_interval_s`). The tokens that a step trains on
    do not depend on the number of workers."""

    gpus_per_worker: int = Field(default=0, ge=0, le=1)
    """GPUs per worker: 0 trains on CPU, 1 on a GPU. Default 0, so that no GPU is taken unless you ask for it."""

    cpus_per_worker: float = Field(default=1.0, gt=0.0)
    """CPUs that one worker reserves; with a fraction, several workers share one. Default 1."""

    device: Literal["A100", "H100", "H200"] | None = None
    """GPU of the nodes, in its SXM form, for which `plan` models the time of a step from published kernel rates.
    Default null: no time is modelled."""

    gpus_per_node: int = Field(default=8, ge=1)
    """GPUs per node, from which `plan` models traffic between nodes. Default 8."""

    network_gbps: float = Field(default=400.0, gt=0.0)
    """Network bandwidth per GPU in Gbit/s, from which `plan` models traffic between nodes. Default 400: one adapter for
    each GPU."""

    secrets_file: PlacePath | None = None
    """File of `NAME=VALUE` lines, such as access keys, that the command and each worker read on their own node at the
    start; its variables take precedence over the environment. It must be readable by its owner only (`chmod 600`), and
    may set only credentials ([the list](recover.md#secrets)) and variables that `secrets_names` adds. Default null:
    secrets come only from the environment of every node. They are never sent through Ray."""

    secrets_names: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = Field(
        default=(), strict=False
    )
    """Variables that `secrets_file` may set although they are not credentials, such as `AWS_ENDPOINT_URL`. Default
    none."""

    data_cpus: float = Field(default=0.25, gt=0.0)
    """CPUs that one task of the data stream reserves. Default 0.25: reading rows is light work."""

    wait_for_nodes: bool = False
    """Whether to wait at the start for missing nodes, for up to `elastic.worker_start_timeout_s`, for example where an
    autoscaler adds them. Default false: a run that does not fit in the cluster is refused at once."""

    @field_validator("secrets_names")
    @classmethod
    def _steers_no_program(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if refused := [name for name in value if steers_programs(name)]:
            rule = f"lists {', '.join(refused)}, which decides what programs run or through which host they connect"
            raise refusal(rule, "set it in the environment of every node instead")
        return value

    @field_validator("address")
    @classmethod
    def _is_a_ray_address(cls, value: str | None) -> str | None:
        # `text_problems` reports an address that holds a password.
        if value is not None and "@" not in value and not _RAY_ADDRESS.fullmatch(value):
            raise refusal(
                "is not the address of a Ray head",
                "give its host:port (6379 by default) or auto on a node of the cluster, or leave it out and submit a "
                "job from elsewhere: `ray-ulysses submit CONFIG --address http://HEAD:8265`, or `ray job submit`",
                without_secret(value),
            )
        return value


_TRACKING_SCHEMES = ("http://", "https://", SQLITE, "postgresql", "mysql", "mssql")

TrackerName = Literal["mlflow", "wandb", "tensorboard"]


class TrackingSection(Section):
    """Tracking in MLflow, Weights & Biases or TensorBoard. An outage of one never stops training."""

    on_resume: ClassVar[OnResume] = free()

    enabled: bool = True
    """Whether the run is tracked. Default true."""

    trackers: Annotated[tuple[TrackerName, ...], free("an added tracker gets the run from its first step")] = Field(
        default=("mlflow",), strict=False, min_length=1
    )
    """Trackers of the run: `mlflow`; `wandb`, which takes account, server and mode from its own variables
    (`WANDB_API_KEY`, `WANDB_ENTITY`, `WANDB_BASE_URL`, `WANDB_MODE`); `tensorboard`, event files in the run's
    directory. Default `[mlflow]`."""

    uri: Annotated[str | None, free("if the same server has moved")] = Field(default=None, min_length=1)
    """MLflow's tracking server, such as `http://mlflow:5000`; required with `run.storage_kind: nfs` and
    if `run.storage` is an object store. Default null: an SQLite file `mlflow.db` in `run.storage`."""

    allow_http: bool = False
    """Whether `MLFLOW_TRACKING_USERNAME`, `_PASSWORD` or `_TOKEN` may be sent to an `http://` server on another
    machine, in clear text. Default false: with one of them set, such a server is refused."""

    experiment: Annotated[str, fixed("a run is one MLflow run for its whole life")] = Field(
        default="ray-ulysses", min_length=1
    )
    """MLflow experiment, or W&B project, that the run belongs to. Default `ray-ulysses`."""

    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the run, a mapping of text to text. Default none."""

    system_metrics: bool = True
    """Whether each logged step records the CPU, memory, disk and network of rank 0's node and the memory of its GPU.
    W&B's client records its own instead. Default true."""

    @field_validator("trackers")
    @classmethod
    def _are_different(cls, value: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
        if len(set(value)) < len(value):
            raise refusal("names a tracker twice", "name each tracker once")
        return value

    @field_validator("uri")
    @classmethod
    def _is_a_uri(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None or value == "databricks":
            return value
        if not value.startswith(_TRACKING_SCHEMES) or (value.startswith("http") and not _names_host(value)):
            raise refusal(
                "must be the URI of an MLflow server or database",
                "write http://host:port, https://host or sqlite:///path/to/mlflow.db, or leave it out",
                without_secret(value),
            )
        base = base_of(info)
        if base is None or not value.startswith(SQLITE):
            return value
        return SQLITE + absolute_location(value.removeprefix(SQLITE), base)


def _names_host(uri: str) -> bool:
    try:
        parts = urlsplit(uri)
        # A password may hold a slash and end the host early; `text_problems` reports it.
        return "@" in uri or (parts.hostname is not None and parts.port != 0)
    except ValueError:
        return False


def mlflow_is_on(tracking: TrackingSection) -> bool:
    """Return whether MLflow records the run."""
    return tracking.enabled and "mlflow" in tracking.trackers
