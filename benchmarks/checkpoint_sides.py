"""Both ways to save and load one ZeRO-3 engine, ours and DeepSpeed's own: what ``bench_checkpoint.py`` times.

Both sides see the same engine in the same processes. DeepSpeed's way to another world size is its universal
checkpoint: ``ds_to_universal`` converts what ``save_checkpoint`` wrote, ``load_checkpoint`` reads what that wrote.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.process_use import FamilyMemory, measured
from ray_ulysses.checkpoint import CheckpointMeta, TorchRankMessenger, load_parts, newest_committed
from ray_ulysses.checkpoint.background import BackgroundSaver, Saved
from ray_ulysses.checkpoint.load import verify_rest
from ray_ulysses.checkpoint.staging import Staging
from ray_ulysses.checkpoint.state import ShardedState, TensorPart
from ray_ulysses.clock import SystemClock
from ray_ulysses.engine.optimizer import parameter_groups
from ray_ulysses.engine.zero import ZeroSettings, zero_config
from ray_ulysses.engine.zero_state import import_state, state_source
from ray_ulysses.storage import Buffer, LocalStore

WAIT_S = 300.0
_DIGEST_ELEMENTS = 2**20
_DIGEST_MODULUS = 2**48
_CONVERSION_WORKERS = {"num_extract_workers": 4, "num_merge_workers": 2}
"""The defaults of DeepSpeed's command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A random Llama and the steps that are trained on it.

    Attributes:
        vocab: Words.
        hidden: Hidden size; heads have 64.
        intermediate: Of the MLP.
        layers: Decoder layers.
        tokens: Of each rank's micro-batch.
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    tokens: int


SIZES = {
    "small": Size(vocab=1024, hidden=128, intermediate=256, layers=2, tokens=16),
    "full": Size(vocab=16_384, hidden=768, intermediate=2048, layers=12, tokens=32),
}


class Trained:
    """A ZeRO-3 engine over all ranks, in bf16 with fp32 master weights and AdamW; every rank must make one."""

    def __init__(self, size: Size) -> None:
        import deepspeed
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        heads = size.hidden // 64
        config = LlamaConfig(
            vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.intermediate,
            num_hidden_layers=size.layers, num_attention_heads=heads, num_key_value_heads=heads,
        )  # fmt: skip
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        settings = ZeroSettings(
            dtype="bf16", accumulation=1, max_grad_norm=1.0, learning_rate=1e-4, betas=(0.9, 0.95), eps=1e-8,
            weight_decay=0.1,
        )  # fmt: skip
        self.engine: Any = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-4, betas=(0.9, 0.95)),
            # The switch is looked at by DeepSpeed's load alone.
            config=zero_config(settings) | {"checkpoint": {"load_universal": True}},
            dist_init_required=False,
        )[0]
        self._size = size

    def step(self) -> float:
        """Train on random tokens and return the seconds; every rank must call."""
        start = time.perf_counter()
        row = torch.randint(0, self._size.vocab, (1, self._size.tokens))
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

    @property
    def weight_decays(self) -> list[float]:
        """Weight decay of each optimizer group."""
        return [group["weight_decay"] for group in self.engine.optimizer.optimizer.param_groups]

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
        for group, weight_decay in zip(inner.param_groups, (0.1, 0.0), strict=True):
            group["weight_decay"] = weight_decay


class NotedStore(LocalStore):
    """A store of files that notes when each creation began and ended."""

    def __init__(self, root: Path | str) -> None:
        super().__init__(root)
        self.creations: dict[str, tuple[float, float]] = {}

    def create(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Write a new file; see `LocalStore`."""
        start = time.perf_counter()
        size = super().create(key, chunks)
        self.creations[Path(key).suffix] = (start, time.perf_counter())
        return size


class OurSaver:
    """Our way to save, as the training loop uses it; every rank must make one."""

    def __init__(self, trained: Trained, folder: Path) -> None:
        self._trained = trained
        self._store = NotedStore(folder)
        self._committed_at = 0.0
        self._staging = Staging(2, torch.device("cpu"))
        self._saver = BackgroundSaver(
            self._store,
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

    @property
    def buffer_bytes(self) -> int:
        """Host memory of the buffers."""
        return self._staging.num_bytes

    def reserve(self) -> None:
        """Make the buffer, as the training loop does after its first step."""
        self._staging.reserve(state_source(self._trained.engine).intervals)

    def begin(self, step: int) -> dict[str, float]:
        """Ask for a save and return how long training stood still for it, this included: finding the state's parts."""
        start, cpu = time.perf_counter(), time.thread_time()
        source = state_source(self._trained.engine)
        found = time.perf_counter()
        meta = CheckpointMeta(sp_size=1, cursor={}, digest="0", tokens=0)
        self._saver.save(step, source, meta, timeout_s=WAIT_S)
        end = time.perf_counter()
        return {
            "asked_at": start, "stall_s": end - start, "source_s": found - start,
            "stall_cpu_s": time.thread_time() - cpu,
        }  # fmt: skip

    def end(self, begun: dict[str, float]) -> dict[str, float]:
        """Wait for the commit and return all that is known of the save."""
        assert self._saver.wait(WAIT_S)
        if self._saver.failure is not None:
            raise self._saver.failure
        wrote = self._store.creations[".safetensors"]
        commit = self._store.creations.get(".json")
        return {
            **{name: value for name, value in begun.items() if name != "asked_at"},
            "save_s": self._committed_at - begun["asked_at"],
            "write_s": wrote[1] - wrote[0],
            # On rank 0: reading its own shard back, and waiting for the other ranks.
            **({} if commit is None else {"check_s": commit[0] - wrote[1], "commit_s": commit[1] - commit[0]}),
        }

    def _saved(self, _: Saved) -> None:
        self._committed_at = time.perf_counter()


def load_ours(trained: Trained, folder: Path) -> tuple[int, int]:
    """Resume from the newest checkpoint as the training loop does.

    Returns:
        Bytes that were read to be loaded, and to be verified alone.
    """
    store, messenger = LocalStore(folder), TorchRankMessenger()
    manifest = messenger.broadcast(newest_committed(store, "sizes").manifest if dist.get_rank() == 0 else None)
    num_bytes: list[int] = []
    loaded: set[str] = set()

    def fill(parts: Any) -> None:
        loaded.update(part.key for part in parts)
        num_bytes.append(load_parts(store, manifest, parts, messenger))

    import_state(trained.engine, manifest.state, fill)
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    return sum(num_bytes), verify_rest(store, manifest, loaded, **place, messenger=messenger)


def convert_theirs(source: Path, target: Path) -> dict[str, float]:
    """Convert what DeepSpeed saved into its universal checkpoint, as its command does, in this process."""
    from deepspeed.checkpoint import ds_to_universal

    options = argparse.Namespace(
        input_folder=str(source), output_folder=str(target), keep_temp_folder=False, strict=True,
        inject_missing_state=False, **_CONVERSION_WORKERS,
    )  # fmt: skip
    with measured() as use, FamilyMemory() as memory:
        ds_to_universal.main(options)
    return {**use, "peak_bytes": float(memory.peak_bytes)}


def _position_sum(part: TensorPart) -> int:
    """Return the sum of an interval's bits, each element times its place in the whole tensor, in 64 bits."""
    bits = part.tensor.detach().view(torch.int16 if part.tensor.element_size() == 2 else torch.int32)
    total = 0
    for start in range(0, bits.numel(), _DIGEST_ELEMENTS):
        chunk = bits[start : start + _DIGEST_ELEMENTS].to(torch.int32)
        places = torch.arange(part.start + start, part.start + start + chunk.numel(), dtype=torch.int32)
        total += int((chunk * (2 * places + 1)).sum(dtype=torch.int64))
    return total
