"""Recurrent layers sharded over ``sp``. Each rank runs the module's own code on complete documents, for its heads.

The input projections run on this rank's slice. One all-to-all exchanges their results for complete rows of this rank's
heads or channels. The forward of the module's class then runs once per document, with an empty initial state and
convolution. It runs on a stand-in for the module, whose projections return the exchanged results and whose parameters
are limited to this rank's heads. A second all-to-all returns the result to the slices, where the output projection
runs. In Mamba 1, a projection from all channels precedes the recurrence and adds an all-reduce of partial sums.

A parameter's gradient covers either this rank's heads over the complete row, or all heads over this rank's slice. In
both cases the gradients are summed over ``sp``, like those of other parameters.

If the kernels can separate packed documents, a single call processes all documents. Transformers 5.23 calls functions
from ``causal-conv1d``, ``flash-linear-attention`` and ``mamba-ssm`` if these packages are installed, and passes them
``seq_idx`` (document index per token) and ``cu_seqlens``. A function that lacks these arguments would silently mix
documents, so all functions that a layer calls are inspected. A canary test covers the private Transformers data that
this inspection reads.

Legend: B rows, L tokens of a slice, S tokens of a row, T = B * S, N tokens of a document, U ranks, C channels per rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from ray_ulysses.attention.attachment import AttentionContext
from ray_ulysses.attention.batch import MODEL_INPUT
from ray_ulysses.attention.exchange import gather_channels, scatter_channels, sum_over_ranks
from ray_ulysses.attention.mixer_layouts import MixerLayout, arranged, layout_of, local_channels
from ray_ulysses.errors import UserError
from ray_ulysses.parallel.compilation import not_compiled

_LAYOUT = "_ray_ulysses_layout"


class _Reached(Exception):
    """Raised to stop a module's forward at the projection from all channels; carries the rank's partial result."""


def find_mixers(model: nn.Module) -> Iterator[tuple[str, nn.Module, MixerLayout]]:
    """Yield the name, module and layout of each supported recurrent layer."""
    for name, module in model.named_modules():
        layout = layout_of(module)
        if layout is not None:
            yield name, module, layout


def read_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield recurrent layers' linear submodules that are never called: each rank reads a part of their weights."""
    for name, module, layout in find_mixers(model):
        read = [one.removesuffix(".weight") for one in layout.vectors if one.endswith(".weight")]
        for inside in (*read, *([layout.summed] if layout.summed else [])):
            yield f"{name}.{inside}", module.get_submodule(inside)


def shared_sizes(model: nn.Module) -> tuple[int, ...]:
    """Return the rank counts that can share the heads of all recurrent layers, in ascending order."""
    layouts = [layout for _, _, layout in find_mixers(model)]
    valid = [set(layout.valid_ranks()) for layout in layouts]
    return tuple(sorted(set.intersection(*valid))) if valid else ()


def mix_documents(model: nn.Module) -> dict[str, nn.Module]:
    """Replace the forward of all recurrent layers with the sharded version, and return the layers by name."""
    mixers = {}
    for name, module, layout in find_mixers(model):
        mixers[name] = module
        # Store the layout, because FSDP2 changes the class by which it is found.
        setattr(module, _LAYOUT, layout)
        set_forward(module, _forward)
    pass_tables_on(model)
    return mixers


def pass_tables_on(model: nn.Module) -> None:
    """Make all decoder layers pass the document tables on to their recurrent module."""
    for name, _, layout in find_mixers(model):
        if layout.is_called_without_tables:
            set_forward(model.get_submodule(name.rpartition(".")[0]), _with_tables)


def _with_tables(layer: Any, *args: Any, **kwargs: Any) -> Any:
    # These layers pass on only the mask, so use the mask to carry the tables.
    if kwargs.get("attention_mask") is None:
        kwargs["attention_mask"] = kwargs.get(MODEL_INPUT)
    return type(layer).forward(layer, *args, **kwargs)


def given_tables(kwargs: dict[str, Any]) -> Any:
    """Return the document tables from a layer's keyword arguments, in which the tables may be passed as the mask."""
    return kwargs.get(MODEL_INPUT, kwargs.get("attention_mask"))


def set_forward(module: Any, forward: Callable[..., Any]) -> None:
    """Replace the forward of a module instance. ``forward`` is called with the module and the call's arguments."""
    # The module itself is still called, so an engine's hooks gather its parameters. A bound method is copied with the
    # model, so a copy does not run the original's layers.
    module.forward = MethodType(forward, module)


# A compiled forward would guard on document lengths and recompile for every batch.
@not_compiled
def _forward(module: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    layout: MixerLayout = getattr(module, _LAYOUT)
    output = _mix(module, layout, hidden_states, _checked(module, hidden_states, args, kwargs))
    return (output, None) if layout.is_attention else output


def _checked(
    module: nn.Module, hidden_BLH: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AttentionContext:
    name, context = type(module).__name__, given_tables(kwargs)
    if not isinstance(context, AttentionContext):
        raise UserError(
            f"{name} did not receive the document tables: either the model was not called with "
            "**batch.model_inputs(), or this architecture does not pass keyword arguments on to the module"
        )
    given = [*args, *(kwargs.get(key) for key in ("attention_mask", "cache_params", "past_key_values"))]
    if any(one is not None and one is not context for one in given):
        raise UserError(f"{name} received a mask or a cache; remove it, since shard_batch separates documents")
    if hidden_BLH.shape[1] != context.local_tokens:
        raise UserError(
            f"{name} received {hidden_BLH.shape[1]} tokens per row, but the batch's slice has {context.local_tokens} "
            "tokens per row; pass **batch.model_inputs() unchanged"
        )
    return context


def _mix(module: Any, layout: MixerLayout, hidden_BLH: torch.Tensor, context: AttentionContext) -> torch.Tensor:
    ranks, num_rows = context.ulysses_size, hidden_BLH.shape[0]
    scaled = hidden_BLH * getattr(module, layout.input_scale) if layout.input_scale else hidden_BLH
    results = {name: _projected(module, (*layout.before.get(name, ()), name), scaled) for name in layout.projections}
    if layout.projection_scale:
        results = {name: result * getattr(module, layout.projection_scale) for name, result in results.items()}
    slices = [arranged(results[name], blocks, ranks, dim=2) for name, blocks in layout.projections.items()]
    widths = [part_BLUC.shape[3] for part_BLUC in slices]
    rows_TC = gather_channels(torch.cat(slices, dim=3), context.ulysses).flatten(0, 1)
    packed = packed_arguments(module, layout, context)
    borders = context.documents.full.spans.borders
    lengths = [len(rows_TC)] if packed else [stop - start for start, stop in pairwise(borders)]
    parameters = _own_parameters(module, layout, context)
    documents = [document_NC.split(widths, dim=1) for document_NC in rows_TC.split(lengths)]
    run = partial(_whole_document, module, layout, parameters, ranks, hidden_BLH, packed or {})
    sums = _sums(run, documents, context.ulysses) if layout.summed and context.ulysses else [None] * len(lengths)
    outputs = [run(projected, total).squeeze(0) for projected, total in zip(documents, sums, strict=True)]
    rows_BSC = torch.cat(outputs).unflatten(0, (num_rows, -1))
    # [B, L, U, C] -> [B, L, U * C], ordered by head
    out = scatter_channels(rows_BSC, context.ulysses).flatten(2)
    output: torch.Tensor = getattr(module, layout.output)(_normalized(module, layout, out, hidden_BLH, results))
    return output


def _normalized(
    module: Any, layout: MixerLayout, out: torch.Tensor, hidden: torch.Tensor, results: dict[str, torch.Tensor]
) -> torch.Tensor:
    if not layout.row_norm:
        return out
    norm = getattr(module, layout.row_norm)
    if layout.row_gate:
        gated: torch.Tensor = torch.sigmoid(getattr(module, layout.row_gate)(hidden)) * norm(out)
        return gated
    (result,) = results.values()
    normalized: torch.Tensor = norm(out, result[..., : out.shape[2]])
    return normalized.to(hidden.dtype)


def _projected(module: Any, names: tuple[str, ...], hidden: torch.Tensor) -> torch.Tensor:
    for name in names:
        hidden = attrgetter(name)(module)(hidden)
    return hidden


def _sums(
    run: Callable[..., torch.Tensor], documents: Sequence[tuple[torch.Tensor, ...]], group: str
) -> Sequence[torch.Tensor]:
    """Return each document's projection from all channels, ``[1, N, F]``, with one all-reduce for all documents.

    The module's forward runs here up to this projection and later again from the start, so the convolution runs twice.
    """
    parts = []
    for projected in documents:
        try:
            run(projected, None)
        except _Reached as reached:
            parts.append(reached.args[0])
    total = sum_over_ranks(torch.cat(parts, dim=1), group)
    sums: Sequence[torch.Tensor] = total.split([part.shape[1] for part in parts], dim=1)
    return sums


def _own_parameters(module: Any, layout: MixerLayout, context: AttentionContext) -> dict[str, torch.Tensor | None]:
    """Return this rank's part of the module's parameters.

    All ranks must call this function once per forward, not once per document: under ZeRO-3, reading a parameter is a
    collective, and the number of documents differs between ranks.
    """
    ranks, rank = context.ulysses_size, context.ulysses_rank
    vectors = {name: attrgetter(name)(module) for name in layout.vectors}
    own: dict[str, torch.Tensor | None] = {name: _of_heads(vector, ranks, rank) for name, vector in vectors.items()}
    for name in ("weight", "bias") if layout.convolution else ():
        whole = attrgetter(f"{layout.convolution}.{name}")(module)
        own[f"{layout.convolution}.{name}"] = (
            None if whole is None else arranged(whole, layout.channels, ranks, 0)[rank]
        )
    own |= {f"{name}.weight": getattr(module, name).weight.clone() for name in layout.norms}
    if layout.summed:
        own[f"{layout.summed}.weight"] = getattr(module, layout.summed).weight.unflatten(1, (ranks, -1))[:, rank]
    return own


def _of_heads(vector: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """Return a rank's part of a tensor whose first dim larger than 1 is ordered by head."""
    dim = next((dim for dim, size in enumerate(vector.shape) if size > 1), 0)
    part: torch.Tensor = vector.unflatten(dim, (ranks, -1)).select(dim, rank).clone()
    return part


def _whole_document(
    module: nn.Module,
    layout: MixerLayout,
    parameters: dict[str, torch.Tensor | None],
    ranks: int,
    hidden: torch.Tensor,
    packed: dict[str, Any],
    projected: tuple[torch.Tensor, ...],
    total: torch.Tensor | None,
) -> torch.Tensor:
    """Run the forward of the module's class on one document; return the output projection's input ``[1, N, C]``.

    ``packed`` contains the kernel arguments that separate documents; if it is not empty, ``projected`` contains all
    documents. ``total`` is the result of the projection from all channels.

    Raises:
        _Reached: With several ranks, the forward reached the projection from all channels and ``total`` is None.
    """
    own: dict[str, Any] = {"training": False}  # Mamba's fused training kernel would apply the output projection.
    for (name, blocks), part_NC in zip(layout.projections.items(), projected, strict=True):
        missing = local_channels(blocks, ranks) - part_NC.shape[1]
        # A gate that is not exchanged comes first. The norm that uses it runs on the slice, so zeros will do here.
        whole_NC = nn.functional.pad(part_NC, (missing, 0)) if missing else part_NC
        own[name] = partial(_given, whole_NC.unsqueeze(0))
    if layout.convolution:
        own[layout.convolution] = SimpleNamespace(
            weight=parameters[f"{layout.convolution}.weight"], bias=parameters[f"{layout.convolution}.bias"]
        )
    own |= {name: _given for names in layout.before.values() for name in names}
    own |= {name: parameters[name] for name in layout.vectors}
    own |= {name: local_channels(blocks, ranks) for name, blocks in layout.sizes.items()}
    own |= {name: 1.0 for name in (layout.input_scale, layout.projection_scale) if name}
    own |= {name: _given for name in (layout.output, layout.row_norm) if name}
    own |= {f"{name}.weight": parameters[f"{name}.weight"] for name in layout.norms}
    if layout.summed:
        of_channels: Any = nn.functional.linear if ranks == 1 else _reach
        weight = parameters[f"{layout.summed}.weight"]
        own[layout.summed] = partial(of_channels, weight=weight) if total is None else partial(_given, total)
    if layout.row_gate:
        # The gate is applied on the slice. Infinity disables it here, because its sigmoid is 1.
        own[layout.row_gate] = partial(torch.full_like, fill_value=torch.inf)
    # The forward uses only the length and the dtype of the hidden states, since the projections are replaced.
    hidden_1N1 = hidden.new_zeros(1).expand(1, projected[0].shape[0], 1)
    own_class: Any = type(module)
    unused = {"position_embeddings": None, "attention_mask": None} if layout.is_attention else {}
    output = own_class.forward(_stand_in(module, own), hidden_1N1, **unused, **packed)
    output_1NC: torch.Tensor = output[0] if layout.is_attention else output
    return output_1NC


def _reach(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    raise _Reached(nn.functional.linear(hidden, weight))


def _given(result: torch.Tensor, *_: Any) -> torch.Tensor:
    return result


def _stand_in(module: nn.Module, own: dict[str, Any]) -> Any:
    """Return an instance of the module's class with the module's attributes, overridden by ``own``, and no parameters.

    A dotted name in ``own`` overrides an attribute of a submodule. The submodule is replaced by a function with this
    attribute that runs the forward of the submodule's class.
    """
    stand_in = object.__new__(type(module))
    values = {name: value for name, value in own.items() if "." not in name}
    for part in {name.split(".")[0] for name in own if "." in name} - values.keys():
        inner: Any = getattr(module, part)
        inside = {name.removeprefix(f"{part}."): one for name, one in own.items() if name.startswith(f"{part}.")}
        values[part] = partial(type(inner).forward, _stand_in(inner, inside))
        vars(values[part]).update(inside)
    stand_in.__dict__.update({**vars(module), "_parameters": {}, "_buffers": {}, **values})
    return stand_in


_CONVOLUTION = "causal_conv1d_fn"
_TABLES = {
    _CONVOLUTION: "seq_idx",
    "chunk_gated_delta_rule": "cu_seqlens",
    "chunk_kda": "cu_seqlens",
    "mamba_chunk_scan_combined": "seq_idx",
}
"""For each kernel function, the name of the argument that separates packed documents."""

_OWN_NAME = "cu_seq_lens_q"
"""Name of the ``cu_seqlens`` argument in most Transformers layers. The others use the kernel's name."""


def packed_arguments(module: nn.Module, layout: MixerLayout, context: AttentionContext) -> dict[str, Any] | None:
    """Return the arguments that make a layer separate packed documents, or None if each document needs its own call."""
    code = inspect.unwrap(type(module).forward).__code__
    found = {facts["func_name"]: facts for facts in _package_functions(module) if facts["func_name"] in _TABLES}
    has_recurrence = any(name != _CONVOLUTION for name in found)
    if not found or (layout.multiply_adds > 0) != has_recurrence:
        return None
    if not all(
        one["is_new_implementation"] and _TABLES[name] in one["applicable_params"] for name, one in found.items()
    ):
        return None
    cu_seqlens = context.documents.full.spans.cu_seqlens
    numbers = torch.arange(len(cu_seqlens) - 1, dtype=torch.int32, device=cu_seqlens.device)
    num_tokens = context.documents.full.spans.borders[-1]
    # [1, T]. Without output_size, repeat_interleave would synchronize with the device.
    seq_idx = numbers.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens).unsqueeze(0)
    tables: dict[str, Any] = {"seq_idx": seq_idx}
    if "cu_seqlens" in (_TABLES[name] for name in found):
        tables[_OWN_NAME if _OWN_NAME in code.co_consts else "cu_seqlens"] = cu_seqlens
    return tables


def _package_functions(module: nn.Module) -> Iterator[Mapping[str, Any]]:
    """Yield Transformers' description of each kernel package function to which a layer's forward refers."""
    forward = inspect.unwrap(type(module).forward)
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if inspect.isfunction(function) and "is_new_implementation" in function.__code__.co_freevars:
            yield inspect.getclosurevars(function).nonlocals
