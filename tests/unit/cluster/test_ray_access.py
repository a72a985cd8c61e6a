"""Which token Ray's processes get, and what is said where there is none; no Ray is started here."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from ray._common.utils import get_default_ray_temp_dir
from ray._raylet import AuthenticationMode, AuthenticationTokenLoader, get_authentication_mode

from ray_ulysses.cluster.job_client import connect
from ray_ulysses.cluster.ray_access import check_address, private_session
from ray_ulysses.commands.doctor import check_token
from ray_ulysses.errors import RunError, UserError
from tests.unit.cluster.metadata_fakes import QuietHandler, serving

_RIGHT = "ab" * 32


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def _seen_by_ray() -> str | None:
    """Return the token with which Ray would start or connect in this process; None if it would use none."""
    if get_authentication_mode() != AuthenticationMode.TOKEN:
        return None
    return str(AuthenticationTokenLoader.instance().get_raw_token())


def _write(path: Path, token: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(token)
    return path


def test_each_session_has_a_token_of_its_own_in_the_environment_alone(home: Path) -> None:
    """A canary of Ray 2.60, which caches the token and its mode in a process."""
    tokens = []
    for _ in range(2):
        with private_session():
            tokens.append(os.environ["RAY_AUTH_TOKEN"])
            assert os.environ["RAY_AUTH_MODE"] == "token" and _seen_by_ray() == tokens[-1]
        assert not [name for name in os.environ if name.startswith("RAY_AUTH")] and _seen_by_ray() is None
    assert len(set(tokens)) == 2 and min(map(len, tokens)) == 64
    assert list(home.iterdir()) == []


def test_a_session_uses_the_token_of_the_environment_but_not_of_the_home_directory(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "missing"))
    with pytest.raises(UserError, match="RAY_AUTH_TOKEN_PATH"), private_session():
        pytest.fail("it started")
    assert "RAY_AUTH_MODE" not in os.environ
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    _write(home / ".ray" / "auth_token", "ef" * 32)
    with private_session():
        assert _seen_by_ray() not in (None, "ef" * 32)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(_write(home / "token", _RIGHT)))
    with private_session():
        assert _seen_by_ray() == _RIGHT and "RAY_AUTH_TOKEN" not in os.environ
    monkeypatch.setenv("RAY_AUTH_TOKEN", "12" * 32)
    with private_session():
        assert _seen_by_ray() == "12" * 32
    assert os.environ["RAY_AUTH_TOKEN"] == "12" * 32


def test_a_session_without_a_token_has_to_be_asked_for_and_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with caplog.at_level(logging.WARNING), private_session():
        assert _seen_by_ray() is None and "RAY_AUTH_TOKEN" not in os.environ
    (record,) = caplog.records
    assert "RAY_AUTH_MODE=disabled" in record.getMessage()
    caplog.clear()
    # Ray itself takes a word that it does not know for `disabled`.
    monkeypatch.setenv("RAY_AUTH_MODE", "tokn")
    with private_session():
        assert _seen_by_ray() is not None
    assert caplog.records == []


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory as `/tmp` is, with a short path."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as name:
        Path(name).chmod(0o1777)
        yield Path(name)


def test_a_session_has_a_private_folder(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(short))
    own = short / f"ray-{os.getuid()}"
    for _ in range(2):
        with private_session():
            assert get_default_ray_temp_dir() == f"{own}/ray"
            assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o770)
    with pytest.raises(UserError, match=r"accessible to others.*RAY_TMPDIR"), private_session():
        pytest.fail("it started")
    own.rename(short / "other")
    own.symlink_to(short / "other")
    with pytest.raises(UserError, match="belongs to another account"), private_session():
        pytest.fail("it started")
    monkeypatch.setenv("RAY_TMPDIR", str(short / "chosen"))
    with private_session():
        assert get_default_ray_temp_dir() == str(short / "chosen/ray")


@pytest.mark.parametrize("name", ["job", "missing/job"])
def test_a_private_temporary_directory_is_used(name: str, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system's, say, whose path leaves no room for a folder in it. Ray too would make one that is missing."""
    folder = short / name
    monkeypatch.setenv("TMPDIR", str(folder))
    if name == "job":
        folder.mkdir(mode=0o700)
    with private_session():
        assert get_default_ray_temp_dir() == str(folder / "ray")
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["RAY_TMPDIR", "TMPDIR"])
def test_a_path_too_long_for_sockets_is_refused(name: str, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = short / ("x" * 40)
    folder.mkdir(mode=0o700)
    monkeypatch.setenv(name, str(folder))
    with pytest.raises(UserError, match="RAY_TMPDIR") as refused, private_session():
        pytest.fail("it started")
    assert str(folder) in str(refused.value) and "RAY_AUTH_MODE" not in os.environ


@contextmanager
def _dashboard(token: str | None) -> Iterator[tuple[str, list[str | None]]]:
    """A server that answers as Ray's dashboard does; the tokens that it was sent."""
    sent: list[str | None] = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            sent.append(self.headers.get("Authorization"))
            is_right = token is None or sent[-1] == f"Bearer {token}"
            self.send_response(200 if is_right else 401 if sent[-1] is None else 403)
            self.end_headers()
            self.wfile.write(json.dumps({"ray_version": "2.60.0"}).encode())

    with serving(Handler) as address:
        yield address, sent


@contextmanager
def _head(token: str | None) -> Iterator[tuple[str, list[str | None]]]:
    """A server that answers as a Ray head without nodes does; the tokens that it was sent."""
    sent: list[str | None] = []

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            given = {name: str(value) for name, value in details.invocation_metadata}
            sent.append(given.get("authorization"))

            def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
                if token is not None and sent[-1] != f"Bearer {token}":
                    context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
                return b""

            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[Handler()])
    # Ray takes the name of this machine as its address in the network, so every interface listens.
    port = server.add_insecure_port("0.0.0.0:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", sent
    finally:
        server.stop(None).wait()


_ASKS = {
    "none": ({}, "there is none in RAY_AUTH_TOKEN"),
    "another": ({"RAY_AUTH_TOKEN": "cd" * 32}, "rejects the token"),
    "forbidden": ({"RAY_AUTH_TOKEN": _RIGHT, "RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE=disabled"),
}


@pytest.mark.parametrize(("environment", "words"), _ASKS.values(), ids=_ASKS)
def test_a_cluster_that_asks_for_a_token_refuses_a_command_in_words(
    environment: Mapping[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with _dashboard(_RIGHT) as (address, _), pytest.raises(RunError) as refused:
        connect(address, 0, print)
    assert address in str(refused.value) and words in str(refused.value)
    with _head(_RIGHT) as (address, _), pytest.raises(RunError) as refused:
        check_address(address)
    assert address in str(refused.value) and words in str(refused.value)


@pytest.mark.parametrize("mode", [None, "token"])
@pytest.mark.parametrize("token", [None, _RIGHT], ids=["open", "closed"])
def test_the_token_goes_to_a_cluster_that_requires_one_and_to_no_other(
    token: str | None, mode: str | None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(home / ".ray" / "auth_token", _RIGHT)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    expected = {None} if token is None else {None, f"Bearer {token}"}
    with _dashboard(token) as (address, sent):
        connect(address, 0, print)
        assert set(sent) == expected
    with _head(token) as (address, sent):
        with pytest.raises(RunError, match="this machine is not one of the 0 nodes"):
            check_address(address)
        assert set(sent) == expected
    assert os.environ.get("RAY_AUTH_MODE") == mode


def test_the_doctor_warns_of_a_cluster_that_takes_jobs_without_a_token() -> None:
    """From a machine that is not one of its nodes, too."""
    with _head(None) as (address, _):
        (check,) = check_token(address)
        assert (check.name, check.level) == ("token", "warn") and "RAY_AUTH_MODE=token" in check.hint
    with _head(_RIGHT) as (address, _):
        assert [(check.name, check.level) for check in check_token(address)] == [("token", "ok")]
    assert list(check_token(address)) == list(check_token("http://head:8265")) == list(check_token("local")) == []
