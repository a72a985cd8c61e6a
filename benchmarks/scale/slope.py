"""How a figure grows with the size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the exponent of the power law nearest to the values: 0 for a constant, 1 for linear, 2 for quadratic."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])
