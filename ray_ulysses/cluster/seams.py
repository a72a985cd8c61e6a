"""Looks for the parts of Ray Train on which the work beside its controller stands, and which are private to it.

Ray Train 2.60 has no public way to replace its policies, to choose nodes, to see its polls before they are judged, or
to end its wait for the workers. Without one of these parts a run does without Ray Train; see `plain_workers`.
"""

from __future__ import annotations

import importlib
import inspect

_EXECUTION = "ray.train.v2._internal.execution"
SEAMS = {
    ("ray.train.torch", "TorchTrainer"): ("_initialize_and_run_controller",),
    (f"{_EXECUTION}.controller", "TrainController"): ("scaling_policy", "failure_policy", "callbacks"),
    (f"{_EXECUTION}.callback", "WorkerGroupCallback"): (
        "before_worker_group_start", "after_worker_group_start", "after_worker_group_shutdown",
        "after_worker_group_abort", "after_worker_group_poll_status",
    ),
    (f"{_EXECUTION}.worker_group", "WorkerGroup"): ("get_worker_group_state",),
    (f"{_EXECUTION}.worker_group", "WorkerGroupContext"): ("label_selector",),
    (f"{_EXECUTION}.worker_group.state", "WorkerGroupState"): ("placement_group_handle",),
    (f"{_EXECUTION}.worker_group.worker", "Worker"): ("actor", "placement_group_bundle_index"),
    (f"{_EXECUTION}.worker_group", "WorkerGroupPollStatus"): ("worker_statuses",),
    (f"{_EXECUTION}.worker_group.poll", "WorkerStatus"): ("running", "error", "return_value", "preemption_info"),
}  # fmt: skip
"""Methods, fields and arguments of classes."""


def seams_missing() -> tuple[str, ...]:
    """Return the names of what the installed Ray Train lacks."""
    return tuple(
        f"{name}.{part}" for (module, name), parts in SEAMS.items() for part in parts if not _has(module, name, part)
    )


def _has(module: str, name: str, part: str) -> bool:
    try:
        owner = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return False
    return hasattr(owner, part) or part in inspect.signature(owner).parameters
