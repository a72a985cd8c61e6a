"""How a child that trains joins the others, and waits for the memory of the one before on its GPU."""

from __future__ import annotations

import logging
import socket
from types import SimpleNamespace

import psutil
import pytest
import torch

from ray_ulysses.errors import RunError
from ray_ulysses.parallel.gpu_environment import nccl_log
from ray_ulysses.supervision import child
from ray_ulysses.supervision.child import WATCHDOG, backend_of, choose_free_device, interface_towards, prepare_gpu
from tests.unit.fake_cuda import FakeCuda
from tests.unit.peer_memory.test_agent import SetClock

DEVICE, GIB = torch.device("cuda", 3), 2**30
FULL = RuntimeError("CUDA error: out of memory")


def test_communicators_of_gpus_are_created_with_their_groups_and_nccls_watchdog_ends_no_process() -> None:
    """In the first step, each rank would come at its own time, and an error would count as the step's."""
    assert backend_of(DEVICE) == {"backend": "nccl", "device_id": DEVICE}
    assert backend_of(torch.device("cpu")) == {"backend": "gloo"}
    # 0 is `NoHandling` in PyTorch's `ProcessGroupNCCL.hpp`.
    assert WATCHDOG == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda.installed(monkeypatch)


def wait(*held: float | RuntimeError, within_s: float = 10.0) -> float:
    """Wait for a GPU of 80 GiB of which so much is held at each look, and return for how long."""
    looks, clock = [*held], SetClock()

    def memory(device: torch.device) -> tuple[int, int]:
        assert device == DEVICE
        now = looks.pop(0) if len(looks) > 1 else looks[0]
        if isinstance(now, RuntimeError):
            raise now
        return int((80 - now) * GIB), 80 * GIB

    choose_free_device(DEVICE, within_s, memory=memory, clock=clock)
    return clock.time


def test_the_memory_of_the_process_before_is_waited_for(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    # Free, or held by the contexts of four ranks of one GPU.
    assert wait(0.5) == wait(2.0) == 0.0
    assert cuda.chosen == DEVICE
    assert wait(FULL, 71.0, 71.0, 0.5) == pytest.approx(0.6)
    assert caplog.text == ""


@pytest.mark.parametrize("own", [{}, {"NCCL_DEBUG": "WARN", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}], ids=str)
def test_a_child_waits_for_its_gpu_and_configures_nccl_unless_the_user_has(cuda: FakeCuda, own: dict[str, str]) -> None:
    looks, environment = [FULL, FULL], dict(own)

    def memory(device: torch.device) -> tuple[int, int]:
        if looks:
            raise looks.pop()
        return 80 * GIB, 80 * GIB

    prepare_gpu(DEVICE, 60.0, environment, memory=memory)
    assert cuda.chosen == DEVICE and not looks
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == own.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    assert environment["NCCL_DEBUG"] == own.get("NCCL_DEBUG", "INFO")
    assert (nccl_log(environment) == "") and ("NCCL_DEBUG_FILE" in environment) == (not own)


def test_memory_that_is_held_for_good_is_named_and_another_error_is_not_waited_for(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert wait(30.0) == pytest.approx(10.0, abs=0.3)
    (record,) = caplog.records
    assert "30.0 of 80.0 GiB of the memory of cuda:3" in record.getMessage()
    with pytest.raises(RunError, match="cuda:3"):
        wait(FULL)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        wait(RuntimeError("CUDA error: unspecified launch failure"))


def test_the_interface_is_the_one_that_leads_to_the_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this node's name says; where a name leads nowhere, gloo chooses."""
    found = interface_towards("127.0.0.1", 29500)
    assert found is not None and "127.0.0.1" in [one.address for one in psutil.net_if_addrs()[found]]
    assert interface_towards("no such host", 29500) is None
    for addresses, expected in (
        ({"docker0": "172.17.0.1", "lo": "127.0.0.1", "eth0": "10.0.0.5"}, "lo"),
        ({"docker0": "172.17.0.1", "eth0": "10.0.0.5"}, None),
        ({"v6": "::1", "first": "127.0.0.1", "second": "127.0.0.1"}, "first"),
    ):
        given = {
            name: [SimpleNamespace(family=socket.AF_INET6 if ":" in text else socket.AF_INET, address=text)]
            for name, text in addresses.items()
        }
        monkeypatch.setattr(child.psutil, "net_if_addrs", lambda given=given: given)
        assert interface_towards("127.0.0.1", 29500) == expected
