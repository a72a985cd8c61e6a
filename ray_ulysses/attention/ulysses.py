"""Ulysses attention inside a Hugging Face decoder.

``apply_ulysses`` registers one attention function under a name of its own, so no other backend is touched, and lets a
pre-forward hook hand each batch's tables down as a keyword, so that recomputation in the backward pass sees the same
tables as the forward did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ray_ulysses.attention.batch import MODEL_INPUT, ShardedBatch
from ray_ulysses.attention.exchange import gather_heads, scatter_heads
from ray_ulysses.attention.kernels import AttentionKernel, KernelName, choose_kernel
from ray_ulysses.attention.refusals import refuse_inexact
from ray_ulysses.attention.rope import RowLength, follow_row_length
from ray_ulysses.errors import UserError
from ray_ulysses.logging import get_logger

if TYPE_CHECKING:
    from torch import nn

    from ray_ulysses.attention.documents import PackedDocuments
    from ray_ulysses.parallel.mesh import SequenceMesh

ATTENTION_NAME = "ray_ulysses"
"""The name that the attention function is registered under with Transformers."""

_HARMLESS_KEYWORDS = frozenset(
    {
        "position_ids", "position_embeddings", "cache_position", "use_cache", "past_key_values", "output_attentions",
        "output_hidden_states", "return_dict", "layer_idx", "is_causal", "num_items_in_batch", "output_router_logits",
        "logits_to_keep",
    }
)  # fmt: skip
_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionContext:
    """What every attention layer of one forward is handed: the mesh, the rows' tables and the kernel."""

    mesh: SequenceMesh
    documents: PackedDocuments
    kernel: AttentionKernel


def apply_ulysses(model: nn.Module, mesh: SequenceMesh, attention: KernelName = "auto") -> nn.Module:
    """Make a Hugging Face decoder attend over whole rows while it holds a slice of each.

    Call it after the model is built and before an engine wraps it; then call the model with
    ``**batch.model_inputs()`` of a :func:`shard_batch`. Applying it again replaces the mesh.

    Args:
        model: A ``PreTrainedModel`` with causal self-attention.
        mesh: The mesh whose ``sp`` ranks share a row.
        attention: Kernel to use; ``auto`` takes the fastest that can run on the model's device.

    Returns:
        The same model.

    Raises:
        UserError: The architecture, one of its settings or the mesh can't be done exactly; the text says why.
    """
    config = _text_config(model)
    refuse_inexact(model, config, mesh)
    parameter = next(model.parameters())
    choose_kernel(attention, parameter.device.type, parameter.dtype)
    _register()
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    _remove_earlier(model)
    row_length = RowLength()
    follow_row_length(model, row_length)
    announced: set[str] = set()

    def hand_down(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        batch = kwargs.get(MODEL_INPUT)
        _check_inputs(batch, kwargs, mesh)
        assert isinstance(batch, ShardedBatch)
        row_length.max_position = batch.documents.max_position
        # The engine may have moved the model since apply_ulysses: choose where the batch lives.
        dtype = next(module.parameters()).dtype
        entry = choose_kernel(attention, batch.input_ids_BL.device.type, dtype)
        if entry.name not in announced:
            announced.add(entry.name)
            _log.info("attention kernel: %s (%s; model.attention=%s)", entry.name, entry.needs, attention)
        context = AttentionContext(mesh=mesh, documents=batch.documents, kernel=entry.run)
        return args, {**kwargs, MODEL_INPUT: context}

    handle = model.register_forward_pre_hook(hand_down, with_kwargs=True)
    model._ray_ulysses_hook = handle  # type: ignore[assignment]
    return model


def ulysses_attention(
    module: nn.Module,
    query_BHLD: torch.Tensor,
    key_BKLD: torch.Tensor,
    value_BKLE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over whole rows; the function that Transformers calls in every layer.

    Every rank of ``sp`` must call, in the same order of layers.

    Args:
        module: The attention module.
        query_BHLD: Queries of this rank's slice, rotary embedding applied.
        key_BKLD: Keys of the slice.
        value_BKLE: Values of the slice.
        attention_mask: Must be ``None``: documents are kept apart by their tables.
        scaling: Factor on the scores; ``D ** -0.5`` if ``None``.
        dropout: Must be 0.
        sliding_window: A token sees this many last tokens of its document, itself included.
        **kwargs: Must hold the :class:`AttentionContext`; anything that would change attention is refused.

    Returns:
        ``[B, L, H, E]`` and ``None`` for the weights.
    """
    context = kwargs.pop(MODEL_INPUT, None)
    _check_call(module, context, attention_mask, dropout, sliding_window, kwargs)
    assert isinstance(context, AttentionContext)
    scale = query_BHLD.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if context.mesh.sp_size == 1:
        q, k, v = (tensor.transpose(1, 2) for tensor in (query_BHLD, key_BKLD, value_BKLE))
        return context.kernel(q, k, v, context.documents, scale, sliding_window), None
    group = context.mesh.group("sp")
    q, k, v = gather_heads(query_BHLD, key_BKLD, value_BKLE, group)
    out_BShE = context.kernel(q, k, v, context.documents, scale, sliding_window)
    return scatter_heads(out_BShE, group), None


def _check_call(
    module: nn.Module,
    context: object,
    attention_mask: torch.Tensor | None,
    dropout: float,
    sliding_window: int | None,
    kwargs: dict[str, Any],
) -> None:
    name = type(module).__name__
    if not isinstance(context, AttentionContext):
        raise UserError(
            f"{name} was called without the batch's tables; either the model was not called with "
            "**batch.model_inputs() of shard_batch, or this architecture does not pass keywords on to its attention"
        )
    if attention_mask is not None:
        raise UserError(f"{name} got an attention mask; documents are kept apart by shard_batch's tables, pass no mask")
    if dropout:
        raise UserError(f"{name} asks for attention dropout {dropout}; set attention_dropout: 0.0")
    if getattr(module, "is_causal", True) is False:
        raise UserError(f"{name} attends in both directions; only causal attention is supported")
    layer_types = getattr(getattr(module, "config", None), "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    if layer_types and layer is not None and sliding_window is None and layer_types[layer] == "sliding_attention":
        raise UserError(f"{name} is a sliding-window layer but does not say its window to the attention function")
    odd = [key for key, value in kwargs.items() if key not in _HARMLESS_KEYWORDS and value is not None]
    if odd:
        raise UserError(f"{name} asks its attention for {', '.join(sorted(odd))}, which no kernel here does exactly")


def _check_inputs(batch: object, kwargs: dict[str, Any], mesh: SequenceMesh) -> None:
    if not isinstance(batch, ShardedBatch):
        raise UserError("a model prepared by apply_ulysses must be called with **batch.model_inputs() of shard_batch")
    if batch.mesh is not mesh and batch.mesh != mesh:
        raise UserError("the batch was cut over another mesh than the one that apply_ulysses was given; use one mesh")
    if kwargs.get("attention_mask") is not None:
        raise UserError(
            "attention_mask was passed; under Ulysses each rank sees a slice, so a mask would be wrong. Pack documents "
            "with shard_batch(document_lengths=...) instead"
        )
    if kwargs.get("labels") is not None:
        raise UserError("labels were passed to the model; it would shift them again: use causal_lm_loss(model, batch)")
    if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
        raise UserError("use_cache=True is for generation; under Ulysses a row is passed whole, without a cache")


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UserError(f"{type(model).__name__} is not a Hugging Face model; apply_ulysses needs a PreTrainedModel")
    return config.get_text_config(decoder=True)


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, ulysses_attention)


def _remove_earlier(model: nn.Module) -> None:
    earlier = getattr(model, "_ray_ulysses_hook", None)
    if earlier is not None:
        earlier.remove()
