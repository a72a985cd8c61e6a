"""Fixtures for every test."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.long_tests import long_tests, without_case
from tests.result_table import ResultTable

# Set before torch is imported. Several processes share the cores, and threads that wait for one another cost more
# than they bring: with two, the torch tests take twice the CPU time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A thread that uses Ray after it was ended would start another one, which ends the process a minute after its own end.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")

# How long one example takes says how busy the machine is, and nothing of the code.
settings.register_profile("whole", deadline=None, max_examples=100)
settings.register_profile("fast", deadline=None, max_examples=25)


def pytest_configure(config: pytest.Config) -> None:
    """Try fewer random examples where slow tests are left out."""
    settings.load_profile("fast" if "not slow" in config.option.markexpr else "whole")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that are listed as long, before tests are chosen by their markers."""
    listed = long_tests()
    for item in items:
        if without_case(item.nodeid) in listed:
            item.add_marker(pytest.mark.long)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what imports have made out of garbage collections, each of which would look through it: up to a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def mlflow_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables to copy, made once for all processes: making them takes seconds."""
    for name in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ.setdefault(name, "true")
    from ray_ulysses.tracking.mlflow_client import open_client

    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with (shared / "mlflow-tables.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        open_client(f"sqlite:///{shared}/mlflow-tables.db")
    return shared / "mlflow-tables.db"


@pytest.fixture
def result_table() -> ResultTable:
    """An empty table of results."""
    return ResultTable()


@pytest.fixture(scope="session")
def fault_table() -> Iterator[ResultTable]:
    """The table of the fault matrix, stored where a run of the whole matrix asks for it."""
    table = ResultTable()
    yield table
    if "STORE_FAULTS" in os.environ and table.rows:
        table.write("faults", "Faults, what the run did, and what they cost", by=os.environ["STORE_FAULTS"])
