"""The private attributes of DeepSpeed that a state relies on, and what a state is made of."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ray_ulysses.engine.partition_view import flat_view, shape_of

SOURCES = {
    "runtime/zero/stage3.py": (
        "grad_position",
        "fp32_partitioned_groups_flat",
        "fp16_partitioned_groups_flat",
        "sub_group_to_group_id",
        "get_param_id",
        "swap_optimizer",
        "optimizer_swapper",
        "checkpoint_event_prologue",
        "checkpoint_event_epilogue",
        "_swappable_optimizer_subgroup",
        "_optimizer_states_and_gradient_swap_in",
        "_optimizer_states_and_gradient_swap_out",
        "_release_swap_buffers",
        "_reassign_or_swap_out_partitioned_parameters",
    ),
    "runtime/zero/stage_1_and_2.py": (
        "bit16_groups",
        "bit16_groups_flat",
        "round_robin_bit16_groups",
        "round_robin_bit16_offsets",
        "single_partition_of_fp32_groups",
        "partition_size",
        "real_dp_process_group",
        "update_lp_params",
        "_hp_optimizer_states_linked",
    ),
    "runtime/bf16_optimizer.py": (
        "bf16_groups",
        "bf16_groups_flat",
        "fp32_groups_flat_partition",
        "real_dp_process_group",
        "update_lp_params",
        "_hp_optimizer_states_linked",
    ),
}
"""The attributes that `partition_view` reads, by DeepSpeed's files."""


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
