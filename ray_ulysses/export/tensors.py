"""Finds the name and shape of every published tensor, and its elements in the checkpoint.

A model's tensors in memory differ from those of its published files: Transformers 5 holds the experts of a layer in one
tensor and publishes each separately, under the names that other tools expect. `revert_weight_conversion`, which
``save_pretrained`` calls, converts between the two. Here it runs on the meta device, where nothing is computed, and
each result is a view that reveals its source tensor. For nearly all architectures its elements are consecutive, so that
a published tensor is an interval of a stored one and can be streamed; the others are refused.
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
    """The product of an adapter's matrices, which is added to a weight."""

    a: Stored
    """The matrix ``[rank, in]``."""
    b: Stored
    """The matrix ``[out, rank]``."""
    scale: float
    is_transposed: bool
    """Whether the weight is ``[in, out]``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """The place of a tensor of the model in a checkpoint."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    published: torch.dtype
    low_rank: LowRank | None = None
    """Added to it in fp32 before it is published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedTensor:
    """One tensor of the exported files: consecutive elements of a stored one."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: Stored
    """The stored tensor that holds its elements."""
    start: int
    """Its first element in the flat stored tensor."""

    @property
    def num_elements(self) -> int:
        """Return the number of its elements."""
        return int(torch.Size(self.shape).numel())

    @property
    def num_bytes(self) -> int:
        """Return its size in the file."""
        return self.num_elements * self.dtype.itemsize


def stored_tensors(model: Any, state: StateDescription, weights: WeightType, model_dtype: str) -> dict[str, Stored]:
    """Return the place of each tensor of a model in a checkpoint, by its name in the model; tied tensors appear once.

    ``weights`` is the precision of the published trained and frozen weights; buffers keep their own.

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
    problems += [f"{name} is in the checkpoint only" for name in sorted(names - known)]
    if problems:
        more = f", and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise RunError(
            "the checkpoint does not fit the model in config.yaml: "
            f"{'; '.join(problems[:_MOST_NAMED])}{more}; restore the model.path or model.config that the run began with"
        )
    return found


def published_tensors(model: Any, stored: Mapping[str, Stored]) -> tuple[PublishedTensor, ...]:
    """Return the tensors of the published files, in the order of the model.

    Raises:
        RunError: The architecture rearranges elements and can't be streamed.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    on_meta = {name: torch.empty(place.shape, device="meta") for name, place in stored.items() if name not in ignored}
    owner = {_storage(tensor): name for name, tensor in on_meta.items()}
    assert len(owner) == len(on_meta), "a name for each storage"
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
        raise _cannot_stream(model, f"{rearranged[0]} is not made of consecutive elements of one tensor")
    _check_once(model, published, [stored[name] for name in on_meta])
    order = {place.key: number for number, place in enumerate(stored.values())}
    return tuple(sorted(published, key=lambda tensor: (order[tensor.stored.key], tensor.start)))


class _Views(TorchDispatchMode):
    """Makes each copy a view of its source, so that a result reveals the source of its elements."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def _revert(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors as ``save_pretrained`` would publish them, as views of the given ones where possible."""
    # Transformers 5.20 to 5.23: undocumented, but called by save_pretrained itself; a test compares every architecture
    # of the zoo with save_pretrained.
    from transformers.core_model_loading import revert_weight_conversion

    try:
        with _Views():  # type: ignore[no-untyped-call]  # torch leaves its __init__ untyped
            reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    except (RuntimeError, ValueError, IndexError, AttributeError) as error:
        raise _cannot_stream(model, str(error).splitlines()[0]) from error
    return reverted


def reverted_name(model: Any, name: str, shape: tuple[int, ...]) -> str:
    """Return the name in the published files of a tensor that is published unchanged.

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
        f"{type(model).__name__} can't be exported: its published tensors rearrange the trained ones, which is "
        f"impossible in bounded memory ({why}); load the checkpoint into the model and call its save_pretrained"
    )


def _check_once(model: Any, published: list[PublishedTensor], stored: list[Stored]) -> None:
    """Check that every stored element is published exactly once."""
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
    """Return the place of a tensor in a checkpoint, by its name in the model; None if it is not stored.

    A tied tensor may be stored under another name. Precisions are those of `stored_tensors`.
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
        # The weights used in training if their type is wanted; else rounded once, from the master weights.
        use_model = model is not None and dtype_name(wanted) == model.dtype
        spec, key = (model, f"model/{name}") if use_model else (master, f"fp32/{name}")
    if spec is None:
        return None
    return Stored(key=key, shape=spec.shape, dtype=dtype_of(spec.dtype), published=wanted)
