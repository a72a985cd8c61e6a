"""Estimates the memory of the training state at each ZeRO stage: weights, gradients, optimizer and copies.

The buffers of DeepSpeed 0.19 are taken from its stage3.py, stage_1_and_2.py and bf16_optimizer.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from ray_ulysses.config import Config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.memory_terms import FP32_BYTES, GIB, MemoryTerm, Phase, always, in_passes, term

_BYTES_PER_VALUE: dict[str, int] = {"bf16": 2, "fp32": 4}
# DeepSpeed 0.19's default of `stage3_max_live_parameters`: weights that may stay gathered for reuse.
_LIVE_PARAMETERS = 1_000_000_000
REDUCE_BUCKET = 50_000_000
"""Gradients reduced at once. DeepSpeed allocates the whole buffer, 2 GiB in fp32 at its default of 5e8, and stage 3
keeps it between passes."""
# DeepSpeed 0.19.8's default of `sub_group_size`: stage 3 updates this many parameters at once, rounded up to a tensor.
_SUB_GROUP = 1_000_000_000
NVME_SUB_GROUP, NVME_BUFFERS = 100_000_000, 4
"""Elements that each rank swaps in at once with NVMe, and the buffers for weights, gradients and two moments."""
_MOMENTS = 2
PEER_COPIES = 2
"""Nodes that keep each rank's part of a state in peer memory: its own node and a partner."""
PEER_STATES = 2
"""States in peer memory at once: the newest committed state, and its successor while it is written."""
_BYTES_PER_S = GIB
"""Rate of copying a worker's part, computing checksums and sending it; measured at about a CPU second per GiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSharing:
    """The sharding of a run's state."""

    stage: Literal[1, 2, 3]
    world_size: int
    value_bytes: int
    """Bytes per weight in the model's precision."""
    offload: Literal["none", "cpu", "nvme"]
    """Where the optimizer's state is stored."""
    host_buffers: int
    """Copies of a rank's state from which checkpoints are written."""
    peer_memory: bool
    """Whether the newest state is also kept in peer memory."""
    offload_param: Literal["none", "cpu"]
    """Where a rank's share of the weights is stored at stage 3."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the sharding of a run on its smallest number of workers."""
        return cls(
            stage=config.zero_stage,
            world_size=config.cluster.workers.min,
            value_bytes=_BYTES_PER_VALUE[config.model.dtype],
            offload=config.memory.offload_optimizer,
            host_buffers=config.checkpoint.host_buffers,
            peer_memory=config.elastic.peer_memory,
            offload_param=config.memory.offload_param,
        )

    @property
    def is_fp32(self) -> bool:
        """Whether the model computes in fp32."""
        return self.value_bytes == FP32_BYTES

    def shard(self, shape: ModelShape) -> int:
        """Return a rank's share of the parameters."""
        return -(-shape.num_parameters // self.world_size)

    def trained(self, shape: ModelShape) -> int:
        """Return a rank's share of the trained parameters."""
        return -(-shape.trained_parameters // self.world_size)

    @property
    def trained_bytes(self) -> int:
        """Bytes of each trained parameter in a checkpoint."""
        return (1 + _MOMENTS) * FP32_BYTES + (0 if self.is_fp32 else self.value_bytes)

    def stored_bytes(self, shape: ModelShape) -> int:
        """Return the bytes of a rank's share in a checkpoint; frozen parameters have only weights."""
        trained = self.trained(shape)
        return trained * self.trained_bytes + (self.shard(shape) - trained) * self.value_bytes

    def stored_words(self, shape: ModelShape) -> str:
        """Return the arithmetic of `stored_bytes` as text."""
        trained = self.trained(shape)
        each = f"{_each(shape, self)} x {self.trained_bytes}"
        if shape.part is None:
            return f"{each} bytes"
        return f"({each} + {self.shard(shape) - trained:,} frozen ones x {self.value_bytes}) bytes"


def device_state(shape: ModelShape, sharing: StateSharing, *, has_device: bool) -> list[MemoryTerm]:
    """Return the state on the device."""
    terms = [_weights(shape, sharing)] if sharing.offload_param == "none" else []
    if sharing.offload == "none":
        terms += [*_optimizer(shape, sharing), _update(shape, sharing, has_device=has_device)]
    gradients = _device_gradients(shape, sharing)
    if gradients is not None:
        terms.append(gradients)
    if sharing.stage == 3:
        terms.append(_gathered(shape, sharing))
    return [*terms, *_unreduced(shape, sharing)]


def host_state(shape: ModelShape, sharing: StateSharing, *, has_device: bool) -> list[MemoryTerm]:
    """Return the state in host memory, in addition to the device's."""
    trained = sharing.trained(shape)
    each = _each(shape, sharing)
    terms = [_weights(shape, sharing)] if sharing.offload_param == "cpu" else []
    if sharing.offload == "cpu":
        terms += _optimizer(shape, sharing)
        terms += _host_gradients(shape, sharing)
        if not has_device:
            # With a device, the update is DeepSpeed's own CPU optimizer, which allocates nothing.
            terms.append(_update(shape, sharing, has_device=False))
    if sharing.offload == "nvme":
        held = min(trained, NVME_SUB_GROUP)
        text = f"{each} x 4 bytes: a step's sums over micro-batches in fp32"
        terms.append(always("gradients, fp32", trained * FP32_BYTES, text))
        text = f"{NVME_BUFFERS} buffers x {held:,} parameters x 4 bytes: the sub-group being updated"
        terms.append(always("buffers for NVMe", NVME_BUFFERS * held * FP32_BYTES, text))
    size, words = sharing.stored_bytes(shape), sharing.stored_words(shape)
    if sharing.host_buffers:
        text = (
            f"{sharing.host_buffers} copies (checkpoint.host_buffers) x {words}: master weights, moments and rounded "
            "weights of this rank's share, copied for writing checkpoints"
        )
        terms.append(always("checkpoints, staged", sharing.host_buffers * size, text))
    if sharing.peer_memory:
        text = (
            f"{PEER_COPIES} x {PEER_STATES} x {words}: per worker, its node keeps two nodes' copies of two states, "
            "one of them being written (elastic.peer_memory)"
        )
        terms.append(always("peer memory", PEER_COPIES * PEER_STATES * size, text))
    return terms


def load_terms(
    shape: ModelShape, init: Literal["pretrained", "random"], sharing: StateSharing
) -> tuple[MemoryTerm, ...]:
    """Return the memory for initial weights on the host and, unless they are partitioned while loading, on the device.

    Only a start without a checkpoint needs this memory.
    """
    count, value = shape.num_parameters, sharing.value_bytes
    if init == "pretrained":
        then = ", then partitions them" if sharing.stage == 3 else ""
        text = f"{count:,} parameters x {value} bytes: at step 0 each rank reads all weights{then}"
        host = term("the model, while it is loaded", count * value, "load", text)
    else:
        text = f"{count:,} parameters x 4 bytes: at step 0 each rank draws the whole model from the seed in fp32"
        host = term("the model, while it is drawn", count * FP32_BYTES, "load", text)
    if sharing.stage < 3:
        flat, what = (count, "the whole model") if shape.part is None else (shape.trained_parameters, "trained weights")
        text = f"({count:,} + {flat:,} parameters) x {value} bytes: DeepSpeed flattens {what} into a copy"
        return host, term("the model, beside its flat copy", (count + flat) * value, "load", text)
    if init == "pretrained":
        return (host,)
    text = f"{count:,} parameters x {value} bytes: at step 0 DeepSpeed moves all to the device, then partitions"
    return host, term("the model, before it is sharded", count * value, "load", text)


def _weights(shape: ModelShape, sharing: StateSharing) -> MemoryTerm:
    count, value = shape.num_parameters, sharing.value_bytes
    if sharing.stage < 3:
        text = f"{count:,} parameters x {value} bytes: ZeRO-{sharing.stage} keeps all on every rank"
        return always("weights, whole", count * value, text)
    text = f"{count:,} parameters / {sharing.world_size} ranks x {value} bytes: ZeRO-3 shards them"
    return always("weights, sharded", sharing.shard(shape) * value, text)


def _optimizer(shape: ModelShape, sharing: StateSharing) -> list[MemoryTerm]:
    shard, each = sharing.trained(shape), _each(shape, sharing)
    master = f"{each} x 4 bytes: the optimizer's own copy, which ZeRO-{sharing.stage} shards"
    return [
        always("master weights, fp32", shard * FP32_BYTES, master),
        always("AdamW moments, fp32", _MOMENTS * shard * FP32_BYTES, f"{each} x 2 x 4 bytes: mean and variance"),
    ]


def _device_gradients(shape: ModelShape, sharing: StateSharing) -> MemoryTerm | None:
    """Return the gradients that are accumulated on the device over the micro-batches of a step."""
    if sharing.stage == 1:
        text = (
            f"{shape.trained_parameters:,} parameters x 4 bytes: a step's sums over micro-batches in fp32, whole on "
            "every rank, because ZeRO-1 does not shard them"
        )
        return always("gradients, fp32", shape.trained_parameters * FP32_BYTES, text)
    # With offload, only ZeRO-2 in bf16 accumulates its share on the device, and copies it at the end of a step.
    if sharing.offload == "none" or (sharing.stage == 2 and not sharing.is_fp32):
        text = f"{_each(shape, sharing)} x 4 bytes: a step's sums over micro-batches in fp32"
        return always("gradients, fp32", sharing.trained(shape) * FP32_BYTES, text)
    return None


def _host_gradients(shape: ModelShape, sharing: StateSharing) -> list[MemoryTerm]:
    """Return the gradients in host memory: those for the optimizer's step, and the accumulated ones."""
    shard, each = sharing.trained(shape), _each(shape, sharing)
    stepped = always("gradients of the step, fp32", shard * FP32_BYTES, f"{each} x 4 bytes: the optimizer's input")
    if sharing.stage == 3 or sharing.is_fp32:
        text = f"{each} x 4 bytes: a step's sums over micro-batches in fp32"
        return [always("gradients, fp32", shard * FP32_BYTES, text), stepped]
    return [stepped]


def _gathered(shape: ModelShape, sharing: StateSharing) -> MemoryTerm:
    working = max(2 * shape.layer_parameters, shape.embedding_parameters)
    live = max(working, min(shape.num_parameters, _LIVE_PARAMETERS))
    text = (
        f"{live:,} parameters x {sharing.value_bytes} bytes: a layer, the prefetched layer, and weights that "
        "DeepSpeed keeps for reuse (stage3_max_live_parameters)"
    )
    return in_passes("weights, gathered", live * sharing.value_bytes, text)


def _update(shape: ModelShape, sharing: StateSharing, *, has_device: bool) -> MemoryTerm:
    """Return the update's temporaries: stage 3 updates sub-group by sub-group, the other stages all at once."""
    each, count, times = _each(shape, sharing), sharing.trained(shape), 1 if has_device else 2
    text = "the square root of the variance" + " and a copy of it" * (not has_device)
    if sharing.stage == 3:
        most = _SUB_GROUP - (-shape.embedding_parameters // sharing.world_size)
        count, times = min(count, most), times + 1
        each, text = f"{count:,} parameters (sub_group_size)", f"a flat copy of the gradients, and {text}"
    return term("temporaries of AdamW", count * times * FP32_BYTES, "update", f"{each} x {times} x 4 bytes: {text}")


def _unreduced(shape: ModelShape, sharing: StateSharing) -> list[MemoryTerm]:
    """Return the gradients that are not yet reduced into the accumulated ones, and DeepSpeed's bucket for them."""
    value, embedding = sharing.value_bytes, shape.embedding_parameters if shape.embedding_is_trained else 0
    # ZeRO-1 reduces what it accumulated in fp32; in bf16 without offload it needs no bucket.
    bucket = FP32_BYTES if sharing.stage == 1 else value
    if sharing.stage == 1 and not sharing.is_fp32 and sharing.offload == "none":
        bucket = 0
    text = f"{embedding:,} x {value} bytes: the embedding's gradient, whole on every rank until it is reduced"
    terms = [in_passes("gradients, before reduction", embedding * value, text)] if embedding else []
    if bucket:
        text = f"{REDUCE_BUCKET:,} x {bucket} bytes: DeepSpeed's bucket (reduce_bucket_size)"
        phase: Phase = "always" if sharing.stage == 3 else "passes"
        terms.append(term("bucket of gradients", REDUCE_BUCKET * bucket, phase, text))
    return terms


def _each(shape: ModelShape, sharing: StateSharing) -> str:
    kind = "trained parameters" if shape.part else "parameters"
    return f"{sharing.trained(shape):,} {kind} per rank (1/{sharing.world_size})"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerMemoryFacts:
    """The cost of peer memory per worker of a run, at its smallest number of workers."""

    kept_bytes: int
    """Memory on the worker's node: two nodes' copies of two states."""
    sent_bytes: int
    """Bytes per state that are sent over the network to the partner node."""
    save_s: float
    """Approximate seconds per save, during training; if steps are longer, every step is kept."""
    limit_gib: float | None
    """Limit of the memory per node; ``None`` for a third of the free memory."""


def peer_memory_facts(config: Config, shape: ModelShape) -> PeerMemoryFacts | None:
    """Return the cost of peer memory, or ``None`` if it is turned off (pure)."""
    if not config.elastic.peer_memory:
        return None
    part_bytes = StateSharing.of(config).stored_bytes(shape)
    return PeerMemoryFacts(
        kept_bytes=PEER_COPIES * PEER_STATES * part_bytes,
        sent_bytes=part_bytes,
        save_s=part_bytes / _BYTES_PER_S,
        limit_gib=config.elastic.peer_memory_gib,
    )
