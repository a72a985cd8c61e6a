"""A rank's rows from a stream that is read anywhere on the cluster, byte for byte those of ``DirectSource``.

A step's slots are assigned in the order (micro-batch, rank). Each slot is one block of one row, and the stream hands
block ``i`` to rank ``i % world_size``; every slice carries its row and is checked all the same. The stream is built in
windows of whole steps and at most about 1,000 blocks, since Ray Data takes some milliseconds and tens of kilobytes per
block before the first one flows.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from ray_ulysses.data.plan.mixture import PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.data.plan.steps import num_micro_batches
from ray_ulysses.data.read.read_ahead import ReadAhead
from ray_ulysses.data.read.reader import FILLER_ROW, RowSlice
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.parallel.layout import ParallelLayout

MAX_BLOCKS = 1000
_CLOSE_TIMEOUT_S = 5.0

_NUMBERS = ("row", "sp_rank", "sp_size", "ring_size", "row_tokens")
_ARRAYS = ("input_ids", "labels", "position_ids")

Share = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The place in the stream of one slice, which one rank receives.

    Attributes:
        row: Global row, or -1 for a filler.
        row_tokens: Padded length of the row.
        pieces: Its pieces; none for a filler.
        sp_rank: The slice's number.
        sp_size: Slices per row.
        ring_size: Ring degree within ``sp_size``.
    """

    row: int
    row_tokens: int
    pieces: tuple[Piece, ...]
    sp_rank: int
    sp_size: int
    ring_size: int = 1


class Streams(Protocol):
    """Builds streams of slots, and reads one rank's end of them."""

    def build(self, sources: Sequence[PlannedSource], slots: Sequence[Slot], num_ends: int) -> list[Any]:
        """Return one end per rank of a stream of these slots, as a value that can be pickled."""
        ...

    def read(self, end: Any) -> Iterator[pa.Table]:
        """Yield the blocks of one end, in order."""
        ...

    def drop(self, keep: int) -> None:
        """End the oldest streams that were built here, all but so many."""
        ...


def window_steps(first_step: int, plan: Plan, layout: ParallelLayout, max_blocks: int) -> range:
    """Return the steps of the window that begins with ``first_step``: as many as fit, at least one; none at the end."""
    if first_step > plan.num_steps:
        return range(first_step, first_step)
    micro_batches = num_micro_batches(plan.most_rows_per_step(first_step), layout.dp_size)
    blocks_per_step = micro_batches * layout.world_size
    last_step = min(plan.num_steps, first_step + max(1, max_blocks // blocks_per_step) - 1)
    return range(first_step, last_step + 1)


def window_slots(plan: Plan, steps: range, layout: ParallelLayout) -> list[Slot]:
    """Return the slots of the steps, in the order (step, micro-batch, rank)."""
    slots = []
    for step in steps:
        for micro_batch in plan.step_schedule(step, layout.dp_size):
            for row in micro_batch:
                slot = Slot(
                    row=FILLER_ROW if row is None else row,
                    row_tokens=plan.settings.pad_multiple if row is None else plan.row_tokens(row),
                    pieces=() if row is None else plan.pieces(row),
                    sp_rank=0,
                    sp_size=layout.sp_size,
                    ring_size=layout.ring_size,
                )
                slots += [replace(slot, sp_rank=sp_rank) for sp_rank in range(layout.sp_size)]
    return slots


class StreamedSource:
    """A rank's rows through a stream.

    Rank 0 builds the stream of a window and hands each rank its end of it through ``share``, which every rank must call
    equally often: ``step`` does so at the same steps on every rank.

    Args:
        sources: The corpora, reachable from every node.
        plan: The run's plan.
        rank: This rank.
        layout: Assigns rows and slices to ranks.
        streams: Builds and reads streams.
        share: Returns rank 0's argument on every rank (the others pass None); a collective.
        max_blocks: Most blocks of a window, unless one step has more.
        prefetch_rows: Slices held ready.
        timeout_s: Longest wait for a slice, in seconds, before the run fails.
    """

    def __init__(
        self,
        sources: Sequence[PlannedSource],
        plan: Plan,
        *,
        rank: int,
        layout: ParallelLayout,
        streams: Streams,
        share: Share,
        max_blocks: int = MAX_BLOCKS,
        prefetch_rows: int = 2,
        timeout_s: float = 600.0,
    ) -> None:
        self._sources = tuple(sources)
        self._plan = plan
        self._rank = rank
        self._layout = layout
        self._streams = streams
        self._share = share
        self._max_blocks = max_blocks
        self._prefetch_rows = prefetch_rows
        self._timeout_s = timeout_s
        self._next_step = 0
        self._window = range(0)
        self._incoming: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ahead: ReadAhead[RowSlice] | None = None

    def step(self, step: int) -> Iterator[RowSlice]:
        """Yield this rank's slices of a step, one per micro-batch; every rank must request the same steps.

        Raises:
            UserError: A shard can't be read.
            RunError: The stream failed, or no slice arrived in time.
        """
        layout = self._layout
        schedule = self._plan.step_schedule(step, layout.dp_size)
        if self._ahead is None or step != self._next_step:
            self._start(step)
        elif step == self._window.stop:
            self._window = self._steps_from(step)
            self._hand_out(self._steps_from(self._window.stop))
        self._next_step = 0
        dp_rank, sp_rank = layout.dp_rank(self._rank), layout.sp_rank(self._rank)
        for micro_batch in schedule:
            row = micro_batch[dp_rank]
            received = self._receive(step)
            expected = (FILLER_ROW if row is None else row, sp_rank, layout.sp_size, layout.ring_size)
            found = (received.row, received.sp_rank, received.sp_size, received.ring_size)
            if found != expected:
                raise RunError(
                    f"step {step}: rank {self._rank} received the slice {found} of (row, sp_rank, sp_size, ring_size) "
                    f"instead of {expected}: Ray Data did not keep the order of its blocks; set data.engine=local and "
                    "report it"
                )
            yield received
        self._next_step = step + 1
        if step == self._window.start:
            # Rows of this window flow only after every rank has left the previous one.
            self._streams.drop(keep=2)

    def close(self) -> None:
        """Stop reading; on rank 0, end the stream for every rank."""
        self._streams.drop(keep=0)
        self._incoming.put(None)
        if self._ahead is not None:
            self._ahead.close(_CLOSE_TIMEOUT_S)
            self._ahead = None
        self._next_step = 0

    def _start(self, step: int) -> None:
        self.close()
        self._incoming = queue.SimpleQueue()
        self._window = self._steps_from(step)
        self._hand_out(self._window)
        self._hand_out(self._steps_from(self._window.stop))
        self._ahead = ReadAhead(self._receive_all(self._incoming), self._prefetch_rows)

    def _steps_from(self, step: int) -> range:
        return window_steps(step, self._plan, self._layout, self._max_blocks)

    def _hand_out(self, steps: range) -> None:
        """Build a window on rank 0 and share it; every rank must call. An empty window ends the stream."""
        if not steps:
            self._incoming.put(None)
            return
        ends = None
        if self._rank == 0:
            slots = window_slots(self._plan, steps, self._layout)
            ends = self._streams.build(self._sources, slots, self._layout.world_size)
        self._incoming.put(self._share(ends)[self._rank])

    def _receive(self, step: int) -> RowSlice:
        assert self._ahead is not None
        try:
            return self._ahead.next(self._timeout_s)
        except RunError as error:
            if isinstance(error, UserError):
                raise
            raise RunError(
                f"step {step}, rank {self._rank}: {error}; Ray Data needs cluster.data_cpus free CPUs per task beside "
                "the workers: start a larger cluster, lower cluster.cpus_per_worker or cluster.data_cpus, or set "
                "data.engine=local"
            ) from error

    def _receive_all(self, incoming: queue.SimpleQueue[Any]) -> Iterator[RowSlice]:
        """Yield the slices of one window after the other, until None arrives."""
        while (end := incoming.get()) is not None:
            for block in self._streams.read(end):
                assert block.num_rows == 1, "one row per block"
                yield unpack(block)


def pack(read: RowSlice | None, error: str) -> pa.Table:
    """Turn a slice into a block, or an error in its place; ids fit 32 bits, which halves the bytes that travel."""
    empty = np.empty(0, dtype=np.int64)
    columns: dict[str, pa.Array] = {
        name: pa.array([-1 if read is None else getattr(read, name)], pa.int64()) for name in _NUMBERS
    }
    lengths = [] if read is None else list(read.document_lengths)
    columns["document_lengths"] = pa.array([lengths], pa.list_(pa.int64()))
    for name in _ARRAYS:
        values = empty if read is None else getattr(read, name)
        columns[name] = pa.ListArray.from_arrays([0, values.size], pa.array(values.astype(np.int32)))
    weights = None if read is None else read.label_weights
    columns["label_weights"] = pa.array([weights], pa.list_(pa.float32()))
    columns["error"] = pa.array([error], pa.string())
    return pa.table(columns)


def unpack(block: pa.Table) -> RowSlice:
    """Return the slice that a block holds.

    Raises:
        UserError: The block holds an error in its place.
    """
    error = block.column("error")[0].as_py()
    if error:
        raise UserError(error)
    numbers: dict[str, Any] = {name: int(block.column(name)[0].as_py()) for name in _NUMBERS}
    arrays: dict[str, Any] = {name: block.column(name)[0].values.to_numpy().astype(np.int64) for name in _ARRAYS}
    weights = block.column("label_weights")[0]
    return RowSlice(
        document_lengths=tuple(block.column("document_lengths")[0].as_py()),
        label_weights=np.array(weights.values.to_numpy()) if weights.is_valid else None,
        **numbers,
        **arrays,
    )
