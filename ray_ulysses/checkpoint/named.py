"""Which checkpoint somebody means who names a run and no step."""

from __future__ import annotations

from collections.abc import Mapping

from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.checkpoint.retention import Committed, best_steps, read_committed_facts
from ray_ulysses.storage import Store


def nameable(store: Store) -> dict[int, Committed]:
    """Return the committed checkpoints that somebody can mean by a name, by step, ascending.

    What a dead attempt committed late, and what can't be read now, is not among them.
    """
    lineage = read_lineage(store)
    committed = {step: read_committed_facts(store, step) for step in committed_steps(store)}
    return {s: found for s, found in committed.items() if found.attempt is not None and lineage.holds(s, found.attempt)}


def best_of(committed: Mapping[int, Committed]) -> int | None:
    """Return the step of the lowest evaluation loss, of the lowest training loss where none was evaluated (pure)."""
    best = best_steps(committed, committed, "eval_loss", 1) or best_steps(committed, committed, "loss", 1)
    return best[0] if best else None
