"""A tail with scripted updates, which are stored next to its cursor and survive the process, like a journal."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray_ulysses.run_names import cursor_key
from ray_ulysses.tracking.tail import End, Sink, Tail
from ray_ulysses.tracking.updates import AttemptBegan, AttemptOver, RunStatus, StepMetrics, Update
from ray_ulysses.validation import parse_json


class Script:
    """The updates in a file, without steps that were logged before."""

    def __init__(self, path: Path, delivered: Mapping[str, int]) -> None:
        self._path, self._delivered = path, delivered.get("script", 0)
        self._offset, self._marks = 0, dict[str, int]()

    def read(self) -> Iterator[tuple[Update, End | None]]:
        with self._path.open("rb") if self._path.exists() else open("/dev/null", "rb") as stream:
            stream.seek(self._offset)
            while True:
                try:
                    update = self._fresh(pickle.load(stream))
                except (EOFError, pickle.UnpicklingError):
                    return
                self._offset = stream.tell()
                if update is not None and self._offset > self._delivered:
                    yield update, ("script", self._offset)

    def _fresh(self, update: Update) -> Update | None:
        if not isinstance(update, StepMetrics):
            return update
        fresh = {name: value for name, value in update.metrics.items() if update.step > self._marks.get(name, -1)}
        self._marks.update(dict.fromkeys(fresh, update.step))
        return replace(update, metrics=fresh) if fresh else None


class ScriptedTracker:
    """Tracks scripted attempts."""

    def __init__(self, sink: Sink, run_dir: Path, name: str = "mlflow", *, drain_s: float = 60.0, **options: Any):
        self._path, self._cursor = run_dir / f"script-{name}", run_dir / cursor_key(name)
        self._drain_s = drain_s
        given = {"retry_s": (0.01, 0.02), "poll_s": 0.01, **options}
        self.tail = Tail(name, sink, run_dir, lambda delivered: Script(self._path, delivered).read, **given)

    def start(self, params: Any = None, tags: Any = None, files: Any = None) -> None:
        self.log(AttemptBegan(time=time.time(), params=params or {}, tags=tags or {}, files=files or {}))
        self.tail.start()

    def log(self, update: Update) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as stream:
            pickle.dump(update, stream)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.log(StepMetrics(time=time.time(), step=step, metrics=metrics))

    def finish(self, status: RunStatus, step: int | None = None, metrics: Any = None, tags: Any = None) -> None:
        self.log(AttemptOver(time=time.time(), status=status, step=step, metrics=metrics or {}, tags=tags or {}))
        self.drain()

    def drain(self) -> bool:
        self.tail.stop()
        return self.tail.wait(self._drain_s)

    def catch_up(self) -> bool:
        """Deliver the backlog without a new attempt; return whether everything was delivered."""
        self.tail.start()
        self.drain()
        return self.is_delivered()

    def is_delivered(self) -> bool:
        if not self._cursor.exists():
            return not self._path.exists()
        return bool(parse_json(self._cursor.read_bytes())["files"].get("script") == self._path.stat().st_size)
