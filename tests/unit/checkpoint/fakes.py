"""Ranks as threads, and states and stores to plant faults in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from ray_ulysses.checkpoint import (
    CheckpointMeta,
    CheckpointRef,
    ShardedState,
    StateDescription,
    TensorPart,
    TensorSpec,
    save_checkpoint,
)
from ray_ulysses.checkpoint.intervals import partition
from ray_ulysses.checkpoint.state import dtype_name
from ray_ulysses.storage import Store
from tests.stores import FaultyStore, permission_lost

TENSORS = {
    "fp32/a": torch.arange(10, dtype=torch.float32),
    "fp32/b": torch.arange(7, dtype=torch.float32) * 3,
    "frozen/c": torch.arange(5, dtype=torch.bfloat16),
    "fp32/one": torch.ones(1),
}
META = CheckpointMeta(
    sp_size=2, cursor={"next_row": 12}, digest="00000000000000ff", tokens=1200, config_fingerprint="f00d"
)


class ThreadExchange:
    """A `RankMessenger` between threads of one process; one object per rank."""

    def __init__(self, rank: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self._rank, self._barrier, self._slots = rank, barrier, slots

    def _all(self, value: Any) -> list[Any]:
        self._slots[self._rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def gather(self, value: Any) -> list[Any] | None:
        values = self._all(value)
        return values if self._rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        return self._all(value)[0]


def on_ranks(world_size: int, call: Callable[[int, ThreadExchange], Any]) -> list[Any]:
    """Run a call on every rank, each in a thread; return its results or exceptions."""
    barrier, slots = threading.Barrier(world_size, timeout=20), [None] * world_size

    def guarded(rank: int) -> Any:
        try:
            return call(rank, ThreadExchange(rank, barrier, slots))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(guarded, range(world_size)))


def shard_of(tensors: dict[str, torch.Tensor], rank: int, world_size: int) -> ShardedState:
    """Return the part of these tensors that ZeRO-3 assigns to a rank."""
    parts = []
    for key, tensor in tensors.items():
        start, stop = partition(tensor.numel(), world_size, rank)
        parts.append(TensorPart(key=key, start=start, tensor=tensor.reshape(-1)[start:stop].clone()))
    specs = {
        key: TensorSpec(shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype)) for key, tensor in tensors.items()
    }
    return ShardedState(parts=tuple(parts), description=StateDescription(tensors=specs))


def blank_of(tensors: dict[str, torch.Tensor], rank: int = 0, world_size: int = 1) -> list[TensorPart]:
    """Return the parts of a rank with other values, to load into."""
    parts = shard_of(tensors, rank, world_size).parts
    return [replace(part, tensor=torch.full_like(part.tensor, -9)) for part in parts]


def save(
    store: Store, step: int, *, world_size: int = 2, attempt: int = 1, tensors: dict[str, torch.Tensor] = TENSORS,
    stores: dict[int, Store] | None = None, metrics: dict[str, float] | None = None, retry: int = 0,
    obstacles: dict[int, str] | None = None,
) -> list[Any]:  # fmt: skip
    """Save a checkpoint from `world_size` ranks; return each rank's ref or error."""

    def call(rank: int, messenger: ThreadExchange) -> CheckpointRef:
        return save_checkpoint(
            (stores or {}).get(rank, store), step=step, attempt=attempt, rank=rank, world_size=world_size,
            state=shard_of(tensors, rank, world_size), meta=replace(META, metrics=metrics or {}), messenger=messenger,
            retry=retry, obstacle=(obstacles or {}).get(rank),
        )  # fmt: skip

    return on_ranks(world_size, call)


def hiding(store: Store, part: str, error: Exception | None = None) -> FaultyStore:
    """Return a view of a store in which no file can be opened whose key contains this part."""
    error = error or permission_lost()
    return FaultyStore(store, fail_at=1, lasting=True, kinds=("open",), error=error, only=lambda key: part in key)
