"""Acts as a stranger on the network of a Ray that runs on this machine: without its token, and with another one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from http.client import HTTPException
from pathlib import Path
from typing import Any

import grpc
import psutil
from ray.core.generated import (
    core_worker_pb2,
    core_worker_pb2_grpc,
    gcs_service_pb2,
    gcs_service_pb2_grpc,
    node_manager_pb2,
    node_manager_pb2_grpc,
)

from tests import stranger

WRONG = "cd" * 32
_ANSWER_S = 20.0
_RAYS = ("gcs_server", "raylet/raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::IDLE")
_DRIVER = """
import sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=0)
def task(path):
    open(path + ".task", "w").close()

@ray.remote(num_cpus=0)
class Actor:
    def act(self, path):
        open(path + ".actor", "w").close()

ray.get([task.remote(sys.argv[2]), Actor.remote().act.remote(sys.argv[2])], timeout=60)
"""


def heads_of(root: psutil.Process) -> list[psutil.Process]:
    """Return the heads that a command has started."""
    return [one for one in root.children(recursive=True) if one.name() == "gcs_server"]


def address_of(head: psutil.Process) -> str:
    """Return the address at which drivers connect to a head."""
    (port,) = {one.laddr.port for one in head.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    (host,) = [word.partition("=")[2] for word in head.cmdline() if word.startswith("--node-ip-address=")]
    return f"{host}:{port}"


def listening(root: psutil.Process) -> dict[int, str]:
    """Return the ports on which Ray's own processes below a process listen, and each one's process."""
    # Workers, supervisors and agents of peer memory also listen for each other.
    found = stranger.listening(root.pid).items()
    return {port: process[:80] for (_, port), process in found if any(name in process for name in _RAYS)}


def job_answers(root: psutil.Process, host: str) -> set[str]:
    """Ask all ports of Ray below a process for a job, without the token and with another one; return the answers."""
    addresses = [f"http://{host}:{port}" for port in listening(root)]
    with futures.ThreadPoolExecutor(16) as pool:
        asked = pool.map(lambda one: list(_over_http(*one)), itertools.product(addresses, (None, WRONG)))
        return {answer for answers in asked for _, answer in answers}


def answers(host: str, port: int) -> Iterator[tuple[str, str]]:
    """Ask one port for a job, a task and an actor in each way that Ray has; yield the requests and their answers."""
    for token in (None, WRONG):
        yield from ((f"{request} {token}", answer) for request, answer in _over_grpc(f"{host}:{port}", token))
        yield from ((f"{request} {token}", answer) for request, answer in _over_http(f"http://{host}:{port}", token))


def _over_grpc(address: str, token: str | None) -> Iterator[tuple[str, str]]:
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    with grpc.insecure_channel(address) as channel:
        gcs = gcs_service_pb2_grpc.ActorInfoGcsServiceStub(channel)
        jobs = gcs_service_pb2_grpc.JobInfoGcsServiceStub(channel)
        raylet = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
        worker = core_worker_pb2_grpc.CoreWorkerServiceStub(channel)
        requests: dict[str, tuple[Any, Any]] = {
            "a driver": (jobs.AddJob, gcs_service_pb2.AddJobRequest()),
            "an actor": (gcs.RegisterActor, gcs_service_pb2.RegisterActorRequest()),
            "a worker": (raylet.RequestWorkerLease, node_manager_pb2.RequestWorkerLeaseRequest()),
            "a task": (worker.PushTask, core_worker_pb2.PushTaskRequest()),
        }
        for name, (call, request) in requests.items():
            try:
                call(request, timeout=_ANSWER_S, metadata=metadata)
                yield name, "OK"
            except grpc.RpcError as error:
                yield name, error.code().name


def _over_http(address: str, token: str | None) -> Iterator[tuple[str, str]]:
    headers = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    for path in ("/api/jobs/", "/api/job_agent/jobs/", "/get_or_create_runtime_env"):
        request = urllib.request.Request(address + path, b'{"entrypoint": "true"}', headers)
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                yield path, str(answer.status)
        except urllib.error.HTTPError as error:
            yield path, str(error.code)
        except (OSError, HTTPException):
            yield path, "not HTTP"


def drive(address: str, canary: Path, token: str | None) -> subprocess.CompletedProcess[str]:
    """Run a driver that connects to a head and has a task and an actor create files whose names begin alike."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Without the token of another cluster that the user of this machine may have.
    environment["HOME"] = str(canary.parent)
    if token is not None:
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    return subprocess.run(
        [sys.executable, "-c", _DRIVER, address, str(canary)],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
