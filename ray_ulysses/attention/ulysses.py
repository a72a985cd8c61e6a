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
from ray_ulysses.attention.chunked import attend_in_chunks
from ray_ulysses.attention.exchange import gather_heads, scatter_heads
from ray_ulysses.attention.forward_checks import check_attached, check_inputs, check_tables
from ray_ulysses.attention.kernels import Demand, KernelName, choose_kernel
from ray_ulysses.attention.operators import LayerSettings, attend_heads, attend_payload
from ray_ulysses.attention.probe import LayerAttention, refused_keywords, use_attention
from ray_ulysses.attention.refusals import refuse_inexact, refuse_mixed_devices
from ray_ulysses.attention.rope import CurrentBatch, follow_documents
from ray_ulysses.errors import UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.parallel.heads import assign_heads

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import nn

    from ray_ulysses.attention.documents import PackedDocuments
    from ray_ulysses.parallel.mesh import Role, SequenceMesh

ATTENTION_NAME = "ray_ulysses"
"""The name that the attention function is registered under with Transformers."""

_SETTLED_WINDOW = "_ray_ulysses_window"

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionContext:
    """What every attention layer of one forward is handed.

    Attributes:
        documents: The rows' tables.
        kernel: Name of the kernel, or ``auto``.
        local_tokens: Tokens of a row that this rank holds.
        ulysses: Name of the group that heads are exchanged over; empty where one rank has all heads.
        ulysses_rank: This process's place in it.
        ulysses_size: Its size.
        ring: Name of the ring's group; empty without a ring.
        chunks: Shares of the KV heads that are exchanged and attended one after the other.
        announce: Is told once of each kind of layer.
    """

    documents: PackedDocuments
    kernel: str
    local_tokens: int
    ulysses: str
    ulysses_rank: int
    ulysses_size: int
    ring: str
    chunks: int
    announce: Callable[[Demand], None]


def apply_ulysses(
    model: nn.Module, mesh: SequenceMesh, attention: KernelName = "auto", *, chunks: int = 1
) -> nn.Module:
    """Make a Hugging Face decoder attend over whole rows while it holds a slice of each.

    Call it after the model is built and before an engine wraps it; then call the model with
    ``**batch.model_inputs()`` of a :func:`shard_batch`. Applying it again replaces the mesh.

    Args:
        model: A ``PreTrainedModel`` with causal self-attention.
        mesh: The mesh whose ``sp`` ranks share a row.
        attention: Kernel to use; ``auto`` takes the fastest that can do what a layer asks for on the batch's device.
        chunks: Exchange and attend this many shares of the KV heads one after the other, for less memory.

    Returns:
        The same model.

    Raises:
        UserError: The architecture, one of its settings or the mesh can't be done exactly; the text says why.
    """
    config = _text_config(model)
    if chunks < 1:
        raise UserError(f"chunks={chunks} must be at least 1: the number of shares that the KV heads are exchanged in")
    refuse_mixed_devices(model)
    sight = refuse_inexact(model, config, mesh)
    _refuse_kernels(model, sight.layers.values(), attention)
    _register()
    use_attention(model, ATTENTION_NAME)
    _remove_earlier(model)
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    modules = {name: base.get_submodule(name) for name in sight.layers}
    for name, module in modules.items():
        settle_window(module, sight.layers[name].window)
    current = CurrentBatch()
    follow_documents(model, current)
    num_tokens = getattr(base.get_input_embeddings(), "num_embeddings", None)
    make_context = _context_maker(mesh, attention, chunks)

    def hand_down(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        batch = kwargs.get(MODEL_INPUT)
        check_inputs(batch, kwargs, mesh)
        assert isinstance(batch, ShardedBatch)
        check_attached(base, modules, ATTENTION_NAME)
        check_tables(batch, num_tokens, sight.num_positions)
        current.batch = batch
        return args, {**kwargs, MODEL_INPUT: make_context(batch)}

    handle = model.register_forward_pre_hook(hand_down, with_kwargs=True)
    model._ray_ulysses_hook = handle  # type: ignore[assignment]
    return model


def _context_maker(
    mesh: SequenceMesh, attention: KernelName, chunks: int
) -> Callable[[ShardedBatch], AttentionContext]:
    """Return a function that makes of a batch what its attention layers are handed."""
    announce = _announcer(attention)
    ulysses, ring = (mesh.group(role).group_name if size > 1 else "" for role, size in _axes(mesh))

    def make_context(batch: ShardedBatch) -> AttentionContext:
        return AttentionContext(
            documents=batch.documents,
            kernel=attention,
            local_tokens=batch.documents.row_tokens // mesh.sp_size,
            ulysses=ulysses,
            ulysses_rank=mesh.ulysses_rank,
            ulysses_size=mesh.ulysses_size,
            ring=ring,
            chunks=chunks,
            announce=announce,
        )

    return make_context


def settle_window(module: nn.Module, window: int | None) -> None:
    """Say once which window an attention module has, before any forward, compiled or not.

    Args:
        module: The module that Transformers' interface passes to :func:`ulysses_attention`.
        window: A token sees this many last tokens of its document, itself included; ``None``: all.
    """
    # A plain number: torch.compile guards it as it does the model's own settings.
    setattr(module, _SETTLED_WINDOW, window or 0)


def _refuse_kernels(model: nn.Module, layers: Collection[LayerAttention], attention: KernelName) -> None:
    """Refuse at once a kernel that is not here or can't do what a layer asks for."""
    parameter = next(model.parameters())
    if parameter.device.type == "cpu" and torch.cuda.is_available():
        # The engine moves the model later.
        return
    for layer in layers:
        demand = Demand(
            device_type=parameter.device.type,
            dtype=parameter.dtype,
            head_size=layer.head_size,
            value_size=layer.value_size,
            has_window=layer.window is not None,
            has_softcap=layer.has_softcap,
        )
        choose_kernel(attention, demand)


def _axes(mesh: SequenceMesh) -> tuple[tuple[Role, int], tuple[Role, int]]:
    return ("ulysses", mesh.ulysses_size), ("ring", mesh.ring_size)


def _announcer(attention: KernelName) -> Callable[[Demand], None]:
    """Return a function that logs each choice of a kernel once, with its reason."""
    seen: set[Demand] = set()

    def announce(demand: Demand) -> None:
        if demand not in seen:
            seen.add(demand)
            entry, reason = choose_kernel(attention, demand)
            _log.info("attention kernel of %s: %s (%s)", demand.in_words(), entry.name, reason)

    return announce


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
        sliding_window: Not used: the window is that of the mask which Transformers builds for the module, settled by
            :func:`apply_ulysses`. Some models pass no window on, and others one that their mask does not have.
        softcap: ``c`` of ``c * tanh(score / c)``.
        s_aux: ``[H]``: attention sinks, a score a head that takes its share of the softmax and brings no value.
        **kwargs: Must hold the :class:`AttentionContext`; anything that would change attention is refused.

    Returns:
        ``[B, L, H, E]`` and ``None`` for the weights.
    """
    context = kwargs.pop(MODEL_INPUT, None)
    _check_call(module, context, attention_mask, dropout, kwargs)
    assert isinstance(context, AttentionContext)
    query_BHLD, key_BKLD, value_BKLE = _in_autocast_dtype(query_BHLD, key_BKLD, value_BKLE)
    _check_tensors(module, context, query_BHLD, key_BKLD, value_BKLE)
    head_size = query_BHLD.shape[3]
    settings = LayerSettings(
        num_heads=query_BHLD.shape[1],
        num_kv_heads=key_BKLD.shape[1],
        head_size=head_size,
        value_size=value_BKLE.shape[3],
        scale=head_size**-0.5 if scaling is None else float(scaling),
        window=getattr(module, _SETTLED_WINDOW) or None,
        softcap=softcap,
        kernel=context.kernel,
        ulysses=context.ulysses,
        ring=context.ring,
    )
    if not torch.compiler.is_compiling():
        context.announce(settings.demand(query_BHLD))
    return _attended((query_BHLD, key_BKLD, value_BKLE), s_aux, settings, context), None


def _in_autocast_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast as torch's own attention does under ``torch.autocast``, where fp32 rotary tables leave Q and K in fp32."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    # Autocast never lowers fp64.
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def _attended(
    qkv_BHLD: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sinks_H: torch.Tensor | None,
    settings: LayerSettings,
    context: AttentionContext,
) -> torch.Tensor:
    """Return ``[B, L, H, E]``, by the way that the mesh and the number of chunks ask for."""
    num_rows, _, tokens, _ = qkv_BHLD[0].shape
    tables = context.documents.full if settings.window is None else context.documents.windowed
    if not context.ulysses:
        # [B, H, L, D] -> [B, L, H, D] -> [T, H, D]
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in qkv_BHLD)
        out_BLHE: torch.Tensor = attend_heads(q, k, v, sinks_H, tables, settings).unflatten(0, (num_rows, tokens))
        return out_BLHE
    if sinks_H is not None:
        plan = assign_heads(settings.num_heads, settings.num_kv_heads, context.ulysses_size)
        heads = plan.ranks[context.ulysses_rank]
        sinks_H = sinks_H[heads.first : heads.stop]
    if context.chunks > 1:
        return attend_in_chunks(*qkv_BHLD, sinks_H, tables, settings, context.chunks)
    payload = gather_heads(*qkv_BHLD, context.ulysses)
    out_ThE = attend_payload(payload, sinks_H, tables, settings)
    out_BShE: torch.Tensor = out_ThE.unflatten(0, (num_rows, context.ulysses_size * tokens))
    return scatter_heads(out_BShE, settings.num_heads, settings.num_kv_heads, context.ulysses)


def _check_call(
    module: nn.Module,
    context: object,
    attention_mask: torch.Tensor | None,
    dropout: float,
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
    for problem in refused_keywords(kwargs):
        raise UserError(f"{name} {problem}")
    if not hasattr(module, _SETTLED_WINDOW):
        raise UserError(
            f"{name} was not in the model when apply_ulysses looked through it, so its window is not known; call "
            "apply_ulysses after the model's modules are changed"
        )


def _check_tensors(
    module: nn.Module, context: AttentionContext, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    name, tokens = type(module).__name__, query.shape[2]
    if not query.shape[2] == key.shape[2] == value.shape[2] == context.local_tokens:
        raise UserError(
            f"{name} got {tokens} queries, {key.shape[2]} keys and {value.shape[2]} values a row; each rank of sp must "
            f"hold the same {context.local_tokens} tokens of a row: pass **batch.model_inputs() as shard_batch made it"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise UserError(
            f"{name} has queries in {query.dtype}, keys in {key.dtype} and values in {value.dtype}; the exchange "
            "carries them together: load the model in one dtype"
        )
    if query.device != context.documents.full.spans.cu_seqlens.device:
        raise UserError(
            f"{name} runs on {query.device} and the batch is on {context.documents.full.spans.cu_seqlens.device}; "
            "move input_ids to the model's device before shard_batch"
        )


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
