"""Computes the metrics of a step for the journal and the tracker."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

import torch

from ray_ulysses.planner.flops import mfu, peak_bf16_flops, step_flops

if TYPE_CHECKING:
    from ray_ulysses.model_shape import ModelShape
    from ray_ulysses.trainer.step import StepResult


class StepMeter:
    """Turns a step's result and duration into comparable metrics."""

    def __init__(self, shape: ModelShape, device: torch.device, world_size: int) -> None:
        self._shape, self._device, self._world_size = shape, device, world_size
        self._peak_flops = peak_bf16_flops(torch.cuda.get_device_name(device) if device.type == "cuda" else None)

    def numbers(
        self,
        result: StepResult,
        *,
        seconds: float,
        document_tokens: int,
        cost: int,
        learning_rate: float,
    ) -> dict[str, float]:
        """Return a step's metrics by name; ``mfu`` only where the device's peak is known, other losses only if there.

        Args:
            result: The step's result.
            seconds: Its duration.
            document_tokens: Tokens of its documents, padding excluded.
            cost: Sum of its documents' squared lengths.
            learning_rate: Its learning rate.
        """
        flops = step_flops(self._shape, tokens=document_tokens, sum_squared_lengths=cost)
        utilisation = mfu(flops=flops, seconds=seconds, world_size=self._world_size, peak_flops=self._peak_flops)
        numbers = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": learning_rate,
            "seconds": seconds,
            "tokens_per_s": result.tokens / seconds,
            "peak_memory_gib": peak_memory_gib(self._device),
            "world_size": float(self._world_size),
        }
        found = {"mfu": utilisation, "z_loss": result.z_loss or None, "router_loss": result.router_loss or None}
        return numbers | {name: value for name, value in found.items() if value is not None}


def device_memory_gib(device: torch.device) -> float | None:
    """Return the memory of a GPU, in GiB; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else None


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process, in GiB: allocated on a GPU, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
