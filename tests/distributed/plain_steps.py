"""Steps of a plain loop of PyTorch over the rows of a plan, document by document, with Transformers' own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ray_ulysses.data.plan.plan import Plan


def plain_optimizer(model: torch.nn.Module, *, weight_decay: float = 0.1, **options: Any) -> torch.optim.AdamW:
    """Return AdamW that decays matrices alone."""
    matrices = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **{"betas": (0.9, 0.95), "eps": 1e-8, **options})


def plain_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    step: int,
    read: Callable[[int, int, int], Any],
    *,
    rate: float,
    max_norm: float = 1.0,
    z_loss: float = 0.0,
    weights: Callable[[int, int, int], Any] | None = None,
) -> tuple[float, float, float]:
    """Train a step; return its loss, z-loss and gradient norm.

    Args:
        read: Returns tokens of a document: of which, from where, how many.
        weights: Returns label weights of a document, from a token to another; None weighs all alike.
    """
    optimizer.zero_grad()
    loss, z_sum, count = torch.zeros(()), torch.zeros(()), 0.0
    for piece in (piece for row in plan.step_rows(step) for piece in plan.pieces(row) if piece.num_labels):
        text = torch.from_numpy(np.asarray(read(piece.document, piece.start, piece.num_labels + 1)).astype(np.int64))
        factors = torch.ones(piece.num_labels)
        if weights is not None:
            factors = torch.from_numpy(weights(piece.document, piece.start + 1, piece.start + piece.num_labels + 1))
        logits = model(input_ids=text[None, :-1], use_cache=False).logits[0]
        loss = loss + (functional.cross_entropy(logits, text[1:], reduction="none") * factors).sum()
        z_sum = z_sum + z_loss * (logits.logsumexp(-1).square() * factors).sum()
        count += float(factors.double().sum())
    ((loss + z_sum) / count).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return float(loss.detach()) / count, float(z_sum.detach()) / count, float(norm)
