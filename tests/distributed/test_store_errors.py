"""A run in an object store that fails at any request of an attempt, from its first file to its last."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ray_ulysses.config import Config
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.tracking.history import RunHistory, read_history
from ray_ulysses.tracking.journal_reader import read_journal
from tests.distributed.harness import run_ranks
from tests.distributed.run_case import make_config, make_corpus, prepare_attempt, run_worker
from tests.failing_requests import WHEN, FailingRequests, said
from tests.result_table import ResultTable
from tests.s3_server import S3Server, serve_s3

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

LAST_STEP = 4
# 46 on a machine that is not busy; the journal's thread and that which looks for requests ask by the clock.
MOST_REQUESTS = 75
FAST = {("after", 40)}


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with serve_s3() as server:
        yield server


@pytest.fixture(scope="module")
def store_table() -> Iterator[ResultTable]:
    """The table of all cases, stored where a run of all of them asks for it."""
    table = ResultTable()
    yield table
    if "STORE_FAULTS" in os.environ and table.rows:
        title = "Failing requests of a run in an object store: an attempt of four steps with two checkpoints"
        table.write("store_errors_attempt", title, by=os.environ["STORE_FAULTS"])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"), ("bisect.py", "cmd.py"))


@functools.cache
def unbroken(corpus: Path, folder: Path) -> RunHistory:
    """The same run on a disk that nothing disturbs."""
    config = _config(str(folder), corpus)
    prepare_attempt(config, "disk")
    run_ranks(run_worker, 1, config, "disk")
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


def _config(storage: str, corpus: Path) -> Config:
    return make_config(
        storage, corpus, run__stop_step=LAST_STEP, parallel__sp_size=1, cluster__workers=1, checkpoint__every_steps=2,  # type: ignore[arg-type]
        data__rows_per_step=2, model__dtype="fp32",
    )  # fmt: skip


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
    store_table: ResultTable,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    call: int,
) -> None:
    environment = {**s3.environment(), "RAY_ULYSSES_CACHE_DIR": str(tmp_path / "node")}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = _config(s3.uri(f"{when}-{call}"), corpus)
    prepare_attempt(config, "first")
    ((outcome, struck),) = run_ranks(run_failing, 1, config, call, when, environment)
    if read_history(config.run_dir).status != "finished":
        prepare_attempt(config, "second")
        run_ranks(run_worker, 1, config, "second", environment=environment)
    ours, wanted = read_history(config.run_dir), unbroken(corpus, tmp_path_factory.getbasetemp() / "disk")
    assert (ours.status, ours.step) == ("finished", LAST_STEP)
    assert ours.data_digest == wanted.data_digest
    assert [step.rows for step in ours.steps] == [step.rows for step in wanted.steps]
    assert [step.loss for step in ours.steps] == [pytest.approx(step.loss, rel=1e-6) for step in wanted.steps]
    assert read_journal(config.run_dir).damaged == ()
    if struck is not None:
        attempts = str(len(ours.attempts))
        store_table.add({"fails": when, "request": str(call), "key": struck, "attempt": outcome, "attempts": attempts})
