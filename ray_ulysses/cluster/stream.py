"""Streams rows through Ray Data: each rank receives its own slices, read anywhere on the cluster.

A step's slots are ordered by (micro-batch, rank). Each slot is one block of one row, so ``streaming_split`` with
preserved order gives block ``i`` to rank ``i % world_size``; every slice carries its row and is checked nevertheless.
The stream is divided into windows of whole steps and at most about 1,000 blocks, since Ray Data needs some
milliseconds and tens of kilobytes per block before the first one arrives.
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

MAX_BLOCKS = 1000
DEFAULT_NUM_CPUS = 0.25
_CLOSE_TIMEOUT_S = 5.0
_BYTES_PER_TOKEN = 12

_NUMBERS = ("row", "sp_rank", "sp_size", "ring_size", "row_tokens")
_ARRAYS = ("input_ids", "labels", "position_ids")

Share = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The place in the stream of one slice for one rank.

    Attributes:
        row: Global row, or -1 for a filler.
        row_tokens: Padded length of the row.
        pieces: Its pieces; none for a filler.
        sp_rank: Number of the slice.
        sp_size: Number of slices.
        ring_size: Ring degree within ``sp_size``.
    """

    row: int
    row_tokens: int
    pieces: tuple[Piece, ...]
    sp_rank: int
    sp_size: int
    ring_size: int = 1


def window_steps(first_step: int, plan: Plan, world_size: int, sp_size: int, max_blocks: int) -> range:
    """Return the steps, from ``first_step`` on, of one window: at least one, and whole steps only."""
    if first_step > plan.num_steps:
        return range(first_step, first_step)
    dp_size = world_size // sp_size
    blocks_per_step = num_micro_batches(plan.most_rows_per_step(first_step), dp_size) * world_size
    last_step = min(plan.num_steps, first_step + max(1, max_blocks // blocks_per_step) - 1)
    return range(first_step, last_step + 1)


def window_slots(plan: Plan, steps: range, world_size: int, sp_size: int, ring_size: int = 1) -> list[Slot]:
    """Return the slots of the steps, in the order (step, micro-batch, rank)."""
    slots = []
    for step in steps:
        for micro_batch in plan.step_schedule(step, world_size // sp_size):
            for row in micro_batch:
                is_filler = row is None
                number = FILLER_ROW if row is None else row
                tokens = plan.settings.pad_multiple if is_filler else plan.row_tokens(number)
                pieces = () if is_filler else plan.pieces(number)
                first = Slot(
                    row=number, row_tokens=tokens, pieces=pieces, sp_rank=0, sp_size=sp_size, ring_size=ring_size
                )
                slots += [replace(first, sp_rank=sp_rank) for sp_rank in range(sp_size)]
    return slots


class RaySource:
    """A rank's rows through Ray Data, byte for byte those of ``DirectSource``.

    Rank 0 builds the stream of a window of steps and gives each rank its iterator through ``share``, a collective that
    ``step`` calls at the same steps on every rank.

    Args:
        sources: The corpora, reachable from every node.
        plan: The run's plan.
        rank: This rank; data-parallel group ``rank // sp_size``, slice ``rank % sp_size``.
        world_size: All ranks, a multiple of ``sp_size``.
        sp_size: Slices per row.
        ring_size: Ring degree within ``sp_size``.
        share: A collective that returns on every rank what rank 0 passed in (the others pass None).
        num_cpus: CPUs that a read task reserves.
        max_blocks: Most blocks per window, unless one step has more.
        prefetch_rows: Slices to read ahead.
        timeout_s: How long to wait for a slice before the run fails.
    """

    def __init__(
        self,
        sources: Sequence[PlannedSource],
        plan: Plan,
        *,
        rank: int,
        world_size: int,
        sp_size: int,
        share: Share,
        ring_size: int = 1,
        num_cpus: float = DEFAULT_NUM_CPUS,
        max_blocks: int = MAX_BLOCKS,
        prefetch_rows: int = 2,
        timeout_s: float = 600.0,
    ) -> None:
        if world_size % sp_size:
            raise ValueError(f"parallel.sp_size={sp_size} does not divide the world size {world_size}")
        self._sources = tuple(sources)
        self._plan = plan
        self._rank = rank
        self._world_size = world_size
        self._sp_size = sp_size
        self._ring_size = ring_size
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
        schedule = self._plan.step_schedule(step, self._world_size // self._sp_size)
        if self._ahead is None or step != self._next_step:
            self._start(step)
        elif step == self._window.stop:
            self._enter_next_window(step)
        self._next_step = 0
        dp_rank, sp_rank = divmod(self._rank, self._sp_size)
        for micro_batch in schedule:
            row = micro_batch[dp_rank]
            received = self._receive(step)
            expected = (FILLER_ROW if row is None else row, sp_rank, self._sp_size, self._ring_size)
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
            # Rows of this window arrive only after every rank has left the previous one.
            self._drop_coordinators(keep=2)

    def close(self) -> None:
        """Stop reading; rank 0 ends the stream for every rank."""
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

    def _enter_next_window(self, step: int) -> None:
        self._window = self._steps_from(step)
        self._hand_out(self._steps_from(self._window.stop))

    def _steps_from(self, step: int) -> range:
        return window_steps(step, self._plan, self._world_size, self._sp_size, self._max_blocks)

    def _hand_out(self, steps: range) -> None:
        """Build a window on rank 0 and share it; every rank must call. An empty window ends the stream."""
        if not steps:
            self._incoming.put(None)
            return
        iterators = self._share(self._build(steps) if self._rank == 0 else None)
        self._incoming.put(iterators[self._rank])

    def _build(self, steps: range) -> list[DataIterator]:
        slots = window_slots(self._plan, steps, self._world_size, self._sp_size, self._ring_size)
        source = _SlotSource(self._sources, slots)
        dataset = ray.data.read_datasource(
            source,
            num_cpus=self._num_cpus,
            override_num_blocks=len(slots),
            concurrency=_num_tasks(self._world_size),
        )
        quiet(dataset)
        dataset.context.execution_options.preserve_order = True
        # A row is one block regardless of its length: splitting a block would shift every later slot.
        dataset.context.target_max_block_size = None
        iterators = dataset.streaming_split(self._world_size, equal=False)
        self._coordinators.append(iterators[0]._coord_actor)
        return list(iterators)

    def _drop_coordinators(self, keep: int) -> None:
        """End the oldest streams that rank 0 built, without waiting until every process has released its iterator."""
        while len(self._coordinators) > keep:
            ray.kill(self._coordinators.pop(0))

    def _receive(self, step: int) -> RowSlice:
        assert self._ahead is not None
        try:
            return self._ahead.next(self._timeout_s)
        except RunError as error:
            raise RunError(
                f"step {step}, rank {self._rank}: {error}; Ray Data needs {self._num_cpus} free CPUs per task beside "
                "the workers: start a larger cluster, lower cluster.cpus_per_worker or cluster.data_cpus, or set "
                "data.engine=local"
            ) from error
        except ray.exceptions.RayError as error:
            raise RunError(f"step {step}, rank {self._rank}: the data stream failed: {error}") from error


def _receive_all(incoming: queue.SimpleQueue[DataIterator | None]) -> Iterator[RowSlice]:
    """Yield the slices of one window after another, until None arrives."""
    while (iterator := incoming.get()) is not None:
        for batch in iterator.iter_batches(
            batch_size=None,  # type: ignore[arg-type]  # the annotation lacks None, which means whole blocks
            batch_format="pyarrow",
            prefetch_batches=1,
        ):
            assert isinstance(batch, pa.Table) and batch.num_rows == 1, "one row per block"
            yield _unpack(batch)


class _SlotSource(Datasource):
    """A Ray Data source of slots: one task, one block and one row each."""

    def __init__(self, sources: tuple[PlannedSource, ...], slots: list[Slot]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = sources
        self._slots = slots

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Silence the process that runs the stream, which we reach only when it unpickles its source."""
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
    """Return how many slots are read concurrently: a slot takes milliseconds and a step seconds.

    Without a bound Ray Data starts ``cluster CPUs / num_cpus`` workers, which costs more than everything they read.
    """
    return min(64, max(2, world_size // 4))


def _slot_bytes(slot: Slot) -> int:
    return slot.row_tokens // slot.sp_size * _BYTES_PER_TOKEN


def _read_slot(sources: tuple[PlannedSource, ...], slot: Slot) -> list[pa.Table]:
    """Read one slot in a Ray task; an error of reading becomes a row with its text."""
    try:
        read = slice_row(
            _corpora(sources), slot.row, slot.row_tokens, slot.pieces, slot.sp_rank, slot.sp_size, slot.ring_size
        )
    except UserError as error:
        return [_pack(None, str(error))]
    return [_pack(read, "")]


@functools.lru_cache(maxsize=2)
def _corpora(sources: tuple[PlannedSource, ...]) -> CorpusSet:
    """Return the corpora, kept open between the tasks of one worker process."""
    return CorpusSet(sources)


def _pack(read: RowSlice | None, error: str) -> pa.Table:
    """Turn a slice into a block; ids fit 32 bits, which halves the traffic."""
    columns: dict[str, pa.Array] = {"error": pa.array([error], pa.string())}
    if read is not None:
        columns |= {name: pa.array([getattr(read, name)], pa.int64()) for name in _NUMBERS}
        columns["document_lengths"] = pa.array([list(read.document_lengths)], pa.list_(pa.int64()))
        for name in _ARRAYS:
            values = getattr(read, name).astype(np.int32)
            columns[name] = pa.ListArray.from_arrays([0, values.size], pa.array(values))
    return pa.table(columns)


def _unpack(block: pa.Table) -> RowSlice:
    if error := block.column("error")[0].as_py():
        raise UserError(error)
    arrays = {name: block.column(name)[0].values.to_numpy().astype(np.int64) for name in _ARRAYS}
    numbers = {name: block.column(name)[0].as_py() for name in _NUMBERS}
    return RowSlice(**numbers, **arrays, document_lengths=tuple(block.column("document_lengths")[0].as_py()))
