"""Which GPUs a node of a local cluster claims."""

from __future__ import annotations

from ray_ulysses.cluster.local_cluster import least_claimed
from ray_ulysses.parallel.gpu_environment import shared_gpu_environment


def test_nodes_share_gpus_only_where_the_machine_has_too_few() -> None:
    assert least_claimed(("0", "1", "2"), [("0",)], 2) == ("1", "2")
    assert least_claimed(("0",), [("0",), ("0",)], 1) == ("0",)
    assert least_claimed((), [], 0) == ()


def test_ranks_that_share_a_gpu_are_on_hosts_of_their_own() -> None:
    one, two = (shared_gpu_environment(f"127.0.1.{number}") for number in (2, 3))
    assert one["NCCL_HOSTID"] != two["NCCL_HOSTID"]
    assert one["NCCL_SOCKET_IFNAME"] == two["NCCL_SOCKET_IFNAME"] == "lo"
