from __future__ import annotations

import torch
from torch import nn

from ray_ulysses.engine.zero_state import named_tensors


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
