"""Computes reference log-probabilities on a Ray cluster: each task is a group of GPUs that share each row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from ray_ulysses.cluster.capacity import Node
from ray_ulysses.cluster.session import cluster_nodes
from ray_ulysses.data.corpus.reference import Part, Reference
from ray_ulysses.errors import RunError, UlyssesError, UserError
from ray_ulysses.evaluation.reference import PreparedReference, ReferenceRequest, compute_parts
from ray_ulysses.logging import configure_logging, quiet_libraries
from ray_ulysses.parallel.local_ranks import RankDiedError, run_local_ranks

_LOOK_EVERY_S = 5.0
_MAX_RETRIES = 10


def run_reference(prepared: PreparedReference, sp_size: int | None, say: Callable[[str], object]) -> None:
    """Compute and commit the values that are not stored yet, on the connected Ray cluster.

    Stored parts are kept, so a stopped command continues when it is repeated.

    Args:
        prepared: The computation.
        sp_size: Number of processes that share each row; see `group_size`.
        say: Called with the progress.

    Raises:
        UserError: No node has ``sp_size`` GPUs, or see `compute_parts`.
        RunError: A task failed, or the corpus's folder can't be written.
    """
    size, num_groups, is_gpu = group_size(cluster_nodes(), sp_size)
    missing, probe = prepared.missing(), prepared.probe()
    # A group takes every n-th part, because the model is loaded once in each group.
    shares = [missing[place::num_groups] for place in range(min(num_groups, len(missing)))]
    each = {"num_gpus": size, "num_cpus": 1} if is_gpu else {"num_cpus": size}
    # Ray repeats a task whose node is lost; the parts that it has stored are not computed again.
    compute = ray.remote(_compute).options(**each, max_retries=_MAX_RETRIES)
    running = [compute.remote(prepared.request, prepared.reference, share, size, probe) for share in shares]
    while running:
        done, running = ray.wait(running, timeout=_LOOK_EVERY_S)
        for answer in done:
            _raise(answer)
        stored = len(prepared.parts) - len(prepared.missing())
        say(f"computing on {len(shares)} x {size} processes: {stored} of {len(prepared.parts)} parts are stored")
    prepared.commit()


def group_size(nodes: tuple[Node, ...], sp_size: int | None) -> tuple[int, int, bool]:
    """Return the number of processes that share each row, the number of such groups, and whether they have GPUs.

    By default, a group has all GPUs of the smallest node that has any; without GPUs, it is a single process.

    Raises:
        UserError: No node is large enough for a group.
    """
    gpus = [math.floor(node.gpus) for node in nodes if node.gpus >= 1]
    offered = gpus or [math.floor(node.cpus) for node in nodes]
    size = sp_size or (min(gpus) if gpus else 1)
    num_groups = sum(one // size for one in offered)
    if num_groups == 0:
        kind = "GPUs" if gpus else "CPUs"
        raise UserError(
            f"--sp-size={size}: no node of the Ray cluster has as many {kind}; use at most {max(offered, default=0)}"
        )
    return size, num_groups, bool(gpus)


def _raise(answer: Any) -> None:
    try:
        problem: UlyssesError | None = ray.get(answer)
    except RayError as error:
        reason = str(error).strip().partition("\n")[0]
        raise RunError(
            f"a task failed ({type(error).__name__}: {reason}); fix the cause, and run the same command again to "
            "continue"
        ) from error
    if problem is not None:
        raise problem


def _compute(
    request: ReferenceRequest, reference: Reference, parts: list[Part], sp_size: int, probe: str
) -> UserError | RunError | None:
    """Compute some parts on local processes of a Ray task, and return an error, since Ray would wrap it."""
    configure_logging()
    quiet_libraries()
    try:
        run_local_ranks(compute_parts, sp_size, request, reference, parts, None, probe)
    except RankDiedError as error:
        return RunError(
            f"--sp-size={sp_size}: process {error.rank} ended with {error.how} ({error.last_line}); use more processes "
            "per row if it ran out of memory. The same command continues"
        )
    except UlyssesError as error:
        return (UserError if isinstance(error, UserError) else RunError)(str(error))
    return None
