from __future__ import annotations

import math

import pytest
import torch

from tests.apart import relative, worst
from tests.distributed.seam_case import gradient_error


def test_an_error_a_loss_or_a_gradient_that_is_nan_is_near_nothing() -> None:
    assert worst([0.1, 0.3, 0.2]) == 0.3
    assert all(math.isnan(worst(errors)) for errors in ([0.0, math.nan], [math.nan, 0.0], [0.1, math.nan, 0.2]))
    assert relative([2.0, 1.1], [2.0, 1.0]) == pytest.approx(0.1)
    assert not relative([2.0, math.nan, 2.0], [2.0, 2.0, 2.0]) <= 1.0
    wanted = {name: torch.ones(3, dtype=torch.float64) for name in ("a", "b", "c")}
    own = {name: gradient.float() for name, gradient in wanted.items()}
    ratio, _ = gradient_error(own, own, wanted)
    assert ratio == 0.0
    ratio, name = gradient_error(own | {"b": torch.tensor([1.0, math.nan, 1.0])}, own, wanted)
    assert (ratio, name) == (math.inf, "b")
