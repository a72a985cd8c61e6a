"""Slow ranks are measured periodically, reported once, and excluded only if the configuration allows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from ray_ulysses.elastic.outliers import WINDOWS
from ray_ulysses.run.requests import excluded_nodes
from ray_ulysses.trainer import compute_watch
from ray_ulysses.trainer.compute_watch import WINDOW_S, ComputeWatch, compute_s
from ray_ulysses.trainer.loop import warnings_forwarded
from ray_ulysses.trainer.step import Flags

SLOW = [1.0, 1.0, 1.4, 1.0]
EVEN = [1.0, 1.1, 1.2, 1.0]


class Ranks:
    def __init__(self, run_dir: Path, *, world_size: int = 4, slow: str = "report") -> None:
        self.time_s, self.times, self.warned, self.measured = 0.0, SLOW, list[str](), 0
        context = Mock(nodes=("host-a", "host-a", "host-b", "host-b"))
        context.worker.configure_mock(world_size=world_size, session="command", cluster_nodes=("a", "a", "b", "b"))
        context.worker.clock.monotonic = lambda: self.time_s
        context.run.config = SimpleNamespace(run_dir=run_dir, elastic=SimpleNamespace(slow_ranks=slow))
        context.messenger.gather = self._gather
        self.watch = ComputeWatch(context, Mock(warned=self.warned.append, in_background=lambda call: call()))

    def _gather(self, own_s: float) -> list[float]:
        self.measured += 1
        return self.times

    def windows(self, count: int, times: list[float] = SLOW) -> None:
        for _ in range(count):
            self.times, self.time_s = times, self.time_s + WINDOW_S
            self.watch.after_step(Flags(compute_due=self.watch.is_due()))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Ranks]:
    monkeypatch.setattr(compute_watch, "compute_s", lambda device: 1.0)
    return lambda folder=tmp_path, **settings: Ranks(folder, **settings)


def test_ranks_are_measured_at_most_every_30_s_and_never_during_a_save_or_alone(ranks: Callable[..., Ranks]) -> None:
    some = ranks()
    for some.time_s, due in ((0.0, False), (29.9, False), (30.0, True), (40.0, False), (60.0, True)):
        assert some.watch.is_due() is due
        some.watch.after_step(Flags(compute_due=due))
    assert some.measured == 2
    some.time_s += WINDOW_S
    for busy in (Flags(compute_due=True, saving=True), Flags(compute_due=True, memory_busy=True)):
        some.watch.after_step(busy)
        assert some.measured == 2 and some.watch.is_due()
    alone = ranks(world_size=1)
    alone.time_s = 1e6
    assert not alone.watch.is_due()


def test_a_rank_that_stays_slow_is_reported_once_per_period(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    some = ranks()
    some.windows(WINDOWS - 1)
    assert some.warned == []
    some.windows(3, [1.0, float("nan"), 1.4, 1.0])
    (warning,) = some.warned
    assert warning.startswith("rank 2 on host-b") and "elastic.slow_ranks=report" in warning
    assert excluded_nodes(tmp_path, "command") == {}
    some.windows(1, EVEN)
    some.windows(WINDOWS)
    assert len(some.warned) == 2


def test_its_node_is_left_where_the_configuration_says_so(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    some = ranks(slow="exclude")
    some.windows(WINDOWS - 1)
    assert excluded_nodes(tmp_path, "command") == {}
    some.windows(1)
    assert excluded_nodes(tmp_path, "command") == {"b": 1.4}
    some.windows(WINDOWS, [1.5, 1.0, 1.0, 1.0])
    assert excluded_nodes(tmp_path, "command") == {"a": 1.5, "b": 1.4}
    warnings: list[str] = []
    with warnings_forwarded(warnings.append):
        ranks(tmp_path / "gone", slow="exclude").windows(WINDOWS)
    assert len(warnings) == 1, "a request that can't be written ends nothing"


def test_a_measurement_takes_little_time() -> None:
    assert 0 < compute_s(torch.device("cpu")) < 1
