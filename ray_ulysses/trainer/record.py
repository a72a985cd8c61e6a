"""Records an attempt in the journal, on rank 0."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import psutil
import torch

from ray_ulysses.checkpoint.errors import StorageFailedError
from ray_ulysses.clock import Clock
from ray_ulysses.errors import RunError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.checkpoint_store import commit_fields, found_fields
from ray_ulysses.run.settings import flat_settings, versions
from ray_ulysses.storage.background import BackgroundCalls
from ray_ulysses.tracking.journal_lines import encode_record, is_durable
from ray_ulysses.trainer.step import device_memory_gib

if TYPE_CHECKING:
    from ray_ulysses.checkpoint import Damage
    from ray_ulysses.checkpoint.background import Saved
    from ray_ulysses.parallel.layout import ParallelLayout
    from ray_ulysses.planner.stages import Stage
    from ray_ulysses.run.start_point import RunPosition
    from ray_ulysses.tracking.journal import JournalWriter
    from ray_ulysses.trainer.context import AttemptContext
    from ray_ulysses.trainer.step import StepResult

_AFTER_A_PAUSE = ("step", "attempt_ended")
"""Records that report for how long training was paused for checkpoints before them."""


class SavingTime:
    """Accumulates the time for which training pauses for checkpoints, until a record reports it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds = 0.0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure a block in which training pauses for a checkpoint, if one is due."""
        begin = self._clock.monotonic()
        try:
            yield
        finally:
            self._seconds += self._clock.monotonic() - begin

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = round(self._seconds, 6), 0.0
        return seconds


_MEGABYTE: Final = 1e6
# A container without /proc raises these; they must not end a run.
_UNAVAILABLE: Final = (OSError, RuntimeError)


class SystemMeter:
    """Reads the load of this node, which takes less than a millisecond.

    Args:
        device: The device of this process; the memory in use on a GPU is read across all processes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._received = self._sent = 0.0
        with suppress(*_UNAVAILABLE):
            psutil.cpu_percent()  # the next call measures from here
            self._received, self._sent = self._network()

    def read(self) -> dict[str, float]:
        """Return metrics by name; empty if the system does not report them."""
        try:
            memory, disk = psutil.virtual_memory(), psutil.disk_usage(os.sep)
            received, sent = self._network()
            found = {
                "cpu_utilization_percentage": psutil.cpu_percent(),
                "system_memory_usage_megabytes": memory.used / _MEGABYTE,
                "system_memory_usage_percentage": memory.used / memory.total * 100,
                "disk_usage_megabytes": disk.used / _MEGABYTE,
                "disk_usage_percentage": disk.percent,
                "disk_available_megabytes": disk.free / _MEGABYTE,
                "network_receive_megabytes": received - self._received,
                "network_transmit_megabytes": sent - self._sent,
            }
        except _UNAVAILABLE:
            return {}
        return {f"system/{name}": round(value, 1) for name, value in {**found, **self._gpu()}.items()}

    def _gpu(self) -> dict[str, float]:
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._device)
        return {
            "gpu_0_memory_usage_megabytes": (total - free) / _MEGABYTE,
            "gpu_0_memory_usage_percentage": (total - free) / total * 100,
        }

    def _network(self) -> tuple[float, float]:
        counted = psutil.net_io_counters()
        # Without an interface there is nothing to count.
        return (0.0, 0.0) if counted is None else (counted.bytes_recv / _MEGABYTE, counted.bytes_sent / _MEGABYTE)


_log = get_logger(__name__)
_MOST_WAITING_BYTES = 64 * 2**20
"""Bytes of records that may wait for the storage. Failed saves end a run long before (`checkpoint.max_failed_saves`),
unless it saves nothing: then the journal is its only trace, and has to be written."""
_CALL_BYTES = 4096
"""Estimated memory of any other call that waits for the storage; it counts towards that limit."""
_LONG_S = 10.0
"""A storage that has not answered for this long is reported once, in seconds."""
_CLOSE_S = 60.0
"""Longest wait for the end of the journal."""
_ABANDON_S = 1.0
_TEND_EVERY_S = 3.0
_RECORDED = {"model", "data", "optimizer", "schedule"}


class Recorder:
    """The journal of one attempt; on ranks other than 0 it records nothing.

    A thread writes it. Training continues at first when the storage fails or hangs: records wait in memory, and no
    checkpoint is committed before they are written. Any thread may record. ``time`` accumulates pauses for checkpoints.
    """

    def __init__(self, context: AttemptContext, journal: JournalWriter | None) -> None:
        self._context = context
        self._journal = journal
        # The last error of the journal, until it has taken all records, and what waited in it then.
        self._failure: OSError | None = None
        self._kept_bytes = 0
        self._final: StorageFailedError | None = None
        self._is_warned = self._is_said_to_hang = False
        self._num_bytes = 0
        self._direct_rows = 0.0
        config = context.run.config
        self._awaits_stream = config.data.engine == "ray"
        self._patience_s = max(60.0, config.checkpoint.failed_saves_patience_s)
        self._order = threading.Lock()
        self.time = SavingTime(context.worker.clock)
        is_read = journal is not None and config.trackers and config.tracking.system_metrics
        self._system = SystemMeter(context.worker.device) if is_read else None
        if journal is not None:
            self._calls = BackgroundCalls("journal", tick=self._tend, every_s=_TEND_EVERY_S, clock=context.worker.clock)

    @classmethod
    def open(cls, context: AttemptContext, journal: JournalWriter | None) -> Recorder:
        """Return a recorder that has begun to record.

        Args:
            context: The attempt.
            journal: Its journal, on rank 0; None on the others.
        """
        recorder = cls(context, journal)
        recorder.phase("opening the data")
        return recorder

    def phase(self, name: str, part: Literal["build", "load"] = "build") -> None:
        """Record a phase of the start-up, which is shown until the first step.

        Args:
            name: The phase, in words.
            part: The part of a start that its time belongs to.
        """
        self._context.worker.beat("start", 0)
        self._append("phase", phase=name, part=part, **self._context.worker.command())

    def attempt_started(self, position: RunPosition, last_step: int, stage: Stage, layout: ParallelLayout) -> None:
        """Record the attempt's layout, nodes, stage, plan and settings, and the position from which it starts.

        Raises:
            RunError: The journal can't be written.
        """
        config, nodes, plan = self._context.run.config, self._context.nodes, stage.plan
        stages = {"stages"} if config.stages else set()
        sizes = {name: getattr(layout, name) for name in ("world_size", "sp_size", "ring_size", "dp_size")}
        self._append(
            "attempt_started",
            **self._context.worker.command(),
            **sizes,
            nodes=sorted(set(nodes)),
            rank_nodes=nodes,
            resumed_step=position.step,
            resumed_from=position.resumed_from,
            last_step=last_step,
            run_last_step=stage.run_last_step,
            **({} if position.inherited is None else {"taken_over": position.inherited.to_json()}),
            plan_ids=[segment.plan_id for segment in plan.segments],
            **({"stage": stage.name} if config.stages else {}),
            streams=config.data.engine == "ray",
            device_gib=device_memory_gib(self._context.worker.device),
            versions=versions(),
            settings=flat_settings(config.model_dump(mode="json", include=_RECORDED | stages)),
        )
        # Without this record nothing else could be attributed to the attempt.
        self._insist()

    def step_done(self, step: int, result: StepResult, rows: range, metrics: Mapping[str, float]) -> None:
        """Record a step.

        Args:
            step: Completed steps.
            result: The step's result.
            rows: Its global rows.
            metrics: Its metrics, as `StepMeter` computes them.
        """
        self._direct_rows += result.direct_rows
        if self._awaits_stream and result.direct_rows == 0:
            self._awaits_stream = False
            self._append("stream_started", step=step, direct_rows=math.ceil(self._direct_rows))
        is_logged = step % self._context.run.config.run.log_every_steps == 0
        system = self._system.read() if self._system is not None and is_logged else {}
        self._append(
            "step",
            **{"mfu": None, **metrics},
            step=step,
            tokens=result.tokens,
            rows=[rows.start, rows.stop],
            digest=f"{result.digest:016x}",
            **({"system": system} if system else {}),
        )
        if self._journal is not None and isinstance(self._context.run.config.run_dir, Path):
            # From now on the record outlives this process; in an object store it waits for a segment.
            self._calls.wait_promptly()

    def evaluated(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        """Record an evaluation."""
        self._append("evaluation", step=step, loss=loss, tokens=tokens, seconds=round(seconds, 6))

    def checkpoint_committed(self, saved: Saved) -> None:
        """Record a committed checkpoint."""
        self._append(
            "checkpoint_committed",
            **commit_fields(saved.ref, saved.meta),
            stall_seconds=round(saved.stall_s, 6),
            seconds=round(saved.save_s, 6),
        )

    def checkpoints_found(self) -> None:
        """Record the committed checkpoints as the attempt starts; an earlier attempt may have died before doing so.

        Raises:
            OSError: They can't be listed.
        """
        if self._journal is not None and (found := found_fields(self._context.run.store)) is not None:
            self._append("checkpoints_found", **found)

    def checkpoint_deleted(self, step: int) -> None:
        """Record that retention has deleted a checkpoint."""
        self._append("checkpoint_deleted", step=step)

    def checkpoint_failed(self, step: int, reason: str) -> None:
        """Record a save that failed."""
        self._append("checkpoint_failed", step=step, reason=reason)

    def warned(self, text: str) -> None:
        """Record a warning for a person."""
        self._append("warning", text=text)

    def preemption_noticed(self, step: int, deadline: float | None = None) -> None:
        """Record that a node will be preempted, with the deadline in seconds since the epoch, if known."""
        self._append("preemption_notice", step=step, deadline=deadline)

    def bad_step(self, step: int, rows: range, plan_id: str, reason: str) -> None:
        """Record a step that ends the attempt; the command reads the record.

        Raises:
            RunError: The journal can't be written.
        """
        self._append("bad_step", step=step, rows=[rows.start, rows.stop], plan_id=plan_id, reason=reason)
        self._insist()

    def is_gone(self) -> bool:
        """Return whether the journal had been deleted or moved with the run's directory, at the last check."""
        return self._journal is not None and self._journal.is_gone

    def journal_position(self) -> dict[str, int]:
        """Return the end of the journal: the attempt, and the size of its file including unwritten records."""
        return {"attempt": self._context.attempt, "bytes": self._num_bytes}

    def storage_failure(self) -> StorageFailedError | None:
        """Return the error that ends the attempt if the storage has taken no records for too long; warns of a hang."""
        if self._journal is None or self._final is not None:
            return self._final
        hangs_for_s = self._calls.hangs_for_s
        if self._calls.waiting_bytes + self._kept_bytes > _MOST_WAITING_BYTES or hangs_for_s > self._patience_s:
            # Kept, since all ranks end for it, even if the storage answers in the meantime.
            self._final = StorageFailedError(str(self._unwritten(self._failure or _no_answer(hangs_for_s))))
        elif hangs_for_s > _LONG_S and not self._is_said_to_hang:
            _log.warning(
                "run.storage=%s has not answered for %.0f s: training continues, its records wait in memory, and no "
                "checkpoint is committed meanwhile",
                self._context.run.config.run.storage, hangs_for_s,
            )  # fmt: skip
        self._is_said_to_hang = hangs_for_s > _LONG_S
        return self._final

    def sync(self) -> None:
        """Make the steps so far survive a power cut, as the checkpoint that relies on them will.

        Raises:
            OSError: They can't be written now, so that no checkpoint may be committed.
        """
        if self._journal is not None:
            self._flush()
            self._journal.sync()
            self._is_warned = False

    def in_background(self, call: Callable[[], object]) -> None:
        """Queue a call that may wait for the run's storage, after all earlier records; only rank 0 makes it."""
        if self._journal is not None:
            self._calls.ask(call, _CALL_BYTES)

    def checkpoint_set_aside(self, damage: Damage) -> None:
        """Record a checkpoint that was passed over; it is no longer part of the run."""
        self._append("checkpoint_set_aside", step=damage.step, reason=damage.reason, kind=damage.kind)

    def ended(self, status: Literal["finished", "stopped", "resized", "stage"], step: int) -> None:
        """Record that the attempt ended as intended.

        Raises:
            RunError: The journal can't be written.
        """
        self._append("attempt_ended", reason=status)
        if status == "finished":
            self._append("run_finished", step=step)
        self._insist()
        try:
            self._close()
        except OSError as error:
            raise self._unwritten(error) from error

    def failed(self, error: BaseException) -> None:
        """Record the error that ended the attempt; never raises, since that error is being raised."""
        journal = self._journal
        if journal is None:
            return
        try:
            if self._context.worker.is_watched:
                # The launcher records it, and must not wait for this rank.
                self._calls.ask(journal.close)
                self._calls.close()
                self._calls.wait(_ABANDON_S)
                return
            reason = f"failed: {type(error).__name__}: {error}"
            self._append("attempt_ended", reason=reason, rank=self._context.rank, node=self._context.worker.node)
            self._close()
        except OSError as again:
            _log.warning("%s; waiting records are lost with this process", self._unwritten(again))
        except Exception as again:
            _log.warning("the end of the attempt could not be recorded (%s)", again)

    def _append(self, event: str, **fields: Any) -> None:
        """Queue a record; it is kept until it is written."""
        if self._journal is None:
            return
        with self._order:
            saving = {"saving_seconds": self.time.take()} if event in _AFTER_A_PAUSE else {}
            now = self._context.worker.clock.now()
            found, line = encode_record(
                {"time": now, "event": event, "attempt": self._context.attempt, **fields, **saving}
            )
            self._num_bytes += len(line)
            self._calls.ask(partial(self._write, line, durable=is_durable(found)), len(line))

    def _write(self, line: bytes, *, durable: bool) -> None:
        """Write a record; runs in the journal's thread."""
        journal = self._journal
        assert journal is not None
        try:
            journal.append_line(line, durable=durable)
            self._failure = None
        except OSError as error:
            self._failure = error
            if not self._is_warned:
                self._is_warned = True
                _log.warning(
                    "the journal %s can't be written (%s): its records wait in memory, and no checkpoint is committed "
                    "before they are written; free space or repair run.storage",
                    journal.path,
                    error.strerror or error,
                )
        self._kept_bytes = journal.num_waiting_bytes
        self._tend()

    def _tend(self) -> None:
        assert self._journal is not None
        with contextlib.suppress(OSError):
            self._journal.tend()

    def _flush(self) -> None:
        """Wait until the thread has tried to write all records so far."""
        if not self._calls.wait(self._patience_s):
            raise _no_answer(self._patience_s)

    def _insist(self) -> None:
        """Wait until the records are written, or raise `RunError`."""
        if self._journal is None:
            return
        try:
            self._flush()
            if self._failure is not None:
                raise self._failure
        except OSError as error:
            raise self._unwritten(error) from error

    def _unwritten(self, error: OSError) -> RunError:
        assert self._journal is not None
        waiting = (self._calls.waiting_bytes + self._kept_bytes) / 2**20
        return RunError(
            f"the journal {self._journal.path} can't be written ({error.strerror or error}), and {waiting:.2f} MiB of "
            "records wait; free space or repair run.storage, then start the same command again: it resumes from the "
            "newest checkpoint"
        )

    def _close(self) -> None:
        """Close the journal, once everything else is written."""
        journal = self._journal
        if journal is None:
            return
        limit_s = _ABANDON_S if self._calls.hangs_for_s > _LONG_S else _CLOSE_S
        self._calls.ask(partial(self._close_journal, journal))
        self._calls.close()
        if not self._calls.wait(limit_s):
            raise _no_answer(limit_s)
        if self._failure is not None:
            raise self._failure

    def _close_journal(self, journal: JournalWriter) -> None:
        try:
            journal.close()
            self._failure = None
        except OSError as error:
            self._failure = error


def _no_answer(seconds: float) -> OSError:
    return OSError(errno.ETIMEDOUT, f"run.storage has not answered for {seconds:.0f} s")
