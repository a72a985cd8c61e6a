"""Implements selective activation checkpointing that saves attention's results instead of recomputing them.

The policy saves the results of the attention operators (output and log-sum-exp). Projections, norms, rotary embeddings
and the exchange of queries, keys and values (one all-to-all) are recomputed. If the output is saved in both layouts,
the exchange after attention is not repeated either: 5 collectives per layer instead of 6, for one more tensor of the
output's size. Recurrent layers are recomputed, because their backward uses their intermediate results; only the
exchange after them is saved.
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
"""Layouts in which checkpointing saves attention's output: the kernel's and the model's, only the kernel's, or neither.
With ``none``, nothing is saved and attention is recomputed, which takes the least memory."""


CHANGED_IN_PLACE = "{} was changed in place after the forward; the backward pass needs it unchanged"
"""Error template for a saved value that was modified, to be formatted with a description of the value."""

Stash = Callable[[Any], Callable[[], Any]]
"""Stores an operator's results and returns a function that retrieves them; that function is called only once."""


def checkpoint_contexts(keep: KeptOutput, stash: Stash | None = None) -> Callable[[], tuple[Any, Any]] | None:
    """Return the ``context_fn`` for ``torch.utils.checkpoint`` (non-reentrant), or None if ``keep`` is ``none``.

    ``stash`` stores the saved results; by default they stay on their device. Compiled regions ignore ``stash``.
    """
    if keep == "none":
        return None
    operators = torch.ops.ray_ulysses
    kept = {operators.attend.default, operators.attend_in_head_groups.default}
    if keep == "both":
        kept |= {operators.scatter_heads.default, operators.scatter_channels.default}
    return partial(_contexts, frozenset(kept), stash or _hold)


def _contexts(kept: frozenset[Any], stash: Stash) -> tuple[Any, Any]:
    """Return the context managers for the forward and the recomputation.

    Torch's own pair requires the recomputation to run the same operators as the forward, so it is used only under
    compilation. Under ZeRO-3 the operators differ, because the recomputation gathers parameters that were already
    gathered in the forward (torch 2.13, DeepSpeed 0.19.8).
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
    """Dispatch mode of the forward, which saves the results of the operators that are keys of ``storage``."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        if operator in self._storage:
            self._storage[operator].append(self._stash(tree_map_only(torch.Tensor, torch.Tensor.detach, out)))
        return out


class _Replay(_Mode):
    """Dispatch mode of the recomputation, which returns saved results in order and runs all other operators."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator not in self._storage:
            return operator(*args, **(kwargs or {}))
        if not self._storage[operator]:
            raise RuntimeError(
                f"the saved output of {operator} is freed by the first backward pass; for a second pass through a "
                "checkpointed layer (retain_graph=True), set memory.attention_output=none"
            )
        return self._storage[operator].popleft()()


def _versions(values: Any) -> list[int]:
    return [value._version for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _policy(kept: frozenset[Any], _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE
