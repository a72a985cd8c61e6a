"""Orders reach the launcher whole, however long they are, with their descriptors."""

from __future__ import annotations

import os

import pytest

from ray_ulysses.peer_memory import AgentAddresses
from ray_ulysses.supervision.order import MOST_BYTES, Job, Order, pair, receive, send


@pytest.mark.parametrize("num_nodes", [1, 1024])
def test_an_order_arrives_with_its_descriptors(num_nodes: int) -> None:
    nodes = tuple(f"{number:056x}" for number in range(num_nodes))
    order = Order(
        job=Job(
            config={"run": {"name": "x"}}, session="s", command_started=1.0, workers_asked=None, node="a",
            local_rank=0, device="cpu",
        ),
        generation=3, rank=0, rank_nodes=nodes, host="h", port=1,
        memory=AgentAddresses(
            agents=dict.fromkeys(nodes, "10.0.0.1:1"), node=nodes[0], partner=nodes[-1], token="t"
        ),
    )  # fmt: skip
    ours, theirs = pair()
    before = len(os.listdir("/proc/self/fd"))
    with open(os.devnull) as one, open("/proc/self/status") as other:
        send(ours, order, (one.fileno(), other.fileno()))
        received, descriptors = receive(theirs)
        assert received == order and len(descriptors) == 2
        assert b"VmRSS" in os.pread(descriptors[1], 1 << 16, 0)
        for descriptor in descriptors:
            os.close(descriptor)
    assert len(os.listdir("/proc/self/fd")) == before
    assert num_nodes == 1 or len(repr(order)) > MOST_BYTES
