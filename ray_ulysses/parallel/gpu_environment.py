"""Environment variables for NCCL and PyTorch's allocator, set before a process first uses a GPU.

NCCL reports its transports only in its log, which is limited here to the creation of communicators. With expandable
segments, rows of varying length do not fragment the allocator's memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from pathlib import Path

_LEVEL, _PARTS, _FILE = "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"
_TRANSPORT = re.compile(r" via ((?:P2P|SHM|NET)/.*?)(?: comm 0x|$)", re.MULTILINE)


def keep_nccl_log(environment: MutableMapping[str, str]) -> None:
    """Make NCCL log to memory in this process, unless the user has configured NCCL's log.

    Call this function before the first use of NCCL. Not yet tested with NCCL.
    """
    if _LEVEL not in environment:
        descriptor = os.memfd_create("ray-ulysses-nccl", os.MFD_CLOEXEC)
        environment.update({_LEVEL: "INFO", _PARTS: "INIT", _FILE: f"/proc/self/fd/{descriptor}"})


def nccl_log(environment: MutableMapping[str, str]) -> str:
    """Return NCCL's log so far, or an empty string if the log is not in a readable file."""
    try:
        return Path(environment[_FILE]).read_text(encoding="utf-8", errors="replace")
    except (KeyError, OSError):
        return ""


def transports(log: str) -> tuple[str, ...]:
    """Return the transports between ranks found in an NCCL log, such as ``NET/IB/GDRDMA``, without device numbers."""
    found = (match[1].strip().split("/") for match in _TRANSPORT.finditer(log))
    return tuple(sorted({"/".join(part for part in parts if not part[:1].isdigit()) for parts in found}))


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the allocator's settings: the current name (since PyTorch 2.9) and the old name."""


def expand_segments(environment: MutableMapping[str, str]) -> None:
    """Make PyTorch allocate GPU memory in expandable segments, unless the user has configured the allocator.

    PyTorch reads the variable before the first GPU allocation. The variable has no effect on a CPU.
    """
    if not any(name in environment for name in ALLOCATOR):
        environment[ALLOCATOR[0]] = "expandable_segments:True"


def shared_gpu_environment(host: str) -> dict[str, str]:
    """Return the environment variables that make NCCL allow several ranks on one of this machine's GPUs.

    NCCL refuses two ranks with the same host hash and GPU, so ``host`` must differ between ranks. Data then goes
    through sockets on the loopback interface. Not yet tested on a GPU.
    """
    return {"NCCL_HOSTID": host, "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
