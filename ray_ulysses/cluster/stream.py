"""Streams rows through Ray Data: each rank receives its own slices, read anywhere on the cluster."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data import DataIterator, Datasource, ReadTask
from ray.data.block import BlockMetadata

from ray_ulysses.cluster.quiet import quiet, quiet_process
from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.mixture import PlannedSource
from ray_ulysses.data.read.reader import slice_row
from ray_ulysses.data.read.streamed_source import Slot, pack
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run.secrets_file import read_secrets

DEFAULT_NUM_CPUS = 0.25
_BYTES_PER_TOKEN = 12


class RayStreams:
    """Streams of slots through Ray Data's ``streaming_split``, which keeps the order of equally large blocks.

    Args:
        num_cpus: CPUs that a read task reserves.
        secrets_file: ``cluster.secrets_file``, which gives access to corpora on object stores.
    """

    def __init__(self, num_cpus: float = DEFAULT_NUM_CPUS, secrets_file: str | None = None) -> None:
        self._num_cpus, self._secrets_file = num_cpus, secrets_file
        self._coordinators: list[Any] = []

    def build(self, sources: Sequence[PlannedSource], slots: Sequence[Slot], num_ends: int) -> list[DataIterator]:
        """Return one end per rank of a stream of these slots."""
        dataset = ray.data.read_datasource(
            _SlotSource(tuple(sources), list(slots), self._secrets_file),
            num_cpus=self._num_cpus,
            override_num_blocks=len(slots),
            concurrency=_num_tasks(num_ends),
        )
        quiet(dataset)
        dataset.context.execution_options.preserve_order = True
        # A row is one block, however long: a divided block would shift every later slot.
        dataset.context.target_max_block_size = None
        ends = dataset.streaming_split(num_ends, equal=False)
        self._coordinators.append(ends[0]._coord_actor)
        return list(ends)

    def read(self, end: DataIterator) -> Iterator[pa.Table]:
        """Yield the blocks of one end, in order.

        Raises:
            RunError: The stream failed.
        """
        try:
            for batch in end.iter_batches(
                batch_size=None,  # type: ignore[arg-type]  # the stub lacks None: a block as it is
                batch_format="pyarrow",
                prefetch_batches=1,
            ):
                assert isinstance(batch, pa.Table)
                yield batch
        except ray.exceptions.RayError as error:
            raise RunError(f"the data stream failed: {error}") from error

    def drop(self, keep: int) -> None:
        """End the oldest streams that were built here, without waiting until every process has collected its end."""
        while len(self._coordinators) > keep:
            ray.kill(self._coordinators.pop(0))


class _SlotSource(Datasource):
    """Slots as a Ray Data source: one task, one block and one row each."""

    def __init__(self, sources: tuple[PlannedSource, ...], slots: list[Slot], secrets_file: str | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources, self._slots, self._secrets_file = sources, slots, secrets_file

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
                functools.partial(_read_slot, self._sources, slot, self._secrets_file),
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


def _read_slot(sources: tuple[PlannedSource, ...], slot: Slot, secrets_file: str | None = None) -> list[pa.Table]:
    """Read one slot in a Ray task; a shard that can't be read becomes a row that contains the error."""
    try:
        corpora = _corpora(sources, secrets_file)
        read = slice_row(corpora, slot.row, slot.row_tokens, slot.pieces, slot.sp_rank, slot.sp_size, slot.ring_size)
    except UserError as error:
        return [pack(None, str(error))]
    return [pack(read, "")]


@functools.lru_cache(maxsize=2)
def _corpora(sources: tuple[PlannedSource, ...], secrets_file: str | None) -> CorpusSet:
    """Keep the corpora open between the tasks of one worker process."""
    if secrets_file is not None:
        with suppress(FileNotFoundError):
            os.environ.update(read_secrets(secrets_file))
    return CorpusSet(sources)
