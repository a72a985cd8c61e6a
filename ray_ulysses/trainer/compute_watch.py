"""Times the same small computation on every rank while a run trains, and names ranks that stay slow."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from ray_ulysses.elastic.stragglers import Stragglers, after_window
from ray_ulysses.logging import get_logger
from ray_ulysses.run.requests import exclude_nodes

if TYPE_CHECKING:
    from ray_ulysses.trainer.agreement import Flags
    from ray_ulysses.trainer.context import AttemptContext
    from ray_ulysses.trainer.record import Recorder

WINDOW_S = 30.0
"""Shortest time between two measurements, in seconds; there is one per step at most."""

_log = get_logger(__name__)


class ComputeWatch:
    """Finds slow ranks of an attempt; every rank has one.

    Steps themselves tell nothing: in each collective the fast ranks wait for the slow one.
    """

    def __init__(self, context: AttemptContext, recorder: Recorder) -> None:
        self._context, self._recorder = context, recorder
        self._seen, self._told = Stragglers(), frozenset[int]()
        self._measured_at = context.worker.clock.monotonic()

    def is_due(self) -> bool:
        """Return whether the ranks are to be measured after this step; asked on rank 0."""
        waited_s = self._context.worker.clock.monotonic() - self._measured_at
        return self._context.worker.world_size > 1 and waited_s >= WINDOW_S

    def after_step(self, flags: Flags) -> None:
        """Measure, if that is due; every rank must call, with the flags on which all have agreed."""
        if not flags.compute_due:
            return
        worker, config = self._context.worker, self._context.run.config
        self._measured_at = worker.clock.monotonic()
        times = self._context.exchange.gather(compute_s(worker.device))
        if times is None:
            return
        self._seen = after_window(self._seen, dict(enumerate(times)))
        nodes = self._context.nodes
        leaves = self._seen.to_exclude(may_exclude=config.elastic.slow_ranks == "exclude")
        for one in self._seen.named:
            if one.rank not in self._told:
                then = "the run leaves this node" if one.rank in leaves else "the run goes on with it"
                self._recorder.warned(
                    f"{one.said(nodes[one.rank])} ({then}: elastic.slow_ranks={config.elastic.slow_ranks})"
                )
        self._told = frozenset(one.rank for one in self._seen.named)
        places = worker.cluster_nodes
        if leaves and places:
            try:
                exclude_nodes(config.run_dir, worker.session, {places[rank] for rank in leaves})
            except OSError as error:
                _log.warning("the request to leave slow nodes can't be written: %s", error)


def compute_s(device: torch.device) -> float:
    """Return how long this rank takes for fixed products of matrices, in seconds: the median of a few times."""
    is_gpu = device.type == "cuda"
    size, products = (2048, 40) if is_gpu else (192, 1)
    matrix = torch.full((size, size), 1.0 / size, dtype=torch.bfloat16 if is_gpu else torch.float32, device=device)
    times = []
    for _ in range(9):
        if is_gpu:
            torch.cuda.synchronize(device)
        started = perf_counter()
        for _ in range(products):
            matrix @ matrix
        if is_gpu:
            torch.cuda.synchronize(device)
        times.append(perf_counter() - started)
    return median(times)
