"""When a run is restarted on more workers."""

from __future__ import annotations

import pytest

from ray_ulysses.elastic.placement import is_worth_growing


@pytest.mark.parametrize(
    ("workers", "possible", "seconds_left", "restart_s", "grows"),
    [
        pytest.param(4, 8, 1000.0, 50.0, True, id="half of 1,000 s are ten times 50 s"),
        pytest.param(4, 8, 990.0, 50.0, False, id="a little less is not worth it"),
        pytest.param(4, 5, 1000.0, 50.0, False, id="a fifth of 1,000 s is not"),
        pytest.param(4, 5, None, 50.0, True, id="a long run"),
        pytest.param(8, 8, None, 1.0, False, id="nothing to gain"),
        pytest.param(8, 6, None, 0.0, False, id="fewer is never growth"),
        pytest.param(1000, 1001, 10 * 365 * 86400.0, 50.0, False, id="what takes years is counted for a day"),
    ],
)
def test_growth_must_save_ten_times_what_it_costs(
    workers: int, possible: int, seconds_left: float | None, restart_s: float, grows: bool
) -> None:
    assert is_worth_growing(workers, possible, seconds_left=seconds_left, restart_s=restart_s) is grows
