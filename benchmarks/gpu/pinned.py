"""How long a killed process takes to end with memory on the GPU and pinned memory on the host, as at a million tokens.

The coordinator and the supervisor wait for the end of a process that they kill, each with a limit of its own.
"""

from __future__ import annotations

import json
import mmap
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

GIB = 2**30
PINNED_GIB, DEVICE_GIB = 72.0, 40.0
"""Of a rank of eight at a million tokens."""
_FREE_S = 60.0
_IDLE_GIB = 2.0
_WAIT_S = 420.0


def hold(host_gib: float, device_gib: float, device: str) -> None:
    """Take the memory, say how long that took, and compute until killed."""
    began = time.time()
    size = int(host_gib * GIB)
    if device != "cuda":
        memory = mmap.mmap(-1, size)
        for start in range(0, size, mmap.PAGESIZE):
            memory[start] = 1
    else:
        import torch

        from ray_ulysses.engine.activation_offload import CudaCopies

        torch.cuda.set_device(0)
        held = torch.empty(int(device_gib * GIB), dtype=torch.uint8, device="cuda")
        copies = CudaCopies(size, torch.device("cuda", 0))
        # Its range is pinned up to the last byte that is used.
        copies.copy_out(held[: 1 << 20], size - (1 << 20))
        torch.cuda.synchronize()
    sys.stdout.write(f"{time.time() - began}\n")
    sys.stdout.flush()
    if device != "cuda":
        time.sleep(_WAIT_S)
        return
    factor = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    while True:
        factor @ factor


def used_gib() -> float | None:
    """Return the memory of the GPU that is in use by any process; None without a driver."""
    asked = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return float(subprocess.run(asked, capture_output=True, text=True, check=True).stdout) / 1024
    except FileNotFoundError:
        return None


def measure(host_gib: float, device_gib: float, device: str, limit_s: float) -> dict[str, Any]:
    """Return seconds to take the memory, from the kill to the process's end, and until the GPU's memory is free.

    Raises:
        TimeoutError: The memory could not be taken in time.
    """
    # A process that ended just before may still hold memory.
    began = time.time()
    while (before := used_gib()) is not None and before > _IDLE_GIB and time.time() - began < _FREE_S:
        time.sleep(0.5)
    order = json.dumps([host_gib, device_gib, device])
    process = subprocess.Popen([sys.executable, __file__, order], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], limit_s)[0]:
            raise TimeoutError(f"the memory was not taken within {limit_s:.0f} s")
        taken_s = float(process.stdout.readline())
        while_held = used_gib()
    finally:
        began = time.time()
        process.kill()
        process.wait()
    gone_s, free_s = time.time() - began, None
    while before is not None and time.time() - began < _FREE_S:
        if (used_gib() or 0.0) < before + 0.25:
            free_s = time.time() - began
            break
        time.sleep(0.05)
    return {
        "host_gib": host_gib,
        "device_gib": device_gib,
        "taken_s": taken_s,
        "gone_s": gone_s,
        "free_s": free_s,
        "used_gib": [before, while_held],
    }


if __name__ == "__main__":
    hold(*json.loads(sys.argv[1]))
