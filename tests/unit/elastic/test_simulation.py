"""Random histories of whole runs: every step once, never stuck, whatever fails."""

from __future__ import annotations

from typing import Any

import pytest

from tests.breadth import fast_only
from tests.unit.elastic.simulation import FAULTS, LAST_STEP, REPLAYED, Simulation

_SHAPES = [(2, 2, 2), (3, 2, 2), (4, 4, 2), (4, 8, 8), (8, 2, 4), (16, 8, 8), (5, 2, 4)]
"""Nodes, workers per node, and sp_size."""


def _play(seed: int, nodes: int, per_node: int, sp_size: int, faults: int, **options: Any) -> Simulation:
    one = Simulation(seed, nodes=nodes, per_node=per_node, sp_size=sp_size, faults=faults, **options)
    one.run()
    assert one.trained() == list(range(1, LAST_STEP + 1)), f"seed {seed}"
    return one


@pytest.mark.parametrize("first", fast_only(range(0, 1000, 100), 0))
def test_every_step_is_trained_once_whatever_fails(first: int) -> None:
    seeds = range(first, first + 100)
    played = [_play(seed, *_SHAPES[seed % len(_SHAPES)], faults=1 + seed % 7) for seed in seeds]
    # The histories are worth something: both ways of recovery were taken, and both kinds of state.
    assert sum(one.reforms for one in played) > 40 and sum(one.restarts for one in played) > 12
    assert sum(one.loads_from_memory for one in played) > 20


@pytest.mark.parametrize("first", fast_only(range(0, 200, 100), 0))
def test_every_step_is_trained_once_where_lost_workers_are_replaced(first: int) -> None:
    """By workers that join while the others wait for them, of which some never come; the number of workers is fixed."""
    played = []
    for seed in range(first, first + 100):
        nodes, per_node, sp_size = _SHAPES[seed % 3]
        faults, least = 1 + seed % 7, nodes * per_node
        played.append(_play(seed, nodes, per_node, sp_size, faults, replaces=True, least=least))
    assert sum(one.replaced for one in played) > 10 and sum(one.restarts for one in played) > 10


def test_a_run_whose_groups_span_nodes_trains_on_all_that_there_are() -> None:
    played = [_play(seed, 4, 2, 4, faults=3) for seed in range(20)]
    # A lost or drained node leaves one group of the two.
    assert {len(one.before[1]) for run in played for one in run.happened if one.before is not None} == {4, 8}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_workers_recover_as_well(seed: int) -> None:
    assert _play(seed, 128, 8, 8, faults=6).reforms > 0


def test_the_histories_that_real_processes_replay_hold_every_event_and_wait_for_each() -> None:
    played = [_play(seed, *shape, faults=4) for seed, *shape in REPLAYED]
    # An event that comes before anybody trains again can't be replayed at the same moment.
    assert all(happened.before is not None for one in played for happened in one.happened)
    assert {*FAULTS} - {happened.what for one in played for happened in one.happened} == {"two nodes"}
