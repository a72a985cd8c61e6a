"""Processes that hold a GPU's memory, wait for it, or save a state on it; each does one thing and says so."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from ray_ulysses.checkpoint import load_parts, read_manifest
from ray_ulysses.checkpoint.background import BackgroundSaver
from ray_ulysses.checkpoint.messenger import SingleRankMessenger
from ray_ulysses.checkpoint.staging import Staging
from ray_ulysses.checkpoint.state import ShardedState, TensorPart
from ray_ulysses.clock import SystemClock
from ray_ulysses.engine.activation_offload import CudaCopies
from ray_ulysses.parallel.device import choose_device
from ray_ulysses.storage import LocalStore
from ray_ulysses.supervision.child import choose_free_device
from tests.unit.checkpoint.fakes import META, TENSORS, shard_of


def hold(host_gib: int, device_gib: int) -> None:
    """Hold pinned memory and memory of the GPU, as a rank that trains does, until the end."""
    device = torch.device("cuda", 0)
    choose_device(device)
    held = torch.ones(device_gib << 30, dtype=torch.uint8, device=device)
    copies = CudaCopies(host_gib << 30, device)
    copies.wait(copies.copy_out(held[: 1 << 20], (host_gib << 30) - (1 << 20)))
    torch.cuda.synchronize()
    print("held", flush=True)
    time.sleep(600)


def choose(within_s: float) -> None:
    """Wait for the GPU, and say for how long."""
    began = time.monotonic()
    choose_free_device(torch.device("cuda", 0), within_s)
    print(f"{time.monotonic() - began:.2f}", flush=True)


def save_and_load() -> None:
    """Save and load on the second GPU, and say whether the first one was opened."""
    device = torch.device("cuda", 1)
    choose_device(device)
    state = shard_of({key: tensor.to(device) for key, tensor in TENSORS.items()}, 0, 1)
    with tempfile.TemporaryDirectory() as folder:
        store, staging = LocalStore(Path(folder)), Staging(2, device)
        saver = BackgroundSaver(
            store, attempt=1, rank=0, world_size=1, messenger=SingleRankMessenger(), staging=staging,
            clock=SystemClock(),
            on_saved=lambda saved: None, on_failed=lambda step, error: None,
        )  # fmt: skip
        saver.prepare(lambda: staging.reserve(state.intervals))
        saver.save(10, ShardedState(parts=state.parts, description=state.description), META, timeout_s=60)
        assert saver.wait(60) and saver.failure is None, saver.failure
        parts = [TensorPart(key=p.key, start=p.start, tensor=torch.zeros_like(p.tensor)) for p in state.parts]
        load_parts(store, read_manifest(store, 10), parts)
        assert all(torch.equal(part.tensor, TENSORS[part.key].to(device)) for part in parts)
        saver.close(60)
    print(torch._C._cuda_hasPrimaryContext(0), flush=True)


if __name__ == "__main__":
    {"hold": hold, "choose": choose, "save_and_load": save_and_load}[sys.argv[1]](*map(int, sys.argv[2:]))
