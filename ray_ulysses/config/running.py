"""Settings that control the execution of a run: parallel, memory, checkpoint, elastic, tracking and cluster."""

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
from ray_ulysses.config.devices import DeviceSection
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
"""Layer activations that gradient checkpointing may keep until the backward pass."""

MOST_WORKERS = 65_536
_MOVED_CHECKPOINTS = free(
    "if the checkpoints were moved there; a run whose checkpoints are missing or all damaged ends with an error, and "
    "does not restart from step 0"
)
_RAY_ADDRESS = re.compile(r"auto|(?:\[[0-9A-Fa-f:.]+\]|[^\s/:@?#]+)(?::[0-9]{1,5})?")


class ParallelSection(Section):
    """How workers share a row. The world size is dp x sp, where dp follows from `cluster.workers`."""

    on_resume: ClassVar[OnResume] = fixed("a change would pad rows differently")

    sp_size: Annotated[int, free("any value in `parallel.allowed_sp`")] = Field(default=1, ge=1, le=65_536)
    """Number of ranks that share a row, each with a slice of its tokens (the `sp` axis). It must divide
    `cluster.workers`. Ranks have equal work if `sp_size` also divides the number of attention heads. Default 1: rows
    are not shared."""

    ring_size: Annotated[
        int | None, free("any size that divides the row length (rows are padded for `parallel.allowed_sp`)")
    ] = Field(default=None, ge=1, le=65_536)
    """Number of ranks in a ring, a divisor of `sp_size`. Keys and values are passed around the ring, and heads are
    exchanged among `sp_size / ring_size` ranks, at most as many as attention heads. Default null: 1 if there are at
    least as many heads as ranks, otherwise the smallest ring for which `sp_size / ring_size` divides the heads."""

    allowed_sp: tuple[Annotated[int, Field(ge=1, le=65_536)], ...] | None = Field(default=None, strict=False)
    """All values of `sp_size` that the run may use, in ascending order. For the duration of the run, rows are padded to
    the least common multiple of these values, where each value that requires a ring counts double. Default null: every
    divisor of the number of attention heads, and `sp_size`."""

    @field_validator("allowed_sp")
    @classmethod
    def _is_ascending(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and (not value or list(value) != sorted(set(value))):
            raise refusal("must list distinct numbers in ascending order", "use a list such as [1, 2, 4], or null")
        return value


class MemorySection(Section):
    """Trade-offs between memory and speed, and the memory limits for the estimate of `plan`."""

    on_resume: ClassVar[OnResume] = free()

    plan: Annotated[Literal["auto", "off"], free("the stored choice is kept as long as it fits")] = "off"
    """Whether the planner chooses the settings of this section that the file omits, except tiles, the ZeRO stage and
    limits. `auto` chooses the fastest settings that fit `device_gib` and `host_gib`: by modelled time if
    `cluster.device` is set, otherwise by a fixed order of costs. The choice is stored with the run, and a resume uses
    it as long as it fits. Default `off`: omitted settings take their defaults."""

    gradient_checkpointing: bool = True
    """Whether to recompute a layer's activations in the backward pass instead of storing them. Default true, since
    activations do not fit in memory at long context."""

    attention_output: Literal["auto", "both", "kernel", "none"] = "auto"
    """Attention outputs that gradient checkpointing keeps. `both` keeps them in the kernel's and the model's layouts (5
    collectives per layer), `kernel` only in the kernel's layout (6 collectives, half the memory), and `none` computes
    attention twice. Default `auto`: `both`, the fastest, if `plan` estimates that it fits in `device_gib`, otherwise
    `kernel`. The decision is made before workers start, and a resume uses the stored decision if it fits."""

    offload_activations: tuple[KeptActivation, ...] = Field(default=(), strict=False)
    """Kept activations that are moved to host memory until the backward pass: `layer_inputs`, `attention_outputs` (the
    outputs kept by `attention_output`), listed in this order. Copies overlap with computation, and the activations of
    two layers are on the device at a time. `plan` includes them in its host memory estimate. Default: none, which
    avoids the copies."""

    attention_head_groups: int = Field(default=1, ge=1)
    """Number of groups into which key-value heads are divided; groups are exchanged and attended to one after another.
    More groups need smaller exchange buffers, but more collectives. Default 1: all heads at once."""

    loss_tile: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto", "off"], free("gradients agree within rounding")
    ] = "auto"
    """Tokens per rank whose logits are computed at once. The loss is computed tile by tile, so the logits of a complete
    row never exist at the same time. `auto` uses tiles of 512 tokens, or fewer for a vocabulary above 131,072, or more
    if logits are small. `off` computes all logits at once. Default `auto`."""

    mlp_tile: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto", "off"], free("gradients agree within rounding")
    ] = "auto"
    """Tokens per rank that an MLP (dense or mixture of experts) processes at once. Tiles cost one more matrix product
    per layer: 12 instead of 11 with gradient checkpointing. Norms are tiled too, since their fp32 values would be the
    memory peak of a long row. `auto` uses up to 4,096 tokens and 2**26 intermediate values per tile, and only tiles
    with `gradient_checkpointing`. `off` processes all tokens at once. Default `auto`."""

    zero_stage: Annotated[Literal["auto", 1, 2, 3], free("a checkpoint loads at any ZeRO stage")] = "auto"
    """DeepSpeed ZeRO stage. Stage 1 shards the optimizer state over the workers, stage 2 also the gradients, and stage
    3 also the weights. `auto` is 3, except for an fp32 run on a single worker without `offload_optimizer`: nothing can
    be sharded, and stage 1 has less overhead per layer, which matters for short rows. Default `auto`. If the weights
    fit, stage 1 communicates less in steps with several micro-batches."""

    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Location of the optimizer state: `none` leaves it on the GPU, `cpu` moves it to host memory, `nvme` moves it to
    files in `nvme_path` (`zero_stage` 3 only). Default `none`, which is faster if the state fits."""

    offload_param: Literal["none", "cpu"] = "none"
    """Location of each rank's weight shard between uses: `none` leaves it on the GPU; `cpu` stores it in host memory,
    from which it is fetched for each use of a layer (requires `zero_stage` 3 and `offload_optimizer: cpu`). Default
    `none`."""

    zero_secondary: Literal["none", "node"] = "none"
    """Whether the workers of each node share a second copy of the weights (hierarchical partitioning, ZeRO++ hpZ), so
    that weights cross the network once per step: for the first forward pass, but for no backward pass. `node` takes the
    memory of all weights divided by the greatest common divisor of `cluster.workers` (the maximum) and
    `cluster.gpus_per_node`, which must be at least 2. It requires `zero_stage` 3 and `offload_param: none`, and has no
    effect on one node. Default `none`, which is best if the network is fast enough for its traffic to overlap with
    compute."""

    nvme_path: LocalPath | None = None
    """Directory on a local disk of each node, for `offload_optimizer: nvme`. Default null."""

    device_gib: float | None = Field(default=None, gt=0.0)
    """Memory of one GPU in GiB, the limit for the estimate of `plan`; a run that does not fit is refused. Default null:
    the memory of `cluster.device`; without a device, the estimate is printed, and nothing is refused."""

    host_gib: float | None = Field(default=None, gt=0.0)
    """Host memory per worker in GiB, the limit for the estimate of `plan`. Default null: nothing is refused."""

    @property
    def tiles_mlps(self) -> bool:
        """Whether MLPs run over tiles. Without gradient checkpointing, ``auto`` means ``off``, to favor speed."""
        return self.gradient_checkpointing if self.mlp_tile == "auto" else self.mlp_tile != "off"

    @field_validator("offload_activations")
    @classmethod
    def _is_in_order(cls, value: tuple[KeptActivation, ...]) -> tuple[KeptActivation, ...]:
        if list(value) != [one for one in get_args(KeptActivation) if one in value]:
            kinds = ", ".join(get_args(KeptActivation))
            raise refusal(f"must list distinct kinds in the order {kinds}", "use one of them, both, or []")
        return value


class CheckpointSection(Section):
    """When and where the training state is saved, and which checkpoints are kept."""

    on_resume: ClassVar[OnResume] = free()

    storage: Annotated[StoragePlace | None, _MOVED_CHECKPOINTS] = None
    """Location of checkpoints outside the run's directory: a path that every node can access, or a URI in an object
    store, such as `s3://bucket/prefix`. Checkpoints are stored there under the run's name. Credentials come from the
    environment of every node, or from `cluster.secrets_file`. Default null: `checkpoints/` in the run's directory."""

    every_steps: int | None = Field(default=100, ge=1)
    """Steps between checkpoints; null disables this trigger. Default 100."""

    every_minutes: float | None = Field(default=None, gt=0.0)
    """Minutes between checkpoints. If `every_steps` is set too, whichever comes first triggers a save. Default null:
    time does not trigger a save."""

    keep_last: int = Field(default=3, ge=1)
    """Number of newest committed checkpoints to keep. An old checkpoint is deleted only after a newer one is committed.
    Default 3: one to resume from, one in case the newest is damaged, and one to compare with."""

    keep_every_steps: int | None = Field(default=None, ge=1)
    """Keep every checkpoint whose step is a multiple of this number. Default null: this rule keeps no checkpoints."""

    keep_best: int = Field(default=0, ge=0)
    """Number of checkpoints with the lowest `best_metric` to keep in addition: per stage, if there are `stages`, and
    per branch with different held-out documents. Default 0."""

    best_metric: Literal["eval_loss", "loss"] = "eval_loss"
    """Metric for `keep_best`: the evaluation loss at the checkpoint's step, or the training loss. A checkpoint without
    the metric is never among the best. Default `eval_loss`."""

    save_at_end: bool = True
    """Whether to save before the run stops, at `run.stop_step` or on a signal. Default true: the run can be resumed."""

    host_buffers: int = Field(default=2, ge=0, le=2)
    """Number of copies of a rank's state in host memory from which checkpoints are written while training continues.
    With 2, a copy can be made while another is being written; with 1, the copy waits for the write; with 0, there is no
    copy, and training pauses until the checkpoint is committed. Default 2; the second copy is allocated when needed."""

    save_timeout_s: float = Field(default=3600.0, gt=0.0)
    """Maximum time to write a checkpoint, in seconds. A run whose storage hangs for longer ends. Default 3600, enough
    for 360 GB per rank at 100 MB/s; increase it for slower storage."""

    max_failed_saves: int = Field(default=2, ge=0)
    """Number of consecutive saves that may fail, because of a full disk or unreachable storage, before the run ends.
    The run ends only if saves have also been failing for `failed_saves_patience_s`. Each failed save is retried with
    the state of the next step. Default 2: a short outage costs nothing, and a long one ends the run soon."""

    failed_saves_patience_s: float = Field(default=300.0, ge=0.0)
    """Minimum time during which saves must fail before the run ends, in seconds, since fast steps would reach
    `max_failed_saves` within moments. After `max_failed_saves`, retries become less frequent, up to 30 s apart.
    Training also continues for this time, but at least a minute, while `run.storage` does not respond. Default 300."""


class ElasticSection(Section):
    """How many failures and how much waiting a run tolerates before it ends, and how it detects lost nodes."""

    on_resume: ClassVar[OnResume] = free()

    max_failures: Annotated[int, free("failures are counted per command")] = Field(default=3, ge=0)
    """Number of failures that the command answers with a restart of its workers; one more failure ends the run. A
    failure counts only if it occurred within `failure_window_s` and since the last new checkpoint. A failure that the
    remaining workers survive without a restart does not count if the attempt made progress, that is, if storage or peer
    memory has a newer state than at the start of the attempt. Default 3: enough for workers that fail to start, few
    enough that a bug ends the run."""

    failure_window_s: Annotated[float, free("failures are counted per command")] = Field(default=86400.0, gt=0.0)
    """Time for which a failure counts against `max_failures`, in seconds. Default 86400: one day."""

    worker_start_timeout_s: float = Field(default=300.0, gt=0.0)
    """Maximum wait for all workers, at the start and after a loss, in seconds. Default 300, enough to pull an image."""

    grow_interval_s: float = Field(default=600.0, gt=0.0)
    """Minimum time between attempts of an elastic run (`cluster.workers` with `min` and `max`) to add workers, in
    seconds. A run adds workers only if this saves at least ten times the time that a restart takes. Default 600."""

    peer_memory: bool = True
    """Whether to keep the newest training state in host memory, each worker's part on its own node and on a partner
    node, so that the run can continue from there after a failure. The state is copied after every step, or less often
    if copying is slow. This takes host memory equal to 4 times the size of a worker's part; `plan` prints the amount.
    Default true. Checkpoints are saved to storage in either case."""

    peer_memory_gib: Annotated[float | None, free("a node keeps its limit while its peer memory is in use")] = Field(
        default=None, gt=0.0
    )
    """Maximum host memory per node for `peer_memory`, in GiB. A run whose state needs more reports this and trains
    without peer memory. Default null: a third of the memory that is free on the node when the run starts."""

    collective_timeout_s: float = Field(default=600.0, gt=0.0)
    """Maximum duration of a collective, in seconds, after which the attempt counts as failed. A rank waits for a row
    for at most 0.8 of this time. Default 600, well above the longest legitimate time between two collectives."""

    hang_timeout_s: float = Field(default=120.0, gt=0.0)
    """Time without progress within a step, in seconds, after which ranks may count as hung. All ranks are then killed,
    their stacks are recorded in the journal, and the run continues as after a failure. Each micro-batch counts as
    progress; waiting for a row is limited by `collective_timeout_s` instead. Slow steps raise the limit to five times
    the longest recent step. Default 120."""

    start_hang_timeout_s: float = Field(default=3600.0, gt=0.0)
    """Like `hang_timeout_s`, in seconds, but until the end of an attempt's first step, while the model is built, a
    state is loaded and kernels are compiled. Default 3600."""

    bad_steps: Literal["stop", "skip"] = "stop"
    """Response to a step whose loss or gradient is not finite, or whose loss spikes (`loss_spike_mads`). `stop` ends
    the run. `skip` continues from the newest checkpoint on a branch of the data plan without the rows of that step, and
    records the branch in the journal. Default `stop`: the cause of such a step may recur."""

    max_skipped_steps: int = Field(default=3, ge=1)
    """Number of steps within `failure_window_s` that `bad_steps: skip` leaves out before the run ends. Default 3: a bad
    document affects only a few steps."""

    loss_spike_mads: float | None = Field(default=None, gt=0.0)
    """Threshold for a loss spike: a step's loss exceeds the median of the attempt's last 50 steps by this multiple of
    their median absolute deviation (or of a hundredth of the median, if that is larger). The first 20 steps never count
    as spikes. Default null: only a loss that is not finite is bad."""

    slow_ranks: Literal["report", "exclude"] = "report"
    """Response to a slow rank, whose device takes more than 1.3 times as long as the median rank's for the same small
    computation, in five consecutive measurements at least 30 s apart. `report` only reports it. `exclude` also moves
    the workers off the node, as if it were drained, if the run is faster without the node. Default `report`: a slow
    node is often better than none."""

    cloud_notices: Literal["auto", "none", "aws", "gcp", "azure"] = "auto"
    """Cloud whose termination notices (spot interruption, preemption, maintenance) each node watches for. On a notice,
    Ray drains the node, and the run saves before the node is terminated. Default `auto`: the cloud reported by the
    machine's firmware, if any. `none` leaves draining to Ray and to operators."""

    drain_on_rebalance: bool = False
    """Whether an AWS rebalance recommendation (the instance has an elevated risk of interruption) counts as a
    termination notice. Default false: the instance may stay."""

    cloud_metadata_url: str | None = Field(default=None, pattern=r"^https?://[^\s/@?#]+/?$")
    """URL of the metadata service, used by every node. Set it to the URL of a mock, such as `http://127.0.0.1:1338`, to
    rehearse a notice. Default null: the provider's URL, `http://169.254.169.254`."""


class WorkerLimits(Section):
    """Number of workers: a fixed number, or limits within which the number follows the available nodes."""

    short_form = "integer \\| "

    min: int = Field(ge=1, le=MOST_WORKERS)
    """Minimum number of workers."""

    max: int = Field(ge=1, le=MOST_WORKERS)
    """Maximum number of workers."""

    @model_validator(mode="before")
    @classmethod
    def _from_one_number(cls, value: Any) -> Any:
        if isinstance(value, dict | cls):
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_WORKERS:
            rule = f"must be an integer from 1 to {MOST_WORKERS:,}, or a mapping of min and max"
            raise refusal(rule, "write a number of workers, such as 8, or limits, such as {min: 4, max: 16}")
        return {"min": value, "max": value}

    @model_serializer(mode="wrap")
    def _to_one_number(self, serialize: SerializerFunctionWrapHandler) -> Any:
        return self.min if self.is_fixed else serialize(self)

    @property
    def is_fixed(self) -> bool:
        """Whether both limits are equal."""
        return self.min == self.max

    def __str__(self) -> str:
        return str(self.min) if self.is_fixed else f"{self.min} to {self.max}"


class ClusterSection(Section):
    """Resources requested from Ray."""

    on_resume: ClassVar[OnResume] = free()

    address: str | None = Field(default=None, min_length=1)
    """Address of a Ray cluster. Default null: the cluster in `RAY_ADDRESS` or, if it is not set, a new Ray instance on
    this machine."""

    workers: Annotated[WorkerLimits, free("any multiple of `parallel.sp_size`")]
    """Number of training workers, one per GPU: a multiple of `parallel.sp_size`. For an elastic run, set two such
    numbers, as in `{min: 4, max: 16}`. An elastic run starts with as many workers as fit on the nodes, continues with
    fewer if nodes are lost or drained, and adds workers when nodes join (`elastic.grow_interval_s`). The tokens that a
    step trains on do not depend on the number of workers."""

    gpus_per_worker: int = Field(default=0, ge=0, le=1)
    """GPUs per worker: 0 trains on CPU, 1 on a GPU. Default 0, so that no GPU is used unless you request it."""

    cpus_per_worker: float = Field(default=1.0, gt=0.0)
    """CPUs reserved per worker. With a fraction, several workers share a CPU. Default 1."""

    device: DeviceSection | None = None
    """GPU model of the nodes, from whose data sheet `plan` predicts the step time, and which sets the limit of memory
    if `memory.device_gib` is null. The time was compared with measured steps on `H100` and `H200`; all other models
    were never measured. For a model that is not listed, set its dense bf16 peak in TFLOP/s, its memory in GiB and its
    memory bandwidth in GB/s: `{name: V100, tflops: 125, gib: 31, gbps: 900}`; its links are assumed to be PCIe 4.0.
    Default null: no time is predicted."""

    gpus_per_node: int = Field(default=8, ge=1)
    """GPUs per node, from which `plan` models the traffic between nodes. Default 8."""

    network_gbps: float = Field(default=400.0, gt=0.0)
    """Network bandwidth per GPU in Gbit/s, from which `plan` models the traffic between nodes. Default 400: one adapter
    per GPU."""

    secrets_file: PlacePath | None = None
    """File with `NAME=VALUE` lines, such as access keys, that the command and each worker read from their own node at
    the start. Its variables override the environment. The file must be readable by its owner only (`chmod 600`). It may
    set only credentials ([the list](recover.md#secrets)) and the variables in `secrets_names`. Default null: secrets
    come only from the environment of every node. Secrets are never sent through Ray."""

    secrets_names: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = Field(
        default=(), strict=False
    )
    """Variables that `secrets_file` may set in addition to credentials, such as `AWS_ENDPOINT_URL`. Default: none."""

    data_cpus: float = Field(default=0.25, gt=0.0)
    """CPUs reserved by each task of the data stream. Default 0.25: reading rows is light work."""

    wait_for_nodes: bool = False
    """Whether to wait for missing nodes at the start, for up to `elastic.worker_start_timeout_s`, for example while an
    autoscaler adds them. Default false: a run that does not fit in the cluster is refused immediately."""

    @field_validator("secrets_names")
    @classmethod
    def _steers_no_program(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if refused := [name for name in value if steers_programs(name)]:
            rule = f"lists {', '.join(refused)}, which can change the programs that run or the hosts they connect to"
            raise refusal(rule, "set these variables in the environment of every node")
        return value

    @field_validator("address")
    @classmethod
    def _is_a_ray_address(cls, value: str | None) -> str | None:
        # `text_problems` reports an address that contains a password.
        if value is not None and "@" not in value and not _RAY_ADDRESS.fullmatch(value):
            raise refusal(
                "is not the address of a Ray head",
                "use its host:port (6379 by default), or auto on a node of the cluster; from elsewhere, remove the "
                "setting and submit a job: `ray-ulysses submit CONFIG --address http://HEAD:8265`, or `ray job submit`",
                without_secret(value),
            )
        return value


_TRACKING_SCHEMES = ("http://", "https://", SQLITE, "postgresql", "mysql", "mssql")

TrackerName = Literal["mlflow", "wandb", "tensorboard"]


class TrackingSection(Section):
    """Tracking in MLflow, Weights & Biases or TensorBoard. Training continues if a tracker is unreachable."""

    on_resume: ClassVar[OnResume] = free()

    enabled: bool = True
    """Whether to track the run. Default true."""

    trackers: Annotated[tuple[TrackerName, ...], free("a tracker added later receives all earlier steps")] = Field(
        default=("mlflow",), strict=False, min_length=1
    )
    """Trackers of the run: `mlflow`; `wandb`, which is configured by its own environment variables (`WANDB_API_KEY`,
    `WANDB_ENTITY`, `WANDB_BASE_URL`, `WANDB_MODE`); `tensorboard`, which writes event files to the run's directory.
    Default `[mlflow]`."""

    uri: Annotated[str | None, free("if the server has moved")] = Field(default=None, min_length=1)
    """URI of MLflow's tracking server, such as `http://mlflow:5000`. Required with `run.storage_kind: nfs`, and if
    `run.storage` is in an object store. Default null: an SQLite file `mlflow.db` in `run.storage`."""

    allow_http: bool = False
    """Whether `MLFLOW_TRACKING_USERNAME`, `_PASSWORD` or `_TOKEN` may be sent to an `http://` server on another
    machine, in clear text. Default false: if one of these variables is set, such a server is refused."""

    experiment: Annotated[str, fixed("a tracked run can't move to another experiment")] = Field(
        default="ray-ulysses", min_length=1
    )
    """MLflow experiment, or W&B project, that contains the run. Default `ray-ulysses`."""

    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the run, as a mapping from names to text. Default: none."""

    system_metrics: bool = True
    """Whether to log CPU, memory, disk and network usage of rank 0's node, and the memory of its GPU, with each logged
    step. W&B's client records its own system metrics instead. Default true."""

    @field_validator("trackers")
    @classmethod
    def _are_different(cls, value: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
        if len(set(value)) < len(value):
            raise refusal("lists a tracker twice", "list each tracker once")
        return value

    @field_validator("uri")
    @classmethod
    def _is_a_uri(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None or value == "databricks":
            return value
        if not value.startswith(_TRACKING_SCHEMES) or (value.startswith("http") and not _names_host(value)):
            raise refusal(
                "must be the URI of an MLflow server or database",
                "write http://host:port, https://host or sqlite:///path/to/mlflow.db, or remove the setting",
                without_secret(value),
            )
        base = base_of(info)
        if base is None or not value.startswith(SQLITE):
            return value
        return SQLITE + absolute_location(value.removeprefix(SQLITE), base)


def _names_host(uri: str) -> bool:
    try:
        parts = urlsplit(uri)
        # A password with a slash ends the host early; `text_problems` reports the password.
        return "@" in uri or (parts.hostname is not None and parts.port != 0)
    except ValueError:
        return False


def mlflow_is_on(tracking: TrackingSection) -> bool:
    """Return whether the run is tracked in MLflow."""
    return tracking.enabled and "mlflow" in tracking.trackers
