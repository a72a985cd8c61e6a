"""Computes a step's floating-point operations, the peak rates of known accelerators, and MFU."""

from __future__ import annotations

from ray_ulysses.config.devices import contains_words, device_of
from ray_ulysses.model_shape import ModelShape

# Dense bf16 TFLOP/s of variants with a rate of their own, and of devices that `cluster.device` does not name, from the
# vendors' data sheets. The first entry whose words all occur in the device name is used, before `DEVICES`.
_PEAK_TFLOPS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("GB200",), 2500.0),
    (("H200", "NVL"), 835.5),
    (("H100", "NVL"), 835.5),
    (("H100", "PCIE"), 756.0),
    (("H800",), 989.4),
    (("H20",), 148.0),
    (("A800",), 312.0),
    (("L40",), 181.0),
    (("L4",), 121.0),
    (("A10",), 125.0),
    (("MI325X",), 1307.4),
    (("MI300X",), 1307.4),
    (("MI250X",), 191.5),  # torch sees one of its two dies
)


def peak_bf16_flops(device_name: str | None) -> float | None:
    """Return the dense bf16 peak of a device in FLOP/s, given its name from ``torch.cuda.get_device_name()``.

    The result is None on a CPU, which has no name, or an unknown device. No MFU is reported without a peak.
    """
    if device_name is None:
        return None
    variant = next((tflops for words, tflops in _PEAK_TFLOPS if contains_words(device_name, words)), None)
    known = device_of(device_name)
    tflops = variant or (None if known is None else known.tflops)
    return None if tflops is None else tflops * 1e12


def step_flops(shape: ModelShape, *, tokens: int, sum_squared_lengths: int) -> float:
    """Return the model FLOPs of a forward and backward pass, without recomputation.

    Each token takes ``6 N`` FLOPs, where N is the number of parameters in matrix products (all except an untied input
    embedding, which is a lookup). A document of S tokens takes ``6 d S^2`` FLOPs in attention, where d is the total
    width of all layers' heads: in the forward pass, ``QK`` and ``PV`` take ``2 S^2 d`` each, halved by the causal mask
    (unlike PaLM, appendix B, https://arxiv.org/abs/2204.02311), and the backward pass takes twice as much. In an
    encoder, nothing is halved, so its ``attention_width`` is ``2 d``. Local windows are not taken into account.
    Frozen parameters have no gradients and take ``4 N``. Only the experts to which a token is routed are included. A
    layer that is used several times is included once per use. A recurrence takes 6 FLOPs per multiply-add.

    The tokens exclude padding. The squared lengths are those of all documents, or of their pieces in rows.
    """
    multiply_adds = shape.layer_multiply_adds + shape.embedding_parameters
    attention = 6 * shape.attention_width * sum_squared_lengths
    return float((6 * multiply_adds - 2 * shape.frozen_matrices) * tokens + attention)


def token_cost(shape: ModelShape) -> int:
    """Return the document length in tokens at which attention takes as many FLOPs as all other operations."""
    attention = step_flops(shape, tokens=0, sum_squared_lengths=1)
    return round(step_flops(shape, tokens=1, sum_squared_lengths=0) / attention)


def mfu(*, flops: float, seconds: float, world_size: int, peak_flops: float | None) -> float | None:
    """Return the model FLOPs utilization as a fraction of all devices' peak, or None if the peak is unknown."""
    if peak_flops is None or seconds <= 0:
        return None
    return flops / (seconds * world_size * peak_flops)
