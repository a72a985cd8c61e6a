"""Selective activation checkpointing that saves attention's results, so that attention is not recomputed.

The policy saves the results of the attention operators (output and log-sum-exp). Projections, norms, rotary embeddings
and the exchange of queries, keys and values (one all-to-all) are recomputed. If the output is kept in both layouts, the
exchange after attention is not repeated either: 5 collectives per layer instead of 6, for one more tensor of the
output's size. Layers that carry state are recomputed, since their backward needs their intermediate results; only the
exchange after them is not repeated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import ray_ulysses.attention.operators  # noqa: F401

KeptOutput = Literal["both", "kernel", "none"]
"""The layouts of attention's output kept under checkpointing: the kernel's and the model's, only the kernel's, or none
(attention is then recomputed, for the least memory)."""


CHANGED_IN_PLACE = "{} was changed in place after the forward; the backward pass needs it unchanged"
"""Error for a kept value that was changed; format it with the value's name."""

Stash = Callable[[Any], Callable[[], Any]]
"""Takes an operator's results, and returns a function that returns them, to be called once."""


def checkpoint_contexts(keep: KeptOutput, stash: Stash | None = None) -> Callable[[], tuple[Any, Any]] | None:
    """Return the ``context_fn`` for ``torch.utils.checkpoint`` (non-reentrant), or ``None`` to keep nothing.

    Results are kept on their device unless a ``stash`` is given, which compiled regions ignore.
    """
    if keep == "none":
        return None
    operators = torch.ops.ray_ulysses
    kept = {operators.attend.default, operators.attend_in_head_groups.default}
    if keep == "both":
        kept |= {operators.scatter_heads.default, operators.scatter_channels.default}
    return partial(_contexts, frozenset(kept), stash or _hold)


def _contexts(kept: frozenset[Any], stash: Stash) -> tuple[Any, Any]:
    """Return the context managers of forward and recomputation.

    Torch's own pair is used only under compilation. It requires the recomputation to run the same operators as the
    forward, which differ under ZeRO-3: the recomputation gathers parameters that the forward found gathered
    (torch 2.13, DeepSpeed 0.19.8).
    """
    if torch.compiler.is_compiling():
        contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(partial(_policy, kept))
        return contexts
    storage: dict[Any, deque[Any]] = {operator: deque() for operator in kept}
    return _Keep(storage, stash), _Replay(storage)


def _hold(values: Any) -> Callable[[], Any]:
    versions = _versions(values)

    def give_back() -> Any:
        if _versions(values) != versions:
            raise RuntimeError(CHANGED_IN_PLACE.format("a result of attention"))
        return values

    return give_back


class _Mode(TorchDispatchMode):
    def __init__(self, storage: dict[Any, deque[Callable[[], Any]]], stash: Stash = _hold) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage = storage
        self._stash = stash


class _Keep(_Mode):
    """Runs every operator, and keeps the results of operators that are in the storage."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator."""
        out = operator(*args, **(kwargs or {}))
        if operator in self._storage:
            self._storage[operator].append(self._stash(tree_map_only(torch.Tensor, torch.Tensor.detach, out)))
        return out


class _Replay(_Mode):
    """Returns kept results in their original order, and runs every other operator."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, or return its kept result."""
        if operator not in self._storage:
            return operator(*args, **(kwargs or {}))
        if not self._storage[operator]:
            raise RuntimeError(
                f"the result of {operator} was kept for one backward pass; a checkpointed layer can't run it twice "
                "(retain_graph=True) unless memory.attention_output=none is set"
            )
        return self._storage[operator].popleft()()


def _versions(values: Any) -> list[int]:
    return [value._version for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _policy(kept: frozenset[Any], _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE
