"""Several ranks on one GPU: for tests, rehearsals and benchmarks on a machine that has one."""

from __future__ import annotations


def shared_gpu_environment(host: str) -> dict[str, str]:
    """Return the variables with which NCCL accepts a rank that shares its GPU with others on this machine (pure).

    NCCL refuses two ranks with the same host hash and the same GPU. With a host of its own each is accepted, and its
    data goes through sockets on the loopback interface. Not yet tested on a GPU.

    Args:
        host: A name that no other rank on this GPU has.
    """
    return {"NCCL_HOSTID": host, "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
