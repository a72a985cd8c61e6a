"""The load of rank 0's node, as MLflow's page of system metrics shows it."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from ray_ulysses.trainer.record import SystemMeter


def test_the_meter_reads_the_load_since_the_reading_before() -> None:
    meter = SystemMeter(torch.device("cpu"))
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    found = meter.read()
    assert 0 < found["system/cpu_utilization_percentage"] <= 100
    used = psutil.virtual_memory().used / 1e6
    assert found["system/system_memory_usage_megabytes"] == pytest.approx(used, rel=0.5)
    free = psutil.disk_usage(os.sep).free / 1e6
    assert found["system/disk_available_megabytes"] == pytest.approx(free, rel=0.5)


def test_the_network_counts_from_the_start_of_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = SimpleNamespace(bytes_recv=5e6, bytes_sent=7e6)
    monkeypatch.setattr(psutil, "net_io_counters", lambda: counted)
    meter = SystemMeter(torch.device("cpu"))
    counted.bytes_recv, counted.bytes_sent = 8e6, 7.5e6
    found = meter.read()
    assert (found["system/network_receive_megabytes"], found["system/network_transmit_megabytes"]) == (3.0, 0.5)


def test_a_system_that_tells_nothing_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_io_counters", lambda: None)
    meter = SystemMeter(torch.device("cpu"))
    assert meter.read()["system/network_receive_megabytes"] == 0.0

    def refuse() -> None:
        raise PermissionError("/proc")

    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    assert meter.read() == {}
    for name in ("cpu_percent", "net_io_counters"):
        monkeypatch.setattr(psutil, name, refuse)
    assert SystemMeter(torch.device("cpu")).read() == {}, "nor an attempt"
