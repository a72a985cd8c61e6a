"""A step's numbers, as the journal and the tracker have them."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

import torch

from ray_ulysses.planner.flops import mfu, peak_bf16_flops, step_flops
from ray_ulysses.run.settings import model_shape

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.trainer.step import StepResult


class StepMeter:
    """Turns what a step did and how long it took into numbers to compare."""

    def __init__(self, config: Config, device: torch.device, world_size: int) -> None:
        self._shape, self._device, self._world_size = model_shape(config), device, world_size
        self._peak_flops = peak_bf16_flops(torch.cuda.get_device_name(device) if device.type == "cuda" else None)

    def numbers(
        self,
        result: StepResult,
        *,
        seconds: float,
        document_tokens: int,
        cost: int,
        learning_rate: float,
        grad_norm: float,
    ) -> dict[str, float]:
        """Return a step's numbers by name; ``mfu`` only where the device's peak is known.

        Args:
            result: What the step did.
            seconds: Its duration.
            document_tokens: Tokens of its documents, padding excluded.
            cost: Sum of its documents' squared lengths.
            learning_rate: Its rate.
            grad_norm: Norm of its gradient before clipping.
        """
        flops = step_flops(self._shape, tokens=document_tokens, sum_squared_lengths=cost)
        utilisation = mfu(flops=flops, seconds=seconds, world_size=self._world_size, peak_flops=self._peak_flops)
        numbers = {
            "loss": result.loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "seconds": seconds,
            "tokens_per_s": result.tokens / seconds,
            "peak_memory_gib": peak_memory_gib(self._device),
            "world_size": float(self._world_size),
        }
        return numbers if utilisation is None else {**numbers, "mfu": utilisation}


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory this process has held, in GiB: allocated on a GPU, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
