"""The journal: one number an attempt, whole records only, torn lines that swallow nothing."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.tracking.journal import AttemptJournal, attempt_numbers, read_records


class _StillClock:
    def now(self) -> float:
        return 1000.0

    def monotonic(self) -> float:
        return 0.0


def _ended(reason: str = "stopped") -> dict[str, object]:
    return {"event": "attempt_ended", "reason": reason}


def test_each_attempt_claims_the_next_number(tmp_path: Path) -> None:
    assert [AttemptJournal.claim(tmp_path).attempt for _ in range(3)] == [1, 2, 3]
    assert attempt_numbers(tmp_path) == (1, 2, 3)


def test_racing_attempts_never_share_a_number(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: AttemptJournal.claim(tmp_path).attempt, range(16)))
    assert sorted(numbers) == list(range(1, 17))


def test_a_record_is_readable_before_the_journal_is_closed(tmp_path: Path) -> None:
    journal = AttemptJournal.claim(tmp_path, _StillClock())
    journal.append(_ended())
    assert read_records(tmp_path) == [{"time": 1000.0, "attempt": 1, "event": "attempt_ended", "reason": "stopped"}]


def test_a_loss_that_is_not_finite_is_still_json(tmp_path: Path) -> None:
    journal = AttemptJournal.claim(tmp_path)
    step = {"event": "step", "step": 1, "tokens": 2, "rows": [0, 1], "digest": "0", "seconds": 1.0}
    journal.append({**step, "loss": math.nan})
    journal.append({**step, "loss": math.inf})
    lines = journal.path.read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["loss"] for line in lines] == ["nan", "inf"]
    assert math.isnan(float(read_records(tmp_path)[0]["loss"]))


def test_a_torn_last_line_is_left_out_and_swallows_nothing(tmp_path: Path) -> None:
    journal = AttemptJournal.claim(tmp_path)
    journal.append(_ended("first"))
    with journal.path.open("ab") as stream:
        stream.write(b'{"event": "attempt_ended", "reas')
    assert [record["reason"] for record in read_records(tmp_path)] == ["first"]
    AttemptJournal.open(tmp_path, 1).append(_ended("second"))
    assert [record["reason"] for record in read_records(tmp_path)] == ["first", "second"]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_torn_anywhere_is_no_record(tmp_path: Path, cut: int) -> None:
    journal = AttemptJournal.claim(tmp_path)
    journal.append(_ended())
    content = journal.path.read_bytes()
    journal.path.write_bytes(content + content[:cut])
    assert len(read_records(tmp_path)) == 1


def test_segments_of_two_writers_are_one_attempt(tmp_path: Path) -> None:
    journal = AttemptJournal.claim(tmp_path)
    controller = AttemptJournal.open(tmp_path, 1, writer="controller")
    controller.append(_ended("worker died"))
    journal.append({"event": "preemption_notice"})
    assert [record["event"] for record in read_records(tmp_path)] == ["preemption_notice", "attempt_ended"]
    assert controller.path.name == "attempt-0001.controller.jsonl"
    assert AttemptJournal.claim(tmp_path).attempt == 2


def test_an_event_without_its_fields_is_our_mistake(tmp_path: Path) -> None:
    journal = AttemptJournal.claim(tmp_path)
    with pytest.raises(AssertionError, match=r"'attempt_ended' lacks \['reason'\]"):
        journal.append({"event": "attempt_ended"})
    with pytest.raises(AssertionError, match="'lunch' is no kind of journal event"):
        journal.append({"event": "lunch"})


def test_a_storage_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run\.storage: the journal .* can't be written \(Not a directory\)"):
        AttemptJournal.claim(tmp_path / "file" / "run")


def test_a_run_without_a_journal_has_no_records(tmp_path: Path) -> None:
    assert read_records(tmp_path) == []
    assert attempt_numbers(tmp_path) == ()
