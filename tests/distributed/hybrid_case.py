"""What hybrids send, and whether anything of one document reaches another through a layer that carries state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, shard_batch, unshard
from ray_ulysses.attention import exchange
from ray_ulysses.attention.mixers import find_mixers
from ray_ulysses.attention.recompute import KeptOutput
from tests.distributed.recompute_case import counted_exchanges
from tests.distributed.seam_case import checkpointed
from tests.unit.attention.models import VOCAB, zoo_model

# No document but the first begins at a slice's border, and one is shorter than a convolution.
LENGTHS = (11, 17, 1, 9)
ROW_TOKENS = 48
CHANGED = slice(11, 28)


def _row() -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, ROW_TOKENS), generator=torch.Generator().manual_seed(5))


def measures(
    rank: int, world_size: int, architectures: Sequence[str], documents: dict[str, list[int]]
) -> tuple[dict[str, list[str]], dict[str, tuple[int, list[int]]], dict[str, tuple[int, int]], dict[str, Any]]:
    return (
        leaks(rank, world_size, architectures),
        traffic(rank, world_size, architectures),
        exchanges_by_kept(rank, world_size),
        sums_by_documents(rank, world_size, documents),
    )


def leaks(rank: int, world_size: int, architectures: Sequence[str]) -> dict[str, list[str]]:
    """Change the tokens of the second document; return by architecture the layers that differ by a bit outside it."""
    mesh = SequenceMesh.from_group(dist.group.WORLD)
    return {name: _leaking_layers(name, mesh) for name in architectures}


def _leaking_layers(architecture: str, mesh: SequenceMesh) -> list[str]:
    model = apply_ulysses(zoo_model(architecture), mesh)
    outputs: dict[str, list[torch.Tensor]] = {}
    for name, module, _ in find_mixers(model):
        module.register_forward_hook(
            lambda module, args, out, name=name: outputs.setdefault(name, []).append(
                out[0] if isinstance(out, tuple) else out
            )
        )
    before = _row()
    after = before.clone()
    after[:, CHANGED] = (after[:, CHANGED] + 7) % VOCAB
    others = torch.ones(sum(LENGTHS), dtype=torch.bool)
    others[CHANGED] = False
    for ids in (before, after):
        batch = shard_batch(ids, None, LENGTHS, mesh)
        with torch.no_grad():
            model(**batch.model_inputs())
    found = []
    for name, pair in outputs.items():
        one, other = (unshard(out, batch) for out in pair)
        assert not torch.equal(one[:, ~others], other[:, ~others])
        if not torch.equal(one[:, others], other[:, others]):
            found.append(name)
    assert outputs
    return found


def exchanges_by_kept(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    mesh = SequenceMesh.from_group(dist.group.WORLD)
    kept: tuple[KeptOutput | None, ...] = (None, "both", "kernel", "none")
    return {one or "plain": _exchanges(mesh, one) for one in kept}


def traffic(rank: int, world_size: int, architectures: Sequence[str]) -> dict[str, tuple[int, list[int]]]:
    mesh, start = SequenceMesh.from_group(dist.group.WORLD), exchange._exchanged
    found: dict[str, tuple[int, list[int]]] = {}
    for name in architectures:
        sent: list[int] = []

        def counted(payload_UBLC: torch.Tensor, group: str, sent: list[int] = sent) -> torch.Tensor:
            sent.append(payload_UBLC.numel() - payload_UBLC[mesh.ulysses_rank].numel())
            return start(payload_UBLC, group)

        with mock.patch.object(exchange, "_exchanged", counted):
            exchanges, _ = _exchanges(mesh, "both", name)
        found[name] = (exchanges, sent)
    return found


def sums_by_documents(rank: int, world_size: int, lengths: dict[str, list[int]]) -> dict[str, tuple[list[int], int]]:
    mesh = SequenceMesh.from_group(dist.group.WORLD)
    plain, summed = dist.all_reduce, []

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        summed.append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    found = {}
    for name, documents in lengths.items():
        summed.clear()
        with mock.patch.object(dist, "all_reduce", counted):
            exchanges, _ = _exchanges(mesh, "both", "jamba", documents)
        found[name] = (list(summed), exchanges)
    return found


def _exchanges(
    mesh: SequenceMesh, kept: KeptOutput | None, architecture: str = "qwen3_next", lengths: Sequence[int] = LENGTHS
) -> tuple[int, int]:
    model = checkpointed(apply_ulysses(zoo_model(architecture), mesh), kept)
    sent: list[tuple[int, int]] = []
    with counted_exchanges(sent):
        loss_sum, _ = causal_lm_loss(model, shard_batch(_row(), None, lengths, mesh))
        loss_sum.backward()
    return len(sent), sum(elements for _, elements in sent)
