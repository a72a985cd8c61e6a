"""Activations in host memory change no bit of a step, in the budget that `plan` counts, nor of a whole run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, loss_scale, shard_batch
from ray_ulysses.attention.recompute import KeptOutput
from ray_ulysses.config import Config
from ray_ulysses.engine.activation_offload import CpuCopies, offload_activations
from ray_ulysses.engine.tiled_mlp import tile_mlps
from ray_ulysses.engine.zero import build_engine
from ray_ulysses.engine.zero_state import state_source
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.tracking.history import read_history
from tests.distributed.harness import run_ranks
from tests.distributed.run_case import make_config, prepare_attempt, run_worker
from tests.distributed.seam_case import checkpointed, zero_settings
from tests.distributed.test_hybrids import OF_EACH_KIND
from tests.planned import estimate
from tests.unit.attention.models import VOCAB, magnified, tiny_model, zoo_model

ROWS = ((17, 1, 9, 13), (40, 8), (30, 2))
Kind = Literal["layer_inputs", "attention_outputs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadCase:
    """One way to train."""

    architecture: str = "llama"
    kinds: tuple[Kind, ...] = ("layer_inputs", "attention_outputs")
    keep: KeptOutput = "both"
    ulysses_size: int = 1
    ring_size: int = 1
    head_groups: int = 1
    zero_stage: int = 3
    dtype: Literal["bf16", "fp32"] = "fp32"
    tied: bool = True

    @property
    def sp_size(self) -> int:
        return self.ulysses_size * self.ring_size


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
    starts = range(0, dist.get_world_size(), case.sp_size)
    groups = [dist.new_group(list(range(start, start + case.sp_size))) for start in starts]
    mesh = SequenceMesh.from_group(groups[dist.get_rank() // case.sp_size], ring_size=case.ring_size)
    if case.architecture == "llama":
        model = magnified(tiny_model("llama", num_hidden_layers=4, tie_word_embeddings=case.tied))
    else:
        model = zoo_model(case.architecture)
    model = model.to({"bf16": torch.bfloat16, "fp32": torch.float32}[case.dtype])
    checkpointed(apply_ulysses(model, mesh, head_groups=case.head_groups), case.keep)
    tile_mlps(model, 7)
    planned = estimate(
        ModelShape.from_config_dict(model.config.to_dict()), world_size=case.sp_size, sp_size=case.sp_size,
        ring_size=case.ring_size, context_tokens=max(sum(row) for row in ROWS), dtype=case.dtype,
        attention_output=case.keep, attention_head_groups=case.head_groups, offload_activations=kinds,
    )  # fmt: skip
    offload_activations(model, kinds, keep=case.keep, budget_bytes=planned.offloaded_bytes, device=torch.device("cpu"))
    settings = zero_settings(stage=case.zero_stage, dtype=case.dtype, accumulation=len(ROWS), max_grad_norm=1.0)
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
    found |= {part.key: part.tensor.clone() for part in state_source(engine).parts}
    engine.destroy()
    return found


LAYOUTS = [
    OffloadCase(tied=False),
    OffloadCase(ulysses_size=2, keep="kernel", kinds=("attention_outputs",), dtype="bf16"),
    OffloadCase(ulysses_size=2, keep="none", kinds=("layer_inputs",), zero_stage=2),
    OffloadCase(ring_size=2, zero_stage=1),
    OffloadCase(ulysses_size=2, head_groups=2),
]
HYBRIDS = [OffloadCase(architecture=name, ulysses_size=2) for name in OF_EACH_KIND]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [LAYOUTS, HYBRIDS], ids=["layouts", "hybrids"])
def test_no_bit_of_two_steps_changes(cases: list[OffloadCase]) -> None:
    for rank in run_ranks(differences, 2, cases, timeout_s=500):
        assert rank == [[]] * len(cases)


def counted_run(rank: int, world_size: int, config: Config, session: str) -> tuple[int, int]:
    """Run a worker, and return its copies out and in."""
    with (
        mock.patch.object(CpuCopies, "copy_out", autospec=True, side_effect=CpuCopies.copy_out) as out,
        mock.patch.object(CpuCopies, "copy_in", autospec=True, side_effect=CpuCopies.copy_in) as back,
    ):
        run_worker(rank, world_size, config, session)
    return out.call_count, back.call_count


@pytest.mark.slow
def test_a_run_with_activations_in_host_memory_is_the_run_without(tmp_path: Path, corpus: Path) -> None:
    model: Any = make_config(tmp_path, corpus).model.config
    steps = []
    for name, kinds in (("device", []), ("host", ["layer_inputs", "attention_outputs"])):
        config = make_config(
            tmp_path / name, corpus, run__stop_step=2, cluster__workers=2, data__rows_per_step=3,
            memory__offload_activations=kinds, model__config=model | {"num_hidden_layers": 4},
        )  # fmt: skip
        prepare_attempt(config, name)
        # Input, output in two layouts and log-sum-exp of 4 layers, in 3 micro-batches of 2 steps; two layers stay.
        counts = (2 * 3 * 4 * 4, 2 * 3 * 2 * 4) if kinds else (0, 0)
        assert run_ranks(counted_run, 2, config, name, timeout_s=200) == [counts] * 2
        steps.append([(step.loss, step.grad_norm) for step in read_history(config.run_dir).steps])
    assert len(steps[0]) == 2 and steps[0] == steps[1]
