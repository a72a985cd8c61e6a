"""What a command writes into a run's directory in an object store, in how many requests, and when any of them fails."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_ulysses.checkpoint.fence import claim_attempt
from ray_ulysses.config import Config, load_config
from ray_ulysses.data.plan import plan_copies
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import PLAN_FILE, load_plan, num_segments
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run.checkpoint_store import checkpoint_claim, checkpoint_store
from ray_ulysses.run.completion import record_command_ended, record_completion, record_run_failed
from ray_ulysses.run.ownership import claim_checkpoints, run_identity
from ray_ulysses.run.preflight import (
    check_resume,
    check_writable,
    claim_directory,
    planned_memory,
    prepare_run,
    refuse_vanished,
)
from ray_ulysses.run.requests import (
    announce_session,
    clear_stop,
    exclude_nodes,
    request_save,
    request_stop,
)
from ray_ulysses.run.run_files import RunTexts, describe_run, describing_files, read_plan_facts
from ray_ulysses.run.stored_run import refuse_changed
from ray_ulysses.run.takeover import leave_refusal, refusal
from ray_ulysses.run_names import CONFIG_FILE, PLAN_FOLDER
from ray_ulysses.storage import Claim, run_claim
from ray_ulysses.storage.location import ObjectLocation
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.place import open_store
from ray_ulysses.tracking.events import RunFailed
from ray_ulysses.tracking.failures import newest_attempt
from ray_ulysses.tracking.history import read_history
from ray_ulysses.tracking.journal import claim_journal
from ray_ulysses.tracking.journal_reader import read_journal
from ray_ulysses.tracking.steps import ungroup_steps
from tests.distributed.run_case import make_config, prepare_attempt
from tests.failing_requests import WHEN, FailingRequests, said
from tests.result_table import ResultTable
from tests.s3_server import KEY_ID, SECRET, S3Server
from tests.unit.checkpoint.fakes import save
from tests.unit.storage.test_claim import ManualClock


@pytest.fixture
def config(s3: S3Server, prefix: str, small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "node"))
    return make_config(s3.uri(prefix), small_corpus, data__rows_per_step=2, run__stop_step=10)  # type: ignore[arg-type]


@pytest.fixture
def requests(config: Config) -> Iterator[FailingRequests]:
    with FailingRequests().installed() as requests:
        yield requests


def _start(config: Config) -> None:
    """Write what a command and its first attempt write before the first step."""
    _claim(config, "session")
    _warn(config, "begun")


def _warn(config: Config, *texts: str, after: int = 0) -> None:
    """Write the journal of an attempt."""
    journal = claim_journal(config.run_dir, after=after)
    for text in texts:
        journal.append({"event": "warning", "text": text})
    journal.close()


def _resume(config: Config) -> None:
    """Do what a command does on another node that continues a run, up to its attempt's first requests."""
    check_writable(prepare_run(config, Path("/")))
    with _lease(config):
        _claim(config, "resumed")
        exclude_nodes(config.run_dir, "resumed", {"node": 2.0})
        request_stop(config.run_dir, "resumed", "resize")
        request_save(config.run_dir)
        newest = newest_attempt(config.run_dir)
        _warn(config, "resumed", "waits", after=0 if newest is None else newest.attempt)


def _end(config: Config) -> None:
    """Do what a command does whose run has failed."""
    with _lease(config):
        record_run_failed(config, RunFailed(time=1.0, attempt=1, reason="it failed"))
        record_command_ended(config.run_dir, "session")
        refuse_vanished(config)
        clear_stop(config.run_dir)
    read_history(config.run_dir, is_held=False, store=open_store(config.run_dir))


def _claim(config: Config, session: str) -> None:
    prepare_attempt(config, session)
    run_identity(config)
    describe_run(config.run_dir, RunTexts(plan="plan", readme="readme", facts={"memory": 1}))


@contextlib.contextmanager
def _lease(config: Config) -> Iterator[None]:
    store = open_store(config.run_dir)
    lease = Claim(store, run=config.run.name, setting="run.storage", clock=ManualClock(), machine="")
    lease.acquire(beat_in_background=False)
    try:
        with contextlib.suppress(OSError):
            lease.beat()
        yield
    finally:
        lease.release()


_PHASES: dict[str, tuple[Callable[[Config], None], int, set[str], set[int]]] = {
    # What it does, its most requests, what stands in the journal afterwards, and the cases of `make test`.
    "start": (_start, 24, {"begun"}, {16}),
    "resume": (_resume, 44, {"begun", "resumed", "waits"}, {24}),
    "end": (_end, 20, {"begun", "it failed"}, {9}),
}
Begin = Callable[[str], None]
_CASES = [
    pytest.param(phase, call, when, marks=() if call in fast else pytest.mark.slow)
    for phase, (_, most, _, fast) in _PHASES.items()
    for call in range(1, most + 1)
    for when in WHEN
]


@pytest.fixture
def at(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Bring a run to where a phase begins; another node, which has no copy of the plan, resumes it."""

    def bring(phase: str) -> None:
        if phase != "start":
            _start(config)
        if phase == "resume":
            claim_attempt(checkpoint_store(config), 1)
            monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "other"))

    return bring


def _check(config: Config, texts: set[str]) -> None:
    run_dir = config.run_dir
    assert load_config(run_dir / CONFIG_FILE).run == config.run
    assert num_segments(run_dir / PLAN_FOLDER) == 1
    assert read_plan_facts(run_dir) == {"memory": 1}
    assert describing_files(run_dir)["README.md"] == "readme"
    journal = read_journal(run_dir)
    found = {getattr(one, "text", None) or getattr(one, "reason", None) for one in ungroup_steps(journal.entries)}
    assert found == texts
    assert journal.damaged == ()


@pytest.fixture(scope="module")
def store_table() -> Iterator[ResultTable]:
    """The table of all cases, stored where a run of all of them asks for it."""
    table, title = ResultTable(), "Failing requests of a run in an object store: its commands"
    yield table
    if "STORE_FAULTS" in os.environ and table.rows:
        table.write("store_errors", title, by=os.environ["STORE_FAULTS"])


@pytest.mark.parametrize(("phase", "call", "when"), _CASES)
def test_whichever_request_fails_the_same_command_does_all_of_it_afterwards(
    config: Config, requests: FailingRequests, at: Begin, store_table: ResultTable, phase: str, call: int, when: str
) -> None:
    command, _, texts, _ = _PHASES[phase]
    at(phase)
    requests.fail(call, is_carried_out=WHEN[when])
    outcome = "goes on"
    try:
        # A failure may also be survived: by a suppressed one that the next command makes up for.
        command(config)
    except (OSError, RunError, UserError) as error:
        outcome = said(error)
    struck = requests.struck
    requests.fail(0)
    command(config)
    _check(config, texts)
    if struck is not None:
        store_table.add({"phase": phase, "request": str(call), "key": struck, "fails": when, "command": outcome})


@pytest.mark.parametrize("phase", _PHASES)
def test_the_requests_of_a_command_are_few_and_all_of_them_are_tried_to_fail(
    config: Config, requests: FailingRequests, at: Begin, phase: str
) -> None:
    command, most, _, _ = _PHASES[phase]
    at(phase)
    requests.fail(0)
    command(config)
    assert 0.7 * most <= len(requests.keys) <= most, requests.keys


def test_no_credentials_are_in_what_is_stored_pickled_or_said(
    config: Config, requests: FailingRequests, caplog: pytest.LogCaptureFixture
) -> None:
    said = [repr(config), config.to_yaml()]
    for call in (0, 9, 21, 30):
        requests.fail(call)
        try:
            _start(config)
            _end(config)
        except (OSError, RunError, UserError) as error:
            said.append(repr(error))
    requests.fail(0)
    store = open_store(config.run_dir)
    stored = {key: store.read_whole(key) for name in store.root_names() for key in store.list(name)}  # type: ignore[attr-defined]
    assert len(stored) > 10 and len(said) > 2
    for content in (*stored.values(), pickle.dumps((config, config.run_dir, store)), *map(str.encode, said)):
        assert SECRET.encode() not in content and KEY_ID.encode() not in content
    assert SECRET not in caplog.text and KEY_ID not in caplog.text


def test_the_plan_is_that_of_a_disk_and_each_node_keeps_a_copy(
    config: Config, small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = make_config(tmp_path / "disk", small_corpus, data__rows_per_step=2, run__stop_step=10)
    for one in (config, local):
        prepare_attempt(one, "session")
    ours, theirs = (load_plan(one.run_dir / PLAN_FOLDER) for one in (config, local))
    assert ours.plan_id == theirs.plan_id and ours.num_steps == theirs.num_steps
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "other"))
    plan = load_plan(config.run_dir / PLAN_FOLDER)
    assert plan.plan_id == theirs.plan_id
    with FailingRequests().installed() as requests:
        load_plan(config.run_dir / PLAN_FOLDER)
    assert len(requests.keys) <= 3, "a copy that is there costs a listing and a small file"


def _flip_a_bit(content: bytes) -> bytes:
    """Return the file with another bit in its first row group, which its footer does not tell."""
    return content[:40] + bytes([content[40] ^ 1]) + content[41:]


def test_a_copy_of_the_plan_that_is_damaged_or_deleted_is_made_anew(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_attempt(config, "session")
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "other"))
    folder = config.run_dir / PLAN_FOLDER
    synced: list[str] = []
    monkeypatch.setattr(plan_copies, "sync", lambda path: synced.append(path.name))

    def read(plan: Plan) -> object:
        return plan.plan_id, plan.stats(range(1)).supervised.tolist(), plan.pieces(0)

    expected = read(load_plan(folder))
    (rows,) = (tmp_path / "other").rglob("rows.parquet")
    assert set(synced) >= {path.name for path in rows.parent.iterdir()}, "a power cut leaves a whole copy or none"
    # A power cut emptied a file.
    for name in (PLAN_FILE, "rows.parquet", "fragments.parquet"):
        (rows.parent / name).write_bytes(b"")
        assert read(load_plan(folder)) == expected, name
    # A group that nobody has read yet went bad.
    plan = load_plan(folder)
    for path in (rows, rows.with_name("pieces.parquet")):
        path.write_bytes(_flip_a_bit(path.read_bytes()))
    assert read(plan) == expected
    # Another command on the node deleted what it took for left behind.
    plan = load_plan(folder)
    os.utime(rows.parent.parent, (0, 0))
    plan_copies._sweep()
    assert not rows.parent.exists()
    assert read(plan) == expected
    assert load_plan(folder).plan_id == plan.plan_id
    # What is damaged in the store stays so.
    plan = load_plan(folder)
    store = open_store(folder / "segment-0000")  # type: ignore[union-attr]
    store.replace("rows.parquet", [_flip_a_bit(rows.read_bytes())])
    rows.unlink()
    with pytest.raises(UserError, match=r"rows\.parquet: .*copied again"):
        plan.stats(range(1))
    store.replace("rows.parquet", [b""])
    rows.unlink()
    with pytest.raises(UserError, match=r"is damaged: .*rows\.parquet"):
        load_plan(folder)


def test_a_plan_whose_header_is_missing_is_none(config: Config) -> None:
    prepare_attempt(config, "session")
    run_dir = config.run_dir
    assert isinstance(run_dir, ObjectLocation) and num_segments(run_dir / PLAN_FOLDER)
    open_store(run_dir).delete(f"{PLAN_FOLDER}/segment-0000/{PLAN_FILE}")
    assert not num_segments(run_dir / PLAN_FOLDER)
    with pytest.raises(UserError, match="contains no plan"):
        load_plan(run_dir / PLAN_FOLDER)
    # As if its planner had been killed.
    prepare_attempt(config, "session")
    assert num_segments(run_dir / PLAN_FOLDER)


def test_a_store_that_is_away_and_a_node_without_room_are_named(
    config: Config, requests: FailingRequests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in (prepare_run, planned_memory):
        requests.fail(1)
        with pytest.raises(RunError, match=r"run\.storage='s3://.*the store failed"):
            call(config, Path("/"))
    requests.fail(0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "file" / "node"))
    with pytest.raises(RunError, match="RAY_ULYSSES_CACHE_DIR"):
        prepare_attempt(config, "session")


def test_a_store_without_conditional_puts_is_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare_run(config, Path("/"))
    check_writable(prepared)
    monkeypatch.setattr(ObjectStore, "create", lambda store, key, chunks: ObjectStore.replace(store, key, chunks))
    with pytest.raises(UserError, match=r"run\.storage='s3://.*conditional puts"):
        check_writable(prepared)


def test_refusals_and_the_end_of_a_run_are_recorded(config: Config) -> None:
    prepare_attempt(config, "session")
    leave_refusal(config.run_dir, "session", "first")
    leave_refusal(config.run_dir, "session", "second")
    assert refusal(config.run_dir, "session") == "first" and refusal(config.run_dir, "other") is None
    claim_journal(config.run_dir).close()
    record_run_failed(config, RunFailed(time=1.0, attempt=1, reason="it failed"))
    record_command_ended(config.run_dir, "session")
    assert [getattr(one, "reason", None) for one in read_journal(config.run_dir).entries] == ["it failed"]


def _train(config: Config) -> None:
    """Do what `train` does before it starts workers."""
    stored = refuse_changed(config, branch=False)
    prepared = prepare_run(config, Path("/"), stored=stored)
    prepared.report.raise_problems()
    check_writable(prepared)
    with run_claim(config.run_dir), checkpoint_claim(config, prepared.run.store):
        claim_checkpoints(prepared.run)
        prepared = prepared.read_again()
        check_resume(prepared)
        assert record_completion(prepared) is None
        claim_directory(prepared)
        describe_run(config.run_dir, RunTexts(plan="", readme="", facts={}))
        announce_session(config.run_dir, "session")


@pytest.mark.parametrize(("is_apart", "most"), [(False, (32, 33)), (True, (48, 49))])
def test_a_start_asks_an_object_store_for_little(
    config: Config,
    requests: FailingRequests,
    s3: S3Server,
    prefix: str,
    is_apart: bool,
    most: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once a start took 68 requests and a resume 77, with checkpoints in a store of their own 103 and 119."""
    # However slow the machine is, no claim sends a heartbeat, whose requests would count.
    monkeypatch.setattr("ray_ulysses.storage.claim._BEATS_A_LEASE", 0.01)
    if is_apart:
        apart = config.checkpoint.model_copy(update={"storage": s3.uri(f"{prefix}-checkpoints")})
        config = config.model_copy(update={"checkpoint": apart})
    requests.fail(0)
    _train(config)
    assert len(requests.keys) <= most[0], requests.keys
    _warn(config, "begun")
    store = checkpoint_store(config)
    claim_attempt(store, 1)
    save(store, 2)
    requests.fail(0)
    _train(config)
    assert len(requests.keys) <= most[1], requests.keys
