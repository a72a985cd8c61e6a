"""Loads pretrained weights tensor by tensor, dequantized, directly into each rank's ZeRO partition.

Transformers' own rules rename, convert and dequantize the stored tensors, so the result is bitwise equal to
``from_pretrained``. Each tensor is read by one rank and scattered, so the ranks together read every byte once, and no
rank holds more than its share and the tensor that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ray_ulysses.engine.partition_view import shape_of
from ray_ulysses.engine.quantized_base import PACKED, SCALES, Quantized
from ray_ulysses.engine.stored_weights import UNREADABLE, open_tensors, weights_directory
from ray_ulysses.errors import UserError
from ray_ulysses.storage.hub import hub_refusal

T = TypeVar("T")
_QUANTIZED = ("F8_E4M3", "F8_E5M2", "I8", "U8")
"""Dtypes, in safetensors notation, of tensors that are meaningless without their scales."""
_SCALES = (
    ("", "_scale_inv"),
    ("", "_scale"),
    (".weight", ".scale"),
    (".weight", ".qscale_weight"),
    ("_blocks", "_scales"),
)
"""Endings of a quantized tensor's name, and of its scale's name in the same file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """A stored tensor, or a part of one, which is read when this object is called."""

    tensor: Any
    """The tensor as a safetensors slice."""
    dtype: torch.dtype | None
    """Dtype of the result, or None for the stored dtype."""
    index: Any = ...

    def __call__(self) -> torch.Tensor:
        value: torch.Tensor = self.tensor[self.index]
        return value.to(self.dtype) if self.dtype is not None else value


@dataclass(frozen=True, kw_only=True, slots=True)
class _Conversion:
    """Model tensors that are computed together, and the stored tensors that they are computed from."""

    first: str
    """The model tensor by which Transformers identifies the conversion."""
    targets: tuple[str, ...]
    """Names of the model tensors."""
    transform: Any
    """Transformers' ``WeightTransform``, which reads and converts the stored tensors when it is called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainedWeights:
    """The weights of a model directory, located but not read."""

    path: str
    """``model.path``, for errors."""
    quantizer: Any
    """Transformers' quantizer, which dequantizes the stored tensors; None if they are not quantized."""
    conversions: tuple[_Conversion, ...]
    """All conversions, in the same order on every rank."""

    @torch.no_grad()
    def load(self, model: Any, *, is_partitioned: bool) -> None:
        """Load the weights into an allocated model. If it is partitioned, all ranks of the world must call this method.

        Tensors that the model no longer has, such as the removed parts of a multimodal model, are not read.

        Args:
            model: The model for which the weights were located, after `allocate_weights`.
            is_partitioned: Whether each rank holds only its ZeRO-3 partition of every parameter.

        Raises:
            UserError: A tensor can't be read or converted, or its shape differs from the model's.
        """
        tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        # Weights that quantized parameters replace are known by their names in the files.
        modules = ((prefix, one) for prefix, one in model.named_modules() if isinstance(one, Quantized))
        quantized = {f"{prefix}.{name}": one for prefix, one in modules for name in one.quantized}
        wanted = [one for one in self.conversions if any(name in tensors or name in quantized for name in one.targets)]
        if not is_partitioned:
            for one in wanted:
                for name, value in self._read(one, model, tensors, quantized).items():
                    own = tensors[name]
                    # ZeRO casts parameters that an architecture keeps in fp32, but no buffers.
                    own.data = value.to(own.device, own.dtype if isinstance(own, nn.Parameter) else value.dtype)
            return
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for start in range(0, len(wanted), world_size):
            turn = wanted[start : start + world_size]
            mine = turn[rank] if rank < len(turn) else None
            values = together(partial(self._read, mine, model, tensors, quantized))
            for owner, one in enumerate(turn):
                for name in _parts(one.targets, tensors, quantized):
                    _deal(tensors[name], values.pop(name) if owner == rank else None, owner)

    def _read(
        self,
        one: _Conversion | None,
        model: Any,
        tensors: Mapping[str, torch.Tensor],
        quantized: Mapping[str, Quantized],
    ) -> dict[str, torch.Tensor]:
        """Read, convert and quantize stored tensors, and return the model's tensors by name."""
        if one is None:
            return {}
        try:
            options = {"model": model, "config": model.config, "hf_quantizer": self.quantizer}
            found = _converted(one.transform, one.first, options)
        except Exception as error:
            # Catch everything: the other ranks wait for this tensor, and Transformers' conversions validate little.
            raise unreadable(self.path, f"{one.first}: {error}") from error
        values = {name: value[0] if isinstance(value, list) else value for name, value in found.items()}
        for name in one.targets:
            if name not in values:
                raise unreadable(self.path, f"{name} is missing")
            own = quantized[name].quantized[name.rpartition(".")[2]] if name in quantized else None
            shape = shape_of(tensors[name]) if name in tensors else own
            if shape is not None and values[name].shape != shape:
                stored, here = list(values[name].shape), list(shape)
                raise unreadable(self.path, f"{name} is {stored} in the files and {here} in the model")
        result = {name: values[name].detach() for name in one.targets if name in tensors}
        for name in (name for name in one.targets if name in quantized):
            prefix, dot, last = name.rpartition(".")
            for part, value in quantized[name].encoded(last, values[name].detach()).items():
                result[f"{prefix}{dot}{part}"] = value
        return result


def _converted(transform: Any, first: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run a conversion, one expert at a time if it treats each expert alone.

    Transformers 5.23 would hold up to three copies of experts that are stored one by one (stored, stacked and
    concatenated), and temporary tensors of several times the size of MXFP4's dequantized experts.
    """
    parts = _parts_by_expert(transform)
    result: dict[str, Any] = {} if parts else transform.convert(first, **options)
    for number, part in enumerate(parts):
        own = copy(transform)
        own.collected_tensors = part
        for name, value in own.convert(first, **options).items():
            if number == 0:
                result[name] = value.new_empty(len(parts), *value.shape[1:])
            result[name][number] = value[0]
    return result


def _parts_by_expert(transform: Any) -> list[dict[str, list[_Stored]]]:
    """Return each expert's stored tensors, or an empty list if a conversion does not treat each expert alone."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
    from transformers.integrations.mxfp4 import Mxfp4Dequantize

    stored: Mapping[str, list[_Stored]] = transform.collected_tensors
    operations = transform.operations if isinstance(transform, WeightConverter) else []
    if any(isinstance(one, Mxfp4Dequantize) for one in operations):
        (count,) = {one.tensor.get_shape()[0] for tensors in stored.values() for one in tensors}
        return [
            {pattern: [replace(tensors[0], index=slice(number, number + 1))] for pattern, tensors in stored.items()}
            for number in range(count)
        ]
    merged = [one.dim for one in operations if isinstance(one, MergeModulelist)]
    counts = {len(tensors) for tensors in stored.values()}
    others = [one for one in operations if not isinstance(one, MergeModulelist)]
    is_alone = all(one.dim > 0 if isinstance(one, Concatenate) else hasattr(one, "hf_quantizer") for one in others)
    if merged != [0] or len(counts) > 1 or not is_alone:
        return []
    return [{pattern: [tensors[number]] for pattern, tensors in stored.items()} for number in range(counts.pop())]


def _parts(targets: Sequence[str], tensors: Mapping[str, Any], quantized: Mapping[str, Quantized]) -> Iterator[str]:
    """Yield the names of the model's tensors that a conversion computes, in the same order on every rank."""
    for name in targets:
        if name in tensors:
            yield name
        elif name in quantized:
            yield from (name + end for end in (PACKED, SCALES))


def unreadable(path: str, reason: object) -> UserError:
    """Return the error for a directory whose weights can't be loaded."""
    return UserError(
        f"model.path={path!r}: the weights can't be loaded ({reason}){hub_refusal(path) or ''}; use a directory with "
        "config.json and safetensors files, or a hub ID that is reachable from this machine"
    )


def together(call: Callable[[], T]) -> T:
    """Call a function on all ranks, and raise the first rank's ``UserError`` on all of them if any rank raises one."""
    result, error = None, None
    try:
        result = call()
    except UserError as raised:
        error = raised
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if error is None else str(error))
    first = next((one for one in errors if one is not None), None)
    if first is not None:
        raise UserError(first) from error
    return result  # type: ignore[return-value]


def _deal(target: Any, value: torch.Tensor | None, owner: int) -> None:
    """Send a tensor from its owner to all ranks: a parameter's partitions, or a complete buffer."""
    if not hasattr(target, "ds_tensor"):
        if value is not None:
            target.copy_(value)
        dist.broadcast(target, owner)
        return
    share, parts = target.ds_tensor, None
    size = share.ds_numel
    if value is not None:
        flat = value.to(device=target.device, dtype=share.dtype).reshape(-1)
        parts = [_padded(flat[start : start + size], size) for start in range(0, size * dist.get_world_size(), size)]
    received = share if share.device == target.device else torch.empty_like(share, device=target.device)
    dist.scatter(received, parts, owner, group=target.ds_process_group)
    if received is not share:
        share.copy_(received)


def _padded(part: torch.Tensor, size: int) -> torch.Tensor:
    return part if part.numel() == size else torch.cat([part, part.new_zeros(size - part.numel())])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Drawn:
    """A tensor of a new head, in the place of Transformers' ``WeightTransform``."""

    value: torch.Tensor
    collected_tensors: Mapping[str, list[_Stored]] = field(default_factory=dict)

    def convert(self, first: str, **options: Any) -> dict[str, torch.Tensor]:
        return {first: self.value}


def _drawn_head(model: Any, names: Collection[str], seed: int) -> Iterator[_Conversion]:
    """Draw the tensors of a new head as Transformers initializes them, on the host and from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module_name in sorted({name.rpartition(".")[0] for name in names}):
            drawn = deepcopy(model.get_submodule(module_name)).to_empty(device="cpu")
            model._init_weights(drawn)
            for name, value in drawn.state_dict(prefix=f"{module_name}.").items():
                if name in names:
                    yield _Conversion(first=name, targets=(name,), transform=_Drawn(value=value))


def find_weights(model: Any, path: str, quantizer: Any, head_seed: int | None = None) -> PretrainedWeights:
    """Locate a model's weights, without reading them.

    Args:
        model: The model, without weights, with all of its parts.
        path: ``model.path``. Files from the hub are downloaded.
        quantizer: Transformers' quantizer, or None if the weights are not quantized.
        head_seed: Seed of a head for documents if the files have none, or None if every tensor must be in the files.

    Raises:
        UserError: The files can't be read, or lack a tensor of the model.
    """
    from transformers import GenerationConfig
    from transformers.utils.loading_report import LoadStateDictInfo

    directory = weights_directory(path)
    if directory is None:
        raise unreadable(path, "there are no safetensors files")
    try:
        stored = open_tensors(directory)
        if (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory)
    except UNREADABLE as error:
        raise unreadable(path, error) from error
    transforms, unexpected = _transforms(model, stored, quantizer)
    if quantizer is not None and (unscaled := _unscaled(transforms, stored)) is not None:
        raise unreadable(path, f"{unscaled} is quantized, but its scale is missing")
    parameters: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    conversions, loaded, held = [], set[str](), set[int]()
    expected = set(model.state_dict())
    for first, transform in transforms.items():
        targets = tuple(name for name in _targets(first, transform) if name in expected)
        loaded.update(targets)
        # The files may store a tied tensor twice.
        if any(id(parameters.get(name, name)) not in held for name in targets):
            conversions.append(_Conversion(first=first, targets=targets, transform=transform))
        held.update(id(parameters.get(name, name)) for name in targets)
    missing = {name for name in expected - loaded if id(parameters.get(name, name)) not in held}
    info = LoadStateDictInfo(
        missing_keys=missing, unexpected_keys=unexpected, mismatched_keys=set(), error_msgs=[], conversion_errors={},
        skipped_pp_keys=set(),
    )  # fmt: skip
    # Old files may lack some tensors, or have some that the model computes.
    model._adjust_missing_and_unexpected_keys(info)
    missing = set(info.missing_keys)
    if head_seed is not None:
        prefix = f"{model.base_model_prefix}."
        new = {name for name in missing if not name.startswith(prefix) or name.startswith(f"{prefix}pooler.")}
        conversions += _drawn_head(model, new, head_seed)
        missing -= new
    _refuse_missing(missing, path)
    if quantizer is None:
        _refuse_scaled(info.unexpected_keys, set(parameters), path)
    return PretrainedWeights(path=path, quantizer=quantizer, conversions=tuple(conversions))


def _transforms(model: Any, stored: Mapping[str, Any], quantizer: Any) -> tuple[dict[str, Any], set[str]]:
    """Return Transformers' conversion of each model tensor, and the names of unused stored tensors.

    The loop follows ``convert_and_load_state_dict_in_model`` of Transformers 5.23, which would read all tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(model, None, quantizer)
    renamings = [one for one in rules if isinstance(one, WeightRenaming)]
    converters = [one for one in rules if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    wanted, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, Any] = {}
    unexpected = set()
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], prefix, wanted)
        if name not in wanted:
            unexpected.add(name)
            continue
        if pattern is None:
            transform, pattern = found.setdefault(name, WeightRenaming(key, name)), key
        else:
            transform = found.setdefault(name, deepcopy(by_pattern[pattern]))
        to = wanted[name].dtype
        if quantizer is not None:
            to = quantizer.get_new_dtype(transform, stored[key], to)
        transform.add_tensor(name, key, pattern, _Stored(tensor=stored[key], dtype=to))
    return found, unexpected


def _targets(first: str, transform: Any) -> Iterator[str]:
    """Return the names of all model tensors that a conversion computes."""
    from transformers.core_model_loading import WeightConverter

    patterns = transform.target_patterns if isinstance(transform, WeightConverter) else [first]
    return (first.replace(patterns[0], pattern, 1) for pattern in patterns)


def _unscaled(transforms: Mapping[str, Any], stored: Mapping[str, Any]) -> str | None:
    """Return the name of a quantized stored tensor without a scale, or None. Transformers 5.23 would only cast it."""
    for name, transform in transforms.items():
        own: set[str] = transform.layer_targets[name]
        for key in sorted(key for key in own if stored[key].get_dtype() in _QUANTIZED):
            scales = [key.removesuffix(end) + scale for end, scale in _SCALES if key.endswith(end)]
            if not key.endswith(tuple(scale for _, scale in _SCALES)) and own.isdisjoint(scales):
                return key
    return None


def _refuse_missing(names: Collection[str], path: str) -> None:
    """Raise an error if tensors are missing. Transformers would only warn, and initialize the tensors randomly."""
    if names:
        shown = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise UserError(
            f"model.path={path!r}: the weights lack {len(names)} of the model's tensors ({shown}); use a complete "
            "causal language model, or set model.init: random"
        )


def _refuse_scaled(unexpected: Collection[str], names: Collection[str], path: str) -> None:
    """Raise an error if weights have quantization scales, which Transformers drops without a quantization_config."""
    scaled = [key for key in unexpected if any(key[:end] in names for end, mark in enumerate(key) if mark in "._")]
    if scaled:
        raise UserError(
            f"model.path={path!r}: the weights are quantized ({min(scaled)} scales another tensor), but config.json "
            "has no quantization_config; dequantize the model, and save it with "
            "save_pretrained(..., save_original_format=False)"
        )
