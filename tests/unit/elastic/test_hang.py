"""When a run counts as hanging, and which rank is named."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.elastic.hang import RECENT_STEPS, HangLimits, Phase, RankProgress, find_hang, step_bound_s

LIMITS = HangLimits(floor_s=30.0, start_s=600.0, evaluation_s=900.0, save_s=3600.0, row_s=1200.0)
SECONDS = st.floats(0.001, 1e5)
PHASES: tuple[Phase, ...] = ("start", "step", "evaluation", "save")
RANKS = st.lists(
    st.builds(
        RankProgress, rank=st.just(0), phase=st.sampled_from(PHASES), step=st.integers(1, 3),
        micro_batch=st.integers(0, 2), idle_s=SECONDS, state=st.sampled_from("RSDtT"), waits_for_row=st.booleans(),
    ),
    min_size=1, max_size=6,
).map(lambda found: [replace(one, rank=rank) for rank, one in enumerate(found)])  # fmt: skip


def progress(rank: int, idle_s: float, phase: Phase = "step", micro_batch: int = 1, state: str = "S") -> RankProgress:
    return RankProgress(rank=rank, phase=phase, step=7, micro_batch=micro_batch, idle_s=idle_s, state=state)


def hanging(ranks: Sequence[RankProgress], *steps: float) -> tuple[tuple[int, ...], str]:
    """Return the ranks that hang, and the description of the hang."""
    found = find_hang(ranks, steps, LIMITS)
    return ((), "") if found is None else (found.ranks, str(found))


def test_the_bound_of_a_step_is_learned_from_the_run() -> None:
    assert step_bound_s([], LIMITS) == 600.0
    assert step_bound_s([1.0] * 50, LIMITS) == 30.0
    assert step_bound_s([10.0] * 50 + [20.0], LIMITS) == 100.0
    # Two outliers of 200 are within the hundredth part that the percentile leaves out, a third is not.
    assert step_bound_s([10.0] * 198 + [90.0] * 2, LIMITS) == 50.0
    assert step_bound_s([10.0] * 197 + [90.0] * 3, LIMITS) == 450.0


@given(st.lists(SECONDS, min_size=1, max_size=300), st.lists(SECONDS, max_size=300), st.randoms())
def test_only_the_newest_steps_count(recent: list[float], older: list[float], drawn: random.Random) -> None:
    newest = (older + recent)[-RECENT_STEPS:]
    bound_s = step_bound_s(older + recent, LIMITS)
    assert bound_s == step_bound_s(drawn.sample(newest, len(newest)), LIMITS)
    assert bound_s >= LIMITS.floor_s and bound_s <= max(LIMITS.floor_s, 5 * max(newest))
    # At most one step in a hundred takes longer than a fifth of the bound.
    assert sum(5 * seconds > bound_s for seconds in newest) * 100 <= len(newest)


def test_a_rank_whose_row_has_not_arrived_has_the_time_of_the_row_source() -> None:
    """The source gives up earlier, with a better reason."""
    waits = replace(progress(1, 1200.0, micro_batch=0), waits_for_row=True)
    others = [progress(0, 1300.0), progress(2, 1300.0)]
    assert hanging([waits, *others], 1.0) == ((), "")
    ranks, text = hanging([replace(waits, idle_s=1201.0), *others], 1.0)
    assert ranks == (1,) and "its row has not arrived" in text
    # Those that wait for it do so in a collective; one that computes at the same place as another counts as it did.
    assert hanging([replace(waits, waits_for_row=False), *others], 1.0)[0] == (1,)
    assert hanging([progress(0, 40.0), replace(progress(1, 40.0), waits_for_row=True)], 1.0) == ((), "")


def test_the_ranks_that_the_others_wait_for_are_named_after_the_time_that_their_phase_has() -> None:
    ranks = [progress(0, 40.0), progress(1, 41.0, micro_batch=0), progress(2, 40.0)]
    text = "rank 1 has not moved for 41 s in step 7 (micro-batches done: 0), and the others wait; 30 s are allowed"
    assert hanging(ranks, 1.0) == ((1,), text)
    assert hanging(ranks, 9.0) == hanging([], 1.0) == ((), "")
    waiting = [replace(progress(rank, 800.0, micro_batch=0), step=8) for rank in (1, 2)]
    phases: tuple[tuple[Phase, float], ...] = (("evaluation", 900.0), ("save", 3600.0), ("start", 600.0))
    for phase, limit_s in phases:
        steps = () if phase == "start" else (1.0,)
        assert hanging([progress(0, limit_s - 1, phase), *waiting], *steps) == ((), "")
        found, text = hanging([progress(0, limit_s + 1, phase), *waiting], *steps)
        assert found == (0,) and f"the {phase}" in text
    assert hanging([progress(rank, 31.0) for rank in range(2)], 1.0)[0] == (0, 1)
    many = hanging([progress(rank, 31.0, micro_batch=int(rank == 20)) for rank in range(21)], 1.0)[1]
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more" in many


def test_a_stopped_process_is_named_before_those_that_wait_with_it() -> None:
    ranks = [progress(0, 3.0), progress(1, 3.0, state="T"), progress(2, 3.0, micro_batch=0)]
    found, text = hanging(ranks, 1.0)
    assert found == (1,) and "stopped by a signal" in text
    assert hanging([replace(one, idle_s=1.0) for one in ranks], 1.0) == ((), "")
    # A debugger's.
    assert hanging([replace(one, state="t") for one in ranks], 1.0) == ((), "")


@given(RANKS, st.lists(SECONDS, max_size=20), st.randoms(), st.floats(0, 1e5))
def test_only_ranks_that_are_stopped_or_furthest_behind_are_named(
    ranks: list[RankProgress], steps: list[float], drawn: random.Random, later_s: float
) -> None:
    found = find_hang(ranks, steps, LIMITS)
    shuffled = find_hang(drawn.sample(ranks, len(ranks)), steps, LIMITS)
    assert (shuffled and shuffled.ranks) == (found and found.ranks)
    # Nobody has moved since: what hung hangs still.
    still = find_hang([replace(one, idle_s=one.idle_s + later_s) for one in ranks], steps, LIMITS)
    assert found is None or still is not None
    # A rank that moves on is behind no more, or nobody hangs.
    moved = find_hang([replace(one, idle_s=0.0, state="R") for one in ranks], steps, LIMITS)
    assert moved is None
    if found is None:
        return
    named = [one for one in ranks if one.rank in found.ranks]
    assert named and all(one.idle_s > found.bound_s for one in named)
    if found.why == "stopped":
        assert {one.state for one in named} == {"T"}
    else:
        others = [one for one in ranks if one.rank not in found.ranks]
        assert all(one.position > named[0].position for one in others)
        assert (found.why == "together") == (not others)
