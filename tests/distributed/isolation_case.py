"""Does anything of one document reach another? Bitwise, on every kernel that runs here and on a ring."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ray_ulysses import SequenceMesh, apply_ulysses, shard_batch, unshard
from tests.unit.attention.models import VOCAB, magnified, tiny_model

LENGTHS = (11, 17, 1, 9)
ROW_TOKENS = 48
CHANGED = slice(11, 28)


def leaks(
    rank: int, world_size: int, ring_size: int, kind: str, kernel: Any, changes: dict[str, Any]
) -> tuple[list[str], float]:
    """Change the tokens of the second document and say where another one notices.

    Returns:
        What differs by a bit outside the document (``attention`` of the first layer, ``logits``), and the relative
        error of the other documents' logits.
    """
    mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
    model = apply_ulysses(magnified(tiny_model(kind, **changes)), mesh, attention=kernel)
    attended: list[torch.Tensor] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda module, args, out: attended.append(out[0]))
    before = torch.randint(0, VOCAB, (1, ROW_TOKENS), generator=torch.Generator().manual_seed(5))
    after = before.clone()
    after[:, CHANGED] = (after[:, CHANGED] + 7) % VOCAB
    logits = []
    for ids in (before, after):
        batch = shard_batch(ids, None, LENGTHS, mesh)
        with torch.no_grad():
            logits.append(unshard(model(**batch.model_inputs()).logits, batch))
    attention = [unshard(out, batch) for out in attended]
    others = torch.ones(sum(LENGTHS), dtype=torch.bool)
    others[CHANGED] = False
    assert not torch.equal(logits[0][:, ~others], logits[1][:, ~others])
    found = [
        name
        for name, (one, other) in (("attention", attention), ("logits", logits))
        if not torch.equal(one[:, others], other[:, others])
    ]
    one, other = (part[:, others].double() for part in logits)
    return found, float((one - other).norm() / one.norm())


def dense_leaks(rank: int, world_size: int, ring_size: int, kernels: list[str]) -> dict[str, list[str]]:
    kinds: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {"sliding_window": 5}}
    return {
        f"{kernel}-{kind}": leaks(rank, world_size, ring_size, kind, kernel, changes)[0]
        for kernel in kernels
        for kind, changes in kinds.items()
    }
