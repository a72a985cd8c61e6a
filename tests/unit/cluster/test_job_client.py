"""The client of a cluster's dashboard: which one, how long it is waited for, and a log that outlives its connection."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from http.client import BadStatusLine, IncompleteRead
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from ray.job_submission import JobDetails, JobStatus, JobType

from ray_ulysses.cli import app, run
from ray_ulysses.cluster import job_client
from ray_ulysses.cluster.job_client import JobLog, connect, dashboard_address, submit
from ray_ulysses.config import Config, parse_config
from ray_ulysses.config.yaml_text import parse_yaml
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run.submissions import Submission
from tests.unit.cluster.metadata_fakes import QuietHandler, serving
from tests.unit.config.trees import small_tree

Say = Callable[[str], object]
JOB = Submission(run="a", run_dir="/runs/a", number=1, job="a-001", status="PENDING")


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The sleeps of the client, which take no time here; its clock goes on by them alone."""
    taken: list[float] = []
    monkeypatch.setattr(job_client, "time", SimpleNamespace(sleep=taken.append, monotonic=lambda: sum(taken)))
    return taken


@pytest.mark.parametrize(
    ("given", "environment", "address"),
    [
        (None, {}, "http://127.0.0.1:8265"),
        ("http://head:80/", {"RAY_API_SERVER_ADDRESS": "http://other:1"}, "http://head:80"),
        ("head:8265", {}, "http://head:8265"),
        (None, {"RAY_API_SERVER_ADDRESS": "https://ray.example.com", "RAY_ADDRESS": "x:1"}, "https://ray.example.com"),
        (None, {"RAY_ADDRESS": "10.0.0.1:6379"}, "http://10.0.0.1:8265"),
        (None, {"RAY_ADDRESS": "ray://head:10001"}, "http://head:8265"),
        (None, {"RAY_ADDRESS": "auto"}, "http://127.0.0.1:8265"),
    ],
)
def test_the_dashboard_is_the_specified_one(given: str | None, environment: dict[str, str], address: str) -> None:
    assert dashboard_address(given, environment) == address
    for wrong in ("ray://head:10001", "http://", "head:80a", "head:99999", "http://he ad:1"):
        with pytest.raises(UserError, match="address of a Ray dashboard"):
            dashboard_address(wrong, environment)


@contextmanager
def _dashboard(answers: list[tuple[int, Any]]) -> Iterator[str]:
    """A server that gives one answer after another, and goes on with the last."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            code, body = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    with serving(Handler) as address:
        yield address


def test_a_cluster_that_comes_up_is_waited_for_and_the_wait_says_why_when_that_changes(naps: list[float]) -> None:
    answers: list[tuple[int, Any]] = [(502, b""), (502, b""), (200, b"<html>"), (200, {"ray_version": "2.60.0"})]
    said: list[str] = []
    with _dashboard(answers) as address:
        connect(address, 60, said.append)
    assert [line.split()[0] for line in said] == ["elapsed=0s", "elapsed=2s"]
    assert "HTTP 502" in said[0] and "not a Ray dashboard" in said[1]


def test_a_cluster_that_never_answers_is_given_up_in_time_with_the_way_out(naps: list[float]) -> None:
    said: list[str] = []
    with _dashboard([(200, {})]) as address:
        pass  # closed
    with pytest.raises(RunError, match=r"waited 25 s .*: Connection refused; correct --address"):
        connect(address, 25, said.append)
    assert [line.split()[0] for line in said] == ["elapsed=0s", "elapsed=10s", "elapsed=20s"]
    assert sum(naps) == 25


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\x00\x18\x04\x00\x00\x00\x00\x00\x00\x04\x00@\x00\x00\x00\x05\x00@\x00\x00",
        b"HTTP/1.1 " + b"2" * 70_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\n\r\nnull",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 50_000,
        b"",
    ],
    ids=["http2-of-the-heads-own-port", "endless-line", "cut-off", "null", "nested", "nothing"],
)
def test_a_server_that_is_not_a_dashboard_is_an_error_in_words(naps: list[float], answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as peer:
                peer.recv(65536)
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(RunError, match="correct --address"):
            connect(f"http://127.0.0.1:{server.getsockname()[1]}", 0, print)
        thread.join()


class Cluster:
    """A client of Ray's whose jobs, logs and failures are given."""

    def __init__(self, states: list[Any] = [], tails: list[list[Any]] = [], refusals: list[Exception] = []) -> None:  # noqa: B006
        # Status of the job at each look, the last one for ever; an error is raised.
        self.states = list(states)
        # The pieces of each connection to the log; an error ends one.
        self.tails = list(tails)
        # Errors of the first submissions.
        self.refusals = list(refusals)
        self.jobs: list[JobDetails] = []
        self.submitted: list[dict[str, Any]] = []
        self.brought: dict[str, str] = {}

    def list_jobs(self) -> list[JobDetails]:
        return self.jobs

    def get_job_info(self, job: str) -> JobDetails:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        return details(job, state, JOB.metadata)

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        for piece in self.tails.pop(0):
            if isinstance(piece, Exception):
                raise piece
            yield piece

    def submit_job(self, **options: Any) -> str:
        if self.refusals:
            raise self.refusals.pop(0)
        self.submitted.append(options)
        folder = Path(options["runtime_env"]["working_dir"])
        self.brought = {file.name: file.read_text() for file in folder.iterdir()}
        return str(options["submission_id"])


def details(job: str, status: JobStatus, metadata: Any) -> JobDetails:
    return JobDetails(
        type=JobType.SUBMISSION, submission_id=job, status=status, entrypoint="train", metadata=dict(metadata),
        message="waiting for a node", start_time=5000,
    )  # fmt: skip


def follow(cluster: Cluster, write: Say = print, say: Say = print) -> Submission:
    return JobLog(cluster, JOB, write, say).follow()  # type: ignore[arg-type]


def test_a_log_is_written_once_over_lost_connections_and_until_the_job_ends(naps: list[float]) -> None:
    cluster = Cluster(
        states=[JobStatus.PENDING, JobStatus.RUNNING, OSError(), JobStatus.RUNNING, JobStatus.SUCCEEDED],
        tails=[["step=1\nst", "ep=2\n", RuntimeError("closed")], ["step=1\n", "step=2\nstep=", "3\n"]],
    )
    written: list[str] = []
    said: list[str] = []
    ended = follow(cluster, written.append, said.append)
    assert "".join(written) == "step=1\nstep=2\nstep=3\n"
    assert (ended.status, ended.started) == ("SUCCEEDED", 5.0)
    assert [word in line for word, line in zip(("pending", "RuntimeError", "OSError"), said, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    "error", [OSError("no route"), BadStatusLine("x"), IncompleteRead(b""), aiohttp.ClientPayloadError()]
)
def test_a_cluster_that_is_lost_for_long_leaves_the_job(naps: list[float], error: Exception) -> None:
    with pytest.raises(RunError, match=r"waited 300 s for job a-001: .*`ray-ulysses logs a --follow`"):
        follow(Cluster(states=[error]))
    with pytest.raises(RunError, match="rejected the job"):
        _submit(Cluster(refusals=[error]))


def test_an_unknown_job_and_a_reader_that_is_gone_end_the_wait_at_once(naps: list[float]) -> None:
    error = RuntimeError("Request failed with status code 404: Job a-001 does not exist.")
    with pytest.raises(RunError, match="the head node was replaced"):
        follow(Cluster(states=[error]))

    def write(text: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        follow(Cluster([JobStatus.RUNNING], [["a"]]), write)
    assert naps == []


def _submit(cluster: Cluster, config: Config | None = None, **options: Any) -> Submission:
    config = config or parse_config(small_tree(run__name="a", run__storage="/runs"))
    given: dict[str, Any] = {"file_name": "my config.yaml", "branch": False, "upload_package": False, "timeout_s": 60}
    return submit(cluster, config, **{**given, **options}, say=print)[0]  # type: ignore[arg-type]


def test_a_job_brings_its_configuration_and_the_networks_settings_and_none_of_the_secrets(
    naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NCCL_IB_HCA": "mlx5_0", "HF_TOKEN": "a", "HF_HOME": "/here", "FI_OPX_AUTH_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster()
    assert _submit(cluster) == JOB
    (options,) = cluster.submitted
    assert options["entrypoint"] == "python -m ray_ulysses train 'my config.yaml'"
    assert (options["submission_id"], options["metadata"]) == ("a-001", JOB.metadata)
    variables = options["runtime_env"]["env_vars"]
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) >= 600, "it has time to save when it is stopped"
    assert variables["NCCL_IB_HCA"] == "mlx5_0" and not variables.keys() & {"HF_TOKEN", "HF_HOME", "FI_OPX_AUTH_KEY"}
    assert "name: a" in cluster.brought["my config.yaml"] and len(cluster.brought) == 1
    assert not Path(options["runtime_env"]["working_dir"]).exists()


def test_what_a_configuration_leaves_to_the_planner_is_left_to_it_in_the_job(naps: list[float]) -> None:
    cluster = Cluster()
    tree = small_tree(run__name="a", run__storage="/runs", memory__plan="auto", memory__device_gib=8.0)
    _submit(cluster, config=parse_config(tree))
    brought = parse_config(parse_yaml(cluster.brought["my config.yaml"], "the job's")[0])
    assert brought == parse_config(tree) and brought.memory.model_fields_set == {"plan", "device_gib"}
    _submit(cluster, branch=True, upload_package=True)
    assert cluster.submitted[1]["entrypoint"].endswith(" --branch")
    (package,) = cluster.submitted[1]["runtime_env"]["py_modules"]
    assert (Path(package) / "cli.py").is_file()


def test_a_head_whose_agents_still_start_is_waited_for_and_other_refusals_are_told(naps: list[float]) -> None:
    starting = RuntimeError("Request failed with status code 500: No available agent to submit job")
    assert _submit(Cluster(refusals=[starting, starting])).job == "a-001" and len(naps) == 2
    with pytest.raises(RunError, match=r"rejected the job .*too large"):
        _submit(Cluster(refusals=[RuntimeError("the package is too large")]))


def test_of_two_commands_at_once_the_second_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(refusals=[RuntimeError("Job with submission_id a-001 already exists.")])

    def sleep(seconds: float) -> None:
        # The other one's job appears while this one waits.
        cluster.jobs.append(details("a-001", JobStatus.PENDING, JOB.metadata))

    monkeypatch.setattr(job_client, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
    with pytest.raises(UserError, match=r"run.name='a': job a-001 of this run, in .* is PENDING"):
        _submit(cluster)


@pytest.mark.parametrize("quiet", [(), ("--quiet",)], ids=["said", "quiet"])
def test_a_quiet_submission_says_what_became_of_it_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, quiet: tuple[str, ...]
) -> None:
    cluster = Cluster()
    monkeypatch.setattr(job_client, "connect", lambda address, wait_s, say: say("waiting") or cluster)
    (tmp_path / "c.yaml").write_text(parse_config(small_tree(run__name="a", run__storage="/runs")).to_yaml())
    command = ["submit", str(tmp_path / "c.yaml"), "--address", "http://127.0.0.1:9", "--no-follow", *quiet]
    assert run(app, [*command, "--set=data.path=/corpus"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "submitted run 'a' as job a-001"
    assert said[:-1] == ([] if quiet else ["connecting to the Ray cluster", "waiting"])


def test_relative_paths_are_refused_before_the_cluster_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse_config(small_tree(run__storage="runs", data__path="/corpus"))
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    assert run(app, ["submit", "c.yaml", "--address", "http://127.0.0.1:9"]) == 2
    error = capsys.readouterr().err
    assert "run.storage='runs': is relative" in error and "connecting" not in error
