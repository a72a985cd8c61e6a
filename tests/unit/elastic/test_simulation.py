"""Random histories of whole runs: every step once, never stuck, whatever fails."""

from __future__ import annotations

import time

import pytest

from tests.breadth import examples
from tests.unit.elastic.simulation import FAULTS, LAST_STEP, REPLAYED, Simulation

_SHAPES = [(2, 2, 2), (3, 2, 2), (4, 4, 2), (4, 8, 8), (8, 2, 4), (16, 8, 8), (5, 2, 4)]
"""Nodes, workers per node, and sp_size."""


def _play(seed: int, nodes: int, per_node: int, sp_size: int, faults: int) -> Simulation:
    one = Simulation(seed, nodes=nodes, per_node=per_node, sp_size=sp_size, faults=faults)
    one.run()
    assert one.trained() == list(range(1, LAST_STEP + 1)), f"seed {seed}"
    return one


def test_every_step_is_trained_once_whatever_fails() -> None:
    reforms = restarts = memory = 0
    began = time.process_time()
    for seed in range(10 * examples(100)):
        shape = _SHAPES[seed % len(_SHAPES)]
        one = _play(seed, *shape, faults=1 + seed % 7)
        reforms, restarts, memory = reforms + one.reforms, restarts + one.restarts, memory + one.loads_from_memory
    # The histories are worth something: both ways of recovery were taken, and both kinds of state.
    assert reforms > 100 and restarts > 30 and memory > 50
    assert time.process_time() - began < 120


def test_every_step_is_trained_once_where_lost_workers_are_replaced() -> None:
    """By workers that join while the others wait for them, of which some never come; the number of workers is fixed."""
    replaced = restarts = 0
    for seed in range(10 * examples(20)):
        nodes, per_node, sp_size = _SHAPES[seed % 3]
        one = Simulation(
            seed, nodes=nodes, per_node=per_node, sp_size=sp_size, faults=1 + seed % 7, replaces=True,
            least=nodes * per_node,
        )  # fmt: skip
        one.run()
        assert one.trained() == list(range(1, LAST_STEP + 1)), f"seed {seed}"
        replaced, restarts = replaced + one.replaced, restarts + one.restarts
    assert replaced > 10 and restarts > 10


def test_a_run_whose_groups_span_nodes_trains_on_all_that_there_are() -> None:
    sizes = set()
    for seed in range(20):
        one = _play(seed, 4, 2, 4, faults=3)
        sizes |= {len(happened.before[1]) for happened in one.happened if happened.before is not None}
    # A lost or drained node leaves one group of the two.
    assert sizes == {4, 8}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_workers_recover_as_well(seed: int) -> None:
    assert _play(seed, 128, 8, 8, faults=6).reforms > 0


def test_the_histories_that_real_processes_replay_hold_every_event_and_wait_for_each() -> None:
    events = []
    for seed, nodes, per_node, sp_size in REPLAYED:
        one = Simulation(seed, nodes=nodes, per_node=per_node, sp_size=sp_size, faults=4)
        one.run()
        # An event that comes before anybody trains again can't be replayed at the same moment.
        assert all(happened.before is not None for happened in one.happened), seed
        events += [happened.what for happened in one.happened]
    assert {*FAULTS} - {*events} == {"two nodes"}
