"""The sides of ``bench_checkpoint.py``: a ZeRO-3 engine, and ours, DeepSpeed's and torch's ways to save and load it.

DeepSpeed's way to another world size is its universal checkpoint: ``ds_to_universal`` converts what ``save_checkpoint``
wrote, and ``load_checkpoint`` reads that. torch's is ``async_save`` and ``load`` of its distributed checkpoint. torch
2.13's own staging refuses a local shard that begins inside its storage, as ZeRO's do, so that copy is made here, into
buffers that exist before the first save: its best case.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy

from benchmarks.runner import measured
from ray_ulysses.checkpoint import CheckpointMeta, TorchRankMessenger, load_parts, newest_committed
from ray_ulysses.checkpoint.background import BackgroundSaver, Saved
from ray_ulysses.checkpoint.load import verify_rest
from ray_ulysses.checkpoint.staging import Staging
from ray_ulysses.checkpoint.state import ShardedState, StateDescription, TensorPart
from ray_ulysses.clock import SystemClock
from ray_ulysses.engine.optimizer import parameter_groups
from ray_ulysses.engine.zero import ZeroSettings, zero_config
from ray_ulysses.engine.zero_state import import_state, state_source
from ray_ulysses.storage import LocalStore

WAIT_S = 300.0
_DIGEST_ELEMENTS = 2**20
_DIGEST_MODULUS = 2**48

Size = dict[str, int]
SIZES: dict[str, Size] = {
    "small": {"vocab": 1024, "hidden": 128, "intermediate": 256, "layers": 2, "tokens": 16},
    "full": {"vocab": 16_384, "hidden": 768, "intermediate": 2048, "layers": 12, "tokens": 32},
}
"""A random Llama with heads of 64, and the tokens of each rank's micro-batch."""


class Trained:
    """A ZeRO-3 engine over all ranks, in bf16 with fp32 master weights and AdamW; every rank must make one."""

    def __init__(self, size: Size) -> None:
        import deepspeed
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        heads = size["hidden"] // 64
        config = LlamaConfig(
            vocab_size=size["vocab"], hidden_size=size["hidden"], intermediate_size=size["intermediate"],
            num_hidden_layers=size["layers"], num_attention_heads=heads, num_key_value_heads=heads,
        )  # fmt: skip
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        settings = ZeroSettings(
            dtype="bf16", accumulation=1, max_grad_norm=1.0, learning_rate=1e-4, betas=(0.9, 0.95), eps=1e-8,
            weight_decay=0.1,
        )  # fmt: skip
        self.engine: Any = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-4, betas=(0.9, 0.95)),
            # Only DeepSpeed's load reads the switch.
            config=zero_config(settings) | {"checkpoint": {"load_universal": True}},
            dist_init_required=False,
        )[0]
        self._size = size

    def step(self) -> float:
        """Train on random tokens and return the seconds; every rank must call."""
        start = time.perf_counter()
        row = torch.randint(0, self._size["vocab"], (1, self._size["tokens"]))
        logits = self.engine(input_ids=row, use_cache=False).logits.float()
        self.engine.backward(cross_entropy(logits[0, :-1], row[0, 1:]))
        self.engine.step()
        return time.perf_counter() - start

    @property
    def parts(self) -> tuple[TensorPart, ...]:
        """What this rank holds."""
        state = state_source(self.engine)
        assert isinstance(state, ShardedState)
        return state.parts

    def digest(self) -> int:
        """Return a checksum of the whole state that does not depend on the world size; every rank must call."""
        held = sum(zlib.crc32(part.key.encode()) * _position_sum(part) for part in self.parts)
        total = torch.tensor(held % _DIGEST_MODULUS)
        dist.all_reduce(total)
        return int(total) % _DIGEST_MODULUS

    def forget(self) -> None:
        """Make the state that of an engine that was just built, and wrong, so that what a load leaves out shows."""
        inner = self.engine.optimizer.optimizer
        for flat in self.engine.optimizer.fp32_partitioned_groups_flat:
            flat.data.fill_(0.5)
            inner.state.pop(flat, None)


class OurSaver:
    """Our way to save, as the training loop uses it; every rank must make one."""

    def __init__(self, trained: Trained, folder: Path) -> None:
        self._trained, self._committed_at = trained, 0.0
        self._staging = Staging(2, torch.device("cpu"))
        self._staging.reserve(state_source(trained.engine).intervals)
        self._saver = BackgroundSaver(
            LocalStore(folder),
            attempt=1,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            messenger=TorchRankMessenger(dist.new_group(backend="gloo")),
            staging=self._staging,
            clock=SystemClock(),
            on_saved=self._saved,
            on_failed=lambda *_: None,
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being saved."""
        return self._saver.is_idle

    def begin(self, step: int) -> dict[str, float]:
        """Ask for a save and return how long training stood still for it."""
        start, cpu = time.perf_counter(), time.thread_time()
        meta = CheckpointMeta(sp_size=1, cursor={}, digest="0", tokens=0)
        self._saver.save(step, state_source(self._trained.engine), meta, timeout_s=WAIT_S)
        stall_s, stall_cpu_s = time.perf_counter() - start, time.thread_time() - cpu
        return {"asked_at": start, "stall_s": stall_s, "stall_cpu_s": stall_cpu_s}

    def end(self, begun: dict[str, float]) -> dict[str, float]:
        """Wait for the commit and return what the save took."""
        assert self._saver.wait(WAIT_S)
        if self._saver.failure is not None:
            raise self._saver.failure
        return {**begun, "save_s": self._committed_at - begun["asked_at"]}

    def _saved(self, _: Saved) -> None:
        self._committed_at = time.perf_counter()


def load_ours(trained: Trained, folder: Path) -> None:
    """Resume from the newest checkpoint as the training loop does, every byte verified."""
    store, messenger = LocalStore(folder), TorchRankMessenger()
    manifest = messenger.broadcast(newest_committed(store, "sizes").manifest if dist.get_rank() == 0 else None)
    loaded: set[str] = set()

    def fill(parts: Any) -> None:
        loaded.update(part.key for part in parts)
        load_parts(store, manifest, parts, messenger)

    import_state(trained.engine, manifest.state, fill)
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    verify_rest(store, manifest, loaded, **place, messenger=messenger)


def convert_theirs(source: str, target: str) -> dict[str, float]:
    """Convert what DeepSpeed saved into its universal checkpoint, as its command does by default."""
    from deepspeed.checkpoint import ds_to_universal

    options = argparse.Namespace(
        input_folder=source, output_folder=target, keep_temp_folder=False, strict=True, inject_missing_state=False,
        num_extract_workers=4, num_merge_workers=2,
    )  # fmt: skip
    with measured() as use:
        ds_to_universal.main(options)
    return use


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
    """torch's way to save; every rank must make one."""

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


def _position_sum(part: TensorPart) -> int:
    """Return the sum of an interval's bits, each element times its place in the whole tensor, in 64 bits."""
    bits = part.tensor.detach().view(torch.int16 if part.tensor.element_size() == 2 else torch.int32)
    total = 0
    for start in range(0, bits.numel(), _DIGEST_ELEMENTS):
        chunk = bits[start : start + _DIGEST_ELEMENTS].to(torch.int32)
        places = torch.arange(part.start + start, part.start + start + chunk.numel(), dtype=torch.int32)
        total += int((chunk * (2 * places + 1)).sum(dtype=torch.int64))
    return total
