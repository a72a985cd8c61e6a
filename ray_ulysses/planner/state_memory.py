"""Estimates the memory of the training state at each ZeRO stage: weights, gradients, optimizer state and copies.

Buffers follow DeepSpeed 0.19 (stage3.py, stage_1_and_2.py and bf16_optimizer.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from ray_ulysses.config import Config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.memory_terms import FP32_BYTES, GIB, MemoryTerm, Phase, always, in_passes, term
from ray_ulysses.planner.settings import secondary_size
from ray_ulysses.trained_part import TrainedPart

_BYTES_PER_VALUE: dict[str, int] = {"bf16": 2, "fp32": 4}
# Default of `stage3_max_live_parameters` in DeepSpeed 0.19: number of parameters that may stay gathered for reuse.
_LIVE_PARAMETERS = 1_000_000_000
# Default of `stage3_prefetch_bucket_size` in DeepSpeed 0.19: number of parameters that are prefetched at once.
_PREFETCHED_PARAMETERS = 50_000_000
REDUCE_BUCKET = 50_000_000
"""Number of gradients that are reduced at once. DeepSpeed allocates the complete buffer (2 GiB in fp32 with its default
of 5e8), and stage 3 does not free it between passes."""
# Default of `sub_group_size` in DeepSpeed 0.19.8: stage 3 updates this many parameters at once, in complete tensors.
_SUB_GROUP = 1_000_000_000
NVME_SUB_GROUP, NVME_BUFFERS = 100_000_000, 4
"""Number of elements that a rank swaps in from NVMe at once, and number of buffers (weight, gradient, two moments)."""
BF16_MOMENTS_CHUNK = 1 << 22
"""Number of elements that AdamW with bf16 moments updates at once, which bounds the temporaries."""
_BF16_MOMENTS_BYTES = 34
"""Number of bytes of these temporaries per element: hashes in int64, and new moments in fp32."""
PEER_COPIES = 2
"""Number of nodes that store a rank's part of a state in peer memory: the rank's node and a partner node."""
PEER_STATES = 2
"""Number of states in peer memory: the newest committed state, and the next state while it is being written."""
_BYTES_PER_S = GIB
"""Rate of copying, checksumming and sending a worker's part; measured at about one CPU second per GiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSharing:
    """Settings that determine how a run's training state is sharded and stored."""

    stage: Literal[1, 2, 3]
    world_size: int
    value_bytes: int
    """Number of bytes per weight in the model's precision."""
    offload: Literal["none", "cpu", "nvme"]
    """Storage to which the optimizer state is offloaded."""
    host_buffers: int
    """Number of host copies of a rank's state, from which checkpoints are written."""
    peer_memory: bool
    """Whether the newest state is also kept in peer memory."""
    moments: Literal["fp32", "bf16"]
    """Precision of AdamW's two moments."""
    offload_param: Literal["none", "cpu"]
    """Memory to which a rank's share of the weights is offloaded at stage 3."""
    secondary_size: int
    """Number of ranks of a node that share secondary shards of the weights; 1 if there are none."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the settings for the run's smallest number of workers."""
        return cls(
            stage=config.zero_stage,
            world_size=config.cluster.workers.min,
            value_bytes=_BYTES_PER_VALUE[config.model.dtype],
            offload=config.memory.offload_optimizer,
            host_buffers=config.checkpoint.host_buffers,
            peer_memory=config.elastic.peer_memory,
            moments="bf16" if config.optimizer.kind == "adamw_bf16_moments" else "fp32",
            offload_param=config.memory.offload_param,
            secondary_size=secondary_size(config),
        )

    @property
    def is_fp32(self) -> bool:
        """Whether the model's precision is fp32."""
        return self.value_bytes == FP32_BYTES

    def shard(self, shape: ModelShape) -> int:
        """Return the number of parameters in a rank's share."""
        return -(-shape.num_parameters // self.world_size)

    def trained(self, shape: ModelShape) -> int:
        """Return the number of trained parameters in a rank's share."""
        return -(-shape.trained_parameters // self.world_size)

    def by_muon(self, shape: ModelShape) -> int:
        """Return the number of parameters in a rank's share that Muon trains."""
        return 0 if shape.muon is None else -(-shape.muon.parameters // self.world_size)

    @property
    def moment_bytes(self) -> int:
        """Number of bytes of AdamW's moments per parameter."""
        return 2 * _BYTES_PER_VALUE[self.moments]

    @property
    def trained_bytes(self) -> int:
        """Number of bytes in a checkpoint per parameter that AdamW trains."""
        return FP32_BYTES + self.moment_bytes + (0 if self.is_fp32 else self.value_bytes)

    def stored_bytes(self, shape: ModelShape) -> int:
        """Return the number of bytes of a rank's share in a checkpoint. Frozen parameters have no optimizer state."""
        trained = self.trained(shape) * self.trained_bytes - self.by_muon(shape) * FP32_BYTES
        return trained + self.stored_frozen(shape) * self.value_bytes

    def stored_frozen(self, shape: ModelShape) -> int:
        """Return the number of frozen parameters of a rank's share in a checkpoint. A quantized base is not stored."""
        is_quantized = shape.part is not None and shape.part.quantized > 0
        return 0 if is_quantized else self.shard(shape) - self.trained(shape)

    def weight_bytes(self, shape: ModelShape) -> int:
        """Return the number of bytes of all weights, of which some may be quantized."""
        plain = shape.num_parameters * self.value_bytes
        return plain if shape.part is None else plain - self._saved_bytes(shape.part)

    def layer_bytes(self, shape: ModelShape) -> int:
        """Return the number of bytes of a layer's weights."""
        plain = shape.layer_parameters * self.value_bytes
        return plain if shape.part is None else plain - self._saved_bytes(shape.part) // shape.num_layers

    def _saved_bytes(self, part: TrainedPart) -> int:
        return part.quantized * self.value_bytes - part.packed_bytes

    def stored_words(self, shape: ModelShape) -> str:
        """Return the derivation of `stored_bytes` as text."""
        each = f"{_each(shape, self)} x {self.trained_bytes}"
        if shape.muon is not None:
            each += f" - {self.by_muon(shape):,} that Muon trains x {FP32_BYTES}"
        if shape.part is None:
            return f"{each} bytes" if shape.muon is None else f"({each}) bytes"
        return f"({each} + {self.stored_frozen(shape):,} frozen parameters x {self.value_bytes}) bytes"


def device_state(shape: ModelShape, sharing: StateSharing, *, has_device: bool, is_tiled: bool) -> list[MemoryTerm]:
    """Return the memory terms of the training state on the device. ``is_tiled``: whether MLPs run over tiles."""
    terms = [_weights(shape, sharing)] if sharing.offload_param == "none" else []
    if sharing.secondary_size > 1:
        text = (
            f"({_weight_words(shape, sharing)}) / {sharing.secondary_size} ranks of a node "
            "(memory.zero_secondary=node), on more than one node"
        )
        terms.append(always("weights, secondary", -(-sharing.weight_bytes(shape) // sharing.secondary_size), text))
    if sharing.offload == "none":
        update = _update(shape, sharing, has_device=has_device)
        terms += [*_optimizer(shape, sharing), *([update] if update.bytes else [])]
    gradients = _device_gradients(shape, sharing)
    if gradients is not None:
        terms.append(gradients)
    # A single rank uses its shard in place.
    if sharing.stage == 3 and (sharing.world_size > 1 or sharing.offload_param != "none"):
        terms.append(_gathered(shape, sharing))
    if shape.part is not None and shape.part.quantized:
        terms.append(_dequantized(shape.part, sharing, is_tiled=is_tiled))
    return [*terms, *_unreduced(shape, sharing)]


def host_state(shape: ModelShape, sharing: StateSharing, *, has_device: bool) -> list[MemoryTerm]:
    """Return the memory terms of the training state in host memory."""
    trained = sharing.trained(shape)
    each = _each(shape, sharing)
    terms = [_weights(shape, sharing)] if sharing.offload_param == "cpu" else []
    if sharing.offload == "cpu":
        terms += _optimizer(shape, sharing)
        terms += _host_gradients(shape, sharing)
        if not has_device:
            # With a device, DeepSpeed's CPU optimizer runs the update, without temporaries.
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
            "weights of this rank's share, from which checkpoints are written"
        )
        terms.append(always("checkpoints, staged", sharing.host_buffers * size, text))
    if sharing.peer_memory:
        text = (
            f"{PEER_COPIES} x {PEER_STATES} x {words}: per worker, a node stores its own and its partner's part of two "
            "states, one of which is being written (elastic.peer_memory)"
        )
        terms.append(always("peer memory", PEER_COPIES * PEER_STATES * size, text))
    return terms


def load_terms(
    shape: ModelShape, init: Literal["pretrained", "random"], sharing: StateSharing
) -> tuple[MemoryTerm, ...]:
    """Return the memory terms of loading initial weights, on the host and on the device.

    This memory is needed only if a run starts without a checkpoint.
    """
    count, value = shape.num_parameters, sharing.value_bytes
    total, words = sharing.weight_bytes(shape), _weight_words(shape, sharing)
    if init == "pretrained" and sharing.stage == 3:
        most = _largest_tensor(shape)
        text = f"{most:,} parameters x {value} bytes: at step 0 each rank reads and converts one tensor at a time"
        host = term("a tensor, while it is loaded", most * value, "load", text)
        text = f"{most:,} parameters x {value} bytes: at step 0 each rank sends the others their shares of one tensor"
        return host, term("a tensor, before it is sharded", most * value, "load", text)
    if init == "pretrained":
        text = f"{words}: at step 0 each rank reads all weights"
        host = term("the model, while it is loaded", total, "load", text)
    else:
        text = f"{count:,} parameters x 4 bytes: at step 0 each rank initializes the complete model in fp32"
        host = term("the model, while it is drawn", count * FP32_BYTES, "load", text)
    if sharing.stage < 3:
        flat, what = (count, "the whole model") if shape.part is None else (shape.trained_parameters, "trained weights")
        text = f"{words} + {flat:,} parameters x {value} bytes: DeepSpeed flattens {what} into a copy"
        return host, term("the model, beside its flat copy", total + flat * value, "load", text)
    text = f"{words}: at step 0 DeepSpeed moves all weights to the device, then partitions"
    return host, term("the model, before it is sharded", total, "load", text)


def _largest_tensor(shape: ModelShape) -> int:
    """Return the number of elements in the model's largest tensor: the embedding, an MLP matrix or stacked experts."""
    experts = shape.experts
    matrix = shape.hidden_size * shape.intermediate_size
    stacked = 0 if experts is None else experts.count * 2 * experts.width * shape.hidden_size
    return max(shape.embedding_parameters, matrix, stacked)


def _weights(shape: ModelShape, sharing: StateSharing) -> MemoryTerm:
    total, text = sharing.weight_bytes(shape), _weight_words(shape, sharing)
    if sharing.stage < 3:
        return always("weights, whole", total, f"{text}: with ZeRO-{sharing.stage}, every rank has all weights")
    text = f"({text}) / {sharing.world_size} ranks: ZeRO-3 shards them"
    return always("weights, sharded", -(-total // sharing.world_size), text)


def _weight_words(shape: ModelShape, sharing: StateSharing) -> str:
    """Return the derivation of `StateSharing.weight_bytes` as text."""
    part, value = shape.part, sharing.value_bytes
    if part is None or not part.quantized:
        return f"{shape.num_parameters:,} parameters x {value} bytes"
    plain = f"{shape.num_parameters - part.quantized:,} parameters x {value} bytes"
    return f"{plain} + {part.packed_bytes:,} bytes of {part.quantized:,} quantized ones"


def _dequantized(part: TrainedPart, sharing: StateSharing, *, is_tiled: bool) -> MemoryTerm:
    count, value = part.largest_tiled if is_tiled else part.largest_quantized, sharing.value_bytes
    what = "one MLP, for all of its tiles" if is_tiled else "one linear layer or of a layer's experts, while it is used"
    text = f"{count:,} parameters x {value} bytes: the quantized weights of {what}"
    return in_passes("weights, dequantized", count * value, text)


def _optimizer(shape: ModelShape, sharing: StateSharing) -> list[MemoryTerm]:
    shard, each = sharing.trained(shape), _each(shape, sharing)
    master = f"{each} x 4 bytes: the optimizer's own copy, which ZeRO-{sharing.stage} shards"
    muon, value = sharing.by_muon(shape), sharing.moment_bytes // 2
    of_adamw = each if shape.muon is None else f"{shard - muon:,} parameters per rank (1/{sharing.world_size})"
    of_muon = f"{muon:,} parameters per rank (1/{sharing.world_size})"
    terms = [
        always("master weights, fp32", shard * FP32_BYTES, master),
        always(
            f"AdamW moments, {sharing.moments}",
            2 * (shard - muon) * value,
            f"{of_adamw} x 2 x {value} bytes: mean and variance",
        ),
        always("Muon momentum, fp32", muon * FP32_BYTES, f"{of_muon} x 4 bytes: momentum of weight matrices"),
    ]
    return [one for one in terms if one.bytes]


def _device_gradients(shape: ModelShape, sharing: StateSharing) -> MemoryTerm | None:
    if sharing.stage == 1:
        text = (
            f"{shape.trained_parameters:,} parameters x 4 bytes: a step's sums over micro-batches in fp32, which "
            "ZeRO-1 does not shard"
        )
        return always("gradients, fp32", shape.trained_parameters * FP32_BYTES, text)
    # With offload, only ZeRO-2 in bf16 accumulates gradients on the device and copies them at the end of a step.
    if sharing.offload == "none" or (sharing.stage == 2 and not sharing.is_fp32):
        text = f"{_each(shape, sharing)} x 4 bytes: a step's sums over micro-batches in fp32"
        return always("gradients, fp32", sharing.trained(shape) * FP32_BYTES, text)
    return None


def _host_gradients(shape: ModelShape, sharing: StateSharing) -> list[MemoryTerm]:
    shard, each = sharing.trained(shape), _each(shape, sharing)
    stepped = always("gradients of the step, fp32", shard * FP32_BYTES, f"{each} x 4 bytes: the optimizer's input")
    if sharing.stage == 3 or sharing.is_fp32:
        text = f"{each} x 4 bytes: a step's sums over micro-batches in fp32"
        return [always("gradients, fp32", shard * FP32_BYTES, text), stepped]
    return [stepped]


def _gathered(shape: ModelShape, sharing: StateSharing) -> MemoryTerm:
    value = sharing.value_bytes
    # Packed bytes are stored, and counted by DeepSpeed, as parameters of the model's dtype.
    layer = sharing.layer_bytes(shape) // value
    working = max(2 * layer, shape.embedding_parameters)
    live = max(working, min(sharing.weight_bytes(shape) // value, _LIVE_PARAMETERS))
    # Parameters gathered together are received in one buffer, and copied from it. Experts are gathered at once.
    received = min(live, max(_PREFETCHED_PARAMETERS, layer if shape.experts else 0))
    text = (
        f"({live:,} + {received:,}) parameters x {value} bytes: a layer, the prefetched layer, and weights that stay "
        "gathered for reuse (stage3_max_live_parameters); and the buffer in which prefetched weights are received"
    )
    return in_passes("weights, gathered", (live + received) * value, text)


def _update(shape: ModelShape, sharing: StateSharing, *, has_device: bool) -> MemoryTerm:
    """Return the memory term for the optimizer update's temporaries. Only stage 3 updates one sub-group at a time."""
    muon, most = sharing.by_muon(shape), _SUB_GROUP - (-shape.embedding_parameters // sharing.world_size)
    # On a device, the update is fused.
    each, count, times = _each(shape, sharing), sharing.trained(shape) - muon, 0 if has_device else 2
    if muon:
        each = f"{count:,} parameters per rank that AdamW trains"
    what = [] if has_device else ["the square root of the variance and a copy of it"]
    if sharing.moments == "bf16":
        largest = -(-_largest_tensor(shape) // (sharing.world_size if sharing.stage == 3 else 1))
        chunk = min(count, largest, BF16_MOMENTS_CHUNK)
        size, text = chunk * _BF16_MOMENTS_BYTES, f"{chunk:,} parameters at once x {_BF16_MOMENTS_BYTES} bytes"
        if sharing.stage == 3:
            count = min(count, most)
            size, text = size + count * FP32_BYTES, f"{text}, and a flat copy of {count:,} gradients (sub_group_size)"
        return term("temporaries of AdamW", size, "update", text)
    if sharing.stage == 3:
        count, times = min(count, most), times + 1
        each, what = f"{count:,} parameters (sub_group_size)", ["a flat copy of the gradients", *what]
    text = f"{each} x {times} x 4 bytes: {', and '.join(what)}"
    adamw = term("temporaries of AdamW", count * times * FP32_BYTES, "update", text)
    if shape.muon is None:
        return adamw
    working = shape.muon.working_elements
    size, text = working * sharing.value_bytes, f"{working:,} elements x {sharing.value_bytes} bytes for one matrix"
    if sharing.stage == 3:
        copied = min(muon, most)
        size, text = size + copied * FP32_BYTES, f"{text}, and a flat copy of {copied:,} gradients (sub_group_size)"
    # Muon and AdamW update their parameters one after the other.
    return max(adamw, term("temporaries of Muon", size, "update", text), key=lambda one: one.bytes)


def _unreduced(shape: ModelShape, sharing: StateSharing) -> list[MemoryTerm]:
    value, embedding = sharing.value_bytes, shape.embedding_parameters if shape.embedding_is_trained else 0
    # ZeRO-1 reduces the accumulated fp32 gradients (in bf16 without offload, it needs no bucket), and ZeRO-3 in fp32.
    bucket = value if sharing.stage == 2 else FP32_BYTES
    if sharing.stage == 1 and not sharing.is_fp32 and sharing.offload == "none":
        bucket = 0
    text = f"{embedding:,} x {value} bytes: the embedding's gradient, not sharded until it is reduced"
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
    """Cost of peer memory per worker, for the run's smallest number of workers."""

    kept_bytes: int
    """Peer memory per worker of a node, in bytes: two states, each stored for this node and for another node."""
    sent_bytes: int
    """Bytes sent over the network to the partner node per state."""
    save_s: float
    """Approximate seconds per save, concurrent with training. If steps take longer, every step is saved."""
    limit_gib: float | None
    """Limit on peer memory per node in GiB. None means a third of the free memory."""


def peer_memory_facts(config: Config, shape: ModelShape) -> PeerMemoryFacts | None:
    """Return the cost of peer memory, or None if ``elastic.peer_memory`` is false."""
    if not config.elastic.peer_memory:
        return None
    part_bytes = StateSharing.of(config).stored_bytes(shape)
    return PeerMemoryFacts(
        kept_bytes=PEER_COPIES * PEER_STATES * part_bytes,
        sent_bytes=part_bytes,
        save_s=part_bytes / _BYTES_PER_S,
        limit_gib=config.elastic.peer_memory_gib,
    )
