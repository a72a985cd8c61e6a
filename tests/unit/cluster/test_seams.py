"""The parts of Ray Train that are private to it, and on which the work beside its controller stands."""

from __future__ import annotations

import importlib
import inspect

import pytest

_EXECUTION = "ray.train.v2._internal.execution"
SEAMS = {
    ("ray.train.v2.api.data_parallel_trainer", "DataParallelTrainer"): ("_initialize_and_run_controller",),
    (f"{_EXECUTION}.controller", "TrainController"): ("scaling_policy", "failure_policy", "callbacks"),
    (f"{_EXECUTION}.scaling_policy", "ScalingPolicy"): (
        "make_decision_for_non_running_worker_group", "make_decision_for_running_worker_group",
        "_get_num_workers_for_resource_request", "_maybe_send_resource_request",
    ),
    (f"{_EXECUTION}.callback", "WorkerGroupCallback"): (
        "before_worker_group_start", "after_worker_group_start", "after_worker_group_shutdown",
        "after_worker_group_abort", "after_worker_group_poll_status",
    ),
    (f"{_EXECUTION}.worker_group", "WorkerGroup"): ("get_worker_group_state",),
    (f"{_EXECUTION}.worker_group", "WorkerGroupContext"): ("label_selector",),
    (f"{_EXECUTION}.worker_group.state", "WorkerGroupState"): ("placement_group_handle",),
    (f"{_EXECUTION}.worker_group.worker", "Worker"): ("actor", "placement_group_bundle_index"),
    (f"{_EXECUTION}.worker_group", "WorkerGroupPollStatus"): ("worker_statuses",),
    (f"{_EXECUTION}.worker_group.poll", "WorkerStatus"): ("running", "error", "return_value"),
}  # fmt: skip
"""Methods, fields and arguments of classes."""


@pytest.mark.parametrize(("owner", "parts"), SEAMS.items())
def test_the_installed_ray_train_has_every_seam(owner: tuple[str, str], parts: tuple[str, ...]) -> None:
    """A canary of Ray Train 2.60."""
    module, name = owner
    found = getattr(importlib.import_module(module), name)
    for part in parts:
        assert hasattr(found, part) or part in inspect.signature(found).parameters, part
