"""One step of a small Llama through the library seam on one GPU, against one process in fp32 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, loss_scale, shard_batch
from ray_ulysses.attention.kernels import KERNELS
from tests.unit.attention.models import VOCAB, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LENGTHS = (300, 1, 150, 61)
# bf16 weights and activations through two layers against fp32: rounding of 2**-8 an operation, norm-wise a tensor.
LOSS_BOUND, GRADIENT_BOUND = 1e-2, 5e-2


def model_of(kind: str, dtype: torch.dtype, device: str) -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "max_position_embeddings": 1024}
    window = {"sliding_window": 64} if kind == "mistral" else {}
    model = tiny_model(kind, **sizes, **window)
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


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("attention", ["auto", *(entry.name for entry in KERNELS)])
def test_a_step_in_bf16_is_that_of_fp32(kind: str, attention: str) -> None:
    entry = next((entry for entry in KERNELS if entry.name == attention), None)
    if entry is not None and not entry.usable("cuda", torch.bfloat16):
        pytest.skip(f"{attention} needs {entry.needs}")
    wanted_loss, wanted = step(model_of(kind, torch.float32, "cpu"), "cpu", "sdpa")
    loss, gradients = step(model_of(kind, torch.bfloat16, "cuda"), "cuda", attention)
    assert loss == pytest.approx(wanted_loss, rel=LOSS_BOUND)
    whole = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    for name, truth in wanted.items():
        error = float((gradients[name] - truth).norm() / max(truth.norm(), 1e-3 * whole))
        assert error <= GRADIENT_BOUND, f"the gradient of {name} is off by {error:.1e}"
    # As a scale: no factor may hide in a tolerance.
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert float(norm / whole) == pytest.approx(1.0, abs=LOSS_BOUND)


def test_a_step_in_fp32_on_the_gpu_is_that_of_the_cpu() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        wanted_loss, wanted = step(model_of("llama", torch.float32, "cpu"), "cpu", "sdpa")
        loss, gradients = step(model_of("llama", torch.float32, "cuda"), "cuda", "auto")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    # fp32 on both sides, sums in another order, norm-wise a tensor: law 1's floor.
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    for name, truth in wanted.items():
        assert (gradients[name] - truth).norm() <= 1e-5 * truth.norm(), name
