"""Times the same small computation on every rank during training, and reports ranks that stay slow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from time import perf_counter

import torch

from ray_ulysses.elastic.outliers import Straggler, after_window
from ray_ulysses.logging import get_logger
from ray_ulysses.run.requests import exclude_nodes
from ray_ulysses.storage.place import Place
from ray_ulysses.trainer.context import AttemptContext
from ray_ulysses.trainer.record import Recorder
from ray_ulysses.trainer.step import Flags

WINDOW_S = 30.0
"""Minimum time between two measurements, in seconds. At most one measurement is made per step."""

_log = get_logger(__name__)


class ComputeWatch:
    """Detects slow ranks. Every rank of an attempt creates a watch.

    Step times can't reveal slow ranks: in each collective, the faster ranks wait for the slowest rank.
    """

    def __init__(self, context: AttemptContext, recorder: Recorder) -> None:
        self._context, self._recorder = context, recorder
        self._slow, self._named = tuple[Straggler, ...](), frozenset[int]()
        self._measured_at = context.worker.clock.monotonic()

    def is_due(self) -> bool:
        """Return whether rank 0 requests a measurement after this step."""
        waited_s = self._context.worker.clock.monotonic() - self._measured_at
        return self._context.worker.world_size > 1 and waited_s >= WINDOW_S

    def after_step(self, flags: Flags) -> None:
        """Measure all ranks if a measurement is due. All ranks must call this method with the same flags.

        Call this method before the step's state is saved. Nothing is measured while an earlier save is in progress,
        because the saving threads would distort the measurement.
        """
        if not flags.compute_due or flags.saving or flags.memory_busy:
            return
        worker, config = self._context.worker, self._context.run.config
        self._measured_at = worker.clock.monotonic()
        times = self._context.messenger.gather(compute_s(worker.device))
        if times is None:
            return
        self._slow = after_window(self._slow, {rank: time for rank, time in enumerate(times) if math.isfinite(time)})
        named, may_leave = [one for one in self._slow if one.is_named], config.elastic.slow_ranks == "exclude"
        for one in named:
            if one.rank not in self._named:
                then = "the driver excludes its node if that saves time" if may_leave else "training continues"
                said = one.said(self._context.nodes[one.rank])
                self._recorder.warned(f"{said} ({then}: elastic.slow_ranks={config.elastic.slow_ranks})")
        self._named = frozenset(one.rank for one in named)
        places = worker.cluster_nodes
        if named and may_leave and places:
            slow = {places[one.rank]: one.ratio for one in named}
            self._recorder.in_background(partial(_exclude, config.run_dir, worker.session, slow))


def _exclude(run_dir: Place, session: str, slow: Mapping[str, float]) -> None:
    try:
        exclude_nodes(run_dir, session, slow)
    except OSError as error:
        _log.warning("the request to exclude slow nodes can't be written: %s", error)


def compute_s(device: torch.device) -> float:
    """Return the time that this rank needs for fixed matrix products, in seconds; NaN if a GPU is out of memory.

    The result is the minimum of several measurements, because occasional disturbances do not indicate a slow rank.
    """
    try:
        return _gpu_s(device) if device.type == "cuda" else _cpu_s()
    except torch.OutOfMemoryError:
        return math.nan


def _cpu_s() -> float:
    matrix, times = torch.full((192, 192), 1.0 / 192), []
    for _ in range(9):
        started = perf_counter()
        matrix @ matrix
        times.append(perf_counter() - started)
    return min(times)


def _gpu_s(device: torch.device) -> float:
    """Time about 100 ms of matrix products with CUDA events. Not yet tested on a GPU."""
    generator = torch.Generator(device=device).manual_seed(0)
    matrix = torch.randn(2048, 2048, dtype=torch.bfloat16, device=device, generator=generator) / 45
    times: list[float] = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(400):
            matrix @ matrix
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return min(times)
