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

_LONGEST_SEEN = "max_seq_len_cached"
_PLAIN_FORWARD = "_ray_ulysses_plain_forward"


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
        if any("dynamic" in kind or kind == "longrope" for kind in _rope_types(module)):
            _wrap(module, row_length)


def _rope_types(module: nn.Module) -> list[str]:
    """Return the kinds of RoPE of a rotary module: one, one a type of layer, or none for any other module."""
    kinds: Any = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        return [str(kind) for kind in kinds.values()]
    return [str(kinds)] if kinds is not None and hasattr(module, "original_inv_freq") else []


def _wrap(module: Any, row_length: RowLength) -> None:
    # Applied again, the row length is that of the new mesh; a wrapper around a wrapper would still show the old one.
    forward: Any = getattr(module, _PLAIN_FORWARD, module.forward)
    setattr(module, _PLAIN_FORWARD, forward)

    def forward_with_row_length(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _forget_longest_row(module, x.device)
        # Positions of padding count on their own and could be the largest: no token of a document depends on them.
        position_ids = position_ids.clamp(max=row_length.max_position)
        last = position_ids.new_full((*position_ids.shape[:-1], 1), row_length.max_position)
        cos, sin = forward(x, torch.cat([position_ids, last], dim=-1), *args, **kwargs)
        return cos[..., :-1, :], sin[..., :-1, :]

    module.forward = forward_with_row_length


def _forget_longest_row(module: Any, device: torch.device) -> None:
    """Put dynamic scaling back to its original frequencies.

    It remembers the longest row it has seen (one length a type of layer in some models), so that frequencies would
    depend on which rows came before, and on the world size.
    """
    fresh_length = getattr(module, "original_max_seq_len", None)
    for name in [name for name in vars(module) if name.endswith(_LONGEST_SEEN)]:
        if fresh_length is not None and getattr(module, name) != fresh_length:
            prefix = name.removesuffix(_LONGEST_SEEN)
            setattr(module, name, fresh_length)
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").to(device))
