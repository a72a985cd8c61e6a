"""Records operations along the token dim, and tables of positions, as a forward calls them.

Only floating-point tensors count. Integers are token ids, positions and the sorting of tokens by expert, whose effect
:mod:`ray_ulysses.attention.dependence` compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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

    Attributes:
        found: Their names, each once, in the order of their calls.
        num_positions: Size of the smallest table in which positions are looked up; ``None`` without one.
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
