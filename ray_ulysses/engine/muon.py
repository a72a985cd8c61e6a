"""Muon: momentum whose update is orthogonalized, for whole matrices under ZeRO; AdamW for all other parameters.

The algorithm is published at https://kellerjordan.github.io/posts/muon and implemented for one process by
``torch.optim.Muon``. Scaling the update as in https://arxiv.org/abs/2502.16982 gives it the RMS of AdamW's updates, so
both kinds of parameters use the same learning rate and weight decay.

ZeRO shards a matrix at any element. Each rank updates the momentum of its own elements. An all-to-all then sends the
pieces of ``world_size`` matrices to their owners, one matrix per rank, which orthogonalize them and send the pieces
back. A matrix is orthogonalized by one rank in one piece, so the result does not depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ray_ulysses.engine.partition_view import GroupView, Zero3View

if TYPE_CHECKING:
    from ray_ulysses.engine.optimizer import Matrices

MOMENTUM = 0.95
_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the Newton-Schulz polynomial, which maximize its slope at zero."""
_LEAST_NORM = 1e-7
_RMS_OF_ADAMW = 0.2
"""Typical root mean square of AdamW's updates, in units of the learning rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matrix:
    """A matrix in a flattened parameter, and the location of each rank's elements."""

    start: int
    """Index of the matrix's first element in the flattened parameter."""
    rows: int
    columns: int
    bounds: tuple[int, ...]
    """Index of the parameter's first element on each rank, followed by the number of elements."""
    offset: int
    """Index of this rank's first element of the parameter in the flat tensor."""

    def piece(self, rank: int) -> tuple[int, int]:
        """Return the interval [start, stop) of the flattened parameter that is in this matrix and on ``rank``."""
        first, last = self.bounds[rank], self.bounds[rank + 1]
        start, stop = self.start, self.start + self.rows * self.columns
        return min(max(start, first), last), min(max(stop, first), last)


class MuonAdamW(torch.optim.AdamW):
    """Muon for parameter groups of kind ``muon``, and AdamW for the others. All ranks must call `step` together.

    Args:
        groups: Parameter groups; see `engine.optimizer.parameter_groups`.
        dtype: Precision of the orthogonalization, and of the exchanged pieces.
        options: Arguments of ``torch.optim.AdamW``.
    """

    def __init__(self, groups: list[dict[str, Any]], *, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(groups, **options)
        self._dtype = dtype
        self._batches: dict[int, list[tuple[_Matrix, ...]]] = {}
        self._view: GroupView | Zero3View | None = None

    def locate(self, view: GroupView | Zero3View, parameters: Sequence[Any], found: Mapping[int, Matrices]) -> None:
        """Locate the matrices in the flat tensors that ZeRO has created.

        Args:
            view: The partition view of the ZeRO optimizer that wraps this optimizer.
            parameters: The trained parameters, in the same order on every rank.
            found: The matrices by the ``id`` of their parameter; see `engine.optimizer.muon_matrices`.
        """
        self._view, size, is_zero3 = view, view.world_size, isinstance(view, Zero3View)
        of_flat: dict[int, list[_Matrix]] = {}
        whole = [one for one in parameters if id(one) in found]
        if is_zero3:
            # If the number of experts is a multiple of the world size, each rank orthogonalizes the experts that ZeRO-3
            # stores on it, provided that no other matrices precede them in a batch.
            whole.sort(key=lambda one: found[id(one)].count % size)
        for parameter in whole:
            matrices, part, bounds = found[id(parameter)], view.partition_of(parameter), view.bounds(parameter)
            elements = matrices.rows * matrices.columns
            numbers = _strided(matrices.count, size) if is_zero3 else range(matrices.count)
            of_flat.setdefault(part.flat, []).extend(
                _Matrix(
                    start=number * elements,
                    rows=matrices.rows,
                    columns=matrices.columns,
                    bounds=bounds,
                    offset=part.offset,
                )
                for number in numbers
            )
        for flat, held in of_flat.items():
            # In stages 1 and 2, the n-th matrix of a batch is in the share of the n-th rank or of a neighbour.
            own = held if is_zero3 else [held[number] for number in _strided(len(held), size)]
            batches = [tuple(own[first : first + size]) for first in range(0, len(own), size)]
            self._batches[id(view.flats[flat])] = batches

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the flat tensors in all parameter groups."""
        groups = self.param_groups
        for group in groups:
            for flat in group["params"] if group["kind"] == "muon" else ():
                self._step_matrices(flat, group)
        self.param_groups = [group for group in groups if group["kind"] != "muon"]
        try:
            super().step(closure)
        finally:
            self.param_groups = groups

    def _step_matrices(self, flat: torch.Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[flat], flat.grad
        assert gradient is not None
        if not state:
            state["step"], state["momentum_buffer"] = torch.tensor(0.0), torch.zeros_like(flat)
        state["step"] += 1
        state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
        flat.mul_(1 - group["lr"] * group["weight_decay"])
        for batch in self._batches[id(flat)]:
            for matrix, start, update in self._orthogonalized(batch, gradient, state["momentum_buffer"]):
                rate = group["lr"] * _RMS_OF_ADAMW * math.sqrt(max(matrix.rows, matrix.columns))
                flat.narrow(0, start, update.numel()).add_(update, alpha=-rate)

    def _orthogonalized(
        self, batch: Sequence[_Matrix], gradient: torch.Tensor, momentum: torch.Tensor
    ) -> Iterator[tuple[_Matrix, int, torch.Tensor]]:
        """Yield each matrix of a batch with the location and the update of this rank's elements."""
        view = self._view
        assert view is not None
        pieces = []
        for matrix in batch:
            start, stop = matrix.piece(view.rank)
            pieces.append((matrix.offset + start - matrix.bounds[view.rank], stop - start))
        # With Nesterov's momentum, the update is based on the gradient after the next decay.
        # Shares are in the order of the ranks, so the received pieces are the flattened matrix.
        sent = torch.cat(
            [
                gradient.narrow(0, start, size).lerp(momentum.narrow(0, start, size), MOMENTUM).to(self._dtype)
                for start, size in pieces
            ]
        )
        sent_sizes = [size for _, size in pieces] + [0] * (view.world_size - len(batch))
        own = batch[view.rank] if view.rank < len(batch) else None
        ranks = range(view.world_size)
        sizes = [0] * len(ranks) if own is None else [stop - start for start, stop in map(own.piece, ranks)]
        received = sent.new_empty(sum(sizes))
        dist.all_to_all_single(received, sent, sizes, sent_sizes, group=view.process_group)
        if own is not None:
            received = orthogonalized(received.view(own.rows, own.columns)).reshape(-1)
        dist.all_to_all_single(sent, received, sent_sizes, sizes, group=view.process_group)
        for matrix, (start, size), update in zip(batch, pieces, sent.split([size for _, size in pieces]), strict=True):
            if size:
                yield matrix, start, update


def _strided(count: int, world_size: int) -> Iterator[int]:
    """Yield the numbers of ``count`` matrices so that the n-th of ``world_size`` is in the n-th share of all."""
    each = -(-count // world_size)
    for number in range(each):
        yield from range(number, count, each)


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return an approximation of ``U @ V.T`` for a matrix with the singular value decomposition ``U @ S @ V.T``.

    Five Newton-Schulz steps, in the matrix's precision, map each singular value to between about 0.7 and 1.2.

    Args:
        matrix: A tensor of shape [rows, columns].
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_LEAST_NORM)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x


def orthogonalization_flops(rows: int, columns: int) -> int:
    """Return the number of floating-point operations in `orthogonalized`, for a matrix of this shape."""
    short, long = sorted((rows, columns))
    return _STEPS * (4 * short**2 * long + 2 * short**3)


def working_elements(rows: int, columns: int) -> int:
    """Return the number of elements that an update of a matrix of this shape allocates, on the rank that owns it.

    These are the tensors sent and received, the matrix before and after a Newton-Schulz step, and two square matrices.
    """
    return 4 * rows * columns + 2 * min(rows, columns) ** 2
