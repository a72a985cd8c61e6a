"""The section of the trackers."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator

from ray_ulysses.config.section import Section, base_of, refusal
from ray_ulysses.errors import without_secret
from ray_ulysses.storage.location import SQLITE, absolute_location

_TRACKING_SCHEMES = ("http://", "https://", SQLITE, "postgresql", "mysql", "mssql")

TrackerName = Literal["mlflow", "wandb", "tensorboard"]


class TrackingSection(Section):
    """Tracking in MLflow, Weights & Biases or TensorBoard. An outage of one never stops training."""

    enabled: bool = True
    """Whether the run is tracked. Default true."""

    trackers: tuple[TrackerName, ...] = Field(default=("mlflow",), strict=False, min_length=1)
    """What records it: `mlflow`; `wandb`, which takes account, server and mode from its own variables (`WANDB_API_KEY`,
    `WANDB_ENTITY`, `WANDB_BASE_URL`, `WANDB_MODE`); `tensorboard`, event files in the run's directory. Default
    `[mlflow]`."""

    uri: str | None = Field(default=None, min_length=1)
    """Tracking server, such as `http://mlflow:5000`; required with `run.storage_kind: nfs` and
    where `run.storage` is an object store. Default null: an SQLite file `mlflow.db` in `run.storage`."""

    allow_http: bool = False
    """Whether `MLFLOW_TRACKING_USERNAME`, `_PASSWORD` or `_TOKEN` may be sent to an `http://` server on another
    machine, in clear text. Default false: with one of them set, such a server is refused."""

    experiment: str = Field(default="ray-ulysses", min_length=1)
    """Experiment of MLflow, or project of W&B, that the run belongs to. Default `ray-ulysses`."""

    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the run, text to text. Default none."""

    system_metrics: bool = True
    """Whether CPU, memory, disk and network of rank 0's node, and the memory of its GPU, are recorded with every logged
    step. W&B's client records its own instead. Default true."""

    @field_validator("trackers")
    @classmethod
    def _are_different(cls, value: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
        if len(set(value)) < len(value):
            raise refusal("names one twice", "name each of them once")
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
