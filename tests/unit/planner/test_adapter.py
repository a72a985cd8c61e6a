"""Frozen weights have no gradients and no optimizer state, and take less work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from ray_ulysses import apply_ulysses, causal_lm_loss, shard_batch
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model import build_model, find_trained_part
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.flops import step_flops
from ray_ulysses.planner.memory import MemoryEstimate, at_peak, configured_memory
from ray_ulysses.planner.search import longest_context
from ray_ulysses.planner.state_memory import StateSharing
from ray_ulysses.planner.throughput import configured_time, full_rows
from ray_ulysses.run.settings import model_shape
from ray_ulysses.trained_part import TrainedPart
from tests.planned import estimate
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import ARCHITECTURES
from tests.unit.config.trees import small_tree
from tests.unit.engine.steps import peak_bytes
from tests.unit.export.runs import fields_of
from tests.unit.planner.runs import LLAMA_3_8B

WHOLE = ModelShape.from_config_dict(LLAMA_3_8B)
ADDED = 41_943_040
ADAPTED = replace(WHOLE, part=TrainedPart(added=ADDED, trained=ADDED, has_embedding=False, has_head=False))
EMBEDDING = 128256 * 4096


def test_frozen_weights_take_four_operations_per_token_and_trained_ones_six() -> None:
    assert ADAPTED.num_parameters == WHOLE.num_parameters + ADDED
    frozen = WHOLE.num_parameters - EMBEDDING
    assert step_flops(ADAPTED, tokens=7, sum_squared_lengths=0) == 7 * (4 * frozen + 6 * ADDED)
    trained = replace(
        ADAPTED, part=TrainedPart(added=0, trained=WHOLE.num_parameters, has_embedding=True, has_head=True)
    )
    assert step_flops(trained, tokens=7, sum_squared_lengths=3) == step_flops(WHOLE, tokens=7, sum_squared_lengths=3)


def memory(shape: ModelShape, stage: Literal[1, 2, 3] = 3, **settings: Any) -> dict[str, int]:
    found: MemoryEstimate = estimate(
        shape, world_size=8, sp_size=8, context_tokens=65536, zero_stage=stage, peer_memory=True, **settings
    )
    return {one.name: one.bytes for one in (*found.device, *found.host)}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_only_trained_weights_have_gradients_and_a_state(stage: Literal[1, 2, 3]) -> None:
    found = memory(ADAPTED, stage)
    share = ADDED // 8
    assert found["master weights, fp32"] == 4 * share
    assert found["AdamW moments, fp32"] == 8 * share
    assert found["gradients, fp32"] == 4 * (ADDED if stage == 1 else share)
    weights = found["weights, sharded" if stage == 3 else "weights, whole"]
    assert weights == 2 * ADAPTED.num_parameters // (8 if stage == 3 else 1)
    stored = 14 * share + 2 * (WHOLE.num_parameters // 8)
    assert abs(found["checkpoints, staged"] - 2 * stored) < 100
    assert abs(found["peer memory"] - 4 * stored) < 100


@pytest.mark.parametrize("base_dtype", ["nf4", "int8", "fp8"])
def test_a_quantized_base_takes_its_packed_bytes_and_is_not_stored(base_dtype: str) -> None:
    config = parse_config(small_tree(model__adapter={}, model__base_dtype=base_dtype, memory__zero_stage=1))
    model_config = config.model.config
    assert model_config is not None
    shape = replace(ModelShape.from_config_dict(model_config), part=find_trained_part(config))
    found = {one.name: one.bytes for one in configured_memory(config, shape).device}
    model = build_model(config)
    assert found["weights, whole"] == sum(one.nbytes for one in model.parameters())
    matrix = 4 * shape.hidden_size * shape.intermediate_size
    assert found["weights, dequantized"] == matrix
    tiled = config.model_copy(update={"memory": config.memory.model_copy(update={"mlp_tile": 8})})
    found = {one.name: one.bytes for one in configured_memory(tiled, shape).device}
    assert found["weights, dequantized"] == 3 * matrix
    flat = found["the model, beside its flat copy"]
    assert flat == found["weights, whole"] + 4 * shape.trained_parameters
    assert StateSharing.of(config).stored_bytes(shape) == 12 * -(
        -shape.trained_parameters // config.cluster.workers.min
    )


def test_a_frozen_head_has_no_gradient_to_sum_over_tiles() -> None:
    frozen, trained = memory(ADAPTED), memory(WHOLE)
    name = "gradients of the head's tiles"
    assert trained[name] - frozen[name] == 4 * EMBEDDING
    assert frozen["bucket of gradients"] == 4 * 50_000_000 and "gradients, before reduction" not in frozen


def test_a_step_is_modelled_faster_and_a_longer_context_fits() -> None:
    tree = small_tree(
        model__config=LLAMA_3_8B, model__dtype="bf16", model__adapter={}, cluster__workers=8, cluster__device="H100",
        cluster__gpus_per_worker=1, parallel__sp_size=8, data__context_tokens=65536, memory__device_gib=79,
    )  # fmt: skip
    config = parse_config(tree)
    times = [configured_time(config, shape, full_rows(config)) for shape in (ADAPTED, WHOLE)]
    assert times[0] is not None and times[1] is not None
    matmul = [{one.name: one.seconds for one in time.terms}["matrix products"] for time in times if time]
    passes = WHOLE.num_parameters - 2 * EMBEDDING
    whole, saved = 8 * passes + 6 * EMBEDDING, 2 * (WHOLE.num_parameters - EMBEDDING)
    assert matmul[0] / matmul[1] == pytest.approx((whole - saved + 8 * ADDED) / whole)
    assert times[0].seconds < times[1].seconds
    assert times[0].mfu < times[1].mfu + 0.05
    assert configured_memory(config, ADAPTED).device_bytes < configured_memory(config, WHOLE).device_bytes
    longest = [longest_context(config, shape) for shape in (ADAPTED, WHOLE)]
    assert longest[0] > longest[1]


_SMALL_EXPERTS: dict[str, dict[str, int]] = {
    "qwen3_moe": {"moe_intermediate_size": 512, "num_experts": 16},
    "gpt_oss": {"intermediate_size": 512, "num_local_experts": 16},
    "mixtral": {"intermediate_size": 512, "num_local_experts": 16},
}


@pytest.mark.parametrize(
    ("kind", "target", "checkpointed"),
    [("qwen3_moe", "experts", True), ("gpt_oss", "experts", False), ("mixtral", "down_proj", True)],
)
def test_experts_with_adapters_take_the_memory_that_is_planned(kind: str, target: str, checkpointed: bool) -> None:
    tokens = 256
    tree = small_tree(
        cluster__workers=1, parallel__sp_size=1, data__context_tokens=tokens, model__dtype="fp32",
        model__adapter={"rank": 2, "targets": ["q_proj", target]}, memory__gradient_checkpointing=checkpointed,
    )  # fmt: skip
    tree["model"]["config"] = fields_of(ARCHITECTURES[kind](hidden_size=256, **_SMALL_EXPERTS[kind]))
    config = parse_config(tree)
    model = apply_ulysses(build_model(config).train(), ALONE)
    ids = torch.randint(0, 50, (1, tokens), generator=torch.Generator().manual_seed(1))
    batch = shard_batch(ids, ids, (tokens,), ALONE)

    def run() -> None:
        causal_lm_loss(model, batch)[0].backward()

    run()  # What is allocated once is not counted, nor are weights, and there is no engine.
    passes = ("passes", "layer", "mlp", "attention", "loss")
    terms = [one for one in configured_memory(config, model_shape(config)).device if one.phase in passes]
    planned = sum(one.bytes for one in at_peak(tuple(one for one in terms if one.name != "bucket of gradients")))
    assert planned == pytest.approx(peak_bytes(run), rel=0.1)
