"""Predicts the time of a step from its work and the rates of a device, term by term, with arithmetic to check by hand.

It is a model and not a measurement. Compute was fitted to sixteen measured steps on one H100
(`benchmarks/results/step_gpu.md`, `recipe_gpu.md`), which it matches within 10%, and so it does a step on an H200.
Links were not fitted. It leaves out the fixed cost of a micro-batch, stalls of the data stream and of checkpoints,
evaluations, and all host overhead. The exchange of a layer's heads is not hidden behind compute. Ring blocks, weights
and gradients of ZeRO-3, and copies to and from the host are hidden, as far as there is enough compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ray_ulysses.config import Config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.layout import ParallelLayout, assign_heads
from ray_ulysses.planner.flops import peak_bf16_flops
from ray_ulysses.planner.memory import configured_memory
from ray_ulysses.planner.settings import kept_attention, run_layout

GB = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRates:
    """Rates of a device."""

    matmul: float
    """Share of the dense bf16 peak that large matrix products reach."""
    attention_forward: float
    """Share of the peak that the forward kernel of causal attention reaches, for long documents and heads of 128."""
    attention_backward: float
    """The same for the backward kernel, whose work is counted as twice the forward's."""
    memory: float
    """Memory bandwidth, in bytes per second."""
    link: float
    """Bandwidth to another device of the node in one direction, in bytes per second."""
    host: float
    """Bandwidth between host and device in one direction, in bytes per second."""


# Hopper: fitted to benchmarks/results/step_gpu.md, recipe_gpu.md and kernels_gpu.md (cuDNN). Steps of minutes run at
# the device's power limit, slower than kernels timed alone; FlashAttention-3 reports a little more
# (https://arxiv.org/abs/2407.08608: causal, heads of 128, 16k: 616 TFLOP/s forward). Ampere was not measured here: its
# rates are FlashAttention-2's (https://arxiv.org/abs/2307.08691: 189 TFLOP/s forward and backward together), and five
# sixths of the peak for matrix products. Bandwidths are from the vendors' data sheets, for links in one direction.
_HOPPER = DeviceRates(
    matmul=0.75, attention_forward=0.585, attention_backward=0.43, memory=3350 * GB, link=450 * GB, host=64 * GB
)
_AMPERE = DeviceRates(
    matmul=0.83, attention_forward=0.606, attention_backward=0.606, memory=2039 * GB, link=300 * GB, host=32 * GB
)
DEVICE_RATES: dict[str, DeviceRates] = {
    "A100": _AMPERE,
    "H100": _HOPPER,
    "H200": replace(_HOPPER, memory=4800 * GB),
}
"""Devices with published kernel rates, in their SXM form, by the names of `cluster.device`."""

_LINK_SHARE = 0.8
"""Share of a link's bandwidth that a collective of many megabytes reaches: an assumption."""
_HOST_MEMORY = 25 * GB
"""Host memory bandwidth per rank for the optimizer's update there: an assumption."""
_MEMORY_SHARE = 0.5
"""Share of the memory bandwidth that element-wise operations reach: fitted to the measured steps."""
_SHORT_HEADS = 0.75
"""Rate of attention with heads narrower than 128, relative to heads of 128: from measured steps with heads of 64."""
_RAMP_TOKENS, _RAMP_HEADS = 2000, 10_000
"""Document length at which attention reaches half of its rate: this number of tokens, and more if few heads per rank
keep the device busy; fitted to the measured kernels with 4 and 32 heads."""
_LAYER_BYTES_OF_HIDDEN, _LAYER_BYTES_OF_HEADS, _LAYER_BYTES_OF_MLP, _BYTES_OF_LOGITS = 84, 20, 10, 40
"""Bytes moved by a layer's element-wise operations in the forward pass, for each value of the residual stream (two
norms, 36 each, in fp32 inside; two sums, 6 each), of queries and keys (the rotation), and of the MLP's width (the
activation and the product), counted from Transformers' modules in bf16; and bytes moved per logit in both passes."""
_UPDATE_BYTES = 28
"""Bytes moved per parameter by Adam's update: weight and moments read and written in fp32, and the gradient read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The mean work of a step."""

    tokens: float
    """Computed tokens, including padding."""
    squares: float
    """Sum over the pieces of documents of the squared length in tokens."""
    rows: int
    imbalance: float
    """Time of the step relative to balanced data-parallel groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeTerm:
    """One part of a step's time."""

    name: str
    seconds: float
    """Time that is not hidden behind other work."""
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The modelled time of a step."""

    device: str
    terms: tuple[TimeTerm, ...]
    mfu: float
    """Model FLOPs divided by the devices' peak FLOPs in that time, without recomputation."""
    hfu: float
    """The same including recomputation."""

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(term.seconds for term in self.terms)


def full_rows(config: Config) -> Work:
    """Return the work of a step in which each row is one document of the whole context."""
    rows, context, groups = config.data.rows_per_step, config.data.context_tokens, config.dp_size
    return Work(
        tokens=rows * context, squares=rows * context**2, rows=rows, imbalance=-(-rows // groups) * groups / rows
    )


def configured_time(config: Config, shape: ModelShape, work: Work) -> StepTime | None:
    """Return a step's time on the run's largest number of workers; ``None`` without a device or if not modelled."""
    cluster, layout = config.cluster, run_layout(config, shape)
    is_modelled = config.model.dtype == "bf16" and layout.ulysses_size <= shape.num_heads
    is_on_nvme = config.memory.offload_optimizer == "nvme"
    if cluster.device is None or cluster.gpus_per_worker == 0 or is_on_nvme or not is_modelled:
        return None
    rates, peak = DEVICE_RATES[cluster.device], peak_bf16_flops(cluster.device)
    assert peak is not None
    parts = _Parts(config=config, shape=shape, layout=layout, work=work, rates=rates, peak=peak)
    compute = [parts.matmul(), parts.attention(), parts.elementwise()]
    busy_s = sum(term.seconds for term in compute)
    traffic = [parts.exchange(), parts.ring(compute[1].seconds), parts.weights(busy_s), parts.host_copies(busy_s)]
    terms = [term for term in (*compute, *traffic, parts.update()) if term.seconds > 0]
    seconds = sum(term.seconds for term in terms)
    could = seconds * layout.world_size * peak
    return StepTime(
        device=cluster.device,
        terms=tuple(terms),
        mfu=(parts.matmul_flops(6) + parts.attention_flops(6)) / could,
        hfu=(parts.matmul_flops(parts.passes) + parts.attention_flops(parts.attention_passes)) / could,
    )


def link_bandwidth(config: Config, ranks: int) -> float:
    """Return a rank's bytes per second in a collective over ``ranks`` contiguous ranks of ``cluster.device``."""
    cluster = config.cluster
    assert cluster.device is not None
    link, per_node = DEVICE_RATES[cluster.device].link, cluster.gpus_per_node
    if ranks > per_node:
        # Traffic to other nodes uses the network, and the rest uses links at the same time.
        outside = (ranks - per_node) / (ranks - 1)
        link = min(link / max(1e-9, 1 - outside), cluster.network_gbps * GB / 8 / outside)
    return _LINK_SHARE * link


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """The arithmetic of each part."""

    config: Config
    shape: ModelShape
    layout: ParallelLayout
    work: Work
    rates: DeviceRates
    peak: float

    @property
    def passes(self) -> int:
        """FLOPs per multiplied parameter and token: 2 forward, 4 backward, and 2 if layers are recomputed."""
        return 8 if self.config.memory.gradient_checkpointing else 6

    @property
    def attention_passes(self) -> int:
        """FLOPs per squared token and feature, likewise."""
        return 8 if self._attends_again else 6

    @property
    def _attends_again(self) -> bool:
        return self.config.memory.gradient_checkpointing and kept_attention(self.config) == "none"

    @property
    def _rank_tokens(self) -> float:
        """Tokens of a step per rank, on the slowest data-parallel group."""
        return self.work.tokens / self.layout.world_size * self.work.imbalance

    @property
    def _micro_batches(self) -> int:
        return -(-self.work.rows // self.layout.dp_size)

    def matmul_flops(self, passes: int) -> float:
        """Return the FLOPs of all ranks outside attention; the output head is not recomputed.

        Frozen weights have no gradients, which would take 2 per parameter and token.
        """
        shape = self.shape
        head = shape.embedding_parameters
        return self.work.tokens * (passes * shape.layer_multiply_adds + 6 * head - 2 * shape.frozen_matrices)

    def attention_flops(self, passes: int) -> float:
        """Return the FLOPs of all ranks in attention; the causal mask halves them."""
        return passes * self.shape.attention_width * self.work.squares

    def matmul(self) -> TimeTerm:
        """Return the time of the matrix products."""
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
        rates, share = self.rates, self._attention_share()
        seconds = (forward / rates.attention_forward + backward / rates.attention_backward) / (self.peak * share)
        again = ", recomputed" if self._attends_again else ", not recomputed"
        text = (
            f"{forward + backward:.3g} FLOP per rank, at {rates.attention_forward * share:.0%} of the peak forward and "
            f"{rates.attention_backward * share:.0%} backward{again * self.config.memory.gradient_checkpointing}"
        )
        return TimeTerm(name="attention", seconds=seconds, source=text)

    def _attention_share(self) -> float:
        """Return the share of the highest rate that attention reaches with these documents and heads."""
        length, heads = self.work.squares / self.work.tokens, self.shape.num_heads / self.layout.ulysses_size
        ramp = length / (length + _RAMP_TOKENS + _RAMP_HEADS / heads)
        return ramp * (_SHORT_HEADS if self.shape.head_dim < 128 else 1.0)

    def elementwise(self) -> TimeTerm:
        """Return the time of norms, rotations, activations and sums, which are bound by memory bandwidth."""
        shape = self.shape
        heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        each = (
            shape.hidden_size * _LAYER_BYTES_OF_HIDDEN
            + heads * _LAYER_BYTES_OF_HEADS
            + shape.mlp_width * _LAYER_BYTES_OF_MLP
        )
        times = 4 if self.config.memory.gradient_checkpointing else 3
        per_token = shape.num_layers * each * times + shape.vocab_size * _BYTES_OF_LOGITS
        text = (
            f"{self._rank_tokens:,.0f} tokens per rank x ({shape.num_layers} layers x {each:,} bytes x {times} passes "
            f"+ {shape.vocab_size:,} logits x {_BYTES_OF_LOGITS}), at {_MEMORY_SHARE:.0%} of "
            f"{self.rates.memory / GB:,.0f} GB/s"
        )
        seconds = self._rank_tokens * per_token / (_MEMORY_SHARE * self.rates.memory)
        return TimeTerm(name="element-wise", seconds=seconds, source=text)

    def exchange(self) -> TimeTerm:
        """Return the time of the all-to-alls over heads and sequence, which are not hidden."""
        ulysses, shape = self.layout.ulysses_size, self.shape
        # Queries, keys and values, again if they are recomputed, and their gradients; the output and its gradient.
        again = int(self.config.memory.gradient_checkpointing)
        of_queries = 4 + again + (again if kept_attention(self.config) != "both" else 0)
        values = of_queries * shape.num_heads + 2 * (2 + again) * shape.num_kv_heads
        # The mean width, since there are as many queries and keys as values and outputs.
        width = (shape.head_dim + shape.value_dim) / 2
        size = self._rank_tokens * shape.num_layers * values * width * 2 * (ulysses - 1) / ulysses
        text = (
            f"{self._rank_tokens:,.0f} tokens per rank x {shape.num_layers} layers x {values} heads x "
            f"{width:g} x 2 bytes x {ulysses - 1}/{ulysses}"
        )
        return TimeTerm(name="exchange of heads", seconds=size / link_bandwidth(self.config, ulysses), source=text)

    def ring(self, attention_s: float) -> TimeTerm:
        """Return the time by which sending the ring's blocks exceeds attention over them."""
        ring, shape = self.layout.ring_size, self.shape
        # Keys and values in bf16 forward and backward, and the gradients of both in fp32.
        width = shape.num_kv_heads * (shape.head_dim + shape.value_dim)
        size = self._rank_tokens * shape.num_layers * width * (2 + 2 + 4) * (ring - 1)
        seconds = max(0.0, size / link_bandwidth(self.config, self.layout.sp_size) - attention_s)
        return TimeTerm(name="ring", seconds=seconds, source=f"{size / GB:,.1f} GB per rank, overlapped with attention")

    def weights(self, compute_s: float) -> TimeTerm:
        """Return the time by which gathering weights and reducing gradients exceed the compute that hides them."""
        world, micro_batches = self.layout.world_size, self._micro_batches
        every, trained = (
            count * (world - 1) / world for count in (self.shape.num_parameters, self.shape.trained_parameters)
        )
        # Weights are sent in bf16, gradients in fp32 (engine/zero.py). In stage 3 DeepSpeed 0.19.8 gathers twice and
        # reduces once per micro-batch. The other stages gather weights once per step and give each rank the sums of all
        # gradients, which sends twice as much: stage 2 for each micro-batch, stage 1 once per step.
        stage = self.config.zero_stage
        if stage == 3:
            size = micro_batches * (2 * 2 * every + 4 * trained)
        else:
            size = (micro_batches if stage == 2 else 1) * 2 * 4 * trained + 2 * trained
        # Below stage 3, DeepSpeed overlaps nothing (overlap_comm).
        is_hidden = stage == 3
        seconds = max(0.0, size / link_bandwidth(self.config, world) - compute_s * is_hidden)
        text = f"{size / GB:,.1f} GB per rank, {micro_batches} micro-batches{', overlapped with compute' * is_hidden}"
        return TimeTerm(name="weights and gradients", seconds=seconds, source=text)

    def host_copies(self, compute_s: float) -> TimeTerm:
        """Return the time by which copies between host and device exceed the pass that hides them.

        Each direction has the full bandwidth.
        """
        memory, world, micro_batches = self.config.memory, self.layout.world_size, self._micro_batches
        kept = weights = gradients = 0.0
        if memory.offload_activations:
            row_tokens = -(-self.config.data.context_tokens // self.layout.sp_size)
            kept = self._rank_tokens * configured_memory(self.config, self.shape).offloaded_bytes / row_tokens
        if memory.offload_param == "cpu":
            weights = micro_batches * 2 * self.shape.num_parameters / world
        if memory.offload_optimizer == "cpu" and self.config.zero_stage == 3:
            # DeepSpeed 0.19.8 sums on the device what it keeps on the host, and fetches even the first sum.
            gradients = micro_batches * 4 * self.shape.trained_parameters / world
        forward, backward = max(kept, weights), kept + weights + gradients
        forward_s = compute_s * 2 / self.passes
        late = forward / self.rates.host - forward_s, backward / self.rates.host - (compute_s - forward_s)
        text = (
            f"{forward / GB:,.1f} GB per rank in the forward pass and {backward / GB:,.1f} GB in the backward pass, at "
            f"{self.rates.host / GB:,.0f} GB/s, overlapped with compute"
        )
        return TimeTerm(name="host copies", seconds=sum(max(0.0, seconds) for seconds in late), source=text)

    def update(self) -> TimeTerm:
        """Return the time of the optimizer's update."""
        shard = self.shape.trained_parameters / self.layout.world_size
        if self.config.memory.offload_optimizer == "none":
            text = f"{shard:,.0f} parameters per rank x {_UPDATE_BYTES} bytes of device memory"
            return TimeTerm(name="update", seconds=shard * _UPDATE_BYTES / self.rates.memory, source=text)
        # fp32 gradients to the host, bf16 weights to the device.
        copies_s, update_s = shard * 6 / self.rates.host, shard * _UPDATE_BYTES / _HOST_MEMORY
        text = f"{shard:,.0f} parameters per rank on the host: {_UPDATE_BYTES} bytes each at 25 GB/s, 6 bytes copied"
        return TimeTerm(name="update", seconds=copies_s + update_s, source=text)
