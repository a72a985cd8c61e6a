"""Settings of how it runs: parallel, memory, checkpoint, elastic, tracking and cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from ray_ulysses.config.section import Section, refusal
from ray_ulysses.storage.location import LocationError, parse_location, without_secret

_TRACKING_SCHEMES = ("http://", "https://", "sqlite:///", "postgresql", "mysql", "mssql")


class ParallelSection(Section):
    """How the workers share a row. The world is dp x sp; dp follows from `cluster.workers`."""

    sp_size: int = Field(default=1, ge=1, le=65_536)
    """Ranks that share one row, each with a slice of its tokens (the `sp` axis). It must divide
    `cluster.workers`; ranks are level where it divides the model's attention heads. Default 1: rows are not
    shared."""

    ring_size: int | None = Field(default=None, ge=1, le=65_536)
    """Ring part of `sp_size`: keys and values go round this many ranks, and heads are exchanged over
    `sp_size / ring_size`, which may not exceed the model's attention heads. Default null: 1 up to as many ranks as
    heads, beyond that the smallest that leaves a divisor of the heads."""

    allowed_sp: tuple[Annotated[int, Field(ge=1, le=65_536)], ...] | None = Field(default=None, strict=False)
    """Values of `sp_size` that the run may ever use, in ascending order. Rows are padded to their least
    common multiple (twice a size that takes a ring), for the whole run. Default null: every divisor of the model's
    attention heads, and `sp_size`."""

    @field_validator("allowed_sp")
    @classmethod
    def _is_ascending(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and (not value or list(value) != sorted(set(value))):
            raise refusal("must be different numbers in ascending order", "write it as [1, 2, 4], or null")
        return value


class MemorySection(Section):
    """What is traded for memory, and the memory that `plan` compares with."""

    gradient_checkpointing: bool = True
    """Whether a layer's activations are computed again in the backward pass instead of kept. Default true:
    at long context they don't fit otherwise."""

    attention_output: Literal["both", "kernel", "none"] = "both"
    """What gradient checkpointing keeps of attention: its output in the layouts of the kernel and of the model
    (`both`: 5 collectives per layer), in the kernel's alone (`kernel`: 6 collectives, one output less), or nothing
    (`none`: attention runs twice). Default `both`, the fastest."""

    attention_chunks: int = Field(default=1, ge=1)
    """Shares of the key-value heads that are exchanged and attended one after the other: with more, the
    exchange's buffers shrink and collectives multiply. Default 1: all at once."""

    zero_stage: Literal[1, 2, 3] = 3
    """What is shared out over the workers (DeepSpeed's ZeRO): the optimizer's state (1), gradients too (2), or
    the weights as well (3). Default 3; a smaller stage gathers less where the weights fit."""

    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where the optimizer's state lives: `none` leaves it on the GPU, `cpu` moves it to host memory, `nvme` to
    files under `nvme_path` (`zero_stage` 3 only). Default `none`, which is faster where it fits."""

    nvme_path: str | None = Field(default=None, min_length=1)
    """Directory on a local disk of each node for `offload_optimizer: nvme`. Default null: there is none."""

    device_gib: float | None = Field(default=None, gt=0.0)
    """Memory of one GPU, in GiB, that `plan` holds its estimate against; a run that can't fit is refused.
    Default null: the estimate is printed and nothing is refused."""

    host_gib: float | None = Field(default=None, gt=0.0)
    """Host memory for one worker, in GiB, that `plan` holds its estimate against. Default null: nothing is
    refused."""


class CheckpointSection(Section):
    """When state is saved, how, and how much of it is kept."""

    storage: str | None = Field(default=None, min_length=1)
    """Where checkpoints are kept, if not in the run's directory: a path that every node sees, or the URI of an object
    store such as `s3://bucket/prefix`; they lie there under the run's name. Credentials come from the environment of
    every node, or from `cluster.secrets_file`. Default null: `checkpoints/` in the run's directory."""

    every_steps: int | None = Field(default=100, ge=1)
    """Steps between two checkpoints, in steps; null for no such rule. Default 100."""

    every_minutes: float | None = Field(default=None, gt=0.0)
    """Minutes between two checkpoints, beside `every_steps`: whichever comes first. Default null: no such
    rule."""

    keep_last: int = Field(default=3, ge=1)
    """Committed checkpoints that are kept. An older one is deleted only after its successor is committed.
    Default 3: one to use, one in case it is damaged, and one to look back at."""

    keep_every_steps: int | None = Field(default=None, ge=1)
    """Checkpoints whose step is a multiple of this are kept for good, in steps. Default null: none."""

    keep_best: int = Field(default=0, ge=0)
    """So many checkpoints with the lowest `best_metric` are kept as well. Default 0."""

    best_metric: Literal["eval_loss", "loss"] = "eval_loss"
    """What `keep_best` goes by: the loss of the evaluation at the checkpoint's step, or its training loss.
    Default `eval_loss`; a checkpoint without it is not among the best."""

    save_at_end: bool = True
    """Whether a run that stops, by its stop step or by a signal, saves first. Default true, so that it can go
    on."""

    host_buffers: int = Field(default=2, ge=0, le=2)
    """Copies of a rank's state in host memory from which checkpoints are written while training goes on: 2 lets one
    be taken while another is being written, 1 waits for it, 0 takes no copy and stops training until the checkpoint
    is committed. Default 2; the second is made when it is first needed."""

    save_timeout_s: float = Field(default=3600.0, gt=0.0)
    """Longest that writing one checkpoint may take, in seconds, before the run ends: a storage that hangs is a
    fault. Default 3600, which writes 360 GB a rank at 100 MB/s; raise it for slower storage."""

    max_failed_saves: int = Field(default=2, ge=0)
    """Saves in a row that may fail, on a full disk or a storage that is away, before the run ends, if they have also
    been failing for `failed_saves_patience_s`; each is repeated with the state of the next step. Default 2: a short
    outage costs nothing, a long one is not trained into."""

    failed_saves_patience_s: float = Field(default=300.0, ge=0.0)
    """How long saves may go on failing before the run ends, in seconds, however many have failed: with fast steps
    `max_failed_saves` are used up in a moment. Beyond that number the tries come ever less often, up to 30 s apart.
    Default 300."""

    @field_validator("storage")
    @classmethod
    def _is_a_store(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                parse_location(value)
            except LocationError as error:
                raise refusal(error.rule, error.hint, error.shown) from error
        return value


class ElasticSection(Section):
    """How much a run puts up with before it ends."""

    max_failures: int = Field(default=3, ge=0)
    """Failures that a command survives by starting its workers again from the newest checkpoint. Only those count
    that came within `failure_window_s` and since the last progress, which is a newer checkpoint. Default 3:
    enough for lost nodes, few enough that a fault of the program ends the run."""

    failure_window_s: float = Field(default=86400.0, gt=0.0)
    """How long a failure counts against `max_failures`, in seconds. Default 86400: one day."""

    worker_start_timeout_s: float = Field(default=300.0, gt=0.0)
    """Longest wait for all workers to be there, at the start and after the loss of some, in seconds. Default 300,
    which covers pulling an image."""

    collective_timeout_s: float = Field(default=600.0, gt=0.0)
    """Longest that one collective may take, in seconds, before the attempt counts as failed. Default 600,
    well above the slowest honest step between two collectives."""


class TrackingSection(Section):
    """What MLflow is told. An outage of MLflow never stops training."""

    enabled: bool = True
    """Whether the run is tracked in MLflow. Default true."""

    uri: str | None = Field(default=None, min_length=1)
    """Tracking server, such as `http://mlflow:5000`; it is required with `run.storage_kind: nfs`. Default
    null: an SQLite file `mlflow.db` in `run.storage`."""

    experiment: str = Field(default="ray-ulysses", min_length=1)
    """Experiment that the run is filed under. Default `ray-ulysses`."""

    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the MLflow run, text to text. Default none."""

    @field_validator("uri")
    @classmethod
    def _is_a_uri(cls, value: str | None) -> str | None:
        if value is not None and value != "databricks" and not value.startswith(_TRACKING_SCHEMES):
            raise refusal(
                "must be the URI of an MLflow server or database",
                "write http://host:port, https://host or sqlite:///path/to/mlflow.db, or leave it out",
                without_secret(value),
            )
        return value


class ClusterSection(Section):
    """What is asked of Ray."""

    address: str | None = Field(default=None, min_length=1)
    """Address of a Ray cluster. Default null: the one that `RAY_ADDRESS` names, else a Ray of its own on this
    machine."""

    workers: int = Field(ge=1, le=65_536)
    """Training workers, one a GPU: a multiple of `parallel.sp_size`."""

    gpus_per_worker: int = Field(default=0, ge=0, le=1)
    """GPUs of one worker: 0 trains on CPU, 1 on a GPU. Default 0, so that nothing is taken unasked."""

    cpus_per_worker: float = Field(default=1.0, gt=0.0)
    """CPUs that one worker reserves; a fraction lets several share one. Default 1."""

    secrets_file: str | None = Field(default=None, min_length=1)
    """File of `NAME=VALUE` lines, such as access keys, that the command and each worker read on their own node at
    the start; its variables go before those of the environment. Nobody but its owner may be able to read it (`chmod
    600`). Default null: secrets come from the environment of every node alone. They are never sent through Ray."""

    data_cpus: float = Field(default=0.25, gt=0.0)
    """CPUs that one task of the data stream reserves. Default 0.25: reading rows is light work."""

    wait_for_nodes: bool = False
    """Whether nodes that the cluster lacks at the start are waited for, up to `elastic.worker_start_timeout_s`, as
    where an autoscaler adds them. Default false: what the cluster can't hold is refused at once."""
