"""Fault schedules are parsed, checked and generated."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from ray_ulysses.rehearsal.schedule import (
    KINDS,
    MEANINGS,
    Fault,
    FaultTargets,
    parse_faults,
    parse_seconds,
    random_schedule,
    schedule_problems,
)

TWO = FaultTargets(rooms=(2, 2), elsewhere=0, least=2)
ABROAD = FaultTargets(rooms=(2,), elsewhere=2, least=2, impossible={"add-node": "not here"})
ELSEWHERE = FaultTargets(rooms=(), elsewhere=2, least=2)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("40s", 40), ("90", 90), ("1m30s", 90), ("2m", 120), ("1h1m1.5s", 3661.5), ("0s", 0)],
        *[(text, None) for text in ("", "s", "4 s", "-1s", "1s1m", "soon", "1e3")],
    ],
)
def test_durations_are_parsed(text: str, seconds: float | None) -> None:
    assert parse_seconds(text) == seconds


def test_faults_are_sorted_by_time() -> None:
    fault = Fault(at_s=12.5, kind="kill-agent")
    assert parse_faults(str(fault))[0] == (fault,)
    faults, problems = parse_faults("90s drain-node, 40s kill-node\n2m add-node  # the replacement\n\n")
    assert problems == ()
    assert [str(fault) for fault in faults] == ["40s kill-node", "90s drain-node", "120s add-node"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("40s", "'40s' is not a fault"),
        ("later kill-node", "'later kill-node' is not a fault"),
        ("40s explode", "there is no fault 'explode'"),
        (" , # nothing", "contains no fault"),
    ],
)
def test_an_invalid_schedule_is_refused(text: str, said: str) -> None:
    faults, problems = parse_faults(text)
    assert faults == () and len(problems) == 1 and said in problems[0]


@pytest.mark.parametrize(
    ("text", "targets", "said"),
    [
        ("1s kill-node, 2s add-node, 3s drain-node", TWO, []),
        ("1s kill-node, 2s drain-node", TWO, ["2s drain-node: only 0 workers would still fit, but the run needs 2"]),
        ("1s kill-node", FaultTargets(rooms=(2, 2), elsewhere=0, least=4), ["1s kill-node: only 2"]),
        ("1s kill-node, 2s kill-node", FaultTargets(rooms=(2, 2), elsewhere=2, least=2), []),
        # The largest remaining node is assumed to be lost.
        ("1s kill-node", FaultTargets(rooms=(8, 2, 2), elsewhere=0, least=6), ["1s kill-node: only 4"]),
        ("1s add-node", TWO, ["1s add-node: no node is missing at that time; insert an earlier "]),
        ("1s kill-node", ELSEWHERE, ["1s kill-node: only 2"]),
        ("1s add-node", ABROAD, ["1s add-node: not here"]),
        ("1s kill-worker, 2s stop-worker, 3s kill-driver, 4s kill-agent", ELSEWHERE, []),
    ],
)  # fmt: skip
def test_a_schedule_that_leaves_too_few_workers_is_refused(text: str, targets: FaultTargets, said: list[str]) -> None:
    problems = schedule_problems(parse_faults(text)[0], targets)
    assert len(problems) == len(said)
    assert all(problem.startswith(start) for problem, start in zip(problems, said, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_are_survivable_and_evenly_spaced(seed: int) -> None:
    targets = FaultTargets(rooms=(2, 2, 4), elsewhere=seed % 3, least=4)
    faults = random_schedule(seed, every_s=60.0, for_s=1800.0, targets=targets)
    assert faults == random_schedule(seed, every_s=60.0, for_s=1800.0, targets=targets)
    assert schedule_problems(faults, targets) == ()
    times = [0.0, *(fault.at_s for fault in faults)]
    assert all(30.0 <= later - earlier <= 90.0 for earlier, later in pairwise(times)) and times[-1] <= 1800.0


def test_random_schedules_have_the_mean_interval_and_all_kinds() -> None:
    drawn = [random_schedule(seed, every_s=60.0, for_s=1800.0, targets=TWO) for seed in range(40)]
    assert 27 <= statistics.mean(map(len, drawn)) <= 31
    assert {fault.kind for faults in drawn for fault in faults} == set(KINDS) == set(MEANINGS)
    some = random_schedule(1, every_s=10.0, for_s=100.0, targets=TWO, kinds=("kill-worker",))
    assert {fault.kind for fault in some} == {"kill-worker"}
    assert random_schedule(1, every_s=10.0, for_s=100.0, targets=TWO, kinds=("add-node",)) == ()
