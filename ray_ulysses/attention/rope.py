"""Length-dependent rotary embeddings for packed documents and sharded rows.

LongRoPE and dynamic NTK scaling choose frequencies by sequence length. Transformers derives the length from the largest
position id in the call (``dynamic_rope_update``). With packed documents, this is the longest document's length, and
under Ulysses the call has only the slice's position ids. Here each document gets the frequencies for its length, as if
it were not packed. The model's rotary module is called once per distinct length that changes the frequencies, and each
token uses the result for its document.

Llama 4 scales the queries of layers without rotary embeddings by a logarithm of the position. ``Llama4TextAttention``
(Transformers 5.23; https://arxiv.org/abs/2501.19399) counts positions from the start of its input, which under Ulysses
is a slice of several documents. Here the factor is computed from the position in the document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ray_ulysses.attention.batch import ShardedBatch
from ray_ulysses.parallel.compilation import not_compiled

_LONGEST_SEEN = "max_seq_len_cached"
_PLAIN_FORWARD = "_ray_ulysses_plain_forward"


@dataclass(slots=True)
class CurrentBatch:
    """A mutable reference to the current forward's batch, read by the model's rotary modules."""

    batch: ShardedBatch | None = None


def follow_documents(model: nn.Module, current: CurrentBatch) -> None:
    """Make a model's length-dependent rotary modules use the length of each document."""
    for module in model.modules():
        if any(_is_length_dependent(kind) for kind in _rope_types(module)):
            _wrap(module, current)


def _is_length_dependent(kind: str) -> bool:
    # Same condition as in Transformers' dynamic_rope_update.
    return "dynamic" in kind or kind == "longrope"


def _rope_types(module: nn.Module) -> list[str]:
    """Return a rotary module's RoPE types (one, or one per layer type), or an empty list for any other module."""
    kinds: Any = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        return [str(kind) for kind in kinds.values()]
    return [str(kinds)] if kinds is not None and hasattr(module, "original_inv_freq") else []


def _wrap(module: Any, current: CurrentBatch) -> None:
    # If a wrapper exists already, replace it: an earlier wrapper reads another CurrentBatch.
    plain: Callable[..., Any] = getattr(module, _PLAIN_FORWARD, module.forward)
    setattr(module, _PLAIN_FORWARD, plain)

    def forward_per_document(
        x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None, **kwargs: Any
    ) -> Any:
        if layer_type is not None:
            kwargs["layer_type"] = layer_type
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        if not _is_length_dependent(kind):
            return plain(x, position_ids, **kwargs)
        assert current.batch is not None
        if kind == "longrope":
            return _longrope(module, plain, x, position_ids, current.batch, kwargs)
        return _dynamic_ntk(module, plain, x, position_ids, current.batch, kwargs)

    module.forward = forward_per_document


def _longrope(
    module: Any,
    plain: Callable[..., Any],
    x: torch.Tensor,
    position_ids_BL: torch.Tensor,
    batch: ShardedBatch,
    kwargs: dict[str, Any],
) -> Any:
    """Use the short factors for documents up to the original length, and the long factors for longer documents."""
    parameters = module.config.rope_parameters
    if "layer_type" in kwargs:
        parameters = parameters[kwargs["layer_type"]]
    original = parameters["original_max_position_embeddings"]
    rotary = _of_length(original, plain, x, position_ids_BL, kwargs)
    longest = batch.documents.max_position + 1
    if longest <= original:
        return rotary
    longer = _of_length(longest, plain, x, position_ids_BL, kwargs)
    return _choose(batch.document_lengths_BL > original, longer, rotary)


# Transformers reads this type's length on the host. A compiled forward would guard on it and recompile per batch.
@not_compiled
def _dynamic_ntk(
    module: Any,
    plain: Callable[..., Any],
    x: torch.Tensor,
    position_ids_BL: torch.Tensor,
    batch: ShardedBatch,
    kwargs: dict[str, Any],
) -> Any:
    """Use the original frequencies up to the original length, and separate frequencies for each longer length."""
    original = int(module.original_max_seq_len)
    lengths = sorted({length for row in batch.documents.lengths for length in row if length > original})
    rotary, shorter = None, 0
    for length in (original, *lengths):
        _forget_longest_row(module, x.device)
        longer = _of_length(length, plain, x, position_ids_BL, kwargs)
        rotary = longer if rotary is None else _choose(batch.document_lengths_BL > shorter, longer, rotary)
        shorter = length
    return rotary


def _of_length(
    length: int, plain: Callable[..., Any], x: torch.Tensor, position_ids_BL: torch.Tensor, kwargs: dict[str, Any]
) -> Any:
    # Tokens of longer documents use another result; clamp their positions so that they do not raise the length.
    position_ids_BL = position_ids_BL.clamp(max=length - 1)
    last = position_ids_BL.new_full((*position_ids_BL.shape[:-1], 1), length - 1)
    rotary = plain(x, torch.cat([position_ids_BL, last], dim=-1), **kwargs)
    # The result is a pair (cosines, sines) or a complex tensor.
    return tuple(part[..., :-1, :] for part in rotary) if isinstance(rotary, tuple) else rotary[..., :-1, :]


def _choose(is_longer_BL: torch.Tensor, longer: Any, shorter: Any) -> Any:
    if isinstance(longer, tuple):
        return tuple(_choose(is_longer_BL, *parts) for parts in zip(longer, shorter, strict=True))
    return torch.where(is_longer_BL.unsqueeze(-1), longer, shorter)


def _forget_longest_row(module: Any, device: torch.device) -> None:
    """Reset a module with dynamic scaling to its original frequencies.

    The module remembers the longest row so far (in some models per layer type). Without a reset, frequencies would
    depend on earlier rows and on the world size.
    """
    fresh_length = module.original_max_seq_len
    for name in [name for name in vars(module) if name.endswith(_LONGEST_SEEN)]:
        if getattr(module, name) != fresh_length:
            prefix = name.removesuffix(_LONGEST_SEEN)
            setattr(module, name, fresh_length)
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").to(device))


def without_documents(model: nn.Module) -> None:
    """Remove the wrappers from a copied model's rotary modules. They would otherwise call the original modules."""
    for module in model.modules():
        plain = vars(module).pop(_PLAIN_FORWARD, None)
        if plain is not None:
            module.forward = plain


_TAKEN = "_ray_ulysses_temperature"


def take_temperature(model: nn.Module) -> bool:
    """Turn off temperature scaling inside attention modules, for :func:`tempered`; return whether any module has it."""
    is_any = False
    module: Any
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) is True and not getattr(module, "use_rope", True):
            # On a second call, tuning is already off, so the factors recorded by the first call remain.
            setattr(module, _TAKEN, (float(module.floor_scale), float(module.attn_scale)))
            module.attn_temperature_tuning = False
        is_any = is_any or hasattr(module, _TAKEN)
    return is_any


def tempered(module: nn.Module, query_BHLD: torch.Tensor, position_ids_BL: torch.Tensor | None) -> torch.Tensor:
    """Multiply a module's queries by ``log(1 + floor((position + 1) / floor_scale)) * attn_scale + 1``.

    ``position`` is the position in the document. Without temperature scaling, return the queries unchanged.
    """
    taken: tuple[float, float] | None = getattr(module, _TAKEN, None)
    if taken is None:
        return query_BHLD
    assert position_ids_BL is not None
    floor_scale, attn_scale = taken
    scales_BL = torch.log1p(torch.floor((position_ids_BL.float() + 1.0) / floor_scale)) * attn_scale + 1.0
    return (query_BHLD * scales_BL[:, None, :, None]).to(query_BHLD.dtype)
