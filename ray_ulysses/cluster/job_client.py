"""Submits runs to a Ray cluster as jobs, follows their logs and stops them, through Ray's job submission client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from ray_ulysses.cluster.ray_access import cluster_token, refused_token
from ray_ulysses.cluster.worker_environment import network_settings
from ray_ulysses.config import Config
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run.submissions import Submission, next_submission

STOP_WAIT_S = 1800
"""Seconds until Ray kills a job that was asked to stop: a million-token step and the save after it take minutes."""
PATIENCE_S = 300.0
_EVERY_S = 1.0
_SAID_AGAIN_S = 10.0
_ANSWER_S = 3.0
_PORT = 8265
_TO_SIGN_IN = (401, 403)
_LOST = (RuntimeError, OSError, HTTPException, aiohttp.ClientError, AuthenticationError)
"""Errors that Ray's client raises if the dashboard returns no valid response."""

Client = JobSubmissionClient
Say = Callable[[str], None]


def dashboard_address(given: str | None, environment: Mapping[str, str]) -> str:
    """Return the address of the cluster's dashboard, which accepts jobs.

    Args:
        given: Value of the ``--address`` option, or None.
        environment: Environment variables of this process. As in ``ray job submit``, ``RAY_API_SERVER_ADDRESS`` takes
            precedence, followed by the host in ``RAY_ADDRESS``. If neither is set, this machine is used.

    Raises:
        UserError: The address is not a valid dashboard address.
    """
    ray_address = environment.get("RAY_ADDRESS", "")
    named = given or environment.get("RAY_API_SERVER_ADDRESS")
    if named is None and ray_address.startswith(("http://", "https://")):
        named = ray_address
    if named is None:
        host = urlsplit(ray_address if "://" in ray_address else f"//{ray_address}").hostname
        return f"http://{host if host not in (None, 'auto', 'local') else '127.0.0.1'}:{_PORT}"
    address = named if "://" in named else f"http://{named}"
    try:
        parts = urlsplit(address)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or any(character <= " " for character in address):
        raise UserError(f"--address={named!r} is not the address of a Ray dashboard; use http://HEAD:{_PORT}")
    return address.rstrip("/")


def connect(address: str, timeout_s: float, say: Say) -> Client:
    """Wait until the cluster's dashboard answers, and return a client for it.

    Args:
        address: Address of the dashboard.
        timeout_s: Longest wait, in seconds.
        say: Called with the reason for waiting, when the reason changes and every ten seconds.

    Raises:
        RunError: No Ray dashboard answers in time, or the dashboard rejects this command.
    """
    wait = _Wait(f"the Ray cluster at {address}", timeout_s, say)
    while (reason := _reason_not_ready(address)) is not None:
        wait.go_on(reason, "correct --address, forward the dashboard's port to this machine, or increase --wait")
    try:
        with contextlib.suppress(AuthenticationError), cluster_token(address, asks=False):
            return Client(address)
        with cluster_token(address, asks=True):
            return Client(address)
    except RunError:
        raise
    except AuthenticationError as error:
        raise RunError(refused_token(address)) from error
    except (*_LOST, ValueError) as error:
        raise RunError(f"the Ray cluster at {address} rejected this command ({error})") from error


def list_submissions(client: Client) -> list[Submission]:
    """Return all jobs that ``ray-ulysses submit`` submitted, in no particular order.

    Raises:
        RunError: The cluster does not respond.
    """
    with _asking("did not list its jobs"):
        jobs = client.list_jobs()
    return [one for one in map(_submission, jobs) if one is not None]


def submit(
    client: Client,
    config: Config,
    *,
    file_name: str,
    branch: bool,
    upload_package: bool,
    timeout_s: float,
    say: Say,
) -> tuple[Submission, list[Submission]]:
    """Submit a run as a job that contains its configuration; return the new submission and all earlier submissions.

    Args:
        client: Client for the cluster.
        config: The configuration, with absolute paths.
        file_name: Name of the configuration file inside the job, as shown in the job's log.
        branch: Whether the run's data may change from its newest committed checkpoint on.
        upload_package: Whether to upload this package's source instead of using the version installed on the nodes.
        timeout_s: Longest wait for a node that accepts the job, in seconds.
        say: Called with the reason for waiting.

    Raises:
        UserError: Another job of this run has not ended.
        RunError: The cluster rejects the job.
    """
    command = ["python", "-m", "ray_ulysses", "train", file_name, *(["--branch"] if branch else [])]
    variables = network_settings(os.environ) | {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}
    runtime: dict[str, Any] = {"env_vars": variables}
    if upload_package:
        runtime |= {"py_modules": [str(Path(__file__).parents[1])], "excludes": ["__pycache__"]}
    wait = _Wait("a node that accepts the job", timeout_s, say)
    with tempfile.TemporaryDirectory(prefix="ray-ulysses-") as folder:
        (Path(folder) / file_name).write_text(config.as_written(), encoding="utf-8")
        while True:
            earlier = list_submissions(client)
            found = next_submission(config.run.name, str(config.run_dir), earlier)
            try:
                client.submit_job(
                    entrypoint=shlex.join(command),
                    submission_id=found.job,
                    metadata=dict(found.metadata),
                    runtime_env=runtime | {"working_dir": folder},
                )
            except _LOST as error:
                # The dashboard answers seconds before an agent can start jobs, and another command may have taken the
                # job ID since the jobs were listed.
                if "No available agent" not in str(error) and "already exists" not in str(error):
                    raise RunError(f"the Ray cluster rejected the job ({error})") from error
                wait.go_on(
                    "the cluster's agents are starting", "check the cluster's nodes (`ray status`), or increase --wait"
                )
            else:
                return found, earlier


class JobLog:
    """A job's log, followed across lost connections.

    Args:
        client: Client for the cluster.
        submission: The job.
        write: Receives the log in pieces.
        say: Called with the reason for waiting.
    """

    def __init__(self, client: Client, submission: Submission, write: Callable[[str], object], say: Say) -> None:
        self._client, self._submission, self._write, self._say = client, submission, write, say
        self._written = 0

    def skip(self) -> None:
        """Skip the log's current content."""
        with _asking(f"has no log of job {self._submission.job}"):
            self._written = len(self._client.get_job_logs(self._submission.job))

    def print_now(self) -> None:
        """Write the log's current content."""
        with _asking(f"has no log of job {self._submission.job}"):
            self._write(self._client.get_job_logs(self._submission.job))

    def follow(self) -> Submission:
        """Write the log until the job ends, and return the ended job.

        Raises:
            RunError: The cluster did not respond for too long, or no longer knows the job.
        """
        wait = _Wait(f"job {self._submission.job}", PATIENCE_S, self._say)
        while True:
            try:
                newest = self._look()
                if newest.status == "PENDING":
                    # A job may be pending indefinitely, so this wait has no limit.
                    wait.restart()
                    wait.go_on(f"the job is pending: {newest.message.strip()}", "")
                    continue
                asyncio.run(self._tail())
                newest = self._look()
                if newest.is_ended:
                    return newest
                wait.restart()
                time.sleep(_EVERY_S)
            except (RunError, BrokenPipeError):
                # BrokenPipeError concerns our own output, whose reader is gone, not the cluster.
                raise
            except _LOST as error:
                if "status code 404" in str(error):
                    raise RunError(
                        f"the Ray cluster no longer knows job {self._submission.job}: the head node was replaced; "
                        "submit the run again to resume it"
                    ) from error
                wait.go_on(
                    f"the cluster does not respond ({type(error).__name__})",
                    f"the job may be running; `ray-ulysses logs {self._submission.run} --follow` follows it again",
                )

    def _look(self) -> Submission:
        found = _submission(self._client.get_job_info(self._submission.job))
        assert found is not None, "the job has a submission's metadata"
        return found

    async def _tail(self) -> None:
        # Every connection sends the log from its beginning.
        position = 0
        async for piece in self._client.tail_job_logs(self._submission.job):
            new = piece[max(0, self._written - position) :]
            position += len(piece)
            if new:
                self._write(new)
                self._written = position


def stop(client: Client, submission: Submission) -> None:
    """Request that a job save after its current step and end; Ray kills the job after `STOP_WAIT_S`.

    Raises:
        RunError: The cluster does not respond.
    """
    with _asking(f"did not stop job {submission.job}"):
        client.stop_job(submission.job)


@contextlib.contextmanager
def _asking(refusal: str) -> Iterator[None]:
    try:
        yield
    except _LOST as error:
        raise RunError(f"the Ray cluster {refusal} ({error})") from error


def _submission(details: JobDetails) -> Submission | None:
    """Return a cluster job as a submission, or None if ``ray-ulysses submit`` did not submit it."""
    # Ray reports times in milliseconds.
    return Submission.from_metadata(
        details.metadata,
        job=str(details.submission_id),
        status=details.status.value,
        message=details.message or "",
        exit_code=details.driver_exit_code,
        started=None if details.start_time is None else details.start_time / 1000,
        ended=None if details.end_time is None else details.end_time / 1000,
    )


class _Wait:
    """A wait with a time limit that prints its reason when the reason changes, and every ten seconds."""

    def __init__(self, what: str, timeout_s: float, say: Say) -> None:
        self._what, self._timeout_s, self._say = what, timeout_s, say
        self._reason, self._said_at = "", -_SAID_AGAIN_S
        self._began = self._bounded_from = time.monotonic()

    def restart(self) -> None:
        self._bounded_from = time.monotonic()

    def go_on(self, reason: str, way_out: str) -> None:
        """Print the reason if a message is due, and sleep; raise `RunError` after the time limit."""
        now = time.monotonic()
        if now - self._bounded_from >= self._timeout_s:
            raise RunError(f"waited {self._timeout_s:g} s for {self._what}: {reason}; {way_out}")
        if reason != self._reason or now - self._said_at >= _SAID_AGAIN_S:
            self._say(f"elapsed={now - self._began:.0f}s waiting for {self._what}: {reason}")
            self._reason, self._said_at = reason, now
        time.sleep(_EVERY_S)


def _reason_not_ready(address: str) -> str | None:
    """Return why no Ray dashboard answers at `address`, or None if one does.

    Ray's own client has no timeout and would hang for minutes on an address that drops packets.
    """
    try:
        with urllib.request.urlopen(f"{address}/api/version", timeout=_ANSWER_S) as answer:
            found = json.load(answer)
        is_ray = isinstance(found, dict) and "ray_version" in found
    except urllib.error.HTTPError as error:
        return None if error.code in _TO_SIGN_IN else f"the server answers with HTTP {error.code}"
    except urllib.error.URLError as error:
        return getattr(error.reason, "strerror", None) or str(error.reason)
    except OSError as error:
        return f"no answer ({error})"
    except (ValueError, RecursionError, HTTPException):
        # Another server answers, such as the Ray head on its own port, which does not speak HTTP.
        is_ray = False
    return None if is_ray else f"the server there is not a Ray dashboard (default port: {_PORT})"
