"""Checks a model and a batch before each forward, with the same result on every rank of ``sp``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ray_ulysses.attention.batch import ShardedBatch
from ray_ulysses.errors import UserError

ATTACHED = "_ray_ulysses_name"
"""The attribute of a module that Ulysses replaces; it holds the module's name, and a copy of the module has it too."""

_INSPECTED = "_ray_ulysses_adapters"
"""The attribute of a layer of PEFT; it holds the adapters that were active whenever the model was inspected."""

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from ray_ulysses.parallel.mesh import SequenceMesh


def check_attached(model: nn.Module, kinds: Mapping[str, str], implementation: str) -> None:
    """Raise if a model, or a copy of one, no longer uses Ulysses attention and would attend to this slice alone.

    Args:
        model: The model that is called.
        kinds: By name, the classes of the modules that were attached.
        implementation: The attention that they must use.
    """
    present = {name: one for one in model.modules() if (name := getattr(one, ATTACHED, None)) is not None}
    for module in present.values():
        found = getattr(getattr(module, "config", None), "_attn_implementation", implementation)
        if found != implementation:
            raise UserError(
                f"the model's attention implementation was set to {found!r} after apply_ulysses, so each rank would "
                "attend to its slice alone; call apply_ulysses again, or leave it as it is"
            )
    for name, kind in kinds.items():
        if name not in present:
            raise UserError(
                f"{kind} at {name} was replaced after apply_ulysses; call it again, so that the new module is inspected"
            )


def mark_adapters(model: nn.Module) -> None:
    """Record the active adapters of each layer of PEFT as inspected, beside those of earlier inspections."""
    for _, module, active in _adapters(model):
        setattr(module, _INSPECTED, getattr(module, _INSPECTED, frozenset()) | active)


def check_adapters(model: nn.Module) -> None:
    """Raise if an adapter was added or activated after the model was inspected: it may mix tokens.

    Args:
        model: The model that is called.
    """
    for name, module, active in _adapters(model):
        if added := active - getattr(module, _INSPECTED, frozenset()):
            raise UserError(
                f"{type(module).__name__} at {name} has the adapter {', '.join(sorted(added))}, which was added or "
                "activated after apply_ulysses and was not inspected; add adapters before apply_ulysses, or call it "
                "again on the model that it was called on (of a PeftModel around that one, on its get_base_model())"
            )


def _adapters(model: nn.Module) -> Iterator[tuple[str, nn.Module, frozenset[str]]]:
    """Yield PEFT's layers with their active adapters; no other module has a list of them."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    for name, module in base.named_modules():
        active = getattr(module, "active_adapters", None)
        if isinstance(active, list):
            yield name, module, frozenset(active)


def check_inputs(batch: object, kwargs: dict[str, Any], mesh: SequenceMesh) -> None:
    """Raise unless a batch of this mesh is passed, without arguments that contradict it."""
    if not isinstance(batch, ShardedBatch):
        raise UserError(
            "a model prepared by apply_ulysses must be called with **batch.model_inputs() of shard_batch; to generate "
            "or to use it without, call remove_ulysses(model)"
        )
    if batch.mesh is not mesh and batch.mesh != mesh:
        raise UserError("the batch was sharded over another mesh than the one of apply_ulysses; use one mesh")
    if kwargs.get("attention_mask") is not None:
        raise UserError(
            "attention_mask was passed; under Ulysses each rank sees a slice, so a mask would be wrong. Pack documents "
            "with shard_batch(document_lengths=...) instead"
        )
    if kwargs.get("labels") is not None:
        raise UserError("labels were passed to the model; it would shift them again: use causal_lm_loss(model, batch)")
    if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
        raise UserError(
            "use_cache=True is for generation; a training forward processes whole rows, without a cache. To generate, "
            "call remove_ulysses(model)"
        )


def check_tables(
    batch: ShardedBatch, num_tokens: int | None, num_logits: int | None, num_positions: int | None
) -> None:
    """Raise on every rank of ``sp`` if a lookup would fail on one, since the others would hang.

    Skipped in a compiled forward, where each batch's values would become guards.
    """
    if torch.compiler.is_compiling():
        return
    smallest, largest = batch.token_ids or (0, 0)
    if num_tokens is not None and (smallest < 0 or largest >= num_tokens):
        raise UserError(
            f"input_ids hold token id {smallest if smallest < 0 else largest}, and the model's embedding has ids 0 to "
            f"{num_tokens - 1}; use the model's own tokenizer"
        )
    if num_logits is not None and (batch.largest_label or 0) >= num_logits:
        raise UserError(
            f"labels hold token id {batch.largest_label}, and the model's output head has ids 0 to {num_logits - 1}; "
            "use the model's own tokenizer"
        )
    longest = batch.documents.max_position + 1
    if num_positions is not None and longest > num_positions:
        raise UserError(
            f"document_lengths hold a document of {longest} tokens, and the model has a table of {num_positions} "
            f"positions; pack documents of at most {num_positions} tokens, or use a model with rotary positions"
        )
