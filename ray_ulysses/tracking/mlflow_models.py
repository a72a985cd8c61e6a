"""Records each checkpoint in MLflow as a logged model of type ``checkpoint``, linked to the run that wrote it.

A model's tags contain the checkpoint's location and ``state``. One checkpoint per run is tagged ``latest``, and one
is tagged ``best``. Aliases are not used, because they belong to registered models and MLflow reserves "latest". The
description repeats the location and the state, because a model's page does not show tags. In lists, a usable
checkpoint is ``Ready``, a damaged one is ``Failed``, and a deleted or superseded one has no status.
Parameters are shown as columns that MLflow can sort and compare. Metrics are named ``checkpoint/<name>``, because
MLflow adds a model's metrics to its run's curves. All calls are idempotent.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic_core import from_json

from ray_ulysses.tracking.events import CheckpointEvent
from ray_ulysses.tracking.mlflow_client import open_client
from ray_ulysses.tracking.updates import GoneCheckpoint

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run
    from mlflow.store.entities.paged_list import PagedList

KEY_TAG = "ray_ulysses.key"
"""Tag that identifies the MLflow runs created by ray-ulysses."""
MARKS = ("latest", "best")
"""Tags that only one checkpoint of a run has at a time; they move to newer or better checkpoints."""
BEST_BY = ("eval_loss", "loss")
"""Metrics that select the best checkpoint, in order of precedence."""

CheckpointState = Literal["committed", "superseded", "deleted", "damaged"]
"""``superseded``: a later attempt committed the step again; ``deleted``: removed by the retention policy; ``damaged``:
set aside."""
MODEL_TYPE = "checkpoint"
METRIC_PREFIX = "checkpoint/"
DESCRIPTION = "mlflow.note.content"
"""Tag that MLflow renders as the model's description, in Markdown."""

_STATE_MARK = "⚠ "
_STATUS: Mapping[CheckpointState, str] = {
    "committed": "READY",
    "superseded": "UNSPECIFIED",
    "deleted": "UNSPECIFIED",
    "damaged": "FAILED",
}
"""MLflow status by state, shown as a green check, nothing, or a red cross. During recording, a model is ``PENDING``."""
_MODELS_PER_PAGE = 1000
_RUN_ID = re.compile(r"^[0-9a-f]{32}$")
_MOST = 1000
_TAG_CHARACTERS = 8000
_PARAM_CHARACTERS = 500
_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedCheckpoint:
    """A checkpoint as recorded in MLflow; `store` and `step` are sufficient to load it."""

    model_id: str
    """Id of the checkpoint's logged model."""
    is_complete: bool
    """Whether the checkpoint was recorded completely."""
    step: int
    attempt: int
    state: CheckpointState
    path: str
    """Path or URI of the checkpoint folder."""
    store: str
    """Path or URI of the root of the checkpoint store."""
    cursor: Mapping[str, Any]
    """Position in the data at which training resumes."""
    metrics: Mapping[str, float]
    stage: str = ""
    measured: str = ""
    """Identity of the data that the metrics were measured on."""
    marks: tuple[str, ...] = ()
    """Tags from `MARKS` that the checkpoint has."""

    def is_of(self, step: int, attempt: int | None) -> bool:
        """Return whether this is the checkpoint of a step and an attempt; None matches any attempt."""
        return self.step == step and attempt in (None, self.attempt)


def usable(tracked: Iterable[TrackedCheckpoint]) -> list[TrackedCheckpoint]:
    """Return the checkpoints that can be loaded, ordered by attempt and step."""
    live = (one for one in tracked if one.is_complete and one.state == "committed")
    return sorted(live, key=lambda one: (one.attempt, one.step))


def best_tracked(live: Sequence[TrackedCheckpoint]) -> TrackedCheckpoint | None:
    """Return the checkpoint with the lowest finite loss, among the `usable` ones of the newest one's stage and data.

    Ties go to the newest checkpoint.
    """
    compared = [one for one in live if (one.stage, one.measured) == (live[-1].stage, live[-1].measured)]
    for name in BEST_BY:
        if rated := [one for one in compared if math.isfinite(one.metrics.get(name, math.nan))]:
            # Training and evaluation losses are not comparable, so checkpoints without an evaluation are left out.
            return min(reversed(rated), key=lambda one: one.metrics[name])
    return None


def mark_moves(tracked: Iterable[TrackedCheckpoint]) -> tuple[tuple[str, str | None, tuple[str, ...]], ...]:
    """Return the marks to move, as (mark, model that gets the mark or None, models that lose the mark).

    Callers must set each mark before removing it elsewhere, so that readers always find a marked checkpoint.
    """
    tracked = tuple(tracked)
    live = usable(tracked)
    holders = {"latest": live[-1] if live else None, "best": best_tracked(live)}
    moves = []
    for mark in MARKS:
        holder = holders[mark]
        new = None if holder is None or mark in holder.marks else holder.model_id
        old = tuple(one.model_id for one in tracked if mark in one.marks and one is not holder)
        if new is not None or old:
            moves.append((mark, new, old))
    return tuple(moves)


class CheckpointModels:
    """Records the checkpoints of one MLflow run."""

    def __init__(self, client: MlflowClient, *, experiment_id: str, run_id: str, run_tags: Mapping[str, str]) -> None:
        """Create the recorder without sending anything; ``run_tags`` identify the run and its checkpoint store."""
        self._client, self._experiment_id, self._run_id = client, experiment_id, run_id
        self._run_tags = dict(run_tags)

    def update(self, update: CheckpointEvent | GoneCheckpoint) -> None:
        """Record an update, then move the marks."""
        if isinstance(update, CheckpointEvent):
            self.commit(update)
        else:
            self.take_away(update)
        self._move_marks()

    def commit(self, checkpoint: CheckpointEvent) -> None:
        """Record a committed checkpoint, which supersedes earlier attempts' checkpoints of the same step."""
        of_step = self._tracked(f" AND name='{self._name(checkpoint.step)}'")
        own = next((one for one in of_step if one.is_of(checkpoint.step, checkpoint.attempt)), None)
        others = [one for one in of_step if own is None or one.model_id != own.model_id]
        later = [one for one in others if one.attempt > checkpoint.attempt]
        if own is None or not own.is_complete:
            self._record(checkpoint, own, "superseded" if later else "committed")
        for one in others:
            if one not in later and one.state == "committed":
                reason = f"attempt {checkpoint.attempt} committed step {checkpoint.step} again"
                self._set_state(one.model_id, "superseded", reason)
        if not later:
            self._point_run_at(checkpoint)

    def take_away(self, gone: GoneCheckpoint) -> None:
        """Mark a checkpoint as no longer usable, if MLflow has a record of it."""
        for one in self._tracked(f" AND name='{self._name(gone.step)}'"):
            if one.is_of(gone.step, gone.attempt) and (gone.attempt is not None or one.state == "committed"):
                self._set_state(one.model_id, gone.state, gone.reason)

    def _record(self, checkpoint: CheckpointEvent, own: TrackedCheckpoint | None, state: CheckpointState) -> None:
        """Create a checkpoint's model, or complete the model if an earlier process died while recording it."""
        from mlflow.entities import LoggedModelOutput

        description = _description(checkpoint, self._run_tags, self._run_id)
        tags = {**_tags(checkpoint), **self._run_tags, "state": state, DESCRIPTION: description}
        if own is None:
            model_id = self._client.create_logged_model(
                self._experiment_id,
                name=self._name(checkpoint.step),
                source_run_id=self._run_id,
                tags=tags,
                params=_params(checkpoint),
                model_type=MODEL_TYPE,
            ).model_id
        else:
            model_id = own.model_id
            self._client.set_logged_model_tags(model_id, tags)
        for name, value in checkpoint.metrics.items():
            self._client.log_metric(
                self._run_id,
                f"{METRIC_PREFIX}{name}",
                float(value),
                timestamp=int(checkpoint.written_at * 1000),
                step=checkpoint.step,
                synchronous=True,
                model_id=model_id,
            )
        # MLflow rejects an existing output, which happens if the response to an earlier delivery was lost.
        outputs = self._client.get_run(self._run_id).outputs
        if outputs is None or model_id not in {output.model_id for output in outputs.model_outputs}:
            self._client.log_outputs(self._run_id, [LoggedModelOutput(model_id=model_id, step=checkpoint.step)])
        # Finalize last: until then the model is incomplete.
        self._finalize(model_id, state)

    def _set_state(self, model_id: str, state: CheckpointState, reason: str) -> None:
        """Set a checkpoint's state, and prefix the description, which the user may have edited, with the state."""
        text = str(self._client.get_logged_model(model_id).tags.get(DESCRIPTION, ""))
        if text.startswith(_STATE_MARK):
            text = text.partition("\n\n")[2]
        why = f": {reason}" if reason else ""
        tags = {
            "state": state,
            "state_reason": reason,
            DESCRIPTION: f"{_STATE_MARK}**{state.capitalize()}, do not load**{why}\n\n{text}",
        }
        tags = {name: value[:_TAG_CHARACTERS] for name, value in tags.items()}
        self._client.set_logged_model_tags(model_id, tags)
        self._finalize(model_id, state)

    def _finalize(self, model_id: str, state: CheckpointState) -> None:
        from mlflow.entities import LoggedModelStatus

        self._client.finalize_logged_model(model_id, LoggedModelStatus(_STATUS[state]))

    def _point_run_at(self, checkpoint: CheckpointEvent) -> None:
        """Point the run's tags at a checkpoint, unless they already point at a newer checkpoint."""
        tags = self._client.get_run(self._run_id).data.tags
        newest = (_number(tags.get("checkpoint.attempt")) or 0, _number(tags.get("checkpoint.step")) or 0)
        if (checkpoint.attempt, checkpoint.step) < newest:
            return
        own = _tags(checkpoint)
        self._tag_run({name: own.get(name, "") for name in ("step", "attempt", "path", "digest")})

    def _move_marks(self) -> None:
        """Move the tags ``latest`` and ``best``, and point the run's tags at the best checkpoint."""
        tracked = self._tracked("")
        for mark, new, old in mark_moves(tracked):
            if new is not None:
                self._client.set_logged_model_tags(new, {mark: "true"})
            for model_id in old:
                self._client.delete_logged_model_tag(model_id, mark)
        if (best := best_tracked(usable(tracked))) is not None:
            losses = {f"best.{name}": f"{best.metrics[name]:.6g}" for name in BEST_BY if name in best.metrics}
            self._tag_run({"best.step": str(best.step), "best.path": best.path, **losses})

    def _tag_run(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(f"checkpoint.{name}", value[:_TAG_CHARACTERS]) for name, value in values.items()]
        self._client.log_batch(self._run_id, tags=tags, synchronous=True)

    def _name(self, step: int) -> str:
        # MLflow lists the models of all runs together, and refuses some punctuation in their names.
        run = re.sub(r"[^\w-]", "-", self._run_tags["run_name"])
        return f"{run}-step-{step:08d}"

    def _tracked(self, condition: str) -> list[TrackedCheckpoint]:
        return tracked_checkpoints(self._client, self._experiment_id, self._run_id, condition)


def tracked_checkpoints(
    client: MlflowClient, experiment_id: str, run_id: str, condition: str = ""
) -> list[TrackedCheckpoint]:
    """Return all checkpoints that MLflow has recorded for a run, in any state.

    A ``condition`` is an additional filter in MLflow's syntax, such as `` AND name='demo-step-00000010'``.
    """
    query = f"source_run_id='{run_id}'{condition}"
    models = _pages(
        lambda token: client.search_logged_models(
            [experiment_id], filter_string=query, max_results=_MODELS_PER_PAGE, page_token=token
        )
    )
    return [one for one in map(_tracked_checkpoint, models) if one is not None]


def _pages(ask: Callable[[str | None], PagedList[_Item]]) -> Iterator[_Item]:
    """Yield the items of all pages; ``ask`` returns the page of a token, which is None for the first page."""
    page = ask(None)
    yield from page
    while page.token:
        page = ask(page.token)
        yield from page


def _tracked_checkpoint(model: LoggedModel) -> TrackedCheckpoint | None:
    """Return the checkpoint that a model represents, or None for a model that the user logged to the run."""
    tags = model.tags
    step, attempt = _number(tags.get("step")), _number(tags.get("attempt"))
    if step is None or attempt is None:
        return None
    points: Sequence[Any] = model.metrics or ()
    own = [point for point in points if point.key.startswith(METRIC_PREFIX)]
    return TrackedCheckpoint(
        model_id=str(model.model_id),
        is_complete=model.status in _STATUS.values(),
        step=step,
        attempt=attempt,
        state=next((state for state in _STATUS if state == tags.get("state")), "committed"),
        path=str(tags.get("path", "")),
        store=str(tags.get("store", "")),
        cursor=_json(tags.get("cursor")),
        metrics={point.key.removeprefix(METRIC_PREFIX): float(point.value) for point in own},
        stage=str(tags.get("stage", "")),
        measured=str(tags.get("measured", "")),
        marks=tuple(mark for mark in MARKS if tags.get(mark) == "true"),
    )


def _tags(checkpoint: CheckpointEvent) -> dict[str, str]:
    tags = {
        "step": str(checkpoint.step),
        "attempt": _text(checkpoint.attempt),
        "path": checkpoint.path,
        "topology": json.dumps(_topology(checkpoint)),
        "cursor": json.dumps(checkpoint.cursor),
        "digest": f"{checkpoint.digest:016x}",
        "plan_id": str(checkpoint.cursor.get("plan_id", "")),
        "reason": checkpoint.reason,
        "stage": checkpoint.stage,
        "measured": checkpoint.measured,
        "parent": _text(checkpoint.parent),
        "zero_stage": _text(checkpoint.zero_stage),
    }
    return {name: value[:_TAG_CHARACTERS] for name, value in tags.items() if value}


def _topology(checkpoint: CheckpointEvent) -> dict[str, int]:
    sizes = {name: getattr(checkpoint, name) for name in ("world_size", "sp_size", "ring_size")}
    return {**sizes, "dp_size": checkpoint.world_size // checkpoint.sp_size}


def _description(checkpoint: CheckpointEvent, run_tags: Mapping[str, str], run_id: str) -> str:
    """Return the description shown on a checkpoint's page."""
    layout = ", ".join(f"{name} {value}" for name, value in _topology(checkpoint).items())
    zero = f", ZeRO {checkpoint.zero_stage}" if checkpoint.zero_stage is not None else ""
    lines = [
        f"Checkpoint after step {checkpoint.step:,} of run `{run_tags['run_name']}`, written by attempt "
        f"{_text(checkpoint.attempt)} ({layout}{zero}).",
        f"Files: `{checkpoint.path}`",
        "This is training state, which `mlflow` can't load. To make a model directory that Transformers loads: "
        f"`ray-ulysses export {shlex.quote(run_tags['run_dir'])} --step {checkpoint.step}`",
        f"To start another run from this checkpoint: `model.resume_from: mlflow:{run_id}/{checkpoint.step}`",
    ]
    return "\n\n".join(lines)


def _params(checkpoint: CheckpointEvent) -> dict[str, str]:
    """Return a checkpoint's parameters, which MLflow shows as columns and in comparisons."""
    params = {
        "step": str(checkpoint.step),
        "attempt": _text(checkpoint.attempt),
        "reason": checkpoint.reason,
        "stage": checkpoint.stage,
        **{name: str(value) for name, value in _topology(checkpoint).items()},
        "zero_stage": _text(checkpoint.zero_stage),
        "tokens": _text(checkpoint.tokens or None),
        "plan_id": str(checkpoint.cursor.get("plan_id", "")),
        "parent": _text(checkpoint.parent),
    }
    return {name: value[:_PARAM_CHARACTERS] for name, value in params.items() if value}


def _text(value: object | None) -> str:
    return "" if value is None else str(value)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _json(text: str | None) -> dict[str, Any]:
    """Parse a tag as a JSON object; return an empty one if the tag was truncated or edited."""
    try:
        value = from_json(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class MlflowRun:
    """An MLflow run."""

    run_id: str
    name: str
    experiment_id: str
    experiment: str
    """Name of the experiment."""
    started: float
    """Creation time, in seconds since the epoch."""
    step: int | None
    """Step of the newest checkpoint; None if there is no checkpoint."""

    def __str__(self) -> str:
        when = datetime.datetime.fromtimestamp(self.started, datetime.UTC)
        step = "no checkpoint" if self.step is None else f"newest checkpoint at step {self.step}"
        return f"(experiment {self.experiment}, since {when:%Y-%m-%d %H:%M} UTC, {step})"


class MlflowRuns:
    """The runs of all experiments. Every method queries MLflow and propagates its errors."""

    def __init__(self, uri: str, *, allow_http: bool = False) -> None:
        """List the experiments at a tracking URI. See `open_client` for ``allow_http``."""
        self._client = open_client(uri, allow_http=allow_http)
        found = _pages(lambda token: self._client.search_experiments(max_results=_MOST, page_token=token))
        self._experiments = {str(one.experiment_id): str(one.name) for one in found}

    def find(self, run: str) -> list[MlflowRun]:
        """Return the runs with the given id or name, newest first; other tools' runs only if there are no others."""
        if _RUN_ID.match(run) and (by_id := self._search(f"attributes.run_id = '{run}'", 1)):
            return self._runs(by_id)
        quote = '"' if "'" in run else "'"
        if quote in run:
            return []
        found = self._search(f"attributes.run_name = {quote}{run}{quote}", _MOST)
        return self._runs([one for one in found if KEY_TAG in one.data.tags] or found)

    def newest(self, number: int) -> list[MlflowRun]:
        """Return the newest ray-ulysses runs, at most ``number``."""
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
