"""What the coordinator remembers of ranks that seem to hang."""

from __future__ import annotations

from ray_ulysses.elastic.hang import HangLimits, RankProgress
from ray_ulysses.supervision.coordinator import HangWatch

LIMITS = HangLimits(floor_s=30.0, start_s=60.0, evaluation_s=60.0, save_s=60.0, row_s=60.0)


def beat(rank: int, step: int, idle_s: float) -> RankProgress:
    return RankProgress(
        rank=rank, phase="step", step=step, micro_batch=0, idle_s=idle_s, state="S", steps=step - 1, step_s=1.0
    )


def test_stacks_of_a_false_alarm_are_not_those_of_the_next() -> None:
    watch = HangWatch(LIMITS, 1, 2)
    for alarm, now in (("first", 100.0), ("second", 200.0)):
        for rank in (0, 1):
            watch.hear(beat(rank, int(now), 40.0), now)
        assert watch.find(now) is not None
        assert watch.asks_for_stacks(now) and not watch.asks_for_stacks(now)
        assert watch.stacks(now) is None
        for rank in (0, 1):
            watch.hear_stacks(rank, f"{alarm} of rank {rank}")
        assert watch.stacks(now) == {rank: f"{alarm} of rank {rank}" for rank in (0, 1)}
        # They go on.
        for rank in (0, 1):
            watch.hear(beat(rank, int(now) + 1, 0.0), now + 1)
        assert watch.find(now + 1) is None
