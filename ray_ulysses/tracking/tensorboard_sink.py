"""Writes a run as TensorBoard event files, with tensorboardX, which needs neither TensorBoard nor TensorFlow."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_ulysses.storage.regular import make_folder
from ray_ulysses.tracking.delivery import Event, Sink
from ray_ulysses.tracking.metric_units import unit_of

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter


class TensorBoardSink(Sink):
    """Delivers events to event files in one directory, a new file per attempt; TensorBoard shows them as one run.

    An attempt that died between a delivery and its acknowledgement leaves points that come twice, which are drawn over
    one another.

    Args:
        directory: Where the files are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: EventsWriter | None = None

    def connect(self) -> None:
        """Begin a new event file; raises OSError if the directory can't be written."""
        # Not `SummaryWriter`, whose thread writes later and keeps errors to itself.
        from tensorboardX.event_file_writer import EventsWriter

        if self._writer is not None:
            # Of an earlier failure: what it did not take is delivered again.
            with suppress(OSError, ValueError):
                self._writer.close()
        self._directory.parent.mkdir(parents=True, exist_ok=True)
        make_folder(self._directory, self._directory.parent)
        self._writer = EventsWriter(str(self._directory / "events"), f".{uuid.uuid4().hex[:8]}")

    def deliver(self, events: Sequence[Event]) -> None:
        """Write events in order and flush them to the disk; raises OSError."""
        from tensorboardX.proto.event_pb2 import Event as FileEvent

        assert self._writer is not None
        for event in events:
            for summary in _summaries(event):
                written = FileEvent(wall_time=event["time_ms"] / 1000, step=int(event.get("step") or 0))
                written.summary.CopyFrom(summary)
                self._writer.write_event(written)
        self._writer.flush()


def _summaries(event: Event) -> Iterator[Any]:
    """Yield an event's curves and texts, as TensorBoard's own messages."""
    from tensorboardX import summary

    kind = event["kind"]
    if kind in ("step", "finish"):
        for name, value in (event.get("metrics") or {}).items():
            unit = unit_of(name)
            yield summary.scalar(name, value, summary_description="" if unit is None else str(unit))
    if kind == "start":
        yield summary.text("settings", _table(event["params"]))
        yield summary.text("attempt", _table(event["tags"]))
    elif kind == "files":
        for name, text in event["files"].items():
            yield summary.text(name, text if name.endswith(".md") else "```\n" + text + "\n```")
    elif kind == "checkpoint":
        shown = ("step", "path", "reason", "tokens", "metrics", "stage")
        yield summary.text("checkpoints", _table({name: event[name] for name in shown if event.get(name)}))
    elif kind == "finish":
        ended = {"state": event["status"], "step": event.get("step") or "", **event.get("tags", {})}
        yield summary.text("state", _table(ended))


def _table(rows: Mapping[str, object]) -> str:
    """Return a table in Markdown, which TensorBoard renders."""
    cells = ((str(name), str(value).replace("|", "\\|").replace("\n", " ")) for name, value in rows.items())
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)])
