"""The commands ``submit``, ``status``, ``logs`` and ``stop``, for runs submitted to a Ray cluster as jobs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ray_ulysses.commands.options import AsJson, Branch, ConfigPath, Overrides, Quiet
from ray_ulysses.commands.output import put, put_line
from ray_ulysses.errors import INTERRUPTED, UserError
from ray_ulysses.report.words import as_text, duration, table

if TYPE_CHECKING:
    from ray_ulysses.cluster.job_client import Client
    from ray_ulysses.run.submissions import Submission

_ANSWER_S = 10.0
_STEP = "step="
_MOST_LINES = 3
_say, _write = partial(put_line, stderr=True), partial(put, end="")

Address = Annotated[
    str | None,
    typer.Option(help="URL of the cluster's dashboard, such as http://HEAD:8265; by default RAY_API_SERVER_ADDRESS."),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="The name of a submitted run, or one of its jobs.")]


def submit(
    config: ConfigPath,
    overrides: Overrides = [],  # noqa: B006
    branch: Branch = False,
    address: Address = None,
    wait: Annotated[float, typer.Option(help="Longest wait for the cluster, in seconds.", min=0)] = 300.0,
    follow: Annotated[bool, typer.Option(help="Follow the log, and exit with the job's outcome.")] = True,
    upload_package: Annotated[
        bool, typer.Option("--upload-package", help="Upload this package's source and use it on the nodes.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Submit a run to a Ray cluster as a job. If the run's job has ended, the same command resumes the run.

    The configuration is uploaded with the job. Later commands find the job by run.name. Ctrl-C does not stop the job.
    """
    from ray_ulysses.config import load_config
    from ray_ulysses.config.job_paths import refuse_relative_in_submission

    loaded = load_config(config, overrides, environment=os.environ)
    refuse_relative_in_submission(loaded, Path.cwd())
    say: Callable[[str], None] = (lambda _: None) if quiet else _say
    client = _connect(address, wait, say)
    from ray_ulysses.cluster import job_client

    job, earlier = job_client.submit(
        client, loaded, file_name=config.name, branch=branch, upload_package=upload_package, timeout_s=wait, say=say
    )
    put(render_submitted(job, earlier), stderr=True)
    if follow:
        _follow(client, job, say)


def status(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="The name of a submitted run; by default, list all runs.")
    ] = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """List the runs submitted to a cluster, or show one run's jobs and newest step."""
    client = _connect(address, _ANSWER_S)
    from ray_ulysses.cluster import job_client
    from ray_ulysses.run import submissions

    every = job_client.list_submissions(client)
    found = submissions.newest_of_each_run(every) if run is None else submissions.find(run, every)
    if as_json:
        put(json.dumps({"jobs": [one.to_json() for one in found]}, indent=2), is_exact=True)
    elif run is None:
        put(render_runs(found, time.time()))
    else:
        pieces: list[str] = []
        job_client.JobLog(client, found[-1], pieces.append, _say).print_now()
        put(render_run(found, "".join(pieces), time.time()))


def logs(
    run: RunName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow it, and exit with the job's outcome.")] = False,
    address: Address = None,
) -> None:
    """Print the log of a run's newest job."""
    client, found = _find(run, address)
    if follow:
        _follow(client, found[-1])
        return
    from ray_ulysses.cluster.job_client import JobLog

    JobLog(client, found[-1], _write, _say).print_now()


def stop(
    run: RunName,
    address: Address = None,
    wait: Annotated[bool, typer.Option(help="Print the job's log until the job has ended.")] = True,
) -> None:
    """Stop a submitted run: it saves after its current step and ends. `submit` resumes it."""
    client, found = _find(run, address)
    from ray_ulysses.cluster import job_client

    job = found[-1]
    if job.is_ended:
        raise UserError(f"RUN={run!r}: the newest job {job.job} has ended ({job.status}), so there is nothing to stop")
    log = job_client.JobLog(client, job, _write, _say)
    log.skip()
    job_client.stop(client, job)
    _say(f"asked job {job.job} to save and stop; Ray kills it after {job_client.STOP_WAIT_S / 60:g} minutes")
    if wait:
        with _leaving(job, f"job {job.job} is stopping; this command need not wait"):
            ended = log.follow()
        _say(f"job {job.job}: {ended.status}; submit the run again to resume it")


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the app."""
    app.command(epilog="Example: ray-ulysses submit config.yaml --address http://HEAD:8265")(submit)
    app.command(epilog="Example: ray-ulysses status; ray-ulysses status llama-tiny")(status)
    app.command(epilog="Example: ray-ulysses logs llama-tiny --follow")(logs)
    app.command(epilog="Example: ray-ulysses stop llama-tiny")(stop)


def _connect(address: str | None, wait_s: float, say: Callable[[str], None] = _say) -> Client:
    """Connect to the cluster. The phase is shown before Ray is imported, which takes seconds."""
    say("connecting to the Ray cluster")
    from ray_ulysses.cluster.job_client import connect, dashboard_address

    return connect(dashboard_address(address, os.environ), wait_s, say)


def _find(run: str, address: str | None) -> tuple[Client, list[Submission]]:
    client = _connect(address, _ANSWER_S)
    from ray_ulysses.cluster import job_client
    from ray_ulysses.run import submissions

    return client, submissions.find(run, job_client.list_submissions(client))


def _follow(client: Client, job: Submission, say: Callable[[str], None] = _say) -> None:
    """Print a job's log until the job ends; raise an error if the job failed."""
    from ray_ulysses.cluster.job_client import JobLog
    from ray_ulysses.run.submissions import check_outcome

    ways = f"`ray-ulysses logs {job.run} --follow` follows it again, `ray-ulysses stop {job.run}` stops it"
    with _leaving(job, f"job {job.job} keeps running; {ways}"):
        ended = JobLog(client, job, _write, say).follow()
    check_outcome(ended)
    say(f"job {job.job} succeeded")


@contextmanager
def _leaving(job: Submission, text: str) -> Iterator[None]:
    """Replace a KeyboardInterrupt with a message that the job keeps running."""
    try:
        yield
    except KeyboardInterrupt:
        _say("")
        _say(text)
        raise SystemExit(INTERRUPTED) from None


def render_runs(newest: Sequence[Submission], now: float) -> str:
    """Return a table of runs.

    Args:
        newest: The newest job of each run.
        now: The time, in seconds since the epoch.
    """
    if not newest:
        return "no run has been submitted to this cluster; submit one with `ray-ulysses submit CONFIG`"
    rows = [(one.run, one.status, _age(one, now), str(one.number), one.run_dir) for one in newest]
    return as_text(table(("run", "status", "time", "jobs", "directory"), rows, indent=""))


def render_submitted(job: Submission, earlier: Sequence[Submission]) -> str:
    """Return a message that says whether a submission resumes a run or starts a new one.

    Args:
        job: The submission.
        earlier: All earlier submissions to the cluster.
    """
    text = f"submitted run {job.run!r} as job {job.job}"
    own = [one for one in earlier if one.run == job.run]
    if any(one.run_dir == job.run_dir for one in own):
        return f"{text}, which resumes it"
    others = ", ".join(dict.fromkeys(one.run_dir for one in own))
    return f"{text}: a new run in {job.run_dir}; a run of the same name exists in {others}" if own else text


def render_run(jobs: Sequence[Submission], log: str, now: float) -> str:
    """Return a table of a run's jobs, and the newest step line and last lines of the log.

    Args:
        jobs: The run's jobs, newest last; at least one.
        log: The newest job's log.
        now: The time, in seconds since the epoch.
    """
    rows = [(one.job, one.status, _age(one, now), "" if one.exit_code is None else str(one.exit_code)) for one in jobs]
    lines = log.rstrip("\n").split("\n")
    step = next((line for line in reversed(lines) if line.startswith(_STEP)), None)
    end = lines[-_MOST_LINES:]
    return as_text(
        (
            f"run {jobs[-1].run}  {jobs[-1].run_dir}",
            *table(("job", "status", "time", "exit code"), rows),
            *(f"  | {line}" for line in ([] if step is None or step in end else [step]) + end),
        )
    )


def _age(one: Submission, now: float) -> str:
    return "" if one.started is None else duration((one.ended or now) - one.started)
