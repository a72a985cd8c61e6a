"""Names of a model's tensors, and the flat views through which a state is read and filled."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from ray_ulysses.engine.partition_view import flat_view, shape_of
from ray_ulysses.engine.zero_state import named_tensors


def test_a_tensor_that_is_not_contiguous_is_read_in_order_and_filled_in_place() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3).T, requires_grad=False)
    assert flat_view(parameter, is_writing=False).tolist() == [0, 3, 1, 4, 2, 5]
    flat_view(parameter, is_writing=True).copy_(torch.arange(6.0))
    assert parameter.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_partitioned_parameter_has_the_shape_that_zero_3_keeps_beside_it() -> None:
    assert shape_of(torch.empty(2, 3)) == (2, 3)
    assert shape_of(SimpleNamespace(ds_shape=torch.Size((4, 5)), shape=torch.Size((0,)))) == (4, 5)


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
    model.second.counts = torch.full((7,), 2.0)
    model.again.counts = model.second.counts
    assert [(name, buffer.tolist()) for name, buffer in found.buffers] == [
        ("scale", [1.0]),
        ("first.counts", [2.0] * 7),
    ]
