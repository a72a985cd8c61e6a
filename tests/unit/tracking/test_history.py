"""The history of a run: its JSON object, its status, its steps and attempts, its pace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.storage import LockOwner, run_claim
from ray_ulysses.tracking.history import RunHistory, build_history, read_history, run_pace
from ray_ulysses.tracking.journal import AttemptJournal, claim_journal
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.tracking.run_time import time_spent
from tests.unit.tracking.journals import commit, journal, started, step


def _started(attempt: int, time: float, resumed: int = 0, **extra: Any) -> dict[str, Any]:
    return started(resumed, attempt=attempt, time=time, **{"session": f"s{attempt}", **extra})


def _step(attempt: int, number: int, time: float, *, loss: float = 2.0, seconds: float = 1.0) -> dict[str, Any]:
    own = {"attempt": attempt, "time": time, "loss": loss, "seconds": seconds}
    return step(number, tokens=100, digest=f"{number * 2**60:016x}"[-16:], **own)


def _ended(attempt: int, time: float, reason: str) -> dict[str, Any]:
    return {"event": "attempt_ended", "attempt": attempt, "time": time, "reason": reason}


def _write(run_dir: Path, records: list[dict[str, Any]]) -> None:
    journals: dict[int, AttemptJournal] = {}
    for record in records:
        if record["attempt"] not in journals:
            journals[record["attempt"]] = claim_journal(run_dir)
        journals[record["attempt"]].append(record)


def _history(records: list[dict[str, Any]], **given: Any) -> RunHistory:
    return build_history(name="r", journal=journal(records), **given)


def test_the_json_is_the_contracts_object(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    _write(
        run_dir,
        [
            _started(1, 100.0),
            _step(1, 1, 102.0),
            _step(1, 2, 103.0, loss=1.5),
            commit(2, attempt=1, time=103.5),
            _step(1, 3, 104.0, loss=9.0),
            _started(2, 110.0, resumed=2, world_size=2, dp_size=1),
            _step(2, 3, 112.0, loss=1.25),
            _ended(2, 112.5, "stopped: SIGTERM"),
        ],
    )
    for number, text in ((2, '{"world_size": 4}'), (3, None)):
        folder = run_dir / "checkpoints" / f"step-{number:08d}"
        folder.mkdir(parents=True)
        (folder / ("manifest.json" if text else "set-aside-0001.json")).write_text(text or "{}")
    numbers = {"seconds": 1.0, "learning_rate": None, "grad_norm": None}
    absent = ("resumed_from", "rank", "node", "stage", "stream_step", "direct_rows")
    shared = {"sp_size": 2, "ring_size": 1, "seconds_to_first_step": 2.0, "lacks_stream": False}
    attempt = {**shared, **dict.fromkeys(absent)}
    stopped = {"reason": "stopped: SIGTERM"}
    assert json.loads(json.dumps(read_history(run_dir).to_json())) == {
        "name": "demo",
        "status": "stopped",
        "step": 3,
        "tokens": 300,
        "steps": [
            {"step": 1, "loss": 2.0, "tokens": 100, "rows": [0, 6], "attempt": 1, **numbers},
            {"step": 2, "loss": 1.5, "tokens": 100, "rows": [6, 12], "attempt": 1, **numbers},
            {"step": 3, "loss": 1.25, "tokens": 100, "rows": [12, 18], "attempt": 2, **numbers},
        ],
        "attempts": [
            {"attempt": 1, "world_size": 4, "dp_size": 2, "first_step": 1, "last_step": 3, "reason": None, **attempt},
            {"attempt": 2, "world_size": 2, "dp_size": 1, "first_step": 3, "last_step": 3, **stopped, **attempt},
        ],
        "checkpoints": [
            {"step": 2, "path": "checkpoints/step-00000002", "committed": True, "world_size": 4},
            {"step": 3, "path": "checkpoints/step-00000003", "committed": False, "world_size": None},
        ],
        "rows_consumed": 18,
        "data_digest": f"{(1 + 2 + 3) * 2**60:016x}",
        "lost_steps": 1,
        # 3 s in steps that count. Attempt 1 ran 100..104, attempt 2 ran 110..112.5; the pause is not counted.
        "goodput": round(3 / 6.5, 4),
        "failure": None,
        "time_spent": time_spent(read_entries(run_dir)).to_json(),
        "missing_steps": [],
        "damaged_records": [],
        "diagnostics": [],
    }


def test_the_time_to_the_first_step_begins_with_the_command_or_the_failure() -> None:
    command = {"session": "s", "command_started": 100.0}
    phase = {"event": "phase", "phase": "self-test", "attempt": 1, "time": 130.0, **command}
    records = [phase, _started(1, 150.0, **command), _step(1, 1, 160.0), _step(1, 2, 170.0)]
    records += [{**phase, "attempt": 2, "time": 180.0}, _started(2, 190.0, 1, **command), _step(2, 2, 195.0)]
    attempts = _history(records).attempts
    assert [attempt.seconds_to_first_step for attempt in attempts] == [60.0, 25.0]


def test_the_digest_wraps_at_64_bits() -> None:
    steps = [{**_step(1, 1, 1.0), "digest": "f" * 16}, {**_step(1, 2, 2.0), "digest": f"{3:016x}"}]
    assert _history([_started(1, 0.0), *steps]).data_digest == "0000000000000002"


_FINISHED = {"event": "run_finished", "attempt": 1, "time": 9.0, "step": 1}
_COMMAND_ENDED = {"event": "command_ended", "attempt": 1, "time": 9.5, "session": "s"}
_RUN_FAILED = {"event": "run_failed", "attempt": 1, "time": 9.2, "reason": "failed: out of memory", "restarts": 0}


@pytest.mark.parametrize(
    ("tail", "held", "status"),
    [
        ([], 0.0, "running"),
        ([], None, "interrupted"),
        ([_ended(1, 9.0, "stopped: SIGINT")], None, "stopped"),
        ([_ended(1, 9.0, "stopped: SIGINT")], 0.0, "running"),
        ([_ended(1, 9.0, "failed: out of memory")], None, "failed"),
        ([_FINISHED], None, "finished"),
        # The command that finished the run still renders the report; a later command has not started an attempt.
        ([_FINISHED], 0.0, "finished"),
        ([_FINISHED], 10.0, "running"),
        ([_FINISHED, _started(2, 10.0, resumed=1)], None, "interrupted"),
        # The same applies to a command that was stopped or failed and has recorded its end.
        ([_ended(1, 9.0, "stopped: SIGINT"), _COMMAND_ENDED], 0.0, "stopped"),
        ([_ended(1, 9.0, "stopped: SIGINT"), _COMMAND_ENDED], 10.0, "running"),
        ([_RUN_FAILED], 0.0, "failed"),
        ([_RUN_FAILED, _COMMAND_ENDED], 0.0, "failed"),
        ([_RUN_FAILED, _COMMAND_ENDED], 10.0, "running"),
        # An earlier command that lost the lock records its end late, under an older attempt.
        ([_started(2, 8.0), _COMMAND_ENDED], 5.0, "running"),
    ],
)
def test_the_status_follows_from_the_events_and_the_lock(
    tail: list[dict[str, Any]], held: float | None, status: str
) -> None:
    records = [_started(1, 0.0), _step(1, 1, 1.0), *tail]
    owner = None if held is None else LockOwner(host="a", pid=1, since=held)
    assert _history(records, owner=owner).status == status


def test_attempt_numbers_skip_an_attempt_that_never_trained() -> None:
    loading = {"event": "phase", "attempt": 2, "time": 2.0, "phase": "loading"}
    records = [_started(1, 0.0), _step(1, 1, 1.0), loading, _started(3, 5.0, resumed=1), _step(3, 2, 6.0)]
    printed = _history(records).to_json()
    assert [one["attempt"] for one in printed["attempts"]] == [1, 3]
    assert [one["attempt"] for one in printed["steps"]] == [1, 3]


def test_a_live_lock_means_running(tmp_path: Path) -> None:
    assert read_history(tmp_path / "none").status == "not_started"
    with run_claim(tmp_path):
        assert read_history(tmp_path).status == "running"


def test_an_unknown_loss_is_null_in_json() -> None:
    records = [_started(1, 0.0), _step(1, 1, 1.0, loss=float("nan"))]
    printed = json.dumps(_history(records).to_json(), allow_nan=False)
    assert json.loads(printed)["steps"][0]["loss"] is None


@pytest.mark.parametrize("world_size", ["1e999", "NaN", '"6"', "true", "-6", "9" * 5000])
def test_a_damaged_manifest_has_no_world_size(tmp_path: Path, world_size: str) -> None:
    folder = tmp_path / "checkpoints" / "step-00000007"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(f'{{"world_size": {world_size}}}')
    (found,) = read_history(tmp_path, is_held=False).checkpoints
    assert (found.committed, found.world_size) == (True, None)


def test_an_attempt_has_its_stream_start_and_directly_read_rows() -> None:
    records = [
        _started(1, 0.0, streams=True),
        *(_step(1, number, number) for number in (1, 2)),
        {"event": "stream_started", "attempt": 1, "time": 3.0, "step": 3, "direct_rows": 11},
        *(_step(1, number, number) for number in (3, 4)),
        _started(2, 5.0, resumed=4, streams=True),
        *(_step(2, number, number + 1.0) for number in (5, 6)),
        _started(3, 8.0, resumed=6),
        _step(3, 7, 9.0),
        _started(4, 10.0, resumed=7, streams=True),
        _started(5, 11.0, resumed=7, streams=True),
        *(_step(5, number, 10.0 * number) for number in range(8, 15)),
    ]
    assert [(one.stream_step, one.direct_rows, one.lacks_stream) for one in _history(records).attempts] == [
        (3, 11, False),
        (None, 12, False),
        (None, None, False),
        (None, 0, False),
        (None, 42, True),
    ]


def pace_of(folder: Path, **extra: Any) -> float:
    _write(folder, [_started(1, 10.0, session="s", command_started=0.0, **extra), _step(1, 1, 12.0, seconds=2.0)])
    pace = run_pace(folder)
    assert pace is not None and pace.start_s == 12.0
    return pace.seconds_left


def test_the_remaining_time_covers_all_stages(tmp_path: Path) -> None:
    assert pace_of(tmp_path / "one", last_step=11) == 20.0
    assert pace_of(tmp_path / "stage", last_step=11, run_last_step=101, stage="short") == 200.0
