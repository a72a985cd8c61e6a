"""Temperature by position: Llama 4 scales the queries of layers without rotary positions by a logarithm of it.

Its attention (Transformers 5.23, ``Llama4TextAttention``; https://arxiv.org/abs/2501.19399) counts positions along the
row that it gets: the slice, whatever documents are in it. Here the factor follows from the position in the document.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

_TAKEN = "_ray_ulysses_temperature"


def take_temperature(model: nn.Module) -> bool:
    """Make the attention modules of a model leave the temperature to :func:`tempered`; return whether any has one."""
    is_any = False
    module: Any
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) is True and not getattr(module, "use_rope", True):
            # A model to which it was applied before has the factor already.
            setattr(module, _TAKEN, (float(module.floor_scale), float(module.attn_scale)))
            module.attn_temperature_tuning = False
        is_any = is_any or hasattr(module, _TAKEN)
    return is_any


def tempered(module: nn.Module, query_BHLD: torch.Tensor, position_ids_BL: torch.Tensor | None) -> torch.Tensor:
    """Return the queries of a module times ``log(1 + floor((position + 1) / floor_scale)) * attn_scale + 1``.

    Args:
        module: The attention module; without a temperature its queries are returned as they are.
        query_BHLD: Its queries.
        position_ids_BL: Positions of the tokens in their documents.
    """
    taken: tuple[float, float] | None = getattr(module, _TAKEN, None)
    if taken is None:
        return query_BHLD
    assert position_ids_BL is not None
    floor_scale, attn_scale = taken
    scales_BL = torch.log1p(torch.floor((position_ids_BL.float() + 1.0) / floor_scale)) * attn_scale + 1.0
    return (query_BHLD * scales_BL[:, None, :, None]).to(query_BHLD.dtype)
