"""Looks up the runs of an MLflow server or database by id or name."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray_ulysses.tracking.checkpoint_updates import TrackedCheckpoint
from ray_ulysses.tracking.mlflow_client import open_client
from ray_ulysses.tracking.mlflow_models import tracked_checkpoints

if TYPE_CHECKING:
    from mlflow.entities import Run

KEY_TAG = "ray_ulysses.key"
"""A tag that every run of ray-ulysses has, and no other run."""

_RUN_ID = re.compile(r"^[0-9a-f]{32}$")
_MOST = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class MlflowRun:
    """One MLflow run."""

    run_id: str
    """MLflow's id."""
    name: str
    """Its name in MLflow."""
    experiment_id: str
    """Id of its experiment."""
    experiment: str
    """Name of its experiment."""
    started: float
    """When it was created, in seconds since the epoch."""
    step: int | None
    """Step of its newest checkpoint; None without one."""

    def __str__(self) -> str:
        when = datetime.datetime.fromtimestamp(self.started, datetime.UTC)
        step = "no checkpoint" if self.step is None else f"newest checkpoint at step {self.step}"
        return f"(experiment {self.experiment}, since {when:%Y-%m-%d %H:%M} UTC, {step})"


class MlflowRuns:
    """The runs of all experiments; every method queries MLflow and raises its errors."""

    def __init__(self, uri: str, *, allow_http: bool = False) -> None:
        """Read the experiments at a tracking URI; ``allow_http`` as of `open_client`."""
        self._client = open_client(uri, allow_http=allow_http)
        self._experiments: dict[str, str] = {}
        token = None
        while True:
            page = self._client.search_experiments(max_results=_MOST, page_token=token)
            self._experiments |= {str(one.experiment_id): str(one.name) for one in page}
            token = page.token
            if not token:
                return

    def find(self, run: str) -> list[MlflowRun]:
        """Return the runs with an id or a name, newest first; those of ray-ulysses take precedence."""
        if _RUN_ID.match(run):
            by_id = self._search(f"attributes.run_id = '{run}'", 1)
            if by_id:
                return self._runs(by_id)
        quote = '"' if "'" in run else "'"
        if quote in run:
            return []
        found = self._search(f"attributes.run_name = {quote}{run}{quote}", _MOST)
        return self._runs([one for one in found if KEY_TAG in one.data.tags] or found)

    def newest(self, number: int) -> list[MlflowRun]:
        """Return the newest runs of ray-ulysses."""
        return self._runs(self._search(f"tags.`{KEY_TAG}` LIKE '%'", number))

    def checkpoints(self, run: MlflowRun) -> list[TrackedCheckpoint]:
        """Return all checkpoints of a run, in any state."""
        return tracked_checkpoints(self._client, run.experiment_id, run.run_id)

    def _search(self, query: str, number: int) -> list[Run]:
        order = ["attributes.start_time DESC"]
        return list(
            self._client.search_runs(list(self._experiments), filter_string=query, max_results=number, order_by=order)
        )

    def _runs(self, runs: Sequence[Any]) -> list[MlflowRun]:
        return [
            MlflowRun(
                run_id=str(run.info.run_id),
                name=str(run.info.run_name),
                experiment_id=str(run.info.experiment_id),
                experiment=self._experiments[str(run.info.experiment_id)],
                started=run.info.start_time / 1000,
                step=int(run.data.tags["checkpoint.step"]) if "checkpoint.step" in run.data.tags else None,
            )
            for run in runs
        ]
