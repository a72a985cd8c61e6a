"""How a command connects to Ray; no Ray is started here."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.runtime_env.runtime_env import _merge_runtime_env

from ray_ulysses.cluster import session
from ray_ulysses.cluster.session import ray_session
from ray_ulysses.errors import RunError


def test_variables_that_a_submitted_job_was_given_may_be_its_workers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A canary of Ray 2.60: it merges what a job and its driver ask for in this way."""
    monkeypatch.delenv("RAY_OVERRIDE_JOB_RUNTIME_ENV", raising=False)
    job = {"working_dir": "gcs://_ray_pkg_1.zip", "env_vars": {"HF_TOKEN": "t", "A": "1"}}
    merged: list[Any] = []

    def init(*, runtime_env: dict[str, Any], **options: Any) -> None:
        override = os.getenv("RAY_OVERRIDE_JOB_RUNTIME_ENV") == "1"
        merged.append(_merge_runtime_env(job, runtime_env, override=override))

    monkeypatch.setattr(session, "check_address", lambda address: None)
    monkeypatch.setattr(ray, "init", init)
    with ray_session("head:6379", cpus=1, environment={"HF_TOKEN": "t", "B": "2"}):
        pass
    assert merged == [{"working_dir": "gcs://_ray_pkg_1.zip", "env_vars": {"HF_TOKEN": "t", "A": "1", "B": "2"}}]


@pytest.fixture
def _sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_sigterm")
@pytest.mark.parametrize("before", ["default", "ignored", "handled"])
def test_sigterm_does_what_it_did_before_ray_or_interrupts(monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    """A canary of Ray 2.60, whose own handler exits with 15, without a word."""
    assert "set_sigterm_handler(sigterm_handler)" in inspect.getsource(ray.init)
    told: list[int] = []
    handlers = {"default": signal.SIG_DFL, "ignored": signal.SIG_IGN, "handled": lambda number, _: told.append(number)}
    handler: Any = handlers[before]

    def init(**options: Any) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    signal.signal(signal.SIGTERM, handler)
    interrupts = pytest.raises(KeyboardInterrupt) if before == "default" else contextlib.nullcontext()
    with interrupts, ray_session(None, cpus=1):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
    assert told == [signal.SIGTERM] * (before == "handled")
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.parametrize("failures", [1, 2])
def test_an_embedded_ray_is_started_a_second_time(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    """Ray 2.60 raises the base class of all exceptions there."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    calls: list[str] = []

    def init(**options: Any) -> None:
        calls.append("init")
        if calls.count("init") <= failures:
            raise Exception("The current node timed out during startup. This could happen because of much.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    if failures == 1:
        with ray_session(None, cpus=1) as embedded:
            assert embedded
    else:
        said = r"local Ray did not start within \d+ s \(The current node timed out during startup\).*RAY_ADDRESS"
        with pytest.raises(RunError, match=said), ray_session(None, cpus=1):
            pass
    assert calls[:3] == ["init", "shutdown", "init"]


def test_the_processes_of_an_embedded_ray_outlive_a_hangup(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed terminal sends it to each process of the group; the command stops in order, and needs Ray for that."""
    children: list[subprocess.Popen[bytes]] = []

    def init(**options: Any) -> None:
        children.append(subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
                                         stdout=subprocess.PIPE))  # fmt: skip

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    outer = signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def hang_up() -> None:
        assert children[0].stdout is not None and children[0].stdout.readline()
        children[0].send_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)

    with pytest.raises(KeyboardInterrupt), ray_session(None, cpus=1):
        hang_up()
    assert signal.signal(signal.SIGHUP, outer) == signal.SIG_DFL
    (child,) = children
    assert child.poll() is None
    child.terminate()
    assert child.wait(60) == -signal.SIGTERM, "it was the first signal that it took"
    child.communicate()
