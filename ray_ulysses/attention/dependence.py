"""Finds results of a forward that depend on more than their own token, by changing the other tokens.

Without attention, a decoder maps each pair of a token and its position to a result. Called twice with the same pairs in
different rows and places and among different other tokens, the model and every module must return the same result for
each pair. Otherwise the result was mixed along the sequence or the batch, depends on the row's start or length, or is
random, regardless of the operation.

Operations along the token dim, and tables of positions, are recorded as a forward calls them. Only floating-point
tensors count: integers are token ids, positions and the sorting of tokens by expert, whose effect is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ray_ulysses.attention.noise_model import noise_like

_WIDTH = 6
# Rounding errors are 1e-16, and 1e-7 in single elements that a cast to fp32 rounds the other way.
_TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """The pairs of a token and its position in a batch."""

    pairs_BT: torch.Tensor
    """Index of each pair."""
    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor

    @classmethod
    def of(cls, pairs_BT: torch.Tensor, ids_P: torch.Tensor, num_positions: int) -> Self:
        """Arrange pairs; the position of a pair is its index modulo the number of positions."""
        return cls(pairs_BT=pairs_BT, input_ids_BT=ids_P[pairs_BT], position_ids_BT=pairs_BT % num_positions)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleCall:
    """The input and output of a module, projected to a few dims."""

    name: str
    kind: str
    input_BTW: torch.Tensor | None
    output_BTW: torch.Tensor | None


class CallRecorder:
    """Records every call of every module, projecting its first input and output onto noise.

    ``calls`` has them per arrangement, in the order in which they ended, so that a module precedes its parent.
    """

    def __init__(self, model: nn.Module, noise: torch.Tensor) -> None:
        """Register hooks on every module of a model."""
        self.calls: list[list[ModuleCall]] = []
        self._shape: tuple[int, int] = (0, 0)
        self._noise = noise
        self._inputs: list[torch.Tensor | None] = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._before, with_kwargs=True)
            module.register_forward_hook(self._after(name))

    def begin(self, arrangement: Arrangement) -> None:
        """Start recording the calls of an arrangement."""
        self.calls.append([])
        self._shape = tuple(arrangement.pairs_BT.shape)  # type: ignore[assignment]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs.append(self._projected((*args, *kwargs.values())))

    def _after(self, name: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # A model's output is a mapping; a layer's hidden states are the first of a tuple.
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
        """Return ``[B, T, W]`` of the first tensor with one entry per token, or ``None``."""
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
        """Return the innermost module whose outputs differ for some pair although its inputs agree.

        Returns:
            Its call with the second arrangement, or ``None`` if there is none.
        """
        before, after = self.calls
        earlier = dict(_numbered(before))
        for place, call in _numbered(after):
            other = earlier.get(place)
            # Tokens sorted by expert are not in rows; they are compared once they are back in rows.
            if other is None or other.output_BTW is None or call.output_BTW is None:
                continue
            before_BTW, after_BTW = other.input_BTW, call.input_BTW
            inputs_agree = before_BTW is None or after_BTW is None or agree(before_BTW, after_BTW, places)
            if inputs_agree and not agree(other.output_BTW, call.output_BTW, places):
                return call
        return None


def _numbered(calls: list[ModuleCall]) -> list[tuple[tuple[str, int], ModuleCall]]:
    """Return each call, keyed by the module's name and the index of its call."""
    counts: Counter[str] = Counter()
    numbered = []
    for call in calls:
        numbered.append(((call.name, counts[call.name]), call))
        counts[call.name] += 1
    return numbered


def agree(first_BTF: torch.Tensor, second_BTF: torch.Tensor, places: Sequence[Arrangement]) -> bool:
    """Return whether each pair has the same result in both arrangements."""
    first, second = places
    if first_BTF.shape[:2] != first.pairs_BT.shape or second_BTF.shape[:2] != second.pairs_BT.shape:
        return False
    by_pair_PF = torch.empty_like(first_BTF.flatten(0, 1))
    by_pair_PF[first.pairs_BT.flatten()] = first_BTF.flatten(0, 1)
    known_BT = second.pairs_BT < len(by_pair_PF)
    wanted, found = by_pair_PF[second.pairs_BT[known_BT]], second_BTF[known_BT]
    # NaN does not agree with anything.
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
"""Operations along the given dims, or along all dims if none are given."""

_LOOKUPS = frozenset({"embedding", "index", "index_select"})
_PARTS = frozenset({"select", "slice", "unbind", "split", "split_with_sizes"})
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "dot", "mv"})
_CONVOLUTIONS = frozenset({"convolution", "_convolution", "mkldnn_convolution", "fft_fft", "_fft_r2c", "_fft_c2c"})


class TokenOperations(TorchDispatchMode):
    """Collects the names of operations along a dim of a given size.

    ``num_positions`` is the size of the smallest table in which positions are looked up; None without one.
    """

    def __init__(self, num_tokens: int) -> None:
        """Record operations along dims of size ``num_tokens``, which only the token dim may have."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_tokens = num_tokens
        self.found: list[str] = []
        self.num_positions: int | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and record its name if it is along the token dim."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in self.found and self._is_along_tokens(func, name, args, kwargs or {}, result):
            self.found.append(name)
        if name in _LOOKUPS:
            self._record_positions(name, args)
        return result

    def _record_positions(self, name: str, args: tuple[Any, ...]) -> None:
        """Record the size of a table if all positions of the plain row are looked up in order."""
        table, indices = args[0], args[2] if name == "index_select" else args[1]
        if isinstance(indices, list | tuple):
            indices = indices[0] if len(indices) == 1 else None
        is_first_dim = name != "index_select" or args[1] == 0
        if not isinstance(indices, torch.Tensor) or indices.numel() != self._num_tokens or not is_first_dim:
            return
        places = indices.flatten()
        # A row's own tokens are not a table; some tables reserve their first entries.
        if indices.is_floating_point() or indices.dtype == torch.bool or table.shape[0] == self._num_tokens:
            return
        first = int(places[0])
        if torch.equal(places - first, torch.arange(self._num_tokens)):
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
    """Return the dims of an operation, from its arguments ``dim`` or ``dims``."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dim", "dims"):
            default = argument.default_value if argument.has_default_value() else ()
            given = args[place] if place < len(args) else kwargs.get(argument.name, default)
            if given is None:
                return ()
            return tuple(given) if isinstance(given, list | tuple) else (given,)
    return ()
