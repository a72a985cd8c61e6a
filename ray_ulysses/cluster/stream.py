"""Streams rows through Ray Data: each rank receives its own slices, read anywhere on the cluster.

A step's slots are assigned in the order (micro-batch, rank). Each slot is one block of one row, so ``streaming_split``
with preserved order hands block ``i`` to rank ``i % world_size``; every slice carries its row and is checked all the
same. The stream is built in windows of whole steps and at most about 1,000 blocks, since Ray Data takes some
milliseconds and tens of kilobytes per block before the first one flows.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data import DataIterator, Datasource, ReadTask
from ray.data.block import BlockMetadata

from ray_ulysses.cluster.quiet import quiet, quiet_process
from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.mixture import PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.data.plan.steps import num_micro_batches
from ray_ulysses.data.read.read_ahead import ReadAhead
from ray_ulysses.data.read.reader import FILLER_ROW, RowSlice, slice_row
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.parallel.layout import ParallelLayout

MAX_BLOCKS = 1000
DEFAULT_NUM_CPUS = 0.25
_CLOSE_TIMEOUT_S = 5.0
_BYTES_PER_TOKEN = 12

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


class RaySource:
    """A rank's rows through Ray Data, byte for byte those of ``DirectSource``.

    Rank 0 builds the stream of a window and hands each rank its end of it through ``share``, which every rank must call
    equally often: ``step`` does so at the same steps on every rank.

    Args:
        sources: The corpora, reachable from every node.
        plan: The run's plan.
        rank: This rank.
        layout: Assigns rows and slices to ranks.
        share: Returns rank 0's argument on every rank (the others pass None); a collective.
        num_cpus: CPUs that a read task reserves.
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
        share: Share,
        num_cpus: float = DEFAULT_NUM_CPUS,
        max_blocks: int = MAX_BLOCKS,
        prefetch_rows: int = 2,
        timeout_s: float = 600.0,
    ) -> None:
        self._sources = tuple(sources)
        self._plan = plan
        self._rank = rank
        self._layout = layout
        self._share = share
        self._num_cpus = num_cpus
        self._max_blocks = max_blocks
        self._prefetch_rows = prefetch_rows
        self._timeout_s = timeout_s
        self._next_step = 0
        self._window = range(0)
        self._incoming: queue.SimpleQueue[DataIterator | None] = queue.SimpleQueue()
        self._ahead: ReadAhead[RowSlice] | None = None
        self._coordinators: list[Any] = []

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
            self._drop_coordinators(keep=2)

    def close(self) -> None:
        """Stop reading; on rank 0, end the stream for every rank."""
        self._drop_coordinators(keep=0)
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
        self._ahead = ReadAhead(_receive_all(self._incoming), self._prefetch_rows)

    def _steps_from(self, step: int) -> range:
        return window_steps(step, self._plan, self._layout, self._max_blocks)

    def _hand_out(self, steps: range) -> None:
        """Build a window on rank 0 and share it; every rank must call. An empty window ends the stream."""
        if not steps:
            self._incoming.put(None)
            return
        iterators = self._share(self._build(steps) if self._rank == 0 else None)
        self._incoming.put(iterators[self._rank])

    def _build(self, steps: range) -> list[DataIterator]:
        slots = window_slots(self._plan, steps, self._layout)
        source = _SlotSource(self._sources, slots)
        dataset = ray.data.read_datasource(
            source,
            num_cpus=self._num_cpus,
            override_num_blocks=len(slots),
            concurrency=_num_tasks(self._layout.world_size),
        )
        quiet(dataset)
        dataset.context.execution_options.preserve_order = True
        # A row is one block, however long: a divided block would shift every later slot.
        dataset.context.target_max_block_size = None
        iterators = dataset.streaming_split(self._layout.world_size, equal=False)
        self._coordinators.append(iterators[0]._coord_actor)
        return list(iterators)

    def _drop_coordinators(self, keep: int) -> None:
        """End the oldest streams that rank 0 built, without waiting until every process has collected its end."""
        while len(self._coordinators) > keep:
            ray.kill(self._coordinators.pop(0))

    def _receive(self, step: int) -> RowSlice:
        assert self._ahead is not None
        try:
            return self._ahead.next(self._timeout_s)
        except (UserError, RunError) as error:
            if isinstance(error, UserError):
                raise
            raise RunError(
                f"step {step}, rank {self._rank}: {error}; Ray Data needs {self._num_cpus} free CPUs per task beside "
                "the workers: start a larger cluster, lower cluster.cpus_per_worker or cluster.data_cpus, or set "
                "data.engine=local"
            ) from error
        except ray.exceptions.RayError as error:
            raise RunError(f"step {step}, rank {self._rank}: the data stream failed: {error}") from error


def _receive_all(incoming: queue.SimpleQueue[DataIterator | None]) -> Iterator[RowSlice]:
    """Yield the slices of one window after the other, until None arrives."""
    while (iterator := incoming.get()) is not None:
        for batch in iterator.iter_batches(
            batch_size=None,  # type: ignore[arg-type]  # the stub lacks None: a block as it is
            batch_format="pyarrow",
            prefetch_batches=1,
        ):
            assert isinstance(batch, pa.Table) and batch.num_rows == 1, "one row per block"
            yield _unpack(batch)


class _SlotSource(Datasource):
    """Slots as a Ray Data source: one task, one block and one row each."""

    def __init__(self, sources: tuple[PlannedSource, ...], slots: list[Slot]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = sources
        self._slots = slots

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Silence the process that runs the stream, which unpickles its source."""
        self.__dict__.update(state)
        quiet_process()

    def estimate_inmemory_data_size(self) -> int:
        return sum(_slot_bytes(slot) for slot in self._slots)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        return [
            ReadTask(
                functools.partial(_read_slot, self._sources, slot),
                BlockMetadata(num_rows=1, size_bytes=_slot_bytes(slot), input_files=None, exec_stats=None),
            )
            for slot in self._slots
        ]


def _num_tasks(world_size: int) -> int:
    """Return how many slots are read at once: a slot takes milliseconds where a step takes seconds.

    Without a bound Ray Data starts ``cluster CPUs / num_cpus`` workers, whose start costs more than their reads.
    """
    return min(64, max(2, world_size // 4))


def _slot_bytes(slot: Slot) -> int:
    return slot.row_tokens // slot.sp_size * _BYTES_PER_TOKEN


def _read_slot(sources: tuple[PlannedSource, ...], slot: Slot) -> list[pa.Table]:
    """Read one slot in a Ray task; a shard that can't be read becomes a row that contains the error."""
    try:
        read = slice_row(
            _corpora(sources), slot.row, slot.row_tokens, slot.pieces, slot.sp_rank, slot.sp_size, slot.ring_size
        )
    except UserError as error:
        return [_pack(None, str(error))]
    return [_pack(read, "")]


@functools.lru_cache(maxsize=2)
def _corpora(sources: tuple[PlannedSource, ...]) -> CorpusSet:
    """Keep the corpora open between the tasks of one worker process."""
    return CorpusSet(sources)


def _pack(read: RowSlice | None, error: str) -> pa.Table:
    """Turn a slice into a block; ids fit 32 bits, which halves the bytes that travel."""
    empty = np.empty(0, dtype=np.int64)
    columns: dict[str, pa.Array] = {
        name: pa.array([-1 if read is None else getattr(read, name)], pa.int64()) for name in _NUMBERS
    }
    lengths = [] if read is None else list(read.document_lengths)
    columns["document_lengths"] = pa.array([lengths], pa.list_(pa.int64()))
    for name in _ARRAYS:
        values = empty if read is None else getattr(read, name)
        columns[name] = pa.ListArray.from_arrays([0, values.size], pa.array(values.astype(np.int32)))
    columns["error"] = pa.array([error], pa.string())
    return pa.table(columns)


def _unpack(block: pa.Table) -> RowSlice:
    error = block.column("error")[0].as_py()
    if error:
        raise UserError(error)
    numbers: dict[str, Any] = {name: int(block.column(name)[0].as_py()) for name in _NUMBERS}
    arrays: dict[str, Any] = {name: block.column(name)[0].values.to_numpy().astype(np.int64) for name in _ARRAYS}
    return RowSlice(document_lengths=tuple(block.column("document_lengths")[0].as_py()), **numbers, **arrays)
