"""Keeps Ray for its owner: the token of its processes, a new one for each session here, the user's on a cluster.

Ray 2.60 reads it from the environment (``RAY_AUTH_TOKEN``, ``RAY_AUTH_TOKEN_PATH``) or from ``~/.ray/auth_token``, and
caches it. A token of ours is kept in the environment alone, which only processes of the same account can read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray._common.utils import get_default_system_temp_dir
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled
from ray.exceptions import AuthenticationError

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.logging import get_logger

MODE = "RAY_AUTH_MODE"
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_PLACES = f"{', '.join(_TOKENS)} or ~/.ray/auth_token"
_HINT = "`ray get-auth-token` on a node of the cluster prints the right one"
_MOST_BYTES = 107
"""Longest path of a Unix socket on Linux."""
_log = get_logger(__name__)


@contextmanager
def private_session() -> Iterator[None]:
    """Let only the processes that are started in a block use the Ray that is started there.

    ``RAY_AUTH_MODE=disabled``, a token and a ``RAY_TMPDIR`` of the environment are respected. The file in the home
    directory is not used: its token is that of a cluster.

    Raises:
        UserError: The environment names a token that can't be read, or a directory that Ray can't use; or others can
            change this account's folder.
    """
    folder = os.environ.get("RAY_TMPDIR") or _own_folder()
    longest = f"{folder}/ray/session_2026-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store"
    if len(os.fsencode(longest)) > _MOST_BYTES:
        raise UserError(
            f"{folder}: the paths of Ray's sockets in it would have {len(os.fsencode(longest))} bytes, and at most "
            f"{_MOST_BYTES} are allowed; set RAY_TMPDIR to a shorter path, in a directory of your own"
        )
    with _environment({"RAY_TMPDIR": folder}), _session_token():
        yield


def _own_folder() -> str:
    """Return a folder that others can't enter for Ray's sockets, logs and uploaded code.

    In its own one, Ray 2.60 lets everyone write. It is the temporary directory itself where that is private.
    """
    temporary = Path(get_default_system_temp_dir())
    for folder in (temporary, temporary / f"ray-{os.getuid()}"):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return str(folder)
    raise UserError(
        f"{folder}: belongs to someone else, or others may use it; remove it, or set RAY_TMPDIR to a directory of "
        "your own"
    )


@contextmanager
def _session_token() -> Iterator[None]:
    if _is_disabled():
        _log.warning(
            "%s=disabled: anyone who reaches this machine over the network can run code as you; unset it", MODE
        )
        yield
        return
    named = [name for name in _TOKENS if os.environ.get(name)]
    with _environment({MODE: "token", **({} if named else {_TOKENS[0]: secrets.token_hex(32)})}):
        try:
            AuthenticationTokenLoader.instance().has_token()
        except AuthenticationError as error:
            raise UserError(f"{error.message}; correct it, or unset it for a token of this session alone") from error
        yield


@contextmanager
def cluster_token(address: str, *, asks: bool) -> Iterator[None]:
    """Send the user's token in a block to a cluster that asks for one, and to no other.

    Args:
        address: The cluster's.
        asks: Whether it asks for one.

    Raises:
        RunError: There is none, or the environment forbids its use.
    """
    if asks and _is_disabled():
        raise RunError(f"the Ray cluster at {address} asks for a token, and {MODE}=disabled sends none; unset it")
    with _environment({MODE: "token" if asks else "disabled"}):
        try:
            AuthenticationTokenLoader.instance().has_token()
        except AuthenticationError as error:
            raise RunError(
                f"the Ray cluster at {address} asks for a token, and there is none in {_PLACES}; {_HINT}"
            ) from error
        yield


def refused_token(address: str) -> str:
    """Return the error of a cluster that refuses the user's token."""
    return f"the Ray cluster at {address} refuses the token in {_PLACES}; {_HINT}"


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables in a block, and have Ray read its settings and the token again; not while it is connected."""
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
    # In this order: a thread of Ray's that is about to end must not look for a token that is gone while the mode asks
    # for one.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _is_disabled() -> bool:
    return os.environ.get(MODE, "").lower() == "disabled"
