"""The process groups of a child on a GPU: their communicators exist before the first collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_ulysses.parallel.layout import ParallelLayout
from ray_ulysses.parallel.mesh import SequenceMesh
from ray_ulysses.supervision.child import backend_of

DEVICE = torch.device("cuda:0")


@pytest.fixture
def world() -> Iterator[None]:
    torch.cuda.set_device(DEVICE)
    dist.init_process_group(**backend_of(DEVICE), store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_communicators_are_there_once_the_groups_are(world: None) -> None:
    # The groups of an attempt's own exchanges are made between them.
    small = dist.new_group(backend="gloo")
    mesh = SequenceMesh.from_layout(ParallelLayout(world_size=1, sp_size=1))
    for group in (dist.group.WORLD, mesh.group("sp"), mesh.group("dp")):
        backend: Any = group._get_backend(DEVICE)
        assert backend._is_initialized()
    total = torch.ones(1)
    dist.all_reduce(total, group=small)
    assert total.item() == 1
