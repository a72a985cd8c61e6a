from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.checkpoint import CheckpointRef, FencedError, newest_committed
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.fence import claim_attempt, lineage_of, read_lineage, start_attempt
from ray_ulysses.storage import LocalStore
from tests.unit.checkpoint.fakes import TENSORS, save


def test_the_lineage_is_read_from_names_alone() -> None:
    names = "0001.claimed 0001.from-00000000 0003.claimed x 0002.from-00000030 0012.claimed"
    lineage = lineage_of(["journal/1", *(f"attempts/{name}" for name in names.split())])
    assert (lineage.newest_attempt, lineage.started_from) == (12, {1: 0, 2: 30})


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=12), st.data())
def test_the_lineage_equals_a_replay_of_the_attempts(plan: list[tuple[int, int]], data: st.DataObject) -> None:
    started: dict[int, int] = {}
    alive: dict[int, int] = {}
    late: list[tuple[int, int]] = []
    for attempt, (pick, num_steps) in enumerate(plan, start=1):
        start = sorted({0, *alive})[pick % (len(alive) + 1)]
        started[attempt] = start
        alive = {step: owner for step, owner in alive.items() if step <= start}
        for step in range(start + 1, start + 1 + num_steps):
            if data.draw(st.booleans()):
                alive[step] = attempt
            else:
                late.append((step, attempt))
    lineage = lineage_of([f"attempts/{attempt:04d}.from-{step:08d}" for attempt, step in started.items()])
    for step, attempt in alive.items():
        assert lineage.holds(step, attempt)
    for step, attempt in late:
        overtaken = any(later > attempt and start < step for later, start in started.items())
        assert lineage.holds(step, attempt) != overtaken


def test_a_number_is_claimed_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert claim_attempt(store, 1)
    assert not claim_attempt(store, 1)
    start_attempt(store, 1, 5)
    start_attempt(store, 1, 5)
    assert read_lineage(store).started_from == {1: 5}


def test_a_dead_attempt_can_not_commit_once_another_has_been_claimed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    claim_attempt(store, 1)
    save(store, 10)
    claim_attempt(store, 2)
    errors = save(store, 20)
    assert all(isinstance(error, FencedError) for error in errors)
    assert committed_steps(store) == (10,)
    assert not [key for key in store.list("checkpoints") if "step-00000020" in key]


def test_a_commit_that_slipped_through_is_not_part_of_the_run_and_not_in_the_way(tmp_path: Path) -> None:
    """The dead attempt passed its check before the other was claimed, and its manifest arrived after the choice."""
    store = LocalStore(tmp_path)
    save(store, 10)
    save(store, 20, tensors={key: tensor + 1 for key, tensor in TENSORS.items()})
    claim_attempt(store, 2)
    start_attempt(store, 2, 10)
    choice = newest_committed(store)
    # The checkpoint that attempt 2 started from stays part of the run.
    assert choice.manifest is not None and choice.manifest.step == 10
    (damage,) = choice.damaged
    assert damage.kind == "superseded"
    (ref, _) = save(store, 20, attempt=2)
    assert isinstance(ref, CheckpointRef)
    choice = newest_committed(store)
    assert choice.manifest is not None and (choice.manifest.step, choice.manifest.attempt) == (20, 2)
    assert store.read_whole("checkpoints/step-00000020/set-aside-0002.json")
