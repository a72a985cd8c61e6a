"""Acts as a stranger on the network of a Ray that runs on this machine: without its token, and with another one."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
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

WRONG = "cd" * 32
_ANSWER_S = 20.0
_RAYS = ("gcs_server", "raylet/raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::IDLE")


def listening(root: psutil.Process) -> dict[int, str]:
    found: dict[int, str] = {}
    for process in root.children(recursive=True):
        # Workers, supervisors and agents of peer memory also listen for each other.
        if any(name in _command(process) for name in _RAYS):
            with contextlib.suppress(psutil.Error):
                sockets = process.net_connections("tcp")
                found |= {one.laddr.port: _command(process)[:80] for one in sockets if one.status == "LISTEN"}
    return found


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


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
