"""Streams rows through Ray Data: each rank's slices are read on the rank's node or, if that is full, elsewhere."""

from __future__ import annotations

import functools
import gc
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.data
from ray._raylet import RAY_NODE_ID_KEY  # type: ignore[attr-defined]  # compiled
from ray.data import Datasource, ExecutionResources, ReadTask
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data.block import BlockMetadata
from ray.data.exceptions import ExecutionTimeoutError
from ray.util.debug import log_once

from ray_ulysses.cluster.session import session_logs
from ray_ulysses.elastic.causes import one_line
from ray_ulysses.errors import RunError
from ray_ulysses.storage.lock import lock_file

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data._internal.execution.interfaces import RefBundle

    from ray_ulysses.data.plan.corpus_set import CorpusSet, PlannedSource
    from ray_ulysses.data.read.blocks import Block
    from ray_ulysses.run.secrets_file import SecretsFile

_BLOCKS_AHEAD = 2
_SHORTEST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = {True: 0.1, False: 1.0}
"""Longest pause of an execution in seconds, by whether a consumer is waiting for a block."""
_TURN_POLL_S = 0.05
_LONGEST_TURN_S = 10.0
"""Longest wait for the start-up lock, in seconds: a lock holder that waits for CPUs must not delay other runs."""


class RayStreams:
    """Reads slots through Ray Data, one stream at a time, with one task per block.

    Args:
        num_cpus: CPUs reserved by a read task.
        secrets: ``cluster.secrets_file``, with the credentials for corpora in object stores.
    """

    def __init__(self, num_cpus: float = 0.25, secrets: SecretsFile | None = None) -> None:
        self._num_cpus, self._secrets = num_cpus, secrets
        self._is_cold = True

    def read(self, blocks: Sequence[Block], stopped: threading.Event) -> Generator[pa.Table, None, None]:
        """Yield the blocks' slots in order; closing the generator or setting `stopped` ends the stream.

        Raises:
            RunError: The stream failed.
        """
        if not blocks:
            return
        pace = _Pace(stopped)
        try:
            with ExitStack() as starting:
                if self._is_cold:
                    starting.enter_context(cold_start(stopped))
                if stopped.is_set():
                    return
                # `iter_batches` of Ray Data 2.60 leaks a thread and its blocks when it is closed.
                bundles = self._dataset(blocks, pace).iter_internal_ref_bundles()
                is_first = True
                try:
                    # Ray reads two more blocks once it counts a bundle as taken: keep no reference to the bundle.
                    while (refs := pace.next_refs(bundles)) is not None:
                        if is_first:
                            is_first = self._is_cold = False
                            starting.close()
                            # Reference cycles in Ray Data keep alive the blocks of a stream that was closed early.
                            gc.collect()
                        while refs:
                            yield _fetched(refs.popleft(), stopped)
                finally:
                    pace.close()
                    # Ray Data ends an execution when its iterator is exhausted.
                    with suppress(Exception):
                        deque(bundles, maxlen=0)
        except _StoppedError:
            return
        except Exception as error:
            reason = one_line(getattr(error, "cause", None) or error)
            raise RunError(
                f"the Ray Data stream failed ({reason}); run the same command again to resume, or set data.engine=local"
            ) from error

    def _dataset(self, blocks: Sequence[Block], pace: _Pace) -> ray.data.Dataset:
        dataset: ray.data.Dataset = ray.data.read_datasource(
            _BlockSource(blocks, self._secrets),
            num_cpus=self._num_cpus,
            override_num_blocks=len(blocks),
            # Reading a block takes milliseconds, or seconds from an object store, and a block contains several rows.
            concurrency=1,
            # Read on the rank's node, or on any other node if the rank's is gone or has no free CPUs.
            label_selector={RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()},
            fallback_strategy=[{"label_selector": {}}],
        )
        quiet(dataset)
        # The type annotation allows only callback classes, not instances.
        context: Any = dataset.context
        context.execution_options.preserve_order = True
        # Every rank has a stream; a single one would otherwise fill its share of the nodes' object stores.
        context.execution_options.resource_limits = ExecutionResources(
            object_store_memory=_BLOCKS_AHEAD * max(block.num_bytes for block in blocks) + (1 << 20)
        )
        context.target_max_block_size = None
        # This timeout would include the time of training on a block; each rank has its own timeout.
        context.execution_no_progress_timeout_s = -1
        context.custom_execution_callback_classes = [pace]
        return dataset


def _fetched(block: Any, stopped: threading.Event) -> pa.Table:
    """Return a block's table; if the block's node is gone, Ray reads the block again."""
    while not ray.wait([block], timeout=_LONGEST_PAUSE_S[True])[0]:
        if stopped.is_set():
            raise _StoppedError
    return ray.get(block)


class _StoppedError(ExecutionTimeoutError):
    """The stream was asked to stop. Ray Data 2.60 reports any other error class as a bug."""


class _Pace(ExecutionCallback):
    """Pauses an execution while nothing changes, and ends the execution on request, even if it is waiting for CPUs.

    Ray Data 2.60's loop pauses only while a task runs, and spins while its output may not be read yet, which is the
    usual state here. Ray instantiates callback classes, so calling this instance returns the instance itself, which
    stays in this process. This class reads Ray's private state (a canary test covers it).
    """

    def __init__(self, stopped: threading.Event | None = None) -> None:
        self._stopped = stopped or threading.Event()
        self._changed, self._is_closed = threading.Event(), False
        self._seen: object = None
        self._pause_s = _SHORTEST_PAUSE_S

    def __call__(self) -> _Pace:
        return self

    def __reduce__(self) -> tuple[type[_Pace], tuple[()]]:
        return _Pace, ()

    def on_execution_step(self, executor: Any) -> None:
        """Pause, doubling the pause as long as nothing changes."""
        if self._is_closed or self._stopped.is_set():
            raise _StoppedError
        topology = executor._topology
        waits = executor._output_node[1].num_waiting_consumers > 0
        seen = (
            waits,
            [
                (op.num_active_tasks(), state.total_enqueued_input_blocks(), state.total_enqueued_output_blocks())
                for op, state in topology.items()
            ],
        )
        self._pause_s = _SHORTEST_PAUSE_S if seen != self._seen else min(2 * self._pause_s, _LONGEST_PAUSE_S[waits])
        self._seen = seen
        if self._changed.wait(self._pause_s):
            self._changed.clear()
            self._seen = None

    def next_refs(self, bundles: Iterator[RefBundle]) -> deque[Any] | None:
        """Return the next bundle's block references, or None at the end; end the execution's pause before and after."""
        self._changed.set()
        bundle = next(bundles, None)
        self._changed.set()
        return None if bundle is None else deque(entry.ref for entry in bundle.blocks)

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()


class _BlockSource(Datasource):
    """A Ray Data source of blocks, with one read task per block."""

    def __init__(self, blocks: Sequence[Block], secrets: SecretsFile | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocks, self._secrets = blocks, secrets

    def estimate_inmemory_data_size(self) -> int:
        return sum(block.num_bytes for block in self._blocks)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        return [
            ReadTask(
                functools.partial(_read_block, block, self._secrets),
                BlockMetadata(num_rows=block.num_rows, size_bytes=block.num_bytes, input_files=None, exec_stats=None),
            )
            for block in self._blocks
        ]


def _read_block(block: Block, secrets: SecretsFile | None = None) -> list[pa.Table]:
    from ray_ulysses.data.read.blocks import pack

    sources, slots = block.opened()
    return [pack(_corpora(sources, secrets), slots)]


@functools.lru_cache(maxsize=2)
def _corpora(sources: tuple[PlannedSource, ...], secrets: SecretsFile | None) -> CorpusSet:
    """Return the opened corpora, cached across the tasks of a worker process."""
    from ray_ulysses.data.plan.corpus_set import CorpusSet

    if secrets is not None:
        with suppress(FileNotFoundError):
            secrets.use()
    return CorpusSet(sources)


def quiet(dataset: ray.data.Dataset) -> ray.data.Dataset:
    """Silence a dataset's progress output, and Ray Data's console messages below the warning level."""
    context = dataset.context
    context.enable_progress_bars = False
    context.enable_operator_progress_bars = False
    context.enable_rich_progress_bars = False
    context.print_on_execution_start = False
    context.enable_auto_log_stats = False
    # Ray Data's log file still receives everything.
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.WARNING)
    # Ray 2.60 would warn once per process that progress bars are off, which is intended.
    log_once("ray_data_progress_manager_disabled")
    return dataset


@contextmanager
def cold_start(stopped: threading.Event) -> Iterator[None]:
    """Let a node's reader processes start one after another; proceed after 10 s, or if `stopped` is set.

    Starting a reader process takes seconds of CPU time. If all ranks did so at once, their first steps would be slower,
    and each rank would start a separate process instead of reusing the previous one.
    """
    logs = session_logs()
    descriptor = None if logs is None else _turn(Path(logs) / "ray-ulysses-cold-start.lock", stopped)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _turn(path: Path, stopped: threading.Event) -> int | None:
    deadline = time.monotonic() + _LONGEST_TURN_S
    while True:
        try:
            return lock_file(path)
        except BlockingIOError:
            if stopped.wait(_TURN_POLL_S) or time.monotonic() > deadline:
                return None
        except OSError:
            # Reading does not depend on the lock.
            return None
