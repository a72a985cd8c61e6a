"""How a command connects to Ray; no Ray is started here."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("failures", [1, 2])
def test_an_embedded_ray_that_dies_while_it_starts_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
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
        said = r"an embedded Ray can't be reached \(The current node timed out during startup\)"
        with pytest.raises(RunError, match=said), ray_session(None, cpus=1):
            pass
    assert calls[:3] == ["init", "shutdown", "init"]
