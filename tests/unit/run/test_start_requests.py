"""How many requests a command makes to an object store before its workers start."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.checkpoint.fence import claim_attempt
from ray_ulysses.config import Config
from ray_ulysses.run.checkpoint_store import checkpoint_claim, checkpoint_store
from ray_ulysses.run.completion import record_completion
from ray_ulysses.run.ownership import claim_checkpoints
from ray_ulysses.run.preflight import check_resume, check_writable, claim_directory, prepare_run
from ray_ulysses.run.requests import announce_session
from ray_ulysses.run.run_files import RunTexts, describe_run
from ray_ulysses.run.stored_run import refuse_changed
from ray_ulysses.storage import run_claim
from ray_ulysses.tracking.journal import claim_journal
from tests.distributed.run_case import make_config, make_corpus
from tests.failing_requests import FailingRequests
from tests.s3_server import S3Server
from tests.unit.checkpoint.fakes import save


def _start(config: Config) -> None:
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


@pytest.mark.parametrize(("is_apart", "most_first", "most_again"), [(False, 32, 33), (True, 48, 49)])
def test_a_start_asks_an_object_store_for_little(
    s3: S3Server,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_apart: bool,
    most_first: int,
    most_again: int,
) -> None:
    """Once a start took 68 requests and a resume 77, with checkpoints in a store of their own 103 and 119."""
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "node"))
    apart = {"checkpoint__storage": s3.uri(f"{prefix}-checkpoints")} if is_apart else {}
    corpus = make_corpus(tmp_path, ("bisect.py", "cmd.py"))
    config = make_config(s3.uri(prefix), corpus, data__rows_per_step=2, run__stop_step=10, **apart)  # type: ignore[arg-type]
    with FailingRequests().installed() as requests:
        _start(config)
        first = len(requests.keys)
    journal = claim_journal(config.run_dir)
    journal.append({"event": "warning", "text": "begun"})
    journal.close()
    store = checkpoint_store(config)
    claim_attempt(store, 1)
    save(store, 2)
    with FailingRequests().installed() as requests:
        _start(config)
        again = len(requests.keys)
    assert (first <= most_first, again <= most_again) == (True, True), (first, again, requests.keys)
