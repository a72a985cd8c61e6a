from __future__ import annotations

import json
import math
import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.checkpoint import CheckpointRef, KeepRules, Retention, newest_committed
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.fence import claim_attempt, start_attempt
from ray_ulysses.checkpoint.retention import Committed, best_of, keep_reasons, nameable, steps_to_delete, unreadable
from ray_ulysses.run_names import CHECKPOINT_FOLDER, manifest_key, step_folder
from ray_ulysses.storage import LocalStore, Store
from ray_ulysses.storage.regular import NotAPlainFileError
from tests.stores import CountingStore, FaultyStore, MemoryStore
from tests.unit.checkpoint.fakes import hiding, save
from tests.unit.checkpoint.manifests import signed

RULES = st.builds(
    KeepRules,
    last=st.integers(1, 8),
    every_steps=st.none() | st.integers(1, 20),
    best=st.integers(0, 4),
    best_metric=st.sampled_from(["eval_loss", "loss"]),
)
METRICS = st.dictionaries(st.sampled_from(["eval_loss", "loss"]), st.floats(0, 9) | st.just(math.nan), max_size=2)
COMMITTED = st.dictionaries(
    st.integers(0, 100), st.builds(Committed, attempt=st.just(1), metrics=METRICS), min_size=1, max_size=30
)


@given(COMMITTED, RULES, st.data())
def test_the_rules_decide_what_stays(committed: dict[int, Committed], rules: KeepRules, data: st.DataObject) -> None:
    newest = data.draw(st.sampled_from(sorted(committed)))
    deleted = steps_to_delete(committed, newest=newest, rules=rules)
    older = sorted(step for step in committed if step <= newest)
    values = {s: v for s in older if (v := committed[s].metrics.get(rules.best_metric)) is not None and v == v}
    best = sorted(values, key=lambda step: (values[step], -step))[: rules.best]
    wanted = {*older[-rules.last :], *best, *(s for s in older if rules.every_steps and s % rules.every_steps == 0)}
    assert set(deleted) == set(older) - wanted
    assert newest not in deleted
    reasons = keep_reasons(committed, newest=newest, rules=rules)
    assert set(reasons) == set(committed) - set(deleted)
    assert all(reasons.values())


def test_the_best_are_those_of_each_stage_and_its_data() -> None:
    def found(step: int, loss: float, stage: str, measured: str) -> tuple[int, Committed]:
        return step, Committed(attempt=1, metrics={"loss": loss}, stage=stage, measured=measured)

    losses = {10: (3.0, "short"), 20: (2.5, "short"), 30: (1.5, "long"), 40: (1.4, "long"), 50: (1.6, "long")}
    later = {60: (1.8, "long"), 70: (1.7, "long"), 80: (1.9, "long")}
    committed = dict(found(step, loss, stage, "a") for step, (loss, stage) in losses.items())
    committed |= dict(found(step, loss, stage, "b") for step, (loss, stage) in later.items())
    rules = KeepRules(last=1, best=1, best_metric="loss")
    assert steps_to_delete(committed, newest=80, rules=rules) == (10, 30, 50, 60)
    assert best_of(committed) == 70
    assert best_of({step: committed[step] for step in (10, 20)}) == 20


def test_rules_that_keep_nothing_and_a_newest_step_without_a_commit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.keep_last=0"):
        KeepRules(last=0)
    with pytest.raises(ValueError, match="step 3 is not committed"):
        steps_to_delete({1: Committed(attempt=1, metrics={})}, newest=3, rules=KeepRules(last=1))


def test_a_commit_that_is_not_listed_deletes_nothing_and_is_tried_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save(store, 10)
    (ref, _) = save(store, 20)
    store.delete("checkpoints/step-00000020/manifest.json")
    with pytest.raises(OSError, match="does not list it"):
        Retention(store, KeepRules(last=1)).apply(ref)
    assert committed_steps(store) == (10,)


def _leave_shard(run_dir: Path, step: int, attempt: int) -> Path:
    folder = run_dir / f"checkpoints/step-{step:08d}/attempt-{attempt:04d}"
    folder.mkdir(parents=True)
    for name in ("rank-00000-of-00002.safetensors", ".writing-ab"):
        (folder / name).write_bytes(b"half")
    return folder


def test_the_shards_of_a_damaged_checkpoint_stay_until_it_is_set_aside(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save(store, 10)
    store.replace(manifest_key(10), [b"{"])
    (newest, _) = save(store, 20)
    Retention(store, KeepRules(last=3)).apply(newest)
    assert len(os.listdir(tmp_path / "checkpoints/step-00000010/attempt-0001")) == 2


def test_the_best_and_every_nth_outlive_the_last(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    retention = Retention(store, KeepRules(last=1, every_steps=30, best=1, best_metric="loss"))
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 2.5), (50, 2.0)):
        refs = save(store, step, metrics={"loss": loss})
        retention.apply(refs[0])
    assert committed_steps(store) == (20, 30, 50)


def test_an_attempt_that_was_overtaken_deletes_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for step in (10, 20):
        (ref, _) = save(store, step)
    claim_attempt(store, 2)
    assert Retention(store, KeepRules(last=1)).apply(ref) == ()
    assert committed_steps(store) == (10, 20)


def test_what_a_dead_attempt_committed_late_is_deleted_once_the_run_is_beyond_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save(store, 10)
    save(store, 40)
    start_attempt(store, 2, 10)
    retention = Retention(store, KeepRules(last=3))
    (ref, _) = save(store, 20, attempt=2)
    assert retention.apply(ref) == ()
    assert len(store.list("checkpoints/step-00000040")) == 3
    (ref, _) = save(store, 50, attempt=2)
    assert retention.apply(ref) == (40,)
    assert committed_steps(store) == (10, 20, 50)
    assert not store.list("checkpoints/step-00000040")


def test_a_checkpoint_that_can_not_be_read_now_stays_whatever_the_rules_say(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    for step, loss in ((10, 1.0), (20, 2.0)):
        save(inner, step, metrics={"loss": loss})
    (ref, _) = save(inner, 30, metrics={"loss": 3.0})
    flaky = FaultyStore(inner, fail_at=1, kinds=("open",), only=lambda key: "step-00000010" in key)
    rules = KeepRules(last=1, best=1, best_metric="loss")
    # With nothing known of the one that can't be read, the best of the others stays as well.
    assert Retention(flaky, rules).apply(ref) == ()
    assert flaky.has_failed
    assert Retention(inner, rules).apply(ref) == (20,)
    assert committed_steps(inner) == (10, 30)


def test_what_a_killed_process_was_writing_is_swept_once_it_is_old(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    old, fresh = (tmp_path / f"checkpoints/step-00000010/attempt-000{n}/.writing-x" for n in (1, 2))
    for path in (old, fresh):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"half a shard")
    hour_ago = time.time() - 3600
    os.utime(old, (hour_ago, hour_ago))
    (ref, _) = save(store, 20, attempt=3)
    Retention(store, KeepRules(last=1)).apply(ref)
    assert not old.exists() and fresh.exists()


def test_everything_is_listed_and_read_once_and_then_the_newest_alone(tmp_path: Path) -> None:
    store = CountingStore(LocalStore(tmp_path))
    for step in (10, 20, 30):
        save(store, step)
    retention = Retention(store, KeepRules(last=2))
    earlier = _leave_shard(tmp_path, 35, attempt=1)
    (ref, _) = save(store, 40, attempt=2)
    assert retention.apply(ref) == (10, 20) and not earlier.exists()
    (ref, _) = save(store, 50, attempt=2)
    store.log.clear()
    assert retention.apply(ref) == (30,)
    listed = [key for kind, key in store.log if kind == "list"]
    assert listed == ["attempts", "checkpoints/step-00000050", "checkpoints/step-00000030"]
    assert {key.split("/")[1] for kind, key in store.log if kind == "open"} == {"step-00000050"}
    # What a save that failed has left behind is found by a look at everything.
    dead = _leave_shard(tmp_path, 55, attempt=2)
    retention.forget()
    (ref, _) = save(store, 60, attempt=2)
    assert retention.apply(ref) == (40,)
    assert not dead.exists()
    assert committed_steps(store) == (50, 60)


def test_best_and_latest_pass_over_what_is_not_part_of_the_run() -> None:
    store = MemoryStore()
    for step, loss in ((10, 3.0), (20, 2.0), (40, 1.0)):
        save(store, step, metrics={"loss": loss})
    assert (list(nameable(store)), best_of(nameable(store))) == ([10, 20, 40], 40)
    start_attempt(store, 2, 20)
    assert (list(nameable(store)), best_of(nameable(store))) == ([10, 20], 20)


@pytest.mark.parametrize("spoil", ["torn", "other version", "permission"])
@pytest.mark.parametrize("step", [10, 20])
def test_a_step_that_can_not_be_read_is_named_and_never_the_best(spoil: str, step: int) -> None:
    store: Store = MemoryStore()
    save(store, 10, metrics={"loss": 3.0})
    save(store, 20, metrics={"loss": 2.0})
    assert unreadable(nameable(store)) == ()
    content = store.read_whole(manifest_key(step))
    if spoil == "permission":
        store = hiding(store, manifest_key(step))
    else:
        foreign = signed({**json.loads(content), "schema_version": 99})
        store.replace(manifest_key(step), [content[:500] if spoil == "torn" else foreign])
    committed = nameable(store)
    assert (list(committed), unreadable(committed), best_of(committed)) == ([10, 20], (step,), 30 - step)


def test_a_training_loss_counts_only_where_nothing_was_evaluated() -> None:
    store = MemoryStore()
    save(store, 10, metrics={"loss": 1.0})
    save(store, 20, metrics={"loss": 2.0, "eval_loss": 5.0})
    assert best_of(nameable(store)) == 20
    assert best_of({}) is None
    # A step that was deleted after the listing.
    assert list(nameable(hiding(store, manifest_key(10), FileNotFoundError()))) == [20]


NEWEST = CheckpointRef(step=6, attempt=1, world_size=2)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "run")
    for step in (2, 4, 6):
        save(store, step)
    return store


@pytest.mark.parametrize("key", [f"{step_folder(2)}/attempt-0001", step_folder(2), CHECKPOINT_FOLDER])
def test_retention_deletes_nothing_behind_a_link(store: LocalStore, tmp_path: Path, key: str) -> None:
    link = store.root / key
    moved = Path(shutil.move(link, tmp_path / "disk"))
    link.symlink_to(moved)
    before = sorted(moved.rglob("*"))
    with pytest.raises(NotAPlainFileError) as refused:
        Retention(store, KeepRules(last=2)).apply(NEWEST)
    assert refused.value.filename == str(link)
    with pytest.raises(NotAPlainFileError):
        newest_committed(store)
    assert sorted(moved.rglob("*")) == before


def test_retention_deletes_only_names_that_a_run_writes(store: LocalStore, caplog: pytest.LogCaptureFixture) -> None:
    folder = store.root / step_folder(2)
    for name in ("attempt-0001/photos/1.jpg", "attempt-0001/rank-00000-of-00002.txt", "notes.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("canary")
    of_dead_attempt = store.root / step_folder(4) / "attempt-0000/photo.jpg"
    of_dead_attempt.parent.mkdir()
    of_dead_attempt.write_text("canary")
    retention = Retention(store, KeepRules(last=2))
    assert retention.apply(NEWEST) == (2,)
    assert committed_steps(store) == (4, 6)
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert left == {"attempt-0001/photos/1.jpg", "attempt-0001/rank-00000-of-00002.txt", "notes.txt"}
    assert of_dead_attempt.exists()
    assert f"{step_folder(2)}/attempt-0001/photos/1.jpg" in caplog.text
    # The next call does not list this folder again.
    photo = store.root / step_folder(4) / "attempt-0001" / "photo.jpg"
    photo.write_text("canary")
    save(store, 8)
    assert retention.apply(CheckpointRef(step=8, attempt=1, world_size=2)) == (4,)
    assert photo.exists() and not list(photo.parent.glob("rank*"))
