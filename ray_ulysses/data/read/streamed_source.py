"""Streams a rank's rows, read by any node of the cluster. The slices are bytewise equal to those of ``DirectSource``.

Each rank has its own stream, so that no rank waits for another. Each row is sent with its number, which is checked.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.read.blocks import Received, Slot, Streams, requested, unpack
from ray_ulysses.data.read.reader import RowReader, RowSlice
from ray_ulysses.data.read.row_source import CLOSE_TIMEOUT_S, DirectSource, LateError, ReadAhead
from ray_ulysses.errors import RunError, UserError

BLOCK_TOKENS = 1 << 22
"""Maximum tokens per block, unless a single row has more. Large blocks make the fixed cost per block negligible."""

FIRST_BLOCK_TOKENS = 1 << 17
"""Maximum tokens in a window's first block, which delays the first row. The limit quadruples with every block."""

MAX_BLOCKS = 64
"""Maximum blocks per window. Ray Data takes milliseconds and tens of kB per block before the first block arrives."""

MAX_ROWS = 128
"""Maximum rows per block. Before a block is read, each row is looked up in the plan, which takes a millisecond."""

_MAX_WINDOW_ROWS = 1024
_MAX_RANGES = 1 << 20


@dataclass(slots=True, eq=False)
class _Handover:
    """State shared by the threads of one pass over the rows."""

    may_start: threading.Event = field(default_factory=threading.Event)
    stopped: threading.Event = field(default_factory=threading.Event)
    num_direct: int = 0
    """Number of rows that were read directly, including fillers. The stream skips these rows."""
    untrained: set[int] = field(default_factory=set)
    """Numbers of the rows that were read directly and have not been trained on yet."""


class StreamedSource(DirectSource):
    """Streams a rank's rows. Until the first block arrives, rows are read directly.

    Args:
        reader: Reads rows of the corpora, which every node must be able to access.
        plan: The run's plan.
        streams: Reads the blocks.
        block_tokens: Maximum tokens per block, unless a single row has more.
        max_blocks: Maximum blocks per window.
        waits_for_first_step: Whether to start the stream only after the first step. The first step is the slowest one,
            and the stream would compete with it for CPUs.
        options: Options of `DirectSource`.
    """

    _late = (
        "either no node has cluster.data_cpus CPUs free for Ray Data, or the storage of the corpora is not responding. "
        "Add nodes, lower cluster.cpus_per_worker or cluster.data_cpus, set data.engine=local, or repair the storage"
    )

    def __init__(
        self,
        reader: RowReader,
        plan: Plan,
        *,
        streams: Streams,
        block_tokens: int = BLOCK_TOKENS,
        max_blocks: int = MAX_BLOCKS,
        waits_for_first_step: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(reader, plan, **options)
        self._sources = reader.sources
        self._streams = streams
        # Loss weights take as many bytes as tokens.
        self._block_tokens = block_tokens // (1 + any(source.has_weights for source in reader.sources))
        self._max_blocks, self._waits_for_first_step = max_blocks, waits_for_first_step
        self._handover = _Handover()

    def close(self) -> None:
        """Stop the stream and reading ahead. Requesting another step restarts both."""
        self._handover.stopped.set()
        super().close()

    def step(self, step: int) -> Iterator[RowSlice]:
        """Yield this rank's slices of a step, like `DirectSource.step`."""
        if self._next_step == step:
            self._handover.may_start.set()
        self.num_direct = 0
        for received in super().step(step):
            self.num_direct += received.row in self._handover.untrained
            self._handover.untrained.discard(received.row)
            yield received

    def _slices_from(self, first_step: int) -> Iterator[RowSlice]:
        self._handover = _Handover()
        if not self._waits_for_first_step:
            self._handover.may_start.set()
        return self._streamed(first_step, self._handover)

    def _streamed(self, first_step: int, handover: _Handover) -> Iterator[RowSlice]:
        rows = self._rows_from(first_step)
        stream: ReadAhead[tuple[int, Slot | None, Received | None]] | None = None
        started = 0.0
        try:
            for row in rows:
                if stream is None and handover.may_start.is_set():
                    stream, started = ReadAhead(self._received(first_step, handover), 1), time.monotonic()
                if stream is not None and stream.is_ready:
                    break
                if stream is not None and self._timeout_s is not None and time.monotonic() - started > self._timeout_s:
                    raise LateError(f"the stream did not start within {self._timeout_s:g} s")
                if row is not None:
                    handover.untrained.add(row)
                handover.num_direct += 1
                yield self._read(row)
            else:
                return
            assert stream is not None
            for _ in itertools.chain([row], rows):
                number, slot, received = stream.next()
                # Skip rows that the stream had ready, but that were read directly in the meantime.
                while number < handover.num_direct:
                    number, slot, received = stream.next()
                yield self._read(None) if slot is None else self._slice(slot.row, received)
        finally:
            handover.stopped.set()
            if stream is not None:
                stream.close(CLOSE_TIMEOUT_S)

    def _received(
        self, first_step: int, handover: _Handover
    ) -> Generator[tuple[int, Slot | None, Received | None], None, None]:
        """Yield each micro-batch that was not read directly: number, slot (None for a filler) and received tokens."""
        for window in self._windows(first_step, handover):
            # Fillers are not requested.
            slots = [[slot for _, slot in block if slot is not None] for block in window]
            blocks = [requested(self._sources, block) for block in slots if block]
            with closing(self._streams.read(blocks, handover.stopped)) as tables:
                received = itertools.chain.from_iterable(map(unpack, tables))
                # Wait for the first real row: a filler must not count as the first row from the stream.
                received = itertools.chain(list(itertools.islice(received, 1)), received)
                for number, slot in itertools.chain.from_iterable(window):
                    one = None if slot is None else next(received, None)
                    if number >= handover.num_direct:
                        yield number, slot, one

    def _windows(self, first_step: int, handover: _Handover) -> Iterator[list[list[tuple[int, Slot | None]]]]:
        """Yield windows of blocks that are requested together. A block lists numbered slots (None for a filler)."""
        window: list[list[tuple[int, Slot | None]]] = []
        block: list[tuple[int, Slot | None]] = []
        block_tokens = num_rows = num_ranges = 0
        for number, row in enumerate(self._rows_from(first_step)):
            if not window and not block and number < handover.num_direct:
                continue
            slot = None if row is None else self._slot(row)
            num_tokens = 0 if slot is None else slot.num_tokens
            most_tokens = min(self._block_tokens, FIRST_BLOCK_TOKENS << 2 * len(window))
            is_full = block_tokens > 0 and num_tokens > 0 and block_tokens + num_tokens > most_tokens
            if is_full or len(block) == MAX_ROWS:
                window.append(block)
                block, block_tokens = [], 0
                if len(window) == self._max_blocks or num_rows >= _MAX_WINDOW_ROWS or num_ranges >= _MAX_RANGES:
                    yield window
                    window, num_rows, num_ranges = [], 0, 0
                    if number < handover.num_direct:
                        continue
            block.append((number, slot))
            block_tokens += num_tokens
            num_rows += 1
            num_ranges += 0 if slot is None else len(slot.ranges)
        if block:
            yield [*window, block]

    def _slot(self, row: int) -> Slot:
        found = self._reader.ranges(row, self._sp_rank, self._sp_size, self._ring_size)
        return Slot(row=row, ranges=np.array(found, dtype=np.int64).reshape(-1, 3))

    def _slice(self, row: int, received: Received | None) -> RowSlice:
        found = None if received is None else received.row
        if received is None or found != row:
            raise RunError(
                f"expected row {row}, received {'nothing' if found is None else f'row {found}'}: Ray Data changed the "
                "order of the blocks; set data.engine=local and report this error"
            )
        if received.error:
            raise UserError(received.error)
        found_slice = self._reader.slice_of(received, "train", row, self._sp_rank, self._sp_size, self._ring_size)
        if received.num_left:
            raise RunError(
                f"row {row} arrived with {received.num_left} extra tokens; set data.engine=local and report this error"
            )
        return found_slice
