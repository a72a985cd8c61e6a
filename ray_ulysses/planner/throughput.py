"""Predicts a step's time from its work and a device's rates, term by term, with arithmetic that can be checked by hand.

The result is a prediction, not a measurement. Compute rates were fitted to sixteen measured steps on one H100
(`benchmarks/results/step_gpu.md`, `recipe_gpu.md`); the predictions match these steps, and a step on an H200, within
10%. Link bandwidths were not fitted. The prediction omits the fixed cost of a micro-batch, stalls for data and
checkpoints, evaluations, and host overhead. The exchange of heads does not overlap with compute. Ring communication,
ZeRO-3 communication, and copies between host and device overlap with compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray_ulysses.config import Config
from ray_ulysses.config.devices import Device
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.layout import ParallelLayout, assign_heads
from ray_ulysses.planner.memory import configured_memory
from ray_ulysses.planner.settings import kept_attention, run_layout, secondary_size

GB = 1e9
_TRAFFIC = ("exchange of heads", "ring", "weights and gradients")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRates:
    """Rates of a device's kernels, as fractions of its dense bf16 peak."""

    matmul: float
    """Fraction that large matrix products reach."""
    attention_forward: float
    """Fraction that causal attention's forward reaches, for long documents and head size 128."""
    attention_backward: float
    """Fraction that causal attention's backward reaches, with twice the forward's FLOPs."""


# Hopper: fitted to benchmarks/results/step_gpu.md, recipe_gpu.md and kernels_gpu.md (cuDNN). Long steps run at the
# device's power limit, so rates are lower than in kernel benchmarks such as FlashAttention-3's
# (https://arxiv.org/abs/2407.08608: causal, head size 128, 16k: 616 TFLOP/s forward), and assumed for devices with
# newer tensor cores and for unknown ones. Ampere: not measured. Attention rates are from FlashAttention-2
# (https://arxiv.org/abs/2307.08691: 189 TFLOP/s forward and backward combined on an A100); matrix products are assumed
# to reach five sixths of the peak. The same is assumed for GPUs whose tensor cores take the same instructions.
_HOPPER = KernelRates(matmul=0.75, attention_forward=0.585, attention_backward=0.43)
_AMPERE = KernelRates(matmul=0.83, attention_forward=0.606, attention_backward=0.606)
_LIKE_AMPERE = ("A100", "A10G", "L40S", "RTX 4090", "RTX 5090")

_LINK_SHARE = 0.8
"""Fraction of a link's bandwidth that a collective of many megabytes reaches (an assumption)."""
_HOST_MEMORY = 25 * GB
"""Host memory bandwidth per rank for the optimizer's update on the host (an assumption)."""
_MEMORY_SHARE = 0.5
"""Fraction of the memory bandwidth that element-wise operations reach (fitted to the measured steps)."""
_SHORT_HEADS = 0.75
"""Attention rate for head sizes below 128, relative to head size 128 (from measured steps with head size 64)."""
_RAMP_TOKENS, _RAMP_HEADS = 2000, 10_000
"""Document length at which attention reaches half of its full rate: ``_RAMP_TOKENS + _RAMP_HEADS / heads per rank``
(fitted to measured kernels with 4 and 32 heads)."""
_LAYER_BYTES_OF_HIDDEN, _LAYER_BYTES_OF_HEADS, _LAYER_BYTES_OF_MLP, _BYTES_OF_LOGITS = 84, 20, 10, 40
"""Bytes that a layer's element-wise operations move in the forward pass: per value of the residual stream (two norms
with fp32 intermediates, 36 each; two sums, 6 each), per value of queries and keys (rotation), and per intermediate MLP
value (activation and product), counted from Transformers' modules in bf16. The last: bytes per logit in both passes."""
_UPDATE_BYTES = 28
"""Bytes per parameter that Adam's update moves: it reads and writes the weight and moments, and reads the gradient."""
_BF16_UPDATE_BYTES, _MUON_UPDATE_BYTES = 516, 52
"""The same for AdamW with bf16 moments, whose hashes and roundings are separate operations, and for Muon's elements
without the orthogonalization. Counted from the operations; not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Work of an average step."""

    tokens: float
    """Number of processed tokens, including padding."""
    squares: float
    """Sum of the squared lengths in tokens of all documents, or of their pieces in rows."""
    rows: int
    imbalance: float
    """Time of the step, divided by its time with perfectly balanced data-parallel groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeTerm:
    """A part of a step's time, with its derivation as text."""

    name: str
    seconds: float
    """Seconds that do not overlap with other work."""
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted time of a step, term by term."""

    device: str
    is_measured: bool
    """Whether predictions for this device were compared with measured steps."""
    source: str
    """Address of the device's data sheet, or the setting that has its figures."""
    terms: tuple[TimeTerm, ...]
    mfu: float
    """Model FLOPs utilization, without recomputation."""
    hfu: float
    """Hardware FLOPs utilization, with recomputation."""

    @property
    def seconds(self) -> float:
        """Total time of the step in seconds."""
        return sum(term.seconds for term in self.terms)

    @property
    def traffic_s(self) -> float:
        """Time of the traffic between ranks that does not overlap with compute, in seconds."""
        return sum(term.seconds for term in self.terms if term.name in _TRAFFIC)

    @property
    def basis(self) -> str:
        """How far the prediction can be trusted, as text."""
        sheet = "predicted from the data sheet, never measured"
        return "predicted, compute within 10% of measured steps" if self.is_measured else sheet


def seconds_text(seconds: float) -> str:
    """Format a predicted time with three significant digits, since it is not more accurate: ``0.483 s``, ``7980 s``."""
    return f"{float(f'{seconds:.3g}'):g} s"


def full_rows(config: Config) -> Work:
    """Return the work of a step in which each row is a single document of ``data.context_tokens`` tokens."""
    rows, context, groups = config.data.rows_per_step, config.data.context_tokens, config.dp_size
    return Work(
        tokens=rows * context, squares=rows * context**2, rows=rows, imbalance=-(-rows // groups) * groups / rows
    )


def not_predicted(config: Config) -> str | None:
    """Return the settings for which no time is predicted, and the way out; None if the settings allow a prediction."""
    if config.cluster.device is None:
        return "without cluster.device; set, for example, cluster.device=H100"
    if config.gpu is None:
        return "on CPUs (cluster.gpus_per_worker=0); set cluster.gpus_per_worker=1"
    if config.model.dtype != "bf16":
        return f"for model.dtype={config.model.dtype}; use bf16"
    is_on_nvme = config.memory.offload_optimizer == "nvme"
    return "for memory.offload_optimizer=nvme; use none or cpu" if is_on_nvme else None


def configured_time(config: Config, shape: ModelShape, work: Work) -> StepTime | None:
    """Predict a step's time on the run's largest number of workers, or return None if the device has no known rates."""
    gpu, layout = config.gpu, run_layout(config, shape)
    if gpu is None or not_predicted(config) is not None or layout.ulysses_size > shape.num_heads:
        return None
    rates, peak = _AMPERE if gpu.name in _LIKE_AMPERE else _HOPPER, gpu.tflops * 1e12
    parts = _Parts(config=config, shape=shape, layout=layout, work=work, gpu=gpu, rates=rates, peak=peak)
    compute = [parts.matmul(), parts.attention(), parts.elementwise()]
    busy_s = sum(term.seconds for term in compute)
    traffic = [parts.exchange(), parts.ring(compute[1].seconds), parts.weights(busy_s), parts.host_copies(busy_s)]
    terms = [term for term in (*compute, *traffic, parts.update(), parts.orthogonalization()) if term.seconds > 0]
    seconds = sum(term.seconds for term in terms)
    could = seconds * layout.world_size * peak
    return StepTime(
        device=gpu.name,
        is_measured=gpu.is_measured and config.optimizer.kind == "adamw",
        source=gpu.source,
        terms=tuple(terms),
        mfu=(parts.matmul_flops(6) + parts.attention_flops(6)) / could,
        hfu=(parts.matmul_flops(parts.passes) + parts.attention_flops(parts.attention_passes)) / could,
    )


def link_bandwidth(config: Config, ranks: int) -> float:
    """Return the bandwidth per rank of a collective over ``ranks`` contiguous ranks, in bytes per second."""
    cluster, gpu = config.cluster, config.gpu
    assert gpu is not None
    link, per_node = gpu.link_gbps * GB, cluster.gpus_per_node
    if ranks > per_node:
        # Traffic between nodes uses the network; traffic within a node uses device links at the same time.
        outside = (ranks - per_node) / (ranks - 1)
        link = min(link / max(1e-9, 1 - outside), cluster.network_gbps * GB / 8 / outside)
    return _LINK_SHARE * link


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    config: Config
    shape: ModelShape
    layout: ParallelLayout
    work: Work
    gpu: Device
    rates: KernelRates
    peak: float

    @property
    def passes(self) -> int:
        """FLOPs per parameter and token in matrix products: 2 forward, 4 backward, and 2 for recomputation if any."""
        return 8 if self.config.memory.gradient_checkpointing else 6

    @property
    def attention_passes(self) -> int:
        """FLOPs per feature and squared token in attention, including recomputation if any."""
        return 8 if self._attends_again else 6

    @property
    def _attends_again(self) -> bool:
        return self.config.memory.gradient_checkpointing and kept_attention(self.config) == "none"

    @property
    def _rank_tokens(self) -> float:
        return self.work.tokens / self.layout.world_size * self.work.imbalance

    @property
    def _micro_batches(self) -> int:
        return -(-self.work.rows // self.layout.dp_size)

    def matmul_flops(self, passes: int) -> float:
        """Return the FLOPs of matrix products on all ranks. The output head is not recomputed.

        Frozen weights save 2 FLOPs per parameter and token, because they have no gradients.
        """
        shape = self.shape
        head = shape.embedding_parameters
        return self.work.tokens * (passes * shape.layer_multiply_adds + 6 * head - 2 * shape.frozen_matrices)

    def attention_flops(self, passes: int) -> float:
        """Return the FLOPs of attention on all ranks."""
        return passes * self.shape.attention_width * self.work.squares

    def matmul(self) -> TimeTerm:
        """Return the time of matrix products."""
        flops = self.matmul_flops(self.passes) / self.layout.world_size * self.work.imbalance
        text = (
            f"{flops:.3g} FLOP per rank ({self.passes} per parameter and token"
            f"{f', {self.passes - 2} if frozen' if self.shape.part else ''}) at {self.rates.matmul:.0%} of "
            f"{self.peak / 1e12:,.0f} TFLOP/s"
        )
        return TimeTerm(name="matrix products", seconds=flops / (self.rates.matmul * self.peak), source=text)

    def attention(self) -> TimeTerm:
        """Return the time of the attention kernels on the rank with the most heads."""
        heads = assign_heads(self.shape.num_heads, self.shape.num_kv_heads, self.layout.ulysses_size)
        level = self.work.imbalance * heads.imbalance / self.layout.world_size
        forward, backward = (self.attention_flops(part) * level for part in (self.attention_passes - 4, 4))
        length, heads_per_rank = self.work.squares / self.work.tokens, self.shape.num_heads / self.layout.ulysses_size
        ramp = length / (length + _RAMP_TOKENS + _RAMP_HEADS / heads_per_rank)
        rates, share = self.rates, ramp * (_SHORT_HEADS if self.shape.head_dim < 128 else 1.0)
        seconds = (forward / rates.attention_forward + backward / rates.attention_backward) / (self.peak * share)
        again = ", recomputed" if self._attends_again else ", not recomputed"
        text = (
            f"{forward + backward:.3g} FLOP per rank, at {rates.attention_forward * share:.0%} of the peak forward and "
            f"{rates.attention_backward * share:.0%} backward{again * self.config.memory.gradient_checkpointing}"
        )
        return TimeTerm(name="attention", seconds=seconds, source=text)

    def elementwise(self) -> TimeTerm:
        """Return the time of norms, rotations, activations and sums, which are limited by memory bandwidth."""
        shape = self.shape
        heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        each = shape.hidden_size * _LAYER_BYTES_OF_HIDDEN + heads * _LAYER_BYTES_OF_HEADS
        each += shape.mlp_width * _LAYER_BYTES_OF_MLP
        times = 4 if self.config.memory.gradient_checkpointing else 3
        per_token = shape.num_layers * each * times + shape.vocab_size * _BYTES_OF_LOGITS
        text = (
            f"{self._rank_tokens:,.0f} tokens per rank x ({shape.num_layers} layers x {each:,} bytes x {times} passes "
            f"+ {shape.vocab_size:,} logits x {_BYTES_OF_LOGITS}), at {_MEMORY_SHARE:.0%} of "
            f"{self.gpu.gbps:,.0f} GB/s"
        )
        seconds = self._rank_tokens * per_token / (_MEMORY_SHARE * self.gpu.gbps * GB)
        return TimeTerm(name="element-wise", seconds=seconds, source=text)

    def exchange(self) -> TimeTerm:
        """Return the time of the all-to-alls of the Ulysses exchange, which do not overlap with compute."""
        ulysses, shape = self.layout.ulysses_size, self.shape
        # Queries, keys and values are exchanged in the forward, in a recomputation, and (their gradients) in the
        # backward. The output and its gradient are exchanged once.
        again = int(self.config.memory.gradient_checkpointing)
        of_queries = 4 + again + (again if kept_attention(self.config) != "both" else 0)
        values = of_queries * shape.num_heads + 2 * (2 + again) * shape.num_kv_heads
        # Half of the exchanged heads (queries and keys) have head_dim features, half (values and outputs) value_dim.
        width = (shape.head_dim + shape.value_dim) / 2
        size = self._rank_tokens * shape.num_layers * values * width * 2 * (ulysses - 1) / ulysses
        text = (
            f"{self._rank_tokens:,.0f} tokens per rank x {shape.num_layers} layers x {values} heads x "
            f"{width:g} x 2 bytes x {ulysses - 1}/{ulysses}"
        )
        return TimeTerm(name="exchange of heads", seconds=size / link_bandwidth(self.config, ulysses), source=text)

    def ring(self, attention_s: float) -> TimeTerm:
        """Return the time by which the ring's communication exceeds the overlapping attention."""
        ring, shape = self.layout.ring_size, self.shape
        # Keys and values circulate in bf16 in the forward and the backward; their gradients circulate in fp32.
        width = shape.num_kv_heads * (shape.head_dim + shape.value_dim)
        size = self._rank_tokens * shape.num_layers * width * (2 + 2 + 4) * (ring - 1)
        cluster, link = self.config.cluster, self.gpu.link_gbps * GB
        if self.layout.sp_size > cluster.gpus_per_node:
            # All ranks wait for the hop between nodes.
            link = min(link, cluster.network_gbps * GB / 8)
        seconds = max(0.0, size / (_LINK_SHARE * link) - attention_s)
        return TimeTerm(name="ring", seconds=seconds, source=f"{size / GB:,.1f} GB per rank, overlapped with attention")

    def weights(self, compute_s: float) -> TimeTerm:
        """Return the time by which gathering weights and reducing gradients exceed the overlapping compute."""
        world, micro_batches, node = self.layout.world_size, self._micro_batches, secondary_size(self.config)
        every, trained = (
            count * (world - 1) / world for count in (self.shape.num_parameters, self.shape.trained_parameters)
        )
        inside = 0.0
        # Weights are sent in bf16, gradients in fp32 (engine/zero.py). In stage 3, DeepSpeed 0.19.8 gathers twice and
        # reduces once per micro-batch. The other stages gather weights once per step and all-reduce gradients, which
        # sends twice as much as a reduce-scatter: stage 2 per micro-batch, stage 1 once per step.
        stage = self.config.zero_stage
        if stage == 3 and node > 1:
            # Secondary shards of trained weights are made by a step's first gather, over the world; those of frozen
            # weights are made once. Every other gather stays within a node.
            size = micro_batches * 4 * trained + 2 * trained
            gathers = 2 * micro_batches * self.shape.num_parameters - self.shape.trained_parameters
            inside = 2 * gathers * (node - 1) / node
        elif stage == 3:
            size = micro_batches * (2 * 2 * every + 4 * trained)
        else:
            size = (micro_batches if stage == 2 else 1) * 2 * 4 * trained + 2 * trained
        # Below stage 3, communication does not overlap with compute (overlap_comm is off).
        is_hidden = stage == 3
        busy_s = size / link_bandwidth(self.config, world) + inside / link_bandwidth(self.config, node)
        seconds = max(0.0, busy_s - compute_s * is_hidden)
        text = f"{size / GB:,.1f} GB per rank{f' and {inside / GB:,.1f} GB within nodes' * (inside > 0)}, "
        text += f"{micro_batches} micro-batches{', overlapped with compute' * is_hidden}"
        return TimeTerm(name="weights and gradients", seconds=seconds, source=text)

    def host_copies(self, compute_s: float) -> TimeTerm:
        """Return the time by which copies between host and device exceed the overlapping pass.

        Copies in both directions run at full bandwidth at the same time.
        """
        memory, world, micro_batches = self.config.memory, self.layout.world_size, self._micro_batches
        kept = weights = gradients = 0.0
        if memory.offload_activations:
            row_tokens = -(-self.config.data.context_tokens // self.layout.sp_size)
            kept = self._rank_tokens * configured_memory(self.config, self.shape).offloaded_bytes / row_tokens
        if memory.offload_param == "cpu":
            weights = micro_batches * 2 * self.shape.num_parameters / world
        if memory.offload_optimizer == "cpu" and self.config.zero_stage == 3:
            # DeepSpeed 0.19.8 stores accumulated gradients on the host and copies them to the device for each sum, even
            # for the first.
            gradients = micro_batches * 4 * self.shape.trained_parameters / world
        forward, backward = max(kept, weights), kept + weights + gradients
        forward_s = compute_s * 2 / self.passes
        host = self.gpu.host_gbps * GB
        late = forward / host - forward_s, backward / host - (compute_s - forward_s)
        text = (
            f"{forward / GB:,.1f} GB per rank in the forward pass and {backward / GB:,.1f} GB in the backward pass, at "
            f"{self.gpu.host_gbps:,.0f} GB/s, overlapped with compute"
        )
        return TimeTerm(name="host copies", seconds=sum(max(0.0, seconds) for seconds in late), source=text)

    def update(self) -> TimeTerm:
        """Return the time of the optimizer's update."""
        world, muon = self.layout.world_size, self.shape.muon
        shard = (self.shape.trained_parameters - (0 if muon is None else muon.parameters)) / world
        each = _BF16_UPDATE_BYTES if self.config.optimizer.kind == "adamw_bf16_moments" else _UPDATE_BYTES
        if self.config.memory.offload_optimizer == "none":
            text, size = f"{shard:,.0f} parameters per rank x {each} bytes of device memory", shard * each
            if muon is not None:
                size += muon.parameters / world * _MUON_UPDATE_BYTES
                text += f", and {muon.parameters / world:,.0f} of Muon x {_MUON_UPDATE_BYTES} bytes"
            return TimeTerm(name="update", seconds=size / (self.gpu.gbps * GB), source=text)
        # Per parameter, 4 bytes of gradient go to the host and 2 bytes of bf16 weight return to the device.
        copies_s, update_s = shard * 6 / (self.gpu.host_gbps * GB), shard * each / _HOST_MEMORY
        text = f"{shard:,.0f} parameters per rank on the host: {each} bytes each at 25 GB/s, 6 bytes copied"
        return TimeTerm(name="update", seconds=copies_s + update_s, source=text)

    def orthogonalization(self) -> TimeTerm:
        """Return the time of Muon's Newton-Schulz steps, and of the exchange of whole matrices."""
        muon, world = self.shape.muon, self.layout.world_size
        if muon is None:
            return TimeTerm(name="orthogonalization", seconds=0.0, source="")
        # Each rank orthogonalizes one matrix of a batch; the last batch may have fewer matrices than ranks.
        batches = -(-muon.matrices // world)
        flops = muon.flops / muon.matrices * batches
        # Matrices and their updates travel in the type of the weights.
        value = 4 if self.config.model.dtype == "fp32" else 2
        size = 2 * value * muon.parameters / world * (world - 1) / world
        text = (
            f"{batches:,} of {muon.matrices:,} matrices per rank, {flops:.3g} FLOP at {self.rates.matmul:.0%} of "
            f"{self.peak / 1e12:,.0f} TFLOP/s; {size / GB:,.1f} GB per rank are exchanged"
        )
        seconds = flops / (self.rates.matmul * self.peak) + size / link_bandwidth(self.config, world)
        return TimeTerm(name="orthogonalization", seconds=seconds, source=text)
