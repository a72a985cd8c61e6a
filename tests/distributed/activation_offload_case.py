"""Steps with activations in host memory and without, on several ranks: which gradients differ by a bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

from tests.planned import estimate
from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, loss_scale, shard_batch
from ray_ulysses.attention.recompute import KeptOutput, checkpoint_contexts
from ray_ulysses.checkpoint.state import ShardedState
from ray_ulysses.config import Config
from ray_ulysses.engine.activation_offload import CpuCopies, offload_activations
from ray_ulysses.engine.tiled_mlp import tile_mlps
from ray_ulysses.engine.zero import ZeroSettings, build_engine
from ray_ulysses.engine.zero_state import state_source
from ray_ulysses.model_shape import ModelShape
from tests.distributed.run_case import run_worker
from tests.unit.attention.models import VOCAB, magnified, tiny_model, zoo_model

ROWS = ((17, 1, 9, 13), (40, 8), (30, 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadCase:
    """One way to train."""

    architecture: str = "llama"
    kinds: tuple[Literal["layer_inputs", "attention_outputs"], ...] = ("layer_inputs", "attention_outputs")
    keep: KeptOutput = "both"
    ulysses_size: int = 1
    ring_size: int = 1
    head_groups: int = 1
    zero_stage: Literal[1, 2, 3] = 3
    dtype: Literal["bf16", "fp32"] = "fp32"
    tied: bool = True

    @property
    def sp_size(self) -> int:
        return self.ulysses_size * self.ring_size


def counted_run(rank: int, world_size: int, config: Config, session: str) -> tuple[int, int]:
    """Run a worker, and return its copies out and in."""
    with (
        mock.patch.object(CpuCopies, "copy_out", autospec=True, side_effect=CpuCopies.copy_out) as out,
        mock.patch.object(CpuCopies, "copy_in", autospec=True, side_effect=CpuCopies.copy_in) as back,
    ):
        run_worker(rank, world_size, config, session)
    return out.call_count, back.call_count


def differences(rank: int, world_size: int, cases: list[OffloadCase]) -> list[list[str]]:
    """Return, for each case, what of the first moments and losses of two steps differs by a bit."""
    found = []
    for case in cases:
        wanted, ours = _train(case, ()), _train(case, case.kinds)
        assert wanted.keys() == ours.keys() and len(wanted) > 10
        found.append([name for name, one in wanted.items() if not torch.equal(one, ours[name])])
    return found


def _train(case: OffloadCase, kinds: Any) -> dict[str, torch.Tensor]:
    """Take two steps of rows of packed documents, with tiles; as many bytes as `plan` counts must suffice."""
    groups = [
        dist.new_group(list(range(start, start + case.sp_size)))
        for start in range(0, dist.get_world_size(), case.sp_size)
    ]
    mesh = SequenceMesh.from_group(groups[dist.get_rank() // case.sp_size], ring_size=case.ring_size)
    if case.architecture == "llama":
        model = magnified(tiny_model("llama", num_hidden_layers=4, tie_word_embeddings=case.tied))
    else:
        model = zoo_model(case.architecture)
    model = model.to({"bf16": torch.bfloat16, "fp32": torch.float32}[case.dtype])
    apply_ulysses(model, mesh, head_groups=case.head_groups).train()
    options = {"use_reentrant": False, "context_fn": checkpoint_contexts(case.keep)}
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={name: one for name, one in options.items() if one is not None}
    )
    tile_mlps(model, 7)
    planned = estimate(
        ModelShape.from_config_dict(model.config.to_dict()), world_size=case.sp_size, sp_size=case.sp_size,
        ring_size=case.ring_size, context_tokens=max(sum(row) for row in ROWS), dtype=case.dtype,
        attention_output=case.keep, attention_head_groups=case.head_groups, offload_activations=kinds,
    )  # fmt: skip
    offload_activations(model, kinds, keep=case.keep, budget_bytes=planned.offloaded_bytes, device=torch.device("cpu"))
    settings = ZeroSettings(
        stage=case.zero_stage, dtype=case.dtype, accumulation=len(ROWS), max_grad_norm=1.0, learning_rate=1e-3,
        betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, partition_everything=True,
    )  # fmt: skip
    engine = build_engine(model, settings)
    engine.train()
    found: dict[str, torch.Tensor] = {}
    scale = loss_scale(200, mesh, zero_stage=case.zero_stage, accumulation=len(ROWS))
    for number in range(2 * len(ROWS)):
        lengths = ROWS[number % len(ROWS)]
        generator = torch.Generator().manual_seed(number * 100 + dist.get_rank() // case.sp_size)
        row = torch.randint(0, VOCAB, (1, sum(lengths)), generator=generator)
        loss_sum, _ = causal_lm_loss(engine, shard_batch(row, None, lengths, mesh), tile=5)
        engine.backward(loss_sum * scale)
        engine.step()
        found[f"loss {number}"] = loss_sum.detach()
    state = state_source(engine)
    assert isinstance(state, ShardedState)
    found |= {part.key: part.tensor.clone() for part in state.parts}
    engine.destroy()
    return found
