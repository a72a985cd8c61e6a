"""How a child that trains joins the others."""

from __future__ import annotations

import torch

from ray_ulysses.supervision.child import WATCHDOG, backend_of


def test_communicators_of_gpus_are_created_with_their_groups() -> None:
    """Not in the first step, where each rank comes at its own time and an error counts as the step's."""
    device = torch.device("cuda:3")
    assert backend_of(device) == {"backend": "nccl", "device_id": device}
    assert backend_of(torch.device("cpu")) == {"backend": "gloo"}


def test_nccls_watchdog_ends_no_process() -> None:
    """Whose end would be one more loss; 0 is `NoHandling` in PyTorch's `ProcessGroupNCCL.hpp`."""
    assert WATCHDOG == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
