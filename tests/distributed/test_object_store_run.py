"""A run whose directory is in an object store: the rows, losses and records of the same run on a disk."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_command
from ray_ulysses.config import Config
from ray_ulysses.inspect.verification import verify_run
from ray_ulysses.run.requests import request_save
from ray_ulysses.run_names import JOURNAL_FOLDER
from ray_ulysses.storage.location import ObjectLocation
from ray_ulysses.storage.place import open_store
from ray_ulysses.tracking.history import RunHistory, read_history
from ray_ulysses.tracking.journal_reader import read_journal
from tests.apart import losses_apart
from tests.distributed.harness import run_ranks, run_ranks_to_outcomes
from tests.distributed.run_case import make_config, make_corpus, prepare_attempt, run_paced_worker, run_worker
from tests.polling import wait_until
from tests.s3_server import S3Server, faulty_proxy, serve_s3

pytestmark = pytest.mark.distributed
LAST_STEP = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    with serve_s3() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "command"))
        yield server


def _config(storage: str | Path, corpus: Path, workers: int, **changes: Any) -> Config:
    settings = {"run__stop_step": LAST_STEP, "checkpoint__every_steps": 4, "data__rows_per_step": 2}
    sp_size = 2 if workers == 2 else 1
    return make_config(
        storage, corpus, **{**settings, "cluster__workers": workers, "parallel__sp_size": sp_size, **changes}
    )  # type: ignore[arg-type]


def _environment(server: S3Server, node: Path) -> dict[str, str]:
    return {**server.environment(), "RAY_ULYSSES_CACHE_DIR": str(node)}


@pytest.fixture(scope="module")
def on_a_disk(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunHistory:
    config = _config(tmp_path_factory.mktemp("disk"), corpus, 2)
    prepare_attempt(config, "one")
    run_ranks(run_worker, 2, config, "one", timeout_s=120)
    return read_history(config.run_dir)


def _check_same(ours: RunHistory, wanted: RunHistory) -> None:
    assert [step.rows for step in ours.steps] == [step.rows for step in wanted.steps]
    assert (ours.data_digest, ours.tokens) == (wanted.data_digest, wanted.tokens)
    # Another number of ranks adds in another order (fp32).
    assert losses_apart(ours, wanted) <= 1e-5


def test_killed_and_gone_on_with_elsewhere_it_is_the_run_of_a_disk(
    s3: S3Server, corpus: Path, tmp_path: Path, on_a_disk: RunHistory, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = s3.uri("runs")
    config = _config(storage, corpus, 2)
    prepare_attempt(config, "one")
    first = _environment(s3, tmp_path / "first")
    outcomes = run_ranks_to_outcomes(
        run_paced_worker, 2, config, "one", kill=(0, "step", 7), environment=first, timeout_s=120
    )
    assert outcomes[0].exit_code == -signal.SIGKILL
    killed = read_history(config.run_dir, is_held=False)
    # What the dead process had not put is not missed: every step up to the checkpoint is there.
    assert killed.step >= 4 and killed.missing_steps == () and killed.damaged_records == ()

    elsewhere = _config(storage, corpus, 3)
    prepare_attempt(elsewhere, "two")
    run_ranks(run_worker, 3, elsewhere, "two", environment=_environment(s3, tmp_path / "second"), timeout_s=120)
    history = read_history(elsewhere.run_dir, is_held=False)
    assert (history.status, [attempt.world_size for attempt in history.attempts]) == ("finished", [2, 3])
    assert history.attempts[1].first_step == 5
    _check_same(history, on_a_disk)

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


@pytest.mark.slow
def test_an_outage_in_the_middle_stops_nothing_and_loses_no_record(
    s3: S3Server, corpus: Path, tmp_path: Path, on_a_disk: RunHistory
) -> None:
    with faulty_proxy(s3) as proxy:
        config = _config(s3.uri("runs", proxy.port), corpus, 1, data__rows_per_step=2)
        direct = _config(s3.uri("runs"), corpus, 1)
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
    _check_same(history, on_a_disk)


@pytest.mark.slow
def test_requests_reach_it_through_the_store(s3: S3Server, corpus: Path, tmp_path: Path) -> None:
    config = _config(s3.uri("runs"), corpus, 1, run__stop_step=40, checkpoint__every_steps=30)
    prepare_attempt(config, "one")
    request_save(config.run_dir)
    run_ranks(run_worker, 1, config, "one", environment=_environment(s3, tmp_path / "node"), timeout_s=240)
    reasons = [getattr(one, "reason", None) for one in read_journal(config.run_dir).entries]
    assert "request" in reasons, reasons
