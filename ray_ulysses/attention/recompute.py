"""What a checkpointed layer keeps of attention, so that attention is not computed again in the backward pass.

The policy saves what the attention operators return (output and log-sum-exp); projections, norms and rotary embeddings
are computed again, and so is the exchange of queries, keys and values (one all-to-all). With the output kept in both
layouts the one after attention is not sent again either: 5 collectives a layer instead of 6, for one more tensor of the
output's size.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
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
    return partial(create_selective_checkpoint_contexts, partial(_policy, frozenset(kept)))


def _policy(kept: frozenset[Any], _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE
