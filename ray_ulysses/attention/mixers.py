"""Layers that carry state along the sequence, sharded over ``sp``: the module's own code runs on whole documents.

The module's input projections run on this rank's slice. One all-to-all exchanges their results for whole rows of this
rank's heads or channels. The code of the module's class then runs on each document alone, starting from an empty state
and an empty convolution. It runs on a stand-in for the module, whose projections return the exchanged results and whose
parameters are limited to this rank's heads. One all-to-all returns the output projection's input to the slices. Mamba 1
has a projection of all channels between the convolution and the recurrence, which takes one all-reduce of the ranks'
partial sums.

A parameter gets gradients from this rank's heads over the whole row, or from all heads over this rank's slice. Either
way gradients are summed over ``sp`` like all others.

All documents take one call if the kernels keep packed documents apart. Transformers 5.23 calls the functions of
``causal-conv1d``, ``flash-linear-attention`` and ``mamba-ssm`` if they are installed, and passes them ``seq_idx`` (the
document of each token) and ``cu_seqlens``. A function without these arguments would silently mix documents, so all
functions that a layer calls are inspected; a canary test checks how Transformers describes them.

Legend: B rows, L tokens of a slice, S tokens of a row, T = B * S, U ranks, C channels of one rank.
"""

from __future__ import annotations

import inspect
from functools import partial
from itertools import pairwise
from operator import attrgetter
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ray_ulysses.attention.attachment import AttentionContext
from ray_ulysses.attention.batch import MODEL_INPUT
from ray_ulysses.attention.exchange import gather_channels, scatter_channels, sum_over_ranks
from ray_ulysses.attention.mixer_layouts import MixerLayout, arranged, layout_of, local_channels
from ray_ulysses.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_LAYOUT = "_ray_ulysses_layout"


class _Reached(Exception):
    """A module's code has reached the projection of all channels."""

    def __init__(self, result: torch.Tensor) -> None:
        super().__init__()
        self.result = result


def find_mixers(model: nn.Module) -> Iterator[tuple[str, nn.Module, MixerLayout]]:
    """Yield name, module and layout of each layer that carries state and can be trained exactly."""
    for name, module in model.named_modules():
        layout = layout_of(module)
        if layout is not None:
            yield name, module, layout


def read_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers inside these layers whose weights are read, a part per rank, instead of being called."""
    for name, module, layout in find_mixers(model):
        read = [one.removesuffix(".weight") for one in layout.vectors if one.endswith(".weight")]
        for inside in (*read, *([layout.summed] if layout.summed else [])):
            yield f"{name}.{inside}", module.get_submodule(inside)


def shared_sizes(model: nn.Module) -> tuple[int, ...]:
    """Return, in ascending order, the numbers of ranks that can share the heads of every layer that carries state."""
    layouts = [layout for _, _, layout in find_mixers(model)]
    valid = [set(layout.valid_ranks()) for layout in layouts]
    return tuple(sorted(set.intersection(*valid))) if valid else ()


def mix_documents(model: nn.Module) -> dict[str, nn.Module]:
    """Make layers that carry state process whole documents while each rank holds slices; return them by name."""
    mixers = {}
    for name, module, layout in find_mixers(model):
        mixers[name] = module
        # FSDP2 changes the class of a module that it shards, and the new class has no layout.
        setattr(module, _LAYOUT, layout)
        set_forward(module, _forward)
    pass_tables_on(model)
    return mixers


def pass_tables_on(model: nn.Module) -> None:
    """Make layers that do not pass keywords on to the mixer inside pass on the batch's tables."""
    for name, _, layout in find_mixers(model):
        if layout.is_called_without_tables:
            set_forward(model.get_submodule(name.rpartition(".")[0]), _with_tables)


def _with_tables(layer: Any, *args: Any, **kwargs: Any) -> Any:
    # Passed as the mask, which these layers do pass on, so that a recomputation of the class's forward gets it too.
    if kwargs.get("attention_mask") is None:
        kwargs["attention_mask"] = kwargs.get(MODEL_INPUT)
    return type(layer).forward(layer, *args, **kwargs)


def given_tables(kwargs: dict[str, Any]) -> Any:
    """Return the batch's tables that a layer was called with, or the mask if it got no tables."""
    return kwargs.get(MODEL_INPUT, kwargs.get("attention_mask"))


def set_forward(module: Any, forward: Callable[..., Any]) -> None:
    """Replace the forward of one module, not of its class, with a function of the module and the arguments."""
    # The module itself is still called, so that an engine's hooks gather its parameters. A bound method, since a copy
    # of the model must not run the original's layers.
    module.forward = MethodType(forward, module)


# The documents of each batch would become guards, and each batch would recompile.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward(module: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    layout: MixerLayout = getattr(module, _LAYOUT)
    output = _mix(module, layout, hidden_states, _checked(module, hidden_states, args, kwargs))
    return (output, None) if layout.is_attention else output


def _checked(
    module: nn.Module, hidden_BLH: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AttentionContext:
    """Return the context of a call, and refuse arguments that would change the result."""
    name, context = type(module).__name__, given_tables(kwargs)
    if not isinstance(context, AttentionContext):
        raise UserError(
            f"{name} was called without the batch's tables: either the model was not called with the "
            "**batch.model_inputs() of shard_batch, or this architecture does not pass keywords on to it"
        )
    given = [*args, *(kwargs.get(key) for key in ("attention_mask", "cache_params", "past_key_values"))]
    if any(one is not None and one is not context for one in given):
        raise UserError(f"{name} got a mask or a cache; pass neither, since shard_batch's tables separate documents")
    if hidden_BLH.shape[1] != context.local_tokens:
        raise UserError(
            f"{name} got {hidden_BLH.shape[1]} tokens per row; each rank of sp must hold {context.local_tokens} tokens "
            "of a row, so pass **batch.model_inputs() unchanged"
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
    lengths = [len(rows_TC)] if packed else _document_lengths(context)
    parameters = _own_parameters(module, layout, context)
    documents = [document_NC.split(widths, dim=1) for document_NC in rows_TC.split(lengths)]
    run = partial(_whole_document, module, layout, parameters, ranks, hidden_BLH, packed or {})
    sums = _sums(run, documents, context.ulysses) if layout.summed and context.ulysses else [None] * len(lengths)
    outputs = [run(projected, total).squeeze(0) for projected, total in zip(documents, sums, strict=True)]
    rows_BSC = torch.cat(outputs).unflatten(0, (num_rows, -1))
    # [B, L, U, C] -> [B, L, U * C], in the order of heads
    out = scatter_channels(rows_BSC, context.ulysses).flatten(2)
    output: torch.Tensor = getattr(module, layout.output)(_normalized(module, layout, out, hidden_BLH, results))
    return output


def _normalized(
    module: Any, layout: MixerLayout, out: torch.Tensor, hidden: torch.Tensor, results: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Apply the norm over all heads and its gate, if the layout has one, to the slice."""
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
    """Return the projection of all channels of each document, ``[1, N, F]``, with one all-reduce for all documents.

    The module's code runs up to that projection and later again from the start, so the convolution runs twice.
    """
    parts = []
    for projected in documents:
        try:
            run(projected, None)
        except _Reached as reached:
            parts.append(reached.result)
    total = sum_over_ranks(torch.cat(parts, dim=1), group)
    sums: Sequence[torch.Tensor] = total.split([part.shape[1] for part in parts], dim=1)
    return sums


def _document_lengths(context: AttentionContext) -> list[int]:
    """Return the lengths of all documents, with each row's padding as one more, rows concatenated."""
    borders = context.documents.full.spans.borders
    return [stop - start for start, stop in pairwise(borders)]


def _own_parameters(module: Any, layout: MixerLayout, context: AttentionContext) -> dict[str, torch.Tensor | None]:
    """Return this rank's part of the parameters: the convolution's channels, and one value per head.

    Must be called once per forward, not per document: under ZeRO-3 reading a parameter gathers it on all ranks
    together, and ranks have different numbers of documents.
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
    """Return a rank's part of a tensor whose first dim larger than 1 is in the order of heads."""
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
    """Run the code of the module's class on one document; return the output projection's input, ``[1, N, C]``.

    With ``packed``, the kernels' arguments that separate documents, it runs on all documents at once. A projection of
    all channels returns ``total``.

    Raises:
        _Reached: The projection of all channels was reached without ``total``, and there are other ranks.
    """
    own: dict[str, Any] = {"training": False}  # Mamba's fused training kernel includes the output projection.
    for (name, blocks), part_NC in zip(layout.projections.items(), projected, strict=True):
        missing = local_channels(blocks, ranks) - part_NC.shape[1]
        # A gate that is not exchanged comes first; it is not used here, since its norm runs on the slice.
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
        # The sigmoid of infinity is 1, so the gate changes nothing here.
        own[layout.row_gate] = partial(torch.full_like, fill_value=torch.inf)
    # The module's code reads only its length and dtype.
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
    """Return an instance of the module's class with ``own`` over its attributes, and without other parameters.

    A dotted name is an attribute of a submodule, which is replaced by a function that has this attribute and runs the
    code of the submodule's class.
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
"""For each function of these packages, the argument that separates documents."""

_OWN_NAME = "cu_seq_lens_q"
"""The name of ``cu_seqlens`` in the arguments of most Transformers layers; the others use the kernel's name."""


def packed_arguments(module: nn.Module, layout: MixerLayout, context: AttentionContext) -> dict[str, Any] | None:
    """Return the arguments that make a layer separate packed documents; ``None`` if each document needs a call."""
    code = _forward_of(module).__code__
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
    # [1, T]; output_size avoids a synchronization with the device.
    seq_idx = numbers.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens).unsqueeze(0)
    tables: dict[str, Any] = {"seq_idx": seq_idx}
    if "cu_seqlens" in (_TABLES[name] for name in found):
        tables[_OWN_NAME if _OWN_NAME in code.co_consts else "cu_seqlens"] = cu_seqlens
    return tables


def _forward_of(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _package_functions(module: nn.Module) -> Iterator[Mapping[str, Any]]:
    """Yield Transformers' description of each package function that a layer's code names."""
    forward = _forward_of(module)
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if inspect.isfunction(function) and "is_new_implementation" in function.__code__.co_freevars:
            yield inspect.getclosurevars(function).nonlocals
