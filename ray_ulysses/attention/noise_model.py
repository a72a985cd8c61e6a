"""Copies a model with noise for weights, so that its forward takes milliseconds and no memory at any size.

The copy has every module of the model, including those replaced after it was built, and real activations in fp64. A
product with a noise matrix multiplies by two thin matrices of noise instead, and a lookup returns slices of noise. The
values are meaningless, but each result depends on exactly the same tokens as in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

DTYPE = torch.float64
"""Dtype of every floating-point tensor of the copy, so that rounding does not look like a dependence."""

_LEAST_NOISE = 1 << 16
_RANK = 8
_MOST_ELEMENTS = 1 << 24
_SMALL = 1 << 12


def noise_copy(model: nn.Module) -> tuple[Any, torch.Tensor]:
    """Return a copy of a model on the host, with noise for its weights, and the source of noise."""
    longest = max((dim for one in model.parameters() for dim in getattr(one, "ds_shape", one.shape)), default=1)
    # Each half must hold a thin matrix of the largest parameter.
    size = max(_LEAST_NOISE, 2 * _RANK * longest)
    noise = torch.randn(size, generator=torch.Generator().manual_seed(5), dtype=DTYPE)
    memo: dict[int, Any] = {}
    for module in model.modules():
        held = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
        for tensor in held:
            if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = _copied(tensor, len(memo), noise)
    with torch.no_grad():
        copy = deepcopy(model, memo)
    for module in copy.modules():
        forward = vars(module).get("forward")
        if forward is not None:
            module.forward = _rebound(forward, memo)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for number, hook in hooks.items():
                hooks[number] = _rebound(hook, memo)
    return copy, noise


def _rebound(call: Any, memo: Mapping[int, Any]) -> Any:
    """Return a patched function with the modules that it refers to replaced by their copies.

    ``deepcopy`` does not copy functions, so a forward that wraps the original module's would run that one.
    """
    if isinstance(call, MethodType):
        return MethodType(_rebound(call.__func__, memo), memo.get(id(call.__self__), call.__self__))
    if isinstance(call, partial):
        return partial(_rebound(call.func, memo), *call.args, **call.keywords)
    if isinstance(call, FunctionType) and call.__closure__:
        held = [cell.cell_contents for cell in call.__closure__]
        if any(one is call for one in held):
            return call
        cells = tuple(CellType(_rebound(one, memo)) for one in held)
        rebound = FunctionType(call.__code__, call.__globals__, call.__name__, call.__defaults__, cells)
        rebound.__kwdefaults__ = call.__kwdefaults__
        return rebound
    return memo.get(id(call), call) if isinstance(call, nn.Module) else call


def noise_like(shape: Sequence[int], seed: int, noise: torch.Tensor) -> torch.Tensor:
    """Return a read-only tensor of noise, the same for the same seed."""
    numel = torch.Size(shape).numel()
    start = seed * 7919 % (noise.numel() // 2)
    if start + numel > noise.numel():
        noise = noise.repeat(-(-(start + numel) // noise.numel()))
    return noise[start : start + numel].view(tuple(shape))


def _copied(tensor: torch.Tensor, seed: int, noise: torch.Tensor) -> torch.Tensor:
    # ZeRO-3 leaves an empty placeholder that stores the shape.
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    numel, is_parameter = torch.Size(shape).numel(), isinstance(tensor, nn.Parameter)
    copy: torch.Tensor
    if not tensor.is_floating_point():
        has_values = tensor.device.type != "meta" and shape == tuple(tensor.shape) and numel <= _MOST_ELEMENTS
        copy = tensor.detach().cpu().clone() if has_values else torch.zeros(shape, dtype=tensor.dtype)
    elif (is_parameter and len(shape) > 1) or numel > _SMALL:
        copy = NoiseMatrix(torch.empty(shape, dtype=DTYPE, device="meta"), seed, noise)
    elif is_parameter or tensor.device.type == "meta":
        # Values of parameters are not used: one that is still zero would hide its input.
        copy = noise_like(shape, seed, noise).clone()
    else:
        copy = tensor.detach().cpu().to(DTYPE, copy=True)
    if is_parameter:
        copy = copy if isinstance(copy, NoiseMatrix) else nn.Parameter(copy, requires_grad=False)
        copy._is_param = True
    return copy


class NoiseMatrix(torch.Tensor):
    """A matrix on the host without storage."""

    shadow: torch.Tensor
    """The same tensor on the meta device."""
    seed: int
    """Seed of its values, together with its place in the parameter."""
    noise: torch.Tensor

    @staticmethod
    def __new__(cls, shadow: torch.Tensor, seed: int, noise: torch.Tensor) -> NoiseMatrix:
        """Wrap a tensor on the meta device."""
        made: NoiseMatrix = torch.Tensor._make_wrapper_subclass(
            cls,
            shadow.shape,
            strides=shadow.stride(),
            storage_offset=shadow.storage_offset(),
            dtype=shadow.dtype,
            device=torch.device("cpu"),
        )
        made.shadow, made.seed, made.noise = shadow, seed, noise
        return made

    def __init__(self, *args: Any) -> None:
        """Do nothing: ``__new__`` has set all attributes."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Return shape and dtype; there are no values to print."""
        return f"NoiseMatrix({tuple(self.shape)}, {self.dtype})"

    @property
    def place(self) -> int:
        """A number that identifies a matrix of a parameter, the same for its repetitions in a batch."""
        shadow = self.shadow
        matrix = (tuple(shadow.shape[-2:]), shadow.stride()[-2:])
        return hash((self.seed, shadow.storage_offset(), matrix)) & 0xFFFFFFF

    def values(self) -> torch.Tensor:
        """Return noise as values, for operations without a noise version."""
        if self.shadow.numel() > _MOST_ELEMENTS:
            raise ValueError(f"an operation needs all {self.shadow.numel()} values of a parameter at once")
        return noise_like(self.shadow.shape, self.place, self.noise).to(self.dtype, copy=True)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run operations on noise matrices only on the meta device, and others with noise."""
        flat, spec = tree_flatten((args, dict(kwargs or {})))
        tensors = [one for one in flat if isinstance(one, torch.Tensor)]
        first = next(one for one in tensors if isinstance(one, NoiseMatrix))
        if all(isinstance(one, NoiseMatrix) for one in tensors) and not _needs_values(func):
            flat = [one.shadow if isinstance(one, NoiseMatrix) else one for one in flat]
            shadow_args, shadow_kwargs = tree_unflatten(flat, spec)
            shadow_kwargs.pop("device", None)
            return _wrapped(func(*shadow_args, **shadow_kwargs), first)
        known = _NOISE_VERSIONS.get(func.overloadpacket.__name__)
        if known is not None:
            result = known(*args, **(kwargs or {}))
            if result is not None:
                return result
        flat = [one.values() if isinstance(one, NoiseMatrix) else one for one in flat]
        real_args, real_kwargs = tree_unflatten(flat, spec)
        return func(*real_args, **real_kwargs)


def _needs_values(func: Any) -> bool:
    return func.overloadpacket.__name__ in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero")


def _wrapped(result: Any, like: NoiseMatrix) -> Any:
    return tree_map_only(torch.Tensor, lambda one: NoiseMatrix(one, like.seed, like.noise), result)


def _product(left: Any, right: Any) -> torch.Tensor | None:
    """Return ``left @ right`` of at most three dims, one of which is a noise matrix."""
    if isinstance(left, NoiseMatrix):
        if isinstance(right, NoiseMatrix) or right.dim() < 2 or left.dim() < 2:
            return None
        swapped = _product(right.transpose(-1, -2), left.transpose(-1, -2))
        return None if swapped is None else swapped.transpose(-1, -2)
    if right.dim() < 2:
        return None
    inner, outer = right.shape[-2:]
    into = noise_like((inner, _RANK), right.place, right.noise)
    out = noise_like((_RANK, outer), right.place + 1, right.noise)
    result: torch.Tensor = (left.to(DTYPE) @ into / (inner * _RANK) ** 0.5) @ out
    return result.to(left.dtype)


def _sum_with_product(bias: Any, left: Any, right: Any, **_: Any) -> torch.Tensor | None:
    if not isinstance(left, NoiseMatrix) and not isinstance(right, NoiseMatrix):
        return None
    product = _product(left, right)
    if product is None:
        return None
    return product + (bias.values() if isinstance(bias, NoiseMatrix) else bias)


def _linear(left: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
    if not isinstance(weight, NoiseMatrix) or isinstance(left, NoiseMatrix):
        return None
    product = _product(left, weight.t())
    return product if product is None or bias is None else product + bias


def _lookup(table: Any, ids: Any, *_: Any, **__: Any) -> torch.Tensor | None:
    if not isinstance(table, NoiseMatrix) or isinstance(ids, NoiseMatrix):
        return None
    width = table.shape[1:].numel()
    if width > table.noise.numel() // 2:
        return None
    rows = table.noise.unfold(0, width, 1)
    # Negative ids count from the end.
    starts = ((ids % table.shape[0]) * 9973 + table.place) % rows.shape[0]
    return rows[starts].reshape(*ids.shape, *table.shape[1:]).to(table.dtype)


def _index(table: Any, indices: Sequence[Any]) -> torch.Tensor | None:
    if len(indices) == 1 and isinstance(indices[0], torch.Tensor) and indices[0].dtype in (torch.int64, torch.int32):
        return _lookup(table, indices[0])
    return None


_NOISE_VERSIONS: dict[str, Callable[..., torch.Tensor | None]] = {
    "mm": _product,
    "bmm": _product,
    "matmul": _product,
    "addmm": _sum_with_product,
    "baddbmm": _sum_with_product,
    "linear": _linear,
    "embedding": _lookup,
    "index": _index,
}
