from __future__ import annotations

import json

import pytest

from ray_ulysses.checkpoint.fence import start_attempt
from ray_ulysses.checkpoint.retention import best_of, nameable, unreadable
from ray_ulysses.run_names import manifest_key
from ray_ulysses.storage import Store
from tests.stores import HookedStore, Kind, MemoryStore, permission_lost
from tests.unit.checkpoint.fakes import save
from tests.unit.checkpoint.manifests import signed


class _Unanswered(HookedStore):
    def __init__(self, inner: Store, step: int, error: OSError) -> None:
        super().__init__(inner)
        self._key, self._error = manifest_key(step), error

    def before(self, kind: Kind, key: str) -> None:
        if kind == "open" and key == self._key:
            raise self._error


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
        store = _Unanswered(store, step, permission_lost())
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
    assert list(nameable(_Unanswered(store, 10, FileNotFoundError()))) == [20]
