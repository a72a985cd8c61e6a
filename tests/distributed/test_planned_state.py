"""The memory of each optimizer's state and update in the plan, against a measured engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from ray_ulysses.checkpoint.state import ShardedState
from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.muon import orthogonalization_flops, orthogonalized, working_elements
from ray_ulysses.engine.partition_view import partition_view
from ray_ulysses.engine.zero import build_engine
from ray_ulysses.engine.zero_state import state_source
from ray_ulysses.planner.memory import configured_memory
from ray_ulysses.planner.state_memory import StateSharing
from ray_ulysses.run.settings import model_shape
from tests.breadth import fast_only
from tests.distributed.harness import run_ranks
from tests.distributed.seam_case import zero_settings
from tests.unit.config.trees import small_tree
from tests.unit.engine.steps import peak_bytes

MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 1024,
}  # fmt: skip
WORLD, STAGES = 2, (1, 2, 3)
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "bf16": {"optimizer__kind": "adamw_bf16_moments"},
    "muon": {"optimizer__kind": "muon"},
    "muon-bf16": {"optimizer__kind": "muon", "model__dtype": "bf16"},
    "frozen": {"model__freeze": ["*.embed_tokens.*", "model.layers.[0-1].*"]},
    "muon-frozen": {"optimizer__kind": "muon", "model__freeze": ["*.embed_tokens.*", "lm_head.*", "*norm.weight"]},
}  # fmt: skip


def config_of(kind: str, stage: int) -> Config:
    return parse_config(
        small_tree(
            model__config=MODEL, memory__zero_stage=stage, cluster__workers=WORLD, optimizer__lr=1e-3,
            **KINDS[kind],
        )
    )  # fmt: skip


def measured(rank: int, world_size: int, kind: str) -> list[dict[str, int]]:
    """Return for each stage this rank's bytes of master weights, moments, a checkpoint and an update's temporaries."""
    found = []
    for stage in STAGES:
        config = config_of(kind, stage)
        settings = zero_settings(
            stage=stage, kind=config.optimizer.kind, dtype=config.model.dtype, partition_everything=False
        )
        engine = build_engine(build_model(config), settings)
        tokens = torch.arange(8).view(1, -1)
        view, peaks = partition_view(engine), []
        update = view.inner.step
        for step in range(2):
            engine.backward(engine(input_ids=tokens).logits.square().mean())
            if step == 1:
                view.inner.step = lambda *_, update=update, peaks=peaks: peaks.append(peak_bytes(update))
            engine.step()
        state = [one for held in view.inner.state.values() for one in held.values() if one.dim()]
        source = state_source(engine)
        assert isinstance(source, ShardedState)
        found.append(
            {
                "master weights": sum(one.nbytes for one in view.flats),
                "moments": sum(one.nbytes for one in state),
                "checkpoint": sum(part.tensor.nbytes for part in source.parts),
                "update": max(peaks),
            }
        )
        engine.destroy()
        dist.barrier()
    return found


@pytest.mark.parametrize("kind", fast_only(KINDS, "muon"))
def test_the_state_and_the_update_of_an_optimizer_take_the_planned_memory(kind: str) -> None:
    ranks = run_ranks(measured, WORLD, kind)
    for stage, *found in zip(STAGES, *ranks, strict=True):
        config = config_of(kind, stage)
        shape, sharing = model_shape(config), StateSharing.of(config)
        terms = configured_memory(config, shape).device
        # DeepSpeed copies the gradients before it calls the optimizer.
        copied = 4 * (sharing.by_muon(shape) or sharing.trained(shape)) if stage == 3 else 0
        planned = {
            "master weights": sum(one.bytes for one in terms if one.name.startswith("master weights")),
            "moments": sum(one.bytes for one in terms if one.name.startswith(("AdamW moments", "Muon momentum"))),
            "checkpoint": sharing.stored_bytes(shape),
            "update": sum(one.bytes for one in terms if one.phase == "update") - copied,
        }
        for own in found:
            if config.optimizer.kind == "muon":
                # A thread of gloo may hold the tensors of the previous exchange for a while.
                assert own.pop("update") >= 0.99 * planned["update"]
            assert own == pytest.approx({name: planned[name] for name in own}, rel=0.01)


def sent_shares(rank: int, world_size: int) -> list[float]:
    """Return for each stage the share of the matrices' elements that this rank sends to others in an update."""
    found, exchange = [], dist.all_to_all_single
    for stage in STAGES:
        config = config_of("muon", stage)
        engine = build_engine(build_model(config), zero_settings(stage=stage, kind="muon"))
        elements = [0, 0]

        def counted(received: Any, sent: Any, to: Any, of: Any, elements: list[int] = elements, **options: Any) -> None:
            elements[0] += sum(of) - of[rank]
            elements[1] += sum(of)
            exchange(received, sent, to, of, **options)

        engine.backward(engine(input_ids=torch.arange(8).view(1, -1)).logits.square().mean())
        dist.all_to_all_single = counted
        engine.step()
        dist.all_to_all_single = exchange
        found.append(elements[0] / elements[1])
        engine.destroy()
        dist.barrier()
    return found


def test_a_rank_orthogonalizes_the_matrices_that_it_holds_as_a_whole() -> None:
    """ZeRO-3 shards each matrix; in the other stages, most matrices are on one rank."""
    for *whole, sharded in run_ranks(sent_shares, WORLD):
        assert sharded == pytest.approx(1 - 1 / WORLD, abs=0.01)
        assert max(whole) < 0.1


@pytest.mark.parametrize("shape", [(512, 768), (768, 512)], ids=str)
def test_a_matrix_is_orthogonalized_in_the_planned_memory_and_operations(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exchanged = 2 * matrix.numel()
    planned = 4 * (working_elements(*shape) - exchanged)
    assert peak_bytes(lambda: orthogonalized(matrix)) == pytest.approx(planned, rel=0.01)
    with FlopCounterMode(display=False) as counter:
        orthogonalized(matrix)
    assert counter.get_total_flops() == orthogonalization_flops(*shape)
