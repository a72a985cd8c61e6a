"""Saves for preemption notices in simulated time: few, in time for deadlines, and the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_ulysses.checkpoint.notice import LEAST_PAUSE_S, Notice, NoticedSave, notice_asks
from ray_ulysses.config.running import CheckpointSection
from ray_ulysses.run.requests import RequestWatch
from ray_ulysses.run_names import NOTICE_FILE
from ray_ulysses.trainer.saving import NoticeWatch, due
from ray_ulysses.trainer.step import Flags
from tests.breadth import examples

NO_RULES = CheckpointSection(every_steps=None, every_minutes=None, save_at_end=False)
SLACK_S = 0.5
"""Maximum difference between the ranks' clocks, and between their threads' ends."""


@dataclass(kw_only=True)
class RankClock:
    """A rank's clocks, with their own origin and a skewed wall clock."""

    origin: float = 0.0
    skew: float = 0.0
    time: float = 0.0

    def now(self) -> float:
        return 1e9 + self.time + self.skew

    def monotonic(self) -> float:
        return self.origin + self.time


@dataclass(frozen=True, kw_only=True)
class Announced:
    """A notice, which each rank sees with its own delay; in seconds."""

    since: float
    until: float
    deadline: float | None
    lags: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Save:
    begins: float
    ends: float
    fails: bool

    @property
    def took(self) -> float:
        return self.ends - self.begins


@dataclass(frozen=True, kw_only=True)
class Case:
    announced: list[Announced]
    clocks: list[RankClock]
    step_s: Callable[[], float]
    save_s: Callable[[], float]
    fails: Callable[[], bool] = lambda: False
    longest_step: float = 1.0
    longest_save: float = 1.0
    is_steady: bool = True

    def heard(self, rank: int, time: float) -> Notice | None:
        standing = [one for one in self.announced if one.since + one.lags[rank] <= time < one.until]
        deadlines = [1e9 + one.deadline for one in standing if one.deadline is not None]
        return Notice(deadline=min(deadlines, default=None)) if standing else None


def watch_of(rank: int, clock: RankClock, notice: Callable[[], Notice | None], requests: RequestWatch) -> NoticeWatch:
    worker: Any = SimpleNamespace(rank=rank, clock=clock, notice=notice)
    return NoticeWatch(worker, requests if rank == 0 else None)


def simulate(case: Case, folder: Path) -> tuple[list[Save], list[float]]:
    """Return the saves and the times at which steps end, until 30 s after the last notice."""
    time, until, requests = 0.0, max(one.until for one in case.announced) + 30.0, RequestWatch(folder, "")
    watches = [
        watch_of(rank, clock, lambda rank=rank: case.heard(rank, time), requests)  # type: ignore[misc]
        for rank, clock in enumerate(case.clocks)
    ]
    saves: list[Save] = []
    ends: list[float] = []
    taken_step = step = 0
    while time < until:
        time += case.step_s()
        step += 1
        ends.append(time)
        newest = saves[-1] if saves else None
        saving = newest is not None and time < newest.ends
        failed = newest is not None and not saving and newest.fails
        counts = [0] * len(Flags().to_counts())
        for watch, clock in zip(watches, case.clocks, strict=True):
            clock.time = time
            if newest is not None and not saving and not newest.fails:
                watch.committed(taken_step, newest.took)
            asks = watch.look(failed=failed)
            own = Flags(notice=watch.notice is not None, notice_due=asks, failed=failed, saving=saving)
            counts = [a + b for a, b in zip(counts, own.to_counts(), strict=True)]
        flags = Flags.from_counts(counts)
        if due(NO_RULES, flags, step=step, taken_step=taken_step, last_step=10**9) is not None:
            taken_step = step
            if flags.notice:
                for watch in watches:
                    watch.taken(step)
            saves.append(Save(begins=time, ends=time + case.save_s(), fails=case.fails()))
        assert len({watch._last.step if watch._last else None for watch in watches}) == 1
    requests.close()
    return saves, ends


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    world = rng.choice((1, 2, 4))
    mean_step, mean_save = 10 ** rng.uniform(-0.5, 1.3), 10 ** rng.uniform(-1, 1.6)
    jitter = rng.choice((0.0, 0.0, 0.2, 0.8))
    announced = []
    time = rng.uniform(0.0, 20.0)
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        length = rng.choice((rng.uniform(0.1, 5.0), rng.uniform(5.0, 60.0), rng.uniform(30.0, 200.0)))
        deadline = rng.choice((None, time + length, time + rng.uniform(0.5, 1.5) * length))
        lags = tuple(rng.choice((0.0, rng.uniform(0.0, 2.0))) for _ in range(world))
        announced.append(Announced(since=time, until=time + length, deadline=deadline, lags=lags))
        # The next notice comes immediately (a changed deadline), later, or during this notice.
        time += rng.choice((length, length + rng.uniform(0.0, 40.0), length * rng.random()))
    clocks = [RankClock(origin=rng.uniform(0, 1e6), skew=rng.uniform(-SLACK_S / 2, SLACK_S / 2)) for _ in range(world)]
    return Case(
        announced=announced,
        clocks=clocks,
        step_s=lambda: mean_step * (1 + jitter * rng.uniform(-1, 1)),
        save_s=lambda: mean_save * (1 + jitter * rng.uniform(-1, 1)),
        fails=(lambda: rng.random() < 0.3) if rng.random() < 0.2 else lambda: False,
        longest_step=mean_step * (1 + jitter),
        longest_save=mean_save * (1 + jitter),
        is_steady=jitter <= 0.2,
    )


NUM_CASES = examples(200)


def test_saves_for_notices_are_few_and_a_deadline_loses_little(tmp_path: Path) -> None:
    num_answered = num_close = 0
    for seed in range(NUM_CASES):
        case = draw(seed)
        saves, ends = simulate(case, tmp_path)
        check_saves_are_few(seed, case, saves)
        if not any(save.fails for save in saves):
            answered, close = check_deadlines(seed, case, saves, ends)
            num_answered, num_close = num_answered + answered, num_close + close
    assert num_answered > NUM_CASES / 10 and num_close > NUM_CASES / 20


def check_saves_are_few(seed: int, case: Case, saves: list[Save]) -> None:
    """Check that a pause as long as the previous save precedes each save, except for the last before a deadline."""
    deadlines = [one.deadline for one in case.announced if one.deadline is not None]
    for before, save in pairwise(saves):
        stood = any(case.heard(rank, before.begins) for rank in range(len(case.clocks)))
        if before.fails or not stood:
            continue
        pause_s = max(before.took, LEAST_PAUSE_S)
        last_chance_s = 1.5 * before.took + case.longest_step + SLACK_S
        is_last_chance = any(
            before.begins <= deadline - last_chance_s + 2 * (case.longest_step + SLACK_S)
            and deadline - last_chance_s - SLACK_S <= save.begins <= deadline + SLACK_S
            for deadline in deadlines
        )
        assert save.begins >= before.ends + pause_s - 1e-6 or is_last_chance, (seed, before, save)


def check_deadlines(seed: int, case: Case, saves: list[Save], ends: list[float]) -> tuple[int, int]:
    """Check that a save was committed before each deadline if possible, with a bound on the time lost."""
    num_answered = num_close = 0
    save_s, step_s = case.longest_save, case.longest_step
    for one in case.announced:
        since = one.since + min(one.lags)
        others = [other for other in case.announced if other is not one and other.deadline is not None]
        if one.deadline is None or not since < one.deadline <= one.until or others:
            continue
        # The first step that ends after the notice and without an older save in progress.
        old = [save for save in saves if save.begins < since]
        free = [end for end in ends if end >= since and not any(save.begins < end < save.ends for save in old)]
        if not free or free[0] + save_s > one.deadline:
            continue
        num_answered += 1
        whole = [save for save in saves if save.ends <= one.deadline]
        assert whole, seed
        lost_s = one.deadline - max(save.begins for save in whole)
        assert lost_s <= 2 * save_s + max(save_s, LEAST_PAUSE_S) + step_s + 1e-6, (seed, lost_s)
        if case.is_steady and one.deadline - since > 4 * (save_s + step_s):
            num_close += 1
            assert lost_s <= 2 * save_s + 2 * step_s + 2 * SLACK_S, (seed, lost_s)
    return num_answered, num_close


@pytest.mark.parametrize(
    ("deadline", "begins"), [(None, [5.0, 16.0, 27.0, 38.0]), (45.0, [5.0, 16.0, 27.0, 38.0, 44.0])]
)
def test_a_notice_of_forty_seconds_costs_few_saves(tmp_path: Path, deadline: float | None, begins: list[float]) -> None:
    one = Announced(since=5.0, until=45.0, deadline=deadline, lags=(0.0, 0.0))
    case = Case(announced=[one], clocks=[RankClock(), RankClock()], step_s=lambda: 1.0, save_s=lambda: 0.3)
    saves, _ = simulate(case, tmp_path)
    assert [save.begins for save in saves] == begins
    last = NoticedSave(step=1, taken_at=0.0, took_s=4.0)
    # The last chance is 1.5 saves of 4 s and a step of 1 s before the deadline, and is taken once.
    for left_s, now, asks in ((7.5, 4.5, False), (7.0, 5.0, True), (3.9, 8.1, False)):
        assert notice_asks(last, left_s=left_s, now=now, step_s=1.0) is asks
    assert not notice_asks(NoticedSave(step=2, taken_at=5.0, took_s=4.0), left_s=3.0, now=9.0, step_s=1.0)


def test_rank_0_hears_the_file_and_the_earliest_deadline_counts(tmp_path: Path) -> None:
    requests = RequestWatch(tmp_path, "")
    watch = watch_of(0, RankClock(), lambda: Notice(deadline=1e9 + 60), requests)
    assert watch.look(failed=False)
    assert watch.notice == Notice(deadline=1e9 + 60)
    (tmp_path / NOTICE_FILE).write_text(f"{1e9 + 30}")
    assert watch.look(failed=False)
    assert watch.notice == Notice(deadline=1e9 + 30)
    other = watch_of(1, RankClock(), lambda: None, requests)
    assert not other.look(failed=False) and other.notice is None
