"""Ulysses attention in Hugging Face decoders and encoders.

``apply_ulysses`` registers an attention function under a new name, so other attention backends are unchanged. A forward
pre-hook passes the document tables to the layers as a keyword argument, so a recomputation in the backward pass uses
the same tables as the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ray_ulysses.attention.attachment import Attachment, AttentionContext
from ray_ulysses.attention.batch import MODEL_INPUT, ShardedBatch
from ray_ulysses.attention.documents import Tables, local_span_tables
from ray_ulysses.attention.exchange import gather_heads, scatter_heads
from ray_ulysses.attention.kernels import Demand, KernelName, choose_kernel
from ray_ulysses.attention.kernels.call import demand_of
from ray_ulysses.attention.mixers import mix_documents
from ray_ulysses.attention.operators import OperatorSettings, attend_heads, attend_in_head_groups, attend_payload
from ray_ulysses.attention.probe import LayerAttention, ProbeResult, refused_keywords, use_attention
from ray_ulysses.attention.refusals import refuse_inexact, refuse_mixed_devices
from ray_ulysses.attention.rope import CurrentBatch, follow_documents, take_temperature, tempered
from ray_ulysses.attention.token_dropout import drop_by_document
from ray_ulysses.attention.trunk import trunk_of
from ray_ulysses.errors import UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.parallel.compilation import not_compiled
from ray_ulysses.parallel.layout import assign_heads
from ray_ulysses.parallel.mesh import SequenceMesh

ATTENTION_NAME = "ray_ulysses"
"""Name of the attention function in Transformers' registry."""

_TAKEN_CONFIG = (
    "is shared with, or was copied from, a model that apply_ulysses has modified; build each model from its own copy "
    "of the original configuration, such as copy.deepcopy(config)"
)

_WINDOW = "_ray_ulysses_window"
_LOCAL_SPAN = "_ray_ulysses_local_span"
_CAUSAL = "_ray_ulysses_causal"

_log = get_logger(__name__)


def apply_ulysses(
    model: nn.Module, mesh: SequenceMesh, attention: KernelName = "auto", *, head_groups: int = 1
) -> nn.Module:
    """Make a Hugging Face model attend over complete rows while each rank processes a slice of the rows.

    Call this function after building the model and before an engine wraps it. Then call the model with
    ``**batch.model_inputs()``, where ``batch`` comes from :func:`shard_batch`. A second call replaces the mesh.
    :func:`remove_ulysses` restores the model.

    Args:
        model: A ``PreTrainedModel`` with causal or bidirectional self-attention.
        mesh: The mesh whose ``sp`` ranks share each row.
        attention: Name of the attention kernel. ``auto`` selects the fastest kernel that supports a layer.
        head_groups: Number of KV head groups. Each group is exchanged and attended in turn, so more groups take less
            memory.

    Returns:
        The same model.

    Raises:
        UserError: The model can't be trained exactly on this mesh. The message contains the reason.
    """
    from transformers import AttentionInterface

    config = _text_config(model)
    _refuse_taken_config(model)
    if head_groups < 1:
        raise UserError(f"head_groups={head_groups} must be at least 1")
    refuse_mixed_devices(model)
    probed = refuse_inexact(model, config, mesh)
    _refuse_kernels(model, probed.layers.values(), attention)
    AttentionInterface.register(ATTENTION_NAME, ulysses_attention)
    attachment = Attachment(model)
    use_attention(model, ATTENTION_NAME)
    base = trunk_of(model)
    kinds = _attach(base, probed)
    for _, module, active in _adapters(model):
        setattr(module, _INSPECTED, getattr(module, _INSPECTED, frozenset()) | active)
    current = CurrentBatch()
    follow_documents(model, current)
    drop_by_document(base, current)
    num_tokens = getattr(base.get_input_embeddings(), "num_embeddings", None)
    num_logits = getattr(base.get_output_embeddings(), "out_features", None)
    has_temperature = take_temperature(base)
    first_position = probed.first_position
    has_router_loss = bool(getattr(config, "output_router_logits", False))
    sizes = sorted({layer.local_span for layer in probed.layers.values() if layer.local_span is not None})
    make_context = context_maker(mesh, attention, head_groups, local_spans=sizes, needs_positions=has_temperature)

    def hand_down(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        batch = kwargs.get(MODEL_INPUT)
        check_inputs(batch, kwargs, mesh)
        assert isinstance(batch, ShardedBatch)
        check_attached(module, kinds, ATTENTION_NAME)
        check_adapters(module)
        check_tables(batch, num_tokens, num_logits, probed.num_positions)
        current.batch = batch
        if first_position:
            kwargs["position_ids"] = batch.position_ids_BL + first_position
        if has_router_loss:
            # The model would compute its router loss from a slice. `causal_lm_loss` computes it from complete rows.
            kwargs.setdefault("output_router_logits", False)
        return args, {**kwargs, MODEL_INPUT: make_context(batch)}

    attachment.done(model.register_forward_pre_hook(hand_down, with_kwargs=True))
    return model


def _attach(base: Any, probed: ProbeResult) -> dict[str, str]:
    modules = {name: base.get_submodule(name) for name in probed.layers}
    for name, module in modules.items():
        layer = probed.layers[name]
        set_window(module, layer.window, layer.local_span, causal=layer.causal)
    modules |= mix_documents(base)
    for name, module in modules.items():
        setattr(module, ATTACHED, name)
    return {name: type(module).__name__ for name, module in modules.items()}


def remove_ulysses(model: nn.Module) -> nn.Module:
    """Undo :func:`apply_ulysses`, so that the model runs in a single process again, for example to generate.

    Weights are not changed. If an engine partitions the weights, gather them first.

    Returns:
        The same model.

    Raises:
        UserError: :func:`apply_ulysses` was not called on this model (it may have been called on an inner model).
    """
    attachment = Attachment.of(model)
    if attachment is None:
        raise UserError(
            f"this {type(model).__name__} has no Ulysses attention; pass the model object that apply_ulysses returned"
        )
    attachment.undo(model)
    return model


def context_maker(
    mesh: SequenceMesh,
    attention: KernelName,
    head_groups: int,
    *,
    local_spans: Sequence[int] = (),
    needs_positions: bool = False,
) -> Callable[[ShardedBatch], AttentionContext]:
    """Return a function that builds the attention context of a batch.

    ``local_spans`` contains the lengths of the local spans in the model's layers. ``needs_positions`` specifies whether
    any layer uses document positions.
    """
    ulysses = mesh.group("ulysses").group_name if mesh.ulysses_size > 1 else ""
    ring = mesh.group("ring").group_name if mesh.ring_size > 1 else ""
    announced: set[Demand] = set()

    def announce(demand: Demand) -> None:
        if demand not in announced:
            announced.add(demand)
            entry, reason = choose_kernel(attention, demand)
            _log.info("attention kernel for %s: %s (%s)", demand.in_words(), entry.name, reason)

    def make_context(batch: ShardedBatch) -> AttentionContext:
        return AttentionContext(
            documents=batch.documents,
            kernel=attention,
            local_tokens=batch.documents.row_tokens // mesh.sp_size,
            ulysses=ulysses,
            ulysses_rank=mesh.ulysses_rank,
            ulysses_size=mesh.ulysses_size,
            ring=ring,
            head_groups=head_groups,
            announce=announce,
            position_ids_BL=batch.position_ids_BL if needs_positions else None,
            local_spans=_local_span_tables(batch, mesh, local_spans) if local_spans else {},
        )

    return make_context


# A compiled forward would guard on document lengths and recompile for every batch.
@not_compiled
def _local_span_tables(batch: ShardedBatch, mesh: SequenceMesh, sizes: Sequence[int]) -> dict[int, Tables]:
    ring = {"ring_size": mesh.ring_size, "ring_rank": mesh.ring_rank}
    return {size: local_span_tables(batch.documents, size, **ring) for size in sizes}


def set_window(module: nn.Module, window: int | None, local_span: int | None = None, *, causal: bool = True) -> None:
    """Set the sliding window or the local spans of an attention module. Call this function before any forward.

    :func:`apply_ulysses` determines both from the mask that Transformers builds for the module, because some models do
    not pass their window to attention, and others pass a window that their mask does not use.

    Args:
        module: The module that Transformers' interface passes to :func:`ulysses_attention`.
        window: Number of tokens of its document that each token sees, including itself, or None for no limit. In
            bidirectional attention, the window is on either side.
        local_span: Length in tokens of the local spans into which documents are divided, or None for no local spans.
        causal: Whether a token sees no later token.
    """
    # Plain integers, on which torch.compile guards.
    setattr(module, _WINDOW, window or 0)
    setattr(module, _LOCAL_SPAN, local_span or 0)
    setattr(module, _CAUSAL, causal)


def refuse_visible_labels(model: Any, batch: ShardedBatch) -> None:
    """Raise if a batch's labels are next tokens, and a model's attention sees later tokens.

    Args:
        model: A ``PreTrainedModel``, or None to skip the check.
        batch: The batch of which a loss of tokens is computed.

    Raises:
        UserError: The message contains the argument to set.
    """
    modules = () if model is None or not batch.has_shifted_labels else model.modules()
    if any(getattr(module, _CAUSAL, True) is False for module in modules):
        raise UserError(
            "the labels of the batch are next tokens, which this model's bidirectional attention sees; call "
            "shard_batch(..., shift_labels=False)"
        )


def _refuse_taken_config(model: Any) -> None:
    """Refuse a configuration that was modified for another model, because the original attention setting is unknown."""
    is_ours = model.config._attn_implementation == ATTENTION_NAME
    if is_ours and not any(Attachment.of(module) for module in model.modules()):
        raise UserError(f"the configuration of this {type(model).__name__} {_TAKEN_CONFIG}")


def _refuse_kernels(model: nn.Module, layers: Collection[LayerAttention], attention: KernelName) -> None:
    parameter = next(model.parameters())
    if parameter.device.type == "cpu" and torch.cuda.is_available():
        # The engine will move the model to a GPU, so its final device is unknown.
        return
    # With fp32 weights, assume that attention runs in bf16 (autocast or FSDP2's param_dtype). If that is wrong, the
    # first forward raises an error.
    dtype = torch.bfloat16 if parameter.dtype == torch.float32 else parameter.dtype
    like = torch.empty(0, dtype=dtype, device=parameter.device)
    for layer in layers:
        sizes, has_window = (layer.head_size, layer.value_size), layer.window is not None
        choose_kernel(attention, demand_of(like, *sizes, has_window, layer.has_softcap, layer.causal))


def ulysses_attention(
    module: nn.Module,
    query_BHLD: torch.Tensor,
    key_BKLD: torch.Tensor,
    value_BKLE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention over complete rows. Transformers calls this function in every attention layer.

    All ranks of ``sp`` must call this function, for the same layers in the same order.

    Args:
        module: The attention module.
        query_BHLD: Queries of this rank's slice, after the rotary embedding.
        key_BKLD: Keys of the slice, after the rotary embedding.
        value_BKLE: Values of the slice.
        attention_mask: Must be None, because the document tables replace the mask.
        scaling: Factor on the scores. None means ``D ** -0.5``.
        dropout: Must be 0.
        sliding_window: Ignored. The window is set by :func:`set_window`.
        softcap: Cap ``c`` in ``c * tanh(score / c)``.
        s_aux: Attention sinks, ``[H]``: one additional softmax score per head, without a value.
        **kwargs: Must contain the :class:`AttentionContext`. Options that would change the result are refused.

    Returns:
        The output ``[B, L, H, E]``, and None in place of the attention weights.
    """
    context = _checked(module, kwargs.pop(MODEL_INPUT, None), attention_mask, dropout, kwargs)
    query_BHLD = tempered(module, query_BHLD, context.position_ids_BL)
    query_BHLD, key_BKLD, value_BKLE = _in_autocast_dtype(query_BHLD, key_BKLD, value_BKLE)
    _check_tensors(module, context, query_BHLD, key_BKLD, value_BKLE)
    (num_heads, head_size), (num_kv_heads, value_size) = query_BHLD.shape[1::2], value_BKLE.shape[1::2]
    window, local_span, causal = getattr(module, _WINDOW), getattr(module, _LOCAL_SPAN), getattr(module, _CAUSAL)
    if not torch.compiler.is_compiling():
        context.announce(demand_of(query_BHLD, head_size, value_size, window != 0, softcap is not None, causal))
    if s_aux is not None and context.ulysses:
        mine = assign_heads(num_heads, num_kv_heads, context.ulysses_size).ranks[context.ulysses_rank]
        s_aux = s_aux[mine.first : mine.stop]
    documents = context.documents
    tables = context.local_spans[local_span] if local_span else documents.windowed if window else documents.full
    settings = OperatorSettings(
        sinks=s_aux,
        cu_seqlens=tables.spans.cu_seqlens,
        borders=tables.borders,
        rectangles=tables.rectangles,
        heads=[num_heads, num_kv_heads, head_size, value_size],
        scale=head_size**-0.5 if scaling is None else float(scaling),
        window=window,
        causal=causal,
        softcap=softcap or 0.0,
        kernel=context.kernel,
        ulysses=context.ulysses,
        ring=context.ring,
    )
    return _attend((query_BHLD, key_BKLD, value_BKLE), settings, context.head_groups), None


def _in_autocast_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast to the autocast dtype, as torch's own attention does, because fp32 rotary tables make Q and K fp32."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    # Like torch.autocast, leave fp64 tensors unchanged.
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def _attend(
    qkv_BHLD: tuple[torch.Tensor, torch.Tensor, torch.Tensor], settings: OperatorSettings, head_groups: int
) -> torch.Tensor:
    num_rows, num_heads, tokens, _ = qkv_BHLD[0].shape
    if not settings.ulysses:
        # [B, H, L, D] -> [B, L, H, D] -> [T, H, D]
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in qkv_BHLD)
        out_BLHE: torch.Tensor = attend_heads(q, k, v, settings).unflatten(0, (num_rows, tokens))
        return out_BLHE
    if head_groups > 1:
        return attend_in_head_groups(*qkv_BHLD, settings, head_groups)
    payload_UBLF = gather_heads(*qkv_BHLD, settings.ulysses)
    out_ThE = attend_payload(payload_UBLF, settings)
    out_BShE: torch.Tensor = out_ThE.unflatten(0, (num_rows, payload_UBLF.shape[0] * tokens))
    return scatter_heads(out_BShE, num_heads, qkv_BHLD[1].shape[1], settings.ulysses)


def _checked(
    module: nn.Module, context: object, attention_mask: torch.Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> AttentionContext:
    name = type(module).__name__
    if not isinstance(context, AttentionContext):
        if not hasattr(module, _WINDOW):
            raise UserError(
                f"apply_ulysses was not called on this {name}'s model, but the model's configuration {_TAKEN_CONFIG}"
            )
        raise UserError(
            f"{name} did not receive the document tables: either the model was not called with "
            "**batch.model_inputs(), or this architecture does not pass keyword arguments on to its attention"
        )
    if attention_mask is not None:
        raise UserError(f"{name} received an attention mask; remove it, since shard_batch separates documents")
    if dropout:
        raise UserError(f"{name} requests attention dropout {dropout}; set attention_dropout: 0.0")
    for problem in refused_keywords(kwargs):
        raise UserError(f"{name} {problem}")
    if not hasattr(module, _WINDOW):
        raise UserError(
            f"{name} was added after apply_ulysses inspected the model, so its window is unknown; call apply_ulysses "
            "again after changing the model's modules"
        )
    return context


def _check_tensors(
    module: nn.Module, context: AttentionContext, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    name, tokens = type(module).__name__, query.shape[2]
    if not query.shape[2] == key.shape[2] == value.shape[2] == context.local_tokens:
        raise UserError(
            f"{name} received {tokens} queries, {key.shape[2]} keys and {value.shape[2]} values per row, but the "
            f"batch's slice has {context.local_tokens} tokens per row; pass **batch.model_inputs() unchanged"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise UserError(
            f"{name} has queries in {query.dtype}, keys in {key.dtype} and values in {value.dtype}, but the exchange "
            "requires a common dtype; load the model in a single dtype"
        )
    if query.device != context.documents.full.spans.cu_seqlens.device:
        raise UserError(
            f"{name} runs on {query.device}, but the batch is on {context.documents.full.spans.cu_seqlens.device}; "
            "move input_ids to the model's device before calling shard_batch"
        )


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UserError(f"{type(model).__name__} is not a Hugging Face model; pass a PreTrainedModel to apply_ulysses")
    return config.get_text_config(decoder=True)


ATTACHED = "_ray_ulysses_name"
"""Attribute that stores the module name on every module that Ulysses modifies. Copies of the module keep it."""

_INSPECTED = "_ray_ulysses_adapters"
"""Attribute that stores, on a PEFT layer, the adapters that were active when the model was inspected."""


def check_attached(model: nn.Module, kinds: Mapping[str, str], implementation: str) -> None:
    """Raise if a model or its copy no longer uses Ulysses attention and would therefore attend only within the slice.

    ``kinds`` maps the names of the modified modules to their class names.
    """
    present = {name: one for one in model.modules() if (name := getattr(one, ATTACHED, None)) is not None}
    for module in present.values():
        found = getattr(getattr(module, "config", None), "_attn_implementation", implementation)
        if found != implementation:
            raise UserError(
                f"the model's attention implementation was set to {found!r} after apply_ulysses, so attention would be "
                "limited to each rank's slice; call apply_ulysses again, or do not change the implementation"
            )
    for name, kind in kinds.items():
        if name not in present:
            raise UserError(
                f"{kind} at {name} was replaced after apply_ulysses; call apply_ulysses again to inspect the new module"
            )


def check_adapters(model: nn.Module) -> None:
    """Raise if an adapter was added or activated after the model was inspected, because the adapter may mix tokens."""
    for name, module, active in _adapters(model):
        if added := active - getattr(module, _INSPECTED, frozenset()):
            raise UserError(
                f"{type(module).__name__} at {name} has the adapter {', '.join(sorted(added))}, which was added or "
                "activated after apply_ulysses and was not inspected; add adapters before apply_ulysses, or call "
                "apply_ulysses again on the same model (for a PeftModel, on the result of get_base_model())"
            )


def _adapters(model: nn.Module) -> Iterator[tuple[str, nn.Module, frozenset[str]]]:
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    for name, module in base.named_modules():
        # On other modules with this attribute, it is not a list.
        active = getattr(module, "active_adapters", None)
        if isinstance(active, list):
            yield name, module, frozenset(active)


def check_inputs(batch: object, kwargs: dict[str, Any], mesh: SequenceMesh) -> None:
    """Raise unless a model's keyword arguments contain a batch for this mesh, and no mask, labels or cache."""
    if not isinstance(batch, ShardedBatch):
        raise UserError(
            "after apply_ulysses, call the model with **batch.model_inputs(), where batch comes from shard_batch; for "
            "other uses, such as generation, call remove_ulysses(model) first"
        )
    if batch.mesh is not mesh and batch.mesh != mesh:
        raise UserError("shard_batch and apply_ulysses were called with different meshes; pass the same mesh to both")
    if kwargs.get("attention_mask") is not None:
        raise UserError(
            "attention_mask is not supported, because each rank's input is a slice of the rows; use "
            "shard_batch(document_lengths=...) to separate documents or exclude padding"
        )
    if kwargs.get("labels") is not None:
        raise UserError(
            "labels were passed to the model, which would shift them a second time; use causal_lm_loss(model, batch)"
        )
    if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
        raise UserError(
            "a KV cache is not supported in training (use_cache=True or past_key_values); to generate, call "
            "remove_ulysses(model) first"
        )


def check_tables(
    batch: ShardedBatch, num_tokens: int | None, num_logits: int | None, num_positions: int | None
) -> None:
    """Raise on all ranks of ``sp`` if an embedding lookup would fail on any rank; otherwise the other ranks would hang.

    In a compiled forward, nothing is checked, because the checks would add guards that fail for every batch.
    """
    if torch.compiler.is_compiling():
        return
    smallest, largest = batch.token_ids or (0, 0)
    if num_tokens is not None and (smallest < 0 or largest >= num_tokens):
        raise UserError(
            f"input_ids contain token id {smallest if smallest < 0 else largest}, but the model's embedding covers ids "
            f"0 to {num_tokens - 1}; use the model's own tokenizer"
        )
    if num_logits is not None and (batch.largest_label or 0) >= num_logits:
        raise UserError(
            f"labels contain token id {batch.largest_label}, but the model's output head covers ids 0 to "
            f"{num_logits - 1}; use the model's own tokenizer"
        )
    longest = batch.documents.max_position + 1
    if num_positions is not None and longest > num_positions:
        raise UserError(
            f"document_lengths contain a document of {longest} tokens, but the model's position table has "
            f"{num_positions} entries; limit documents to {num_positions} tokens, or use a model with rotary embeddings"
        )
