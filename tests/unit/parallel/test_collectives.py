"""Canaries for what the collectives take from torch's insides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ray_ulysses.parallel.collectives import BlockExchange


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_strided_view_is_not_sent(group: dist.ProcessGroup) -> None:
    """gloo would silently read or write elsewhere."""
    with pytest.raises(AssertionError):
        BlockExchange([torch.arange(8.0)[::2]], [torch.zeros(4)], group)
    with pytest.raises(AssertionError):
        BlockExchange([torch.arange(4.0)], [torch.zeros(8)[::2]], group)


def test_the_own_block_is_not_sent(group: dist.ProcessGroup) -> None:
    received = torch.zeros(4)
    BlockExchange([torch.arange(4.0)], [received], group).wait()
    assert received.tolist() == [0, 0, 0, 0]
