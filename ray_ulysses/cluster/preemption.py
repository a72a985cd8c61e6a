"""Reads Ray's notices that nodes of this run will be taken away."""

from __future__ import annotations

from collections.abc import Collection

from ray.train.v2._internal.execution.context import get_train_context

from ray_ulysses.checkpoint.notice import Notice


def preemption_noticed(nodes: Collection[str]) -> Notice | None:
    """Return the notice that one of these nodes is draining, if this worker has received one.

    Ray Train 2.60 hands the announcement to every worker. Its public ``get_preemption_info`` is a barrier over all
    workers; the loop agrees in a collective of its own, so the worker's own copy is read, which is private to Ray
    (a canary test covers it).
    """
    info = get_train_context().preemption_context.preemption_info
    if info is None or not set(nodes).intersection(info.preempted_node_to_ranks):
        # The workers that train may have left that node.
        return None
    return Notice(deadline=info.deadline_ms / 1000 if info.deadline_ms else None)
