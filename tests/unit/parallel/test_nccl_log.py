"""Transports between ranks are parsed from NCCL's log, which is in memory."""

from __future__ import annotations

import os

import pytest

from ray_ulysses.parallel.gpu_environment import keep_nccl_log, nccl_log, transports

# The form of NCCL 2.28's lines.
LOG = """node-1:71:204 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
node-1:71:204 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node-1:71:204 [0] NCCL INFO Channel 00/1 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA comm 0x55d4 nRanks 16
node-1:71:204 [0] NCCL INFO Channel 01/1 : 0[0] -> 8[0] [send] via NET/IB/2(3)/GDRDMA
node-1:71:204 [0] NCCL INFO Channel 02/1 : 0[0] -> 9[1] [send] via NET/AWS Libfabric/1
node-1:71:204 [0] NCCL INFO Channel 03/1 : 0[0] -> 9[1] [receive] via NET/Socket/0
node-1:71:204 [0] NCCL INFO Channel 03 : 0[0] -> 2[2] via SHM/direct/direct
node-1:71:204 [0] NCCL INFO Connected all rings
"""


def test_transports_are_named_once_and_without_their_devices() -> None:
    wanted = "NET/AWS Libfabric", "NET/IB/GDRDMA", "NET/Socket", "P2P/CUMEM/read", "SHM/direct/direct"
    assert transports(LOG) == wanted
    assert transports("NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>") == ()


def test_the_log_is_written_to_memory_and_read() -> None:
    environment: dict[str, str] = {}
    keep_nccl_log(environment)
    assert (environment["NCCL_DEBUG"], environment["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT")
    with open(environment["NCCL_DEBUG_FILE"], "w") as file:
        file.write(LOG)
    assert nccl_log(environment) == LOG
    os.close(int(environment["NCCL_DEBUG_FILE"].rpartition("/")[2]))


@pytest.mark.parametrize("file", [{}, {"NCCL_DEBUG_FILE": "/nonexistent/%h.%p"}])
def test_a_log_that_the_user_configured_is_not_changed(file: dict[str, str]) -> None:
    environment = {"NCCL_DEBUG": "WARN"} | file
    keep_nccl_log(environment)
    assert environment == {"NCCL_DEBUG": "WARN"} | file
    assert nccl_log(environment) == ""
