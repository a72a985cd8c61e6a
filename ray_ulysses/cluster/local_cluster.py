"""Starts a Ray cluster of several nodes on this machine; the nodes can be killed and replaced.

The cluster class is part of Ray 2.60's own test utilities (developer API).
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psutil
from ray.cluster_utils import Cluster

from ray_ulysses.cluster.ray_access import private_session
from ray_ulysses.parallel.gpu_environment import shared_gpu_environment


class LocalCluster:
    """A local Ray cluster: a head without workers, and nodes, each with its own loopback address.

    Args:
        cpus_per_node: Logical CPUs per node.
        head_cpus: Logical CPUs of the head.
        gpus_per_node: GPUs per node. Nodes share GPUs if the machine has too few.
        gpus: IDs of this machine's GPUs, in CUDA_VISIBLE_DEVICES notation.
    """

    def __init__(
        self, cpus_per_node: int, head_cpus: int = 0, *, gpus_per_node: int = 0, gpus: Sequence[str] = ()
    ) -> None:
        assert gpus_per_node <= len(gpus)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._cpus, self._number, self._nodes = cpus_per_node, 1, dict[str, Any]()
        self._gpus_per_node, self._gpus, self._claims = gpus_per_node, tuple(gpus), dict[str, tuple[str, ...]]()
        head = {"num_cpus": head_cpus, "node_ip_address": "127.0.1.1", "include_dashboard": False}
        with contextlib.ExitStack() as stack:
            stack.enter_context(private_session())
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
            stack.callback(self._cluster.shutdown)
            self._stack = stack.pop_all()

    @property
    def address(self) -> str:
        """Address of the head."""
        return str(self._cluster.address)

    @property
    def nodes(self) -> Mapping[str, str]:
        """Node addresses by Ray node ID, without the head."""
        return {node: str(one.node_ip_address) for node, one in self._nodes.items()}

    def add_node(self) -> str:
        """Start a node, and return its Ray node ID. Only the main thread may call this method."""
        # Never reuse a lost node's address: the new node could be mistaken for the lost node.
        self._number += 1
        address = f"127.0.1.{self._number}"
        options: dict[str, Any] = {"num_cpus": self._cpus, "num_gpus": self._gpus_per_node, "node_ip_address": address}
        claimed = least_claimed(self._gpus, self._claims.values(), self._gpus_per_node)
        if claimed:
            options["env_vars"] = {"CUDA_VISIBLE_DEVICES": ",".join(claimed)} | shared_gpu_environment(address)
        node = self._cluster.add_node(**options)
        self._nodes[node.node_id], self._claims[node.node_id] = node, claimed
        return str(node.node_id)

    def kill_node(self, node_id: str) -> None:
        """Kill all processes of a node at once, as a machine failure would."""
        everything, node = self.processes(node_id), self._nodes.pop(node_id)
        del self._claims[node_id]
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        for process in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.worker_nodes.discard(node)

    def processes(self, node_id: str) -> list[psutil.Process]:
        """Return all processes that the node's raylet started."""
        found: list[psutil.Process] = []
        for info in self._nodes[node_id].all_processes["raylet"]:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(info.process.pid).children(recursive=True)
        return found

    def shutdown(self) -> None:
        """End all processes of the cluster."""
        self._stack.close()


def least_claimed(gpus: Sequence[str], claims: Iterable[Sequence[str]], count: int) -> tuple[str, ...]:
    """Return the `count` GPUs that the fewest nodes have claimed."""
    taken = Counter(gpu for claimed in claims for gpu in claimed)
    return tuple(sorted(gpus, key=lambda gpu: taken[gpu])[:count])
