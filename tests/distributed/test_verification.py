"""What ranks really received, proved afterwards: journal, checkpoints and corpus of a run that was killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ray_ulysses.checkpoint.manifest import read_facts
from ray_ulysses.inspect.verification import verify_run
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.history import read_history
from ray_ulysses.tracking.journal_lines import with_checksum
from tests.distributed.run_case import make_config, make_corpus, train, train_to_death

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def test_what_ranks_received_is_found_again_in_plan_and_corpus(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    common = {"run__stop_step": 9, "checkpoint__every_steps": 3, "data__rows_per_step": 2}
    config = make_config(tmp_path / "runs", corpus, cluster__workers=2, **common)
    train_to_death(config, "first", (1, "step", 5))
    # A record is damaged while nobody trains.
    damaged = config.run_dir / "journal/attempt-0001.jsonl"
    whole = damaged.read_bytes()
    place = whole.index(b'"tokens": ', whole.index(b'"step": 2, ')) + 11
    damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    one = make_config(tmp_path / "runs", corpus, cluster__workers=1, parallel__sp_size=1, **common)
    train(one, "second")
    unbroken = make_config(tmp_path / "unbroken", corpus, cluster__workers=1, parallel__sp_size=1, **common)
    train(unbroken, "third")

    # The run went on from its checkpoint's sums, which hold each planned token once; the damaged step isn't proved.
    history, sound = (read_history(one.run_dir, is_held=False) for one in (config, unbroken))
    _, last = read_facts(LocalStore(config.run_dir), 9)
    assert (last.digest, last.tokens) == (sound.data_digest, sound.tokens)
    assert (history.missing_steps, len(history.damaged_records), len(history.steps)) == (((2, 2),), 1, 8)
    findings = verify_run(config.run_dir).findings
    assert [(finding.kind, finding.where) for finding in findings] == [("missing_steps", "step 2")]

    # Without the damage everything is proved.
    damaged.write_bytes(whole)
    found = verify_run(config.run_dir, other=unbroken.run_dir)
    assert found.holds, found.findings
    assert (found.status, found.steps, found.rows) == ("finished", 9, 18)
    assert found.num_manifests > 0 and found.num_commits == 3
    assert found.reading is not None and f"{found.reading.digest:016x}" == found.data_digest
    assert found.comparison is not None and found.comparison.answer == "same"

    # One bit of what step 7 received.
    journal = config.run_dir / "journal/attempt-0002.jsonl"
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    for record in records:
        # With its checksum, the change itself would be found.
        del record["crc32"]
        if record["event"] == "step" and record["step"] == 7:
            record["digest"] = f"{int(record['digest'], 16) ^ 1:016x}"
    journal.write_bytes(b"".join(with_checksum(json.dumps(record).encode()) + b"\n" for record in records))
    kinds = [(finding.kind, finding.step) for finding in verify_run(config.run_dir, other=unbroken.run_dir).findings]
    assert set(kinds) == {("checkpoint_digest", 9), ("comparison", 7), ("digest", 7)}
