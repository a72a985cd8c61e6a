"""Names of a model's tensors, flat views of them, and DeepSpeed's private attributes."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ray_ulysses.engine.partition_view import flat_view
from ray_ulysses.engine.zero_state import Moments, make_optimizer_state, named_tensors

PRIVATE = {
    "runtime/zero/stage3.py": "grad_position fp32_partitioned_groups_flat fp16_partitioned_groups_flat get_param_id "
    "sub_group_to_group_id swap_optimizer optimizer_swapper checkpoint_event_prologue checkpoint_event_epilogue "
    "_swappable_optimizer_subgroup _optimizer_states_and_gradient_swap_in _optimizer_states_and_gradient_swap_out "
    "_release_swap_buffers _reassign_or_swap_out_partitioned_parameters",
    "runtime/zero/stage_1_and_2.py": "bit16_groups bit16_groups_flat round_robin_bit16_groups partition_size "
    "round_robin_bit16_offsets single_partition_of_fp32_groups real_dp_process_group update_lp_params "
    "_hp_optimizer_states_linked",
    "runtime/bf16_optimizer.py": "bf16_groups bf16_groups_flat fp32_groups_flat_partition real_dp_process_group "
    "update_lp_params _hp_optimizer_states_linked",
}
"""The attributes that `partition_view` reads, by DeepSpeed's files."""


@pytest.mark.parametrize("source", PRIVATE)
def test_the_installed_deepspeed_still_has_the_private_attributes(source: str) -> None:
    # Read the source, because importing DeepSpeed takes seconds.
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    nodes = list(ast.walk(ast.parse((Path(spec.origin).parent / source).read_text())))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    assert set(PRIVATE[source].split()) <= names


def test_a_tensor_that_is_not_contiguous_is_read_in_order_and_filled_in_place() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3).T, requires_grad=False)
    assert flat_view(parameter, is_writing=False).tolist() == [0, 3, 1, 4, 2, 5]
    flat_view(parameter, is_writing=True).copy_(torch.arange(6.0))
    assert parameter.tolist() == [[0, 1], [2, 3], [4, 5]]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("counts", torch.zeros(3))
        self.register_buffer("table", torch.zeros(4), persistent=False)
        self.register_buffer("unset", None)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()
        self.again = self.first
        self.second.weight = self.first.weight
        self.base = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.register_buffer("scale", torch.ones(1))


def test_each_tensor_has_its_first_name_once() -> None:
    model = Model()
    found = named_tensors(model)
    assert [name for name, _ in found.trained] == ["first.weight"]
    assert [name for name, _ in found.frozen] == ["base"]
    assert found.tied == {"second.weight": "first.weight", "again.weight": "first.weight"}
    assert [name for name, _ in found.buffers] == ["scale", "first.counts", "second.counts"]


def test_a_buffer_in_whose_place_another_tensor_was_put_is_found_there() -> None:
    model = Model()
    found = named_tensors(model)
    model.second.counts = model.again.counts = torch.full((7,), 2.0)
    assert {name: buffer.tolist() for name, buffer in found.buffers} == {"scale": [1.0], "first.counts": [2.0] * 7}


@pytest.mark.parametrize(("is_fused", "device"), [(True, "meta"), (None, "cpu")])
def test_a_loaded_step_is_where_torch_counts_steps(is_fused: bool | None, device: str) -> None:
    """A fused update on a GPU requires the step on the device; "meta" stands in for the GPU."""
    flat = torch.empty(4, device="meta")
    group = {"params": [flat], "kind": "adamw", "lr_scale": 1.0}
    inner = torch.optim.AdamW([group], lr=1e-3, fused=is_fused)
    view: Any = SimpleNamespace(inner=inner, flats=[flat], group_of_flat=lambda number: 0)
    make_optimizer_state(view, [0], Moments(view, exist=True), 7)
    assert inner.state[flat]["step"].device.type == device
    assert {inner.state[flat][name].device.type for name in ("exp_avg", "exp_avg_sq")} == {"meta"}
