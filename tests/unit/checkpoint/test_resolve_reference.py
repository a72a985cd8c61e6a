"""Names of checkpoints: a dead attempt's late commit is never what somebody means; what can't be read may be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ray_ulysses.checkpoint.fence import start_attempt
from ray_ulysses.checkpoint.retention import best_of, nameable, unreadable
from ray_ulysses.run_names import manifest_key
from ray_ulysses.storage import LocalStore
from ray_ulysses.storage.local import LocalFile
from tests.unit.checkpoint.fakes import save
from tests.unit.checkpoint.manifests import signed


class _UnansweredStore(LocalStore):
    """A store that does not give one file."""

    def __init__(self, root: Path, key: str, error: type[OSError]) -> None:
        super().__init__(root)
        self._key, self._error = key, error

    def open(self, key: str) -> LocalFile:
        """Open a file, unless it is the one."""
        if key == self._key:
            raise self._error("not now")
        return super().open(key)


def _tear(store: LocalStore, step: int) -> LocalStore:
    store.path(manifest_key(step)).write_bytes(store.path(manifest_key(step)).read_bytes()[:500])
    return store


def _make_foreign(store: LocalStore, step: int) -> LocalStore:
    path = store.path(manifest_key(step))
    values = json.loads(path.read_bytes())
    values["schema_version"] = 99
    path.write_bytes(signed(values))
    return store


def _deny(store: LocalStore, step: int) -> LocalStore:
    return _UnansweredStore(store.root, manifest_key(step), PermissionError)


def test_best_and_latest_pass_over_what_is_not_part_of_the_run(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for step, loss in ((10, 3.0), (20, 2.0), (40, 1.0)):
        save(store, step, metrics={"loss": loss})
    assert (list(nameable(store)), best_of(nameable(store))) == ([10, 20, 40], 40)
    start_attempt(store, 2, 20)
    assert (list(nameable(store)), best_of(nameable(store))) == ([10, 20], 20)


@pytest.mark.parametrize("spoil", [_tear, _make_foreign, _deny], ids=["torn", "other-version", "permission"])
@pytest.mark.parametrize("step", [10, 20])
def test_a_step_that_can_not_be_read_is_named_and_never_the_best(
    tmp_path: Path, spoil: Callable[[LocalStore, int], LocalStore], step: int
) -> None:
    store = LocalStore(tmp_path)
    save(store, 10, metrics={"loss": 3.0})
    save(store, 20, metrics={"loss": 2.0})
    assert unreadable(nameable(store)) == ()
    committed = nameable(spoil(store, step))
    assert list(committed) == [10, 20]
    assert unreadable(committed) == (step,)
    assert best_of(committed) == 30 - step


def test_a_step_that_was_deleted_since_it_was_listed_is_not_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save(store, 10)
    save(store, 20)
    assert list(nameable(_UnansweredStore(store.root, manifest_key(10), FileNotFoundError))) == [20]


def test_a_training_loss_counts_only_where_nothing_was_evaluated(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save(store, 10, metrics={"loss": 1.0})
    save(store, 20, metrics={"loss": 2.0, "eval_loss": 5.0})
    assert best_of(nameable(store)) == 20
    assert best_of({}) is None
