"""A rank's rows from a stream that is read anywhere on the cluster, byte for byte those of ``DirectSource``.

Each rank has a stream of its own, so that no rank waits for another; a row carries its number, which is checked.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.read.blocks import Received, Slot, Streams, requested, unpack
from ray_ulysses.data.read.read_ahead import LateError, ReadAhead
from ray_ulysses.data.read.reader import RowReader, RowSlice, slice_row, slice_stretches
from ray_ulysses.data.read.row_source import CLOSE_TIMEOUT_S, DirectSource
from ray_ulysses.errors import RunError, UserError

BLOCK_TOKENS = 1 << 22
"""Tokens per block, unless one row has more: what a block costs apart from its tokens is then little."""

FIRST_BLOCK_TOKENS = 1 << 17
"""Tokens of the first block of a window, whose first row waits for all of it; each next one has four times as many."""

MAX_BLOCKS = 64
"""Blocks per window: Ray Data takes milliseconds and tens of kilobytes for each before the first one flows."""

MAX_ROWS = 128
"""Rows per block, however short: what they are read from is known, in a millisecond each, before the first is read."""

_MAX_WINDOW_ROWS = 1024
_MAX_STRETCHES = 1 << 20


class StreamedSource(DirectSource):
    """A rank's rows through a stream; read directly until the first block of it has come.

    Args:
        reader: Reads rows of the corpora, which every node can reach.
        plan: The run's plan.
        streams: Reads the stream.
        block_tokens: Tokens per block, unless a row has more.
        max_blocks: Most blocks of a window.
        options: Those of `DirectSource`.
    """

    def __init__(
        self,
        reader: RowReader,
        plan: Plan,
        *,
        streams: Streams,
        block_tokens: int = BLOCK_TOKENS,
        max_blocks: int = MAX_BLOCKS,
        **options: Any,
    ) -> None:
        super().__init__(reader, plan, **options)
        self._sources = reader.sources
        self._streams = streams
        self._block_tokens, self._max_blocks = block_tokens, max_blocks
        self._stopped = threading.Event()
        # Rows that were read directly and are not trained yet.
        self._direct: set[int] = set()

    def close(self) -> None:
        """Stop the stream and reading ahead; the next step starts over."""
        self._stopped.set()
        super().close()

    def _next(self, step: int) -> RowSlice:
        try:
            return super()._next(step)
        except LateError as error:
            raise RunError(
                f"step {step}: {error}; Ray Data needs cluster.data_cpus free CPUs per task beside the workers, and a "
                "corpus that can be read: start a larger cluster, lower cluster.cpus_per_worker or cluster.data_cpus, "
                "or set data.engine=local"
            ) from error

    def step(self, step: int) -> Iterator[RowSlice]:
        """Yield this rank's slices of a step, as `DirectSource.step` does."""
        self.num_direct = 0
        for received in super().step(step):
            self.num_direct += received.row in self._direct
            self._direct.discard(received.row)
            yield received

    def _slices_from(self, first_step: int) -> Iterator[RowSlice]:
        self._stopped, self._direct = threading.Event(), set()
        return self._streamed(first_step, self._stopped, self._direct)

    def _streamed(self, first_step: int, stopped: threading.Event, direct: set[int]) -> Iterator[RowSlice]:
        started, rows = time.monotonic(), self._rows_from(first_step)
        stream = ReadAhead(self._received(first_step, stopped), 1)
        try:
            num_direct = 0
            for row in rows:
                if stream.is_ready:
                    break
                if self._timeout_s is not None and time.monotonic() - started > self._timeout_s:
                    raise LateError(f"no row arrived for {self._timeout_s:.0f} s, since the stream has not started")
                if row is not None:
                    direct.add(row)
                num_direct += 1
                yield self._read(row)
            else:
                return
            for _ in range(num_direct):
                stream.next()
            for _ in itertools.chain([row], rows):
                slot, received = stream.next()
                yield self._read(None) if slot is None else self._slice(slot.row, received)
        finally:
            stopped.set()
            stream.close(CLOSE_TIMEOUT_S)

    def _received(
        self, first_step: int, stopped: threading.Event
    ) -> Generator[tuple[Slot | None, Received | None], None, None]:
        """Yield what the stream gives for each micro-batch from a step on; None for a filler."""
        rows = self._rows_from(first_step)
        while window := self._window(rows):
            # A row without tokens is not sent.
            slots = [[slot for slot in block if slot is not None] for block in window]
            blocks = [requested(self._sources, block) for block in slots if block]
            with closing(self._streams.read(blocks, stopped)) as tables:
                received = itertools.chain.from_iterable(map(unpack, tables))
                for slot in itertools.chain.from_iterable(window):
                    yield slot, None if slot is None else next(received, None)

    def _window(self, rows: Iterator[int | None]) -> list[list[Slot | None]]:
        """Take rows for the blocks of a window, none at the end of the plan; None stands for a filler."""
        window: list[list[Slot | None]] = []
        num_rows = num_stretches = 0
        while len(window) < self._max_blocks and num_rows < _MAX_WINDOW_ROWS and num_stretches < _MAX_STRETCHES:
            block: list[Slot | None] = []
            num_tokens, most_tokens = 0, min(self._block_tokens, FIRST_BLOCK_TOKENS << 2 * len(window))
            while num_tokens < most_tokens and len(block) < MAX_ROWS and (taken := list(itertools.islice(rows, 1))):
                slot = None if taken[0] is None else self._slot(taken[0])
                block.append(slot)
                if slot is not None:
                    num_tokens += slot.num_tokens
                    num_stretches += len(slot.stretches)
            if not block:
                break
            window.append(block)
            num_rows += len(block)
        return window

    def _slot(self, row: int) -> Slot:
        found = slice_stretches(
            self._plan.pieces(row), self._plan.row_tokens(row), self._sp_rank, self._sp_size, self._ring_size
        )
        return Slot(row=row, stretches=np.array(found, dtype=np.int64).reshape(-1, 3))

    def _slice(self, row: int, received: Received | None) -> RowSlice:
        found = None if received is None else received.row
        if received is None or found != row:
            raise RunError(
                f"row {row} was to come and {'nothing' if found is None else f'row {found}'} came: Ray Data did not "
                "keep the order of its blocks; set data.engine=local and report it"
            )
        if received.error:
            raise UserError(received.error)
        store = _ReceivedTokens(received, has_weights=any(source.has_weights for source in self._sources))
        pieces, row_tokens = self._plan.pieces(row), self._plan.row_tokens(row)
        found_slice = slice_row(store, row, row_tokens, pieces, self._sp_rank, self._sp_size, self._ring_size)
        if store.num_left:
            raise RunError(f"row {row} came with {store.num_left} tokens too many; set data.engine=local and report it")
        return found_slice


class _ReceivedTokens:
    """The tokens of one slice, which are read once and in order.

    Attributes:
        fingerprint: Empty, since it is none of a corpus.
        has_weights: Whether the corpora have loss weights.
    """

    fingerprint = ""

    def __init__(self, received: Received, *, has_weights: bool) -> None:
        self._received, self._place = received, 0
        self.has_weights = has_weights

    @property
    def num_left(self) -> int:
        """Return the tokens that were not read."""
        return int(self._received.tokens.size) - self._place

    def read(self, document: int, start: int, length: int) -> NDArray[np.integer]:
        """Return the next ``length`` tokens."""
        if length > self.num_left:
            raise RunError(f"row {self._received.row} came with too few tokens; set data.engine=local and report it")
        self._place += length
        return self._received.tokens[self._place - length : self._place]

    def fetch(self, stretches: Sequence[tuple[int, int, int]]) -> None:
        """Do nothing: everything is here."""

    def label_mask(self, document: int, first: int, last: int) -> NDArray[np.bool_] | None:
        """Return which of the last tokens that were read may be labels."""
        labels = self._received.labels
        return None if labels is None else labels[self._place - (last - first) : self._place]

    def label_weights(self, document: int, first: int, last: int) -> NDArray[np.float32] | None:
        """Return the weights of the last tokens that were read."""
        weights = self._received.weights
        return None if weights is None else weights[self._place - (last - first) : self._place]
