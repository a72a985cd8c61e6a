"""Checks a cluster before connecting: an unusable one is refused in seconds, where Ray itself tries for minutes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from ray._private import services
from ray._private.gcs_utils import create_gcs_channel
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from ray_ulysses.cluster.ray_access import cluster_token, refused_token
from ray_ulysses.errors import RunError, UserError

_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
"""Answers of a head that asks for a token."""
_HINT = "correct cluster.address or RAY_ADDRESS, or unset both to run on this machine alone"


def check_address(target: str, *, timeout_s: float = 4.0) -> bool:
    """Check that a Ray head answers at an address, and that this machine is one of its nodes.

    Ray 2.60 tries an address that does not answer for minutes, and looks for a node on this machine for one more;
    both are private to it (a canary test covers them).

    Args:
        target: ``host:port`` of the head, or ``auto``.
        timeout_s: Longest wait for each of two answers, in seconds.

    Returns:
        Whether it asks for a token.

    Raises:
        UserError: It is not an address that Ray accepts.
        RunError: Nothing answers there, something other than Ray does, it refuses the user's token, or this machine is
            not one of its nodes.
    """
    asks = asks_for_token(target, timeout_s=timeout_s)
    with cluster_token(target, asks=asks), _node_service(create_gcs_channel(_resolve(target))) as stub:
        _check_membership(stub, target, timeout_s)
    return asks


def asks_for_token(target: str, *, timeout_s: float = 4.0) -> bool:
    """Return whether the Ray head at an address refuses a request without a token.

    Raises:
        UserError: It is not an address that Ray accepts.
        RunError: Nothing answers there, or something other than Ray does.
    """
    address = _resolve(target)
    with cluster_token(target, asks=False):
        # It sends a token if the mode asks for one now.
        channel = create_gcs_channel(address)
    with _node_service(channel) as stub:
        try:
            stub.CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() in _REFUSED:
                return True
            raise RunError(f"no Ray head answers at {target} ({_reason(error, timeout_s)}); {_HINT}") from error
    return False


@contextmanager
def _node_service(channel: grpc.Channel) -> Iterator[Any]:
    try:
        yield gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
    finally:
        channel.close()


def _resolve(target: str) -> str:
    """Return ``host:port``; ``auto`` is the head that was started last on this machine."""
    if "://" in target:
        raise UserError(
            f"cluster.address={target!r}: is not the address of a Ray head; use its host:port (6379 by default) on a "
            "node of the cluster, or remove it and submit a job from elsewhere: `ray-ulysses submit CONFIG --address "
            "http://HEAD:8265`, or `ray job submit`"
        )
    try:
        address = services.canonicalize_bootstrap_address(target)
    except (ConnectionError, ValueError) as error:
        raise UserError(f"cluster.address={target!r}: {error}; use the host:port of a Ray head (port 6379)") from error
    if address is None:
        raise RunError(f"cluster.address={target!r} finds no Ray that runs on this machine; {_HINT}")
    return address


def _check_membership(stub: Any, target: str, timeout_s: float) -> None:
    """Refuse a machine that is not a node of the cluster: Ray connects through the node's own process."""
    try:
        reply = stub.GetAllNodeInfo(gcs_service_pb2.GetAllNodeInfoRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        if error.code() in _REFUSED:
            raise RunError(refused_token(target)) from error
        raise RunError(f"the Ray head at {target} does not list its nodes ({_reason(error, timeout_s)})") from error
    alive = {node.node_id.hex() for node in reply.node_info_list if node.state == GcsNodeInfo.ALIVE}
    if not alive & set(services.find_node_ids()):
        raise RunError(
            f"this machine is not one of the {len(alive)} nodes of the Ray cluster at {target}; run the command on one "
            "of them, have one of them run it (`ray job submit --address http://HEAD:8265 -- ...`), or join the "
            "cluster first (`ray start --address`)"
        )


def _reason(error: Any, timeout_s: float) -> str:
    """Return in a few words why a call failed; gRPC's details end with the cause."""
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {timeout_s:g} s"
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return str(error.details()).rpartition(": ")[2].rstrip("]")
    return f"the server there is not a Ray head: {error.code().name}"
