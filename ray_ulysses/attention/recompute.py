"""What a checkpointed layer keeps of attention, so that attention is not computed again in the backward pass.

The policy saves what the attention operators return (output and log-sum-exp); projections, norms and rotary embeddings
are computed again, and so is the exchange of queries, keys and values (one all-to-all). With the output kept in both
layouts the one after attention is not sent again either: 5 collectives a layer instead of 6, for one more tensor of the
output's size.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import ray_ulysses.attention.chunked  # noqa: F401  (registers the operators that are named below)

if TYPE_CHECKING:
    from collections.abc import Callable

KeptOutput = Literal["both", "kernel", "none"]
"""What is kept of attention's output under checkpointing: in the kernel's and the model's layout, in the kernel's only,
or not at all (attention is then computed again, for the least memory)."""


def checkpoint_contexts(keep: KeptOutput) -> Callable[[], tuple[Any, Any]] | None:
    """Return the ``context_fn`` of ``torch.utils.checkpoint`` (non-reentrant), or ``None`` to keep nothing."""
    if keep == "none":
        return None
    operators = torch.ops.ray_ulysses
    kept = {operators.attend_payload.default, operators.attend_heads.default, operators.attend_in_chunks.default}
    if keep == "both":
        kept.add(operators.scatter_heads.default)
    return partial(_contexts, frozenset(kept))


def _contexts(kept: frozenset[Any]) -> tuple[Any, Any]:
    """Return what forward and recomputation run under.

    Not torch's own pair outside of compilation: it holds every operator of a recomputation against those of forward,
    and under ZeRO-3 the two differ, since a parameter that was at hand in forward is gathered again (torch 2.13,
    DeepSpeed 0.19.8).
    """
    if torch.compiler.is_compiling():
        contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(partial(_policy, kept))
        return contexts
    storage: dict[Any, deque[Any]] = {operator: deque() for operator in kept}
    return _Keep(storage), _Replay(storage)


class _Keep(TorchDispatchMode):
    """Runs every operator, and keeps what those of the storage return."""

    def __init__(self, storage: dict[Any, deque[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage = storage

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator."""
        out = operator(*args, **(kwargs or {}))
        if operator in self._storage:
            kept = tree_map_only(torch.Tensor, torch.Tensor.detach, out)
            self._storage[operator].append((kept, _versions(kept)))
        return out


class _Replay(TorchDispatchMode):
    """Returns what was kept, in the order in which it was, and runs every other operator."""

    def __init__(self, storage: dict[Any, deque[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage = storage

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, or return what it returned in forward."""
        if operator not in self._storage:
            return operator(*args, **(kwargs or {}))
        if not self._storage[operator]:
            raise RuntimeError(
                f"{operator} was kept once and is asked for again; a checkpointed layer can't go backward twice "
                "(retain_graph=True): set memory.attention_output=none for that"
            )
        kept, versions = self._storage[operator].popleft()
        if _versions(kept) != versions:
            raise RuntimeError(
                f"what {operator} returned was changed in place after forward; backward needs it as it was"
            )
        return kept


def _versions(values: Any) -> list[int]:
    return [value._version for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _policy(kept: frozenset[Any], _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE
