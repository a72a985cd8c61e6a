from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_ulysses.checkpoint import (
    CheckpointError,
    CheckpointRef,
    KeepRules,
    Retention,
    load_parts,
    newest_committed,
    set_aside,
)
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.storage import LocalStore
from tests.breadth import fast_only
from tests.stores import FaultyStore, HookedStore, disk_full, permission_lost
from tests.unit.checkpoint.fakes import TENSORS, blank_of, hiding, save

FAULTS: dict[str, Callable[[], Exception]] = {"disk-full": disk_full, "permission-lost": permission_lost}


def _load_newest(store: LocalStore) -> int:
    choice = newest_committed(store)
    assert choice.manifest is not None and choice.damaged == ()
    blank = blank_of(TENSORS)
    load_parts(store, choice.manifest, blank)
    for part in blank:
        assert torch.equal(part.tensor, TENSORS[part.key].reshape(-1) + choice.manifest.step)
    return choice.manifest.step


def _save(store: Any, step: int, **changes: Any) -> list[Any]:
    return save(store, step, tensors={key: tensor + step for key, tensor in TENSORS.items()}, **changes)


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fault", fast_only(FAULTS, "disk-full"))
@pytest.mark.parametrize("rank", fast_only((0, 1), 0))
def test_a_store_that_raises_at_any_call_leaves_the_checkpoint_before(
    tmp_path: Path, rank: int, fault: str, when: Any, lasting: bool
) -> None:
    outcomes = []
    for fail_at in range(1, 60):
        inner = LocalStore(tmp_path / str(fail_at))
        _save(inner, 10)
        faulty = FaultyStore(inner, fail_at=fail_at, error=FAULTS[fault](), when=when, lasting=lasting)
        results = _save(inner, 20, stores={rank: faulty})
        if not faulty.has_failed:
            break
        is_saved = all(isinstance(result, CheckpointRef) for result in results)
        outcomes.append(is_saved)
        if is_saved:
            # Only what is done after the commit may fail without harm.
            assert _load_newest(inner) == 20
            continue
        # Every rank says the same, and what is there afterwards is what was there before, or the whole new one: an
        # answer may be lost behind the commit itself.
        assert all(isinstance(result, CheckpointError) for result in results)
        assert len({str(result) for result in results}) == 1
        newest = _load_newest(inner)
        assert newest == 10 or (when == "after" and rank == 0)
        # The same attempt tries again and gets through.
        assert all(isinstance(result, CheckpointRef) for result in _save(inner, 21))
        assert _load_newest(inner) == 21
    else:
        pytest.fail("the save never came to its end")
    assert outcomes.count(False) >= 8


def test_a_manifest_whose_answer_was_lost_is_committed(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    faulty = FaultyStore(inner, fail_at=1, kinds=("create",), when="after", only=lambda key: "manifest" in key)
    assert all(isinstance(result, CheckpointRef) for result in _save(inner, 20, stores={0: faulty}))
    assert faulty.has_failed and _load_newest(inner) == 20


def test_a_second_try_of_what_turns_out_to_be_committed_succeeds_and_leaves_nothing(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    faulty = FaultyStore(inner, fail_at=2, when="after", lasting=True, only=lambda key: "manifest" in key)
    # The storage goes away in the moment of the commit: the save has failed, and if it has not, it is whole.
    assert all(isinstance(result, CheckpointError) for result in _save(inner, 20, stores={0: faulty}))
    assert _load_newest(inner) == 20
    files = inner.list("checkpoints")
    assert all(isinstance(result, CheckpointRef) for result in _save(inner, 20, retry=1))
    assert inner.list("checkpoints") == files and _load_newest(inner) == 20
    # What another attempt has committed is not this one's.
    errors = _save(inner, 20, attempt=2)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert inner.list("checkpoints") == files


def test_an_obstacle_that_one_rank_knows_fails_the_save_on_all(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    errors = _save(store, 20, obstacles={0: "the journal could not be written"})
    assert all("rank 0: the journal could not be written" in str(error) for error in errors) and len(errors) == 2
    assert store.list("checkpoints") == []


def test_bytes_that_change_on_their_way_to_the_disk_are_never_committed(tmp_path: Path) -> None:
    class Flipping(HookedStore):
        def create(self, key: str, chunks: Any) -> int:
            content = bytearray(b"".join(bytes(chunk) for chunk in chunks))
            content[len(content) // 2] ^= "rank-00001" in key
            return super().create(key, [bytes(content)])

    inner = LocalStore(tmp_path)
    _save(inner, 10)
    errors = _save(inner, 20, stores={1: Flipping(inner)})
    assert "rank 1: " in str(errors[0])
    assert _load_newest(inner) == 10


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
def test_retention_that_fails_at_any_call_leaves_checkpoints_whole_or_absent(tmp_path: Path, lasting: bool) -> None:
    for fail_at in range(1, 60):
        inner = LocalStore(tmp_path / str(fail_at))
        for step in (10, 20):
            _save(inner, step)
        (ref, _) = _save(inner, 30)
        faulty = FaultyStore(inner, fail_at=fail_at, error=permission_lost(), lasting=lasting)
        retention = Retention(faulty, KeepRules(last=1))
        try:
            retention.apply(ref)
        except OSError:
            assert faulty.has_failed
        assert _load_newest(inner) == 30
        assert all(newest_committed(inner, unless=range(step + 1, 99)).damaged == () for step in committed_steps(inner))
        again = retention if faulty.has_failed and not lasting else Retention(inner, KeepRules(last=1))
        again.apply(ref)
        assert committed_steps(inner) == (30,)
        assert {key.split("/")[1] for key in inner.list("checkpoints")} == {"step-00000030"}
        if not faulty.has_failed:
            break
    else:
        pytest.fail("retention never came to its end")
    assert fail_at > 5


@pytest.mark.parametrize("hidden", ["manifest.json", "rank-00001"])
def test_what_can_not_be_read_now_is_passed_over_and_not_destroyed(tmp_path: Path, hidden: str) -> None:
    inner = LocalStore(tmp_path)
    _save(inner, 10)
    _save(inner, 20)
    choice = newest_committed(hiding(inner, f"step-00000020/{'attempt-0001/' * ('rank' in hidden)}{hidden}"))
    assert choice.manifest is not None and choice.manifest.step == 10
    (damage,) = choice.damaged
    assert damage.kind == "unreadable" and "Permission denied" in damage.reason
    for store in (inner, hiding(inner, "manifest.json")):
        set_aside(store, damage, attempt=2)
        assert _load_newest(inner) == 20
