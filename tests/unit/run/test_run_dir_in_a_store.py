"""What a command writes into a run's directory in an object store, when the store fails at any request."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.config import Config, load_config
from ray_ulysses.data.plan.plan_files import PLAN_FILE, has_plan, load_plan, num_segments
from ray_ulysses.errors import ConfigError, RunError, UserError
from ray_ulysses.run.completion import record_command_ended, settle_failed
from ray_ulysses.run.ownership import run_identity
from ray_ulysses.run.preflight import check_writable, prepare_run
from ray_ulysses.run.refusals import leave_refusal, refusal
from ray_ulysses.run.run_files import describe_run, describing_files, read_plan_facts
from ray_ulysses.run_names import CONFIG_FILE, PLAN_FOLDER
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.place import RemotePath, node_folder
from ray_ulysses.tracking.events import RunFailed
from ray_ulysses.tracking.journal_opening import claim_journal
from ray_ulysses.tracking.journal_reader import read_journal
from tests.breadth import fast_only
from tests.distributed.run_case import make_config, make_corpus, prepare_attempt
from tests.s3_server import S3Server


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"), ("bisect.py", "cmd.py"))


@pytest.fixture
def config(s3: S3Server, prefix: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "node"))
    return make_config(s3.uri(prefix), corpus, data__rows_per_step=2, run__stop_step=10)  # type: ignore[arg-type]


class _Requests:
    """Counts the requests of all stores, and lets one fail, before or after it is carried out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.fails_at, self.is_carried_out = 0, 0, False
        tried = ObjectStore._tried

        def counted(store: ObjectStore, key: str, attempt: Callable[[], Any]) -> Any:
            self.count += 1
            fails = self.count == self.fails_at
            if fails and not self.is_carried_out:
                raise OSError(5, "the store failed", key)
            found = tried(store, key, attempt)
            if fails:
                raise OSError(5, "the store failed", key)
            return found

        monkeypatch.setattr(ObjectStore, "_tried", counted)

    def fail(self, call: int, *, is_carried_out: bool) -> None:
        self.count, self.fails_at, self.is_carried_out = 0, call, is_carried_out


@pytest.fixture
def requests(config: Config, monkeypatch: pytest.MonkeyPatch) -> _Requests:
    return _Requests(monkeypatch)


def _start(config: Config) -> None:
    """Write what a command and its first attempt write before the first step."""
    prepare_attempt(config, "session")
    run_identity(config)
    describe_run(config.run_dir, plan="plan", readme="readme", facts={"memory": 1})
    journal = claim_journal(config.run_dir)
    journal.append({"event": "warning", "text": "begun"})
    journal.close()


def _number_of_requests(config: Config, requests: _Requests) -> int:
    requests.fail(0, is_carried_out=False)
    _start(config)
    return requests.count


def _check(config: Config) -> None:
    run_dir = config.run_dir
    assert load_config(run_dir / CONFIG_FILE).run == config.run
    assert num_segments(run_dir / PLAN_FOLDER) == 1
    assert read_plan_facts(run_dir) == {"memory": 1}
    assert describing_files(run_dir)["README.md"] == "readme"
    texts = [getattr(entry, "text", None) for entry in read_journal(run_dir).entries]
    assert set(texts) == {"begun"}
    assert read_journal(run_dir).damaged == ()


@pytest.mark.parametrize("is_carried_out", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", fast_only(range(1, 36), 11, 27))
def test_whichever_request_of_a_start_fails_the_same_command_starts_the_run_afterwards(
    config: Config, requests: _Requests, call: int, is_carried_out: bool
) -> None:
    requests.fail(call, is_carried_out=is_carried_out)
    # A failure may also be survived: by a suppressed one that the next command makes up for.
    with contextlib.suppress(OSError, RunError, UserError):
        _start(config)
    requests.fail(0, is_carried_out=False)
    _start(config)
    _check(config)


def test_the_requests_of_a_start_are_few_and_all_of_them_are_tried_to_fail(config: Config, requests: _Requests) -> None:
    assert 25 <= _number_of_requests(config, requests) <= 35


def test_the_plan_is_that_of_a_disk_and_each_node_keeps_a_copy(
    config: Config, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = make_config(tmp_path / "disk", corpus, data__rows_per_step=2, run__stop_step=10)
    for one in (config, local):
        prepare_attempt(one, "session")
    ours, theirs = (load_plan(one.run_dir / PLAN_FOLDER) for one in (config, local))
    assert ours.plan_id == theirs.plan_id and ours.num_steps == theirs.num_steps
    # Another node copies it; a copy that was damaged there is found.
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "other"))
    plan = load_plan(config.run_dir / PLAN_FOLDER)
    assert plan.plan_id == theirs.plan_id
    (rows,) = (tmp_path / "other").rglob("rows.parquet")
    requests = _Requests(monkeypatch)
    load_plan(config.run_dir / PLAN_FOLDER)
    again = requests.count
    rows.unlink()
    with pytest.raises(UserError, match=r"rows\.parquet"):
        load_plan(config.run_dir / PLAN_FOLDER).stats(range(1))
    assert again <= 3, "a copy that is there costs a listing and a small file"


def test_a_plan_whose_header_is_missing_is_none(config: Config) -> None:
    prepare_attempt(config, "session")
    run_dir = config.run_dir
    assert isinstance(run_dir, RemotePath) and has_plan(run_dir / PLAN_FOLDER)
    run_dir.open_store().delete(f"{PLAN_FOLDER}/segment-0000/{PLAN_FILE}")
    assert not has_plan(run_dir / PLAN_FOLDER)
    with pytest.raises(UserError, match="holds no plan"):
        load_plan(run_dir / PLAN_FOLDER)
    # As if its planner had been killed.
    prepare_attempt(config, "session")
    assert has_plan(run_dir / PLAN_FOLDER)


def test_a_resume_with_changed_settings_is_refused_as_on_a_path(config: Config, s3: S3Server) -> None:
    prepare_attempt(config, "session")
    changed = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 1.0})})
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        prepare_run(changed, Path("/")).report.raise_problems()


def test_a_store_that_is_away_is_named_with_its_setting(
    config: Config, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_ulysses.storage.place.RETRY_S", 0.1)
    requests = _Requests(monkeypatch)
    requests.fail(1, is_carried_out=False)
    with pytest.raises(RunError, match=r"run\.storage='s3://.*can't be read \(the store failed\); check the bucket"):
        prepare_run(config, Path("/"))


def test_a_store_without_conditional_puts_is_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(config)
    create = ObjectStore.create
    monkeypatch.setattr(ObjectStore, "create", lambda store, key, chunks: ObjectStore.replace(store, key, chunks))
    with pytest.raises(UserError, match=r"run\.storage='s3://.*conditional puts are ignored"):
        check_writable(config)
    assert create is not None


def test_refusals_and_the_end_of_a_run_are_recorded(config: Config) -> None:
    prepare_attempt(config, "session")
    leave_refusal(config.run_dir, "session", "first")
    leave_refusal(config.run_dir, "session", "second")
    assert refusal(config.run_dir, "session") == "first" and refusal(config.run_dir, "other") is None
    claim_journal(config.run_dir).close()
    failure = RunFailed(time=1.0, attempt=1, reason="it failed")
    settle_failed(config, failure)
    record_command_ended(config.run_dir, "session")
    assert [getattr(one, "reason", None) for one in read_journal(config.run_dir).entries] == ["it failed"]


def test_what_only_a_node_needs_is_apart_for_each_run_and_beside_the_run_on_a_path(
    config: Config, tmp_path: Path
) -> None:
    assert node_folder(tmp_path) == tmp_path
    run_dir = config.run_dir
    assert isinstance(run_dir, RemotePath)
    other = run_dir.parent / "run-2"
    assert node_folder(run_dir) != node_folder(other)
    assert node_folder(run_dir).is_relative_to(tmp_path / "node")
