"""Floating-point operations of a step and the peak of known accelerators, from which MFU is computed."""

from __future__ import annotations

from ray_ulysses.model_shape import ModelShape

# Dense bf16 TFLOP/s from the vendors' data sheets (NVIDIA's state twice as much, "with sparsity"). The first entry
# whose words all occur in the device's name is used, so variants precede their family.
_PEAK_TFLOPS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("GB200",), 2500.0),
    (("B200",), 2250.0),
    (("GH200",), 989.4),
    (("H200", "NVL"), 835.5),
    (("H200",), 989.4),
    (("H100", "NVL"), 835.5),
    (("H100", "PCIe"), 756.0),
    (("H100",), 989.4),
    (("H800",), 989.4),
    (("H20",), 148.0),
    (("A100",), 312.0),
    (("A800",), 312.0),
    (("L40S",), 362.0),
    (("L40",), 181.0),
    (("L4",), 121.0),
    (("A10G",), 70.0),
    (("A10",), 125.0),
    (("RTX", "4090"), 165.2),
    (("MI325X",), 1307.4),
    (("MI300X",), 1307.4),
    (("MI250X",), 191.5),  # torch sees one of its two dies
)


def peak_bf16_flops(device_name: str | None) -> float | None:
    """Return the dense bf16 peak of one device, in FLOP/s.

    Args:
        device_name: As ``torch.cuda.get_device_name()`` gives it; ``None`` on CPU.

    Returns:
        ``None`` on CPU and for an unknown device, for which no MFU is reported.
    """
    if device_name is None:
        return None
    # Whole words, so that ``L4`` does not match ``L40S``, nor ``H20`` ``H200``.
    words = device_name.replace("-", " ").replace("_", " ").upper().split()
    for names, tflops in _PEAK_TFLOPS:
        if all(name.upper() in words for name in names):
            return tflops * 1e12
    return None


def step_flops(shape: ModelShape, *, tokens: int, sum_squared_lengths: int) -> float:
    """Return the model's floating-point operations for forward and backward over some tokens.

    ``6 N`` per token, where N is the number of parameters that multiply (all except an untied input embedding, which is
    a lookup), and ``6 d S^2`` per document of S tokens, where d is the total width of all layers' heads: in the forward
    pass, query times key and probability times value take ``2 S^2 d`` each, halved by the causal mask, and in the
    backward pass twice that (PaLM, appendix B, https://arxiv.org/abs/2204.02311, which does not halve it). Frozen
    parameters take ``4 N``, since they have no gradients. Only experts that a token goes through count, and shared
    layers count once per use. A recurrence takes 6 per multiply-add of its recurrent form. Recomputed work is left out.

    Args:
        shape: The model.
        tokens: Tokens that the model processes, without padding.
        sum_squared_lengths: Sum over documents (their pieces in a row) of the squared length in tokens.
    """
    multiply_adds = shape.layer_multiply_adds + shape.embedding_parameters
    attention = 6 * shape.attention_width * sum_squared_lengths
    return float((6 * multiply_adds - 2 * shape.frozen_matrices) * tokens + attention)


def token_cost(shape: ModelShape) -> int:
    """Return the cost of a token outside attention, in squared tokens: the length at which both costs are equal."""
    attention = step_flops(shape, tokens=0, sum_squared_lengths=1)
    return round(step_flops(shape, tokens=1, sum_squared_lengths=0) / attention)


def mfu(*, flops: float, seconds: float, world_size: int, peak_flops: float | None) -> float | None:
    """Return the model FLOPs utilization as a share of all devices' peak, or ``None`` if the peak is unknown."""
    if peak_flops is None or seconds <= 0:
        return None
    return flops / (seconds * world_size * peak_flops)
