"""An address where no usable Ray is gets an answer in seconds, and in words; no Ray is started here."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from ray._private import worker

from ray_ulysses.cli import app, run
from ray_ulysses.cluster import node_watch
from ray_ulysses.cluster.ray_access import check_address
from ray_ulysses.cluster.session import quiet_errors, ray_session
from ray_ulysses.commands import doctor
from ray_ulysses.commands.doctor import Check
from ray_ulysses.errors import RunError, UserError
from tests.distributed.harness import free_port
from tests.unit.cluster.metadata_fakes import QuietHandler, serving


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
    with pytest.raises(UserError) as refused:
        check_address(target)
    assert f"cluster.address={target!r}" in str(refused.value) and words in str(refused.value)


def test_the_doctor_says_it_before_anything_else_and_each_check_at_once(
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
