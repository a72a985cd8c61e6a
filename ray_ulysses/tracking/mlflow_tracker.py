"""Tracks a run in MLflow, as one MLflow run across all of its attempts.

MLflow is used only in the files ``mlflow_*``, and imported only by the tracker's own thread, so that neither importing
the package nor training waits for it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from ray_ulysses.errors import UserError, without_secret
from ray_ulysses.logging import get_logger
from ray_ulysses.run_names import TRACKING_FILE
from ray_ulysses.storage.location import sqlite_path
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.tracking.checkpoint_updates import CheckpointUpdate, from_event
from ray_ulysses.tracking.delivery import Event, RefusedEvent
from ray_ulysses.tracking.failures import TAG_PREFIX
from ray_ulysses.tracking.mlflow_client import open_client
from ray_ulysses.tracking.mlflow_models import CheckpointModels
from ray_ulysses.tracking.mlflow_runs import KEY_TAG
from ray_ulysses.validation import ContentError, read_json

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Metric, RunInfo

_logger = get_logger(__name__)


_METRICS_PER_BATCH = 1000
_ENTITIES_PER_BATCH = 100
_TAG_CHARACTERS = 8000
_PARAM_CHARACTERS = 6000

_STATE_TAG = "state"
_DESCRIPTION_TAG, _DESCRIPTION_FILE = "mlflow.note.content", "README.md"

_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_ALREADY_EXISTS")
_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "failed": "FAILED"}
"""A run that was stopped on request ended as intended; ``KILLED`` would show it as a failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingIdentity:
    """The MLflow run of a run directory, stored in ``tracking.json``.

    Attributes:
        uri: Tracking URI of the run.
        experiment: Name of the experiment.
        key: A tag of the run, stored before the run is created, so that a death in between creates no second run.
        run_id: MLflow's id of the run; None before it is created.
        experiment_id: MLflow's id of the experiment; None before the run is created.
    """

    uri: str
    experiment: str
    key: str
    run_id: str | None = None
    experiment_id: str | None = None

    @classmethod
    def load(cls, run_dir: Place) -> TrackingIdentity | None:
        """Load it from a run directory; None if the run was never tracked."""
        try:
            return read_json(TypeAdapter(cls), open_store(run_dir).read_whole(TRACKING_FILE))
        except FileNotFoundError:
            return None
        except ContentError as error:
            _logger.warning("%s is damaged (%s): a new MLflow run is created", run_dir / TRACKING_FILE, error)
            return None

    def save(self, run_dir: Place) -> None:
        """Store it in a run directory, atomically even at a power failure."""
        open_store(run_dir, must_exist=True).replace(TRACKING_FILE, [json.dumps(asdict(self)).encode()])


def is_tracked(run_dir: Place) -> bool:
    """Return whether MLflow has a run for this directory."""
    try:
        identity = TrackingIdentity.load(run_dir)
    except OSError:
        return False
    return identity is not None and identity.run_id is not None


class MlflowSink:
    """Delivers events to one MLflow run; only the tracker's thread may use it.

    Parameters are recorded once, metrics without repeated steps, and every checkpoint; see `mlflow_models`.

    Args:
        uri: Tracking URI: ``sqlite:///...`` or the address of a server.
        experiment: Name of the experiment, created if absent.
        run_name: Name of the run in MLflow.
        run_dir: The run's directory, which stores the MLflow run's id.
        allow_http: As of `open_client`.
    """

    def __init__(self, *, uri: str, experiment: str, run_name: str, run_dir: Place, allow_http: bool = False) -> None:
        self._allow_http = allow_http
        self._uri, self._experiment, self._run_name, self._run_dir = uri, experiment, run_name, run_dir
        self._client: MlflowClient
        self._models: CheckpointModels
        self._run_id = ""
        self._experiment_id = ""
        # What was told of this attempt beside its points, and what of it the present run still lacks.
        self._told: list[Event] = []
        self._lacks: list[Event] = []

    def connect(self) -> None:
        """Continue the run that the run directory names, or create one.

        Raises:
            UserError: The experiment was deleted, or credentials would be sent without encryption.
            Exception: Any error of MLflow if it can't be reached.
        """
        self._client = open_client(self._uri, allow_http=self._allow_http)
        self._experiment_id = self._find_experiment()
        identity = TrackingIdentity.load(self._run_dir)
        if identity is not None and (identity.uri, identity.experiment) != (self._uri, self._experiment):
            _logger.warning(
                "the run was tracked at %s, experiment %r; it continues in a new MLflow run at %s, experiment %r",
                *(without_secret(identity.uri), identity.experiment, without_secret(self._uri), self._experiment),
            )
            identity = None
        if identity is None:
            identity = TrackingIdentity(uri=self._uri, experiment=self._experiment, key=uuid.uuid4().hex)
            identity.save(self._run_dir)
        run_id = self._find_run(identity)
        if run_id is None:
            run_id = self._create_run(identity)
            # The spool has no more what a run had that was deleted.
            self._lacks = list(self._told)
        self._run_id = run_id
        found = replace(identity, run_id=self._run_id, experiment_id=self._experiment_id)
        if identity != found:
            found.save(self._run_dir)
        self._models = CheckpointModels(
            self._client,
            experiment_id=self._experiment_id,
            run_id=self._run_id,
            run_tags={"run_name": self._run_name, "run_dir": str(self._run_dir)},
        )
        while self._lacks:
            try:
                self._send([self._lacks[0]])
            except RefusedEvent as error:
                _logger.warning("the new MLflow run is without an event that was refused (%s)", error)
            del self._lacks[0]

    def existing_marks(self, events: Sequence[Event]) -> dict[str, int]:
        """Return the largest step of each metric that the run already has."""
        names = {key for event in events if event["kind"] == "step" for key in event["metrics"]}
        # Of each metric the run has the point of the largest step, in whatever order they came; a whole history has
        # as many points as the run has steps.
        newest = self._client.get_run(self._run_id).data.to_proto().metrics
        return {f"metric:{point.key}": point.step for point in newest if point.key in names}

    def deliver(self, events: Sequence[Event]) -> None:
        """Send events in order, the metrics of consecutive steps together.

        Raises:
            RefusedEvent: MLflow rejects an event as invalid.
        """
        for group in _grouped(events):
            self._send(group)
            self._told = with_event(self._told, group[0])

    def _send(self, group: Sequence[Event]) -> None:
        from mlflow.exceptions import MlflowException

        kind = group[0]["kind"]
        try:
            if kind == "step":
                self._log_steps(group)
            elif kind == "start":
                self._log_start(group[0])
            elif kind == "files":
                self._log_files(group[0])
            elif kind.startswith("checkpoint"):
                self._models.update(_update_of(group[0]), group[0]["time_ms"])
            elif kind == "finish":
                self._log_end(group[0])
        except MlflowException as error:
            # For a run that was deleted everything is refused; the next connection creates another one.
            if error.error_code in _REFUSALS and _is_active(self._client.get_run(self._run_id).info):
                raise RefusedEvent(str(error)) from error
            raise

    def _find_experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            try:
                location = _artifact_root(self._uri)
                return str(self._client.create_experiment(self._experiment, artifact_location=location))
            except MlflowException:  # another run has created it in the meantime
                found = self._client.get_experiment_by_name(self._experiment)
                if found is None:
                    raise
        if not _is_active(found):
            raise UserError(
                f"tracking.experiment={self._experiment!r} was deleted in MLflow; restore it (`mlflow experiments "
                f"restore --experiment-id {found.experiment_id}`), or set another name"
            )
        return str(found.experiment_id)

    def _find_run(self, identity: TrackingIdentity) -> str | None:
        from mlflow.exceptions import MlflowException

        if identity.run_id is not None:
            try:
                run = self._client.get_run(identity.run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                _logger.warning("MLflow no longer has the run %s: a new one is created", identity.run_id)
                return None
            if _is_active(run.info) and run.data.tags.get(KEY_TAG) == identity.key:
                return identity.run_id
            # The directory may be somebody else's, and name any run.
            why = "is not of this run" if _is_active(run.info) else "was deleted"
            _logger.warning("the MLflow run %s %s: a new one is created", identity.run_id, why)
            return None
        query = f"tags.`{KEY_TAG}` = '{identity.key}'"
        runs = self._client.search_runs([self._experiment_id], filter_string=query, max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def _create_run(self, identity: TrackingIdentity) -> str:
        run = self._client.create_run(
            self._experiment_id,
            run_name=self._run_name,
            tags={KEY_TAG: identity.key, "run_dir": str(self._run_dir)},
        )
        return str(run.info.run_id)

    def _log_start(self, event: Event) -> None:
        """Set the tags and log new parameters; a changed one becomes a tag, since MLflow allows no changes."""
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self._run_id).data.params
        params = {key: str(value)[:_PARAM_CHARACTERS] for key, value in event["params"].items()}
        changed = {f"changed.{key}": value for key, value in params.items() if key in known and known[key] != value}
        tags = {**event["tags"], **changed, _STATE_TAG: "running"}
        tags = {key: str(value)[:_TAG_CHARACTERS] for key, value in tags.items()}
        new = [Param(key, value) for key, value in params.items() if key not in known]
        for part in _slices(new, _ENTITIES_PER_BATCH):
            self._client.log_batch(self._run_id, params=part, synchronous=True)
        for part in _slices([RunTag(key, value) for key, value in tags.items()], _ENTITIES_PER_BATCH):
            self._client.log_batch(self._run_id, tags=part, synchronous=True)
        for tag in self._client.get_run(self._run_id).data.tags:
            if tag.startswith(TAG_PREFIX):
                self._client.delete_tag(self._run_id, tag)
        self._client.update_run(self._run_id, status="RUNNING")

    def _log_end(self, event: Event) -> None:
        """Record how the run ended; a tag says whether it was stopped, which MLflow's status does not show."""
        # Events spooled by an earlier version or a later command have no metrics.
        if event.get("metrics"):
            self._log_steps([event])
        step = f" at step {event['step']}" if event.get("step") else ""
        self._client.set_tag(self._run_id, _STATE_TAG, f"{event['status']}{step}")
        for key, value in event.get("tags", {}).items():
            self._client.set_tag(self._run_id, key, str(value)[:_TAG_CHARACTERS])
        self._client.set_terminated(self._run_id, status=_MLFLOW_STATUS[event["status"]])

    def _log_files(self, event: Event) -> None:
        """Store texts as artifacts of the run, and its README as the description unless there is one.

        Raises:
            RefusedEvent: The artifact store fails while MLflow answers: the metrics must not wait for it.
        """
        description = event["files"].get(_DESCRIPTION_FILE)
        if description is not None and _DESCRIPTION_TAG not in self._client.get_run(self._run_id).data.tags:
            self._client.set_tag(self._run_id, _DESCRIPTION_TAG, description[:_TAG_CHARACTERS])
        try:
            for name, text in event["files"].items():
                self._client.log_text(self._run_id, text, name)
        except Exception as error:
            # If MLflow itself is unavailable, this raises too, and both are tried again.
            self._client.get_run(self._run_id)
            raise RefusedEvent(f"the run's files can't be stored as artifacts ({error})") from error

    def _log_steps(self, events: Sequence[Event]) -> None:
        from mlflow.entities import Metric

        points: list[Metric] = [
            # The time of the event, not of its delivery: MLflow's SQL store ignores an identical point.
            Metric(key=key, value=value, timestamp=event["time_ms"], step=event["step"])
            for event in events
            for key, value in event["metrics"].items()
        ]
        for part in _slices(points, _METRICS_PER_BATCH):
            self._client.log_batch(self._run_id, metrics=part, synchronous=True)


def with_event(told: Sequence[Event], event: Event) -> list[Event]:
    """Return what a new run would have to be told of an attempt beside its points, with one more event (pure)."""
    kind = event["kind"]
    if kind == "start":
        return [event]
    if kind == "checkpoint_inventory":
        # It names every checkpoint that there is.
        return [*(one for one in told if not one["kind"].startswith("checkpoint")), event]
    return [*told, event] if kind == "files" or kind.startswith("checkpoint") else list(told)


def _is_active(info: RunInfo | Experiment) -> bool:
    """Return whether a run or an experiment was not deleted."""
    return str(info.lifecycle_stage) == "active"


def _update_of(event: Event) -> CheckpointUpdate:
    """Return the update of an event; a damaged event must not be tried forever."""
    try:
        return from_event(event)
    except (KeyError, ContentError) as error:
        raise RefusedEvent(f"an event about a checkpoint is damaged ({error})") from error


def _grouped(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Yield consecutive steps together, and every other event on its own."""
    for kind, group in groupby(events, key=lambda event: event["kind"]):
        found = list(group)
        yield from [found] if kind == "step" else [[event] for event in found]


def _artifact_root(uri: str) -> str | None:
    """Return the artifact folder for an SQLite file: beside it, where MLflow would use the working directory."""
    database = sqlite_path(uri)
    return None if database is None else (database.absolute().parent / "mlartifacts").as_uri()


def _slices(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
