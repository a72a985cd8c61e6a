"""No token value of one document changes a bit of another's, whatever the kernel and the ring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_ulysses import SequenceMesh, apply_ulysses, shard_batch, unshard
from ray_ulysses.attention.kernels import KERNELS
from tests.breadth import fast_cases
from tests.distributed.harness import run_ranks
from tests.unit.attention.models import VOCAB, magnified, tiny_model

pytestmark = pytest.mark.distributed

ON_CPU = [entry.name for entry in KERNELS if entry.runs_on("cpu")]
LAYOUTS = {"ulysses2": (2, 1), "ulysses2-ring2": (4, 2)}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
LENGTHS, ROW_TOKENS, CHANGED = (11, 17, 1, 9), 48, slice(11, 28)


def leaks(
    rank: int, world_size: int, ring_size: int, kind: str, kernel: Any, changes: dict[str, Any]
) -> tuple[list[str], float]:
    """Change the tokens of the second document and say where another one notices.

    Returns:
        What differs by a bit outside the document (``attention`` of the first layer, ``logits``), and the relative
        error of the other documents' logits.
    """
    mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
    model = apply_ulysses(magnified(tiny_model(kind, **changes)), mesh, attention=kernel)
    attended: list[torch.Tensor] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda module, args, out: attended.append(out[0]))
    before = torch.randint(0, VOCAB, (1, ROW_TOKENS), generator=torch.Generator().manual_seed(5))
    after = before.clone()
    after[:, CHANGED] = (after[:, CHANGED] + 7) % VOCAB
    logits = []
    for ids in (before, after):
        batch = shard_batch(ids, None, LENGTHS, mesh)
        with torch.no_grad():
            logits.append(unshard(model(**batch.model_inputs()).logits, batch))
    attention = [unshard(out, batch) for out in attended]
    others = torch.ones(sum(LENGTHS), dtype=torch.bool)
    others[CHANGED] = False
    assert not torch.equal(logits[0][:, ~others], logits[1][:, ~others])
    both = {"attention": attention, "logits": logits}
    found = [name for name, (one, two) in both.items() if not torch.equal(one[:, others], two[:, others])]
    one, other = (part[:, others].double() for part in logits)
    return found, float((one - other).norm() / one.norm())


def dense_leaks(rank: int, world_size: int, ring_size: int) -> dict[str, list[str]]:
    """Return what differs by a bit in dense models, by kernel and kind of layer."""
    kinds: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {"sliding_window": 5}}
    return {
        f"{kernel}-{kind}": leaks(rank, world_size, ring_size, kind, kernel, changes)[0]
        for kernel in ON_CPU
        for kind, changes in kinds.items()
    }


@pytest.mark.parametrize(("world_size", "ring_size"), fast_cases(LAYOUTS, "ulysses2-ring2"))
def test_logits_of_a_dense_model_are_bitwise_alone(world_size: int, ring_size: int) -> None:
    for found in run_ranks(dense_leaks, world_size, ring_size):
        assert not any(found.values()), found
        assert len(found) == 2 * len(ON_CPU) == 4


def test_attention_of_a_mixture_is_bitwise_alone_and_its_logits_within_law_1() -> None:
    """An expert's batch holds other documents' tokens, which changes the order of its sums."""
    for found, error in run_ranks(leaks, 4, 2, "mixtral", "auto", EXPERTS):
        assert "attention" not in found
        assert error <= 1e-5


def test_every_kernel_of_the_table_is_either_probed_here_or_on_a_gpu() -> None:
    assert ON_CPU == ["sdpa", "math"]
    assert {entry.name for entry in KERNELS} - set(ON_CPU) == {"flash_attn_3", "flash_attn", "cudnn", "varlen"}
