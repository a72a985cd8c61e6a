"""Settings of the engine that depend on the nodes of an attempt."""

from __future__ import annotations

import pytest

from ray_ulysses.config.loading import parse_config
from ray_ulysses.run.settings import warn_of_unused_shards, zero_settings
from tests.unit.config.trees import small_tree

NODES = {"memory__zero_secondary": "node", "cluster__workers": {"min": 1, "max": 8}, "cluster__gpus_per_node": 4}


@pytest.mark.parametrize(
    ("nodes", "size", "is_warned"),
    [
        ("aaaabbbb", 4, False),
        # All on one node.
        ("aaaa", 1, False),
        ("a", 1, False),
        # Smaller groups would need more memory than planned.
        ("aabb", 1, True),
        ("aaab", 1, True),
        ("aaaaaabbbbbb", 6, False),
    ],
)
def test_secondary_shards_are_shared_within_nodes_and_never_exceed_the_plan(
    nodes: str, size: int, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = parse_config(small_tree(**NODES))
    assert zero_settings(config, 1, nodes).secondary_size == size
    assert not caplog.text, "zero_settings is called on every rank"
    warn_of_unused_shards(config, nodes)
    assert ("memory.zero_secondary=node has no effect" in caplog.text) == is_warned
    assert zero_settings(parse_config(small_tree()), 1, nodes).secondary_size == 1
    caplog.clear()
    warn_of_unused_shards(parse_config(small_tree()), nodes)
    assert not caplog.text


def test_shards_that_are_planned_for_one_node_are_not_described_as_groups_of_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = parse_config(small_tree(**NODES | {"cluster__gpus_per_node": 8}))
    warn_of_unused_shards(config, "aaaabbbb")
    assert "the nodes have 4 workers" in caplog.text
    assert "for one node; set cluster.gpus_per_node" in caplog.text
