"""Runs that are copied from an object store to a disk and back go on, and a branch in a store is that of a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.cli import app, run
from ray_ulysses.config import Config
from ray_ulysses.run.completion import record_command_ended
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.tracking.events import RunFailed
from ray_ulysses.tracking.failures import record_failure
from ray_ulysses.tracking.history import RunHistory, read_history
from ray_ulysses.tracking.journal_reader import read_journal
from tests.distributed.harness import run_ranks
from tests.distributed.run_case import make_config, make_corpus, prepare_attempt, run_worker
from tests.s3_server import serve_s3

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
LAST_STEP = 6


def copy_run(source: Place, target: Place) -> None:
    """Do what ``aws s3 sync`` does."""
    for name in source.iterdir() if isinstance(source, Path) else [Path(n) for n in open_store(source).root_names()]:
        keys = open_store(source).list(name.name)
        for key in keys:
            open_store(target).create(key, [open_store(source).read_whole(key)])


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_copied_and_nothing_of_its_journal_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus(tmp_path, ("bisect.py", "cmd.py"))
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "node"))
    with serve_s3() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)

        def config_at(storage: str, stop_step: int) -> Config:
            return make_config(
                storage, corpus, run__stop_step=stop_step, parallel__sp_size=1, cluster__workers=1,  # type: ignore[arg-type]
                checkpoint__every_steps=2, data__rows_per_step=2,
            )  # fmt: skip

        wanted = config_at(str(tmp_path / "unbroken"), LAST_STEP)
        first, second = config_at(server.uri("a"), 2), config_at(str(tmp_path / "b"), 4)
        third = config_at(server.uri("c"), LAST_STEP)
        prepare_attempt(wanted, "unbroken")
        run_ranks(run_worker, 1, wanted, "unbroken")
        for number, config in enumerate((first, second, third)):
            if number:
                copy_run((first, second)[number - 1].run_dir, config.run_dir)
            session = f"session-{number}"
            prepare_attempt(config, session)
            run_ranks(run_worker, 1, config, session, environment=server.environment())
            # As a command does: into a file beside the attempt's, which the next command adds to where it is then.
            for attempt in range(1, number + 2):
                record_failure(config.run_dir, RunFailed(time=1.0, attempt=attempt, reason=session), writer="command")
            record_command_ended(config.run_dir, session)

        ours, unbroken = read_history(third.run_dir), read_history(wanted.run_dir)
        assert [(one.step, one.rows) for one in ours.steps] == [(one.step, one.rows) for one in unbroken.steps]
        assert ours.data_digest == unbroken.data_digest
        assert [one.loss for one in ours.steps] == [pytest.approx(one.loss, rel=1e-6) for one in unbroken.steps]
        assert [one.first_step for one in ours.attempts] == [1, 3, 5]
        journal = read_journal(third.run_dir)
        assert journal.damaged == ()
        reasons = sorted(one.reason for one in journal.entries if isinstance(one, RunFailed))
        assert reasons == ["session-0", *["session-1"] * 2, *["session-2"] * 3]
        assert run(app, ["inspect", str(third.run_dir), "--verify"]) == 0


@pytest.mark.slow
def test_a_branch_in_an_object_store_is_that_of_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpora = make_corpus(tmp_path / "1", ("bisect.py", "cmd.py")), make_corpus(tmp_path / "2", ("enum.py",))
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "node"))
    with serve_s3() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)

        def run_at(storage: str) -> RunHistory:
            same: dict[str, Any] = {
                "parallel__sp_size": 1,
                "cluster__workers": 1,
                "checkpoint__every_steps": 2,
                "schedule__horizon_steps": 20,
            }
            first = make_config(storage, corpora[0], run__stop_step=2, data__rows_per_step=2, **same)  # type: ignore[arg-type]
            sources = [{"path": str(path)} for path in corpora]
            changed = {"data__path": None, "data__sources": sources, "data__context_tokens": 512}
            after = make_config(storage, corpora[0], run__stop_step=LAST_STEP, data__rows_per_step=3, **changed, **same)  # type: ignore[arg-type]
            for config, session in ((first, "first"), (after, "branch")):
                prepare_attempt(config, session, branch=config is after)
                run_ranks(run_worker, 1, config, session, environment=server.environment())
            assert run(app, ["inspect", str(after.run_dir), "--verify"]) == 0
            return read_history(after.run_dir)

        ours, disk = run_at(server.uri("runs")), run_at(str(tmp_path / "disk"))
    assert [step.rows for step in ours.steps] == [step.rows for step in disk.steps]
    assert ours.step == LAST_STEP and ours.data_digest == disk.data_digest
    assert [step.loss for step in ours.steps] == [pytest.approx(step.loss, rel=1e-6) for step in disk.steps]
