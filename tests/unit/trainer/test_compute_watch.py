"""Slow ranks are measured now and then, named once, and left only where the configuration allows it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    """A watch on rank 0, and what all ranks would measure."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, run_dir: Path, *, world_size: int = 4, slow: str = "report"
    ) -> None:
        self.time_s, self.times, self.warned, self.measured = 0.0, SLOW, list[str](), 0
        worker = SimpleNamespace(
            clock=SimpleNamespace(monotonic=lambda: self.time_s),
            world_size=world_size,
            device=torch.device("cpu"),
            session="command",
            cluster_nodes=("a", "a", "b", "b"),
        )
        config = SimpleNamespace(run_dir=run_dir, elastic=SimpleNamespace(slow_ranks=slow))
        context: Any = SimpleNamespace(
            worker=worker,
            run=SimpleNamespace(config=config),
            nodes=("host-a", "host-a", "host-b", "host-b"),
            messenger=SimpleNamespace(gather=self._gather),
        )
        recorder: Any = SimpleNamespace(warned=self.warned.append, in_background=lambda call: call())
        monkeypatch.setattr(compute_watch, "compute_s", lambda device: 1.0)
        self.watch = ComputeWatch(context, recorder)

    def _gather(self, own_s: float) -> list[float]:
        self.measured += 1
        return self.times

    def window(self, times: list[float] = SLOW) -> None:
        self.times, self.time_s = times, self.time_s + WINDOW_S
        self.watch.after_step(Flags(compute_due=self.watch.is_due()))


def test_ranks_are_measured_at_most_every_30_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(monkeypatch, tmp_path)
    for ranks.time_s, due in ((0.0, False), (29.9, False), (30.0, True), (40.0, False), (60.0, True)):
        assert ranks.watch.is_due() is due
        ranks.watch.after_step(Flags(compute_due=due))
    assert ranks.measured == 2


@pytest.mark.parametrize("busy", ["saving", "memory_busy"])
def test_ranks_are_not_measured_beside_a_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, busy: str) -> None:
    ranks = Ranks(monkeypatch, tmp_path)
    ranks.time_s = WINDOW_S
    ranks.watch.after_step(Flags(compute_due=True, **{busy: True}))
    assert ranks.measured == 0 and ranks.watch.is_due()
    ranks.watch.after_step(Flags(compute_due=True))
    assert ranks.measured == 1


def test_a_rank_that_can_not_measure_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(monkeypatch, tmp_path)
    for _ in range(WINDOWS):
        ranks.window([1.0, float("nan"), 1.4, 1.0])
    assert len(ranks.warned) == 1 and ranks.warned[0].startswith("rank 2 ")


def test_a_rank_alone_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(monkeypatch, tmp_path, world_size=1)
    ranks.time_s = 1e6
    assert not ranks.watch.is_due()


def test_a_rank_that_stays_slow_is_named_once_and_again_after_it_was_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = Ranks(monkeypatch, tmp_path)
    for _ in range(WINDOWS - 1):
        ranks.window()
    assert ranks.warned == []
    for _ in range(3):
        ranks.window()
    assert ranks.warned == [
        "rank 2 on host-b computes 1.4 times as long as the median rank, in 5 measurements in a row: check its GPU for "
        "throttling and its node for other work (the run goes on with it: elastic.slow_ranks=report)"
    ]
    assert excluded_nodes(tmp_path, "command") == {}
    ranks.window(EVEN)
    for _ in range(WINDOWS):
        ranks.window()
    assert len(ranks.warned) == 2


def test_its_node_is_left_where_the_configuration_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(monkeypatch, tmp_path, slow="exclude")
    for _ in range(WINDOWS):
        assert excluded_nodes(tmp_path, "command") == {}
        ranks.window()
    assert ranks.warned[0].endswith("(the driver leaves its node where that pays: elastic.slow_ranks=exclude)")
    assert excluded_nodes(tmp_path, "command") == {"b": 1.4}
    for _ in range(WINDOWS):
        ranks.window([1.5, 1.0, 1.0, 1.0])
    assert excluded_nodes(tmp_path, "command") == {"a": 1.5, "b": 1.4}


def test_a_request_that_can_not_be_written_stops_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(monkeypatch, tmp_path / "gone", slow="exclude")
    told: list[str] = []
    with warnings_forwarded(told.append):
        for _ in range(WINDOWS):
            ranks.window()
    (text,) = told
    assert text.startswith("the request to leave slow nodes can't be written: ")


def test_a_measurement_takes_little_time() -> None:
    assert 0 < compute_s(torch.device("cpu")) < 1
