"""Whether Ray has announced that a node of this run is going to be taken away."""

from __future__ import annotations

from ray.train.v2._internal.execution.context import get_train_context


def preemption_noticed() -> bool:
    """Return whether a node of the worker group is draining, as far as this worker has heard.

    Ray Train 2.60 hands the announcement to every worker. Its public ``get_preemption_info`` is a barrier over all
    workers; the loop agrees in a collective of its own, so the worker's own copy is read, which is private to Ray
    (a canary test stands beside it).
    """
    return get_train_context().preemption_context.preemption_info is not None
