"""What MLflow must still be told of checkpoints, decided from what is committed and what it has."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.tracking.checkpoint_updates import (
    CheckpointInventory,
    CommittedCheckpoint,
    GoneCheckpoint,
    from_event,
    reconcile,
    to_event,
)
from tests.unit.tracking.checkpoints import STORE, committed, tracked


def inventory(*checkpoints: CommittedCheckpoint, attempt: int = 3, store: str = STORE) -> CheckpointInventory:
    return CheckpointInventory(attempt=attempt, store=store, checkpoints=checkpoints)


def test_a_commit_that_the_tracker_did_not_hear_of_is_missing() -> None:
    found = reconcile(inventory(committed(10), committed(20)), [tracked(10)])
    assert [one.step for one in found.missing] == [20]
    assert found.vanished == ()


def test_one_that_was_begun_is_missing() -> None:
    have = [tracked(10, is_complete=False), tracked(20)]
    assert [one.step for one in reconcile(inventory(committed(10), committed(20)), have).missing] == [10]


def test_one_that_was_deleted_without_a_word_has_vanished() -> None:
    have = [tracked(10), tracked(20), tracked(25, 2), tracked(30, 1, "damaged"), tracked(40, 1, "deleted")]
    found = reconcile(inventory(committed(20)), have)
    assert [one.step for one in found.vanished] == [10, 25]


def test_what_the_attempt_itself_committed_later_has_not_vanished() -> None:
    # The inventory of attempt 3 may arrive a second time, behind the commits of attempt 3.
    assert reconcile(inventory(attempt=3), [tracked(30, 3), tracked(40, 4)]).vanished == ()


def test_a_step_that_was_committed_again_is_superseded_and_has_not_vanished() -> None:
    found = reconcile(inventory(committed(20, 2)), [tracked(20, 1)])
    assert [(one.step, one.attempt) for one in found.missing] == [(20, 2)]
    assert found.vanished == ()


def test_one_that_can_not_be_read_now_has_not_vanished() -> None:
    there = CheckpointInventory(attempt=3, store=STORE, checkpoints=(committed(10),), unread=(20,))
    assert [one.step for one in reconcile(there, [tracked(10), tracked(20), tracked(30)]).vanished] == [30]


def test_checkpoints_of_another_store_are_not_spoken_of() -> None:
    assert reconcile(inventory(store="s3://bucket/demo"), [tracked(10)]).vanished == ()


STEPS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), unique_by=lambda one: one[0])


@given(STEPS, st.sets(st.tuples(st.integers(1, 9), st.integers(1, 3))))
def test_after_a_reconciliation_the_tracker_shows_what_is_there(
    on_store: list[tuple[int, int]], known: set[tuple[int, int]]
) -> None:
    now = inventory(*(committed(step, attempt) for step, attempt in on_store), attempt=4)
    have = [tracked(step, attempt) for step, attempt in sorted(known)]
    found = reconcile(now, have)
    shown = {(one.step, one.attempt) for one in have if one not in found.vanished}
    for one in found.missing:
        shown = {pair for pair in shown if pair[0] != one.step} | {(one.step, one.attempt)}
    live = {step: max(attempt for number, attempt in shown if number == step) for step, _ in shown}
    # A tracker that has a later attempt's of a step keeps that one: it can't be older than the manifest.
    assert set(live) == {step for step, _ in on_store}
    assert all(live[step] >= attempt for step, attempt in on_store)


def test_what_is_told_survives_the_spool() -> None:
    told = committed(10, 2, reason="steps", plan_id="p", zero_stage=3, parent="x", tokens=7)
    gone = GoneCheckpoint(step=10, attempt=2, state="deleted", reason="keep_last")
    there = CheckpointInventory(attempt=3, store=STORE, checkpoints=(told, committed(20)), unread=(30,))
    for one in (told, gone, there):
        assert from_event(json.loads(json.dumps({**to_event(one), "time_ms": 5}))) == one
