"""Rows through Ray Data: each rank receives its own slices, read anywhere on the cluster.

A step's slots are dealt in the order (micro-batch, rank). Each slot is one block of one row, so ``streaming_split``
with preserved order hands block ``i`` to rank ``i % world_size``; every slice carries its row and is checked all the
same. The stream is cut into segments of whole steps and at most about 1,000 blocks, since Ray Data pays some
milliseconds and tens of kilobytes a block before the first one flows.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
_BYTES_A_TOKEN = 12

Share = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One slice that one rank receives.

    Attributes:
        row: Global row, or -1 for a filler.
        row_tokens: Padded length of the row.
        pieces: Its pieces; none for a filler.
        sp_rank: Which slice.
        sp_size: How many slices.
        ring_size: Ring degree within ``sp_size``.
    """

    row: int
    row_tokens: int
    pieces: tuple[Piece, ...]
    sp_rank: int
    sp_size: int
    ring_size: int = 1


def segment_steps(first_step: int, plan: Plan, world_size: int, sp_size: int, max_blocks: int) -> range:
    """Return the steps, from ``first_step`` on, whose slots make one segment: at least one, and whole."""
    if first_step > plan.num_steps:
        return range(first_step, first_step)
    dp_size = world_size // sp_size
    blocks_a_step = num_micro_batches(plan.most_rows_per_step(first_step), dp_size) * world_size
    last_step = min(plan.num_steps, first_step + max(1, max_blocks // blocks_a_step) - 1)
    return range(first_step, last_step + 1)


def segment_slots(plan: Plan, steps: range, world_size: int, sp_size: int, ring_size: int = 1) -> list[Slot]:
    """Return the slots of the steps, in the order (step, micro-batch, rank)."""
    slots = []
    for step in steps:
        for micro_batch in plan.step_schedule(step, world_size // sp_size):
            for row in micro_batch:
                is_filler = row is None
                number = FILLER_ROW if row is None else row
                tokens = plan.settings.pad_multiple if is_filler else plan.row_tokens(number)
                pieces = () if is_filler else plan.pieces(number)
                slots += [
                    Slot(
                        row=number,
                        row_tokens=tokens,
                        pieces=pieces,
                        sp_rank=sp_rank,
                        sp_size=sp_size,
                        ring_size=ring_size,
                    )
                    for sp_rank in range(sp_size)
                ]
    return slots


class RaySource:
    """A rank's rows through Ray Data, byte for byte those of ``DirectSource``.

    Rank 0 builds the stream of a segment and hands each rank its end of it through ``share``, which every rank must
    call equally often: ``step`` does so at the same steps on every rank.

    Args:
        sources: The corpora, reachable from every node.
        plan: The run's plan.
        rank: This rank; data-parallel group ``rank // sp_size``, slice ``rank % sp_size``.
        world_size: All ranks, a multiple of ``sp_size``.
        sp_size: Slices a row.
        ring_size: Ring degree within ``sp_size``.
        share: Returns on every rank what rank 0 passed in (the others pass None); a collective.
        num_cpus: CPUs that a read task reserves.
        max_blocks: Most blocks of a segment, unless one step has more.
        prefetch_rows: Slices held ready.
        timeout_s: How long to wait for a slice before the run is given up.
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
        self._segment = range(0)
        self._incoming: queue.SimpleQueue[DataIterator | None] = queue.SimpleQueue()
        self._ahead: ReadAhead[RowSlice] | None = None
        self._coordinators: list[Any] = []

    def step(self, step: int) -> Iterator[RowSlice]:
        """Yield this rank's slices of a step, one a micro-batch; every rank must ask for the same steps.

        Raises:
            UserError: A shard can't be read.
            RunError: The stream failed, or no slice came in time.
        """
        schedule = self._plan.step_schedule(step, self._world_size // self._sp_size)
        if self._ahead is None or step != self._next_step:
            self._start(step)
        elif step == self._segment.stop:
            self._enter_next_segment(step)
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
                    f"in place of {expected}; set data.engine=local and report it: Ray Data did not keep the order of "
                    "its blocks"
                )
            yield received
        self._next_step = step + 1
        if step == self._segment.start:
            # Rows of this segment flow only after every rank has left the one before.
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
        self._segment = self._steps_from(step)
        self._hand_out(self._segment)
        self._hand_out(self._steps_from(self._segment.stop))
        self._ahead = ReadAhead(_receive_all(self._incoming), self._prefetch_rows)

    def _enter_next_segment(self, step: int) -> None:
        self._segment = self._steps_from(step)
        self._hand_out(self._steps_from(self._segment.stop))

    def _steps_from(self, step: int) -> range:
        return segment_steps(step, self._plan, self._world_size, self._sp_size, self._max_blocks)

    def _hand_out(self, steps: range) -> None:
        """Build the segment on rank 0 and share it; every rank must call. An empty segment ends the stream."""
        if not steps:
            self._incoming.put(None)
            return
        iterators = self._share(self._build(steps) if self._rank == 0 else None)
        self._incoming.put(iterators[self._rank])

    def _build(self, steps: range) -> list[DataIterator]:
        slots = segment_slots(self._plan, steps, self._world_size, self._sp_size, self._ring_size)
        source = _SlotSource(self._sources, slots)
        dataset = ray.data.read_datasource(
            source,
            num_cpus=self._num_cpus,
            override_num_blocks=len(slots),
            concurrency=_num_tasks(self._world_size),
        )
        quiet(dataset)
        dataset.context.execution_options.preserve_order = True
        # A row is one block, however long: a block that was cut would shift every later slot.
        dataset.context.target_max_block_size = None
        iterators = dataset.streaming_split(self._world_size, equal=False)
        self._coordinators.append(iterators[0]._coord_actor)
        return list(iterators)

    def _drop_coordinators(self, keep: int) -> None:
        """End the oldest streams that rank 0 built, and do not wait until every process has collected its end."""
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
                f"step {step}, rank {self._rank}: {error}; Ray Data needs {self._num_cpus} free CPUs a task beside the "
                "workers: start a larger cluster, lower cluster.cpus_per_worker or cluster.data_cpus, "
                "or set data.engine=local"
            ) from error
        except ray.exceptions.RayError as error:
            raise RunError(f"step {step}, rank {self._rank}: the data stream failed: {error}") from error


def _receive_all(incoming: queue.SimpleQueue[DataIterator | None]) -> Iterator[RowSlice]:
    """Yield the slices of one segment after the other, until None comes."""
    while (iterator := incoming.get()) is not None:
        for batch in iterator.iter_batches(
            batch_size=None,  # type: ignore[arg-type]  # the stub forgets None: a block as it is
            batch_format="pyarrow",
            prefetch_batches=1,
        ):
            assert isinstance(batch, pa.Table) and batch.num_rows == 1, "one row a block"
            yield _unpack(batch)


class _SlotSource(Datasource):
    """Slots as a Ray Data source: one task, one block and one row each."""

    def __init__(self, sources: tuple[PlannedSource, ...], slots: list[Slot]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = sources
        self._slots = slots

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Silence the process that runs the stream: it unpickles its source, and takes no other word from us."""
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

    Without a bound Ray Data starts ``cluster CPUs / num_cpus`` workers, whose start costs more than all they read.
    """
    return min(64, max(2, world_size // 4))


def _slot_bytes(slot: Slot) -> int:
    return slot.row_tokens // slot.sp_size * _BYTES_A_TOKEN


def _read_slot(sources: tuple[PlannedSource, ...], slot: Slot) -> list[pa.Table]:
    """Read one slot in a Ray task; a shard that can't be read becomes a row that says so."""
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
    """Turn a slice into a block; ids fit 32 bits, which halves what travels."""
    numbers = (-1, 0, 1, 1, 0)
    if read is not None:
        numbers = (read.row, read.sp_rank, read.sp_size, read.ring_size, read.row_tokens)
    none = np.empty(0, dtype=np.int64)
    arrays = [none] * 3 if read is None else [read.input_ids, read.labels, read.position_ids]
    columns: dict[str, pa.Array] = {
        name: pa.array([number], pa.int64())
        for name, number in zip(("row", "sp_rank", "sp_size", "ring_size", "row_tokens"), numbers, strict=True)
    }
    lengths = [] if read is None else list(read.document_lengths)
    columns["document_lengths"] = pa.array([lengths], pa.list_(pa.int64()))
    for name, values in zip(("input_ids", "labels", "position_ids"), arrays, strict=True):
        columns[name] = pa.ListArray.from_arrays([0, values.size], pa.array(values.astype(np.int32)))
    columns["error"] = pa.array([error], pa.string())
    return pa.table(columns)


def _unpack(block: pa.Table) -> RowSlice:
    error = block.column("error")[0].as_py()
    if error:
        raise UserError(error)

    def number(name: str) -> int:
        return int(block.column(name)[0].as_py())

    def values(name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        return block.column(name)[0].values.to_numpy().astype(np.int64)  # type: ignore[no-any-return]

    return RowSlice(
        row=number("row"),
        sp_rank=number("sp_rank"),
        sp_size=number("sp_size"),
        ring_size=number("ring_size"),
        row_tokens=number("row_tokens"),
        document_lengths=tuple(block.column("document_lengths")[0].as_py()),
        input_ids=values("input_ids"),
        labels=values("labels"),
        position_ids=values("position_ids"),
    )
