"""Writes TensorBoard event files with tensorboardX, which requires neither TensorBoard nor TensorFlow."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_ulysses.storage.regular import make_folder
from ray_ulysses.tracking.events import CheckpointEvent
from ray_ulysses.tracking.metric_units import unit_of
from ray_ulysses.tracking.tail import Sink
from ray_ulysses.tracking.updates import AttemptBegan, AttemptOver, SampleText, StepMetrics, Update

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter


class TensorBoardSink(Sink):
    """Delivers updates to event files in one directory, one file per connection; TensorBoard shows them as one run.

    If a command dies between a delivery and its acknowledgement, some points are written twice and overlap in the plot.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: EventsWriter | None = None

    def connect(self) -> str:
        """Create a new event file. Raises OSError if the directory can't be written."""
        # `SummaryWriter` writes asynchronously and hides errors.
        from tensorboardX.event_file_writer import EventsWriter

        if self._writer is not None:
            # This writer failed earlier. Its unwritten updates are delivered again.
            with suppress(OSError, ValueError):
                self._writer.close()
        self._directory.parent.mkdir(parents=True, exist_ok=True)
        make_folder(self._directory, self._directory.parent)
        self._writer = EventsWriter(str(self._directory / "events"), f".{uuid.uuid4().hex[:8]}")
        return "event files"

    def deliver(self, updates: Sequence[Update]) -> None:
        """Write updates in order and flush the file; raises OSError."""
        from tensorboardX.proto.event_pb2 import Event as FileEvent

        assert self._writer is not None
        for update in updates:
            for time, step, summary in _summaries(update):
                written = FileEvent(wall_time=time, step=step)
                written.summary.CopyFrom(summary)
                self._writer.write_event(written)
        self._writer.flush()


def _summaries(update: Update) -> Iterator[tuple[float, int, Any]]:
    """Yield an update's curves and texts as TensorBoard messages, each with its time and step."""
    from tensorboardX import summary

    match update:
        case StepMetrics(time=time, step=step):
            for one in _curves(update.metrics):
                yield time, step, one
        case AttemptBegan(time=time):
            yield time, 0, summary.text("settings", _table(update.params))
            yield time, 0, summary.text("attempt", _table(update.tags))
            for name, text in update.files.items():
                yield time, 0, summary.text(name, text if name.endswith(".md") else "```\n" + text + "\n```")
        case SampleText(time=time, step=step, text=text):
            yield time, step, summary.text("samples", text)
        case CheckpointEvent():
            shown = ("step", "path", "reason", "tokens", "metrics", "stage")
            rows = {name: value for name in shown if (value := getattr(update, name))}
            yield update.written_at, update.step, summary.text("checkpoints", _table(rows))
        case AttemptOver(time=time):
            step = update.step or 0
            for one in _curves(update.metrics):
                yield time, step, one
            ended = {"state": update.status, "step": update.step or "", **update.tags}
            yield time, step, summary.text("state", _table(ended))


def _curves(metrics: Mapping[str, float]) -> Iterator[Any]:
    from tensorboardX import summary

    for name, value in metrics.items():
        unit = unit_of(name)
        one = summary.scalar(name, value, summary_description="" if unit is None else str(unit))
        # tensorboardX leaves it empty, and readers select scalars by it.
        one.value[0].metadata.plugin_data.plugin_name = "scalars"
        yield one


def _table(rows: Mapping[str, object]) -> str:
    """Return a Markdown table, which TensorBoard renders."""
    cells = ((str(name), str(value).replace("|", "\\|").replace("\n", " ")) for name, value in rows.items())
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)])
