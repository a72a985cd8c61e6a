"""Environment variables for NCCL and PyTorch's allocator, set before a process first touches a GPU.

NCCL reports its transports only in its log, which covers the start of a few communicators. Expandable segments of the
allocator are not fragmented by rows of different lengths.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from pathlib import Path

_LEVEL, _PARTS, _FILE = "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"
_TRANSPORT = re.compile(r" via ((?:P2P|SHM|NET)/.*?)(?: comm 0x|$)", re.MULTILINE)


def keep_nccl_log(environment: MutableMapping[str, str]) -> None:
    """Make NCCL write this process's log into memory, unless the user has configured its log.

    Must be called before NCCL's first use. Not yet tested with NCCL.
    """
    if _LEVEL not in environment:
        descriptor = os.memfd_create("ray-ulysses-nccl", os.MFD_CLOEXEC)
        environment.update({_LEVEL: "INFO", _PARTS: "INIT", _FILE: f"/proc/self/fd/{descriptor}"})


def nccl_log(environment: MutableMapping[str, str]) -> str:
    """Return NCCL's log so far; empty if it is not in a readable file."""
    try:
        return Path(environment[_FILE]).read_text(encoding="utf-8", errors="replace")
    except (KeyError, OSError):
        return ""


def transports(log: str) -> tuple[str, ...]:
    """Return the transports between ranks that a log names, such as ``NET/IB/GDRDMA``, without devices (pure)."""
    found = (match[1].strip().split("/") for match in _TRANSPORT.finditer(log))
    return tuple(sorted({"/".join(part for part in parts if not part[:1].isdigit()) for parts in found}))


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the allocator's settings: the name since PyTorch 2.9, and the older one."""


def expand_segments(environment: MutableMapping[str, str]) -> None:
    """Make PyTorch allocate GPU memory in expandable segments, unless the user has configured its allocator.

    PyTorch reads the variable before its first allocation on a GPU, and never on a CPU.
    """
    if not any(name in environment for name in ALLOCATOR):
        environment[ALLOCATOR[0]] = "expandable_segments:True"


def shared_gpu_environment(host: str) -> dict[str, str]:
    """Return the variables that make NCCL accept a rank that shares its GPU with others on this machine (pure).

    NCCL refuses two ranks with the same host hash and GPU. If each rank has its own host hash, all are accepted, and
    data goes through sockets on the loopback interface. Not yet tested on a GPU.
    """
    return {"NCCL_HOSTID": host, "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
