"""A run that is copied from an object store to a disk, or from a disk to an object store, goes on there."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.cli import app, run
from ray_ulysses.config import Config
from ray_ulysses.run.completion import record_command_ended
from ray_ulysses.storage.place import Place, store_at
from ray_ulysses.storage.store import read_bytes
from ray_ulysses.tracking.events import RunFailed
from ray_ulysses.tracking.failures import record_failure
from ray_ulysses.tracking.history import read_history
from ray_ulysses.tracking.journal_reader import read_journal
from tests.distributed.harness import run_ranks
from tests.distributed.run_case import make_config, make_corpus, prepare_attempt, run_worker
from tests.s3_server import serve_s3

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
LAST_STEP = 6


def copy_run(source: Place, target: Place) -> None:
    """Do what ``aws s3 sync`` does."""
    for name in source.iterdir() if isinstance(source, Path) else [Path(n) for n in source.open_store().root_names()]:
        keys = store_at(source).list(name.name)
        for key in keys:
            store_at(target).create(key, [read_bytes(store_at(source), key)])


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
