"""A run in an object store, which may fail at any request: the rows, losses and records of the same run on a disk."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_command
from ray_ulysses.config import Config
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.inspect.verification import verify_run
from ray_ulysses.run.completion import record_command_ended
from ray_ulysses.run_names import JOURNAL_FOLDER
from ray_ulysses.storage.location import ObjectLocation
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.tracking.events import RunFailed
from ray_ulysses.tracking.failures import record_failure
from ray_ulysses.tracking.history import RunHistory, read_history
from ray_ulysses.tracking.journal_reader import read_journal
from tests.distributed.harness import run_ranks
from tests.distributed.run_case import assert_same_run, make_config, prepare_attempt, run_worker, train, train_to_death
from tests.failing_requests import WHEN, FailingRequests, said
from tests.polling import wait_until
from tests.result_table import ResultTable
from tests.s3_server import S3Server, faulty_proxy, serve_s3

LAST_STEP = 12


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serve_s3() as server:
        yield server


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3Server:
    for name, value in _environment(server, tmp_path / "command").items():
        monkeypatch.setenv(name, value)
    return server


def _config(storage: str | Path, corpus: Path, workers: int, **changes: Any) -> Config:
    settings = {"run__stop_step": LAST_STEP, "checkpoint__every_steps": 4, "data__rows_per_step": 2}
    sp_size = 2 if workers == 2 else 1
    return make_config(
        storage, corpus, **{**settings, "cluster__workers": workers, "parallel__sp_size": sp_size, **changes}
    )


def _environment(server: S3Server, node: Path) -> dict[str, str]:
    return {**server.environment(), "RAY_ULYSSES_CACHE_DIR": str(node)}


@pytest.fixture(scope="module")
def on_a_disk(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunHistory:
    config = _config(tmp_path_factory.mktemp("disk"), corpus, 2)
    train(config)
    return read_history(config.run_dir)


@pytest.mark.slow
def test_killed_and_gone_on_with_elsewhere_it_is_the_run_of_a_disk(
    s3: S3Server, corpus: Path, tmp_path: Path, on_a_disk: RunHistory, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = s3.uri("killed")
    config = _config(storage, corpus, 2)
    train_to_death(config, "one", (0, "step", 7), environment=_environment(s3, tmp_path / "first"))
    killed = read_history(config.run_dir, is_held=False)
    # What the dead process had not put is not missed: every step up to the checkpoint is there.
    assert killed.step >= 4 and killed.missing_steps == () and killed.damaged_records == ()

    elsewhere = _config(storage, corpus, 3)
    train(elsewhere, "two", environment=_environment(s3, tmp_path / "second"))
    history = read_history(elsewhere.run_dir, is_held=False)
    assert (history.status, [attempt.world_size for attempt in history.attempts]) == ("finished", [2, 3])
    assert history.attempts[1].first_step == 5
    assert_same_run(history, on_a_disk)

    run_dir = elsewhere.run_dir
    assert isinstance(run_dir, ObjectLocation)
    report = verify_run(run_dir)
    assert report.holds, report
    keys = open_store(run_dir).list(JOURNAL_FOLDER)
    assert f"{JOURNAL_FOLDER}/attempt-0001.jsonl/00000000.jsonl" in keys
    # A node keeps copies of the plan and nothing else of the run.
    assert {path.name for path in (tmp_path / "second").iterdir()} <= {"plans", "blocks"}

    code = run_command(app, ["inspect", str(run_dir), "--json"])
    assert code == 0 and json.loads(capsys.readouterr().out)["data_digest"] == on_a_disk.data_digest


def copy_run(source: Place, target: Place) -> None:
    """Do what ``aws s3 sync`` does."""
    folders = [path.name for path in source.iterdir()] if isinstance(source, Path) else open_store(source).root_names()
    for key in (key for folder in folders for key in open_store(source).list(folder)):
        open_store(target).create(key, [open_store(source).read_whole(key)])


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_copied_and_nothing_of_its_journal_is_lost(
    s3: S3Server, corpus: Path, tmp_path: Path
) -> None:
    def config_at(storage: str, stop_step: int) -> Config:
        return _config(storage, corpus, 1, run__stop_step=stop_step, checkpoint__every_steps=2)

    wanted, third = config_at(str(tmp_path / "unbroken"), 6), config_at(s3.uri("c"), 6)
    first, second = config_at(s3.uri("a"), 2), config_at(str(tmp_path / "b"), 4)
    train(wanted, "unbroken")
    for number, config in enumerate((first, second, third)):
        if number:
            copy_run((first, second)[number - 1].run_dir, config.run_dir)
        session = f"session-{number}"
        train(config, session, environment=s3.environment())
        # As a command does: into a file beside the attempt's, which the next command adds to where it is then.
        for attempt in range(1, number + 2):
            record_failure(config.run_dir, RunFailed(time=1.0, attempt=attempt, reason=session), writer="command")
        record_command_ended(config.run_dir, session)
    ours = read_history(third.run_dir)
    assert_same_run(ours, read_history(wanted.run_dir))
    assert [one.first_step for one in ours.attempts] == [1, 3, 5]
    journal = read_journal(third.run_dir)
    assert journal.damaged == ()
    reasons = sorted(one.reason for one in journal.entries if isinstance(one, RunFailed))
    assert reasons == ["session-0", *["session-1"] * 2, *["session-2"] * 3]
    assert run_command(app, ["inspect", str(third.run_dir), "--verify"]) == 0


@pytest.mark.slow
def test_an_outage_in_the_middle_stops_nothing_and_loses_no_record(
    s3: S3Server, corpus: Path, tmp_path: Path, on_a_disk: RunHistory
) -> None:
    with faulty_proxy(s3) as proxy:
        config = _config(s3.uri("outage", proxy.port), corpus, 1)
        direct = _config(s3.uri("outage"), corpus, 1)
        prepare_attempt(config, "one")
        environment = _environment(s3, tmp_path / "node")
        failures: list[BaseException] = []

        def train() -> None:
            try:
                run_ranks(run_worker, 1, config, "one", environment=environment, timeout_s=240)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=train)
        thread.start()
        try:
            wait_until(lambda: bool(read_journal(direct.run_dir).entries), "the attempt", timeout_s=120)
            proxy.fail("503", times=1_000_000)
            threading.Event().wait(8.0)
        finally:
            proxy.heal()
            thread.join(240)
        assert failures == []
    history = read_history(direct.run_dir, is_held=False)
    assert history.status == "finished" and history.lost_steps == 0
    assert_same_run(history, on_a_disk)


# 46 on a machine that is not busy; the journal's thread and that which looks for requests ask by the clock.
MOST_REQUESTS = 75
FAST = {("after", 40)}
SHORT: dict[str, Any] = {"run__stop_step": 4, "checkpoint__every_steps": 2}


@pytest.fixture(scope="module")
def store_table() -> Iterator[ResultTable]:
    """The table of all cases, stored where a run of all of them asks for it."""
    table = ResultTable()
    yield table
    if "STORE_FAULTS" in os.environ and table.rows:
        title = "Failing requests of a run in an object store: an attempt of four steps with two checkpoints"
        table.write("store_errors_attempt", title, by=os.environ["STORE_FAULTS"])


@pytest.fixture(scope="module")
def short_on_a_disk(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunHistory:
    config = _config(tmp_path_factory.mktemp("short"), corpus, 1, **SHORT)
    train(config)
    return read_history(config.run_dir)


def run_failing(
    rank: int, world_size: int, config: Config, call: int, when: str, environment: Mapping[str, str]
) -> tuple[str, str | None]:
    """Run an attempt and return what became of it, and the key of the request that failed."""
    os.environ.update(environment)
    with FailingRequests(fails_at=call, is_carried_out=WHEN[when]).installed() as requests:
        try:
            status, _ = run_worker(rank, world_size, config, "first")
        except (OSError, RunError, UserError) as error:
            status = said(error)
        return status, requests.struck


@pytest.mark.parametrize(
    ("when", "call"),
    [
        pytest.param(when, call, marks=() if (when, call) in FAST else pytest.mark.slow)
        for when in WHEN
        for call in range(1, MOST_REQUESTS + 1)
    ],
)
def test_whichever_request_of_an_attempt_fails_the_run_ends_as_if_none_had(
    s3: S3Server,
    corpus: Path,
    short_on_a_disk: RunHistory,
    store_table: ResultTable,
    tmp_path: Path,
    when: str,
    call: int,
) -> None:
    environment = _environment(s3, tmp_path / "node")
    config = _config(s3.uri(f"{when}-{call}"), corpus, 1, **SHORT)
    prepare_attempt(config, "first")
    ((outcome, struck),) = run_ranks(run_failing, 1, config, call, when, environment)
    if read_history(config.run_dir).status != "finished":
        train(config, "second", environment=environment)
    ours = read_history(config.run_dir)
    assert (ours.status, ours.step) == ("finished", SHORT["run__stop_step"])
    assert_same_run(ours, short_on_a_disk)
    assert read_journal(config.run_dir).damaged == ()
    if struck is not None:
        attempts = str(len(ours.attempts))
        store_table.add({"fails": when, "request": str(call), "key": struck, "attempt": outcome, "attempts": attempts})
