"""Names of checkpoints: a dead attempt's late commit is never what somebody means."""

from __future__ import annotations

from pathlib import Path

from ray_ulysses.checkpoint.fence import start_attempt
from ray_ulysses.checkpoint.named import best_of, nameable
from ray_ulysses.storage import LocalStore
from tests.unit.checkpoint.fakes import save


def test_best_and_latest_pass_over_what_is_not_part_of_the_run(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for step, loss in ((10, 3.0), (20, 2.0), (40, 1.0)):
        save(store, step, metrics={"loss": loss})
    assert (list(nameable(store)), best_of(nameable(store))) == ([10, 20, 40], 40)
    start_attempt(store, 2, 20)
    assert (list(nameable(store)), best_of(nameable(store))) == ([10, 20], 20)
    store.path("checkpoints/step-00000020/manifest.json").write_bytes(b"{")
    assert best_of(nameable(store)) == 10


def test_a_training_loss_counts_only_where_nothing_was_evaluated(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save(store, 10, metrics={"loss": 1.0})
    save(store, 20, metrics={"loss": 2.0, "eval_loss": 5.0})
    assert best_of(nameable(store)) == 20
    assert best_of({}) is None
