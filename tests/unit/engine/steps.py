"""A batch of two documents, a step's gradients, their comparison, and the memory that a step takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ray_ulysses import causal_lm_loss, shard_batch
from ray_ulysses.attention.batch import IGNORE_INDEX, ShardedBatch
from ray_ulysses.attention.recompute import KeptOutput, checkpoint_contexts
from ray_ulysses.parallel.layout import TileSetting
from tests.apart import worst
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import VOCAB

LENGTHS = (17, 23)
Values = dict[str, torch.Tensor]
TILE = 7


def make_batch(weighted: bool = False) -> ShardedBatch:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (1, sum(LENGTHS)), generator=generator)
    labels = ids.clone()
    labels[:, 4:9] = IGNORE_INDEX
    weights = torch.rand(1, sum(LENGTHS), generator=generator) if weighted else None
    return shard_batch(ids, labels, LENGTHS, ALONE, label_weights=weights)


def checkpointed(model: Any, keep: KeptOutput = "both") -> Any:
    options: dict[str, Any] = {"use_reentrant": False}
    if keep != "none":
        options["context_fn"] = checkpoint_contexts(keep)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


def step(model: Any, batch: ShardedBatch | None = None, tile: TileSetting = "auto", call: Any = None) -> Values:
    """Return the loss of a step, through the model or the call that wraps the model, and its gradients."""
    model.zero_grad()
    batch = make_batch() if batch is None else batch
    loss_sum, _ = causal_lm_loss(model if call is None else call, batch, tile=tile)
    (loss_sum * 0.37).backward()
    return {"loss": loss_sum.detach(), **gradients_of(model)}


def gradients_of(model: Any) -> Values:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def worst_tensor(ours: Values, wanted: Values) -> float:
    """Return law 1's error of the worst tensor."""
    assert ours.keys() == wanted.keys()
    whole = torch.stack([one.norm() for one in wanted.values()]).norm()
    return worst(
        float((ours[name] - one).norm() / (one.norm() if one.norm() > 1e-7 * whole else whole))
        for name, one in wanted.items()
    )


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the peak number of bytes that torch's allocator has in use."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    now = most = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):  # type: ignore[union-attr]
        now += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, now)
    return most
