"""Nodes of a local cluster that claim the same GPU; Ray takes it on trust that there is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ulysses.cluster.local_cluster import LocalCluster
from ray_ulysses.cluster.session import ray_session
from tests.cluster.conftest import ray_folder as ray_folder

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(120)]


def _seen() -> tuple[list[str], str, str]:
    return [str(one) for one in ray.get_gpu_ids()], os.environ["CUDA_VISIBLE_DEVICES"], os.environ["NCCL_HOSTID"]


def test_two_nodes_each_claim_the_one_gpu(ray_folder: Path) -> None:
    cluster = LocalCluster(cpus_per_node=1, gpus_per_node=1, gpus=("0",))
    try:
        nodes = [cluster.add_node() for _ in range(2)]
        with ray_session(cluster.address, cpus=0):
            look = ray.remote(_seen)
            asked = [
                look.options(num_gpus=1, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
                for node in nodes
            ]
            found = ray.get(asked, timeout=60)
        assert [one[:2] for one in found] == [(["0"], "0")] * 2
        assert {one[2] for one in found} == set(cluster.nodes.values())
    finally:
        cluster.shutdown()
