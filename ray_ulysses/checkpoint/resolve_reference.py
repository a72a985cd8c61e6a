"""Resolves a reference to a run without a step to one of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from ray_ulysses.checkpoint.choice import committed_steps, for_each_step
from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.checkpoint.retention import Committed, best_steps, groups_of, read_committed_facts
from ray_ulysses.storage import Store


def nameable(store: Store) -> dict[int, Committed]:
    """Return the committed checkpoints that somebody can mean by a name, by step, ascending.

    What a dead attempt committed late is not among them. One whose manifest is damaged, of another version or not given
    now is, with no attempt and no numbers: a reference to it fails with that reason and never resolves to an older one.
    """
    lineage, steps = read_lineage(store), committed_steps(store)
    facts = for_each_step(steps, lambda step: read_committed_facts(store, step))
    return {
        step: found
        for step, found in zip(steps, facts, strict=True)
        if found is not None and (found.attempt is None or lineage.holds(step, found.attempt))
    }


def unreadable(committed: Mapping[int, Committed]) -> tuple[int, ...]:
    """Return the steps whose numbers are not known, ascending: any of them may be the best one (pure)."""
    return tuple(sorted(step for step, found in committed.items() if found.attempt is None))


def best_of(committed: Mapping[int, Committed]) -> int | None:
    """Return the step of the lowest evaluation loss, of the lowest training loss where none was evaluated (pure).

    It is one of the newest stage and data, with whose losses those of the others do not compare. Those that
    `unreadable` returns are passed over, which the caller has to say.
    """
    known = {step: found for step, found in committed.items() if found.attempt is not None}
    groups = groups_of(known)
    newest = groups.get(max(groups, default=0))
    known = {step: found for step, found in known.items() if groups[step] == newest}
    best = best_steps(known, known, "eval_loss", 1) or best_steps(known, known, "loss", 1)
    return best[0] if best else None
