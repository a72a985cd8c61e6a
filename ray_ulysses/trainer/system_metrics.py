"""Reads what the node of rank 0 is busy with, by the names under which MLflow shows system metrics."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

import psutil
import torch

_MEGABYTE: Final = 1e6
# What a container without /proc answers; it must not end a run.
_UNTOLD: Final = (OSError, RuntimeError)


class SystemMeter:
    """Reads the load of this node, which takes less than a millisecond.

    Args:
        device: The device of this process; of a GPU the memory in use is read, by whichever process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._received = self._sent = 0.0
        with suppress(*_UNTOLD):
            psutil.cpu_percent()  # the next call measures from here
            self._received, self._sent = self._network()

    def read(self) -> dict[str, float]:
        """Return metrics by name; none of those that this system does not tell."""
        try:
            memory, disk = psutil.virtual_memory(), psutil.disk_usage(os.sep)
            received, sent = self._network()
            found = {
                "cpu_utilization_percentage": psutil.cpu_percent(),
                "system_memory_usage_megabytes": memory.used / _MEGABYTE,
                "system_memory_usage_percentage": memory.used / memory.total * 100,
                "disk_usage_megabytes": disk.used / _MEGABYTE,
                "disk_usage_percentage": disk.percent,
                "disk_available_megabytes": disk.free / _MEGABYTE,
                "network_receive_megabytes": received - self._received,
                "network_transmit_megabytes": sent - self._sent,
            }
        except _UNTOLD:
            return {}
        return {f"system/{name}": round(value, 1) for name, value in {**found, **self._gpu()}.items()}

    def _gpu(self) -> dict[str, float]:
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._device)
        return {
            "gpu_0_memory_usage_megabytes": (total - free) / _MEGABYTE,
            "gpu_0_memory_usage_percentage": (total - free) / total * 100,
        }

    def _network(self) -> tuple[float, float]:
        counted = psutil.net_io_counters()
        # Without an interface there is nothing to count.
        return (0.0, 0.0) if counted is None else (counted.bytes_recv / _MEGABYTE, counted.bytes_sent / _MEGABYTE)
