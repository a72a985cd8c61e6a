"""Detects operations outside attention that mix tokens, by running the forward on two arrangements of the tokens.

Without attention, a decoder maps each (token, position) pair to a result independently of all other pairs. The model is
called twice with the same pairs, in different orders and with different neighbors. The model and every module must
return the same result for a pair in both calls. If a result differs, an operation mixes tokens along the sequence or
the batch, depends on the token's index in the row or on the row's length, or is random.

A dispatch mode records operations along the token dim and lookups in position tables. Operations on integers are
ignored: they handle token ids, positions, and the routing of tokens to experts, whose results are compared anyway.

The calls run a copy of the model whose weights are noise, so a forward takes milliseconds and little memory at any
model size. The copy has all modules of the model, including modules replaced after construction, and computes its
activations in fp64. A product with a weight matrix is replaced by products with two thin noise matrices, and an
embedding lookup returns slices of noise. The values are meaningless, but each result depends on the same tokens as in
the original model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import CellType, FunctionType, MethodType
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

_WIDTH = 6
# Relative rounding errors are about 1e-16, or 1e-7 where the model casts to fp32.
_TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """A batch of (token, position) pairs in a given order."""

    pairs_BT: torch.Tensor
    """Index of the pair at each row and token."""
    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor

    @classmethod
    def of(cls, pairs_BT: torch.Tensor, ids_P: torch.Tensor, num_positions: int) -> Self:
        """Build the batch for the given pairs. A pair's position is its index modulo ``num_positions``."""
        return cls(pairs_BT=pairs_BT, input_ids_BT=ids_P[pairs_BT], position_ids_BT=pairs_BT % num_positions)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleCall:
    """The first input and output of one module call, projected to ``_WIDTH`` features per token."""

    name: str
    kind: str
    input_BTW: torch.Tensor | None
    output_BTW: torch.Tensor | None


class CallRecorder:
    """Records every module call of a model through hooks.

    ``calls`` is a list per arrangement, in the order in which the calls returned, so a module precedes its parent.
    """

    def __init__(self, model: nn.Module, noise: torch.Tensor) -> None:
        self.calls: list[list[ModuleCall]] = []
        self._shape: tuple[int, int] = (0, 0)
        self._noise = noise
        self._inputs: list[torch.Tensor | None] = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._before, with_kwargs=True)
            module.register_forward_hook(self._after(name))

    def begin(self, arrangement: Arrangement) -> None:
        """Start a new list of calls, for the given arrangement."""
        self.calls.append([])
        self._shape = tuple(arrangement.pairs_BT.shape)  # type: ignore[assignment]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs.append(self._projected((*args, *kwargs.values())))

    def _after(self, name: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # A model returns a mapping; a layer returns its hidden states, possibly as the first item of a tuple.
            values = tuple(output.values()) if isinstance(output, dict) else output
            self.calls[-1].append(
                ModuleCall(
                    name=name,
                    kind=type(module).__name__,
                    input_BTW=self._inputs.pop(),
                    output_BTW=self._projected(tuple(values) if isinstance(values, list | tuple) else (values,)),
                )
            )

        return record

    def _projected(self, values: tuple[Any, ...]) -> torch.Tensor | None:
        """Project the first value with one entry per token to ``[B, T, W]``; return None if there is no such value."""
        rows, tokens = self._shape
        for tensor in values:
            if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2 or not tensor.is_floating_point():
                continue
            if tensor.shape[:2] != (rows, tokens):
                if tensor.shape[0] != rows * tokens:
                    continue
                # [B * T, F] -> [B, T, F]
                tensor = tensor.unflatten(0, (rows, tokens))
            flat_BTF = tensor.detach().flatten(2) if tensor.dim() > 2 else tensor.detach().unsqueeze(-1)
            projected_BTW: torch.Tensor = flat_BTF.double() @ noise_like((flat_BTF.shape[2], _WIDTH), 1, self._noise)
            return projected_BTW
        return None

    def find_mixing(self, places: Sequence[Arrangement]) -> ModuleCall | None:
        """Find the innermost module whose outputs differ between the arrangements although its inputs agree.

        Returns:
            The module's call in the second arrangement, or None if no module mixes tokens.
        """
        before, after = self.calls
        earlier = dict(_numbered(before))
        for place, call in _numbered(after):
            other = earlier.get(place)
            # While an MoE layer has its tokens sorted by expert, no output can be assigned to a pair.
            if other is None or other.output_BTW is None or call.output_BTW is None:
                continue
            before_BTW, after_BTW = other.input_BTW, call.input_BTW
            inputs_agree = before_BTW is None or after_BTW is None or agree(before_BTW, after_BTW, places)
            if inputs_agree and not agree(other.output_BTW, call.output_BTW, places):
                return call
        return None


def _numbered(calls: list[ModuleCall]) -> Iterator[tuple[tuple[str, int], ModuleCall]]:
    counts: Counter[str] = Counter()
    for call in calls:
        yield (call.name, counts[call.name]), call
        counts[call.name] += 1


def agree(first_BTF: torch.Tensor, second_BTF: torch.Tensor, places: Sequence[Arrangement]) -> bool:
    """Return whether every pair has the same result in both arrangements, within ``_TOLERANCE``."""
    first, second = places
    if first_BTF.shape[:2] != first.pairs_BT.shape or second_BTF.shape[:2] != second.pairs_BT.shape:
        return False
    by_pair_PF = torch.empty_like(first_BTF.flatten(0, 1))
    by_pair_PF[first.pairs_BT.flatten()] = first_BTF.flatten(0, 1)
    known_BT = second.pairs_BT < len(by_pair_PF)
    wanted, found = by_pair_PF[second.pairs_BT[known_BT]], second_BTF[known_BT]
    # The comparison is written so that NaN counts as a difference.
    return bool(((found - wanted).norm(dim=-1) <= _TOLERANCE * wanted.norm(dim=-1)).all())


_ALONG_DIM = frozenset(
    {
        "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "flip", "roll", "sort", "topk", "kthvalue", "mode",
        "_softmax", "_log_softmax", "_safe_softmax",
    }
)  # fmt: skip
_REDUCTIONS = frozenset(
    {
        "sum", "nansum", "mean", "prod", "amax", "amin", "aminmax", "max", "min", "argmax", "argmin", "median",
        "nanmedian", "var", "var_mean", "std", "std_mean", "norm", "linalg_vector_norm", "logsumexp",
    }
)  # fmt: skip
"""Operations that reduce over the dims in their arguments, or over all dims if the arguments contain none."""

_LOOKUPS = frozenset({"embedding", "index", "index_select"})
_PARTS = frozenset({"select", "slice", "unbind", "split", "split_with_sizes"})
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "dot", "mv"})
_READS = frozenset({"_local_scalar_dense", "is_nonzero", "equal", "nonzero"})
"""Operations that need the values of a noise matrix, even without other operands."""
_CONVOLUTIONS = frozenset({"convolution", "_convolution", "mkldnn_convolution", "fft_fft", "_fft_r2c", "_fft_c2c"})


class TokenOperations(TorchDispatchMode):
    """Dispatch mode that collects the names of operations along the token dim.

    ``num_positions`` is the size of the smallest position table, or None if the model has no position table.
    """

    def __init__(self, num_tokens: int) -> None:
        """Recognize the token dim by its size ``num_tokens``, which no other dim may have."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_tokens = num_tokens
        self.found: list[str] = []
        self.num_positions: int | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and record its name if it works along the token dim."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in self.found and self._is_along_tokens(func, name, args, kwargs or {}, result):
            self.found.append(name)
        if name in _LOOKUPS:
            self._record_positions(name, args)
        return result

    def _record_positions(self, name: str, args: tuple[Any, ...]) -> None:
        """Record the size of a table if the indices are consecutive positions, one per token."""
        table, indices = args[0], args[2] if name == "index_select" else args[1]
        if isinstance(indices, list | tuple):
            indices = indices[0] if len(indices) == 1 else None
        is_first_dim = name != "index_select" or args[1] == 0
        if not isinstance(indices, torch.Tensor) or indices.numel() != self._num_tokens or not is_first_dim:
            return
        places = indices.flatten()
        # A table as long as the row is not a position table but the row's own tokens.
        if indices.is_floating_point() or indices.dtype == torch.bool or table.shape[0] == self._num_tokens:
            return
        first = int(places[0])
        if torch.equal(places - first, torch.arange(self._num_tokens)):
            # Some models reserve the first entries of the table and add an offset to each position.
            size = int(table.shape[0]) - first
            self.num_positions = min(size, self.num_positions or size)

    def _is_along_tokens(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> bool:
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or not first.is_floating_point() or not first.dim():
            return False
        if name in _CONVOLUTIONS or "scaled_dot_product" in name:
            return True
        if name in _PRODUCTS:
            left = args[1] if name in ("addmm", "baddbmm") else first
            return bool(left.dim()) and left.shape[-1] == self._num_tokens
        if name == "constant_pad_nd":
            return self._tokens_dims(first) != self._tokens_dims(result)
        if name in _PARTS:
            parts = result if isinstance(result, list | tuple) else [result]
            return any(len(self._tokens_dims(part)) < len(self._tokens_dims(first)) for part in parts)
        if name in _ALONG_DIM or name in _REDUCTIONS:
            dims = _dims(func, args, kwargs) or (range(first.dim()) if name in _REDUCTIONS else ())
            return any(first.shape[dim] == self._num_tokens for dim in dims)
        return False

    def _tokens_dims(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(dim for dim, size in enumerate(tensor.shape) if size == self._num_tokens)


def _dims(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dim", "dims"):
            default = argument.default_value if argument.has_default_value() else ()
            given = args[place] if place < len(args) else kwargs.get(argument.name, default)
            if given is None:
                return ()
            return tuple(given) if isinstance(given, list | tuple) else (given,)
    return ()


DTYPE = torch.float64
"""Dtype of all floating-point tensors in the copy: precise enough to tell a dependence from a rounding error."""

_LEAST_NOISE = 1 << 16
_RANK = 8
_MOST_ELEMENTS = 1 << 24
_SMALL = 1 << 12


def noise_copy(model: nn.Module) -> tuple[Any, torch.Tensor]:
    """Copy a model to the host with noise in place of its weights, and return the copy and the noise buffer."""
    # Quantized modules (engine/quantized_base.py) get weights with their original shapes.
    quantized: list[Any] = [module for module in model.modules() if hasattr(module, "make_plain")]
    packed = {id(one): nn.Parameter(torch.empty(0)) for module in quantized for one in module.packed_parameters()}
    shapes = [getattr(one, "ds_shape", one.shape) for one in model.parameters() if id(one) not in packed]
    shapes += [shape for module in quantized for shape in module.quantized.values()]
    longest = max((dim for shape in shapes for dim in shape), default=1)
    # noise_like starts in the first half of the buffer, so one half must fit the largest thin matrix.
    size = max(_LEAST_NOISE, 2 * _RANK * longest)
    noise = torch.randn(size, generator=torch.Generator().manual_seed(5), dtype=DTYPE)
    memo: dict[int, Any] = {**packed}
    for module in model.modules():
        held = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
        for tensor in held:
            if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = _copied(tensor, len(memo), noise)
    with torch.no_grad():
        copy = deepcopy(model, memo)
    seeds = count(len(memo))
    for module in quantized:
        memo[id(module)].make_plain(partial(_noise_weight, seeds, noise))
    for module in copy.modules():
        forward = vars(module).get("forward")
        if forward is not None:
            module.forward = _rebound(forward, memo)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for number, hook in hooks.items():
                hooks[number] = _rebound(hook, memo)
    return copy, noise


def _noise_weight(seeds: Iterator[int], noise: torch.Tensor, module: Any, name: str) -> torch.Tensor:
    weight = NoiseMatrix(torch.empty(module.quantized[name], dtype=DTYPE, device="meta"), next(seeds), noise)
    weight._is_param = True
    return weight


def _rebound(call: Any, memo: Mapping[int, Any]) -> Any:
    """Return a copy of a patched forward or hook that refers to the copied modules.

    ``deepcopy`` does not copy functions, so a patched forward would otherwise run the original module.
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
    """Return a seed-dependent view of the noise buffer with the given shape. The caller must not modify the view."""
    numel = torch.Size(shape).numel()
    start = seed * 7919 % (noise.numel() // 2)
    if start + numel > noise.numel():
        noise = noise.repeat(-(-(start + numel) // noise.numel()))
    return noise[start : start + numel].view(tuple(shape))


def _copied(tensor: torch.Tensor, seed: int, noise: torch.Tensor) -> torch.Tensor:
    # ZeRO-3 replaces a partitioned parameter by an empty placeholder whose ds_shape is the full shape.
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    numel, is_parameter = torch.Size(shape).numel(), isinstance(tensor, nn.Parameter)
    copy: torch.Tensor
    if not tensor.is_floating_point():
        has_values = tensor.device.type != "meta" and shape == tuple(tensor.shape) and numel <= _MOST_ELEMENTS
        copy = tensor.detach().cpu().clone() if has_values else torch.zeros(shape, dtype=tensor.dtype)
    elif (is_parameter and len(shape) > 1) or numel > _SMALL:
        copy = NoiseMatrix(torch.empty(shape, dtype=DTYPE, device="meta"), seed, noise)
    elif is_parameter or tensor.device.type == "meta":
        # Use noise even where real values exist: a parameter initialized to zero would hide its input.
        copy = noise_like(shape, seed, noise).clone()
    else:
        copy = tensor.detach().cpu().to(DTYPE, copy=True)
    if is_parameter:
        copy = copy if isinstance(copy, NoiseMatrix) else nn.Parameter(copy, requires_grad=False)
        copy._is_param = True
    return copy


class NoiseMatrix(torch.Tensor):
    """A host tensor without storage. Its values are derived from a noise buffer."""

    shadow: torch.Tensor
    """Tensor on the meta device that tracks shape and strides."""
    seed: int
    """Seed of the parameter, from which `place` derives the seed of a view."""
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
        """Do nothing: ``__new__`` sets all attributes."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape and the dtype, without values."""
        return f"NoiseMatrix({tuple(self.shape)}, {self.dtype})"

    @property
    def place(self) -> int:
        """Seed of this view's values. If a batch was expanded from one matrix, all its matrices have the same seed."""
        shadow = self.shadow
        matrix = (tuple(shadow.shape[-2:]), shadow.stride()[-2:])
        return hash((self.seed, shadow.storage_offset(), matrix)) & 0xFFFFFFF

    def values(self) -> torch.Tensor:
        """Materialize the noise values, for operations without an entry in ``_NOISE_VERSIONS``."""
        if self.shadow.numel() > _MOST_ELEMENTS:
            raise ValueError(f"an operation needs all {self.shadow.numel()} values of a parameter at once")
        return noise_like(self.shadow.shape, self.place, self.noise).to(self.dtype, copy=True)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run operations on the meta device if all operands are noise matrices, and otherwise on noise values."""
        flat, spec = tree_flatten((args, dict(kwargs or {})))
        tensors = [one for one in flat if isinstance(one, torch.Tensor)]
        first = next(one for one in tensors if isinstance(one, NoiseMatrix))
        name = func.overloadpacket.__name__
        if all(isinstance(one, NoiseMatrix) for one in tensors) and name not in _READS:
            flat = [one.shadow if isinstance(one, NoiseMatrix) else one for one in flat]
            shadow_args, shadow_kwargs = tree_unflatten(flat, spec)
            shadow_kwargs.pop("device", None)
            result = func(*shadow_args, **shadow_kwargs)
            return tree_map_only(torch.Tensor, lambda one: NoiseMatrix(one, first.seed, first.noise), result)
        known = _NOISE_VERSIONS.get(name)
        if known is not None:
            result = known(*args, **(kwargs or {}))
            if result is not None:
                return result
        flat = [one.values() if isinstance(one, NoiseMatrix) else one for one in flat]
        real_args, real_kwargs = tree_unflatten(flat, spec)
        return func(*real_args, **real_kwargs)


def _product(left: Any, right: Any) -> torch.Tensor | None:
    """Return ``left @ right`` where one operand is a noise matrix, or None if the shapes are not supported."""
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
    # The modulo maps negative ids, which index from the end, to valid ones.
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
