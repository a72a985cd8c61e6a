"""Tracks a run in MLflow. All attempts of the run share one MLflow run.

Only the files ``mlflow_*`` use MLflow, and only the tracker's thread imports it, so that neither importing the package
nor training waits for MLflow.
"""

from __future__ import annotations

import getpass
import json
import shlex
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from ray_ulysses.errors import UserError, without_secret
from ray_ulysses.logging import get_logger
from ray_ulysses.run_names import TRACKING_FILE
from ray_ulysses.storage.location import sqlite_path
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.tracking.failures import TAG_PREFIX
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.tracking.mlflow_client import open_client
from ray_ulysses.tracking.mlflow_models import KEY_TAG, CheckpointModels
from ray_ulysses.tracking.tail import RefusedUpdate, Sink
from ray_ulysses.tracking.updates import AttemptBegan, AttemptOver, SampleText, StepMetrics, Update
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
_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
"""MLflow status by attempt status."""
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Selects the view for training; MLflow would otherwise ask the user which view to show."""
_DIGEST_CHARACTERS, _NAME_CHARACTERS = 36, 500
_UI_ADDRESS = "http://127.0.0.1:5000"
"""Default address of ``mlflow ui``."""
_TRAINING = "?workflowType=machine_learning"
"""Query that selects the training view; otherwise MLflow 3 shows its GenAI view, with runs as "evaluation runs"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingIdentity:
    """Identifies the MLflow run of a run directory; stored in ``tracking.json``."""

    uri: str
    """Tracking URI."""
    experiment: str
    """Name of the experiment."""
    key: str
    """Tag value that identifies the MLflow run. It is stored before the MLflow run is created, so that a process that
    dies in between does not lead to a second MLflow run."""
    run_id: str | None = None
    """Id of the MLflow run; None until the MLflow run is created."""
    experiment_id: str | None = None
    """Id of the MLflow experiment; None until the MLflow run is created."""

    @classmethod
    def load(cls, run_dir: Place) -> TrackingIdentity | None:
        """Load the identity from a run directory, or return None if the run was never tracked."""
        try:
            return read_json(TypeAdapter(cls), open_store(run_dir).read_whole(TRACKING_FILE))
        except FileNotFoundError:
            return None
        except ContentError as error:
            _logger.warning("%s is damaged (%s); creating a new MLflow run", run_dir / TRACKING_FILE, error)
            return None

    def save(self, run_dir: Place) -> None:
        """Store the identity in a run directory, atomically even if power fails."""
        open_store(run_dir, must_exist=True).replace(TRACKING_FILE, [json.dumps(asdict(self)).encode()])


def is_tracked(run_dir: Place) -> bool:
    """Return whether the run directory has an MLflow run."""
    try:
        identity = TrackingIdentity.load(run_dir)
    except OSError:
        return False
    return identity is not None and identity.run_id is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class MlflowPage:
    """The address of a run's metrics and the command for viewing them."""

    command: str | None
    """Command that serves a database to the browser; None if a server is used."""
    url: str | None
    """Address of the run's metrics page, or of the server until the MLflow run is created; None if unknown."""
    is_run: bool
    """Whether `url` or `command` leads to an existing MLflow run."""

    def in_words(self) -> str:
        """Return the command and the URL in one line."""
        return ", then ".join(part for part in (self.command, self.url) if part is not None)


def mlflow_page(uri: str, run_dir: Place) -> MlflowPage:
    """Return where to view a run's metrics. A password in the tracking URI is redacted."""
    shown = without_secret(uri)
    is_server = uri.startswith(("http://", "https://"))
    is_database = "://" in uri and not is_server and not uri.startswith("databricks")
    try:
        identity = TrackingIdentity.load(run_dir)
    except OSError:
        # Showing the page must not fail because the storage is unavailable.
        identity = None
    path = None
    if identity is not None and identity.uri == uri and None not in (identity.run_id, identity.experiment_id):
        path = f"/#/experiments/{identity.experiment_id}/runs/{identity.run_id}/model-metrics{_TRAINING}"
    if is_server:
        return MlflowPage(command=None, url=shown.rstrip("/") + (path or ""), is_run=path is not None)
    if is_database:
        url = None if path is None else _UI_ADDRESS + path
        command = f"mlflow ui --backend-store-uri {shlex.quote(shown)}"
        return MlflowPage(command=command, url=url, is_run=path is not None)
    return MlflowPage(command=None, url=shown, is_run=False)


class MlflowSink(Sink):
    """Delivers updates to one MLflow run; used only by the tracker's thread.

    Parameters are logged once, and metrics once per step. For checkpoints see `mlflow_models`.

    Args:
        uri: Tracking URI: ``sqlite:///...`` or a server's address.
        experiment: Name of the experiment, which is created if it does not exist.
        run_name: Name of the MLflow run.
        run_dir: The run's directory, which stores the id of the MLflow run.
        location: Path or URI of the checkpoint store.
        allow_http: See `open_client`.
    """

    def __init__(
        self, *, uri: str, experiment: str, run_name: str, run_dir: Place, location: str, allow_http: bool = False
    ) -> None:
        self._location, self._allow_http = location, allow_http
        self._uri, self._experiment, self._run_name, self._run_dir = uri, experiment, run_name, run_dir
        self._client: MlflowClient
        self._models: CheckpointModels
        self._run_id = ""
        self._experiment_id = ""

    def connect(self) -> str:
        """Find or create the MLflow run, and return its id.

        Raises:
            UserError: The experiment was deleted, or credentials would be sent without encryption.
            Exception: Any MLflow error, for example if the server is unreachable.
        """
        self._client = open_client(self._uri, allow_http=self._allow_http)
        self._experiment_id = self._find_experiment()
        identity = TrackingIdentity.load(self._run_dir)
        if identity is not None and (identity.uri, identity.experiment) != (self._uri, self._experiment):
            _logger.warning(
                "the run was tracked at %s, experiment %r; continuing in a new MLflow run at %s, experiment %r",
                *(without_secret(identity.uri), identity.experiment, without_secret(self._uri), self._experiment),
            )
            identity = None
        if identity is None:
            identity = TrackingIdentity(uri=self._uri, experiment=self._experiment, key=uuid.uuid4().hex)
            identity.save(self._run_dir)
        self._run_id = self._find_run(identity) or self._create_run(identity)
        found = replace(identity, run_id=self._run_id, experiment_id=self._experiment_id)
        if identity != found:
            found.save(self._run_dir)
        self._models = CheckpointModels(
            self._client,
            experiment_id=self._experiment_id,
            run_id=self._run_id,
            run_tags={"run_name": self._run_name, "run_dir": str(self._run_dir), "store": self._location},
        )
        return self._run_id

    def existing_marks(self) -> Mapping[str, int]:
        """Return the largest step that the MLflow run has for each metric."""
        # The run's data contains each metric's point with the largest step, regardless of arrival order. A metric's
        # full history would have one point per step.
        newest = self._client.get_run(self._run_id).data.to_proto().metrics
        return {point.key: point.step for point in newest}

    def deliver(self, updates: Sequence[Update]) -> None:
        """Send updates in order, batching the metrics of consecutive steps.

        Raises:
            RefusedUpdate: MLflow rejects an update as invalid.
        """
        for is_step, group in groupby(updates, key=lambda update: isinstance(update, StepMetrics)):
            if is_step:
                self._send(list(group))
            else:
                for update in group:
                    self._send([update])

    def _send(self, group: Sequence[Update]) -> None:
        from mlflow.exceptions import MlflowException

        try:
            match group[0]:
                case StepMetrics():
                    self._log_steps([update for update in group if isinstance(update, StepMetrics)])
                case AttemptBegan() as began:
                    self._log_start(began)
                    self._log_corpora(began)
                    self._log_files(began)
                case SampleText() as sample:
                    self._log_texts({f"samples/step-{sample.step:08d}.md": sample.text})
                case AttemptOver() as over:
                    self._log_end(over)
                case checkpoint:
                    self._models.update(checkpoint)
        except MlflowException as error:
            # If the MLflow run was deleted, all updates are refused, and the next connection creates a new run.
            if error.error_code in _REFUSALS and _is_active(self._client.get_run(self._run_id).info):
                raise RefusedUpdate(str(error)) from error
            raise

    def _find_experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            database = sqlite_path(self._uri)
            # MLflow's default folder for artifacts of an SQLite database would be in the working directory.
            location = None if database is None else (database.absolute().parent / "mlartifacts").as_uri()
            try:
                return str(
                    self._client.create_experiment(self._experiment, artifact_location=location, tags=_EXPERIMENT_TAGS)
                )
            except MlflowException:  # another process created the experiment in the meantime
                found = self._client.get_experiment_by_name(self._experiment)
                if found is None:
                    raise
        if not _is_active(found):
            raise UserError(
                f"tracking.experiment={self._experiment!r} was deleted in MLflow; restore the experiment (`mlflow "
                f"experiments restore --experiment-id {found.experiment_id}`), or use another name"
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
                _logger.warning("MLflow run %s no longer exists; creating a new MLflow run", identity.run_id)
                return None
            if _is_active(run.info) and run.data.tags.get(KEY_TAG) == identity.key:
                return identity.run_id
            # Another user may have written the directory's files, which can contain any MLflow run's id.
            why = "belongs to another run" if _is_active(run.info) else "was deleted"
            _logger.warning("MLflow run %s %s; creating a new MLflow run", identity.run_id, why)
            return None
        query = f"tags.`{KEY_TAG}` = '{identity.key}'"
        runs = self._client.search_runs([self._experiment_id], filter_string=query, max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def _create_run(self, identity: TrackingIdentity) -> str:
        # The journal's first event may be older than the connection: after an outage, or in a tracker added later.
        first = next(iter(read_entries(self._run_dir, ends_only=True)), None)
        run = self._client.create_run(
            self._experiment_id,
            run_name=self._run_name,
            start_time=None if first is None else int(first.time * 1000),
            tags={
                KEY_TAG: identity.key,
                "run_dir": str(self._run_dir),
                "mlflow.source.name": "ray-ulysses train",
                "mlflow.source.type": "LOCAL",
                **_user(),
            },
        )
        return str(run.info.run_id)

    def _log_start(self, began: AttemptBegan) -> None:
        """Set tags and log new parameters. A changed parameter becomes a tag, since MLflow parameters are immutable."""
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self._run_id).data.params
        params = {key: str(value)[:_PARAM_CHARACTERS] for key, value in began.params.items()}
        changed = {f"changed.{key}": value for key, value in params.items() if key in known and known[key] != value}
        told = {**began.tags, **changed, _STATE_TAG: "running"}
        tags = {key: str(value)[:_TAG_CHARACTERS] for key, value in told.items()}
        new = [Param(key, value) for key, value in params.items() if key not in known]
        for part in _slices(new, _ENTITIES_PER_BATCH):
            self._client.log_batch(self._run_id, params=part, synchronous=True)
        for part in _slices([RunTag(key, value) for key, value in tags.items()], _ENTITIES_PER_BATCH):
            self._client.log_batch(self._run_id, tags=part, synchronous=True)
        for tag in self._client.get_run(self._run_id).data.tags:
            if tag.startswith(TAG_PREFIX):
                self._client.delete_tag(self._run_id, tag)
        self._client.update_run(self._run_id, status="RUNNING")

    def _log_corpora(self, began: AttemptBegan) -> None:
        """Log the corpora as dataset inputs. Their digest is the plan's id, which covers the data and its order."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = [
            DatasetInput(
                Dataset(
                    # MLflow merges inputs with the same name and digest.
                    name=path[-_NAME_CHARACTERS:],
                    digest=began.plan_id[:_DIGEST_CHARACTERS],
                    source_type="ray_ulysses_corpus",
                    source=json.dumps({"uri": path}),
                ),
                [InputTag("mlflow.data.context", context)],
            )
            for context, paths in (("training", began.corpora), ("evaluation", began.validation))
            for path in paths
        ]
        if inputs:
            self._client.log_inputs(self._run_id, datasets=inputs)

    def _log_end(self, over: AttemptOver) -> None:
        """Record how and when the run ended. The tag also says at which step."""
        if over.metrics:
            self._log_steps([StepMetrics(time=over.time, step=over.step or 0, metrics=over.metrics)])
        step = f" at step {over.step}" if over.step else ""
        self._client.set_tag(self._run_id, _STATE_TAG, f"{over.status}{step}")
        for key, value in over.tags.items():
            self._client.set_tag(self._run_id, key, str(value)[:_TAG_CHARACTERS])
        self._client.set_terminated(self._run_id, status=_MLFLOW_STATUS[over.status], end_time=int(over.time * 1000))

    def _log_files(self, began: AttemptBegan) -> None:
        """Store the run's files as artifacts, and its README as the description unless the run has a description."""
        description = began.files.get(_DESCRIPTION_FILE)
        if description is not None and _DESCRIPTION_TAG not in self._client.get_run(self._run_id).data.tags:
            self._client.set_tag(self._run_id, _DESCRIPTION_TAG, description[:_TAG_CHARACTERS])
        self._log_texts(began.files)

    def _log_texts(self, texts: Mapping[str, str]) -> None:
        """Store texts as artifacts.

        Raises:
            RefusedUpdate: The artifact store fails although MLflow is available. Metrics must not wait for that store.
        """
        try:
            for name, text in texts.items():
                self._client.log_text(self._run_id, text, name)
        except Exception as error:
            # If MLflow itself is unavailable, this call raises too, and the update is retried.
            self._client.get_run(self._run_id)
            raise RefusedUpdate(f"the run's files can't be stored as artifacts ({error})") from error

    def _log_steps(self, steps: Sequence[StepMetrics]) -> None:
        from mlflow.entities import Metric

        points: list[Metric] = [
            # The time of the event, not of its delivery: MLflow's SQL store ignores an identical point.
            Metric(key=key, value=value, timestamp=int(one.time * 1000), step=one.step)
            for one in steps
            for key, value in one.metrics.items()
        ]
        for part in _slices(points, _METRICS_PER_BATCH):
            self._client.log_batch(self._run_id, metrics=part, synchronous=True)


def _user() -> dict[str, str]:
    # A container may run under a user id without a name.
    with suppress(KeyError, OSError):
        return {"mlflow.user": getpass.getuser()}
    return {}


def _is_active(info: RunInfo | Experiment) -> bool:
    """Return whether a run or an experiment exists and was not deleted."""
    return str(info.lifecycle_stage) == "active"


def _slices(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
