"""Streams rows through Ray Data: each rank receives its own slices, read anywhere on the cluster."""

from __future__ import annotations

import functools
import threading
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data import Datasource, ExecutionResources, ReadTask
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data.block import BlockMetadata

from ray_ulysses.cluster.quiet import quiet
from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.mixture import PlannedSource
from ray_ulysses.data.read.streamed_source import Blocks, Slot, pack
from ray_ulysses.errors import RunError
from ray_ulysses.run.secrets_file import SecretsFile

DEFAULT_NUM_CPUS = 0.25
_BYTES_PER_TOKEN = 4
_BLOCKS_AHEAD = 2


class RayStreams:
    """Streams of slots through Ray Data, one after the other; one task per block.

    Args:
        num_cpus: CPUs that a read task reserves.
        secrets: ``cluster.secrets_file``, which gives access to corpora on object stores.
    """

    def __init__(self, num_cpus: float = DEFAULT_NUM_CPUS, secrets: SecretsFile | None = None) -> None:
        self._num_cpus, self._secrets = num_cpus, secrets

    def read(
        self, sources: Sequence[PlannedSource], blocks: Blocks, stopped: threading.Event
    ) -> Generator[pa.Table, None, None]:
        """Yield the slots of the blocks in order; closing it ends the stream, and so does the event.

        Raises:
            RunError: The stream failed.
        """
        if not blocks:
            return
        dataset = ray.data.read_datasource(
            _SlotSource(tuple(sources), blocks, self._secrets),
            num_cpus=self._num_cpus,
            override_num_blocks=len(blocks),
            # A block is read in milliseconds, or in the seconds that a store takes, and lasts for several rows.
            concurrency=1,
        )
        quiet(dataset)
        options = dataset.context.execution_options
        options.preserve_order = True
        # Every rank has a stream; each alone would otherwise fill its part of the nodes' object stores.
        options.resource_limits = ExecutionResources(
            object_store_memory=_BLOCKS_AHEAD * max(map(_block_bytes, blocks)) + (1 << 20)
        )
        dataset.context.target_max_block_size = None
        dataset.context.custom_execution_callback_classes = [_StopOnRequest(stopped)]
        # As the stub has it, a batch can't be a block as it is, and its iterator can't be closed.
        batches: Any = dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)
        try:
            # Ray Data ends the execution when its iterator is closed.
            with closing(iter(batches)) as tables:
                yield from tables
        except _StoppedError:
            return
        except ray.exceptions.RayError as error:
            raise RunError(f"the data stream failed: {error}") from error


class _StoppedError(Exception):
    """The stream was asked to stop."""


class _StopOnRequest(ExecutionCallback):
    """Ends an execution on request, also one that waits for CPUs, whose consumer can't close it.

    Ray Data 2.60 calls the classes that it is given; this one is its own instance. It is private to Ray in part (a
    canary test covers it). The event stays in this process.
    """

    def __init__(self, stopped: threading.Event | None = None) -> None:
        self._stopped = stopped or threading.Event()

    def __call__(self) -> _StopOnRequest:
        return self

    def __reduce__(self) -> tuple[type[_StopOnRequest], tuple[()]]:
        return _StopOnRequest, ()

    def on_execution_step(self, executor: Any) -> None:
        if self._stopped.is_set():
            raise _StoppedError


class _SlotSource(Datasource):
    """Blocks of slots as a Ray Data source: one task each."""

    def __init__(self, sources: tuple[PlannedSource, ...], blocks: Blocks, secrets: SecretsFile | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources, self._blocks, self._secrets = sources, blocks, secrets

    def estimate_inmemory_data_size(self) -> int:
        return sum(map(_block_bytes, self._blocks))

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        return [
            ReadTask(
                functools.partial(_read_block, self._sources, block, self._secrets),
                BlockMetadata(num_rows=len(block), size_bytes=_block_bytes(block), input_files=None, exec_stats=None),
            )
            for block in self._blocks
        ]


def _block_bytes(block: Sequence[Slot]) -> int:
    return sum(slot.num_tokens for slot in block) * _BYTES_PER_TOKEN


def _read_block(
    sources: tuple[PlannedSource, ...], block: Sequence[Slot], secrets: SecretsFile | None = None
) -> list[pa.Table]:
    """Read one block in a Ray task."""
    return [pack(_corpora(sources, secrets), block)]


@functools.lru_cache(maxsize=2)
def _corpora(sources: tuple[PlannedSource, ...], secrets: SecretsFile | None) -> CorpusSet:
    """Keep the corpora open between the tasks of one worker process."""
    if secrets is not None:
        with suppress(FileNotFoundError):
            secrets.use()
    return CorpusSet(sources)
