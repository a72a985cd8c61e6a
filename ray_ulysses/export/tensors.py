"""Determines the name, shape and checkpoint elements of every published tensor.

A model's tensors in memory differ from the tensors in its published files: Transformers 5 stores a layer's experts in
one tensor but publishes each expert separately, under names that other tools expect. ``save_pretrained`` converts
between the two with `revert_weight_conversion`. Here that function runs on the meta device, where nothing is computed,
and each result is a view that reveals its source tensor. For nearly all architectures the view's elements are
consecutive, so a published tensor is an interval of a stored tensor and can be streamed. Other architectures are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ray_ulysses.checkpoint.intervals import CoverError, Interval, check_cover
from ray_ulysses.checkpoint.state import StateDescription, dtype_name, dtype_of
from ray_ulysses.errors import RunError
from ray_ulysses.export.report import WeightType

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """The product of an adapter's matrices, to add to a weight."""

    a: Stored
    """Matrix A, ``[rank, in]``; for a weight with E experts, ``[E x rank, in]``, one expert after another."""
    b: Stored
    """Matrix B, ``[out, rank]``; for a weight with E experts, ``[out, rank x E]``, one rank after another."""
    magnitude: Stored | None = None
    """DoRA's norm of each output's weights, ``[out]``; None for plain LoRA."""
    scale: float
    is_transposed: bool
    """Whether the weight, or each expert's weight, has the shape ``[in, out]``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Checkpoint location of one model tensor, and the dtype in which it is published."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    published: torch.dtype
    low_rank: LowRank | None = None
    """Adapter update to add in fp32 before publishing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedTensor:
    """A tensor in the exported files: consecutive elements of a stored tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: Stored
    """The stored tensor that contains the elements."""
    start: int
    """Index of the first element in the flattened stored tensor."""

    @property
    def num_elements(self) -> int:
        """Number of elements in the published tensor."""
        return int(torch.Size(self.shape).numel())

    @property
    def num_bytes(self) -> int:
        """Size in the exported file, in bytes."""
        return self.num_elements * self.dtype.itemsize


def stored_tensors(model: Any, state: StateDescription, weights: WeightType, model_dtype: str) -> dict[str, Stored]:
    """Locate each model tensor in a checkpoint, by model tensor name. Tied tensors appear once.

    ``weights`` is the published precision of trained and frozen weights. Buffers keep their precision.

    Raises:
        RunError: The checkpoint does not fit the model.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    names = {key.split("/", 1)[1] for key in state.tensors if key.split("/", 1)[0] in ("fp32", "frozen", "buffer")}
    expected: dict[str, Any] = model.state_dict()
    kept = remove_tied_weights_from_state_dict(dict(expected), model)
    found: dict[str, Stored] = {}
    problems = []
    for name, tensor in kept.items():
        place = find_stored(name, state, weights, model_dtype)
        if place is None:
            problems.append(f"{name} is not in the checkpoint")
        elif place.shape != tuple(tensor.shape):
            problems.append(f"{name} is {list(tensor.shape)} in the model and {list(place.shape)} in the checkpoint")
        else:
            found[name] = place
    known = {state.tied.get(name, name) for name in expected}
    problems += [f"{name} is in the checkpoint but not in the model" for name in sorted(names - known)]
    if problems:
        more = f", and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise RunError(
            "the checkpoint does not fit the model in config.yaml: "
            f"{'; '.join(problems[:_MOST_NAMED])}{more}; restore the model.path or model.config used to start the run"
        )
    return found


def published_tensors(model: Any, stored: Mapping[str, Stored]) -> tuple[PublishedTensor, ...]:
    """Return the tensors of the published files, in model order.

    Raises:
        RunError: Exporting the architecture would rearrange elements, so it can't be streamed.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    on_meta = {name: torch.empty(place.shape, device="meta") for name, place in stored.items() if name not in ignored}
    owner = {_storage(tensor): name for name, tensor in on_meta.items()}
    assert len(owner) == len(on_meta), "two tensors share a storage"
    published, rearranged = [], []
    for name, view in _revert(model, dict(on_meta)).items():
        source = owner.get(_storage(view))
        if source is None or not view.is_contiguous():
            rearranged.append(name)
            continue
        place = stored[source]
        published.append(
            PublishedTensor(
                name=name,
                shape=tuple(view.shape),
                dtype=place.published,
                stored=place,
                start=int(view.storage_offset()),
            )
        )
    if rearranged:
        raise _cannot_stream(model, f"{rearranged[0]} does not consist of consecutive elements of one tensor")
    _check_once(model, published, [stored[name] for name in on_meta])
    order = {place.key: number for number, place in enumerate(stored.values())}
    return tuple(sorted(published, key=lambda tensor: (order[tensor.stored.key], tensor.start)))


class _Views(TorchDispatchMode):
    """Turns each copy into a view, so that a result reveals its source tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def _revert(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that ``save_pretrained`` would publish, as views of the given tensors where possible."""
    # Undocumented, but save_pretrained itself calls it in Transformers 5.20 to 5.23. A test compares every architecture
    # of the model zoo with save_pretrained.
    from transformers.core_model_loading import revert_weight_conversion

    try:
        with _Views():  # type: ignore[no-untyped-call]  # torch leaves its __init__ untyped
            reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    except (RuntimeError, ValueError, IndexError, AttributeError) as error:
        raise _cannot_stream(model, str(error).splitlines()[0]) from error
    return reverted


def reverted_name(model: Any, name: str, shape: tuple[int, ...]) -> str:
    """Return the published name of a tensor that is published unchanged.

    Raises:
        RunError: The tensor is published as several tensors.
    """
    names = list(_revert(model, {name: torch.empty(shape, device="meta")}))
    if len(names) != 1:
        raise _cannot_stream(model, f"{name} is published as {len(names)} tensors")
    return names[0]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _cannot_stream(model: Any, why: str) -> RunError:
    return RunError(
        f"{type(model).__name__} can't be exported: its published tensors rearrange the trained tensors, which can't "
        f"be done in bounded memory ({why}); load the checkpoint into the model and call its save_pretrained"
    )


def _check_once(model: Any, published: list[PublishedTensor], stored: list[Stored]) -> None:
    sizes = {place.key: int(torch.Size(place.shape).numel()) for place in stored}
    intervals = [
        Interval(key=tensor.stored.key, start=tensor.start, stop=tensor.start + tensor.num_elements)
        for tensor in published
    ]
    try:
        check_cover(sizes, intervals)
    except CoverError as error:
        raise _cannot_stream(model, str(error)) from error


def find_stored(name: str, state: StateDescription, weights: WeightType, model_dtype: str) -> Stored | None:
    """Locate a model tensor in a checkpoint by its model tensor name, or return None if it is not stored.

    A tied tensor may be stored under another name. See `stored_tensors` for the precisions.
    """
    if not any(f"{kind}/{name}" in state.tensors for kind in ("buffer", "frozen", "fp32")):
        name = state.tied.get(name, name)
    buffer, frozen, model, master = (
        state.tensors.get(f"{kind}/{name}") for kind in ("buffer", "frozen", "model", "fp32")
    )
    spec, key = (buffer, f"buffer/{name}") if buffer is not None else (frozen, f"frozen/{name}")
    if spec is not None:
        own = dtype_of(spec.dtype)
        wanted = own if weights == "model" or buffer is not None or not own.is_floating_point else DTYPES[weights]
    elif master is not None:
        own = dtype_of(model.dtype) if model is not None else DTYPES[model_dtype]
        wanted = own if weights == "model" else DTYPES[weights]
        # Use the training weights if they have the wanted dtype. Otherwise round the master weights once.
        use_model = model is not None and dtype_name(wanted) == model.dtype
        spec, key = (model, f"model/{name}") if use_model else (master, f"fp32/{name}")
    if spec is None:
        return None
    return Stored(key=key, shape=spec.shape, dtype=dtype_of(spec.dtype), published=wanted)
