"""torch's distributed checkpoint as a peer: `async_save` and `load` of the parts that our own side saves and loads.

Each part is a 1-D DTensor over all ranks. torch 2.13's own staging refuses a local shard that begins inside its
storage, as ZeRO's do, so the copy is made here, into buffers that are made before the first save: its best case.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.checkpoint_sides import Trained
from ray_ulysses.checkpoint.state import ShardedState, StateDescription, TensorPart
from ray_ulysses.engine.zero_state import import_state, state_source


class _Staged:
    """Copies the elements into buffers of its own, for `async_save`."""

    should_synchronize_after_execute = False

    def __init__(self, parts: Iterable[TensorPart]) -> None:
        self._buffers = {part.key: torch.zeros_like(part.tensor) for part in parts}

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state's copy."""
        for key, buffer in self._buffers.items():
            buffer.copy_(state[key].to_local())
        return {key: _like(state[key], buffer) for key, buffer in self._buffers.items()}

    def synchronize_staging(self) -> None:
        """Nothing is under way: the copy was made at once."""

    def close(self) -> None:
        """Keep the buffers for the next save."""


class DcpSaver:
    """Its way to save; every rank must make one."""

    def __init__(self, trained: Trained, folder: Path) -> None:
        self._trained, self._folder, self._staged = trained, folder, _Staged(trained.parts)
        self._group = dist.new_group(backend="gloo")
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def save(self) -> dict[str, float]:
        """Save, and return how long training stood still and all took until the files were on the disk."""
        start, cpu = time.perf_counter(), time.thread_time()
        state = state_source(self._trained.engine)
        assert isinstance(state, ShardedState)
        sharded = {part.key: _sharded(part, state.description, self._mesh) for part in state.parts}
        saved: Any = dcp.async_save(
            sharded,
            storage_writer=FileSystemWriter(self._folder, sync_files=True, overwrite=True),
            process_group=self._group,
            async_stager=self._staged,
        )
        stall_s, stall_cpu_s = time.perf_counter() - start, time.thread_time() - cpu
        saved.result()
        return {"stall_s": stall_s, "stall_cpu_s": stall_cpu_s, "save_s": time.perf_counter() - start}


def load_dcp(trained: Trained, description: StateDescription, folder: Path) -> None:
    """Load into an engine of any world size; every rank must call."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def fill(parts: Iterable[TensorPart]) -> None:
        dcp.load({part.key: _sharded(part, description, mesh) for part in parts}, checkpoint_id=folder)

    import_state(trained.engine, description, fill)


def _sharded(part: TensorPart, description: StateDescription, mesh: Any) -> DTensor:
    """Return a part as a shard of its whole tensor."""
    size = description.tensors[part.key].num_elements
    assert part.start == min(mesh.get_local_rank() * -(-size // mesh.size()), size), f"{part.key} is not sharded evenly"
    return DTensor.from_local(part.tensor, mesh, [Shard(0)], run_check=False, shape=torch.Size([size]), stride=(1,))


def _like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
