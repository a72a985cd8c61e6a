"""Rotary embeddings whose frequencies depend on the length of the sequence see the whole row, not the slice.

Transformers takes the largest position id it is given (``dynamic_rope_update``), which under Ulysses is that of this
rank's slice: ranks would choose different frequencies. Here the row's largest position is shown to it as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn


@dataclass(slots=True)
class RowLength:
    """The largest position id of the rows in the current forward, shared with the model's rotary modules."""

    max_position: int = 0


def follow_row_length(model: nn.Module, row_length: RowLength) -> None:
    """Make every length-dependent rotary module of a model take its frequencies from whole rows.

    Args:
        model: A Hugging Face decoder.
        row_length: Holds the largest position of the rows while a forward runs.
    """
    for module in model.modules():
        if not hasattr(module, "rope_type") or not hasattr(module, "original_inv_freq"):
            if not _layered_rope_types(module):
                continue
        types = _layered_rope_types(module) or [module.rope_type]
        if any("dynamic" in str(kind) or kind == "longrope" for kind in types):
            _wrap(module, row_length)


def _layered_rope_types(module: nn.Module) -> list[str]:
    kinds = getattr(module, "rope_type", None)
    return list(kinds.values()) if isinstance(kinds, dict) else []


def _wrap(module: nn.Module, row_length: RowLength) -> None:
    forward: Any = module.forward
    fresh_length = getattr(module, "original_max_seq_len", None)

    def forward_with_row_length(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Dynamic scaling remembers the longest row it has seen, so that frequencies would depend on which rows came
        # before, and on the world size. Start from the original frequencies for every batch instead.
        if fresh_length is not None and getattr(module, "max_seq_len_cached", fresh_length) != fresh_length:
            module.max_seq_len_cached = fresh_length  # type: ignore[assignment]
            module.inv_freq = module.original_inv_freq.to(x.device)  # type: ignore[union-attr, operator]
        last = position_ids.new_full((*position_ids.shape[:-1], 1), row_length.max_position)
        cos, sin = forward(x, torch.cat([position_ids, last], dim=-1), *args, **kwargs)
        return cos[..., :-1, :], sin[..., :-1, :]

    module.forward = forward_with_row_length
