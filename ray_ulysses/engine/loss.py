"""The loss as a sum over tokens, and the scale that makes an engine's averaged gradient exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ray_ulysses.attention.batch import IGNORE_INDEX, ShardedBatch
from ray_ulysses.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray_ulysses.parallel.mesh import SequenceMesh


def causal_lm_loss(model: Callable[..., Any], batch: ShardedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the forward and return this rank's summed cross-entropy and number of supervised tokens.

    Every rank of ``sp`` must call. If all labels of a rank are ignored, its sum is 0 and still takes part in the
    backward pass, so that its collectives run.

    Args:
        model: The model, or the engine that wraps it.
        batch: This rank's slice.

    Returns:
        ``loss_sum``: fp32 scalar in nats, differentiable. ``num_tokens``: int64 scalar.

    Raises:
        UserError: The model returns an auxiliary loss, which is not a sum over tokens.
    """
    outputs = model(**batch.model_inputs())
    if getattr(outputs, "aux_loss", None) is not None:
        raise UserError(
            "the model returned an auxiliary (router) loss; it is not a sum over tokens and can't be added up exactly "
            "over slices of a row: set output_router_logits: false"
        )
    logits_BLV = outputs.logits
    loss_sum = torch.nn.functional.cross_entropy(
        logits_BLV.flatten(0, 1).float(), batch.labels_BL.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return loss_sum, (batch.labels_BL != IGNORE_INDEX).sum()


def loss_scale(
    global_tokens: int | torch.Tensor, mesh: SequenceMesh, zero_stage: int = 3, accumulation: int = 1
) -> float | torch.Tensor:
    """Return the factor on ``loss_sum`` that makes an engine's gradient equal that of one process.

    The exact gradient is that of ``sum of loss_sum / global_tokens`` over ranks and micro-batches. An engine averages
    over its data-parallel world and divides by its accumulation steps, so the factor is
    ``world_size * accumulation / global_tokens``. It is the same for every ZeRO stage if the engine averages over all
    ranks, as DeepSpeed does without ``mpu`` and ``sequence_parallel_size`` (its own Ulysses path divides by
    ``world / sp`` in some stages and by ``world`` in others). DDP is stage 0.

    Args:
        global_tokens: Supervised tokens of the whole optimizer step, over ``sp``, ``dp`` and accumulation.
        mesh: The mesh; the engine averages over its ``world_size``.
        zero_stage: ZeRO stage of the engine, 0 to 3.
        accumulation: The engine's divisor; 1 if it does not divide (``scale_wrt_gas=False``).

    Returns:
        A float, or a tensor if ``global_tokens`` is one (without host synchronization). A step without supervised
        tokens has scale 0.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise UserError(f"zero_stage={zero_stage!r} is not a ZeRO stage; use 0, 1, 2 or 3")
    if accumulation < 1:
        raise UserError(f"accumulation={accumulation!r} must be at least 1, the number of micro-batches of a step")
    factor = float(mesh.world_size * accumulation)
    if isinstance(global_tokens, torch.Tensor):
        tokens = global_tokens.to(torch.float64 if global_tokens.device.type == "cpu" else torch.float32)
        return torch.where(tokens > 0, factor / tokens.clamp(min=1), torch.zeros_like(tokens))
    if global_tokens < 0:
        raise UserError(f"global_tokens={global_tokens} must not be negative")
    return factor / global_tokens if global_tokens else 0.0
