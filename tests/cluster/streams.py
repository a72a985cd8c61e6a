"""Streams for tests: no row is read directly once a block could have come, and each block calls back where it is read.

A source reads directly until its stream has come, which takes longer than all rows of a small plan.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from ray_ulysses.cluster.stream import RayStreams
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import CorpusSet, PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.read.blocks import Block, Slot, requested
from ray_ulysses.data.read.reader import RowReader, RowSlice
from ray_ulysses.data.read.streamed_source import StreamedSource
from tests.polling import wait_until

WAIT_S = 60.0


@dataclass(frozen=True)
class Reads:
    """Notes in a folder who reads which block; passed as ``before_read``."""

    folder: Path
    held: int | None = None

    def __call__(self, number: int) -> None:
        """Note a read."""
        self.folder.mkdir(exist_ok=True)
        note = self.folder / uuid.uuid4().hex
        note.write_text(f"{number} {ray.get_runtime_context().get_node_id()} {os.getpid()}")
        note.rename(note.with_suffix(".read"))
        if number == self.held:
            wait_until((self.folder / "go").exists, "the block may be read", timeout_s=2 * WAIT_S)

    def go(self) -> None:
        """Let the block be read."""
        (self.folder / "go").touch()

    def noted(self) -> list[tuple[int, str, int]]:
        texts = [note.read_text().split() for note in self.folder.glob("*.read")]
        return sorted((int(number), node, int(process)) for number, node, process in texts)

    def of(self, number: int) -> list[tuple[str, int]]:
        return [(node, process) for one, node, process in self.noted() if one == number]


class WatchedStreams(RayStreams):
    """Ray Data's streams."""

    def __init__(self, before_read: Callable[[int], None] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._before_read, self.has_come = before_read, threading.Event()
        self.num_rows, self.has_ended = 0, False

    def read(self, blocks: Sequence[Block], stopped: threading.Event) -> Generator[pa.Table, None, None]:
        if self._before_read is not None:
            calls = [_Call(self._before_read, number, block.request) for number, block in enumerate(blocks)]
            blocks = [replace(block, request=pickle.dumps(call)) for block, call in zip(blocks, calls, strict=True)]
        self.has_come.clear()
        tables = super().read(blocks, stopped)
        try:
            # A variable would hold a block that was taken.
            yield from map(self._came, tables)
        finally:
            tables.close()
            self.has_ended = True
            self.has_come.set()

    def _came(self, table: pa.Table) -> pa.Table:
        self.num_rows += table.num_rows
        self.has_come.set()
        return table


@dataclass(frozen=True)
class _Call:
    """Opens a request once a function has returned."""

    before_read: Callable[[int], None]
    number: int
    request: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.before_read, self.number, self.request)


def _opened(before_read: Callable[[int], None], number: int, request: bytes) -> Any:
    before_read(number)
    return pickle.loads(request)


class _PatientReader(RowReader):
    """Reads rows only once the stream has come, and then slowly, so that the stream takes over at once."""

    def __init__(
        self, source: PlannedSource, plan: Plan, streams: WatchedStreams, wait_s: float, far: PlannedSource
    ) -> None:
        super().__init__(CorpusSet([source]), plan)
        self._streams, self._wait_s, self._far, self._num_read = streams, wait_s, far, 0

    @property
    def sources(self) -> tuple[PlannedSource, ...]:
        return (self._far,)

    def read(self, *args: Any, **options: Any) -> RowSlice:
        streams = self._streams
        if streams.has_come.wait(self._wait_s):
            self._num_read += 1
            wait_until(lambda: streams.has_ended or streams.num_rows > self._num_read, "the stream is ahead")
        # On a busy machine a row takes a moment from there to the reader, and the stream takes over once it has come.
        time.sleep(1.0)
        return super().read(*args, **options)


def streamed_source(
    source: PlannedSource,
    plan: Plan,
    streams: RayStreams,
    *,
    far: PlannedSource | None = None,
    timeout_s: float = WAIT_S,
    **options: Any,
) -> StreamedSource:
    reader = RowReader(CorpusSet([source]), plan)
    if isinstance(streams, WatchedStreams):
        reader, options["waits_for_first_step"] = _PatientReader(source, plan, streams, timeout_s, far or source), False
    return StreamedSource(reader, plan, streams=streams, timeout_s=timeout_s, **options)


def wide_blocks(corpus: Corpus, source: PlannedSource, count: int, num_tokens: int) -> list[Block]:
    document = int(np.argmax(corpus.lengths))
    length = int(corpus.lengths[document])
    ranges = np.array([(document, 0, length)] * (num_tokens // length), dtype=np.int64)
    return [requested([source], [Slot(row=number, ranges=ranges)]) for number in range(count)]


def stored_bytes() -> int:
    """Return the bytes in the object store."""
    address = get_state_from_address(ray.get_runtime_context().gcs_address)
    return int(get_memory_info_reply(address).store_stats.object_store_bytes_used)


def executions() -> set[Any]:
    return {one for one in threading.enumerate() if one.name.startswith("StreamingExecutor")}


def take_streamed(source: StreamedSource, steps: range) -> list[RowSlice]:
    received, num_direct = list[RowSlice](), 0
    for step in steps:
        received += source.step(step)
        num_direct += source.num_direct or 0
    assert num_direct <= len(received) // 2, f"{num_direct} of {len(received)} slices were read directly"
    return received
