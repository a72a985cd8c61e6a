"""How far apart two results are: NaN where any part of it is NaN, which `max` may leave out, so that no bound holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray_ulysses.tracking.history import RunHistory


def worst(errors: Iterable[float]) -> float:
    found = list(errors)
    return math.nan if any(math.isnan(error) for error in found) else max(found)


def relative(ours: Sequence[float], wanted: Sequence[float]) -> float:
    return worst(abs(a - b) / abs(b) for a, b in zip(ours, wanted, strict=True))


def losses_apart(ours: RunHistory, wanted: RunHistory) -> float:
    assert [step.step for step in ours.steps] == [step.step for step in wanted.steps]
    return relative([step.loss for step in ours.steps], [step.loss for step in wanted.steps])
