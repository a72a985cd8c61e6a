"""One step of a small Llama through the library seam on one GPU, against one process in fp32 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, loss_scale, shard_batch
from ray_ulysses.attention.kernels import KERNELS, Demand
from tests.unit.attention.models import VOCAB, tiny_model

LENGTHS = (300, 1, 150, 61)
# A model of full layers, one of window layers, and one of both with soft-capping.
EXTRAS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 64},
    "gemma2": {"sliding_window": 64, "head_dim": 64, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 5.0},
}
# bf16 weights and activations through two layers against fp32: rounding of 2**-8 an operation, norm-wise a tensor.
LOSS_BOUND, GRADIENT_BOUND = 1e-2, 5e-2


def model_of(kind: str, dtype: torch.dtype, device: str) -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "max_position_embeddings": 1024}
    model = tiny_model(kind, **sizes, **EXTRAS[kind])
    # The oracle holds the weights that bf16 rounds to.
    return model.to(torch.bfloat16).to(dtype).to(device)


def row() -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))


def step(model: Any, device: str, attention: Any) -> tuple[float, dict[str, torch.Tensor]]:
    mesh = SequenceMesh.from_group(None)
    apply_ulysses(model, mesh, attention=attention)
    batch = shard_batch(row().to(device), None, LENGTHS, mesh)
    loss_sum, num_tokens = causal_lm_loss(model, batch)
    scale = loss_scale(num_tokens, mesh)
    (loss_sum * scale).backward()
    gradients = {name: parameter.grad.double().cpu() for name, parameter in model.named_parameters()}
    return float(loss_sum.detach() * scale), gradients


def skip_if_it_cannot(attention: str, kind: str, head_size: int) -> None:
    entry = next((entry for entry in KERNELS if entry.name == attention), None)
    if entry is None:
        return
    if not entry.runs_on("cuda"):
        pytest.skip(f"{attention} needs {entry.needs}")
    torch.cuda.init()
    sizes = {"head_size": head_size, "value_size": head_size, "has_softcap": kind == "gemma2"}
    for has_window in {"llama": (False,), "mistral": (True,), "gemma2": (False, True)}[kind]:
        refusal = entry.refuses(Demand(device_type="cuda", dtype=torch.bfloat16, has_window=has_window, **sizes))
        if refusal is not None:
            pytest.skip(f"{attention}: {refusal}")


@pytest.mark.parametrize("kind", EXTRAS)
@pytest.mark.parametrize("attention", ["auto", *(entry.name for entry in KERNELS)])
def test_a_step_in_bf16_is_that_of_fp32(kind: str, attention: str) -> None:
    model = model_of(kind, torch.bfloat16, "cuda")
    config = model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    skip_if_it_cannot(attention, kind, head_size)
    wanted_loss, wanted = step(model_of(kind, torch.float32, "cpu"), "cpu", "auto")
    loss, gradients = step(model, "cuda", attention)
    assert loss == pytest.approx(wanted_loss, rel=LOSS_BOUND)
    whole = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    for name, truth in wanted.items():
        error = float((gradients[name] - truth).norm() / max(truth.norm(), 1e-3 * whole))
        assert error <= GRADIENT_BOUND, f"the gradient of {name} is off by {error:.1e}"
    # As a scale: no factor may hide in a tolerance.
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert float(norm / whole) == pytest.approx(1.0, abs=LOSS_BOUND)


def test_a_forward_and_backward_waits_for_nothing() -> None:
    """Device-to-host synchronisations of a dense model between the batch and its gradients: none."""
    mesh = SequenceMesh.from_group(None)
    model = apply_ulysses(model_of("mistral", torch.bfloat16, "cuda"), mesh)
    batch = shard_batch(row().to("cuda"), None, LENGTHS, mesh)

    def once() -> None:
        loss_sum, num_tokens = causal_lm_loss(model, batch)
        (loss_sum * loss_scale(num_tokens, mesh)).backward()

    once()  # Kernels are chosen and loaded.
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
        model.zero_grad()
        once()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert all(parameter.grad is not None for parameter in model.parameters())
