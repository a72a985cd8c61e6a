"""Refusals of exporting a state, and the private attributes of DeepSpeed that it relies on."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_ulysses.checkpoint.state import ShardedState, StateDescription, TensorPart
from ray_ulysses.engine.partition_view import (
    BF16_ATTRIBUTES,
    ZERO3_ATTRIBUTES,
    ZERO12_ATTRIBUTES,
    flat_view,
    require_attributes,
    shape_of,
)
from ray_ulysses.engine.zero_state import state_source
from ray_ulysses.errors import RunError, UserError

SOURCES = {
    "runtime/zero/stage3.py": ZERO3_ATTRIBUTES,
    "runtime/zero/stage_1_and_2.py": ZERO12_ATTRIBUTES,
    "runtime/bf16_optimizer.py": BF16_ATTRIBUTES,
}


def _engine(stage: int, attributes: tuple[str, ...] = (), **own: Any) -> SimpleNamespace:
    optimizer = SimpleNamespace(**(dict.fromkeys(attributes, None) | own))
    return SimpleNamespace(zero_optimization_stage=lambda: stage, optimizer=optimizer)


def test_an_engine_without_zero_is_refused() -> None:
    with pytest.raises(UserError, match="zero_stage=0: checkpoints hold the state of ZeRO stages 1, 2 and 3; use one"):
        state_source(_engine(0))


def test_weights_on_nvme_are_refused() -> None:
    engine = _engine(3, ZERO3_ATTRIBUTES, fp16_partitioned_groups_flat=[None])
    with pytest.raises(UserError, match=r"offload_param: weights .* NVMe can't be .*memory\.offload_optimizer=nvme"):
        state_source(engine)


@pytest.mark.parametrize(
    ("stage", "attributes", "name"),
    [
        pytest.param(3, ZERO3_ATTRIBUTES, "grad_position", id="zero3"),
        pytest.param(2, ZERO12_ATTRIBUTES, "round_robin_bit16_offsets", id="zero2"),
        pytest.param(1, ZERO12_ATTRIBUTES, "update_lp_params", id="zero1"),
        pytest.param(1, BF16_ATTRIBUTES, "fp32_groups_flat_partition", id="zero1-bf16"),
    ],
)
def test_a_deepspeed_without_a_private_attribute_is_refused(stage: int, attributes: tuple[str, ...], name: str) -> None:
    engine = _engine(stage, attributes)
    delattr(engine.optimizer, name)
    with pytest.raises(RunError, match=rf"SimpleNamespace lacks {name}; install the version .* pins \(0\.19\)"):
        state_source(engine)


def test_every_attribute_that_is_missing_is_named() -> None:
    with pytest.raises(RunError, match="lacks a, b;"):
        require_attributes(SimpleNamespace(c=1), ("a", "b", "c"))


@pytest.mark.parametrize("source", SOURCES)
def test_the_installed_deepspeed_still_has_the_private_attributes(source: str) -> None:
    """Read from its source, since importing it takes seconds and a distributed test does that anyway."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    nodes = list(ast.walk(ast.parse((Path(spec.origin).parent / source).read_text())))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    assert set(SOURCES[source]) <= names


def test_a_tensor_that_is_not_contiguous_is_read_in_order_and_filled_in_place() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3).T, requires_grad=False)
    assert flat_view(parameter, is_writing=False).tolist() == [0, 3, 1, 4, 2, 5]
    flat_view(parameter, is_writing=True).copy_(torch.arange(6.0))
    assert parameter.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_partitioned_parameter_has_the_shape_that_zero_3_keeps_beside_it() -> None:
    assert shape_of(torch.empty(2, 3)) == (2, 3)
    assert shape_of(SimpleNamespace(ds_shape=torch.Size((4, 5)), shape=torch.Size((0,)))) == (4, 5)


def test_a_state_in_memory_is_a_source_like_any_other() -> None:
    description = StateDescription(tensors={})
    parts = (
        TensorPart(key="fp32/a", start=3, tensor=torch.tensor([1.0, 2.0])),
        TensorPart(key="model/a", start=1, tensor=torch.tensor([4.0], dtype=torch.bfloat16)),
    )
    state = ShardedState(parts=parts, description=description)
    assert [(held.key, held.start, held.num_elements, held.dtype) for held in state.intervals] == [
        ("fp32/a", 3, 2, torch.float32),
        ("model/a", 1, 1, torch.bfloat16),
    ]
    copies = [torch.zeros(2), torch.zeros(1, dtype=torch.bfloat16)]
    state.copy_to(copies)
    assert [copy.tolist() for copy in copies] == [[1.0, 2.0], [4.0]]
