"""Which token Ray's processes get, and how an address where no usable Ray is fails; no Ray is started here."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest
from ray._common.utils import get_default_ray_temp_dir
from ray._private import worker
from ray._raylet import AuthenticationMode, AuthenticationTokenLoader, get_authentication_mode

from ray_ulysses.cli import app, run
from ray_ulysses.cluster import node_watch
from ray_ulysses.cluster.job_client import connect
from ray_ulysses.cluster.ray_access import check_address, private_session
from ray_ulysses.cluster.session import quiet_errors, ray_session
from ray_ulysses.commands import doctor
from ray_ulysses.commands.doctor import Check, check_token
from ray_ulysses.errors import RunError, UserError
from tests.distributed.harness import free_port
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
    """A directory with a short path, as `/tmp` is."""
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


Server = Iterator[tuple[str, list[str | None]]]
"""Its address, and the tokens that it was sent."""


@contextmanager
def _dashboard(token: str | None) -> Server:
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
def _head(token: str | None) -> Server:
    """A Ray head without nodes."""
    sent: list[str | None] = []

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            sent.append({name: str(value) for name, value in details.invocation_metadata}.get("authorization"))

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


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "no token was found in RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_TOKEN": "cd" * 32}, "rejects the token"),
        ({"RAY_AUTH_TOKEN": _RIGHT, "RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE=disabled"),
    ],
    ids=["none", "another", "forbidden"],
)
def test_a_cluster_that_asks_for_a_token_refuses_a_command_in_words(
    environment: Mapping[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for serve, ask in ((_dashboard, lambda address: connect(address, 0, print)), (_head, check_address)):
        with serve(_RIGHT) as (address, _), pytest.raises(RunError) as refused:
            ask(address)
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
    with _head(None) as (address, _):
        (check,) = check_token(address)
        assert (check.name, check.level) == ("token", "warn") and "RAY_AUTH_MODE=token" in check.hint
    with _head(_RIGHT) as (address, _):
        assert [(check.name, check.level) for check in check_token(address)] == [("token", "ok")]
    assert list(check_token(address)) == list(check_token("http://head:8265")) == list(check_token("local")) == []


def test_a_port_where_no_ray_answers_is_refused_with_the_reason_and_soon() -> None:
    started, closed = time.monotonic(), f"127.0.0.1:{free_port()}"
    with pytest.raises(RunError, match=r"\(Connection refused\); correct cluster.address or RAY_ADDRESS"):
        check_address(closed)
    with pytest.raises(RunError, match="Connection refused"), ray_session(closed, cpus=1):
        pytest.fail("there is no Ray")
    # Ray takes the name of this machine as its address in the network, so every interface listens.
    with serving(QuietHandler, "") as address, pytest.raises(RunError, match="no Ray head answers"):
        check_address(f"127.0.0.1:{urlsplit(address).port}")
    # A head whose machine hangs accepts connections, and never answers.
    with socket.create_server(("", 0)) as silent, pytest.raises(RunError, match="no answer within 1 s"):
        check_address(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=1.0)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("http://head:8265", "is not the address of a Ray head"),
        ("ray://head:10001", "ray-ulysses submit"),
        ("head", "host:port"),
    ],
)
def test_an_invalid_address_is_the_users_error(target: str, words: str) -> None:
    with pytest.raises(UserError, match=f"cluster.address={target!r}.*{words}"):
        check_address(target)


def test_the_doctor_reports_an_unreachable_cluster_first_and_each_check_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def machine(storage: str | None) -> Iterator[Check]:
        said.extend(capsys.readouterr().out.splitlines())
        assert len(said) == 1 and said[0].startswith("fail  cluster ") and "Connection refused" in said[0]
        yield Check(name="python", level="ok", detail="3.11")
        said.extend(capsys.readouterr().out.splitlines())
        assert said[1:] == ["ok    python         3.11"]

    monkeypatch.setattr(doctor, "check_machine", machine)
    monkeypatch.setattr(node_watch, "found_provider", lambda setting: None)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    assert run(app, ["doctor"]) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["ok", "not"]
    monkeypatch.setattr(doctor, "check_machine", lambda storage: [Check(name="python", level="ok", detail="3.11")])
    assert run(app, ["doctor", "--quiet"]) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["fail", "not"]
    assert run(app, ["doctor", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [(one["name"], one["level"]) for one in checks] == [("cluster", "fail"), ("python", "ok"), ("cloud", "ok")]


def test_ray_prints_nothing_of_its_nodes_within_a_session(capsys: pytest.CaptureFixture[str]) -> None:
    """A canary of Ray 2.60: what its nodes report goes through this function, and the switch is obeyed."""
    report = {"lines": ["Raylet is terminated. Last 20 lines of its log: ..."], "pid": "raylet", "is_err": False}
    with quiet_errors():
        worker.print_worker_logs(report, sys.stdout)
    assert capsys.readouterr().out == ""
    worker.print_worker_logs(report, sys.stdout)
    assert "Raylet is terminated" in capsys.readouterr().out
