"""AdamW with moments in bf16: its update is AdamW's, and what is rounded does not depend on the layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_ulysses.engine.bf16_moments import AdamWBf16Moments

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
SIZE = 1003


def stepped(bounds: list[int], gradients: list[torch.Tensor], shift: int = 0) -> tuple[torch.Tensor, ...]:
    """Return weight and moments of one parameter, updated in parts that begin at ``bounds`` and at any alignment."""
    found = []
    for start, stop in zip(bounds, [*bounds[1:], SIZE], strict=True):
        length = stop - start
        flat = torch.nn.Parameter(torch.zeros(shift + length))
        flat.data[shift:] = torch.linspace(-1, 1, SIZE)[start:stop]
        groups = [{"params": [flat], "weight_decay": 0.1, "kind": "adamw_bf16_moments", "lr_scale": 1.0}]
        optimizer = AdamWBf16Moments(groups, seed=5, **OPTIONS)
        part = SimpleNamespace(flat=0, start=start, offset=shift, length=length)
        view: Any = SimpleNamespace(flats=[flat], partition_of=lambda parameter, part=part: part)
        optimizer.locate(view, [("weight", None)])
        for gradient in gradients:
            flat.grad = torch.zeros_like(flat)
            flat.grad[shift:] = gradient[start:stop]
            optimizer.step()
        state = optimizer.state[flat]
        found.append([one[shift:] for one in (flat.detach(), state["exp_avg"], state["exp_avg_sq"])])
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def random_gradients(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("bounds", [[0, 500], [0, 1, 18, 333, 1000], [0, 7]], ids=str)
@pytest.mark.parametrize("shift", [0, 3])
def test_any_division_has_the_same_bits(bounds: list[int], shift: int) -> None:
    gradients = random_gradients(6)
    for whole, parts in zip(stepped([0], gradients), stepped(bounds, gradients, shift), strict=True):
        assert torch.equal(whole, parts)


def test_the_first_update_is_that_of_adamw() -> None:
    (gradient,) = random_gradients(1)
    plain = torch.nn.Parameter(torch.linspace(-1, 1, SIZE))
    plain.grad = gradient
    torch.optim.AdamW([plain], weight_decay=0.1, **OPTIONS).step()
    weight, mean, variance = stepped([0], [gradient])
    assert (weight - plain.detach()).norm() <= 1e-6 * plain.detach().norm()
    assert mean.dtype == variance.dtype == torch.bfloat16
    for found, wanted in ((mean, 0.1 * gradient), (variance, 0.05 * gradient.square())):
        # Between the two neighbours of the exact value.
        assert ((found.float() - wanted).abs() <= wanted.abs() * 2.0**-7).all()


def test_moments_that_are_rounded_at_random_are_right_on_average() -> None:
    """A constant gradient: the moment approaches it in changes that are below half a unit in the last place."""
    constant = torch.full((SIZE,), 1.0)
    steps = 120
    _, _, variance = stepped([0], [constant] * steps)
    wanted = 1 - 0.95**steps
    assert abs(float(variance.float().mean()) / wanted - 1) < 1e-3
    # Each element takes a path of its own.
    assert len(variance.unique()) > 1
