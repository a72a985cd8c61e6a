"""Records an attempt's events in the journal, on rank 0."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import psutil
import torch

from ray_ulysses.checkpoint import Damage
from ray_ulysses.checkpoint.background import Saved
from ray_ulysses.checkpoint.errors import StorageFailedError
from ray_ulysses.clock import Clock
from ray_ulysses.data.plan.segment import EvaluationSet
from ray_ulysses.errors import RunError
from ray_ulysses.logging import get_logger
from ray_ulysses.parallel.layout import ParallelLayout
from ray_ulysses.planner.stages import Stage
from ray_ulysses.run.checkpoint_store import commit_fields, found_fields
from ray_ulysses.run.early_stopping import EarlyStop
from ray_ulysses.run.settings import flat_settings, versions
from ray_ulysses.run.start_point import RunPosition
from ray_ulysses.storage.background import BackgroundCalls
from ray_ulysses.tracking.journal import JournalWriter
from ray_ulysses.tracking.journal_lines import encode_record, is_durable
from ray_ulysses.trainer.context import AttemptContext
from ray_ulysses.trainer.row_loss import SetLoss, combined
from ray_ulysses.trainer.sampling import Sampler
from ray_ulysses.trainer.step import StepResult, device_memory_gib

_AFTER_A_PAUSE = ("step", "attempt_ended")
"""Events that report how long training was paused for checkpoints since the previous such event."""


class SavingTime:
    """Accumulates the time during which training is paused for checkpoints."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds = 0.0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure a block in which training may pause for a checkpoint."""
        begin = self._clock.monotonic()
        try:
            yield
        finally:
            self._seconds += self._clock.monotonic() - begin

    def take(self) -> float:
        """Return the accumulated seconds and reset them to zero."""
        seconds, self._seconds = round(self._seconds, 6), 0.0
        return seconds


_MEGABYTE: Final = 1e6
# psutil raises these in a container without /proc; missing metrics must not end a run.
_UNAVAILABLE: Final = (OSError, RuntimeError)


class SystemMeter:
    """Measures this node's load in less than a millisecond. GPU memory usage includes other processes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._received = self._sent = 0.0
        with suppress(*_UNAVAILABLE):
            psutil.cpu_percent()  # starts the interval that the next call measures
            self._received, self._sent = self._network()

    def read(self) -> dict[str, float]:
        """Return system metrics by name; empty if the system does not provide them."""
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
        # Without a network interface, psutil returns None.
        return (0.0, 0.0) if counted is None else (counted.bytes_recv / _MEGABYTE, counted.bytes_sent / _MEGABYTE)


def _evaluated(found: SetLoss, counts: str) -> dict[str, float]:
    name = "pair_accuracy" if counts == "pairs" else "accuracy"
    accuracy = {} if found.accuracy is None else {name: found.accuracy}
    return {"loss": found.loss, "tokens": found.tokens, **accuracy}


_log = get_logger(__name__)
_MOST_WAITING_BYTES = 64 * 2**20
"""Maximum size of unwritten records in bytes. A run that saves checkpoints ends earlier, because its saves fail
(`checkpoint.max_failed_saves`). A run without checkpoints must write the journal, its only output."""
_CALL_BYTES = 4096
"""Estimated size in bytes of a queued call that is not a record; added to the size of unwritten records."""
_LONG_S = 10.0
"""Time after which unresponsive storage is reported once, in seconds."""
_CLOSE_S = 60.0
"""Maximum time to wait for closing the journal, in seconds."""
_ABANDON_S = 1.0
_TEND_EVERY_S = 3.0
_DETAIL_RECORDS = 1000
"""Approximate maximum number of records of routers, and of the corpora's losses, in a run. Such a record is long."""
_RECORDED = ("model", "data", "objective", "optimizer", "schedule")


class Recorder:
    """Records one attempt's events in the journal; on ranks other than 0, methods do nothing.

    A thread writes the journal. If the storage fails or hangs, training continues for a while: records wait in memory,
    and no checkpoint is committed until they are written. Any thread may record events. ``time`` accumulates pauses for
    checkpoints.
    """

    def __init__(self, context: AttemptContext, journal: JournalWriter | None) -> None:
        self._context = context
        self._journal = journal
        # The last write error, until all records are written, and the number of bytes that the journal has buffered.
        self._failure: OSError | None = None
        self._kept_bytes = 0
        self._final: StorageFailedError | None = None
        self._is_warned = self._is_said_to_hang = False
        self._num_bytes = 0
        self._direct_rows = 0.0
        self._details_every = 1
        # Training corpora by name, with their losses since the last record.
        self._source_sums: dict[str, tuple[float, float]] = {}
        config = context.run.config
        self._awaits_stream = config.data.engine == "ray"
        self._patience_s = max(60.0, config.checkpoint.failed_saves_patience_s)
        self._order = threading.Lock()
        self.time = SavingTime(context.worker.clock)
        is_read = journal is not None and config.trackers and config.tracking.system_metrics
        self._system = SystemMeter(context.worker.device) if is_read else None
        if journal is not None:
            self._calls = BackgroundCalls("journal", tick=self._tend, every_s=_TEND_EVERY_S, clock=context.worker.clock)

    def phase(self, name: str, part: Literal["build", "load"] = "build") -> None:
        """Record a start-up phase, which is displayed until the first step; its duration is added to ``part``."""
        self._context.worker.beat("start", 0)
        self._append("phase", phase=name, part=part, **self._context.worker.command())

    def attempt_started(self, position: RunPosition, last_step: int, stage: Stage, layout: ParallelLayout) -> None:
        """Record the attempt's layout, nodes, stage, plan, settings and starting position.

        Raises:
            RunError: The journal can't be written.
        """
        config, nodes, plan = self._context.run.config, self._context.nodes, stage.plan
        logged = config.run.log_every_steps
        self._details_every = logged * max(1, last_step // (_DETAIL_RECORDS * logged))
        recorded: Any = dict.fromkeys((*_RECORDED, *(["stages"] if config.stages else ())), True)
        recorded["run"] = {"seed", *(["plugins"] if config.run.plugins else [])}
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
            settings=flat_settings(config.model_dump(mode="json", include=recorded)),
        )
        # Without this record, later records could not be interpreted.
        self._insist()

    def step_done(self, step: int, result: StepResult, rows: range, metrics: Mapping[str, float]) -> None:
        """Record a step with its rows, by global number, and its metrics from `StepMeter`."""
        self._direct_rows += result.direct_rows
        if self._awaits_stream and result.direct_rows == 0:
            self._awaits_stream = False
            self._append("stream_started", step=step, direct_rows=math.ceil(self._direct_rows))
        is_logged = step % self._context.run.config.run.log_every_steps == 0
        has_details = is_logged and step % self._details_every == 0
        if result.routing and has_details:
            self._append(
                "routers",
                step=step,
                layers=[one.layer for one in result.routing],
                imbalance=[round(one.imbalance, 4) for one in result.routing],
                dead=[one.dead for one in result.routing],
                entropy=[round(one.entropy, 4) for one in result.routing],
            )
        for one in result.sources:
            loss_sum, weight = self._source_sums.get(one.name, (0.0, 0.0))
            self._source_sums[one.name] = loss_sum + one.loss_sum, weight + one.weight
        if has_details:
            self._record_sources(step)
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
            # On a file system, a written record survives this process. In an object store it waits for a segment.
            self._calls.wait_promptly()

    def _record_sources(self, step: int) -> None:
        corpora = [
            {"name": name, "loss": loss_sum / weight, "tokens": weight}
            for name, (loss_sum, weight) in self._source_sums.items()
            if weight
        ]
        if corpora:
            self._append("sources", step=step, corpora=corpora)
        self._source_sums = {}

    def evaluated(self, step: int, sets: Sequence[EvaluationSet], found: Sequence[SetLoss], seconds: float) -> float:
        """Record an evaluation, and return its mean loss over the tokens, pairs or documents of all sets."""
        total, counts = combined(found), self._context.run.config.objective.counts
        corpora = [
            {"name": one.name, "path": one.path, **_evaluated(of_set, counts)}
            for one, of_set in zip(sets, found, strict=True)
        ]
        by_corpus = {"corpora": corpora} if any(one.path is not None for one in sets) else {}
        self._append("evaluation", step=step, **_evaluated(total, counts), seconds=round(seconds, 6), **by_corpus)
        return total.loss

    def sampled(self, step: int, sampler: Sampler, found: Sequence[Sequence[int]], seconds: float) -> None:
        """Record the texts that the model wrote."""
        if sampler.text is None:
            return
        prompts = self._context.run.config.run.sample_prompts
        samples = [
            {"prompt": prompt, "text": sampler.text.decode(tokens), "tokens": len(tokens)}
            for prompt, tokens in zip(prompts, found, strict=True)
        ]
        self._append("samples", step=step, samples=samples, seconds=round(seconds, 6))

    def checkpoint_committed(self, saved: Saved) -> None:
        """Record a committed checkpoint."""
        self._append(
            "checkpoint_committed",
            **commit_fields(saved.ref, saved.meta),
            stall_seconds=round(saved.stall_s, 6),
            seconds=round(saved.save_s, 6),
        )

    def checkpoints_found(self) -> None:
        """Record all committed checkpoints at the start, in case an earlier attempt died before recording a commit.

        Raises:
            OSError: The checkpoints can't be listed.
        """
        if self._journal is not None and (found := found_fields(self._context.run.store)) is not None:
            self._append("checkpoints_found", **found)

    def checkpoint_deleted(self, step: int) -> None:
        """Record that the retention policy deleted a checkpoint."""
        self._append("checkpoint_deleted", step=step)

    def checkpoint_failed(self, step: int, reason: str) -> None:
        """Record a failed save."""
        self._append("checkpoint_failed", step=step, reason=reason)

    def warned(self, text: str) -> None:
        """Record a warning to display to the user."""
        self._append("warning", text=text)

    def preemption_noticed(self, step: int, deadline: float | None = None) -> None:
        """Record that a node will be preempted, with the deadline in seconds since the epoch, or None if unknown."""
        self._append("preemption_notice", step=step, deadline=deadline)

    def bad_step(self, step: int, rows: range, plan_id: str, reason: str) -> None:
        """Record a bad step, which ends the attempt. The command reads this record.

        Raises:
            RunError: The journal can't be written.
        """
        self._append("bad_step", step=step, rows=[rows.start, rows.stop], plan_id=plan_id, reason=reason)
        self._insist()

    def is_gone(self) -> bool:
        """Return whether, at the last check, the journal had been deleted or moved together with the run directory."""
        return self._journal is not None and self._journal.is_gone

    def journal_position(self) -> dict[str, int]:
        """Return the attempt number and the size of the journal in bytes, including unwritten records."""
        return {"attempt": self._context.attempt, "bytes": self._num_bytes}

    def storage_failure(self) -> StorageFailedError | None:
        """Return the final error if the journal has been unwritable for too long, or None. Warn about hangs."""
        if self._journal is None or self._final is not None:
            return self._final
        hangs_for_s = self._calls.hangs_for_s
        if self._calls.waiting_bytes + self._kept_bytes > _MOST_WAITING_BYTES or hangs_for_s > self._patience_s:
            # Remember the error: all ranks end the attempt, even if the storage responds again in the meantime.
            self._final = StorageFailedError(str(self._unwritten(self._failure or _no_answer(hangs_for_s))))
        elif hangs_for_s > _LONG_S and not self._is_said_to_hang:
            _log.warning(
                "run.storage=%s has not responded for %.0f s: training continues, records wait in memory, and no "
                "checkpoint is committed until the storage responds",
                self._context.run.config.run.storage, hangs_for_s,
            )  # fmt: skip
        self._is_said_to_hang = hangs_for_s > _LONG_S
        return self._final

    def sync(self) -> None:
        """Flush and sync all recorded steps before a checkpoint that refers to these steps is committed.

        Raises:
            OSError: The records can't be written now, so no checkpoint may be committed.
        """
        if self._journal is not None:
            self._flush()
            self._journal.sync()
            self._is_warned = False

    def in_background(self, call: Callable[[], object]) -> None:
        """Queue a call that accesses the run's storage, to run after earlier records. Only rank 0 runs the call."""
        if self._journal is not None:
            self._calls.ask(call, _CALL_BYTES)

    def checkpoint_set_aside(self, damage: Damage) -> None:
        """Record that an unusable checkpoint was removed from the run."""
        self._append("checkpoint_set_aside", step=damage.step, reason=damage.reason, kind=damage.kind)

    def ended(
        self, status: Literal["finished", "stopped", "resized", "stage"], step: int, early: EarlyStop | None = None
    ) -> None:
        """Record that the attempt ended without a failure, and why it finished early, if it did.

        Raises:
            RunError: The journal can't be written.
        """
        self._record_sources(step)
        self._append("attempt_ended", reason=status if early is None else f"{status}: {early}")
        if status == "finished":
            self._append("run_finished", step=step)
        self._insist()
        try:
            self._close()
        except OSError as error:
            raise self._unwritten(error) from error

    def failed(self, error: BaseException) -> None:
        """Record the error that ended the attempt. This method never raises, because ``error`` is being raised."""
        journal = self._journal
        if journal is None:
            return
        try:
            if self._context.worker.is_watched:
                # The launcher records the error, and must not wait for this rank.
                self._calls.ask(journal.close)
                self._calls.close()
                self._calls.wait(_ABANDON_S)
                return
            reason = f"failed: {type(error).__name__}: {error}"
            self._append("attempt_ended", reason=reason, rank=self._context.rank, node=self._context.worker.node)
            self._close()
        except OSError as again:
            _log.warning("%s; unwritten records are lost when this process exits", self._unwritten(again))
        except Exception as again:
            _log.warning("the end of the attempt could not be recorded (%s)", again)

    def _append(self, event: str, **fields: Any) -> None:
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
                    "the journal %s can't be written (%s): records wait in memory, and no checkpoint is committed "
                    "until they are written; free space or repair run.storage",
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
        if not self._calls.wait(self._patience_s):
            raise _no_answer(self._patience_s)

    def _insist(self) -> None:
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
            "records are unwritten; free space or repair run.storage, then run the same command again to resume from "
            "the newest checkpoint"
        )

    def _close(self) -> None:
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
    return OSError(errno.ETIMEDOUT, f"run.storage has not responded for {seconds:.0f} s")
