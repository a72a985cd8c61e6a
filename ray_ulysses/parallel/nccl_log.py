"""Has NCCL write its log into memory, from which the transports that it chose are read.

NCCL tells them nowhere else. The log is as long as the start of a few communicators.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from pathlib import Path

_LEVEL, _PARTS, _FILE = "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"
_TRANSPORT = re.compile(r" via ((?:P2P|SHM|NET)/.*?)(?: comm 0x|$)", re.MULTILINE)


def keep_nccl_log(environment: MutableMapping[str, str]) -> None:
    """Have NCCL write the log of this process into memory, unless the user has it written elsewhere.

    It must be called before NCCL's first use. Not yet tested with NCCL.

    Args:
        environment: This process's environment.
    """
    if _LEVEL not in environment:
        descriptor = os.memfd_create("ray-ulysses-nccl", os.MFD_CLOEXEC)
        environment.update({_LEVEL: "INFO", _PARTS: "INIT", _FILE: f"/proc/self/fd/{descriptor}"})


def nccl_log(environment: MutableMapping[str, str]) -> str:
    """Return NCCL's log so far; empty where it was written to no file that can be read."""
    try:
        return Path(environment[_FILE]).read_text(encoding="utf-8", errors="replace")
    except (KeyError, OSError):
        return ""


def transports(log: str) -> tuple[str, ...]:
    """Return the transports between ranks that a log names, such as ``NET/IB/GDRDMA``, without devices (pure)."""
    found = (match[1].strip().split("/") for match in _TRANSPORT.finditer(log))
    return tuple(sorted({"/".join(part for part in parts if not part[:1].isdigit()) for parts in found}))
