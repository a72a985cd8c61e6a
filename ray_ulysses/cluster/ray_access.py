"""Checks a cluster before connecting, and provides tokens: a new token for a local session, the user's for a cluster.

An unusable cluster is rejected within seconds, whereas Ray itself retries for minutes.

Ray 2.60 reads the token from the environment (``RAY_AUTH_TOKEN``, ``RAY_AUTH_TOKEN_PATH``) or ``~/.ray/auth_token``,
and caches it. A session token exists only in the environment, which only processes of the same account can read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from ray._common.utils import get_default_system_temp_dir
from ray._private import services
from ray._private.gcs_utils import create_gcs_channel
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.exceptions import AuthenticationError

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.logging import get_logger

MODE = "RAY_AUTH_MODE"
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_PLACES = f"{', '.join(_TOKENS)} or ~/.ray/auth_token"
_HINT = "`ray get-auth-token` on a node of the cluster prints the token"
_MOST_BYTES = 107
"""Longest path of a Unix socket on Linux, in bytes."""
_log = get_logger(__name__)


@contextmanager
def private_session() -> Iterator[None]:
    """Protect a Ray session started inside the block, so that only processes started there can use it.

    ``RAY_AUTH_MODE=disabled``, a token and ``RAY_TMPDIR`` in the environment take precedence. The token file in the
    home directory is not used, because it contains a cluster's token.

    Raises:
        UserError: The environment specifies an unreadable token or an unusable directory, or other accounts can change
            this account's folder.
    """
    folder = os.environ.get("RAY_TMPDIR") or _own_folder()
    longest = f"{folder}/ray/session_2026-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store"
    if len(os.fsencode(longest)) > _MOST_BYTES:
        raise UserError(
            f"{folder}: Ray's socket paths in this directory would be {len(os.fsencode(longest))} bytes long, but at "
            f"most {_MOST_BYTES} are allowed; set RAY_TMPDIR to a shorter path in a private directory"
        )
    with _environment({"RAY_TMPDIR": folder}), _session_token():
        yield


def _own_folder() -> str:
    """Return a private folder for Ray's sockets, logs and uploaded code: Ray 2.60's default folder is world-writable.

    A temporary directory that is already private is used directly.
    """
    temporary = Path(get_default_system_temp_dir())
    for folder in (temporary, temporary / f"ray-{os.getuid()}"):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return str(folder)
    raise UserError(
        f"the directory {folder} belongs to another account or is accessible to others; remove it, or set RAY_TMPDIR "
        "to a private directory"
    )


@contextmanager
def _session_token() -> Iterator[None]:
    if _is_disabled():
        _log.warning(
            "%s=disabled: anyone who can reach this machine over the network can run code as you; unset it", MODE
        )
        yield
        return
    named = [name for name in _TOKENS if os.environ.get(name)]
    with _environment({MODE: "token", **({} if named else {_TOKENS[0]: secrets.token_hex(32)})}):
        try:
            AuthenticationTokenLoader.instance().has_token()
        except AuthenticationError as error:
            raise UserError(f"{error.message}; correct the variable, or unset it to use a session token") from error
        yield


@contextmanager
def cluster_token(address: str, *, asks: bool) -> Iterator[None]:
    """Send the user's token inside the block if the cluster requires one, and never send it to another cluster.

    Raises:
        RunError: The token is missing, or the environment forbids its use.
    """
    if asks and _is_disabled():
        raise RunError(f"the Ray cluster at {address} requires a token, but {MODE}=disabled is set; unset {MODE}")
    with _environment({MODE: "token" if asks else "disabled"}):
        try:
            AuthenticationTokenLoader.instance().has_token()
        except AuthenticationError as error:
            raise RunError(
                f"the Ray cluster at {address} requires a token, but no token was found in {_PLACES}; {_HINT}"
            ) from error
        yield


def refused_token(address: str) -> str:
    """Return the error message for a cluster that rejects the user's token."""
    return f"the Ray cluster at {address} rejects the token in {_PLACES}; {_HINT}"


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables inside the block, and make Ray reread its settings and token. Ray must not be connected."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        os.environ.update(variables)
        _read_again()
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _read_again()


def _read_again() -> None:
    # The order matters: an ending Ray thread must not look for a removed token while the mode still requires one.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _is_disabled() -> bool:
    return os.environ.get(MODE, "").lower() == "disabled"


_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
"""Status codes that a head returns if it requires a token."""
_ADDRESS_HINT = "correct cluster.address or RAY_ADDRESS, or unset both to run on this machine alone"


def check_address(target: str, *, timeout_s: float = 4.0) -> bool:
    """Check that a Ray head answers at an address, and that this machine is one of its nodes.

    Ray 2.60 retries a silent address for minutes, and then searches for a local node for another minute. The calls used
    here instead are private (a canary test covers them).

    Args:
        target: ``host:port`` of the head, or ``auto``.
        timeout_s: Timeout of each of the two requests, in seconds.

    Returns:
        Whether the cluster requires a token.

    Raises:
        UserError: Ray does not accept the address.
        RunError: No Ray head answers, the head rejects the user's token, or this machine is not one of its nodes.
    """
    asks = asks_for_token(target, timeout_s=timeout_s)
    with cluster_token(target, asks=asks), contextlib.closing(create_gcs_channel(_resolve(target))) as channel:
        _check_membership(gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel), target, timeout_s)
    return asks


def asks_for_token(target: str, *, timeout_s: float = 4.0) -> bool:
    """Return whether the Ray head at an address rejects requests without a token.

    Raises:
        UserError: Ray does not accept the address.
        RunError: No Ray head answers there.
    """
    address = _resolve(target)
    with cluster_token(target, asks=False):
        # The authentication mode at the channel's creation decides whether the channel sends a token.
        channel = create_gcs_channel(address)
    with contextlib.closing(channel):
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        try:
            stub.CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() in _REFUSED:
                return True
            raise RunError(f"no Ray head answers at {target} ({_reason(error, timeout_s)}); {_ADDRESS_HINT}") from error
    return False


def _resolve(target: str) -> str:
    """Return ``host:port``; ``auto`` stands for the head that was started last on this machine."""
    if "://" in target:
        raise UserError(
            f"cluster.address={target!r} is not the address of a Ray head; on a node of the cluster, use the head's "
            "host:port (default port: 6379); elsewhere, unset it and use `ray-ulysses submit CONFIG --address "
            "http://HEAD:8265` or `ray job submit`"
        )
    try:
        address = services.canonicalize_bootstrap_address(target)
    except (ConnectionError, ValueError) as error:
        raise UserError(f"cluster.address={target!r}: {error}; use the host:port of a Ray head (port 6379)") from error
    if address is None:
        raise RunError(f"cluster.address={target!r}: Ray is not running on this machine; {_ADDRESS_HINT}")
    return address


def _check_membership(stub: Any, target: str, timeout_s: float) -> None:
    """Raise `RunError` unless this machine is a node of the cluster: Ray connects through the node's own process."""
    try:
        reply = stub.GetAllNodeInfo(gcs_service_pb2.GetAllNodeInfoRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        if error.code() in _REFUSED:
            raise RunError(refused_token(target)) from error
        raise RunError(f"can't get the list of nodes from {target} ({_reason(error, timeout_s)})") from error
    alive = {node.node_id.hex() for node in reply.node_info_list if node.state == GcsNodeInfo.ALIVE}
    if not alive & set(services.find_node_ids()):
        raise RunError(
            f"this machine is not one of the {len(alive)} nodes of the Ray cluster at {target}; run the command on one "
            "of them, submit it as a job (`ray job submit --address http://HEAD:8265 -- ...`), or join the "
            "cluster first (`ray start --address`)"
        )


def _reason(error: Any, timeout_s: float) -> str:
    """Return a short reason for a failed call; gRPC's details end with the cause."""
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {timeout_s:g} s"
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return str(error.details()).rpartition(": ")[2].rstrip("]")
    return f"the server there is not a Ray head: {error.code().name}"
