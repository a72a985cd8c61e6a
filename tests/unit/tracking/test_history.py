"""The history of a run: its JSON object, status, steps, attempts and pace; every second has exactly one category."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.storage import LockOwner, run_claim
from ray_ulysses.tracking.events import Event
from ray_ulysses.tracking.history import RunHistory, build_history, read_history, run_pace
from ray_ulysses.tracking.journal import AttemptJournal, claim_journal
from ray_ulysses.tracking.journal_reader import Journal as Events
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.tracking.run_time import StartTime, TimeSpent, time_spent
from ray_ulysses.tracking.steps import steps_that_count
from tests.breadth import examples
from tests.unit.tracking.journals import commit, event, journal, started, step


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
        "evaluation": None,
        "samples": [],
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


class Journal:
    """Builds a run's journal records, at times that the test sets."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def claim(self, attempt: int, time: float, session: str = "s", **times: float) -> Journal:
        return self.put("phase", attempt, time, session=session, phase="opening the data", **times)

    def start(self, attempt: int, time: float, resumed: int = 0, session: str = "s", **times: float) -> Journal:
        return self.put("attempt_started", attempt, time, resumed_step=resumed, session=session, **times)

    def step(self, attempt: int, time: float, step: int, seconds: float = 1.0, **fields: Any) -> Journal:
        data = {"loss": 2.0, "tokens": 8, "rows": [step - 1, step], "digest": f"{step:016x}"}
        return self.put("step", attempt, time, step=step, seconds=seconds, **data, **fields)

    def put(self, event: str, attempt: int, time: float, **fields: Any) -> Journal:
        self.records.append({"event": event, "attempt": attempt, "time": time, **fields})
        return self

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(map(event, self.records))

    @property
    def spent(self) -> TimeSpent:
        return time_spent(self.events)


def one_step() -> Journal:
    """Return the journal of an attempt that completes its first step at 15."""
    return Journal().claim(1, 10.0, command_started=0.0).start(1, 12.0).step(1, 15.0, 1, seconds=2.0)


def test_every_second_of_a_command_has_a_category() -> None:
    journal = Journal().claim(1, 130.0, command_started=100.0, workers_asked=110.0).start(1, 148.0)
    journal.step(1, 160.0, 1, seconds=7.0)
    journal.put("evaluation", 1, 163.0, step=1, loss=1.0, tokens=1, seconds=2.5)
    journal.step(1, 170.0, 2, seconds=2.0, saving_seconds=4.0)
    journal.step(1, 173.0, 3, seconds=3.0, saving_seconds=0.0)
    journal.put("attempt_ended", 1, 174.5, reason="finished", saving_seconds=1.0)
    journal.put("run_finished", 1, 174.5, step=3)
    journal.put("command_ended", 1, 180.0, session="s")
    found = journal.spent.to_json()
    assert found.pop("starts") == {
        "cut_off_s": 0.0, "detect_s": 0.0, "form_s": 20.0, "load_s": 0.0, "build_s": 15.0, "unknown_s": 18.0
    }  # fmt: skip
    assert found.pop("recovery") == asdict(StartTime())
    assert found == {
        "total_s": 80.0, "steps_s": 12.0, "lost_steps_s": 0.0, "startup_s": 33.0, "waiting_s": 20.0, "recovery_s": 0.0,
        "stages_s": 0.0, "saves_s": 5.0, "evaluation_s": 2.5, "other_s": 7.5, "between_commands_s": 0.0,
    }  # fmt: skip
    assert journal.spent.goodput == 0.15
    assert build_history(name="r", journal=Events(entries=journal.events, damaged=())).goodput == 0.15


def test_a_late_run_finished_event_adds_no_time() -> None:
    journal = Journal().claim(1, 10.0, command_started=0.0).start(1, 10.0).step(1, 12.0, 1)
    before = journal.spent
    assert journal.put("run_finished", 1, 500_000.0, step=1).spent == before


def test_a_run_without_steps_has_only_startup_time() -> None:
    journal = Journal().claim(1, 30.0, command_started=0.0, workers_asked=10.0)
    journal.put("phase", 1, 45.0, session="s", phase="building the model")
    starts = StartTime(build_s=10.0, form_s=20.0, unknown_s=15.0)
    assert journal.spent == TimeSpent(startup_s=25.0, waiting_s=20.0, starts=starts)
    assert journal.spent.goodput is None


def test_attempts_without_steps_count_as_startup() -> None:
    journal = Journal().claim(1, 10.0, command_started=0.0, workers_asked=0.0)
    journal.put("attempt_ended", 1, 15.0, reason="failed: RunError: x")
    journal.claim(2, 20.0, command_started=0.0, workers_asked=0.0).start(2, 21.0).step(2, 24.0, 1)
    # The failure was recorded at 15, but its time is unknown. The state was loaded at 21.
    starts = StartTime(form_s=10.0 + 5.0, unknown_s=5.0 + 1.0, build_s=2.0)
    assert journal.spent == TimeSpent(waiting_s=10.0 + 10.0, startup_s=3.0, steps_s=1.0, starts=starts)


def test_a_clock_that_goes_backwards_gives_no_negative_time() -> None:
    journal = Journal().claim(1, 10.0, command_started=20.0, workers_asked=25.0).start(1, 11.0)
    journal.step(1, 13.0, 1, seconds=2.0).step(1, 12.0, 2, seconds=2.0)
    assert all(seconds >= 0 for seconds in journal.spent.metrics().values())


def _failed_after_a_step(**failure: float) -> Journal:
    """Return a run whose attempt completes a step at 15, hangs at 18, is terminated at 21 and trains again at 33."""
    journal = Journal().claim(1, 10.0, command_started=0.0, workers_asked=5.0).start(1, 12.0)
    journal.step(1, 15.0, 1, seconds=2.0)
    journal.put("attempt_ended", 1, 21.5, session="s", reason="failed: rank 1 stands still", kind="hang", **failure)
    journal.put("phase", 2, 24.0, session="s", phase="opening the data", part="build")
    journal.put("phase", 2, 25.0, session="s", phase="looking for a checkpoint", part="load")
    journal.put("phase", 2, 25.5, session="s", phase="building the model", part="build")
    journal.put("phase", 2, 28.0, session="s", phase="loading step 1", part="load")
    return journal.start(2, 32.0, resumed=1).step(2, 35.0, 2, seconds=2.0)


def test_a_recovery_is_broken_down_from_failure_to_next_step() -> None:
    spent = _failed_after_a_step(fault_at=18.0, detected_at=21.0).spent
    assert spent.recovery == StartTime(
        cut_off_s=3.0, detect_s=3.0, form_s=3.0, load_s=0.5 + 4.0, build_s=1.0 + 2.5 + 1.0
    )
    assert sum(asdict(spent.recovery).values()) == spent.recovery_s == 33.0 - 15.0
    assert spent.starts == StartTime(build_s=5.0 + 1.0, form_s=5.0, unknown_s=2.0)


def test_time_without_records_is_unknown() -> None:
    # Without the time of the failure, the interrupted step and the detection are unknown.
    spent = _failed_after_a_step(detected_at=21.0).spent
    assert (spent.recovery.unknown_s, spent.recovery.form_s) == (6.0, 3.0)
    spent = _failed_after_a_step().spent
    assert (spent.recovery.unknown_s, spent.recovery.form_s) == (6.5, 2.5)
    # Without the times of joining and loading, and without a recorded end.
    journal = one_step()
    spent = journal.claim(2, 20.0, command_started=0.0).start(2, 26.0, resumed=1).step(2, 29.0, 2, seconds=2.0).spent
    assert spent.recovery == StartTime(unknown_s=5.0 + 6.0, build_s=1.0)
    # A part added by a later version.
    journal = Journal().claim(1, 10.0, command_started=0.0, workers_asked=0.0)
    journal.put("phase", 1, 11.0, session="s", phase="later", part="warm").start(1, 15.0).step(1, 17.0, 1)
    assert journal.spent.starts == StartTime(form_s=10.0, unknown_s=5.0, build_s=1.0)


@pytest.mark.parametrize("first_known", [True, False])
def test_of_two_failure_records_the_one_with_a_time_counts(first_known: bool) -> None:
    journal = one_step()
    known = {"reason": "lost worker 1", "fault_at": 18.0, "detected_at": 20.0}
    for fields in (known, {"reason": "failed: PeerError: x"})[:: 1 if first_known else -1]:
        journal.put("attempt_ended", 1, 21.0, session="s", **fields)
    spent = journal.claim(2, 25.0, command_started=0.0).start(2, 25.0, resumed=1).step(2, 27.0, 2, seconds=2.0).spent
    assert spent.recovery == StartTime(cut_off_s=3.0, detect_s=2.0, form_s=5.0)


def test_a_failure_ends_the_loading_phase_at_its_time() -> None:
    journal = Journal().claim(1, 10.0, command_started=0.0, workers_asked=0.0)
    journal.put("phase", 1, 12.0, session="s", phase="loading step 1", part="load")
    # Rank 0 continued after another rank's death.
    journal.put("phase", 1, 16.0, session="s", phase="building the model", part="build")
    journal.put("attempt_ended", 1, 19.0, session="s", reason="lost worker 1", fault_at=15.0)
    journal.claim(2, 21.0, command_started=0.0, workers_asked=0.0).start(2, 21.0).step(2, 22.0, 1)
    assert journal.spent.starts == StartTime(form_s=10.0 + 2.0, unknown_s=2.0, load_s=3.0, detect_s=4.0)


def test_a_resize_has_no_lost_steps_and_no_detection() -> None:
    journal = one_step()
    journal.put("attempt_ended", 1, 16.0, reason="resized", saving_seconds=1.0)
    spent = journal.claim(2, 25.0, command_started=0.0).start(2, 25.0, resumed=1).step(2, 27.0, 2, seconds=2.0).spent
    assert spent.recovery == StartTime(form_s=9.0)
    assert (spent.saves_s, spent.recovery_s) == (1.0, 9.0)


def test_time_between_stages_is_not_recovery_unless_an_attempt_fails() -> None:
    journal = one_step()
    journal.put("attempt_ended", 1, 16.0, reason="stage", saving_seconds=1.0)
    journal.claim(2, 20.0, command_started=0.0).start(2, 22.0, resumed=1)
    assert (journal.spent.stages_s, journal.spent.recovery_s) == (22.0 - 16.0, 0.0)
    journal.step(2, 25.0, 2, seconds=2.0)
    spent = journal.spent
    assert (spent.saves_s, spent.stages_s, spent.recovery_s) == (1.0, 23.0 - 16.0, 0.0)
    assert spent.recovery == StartTime() and spent.metrics()["time/stages_s"] == 7.0
    # This attempt is lost, and so is the first attempt of the next stage.
    journal.claim(3, 30.0, command_started=0.0).start(3, 30.0, resumed=2).step(3, 32.0, 3, seconds=2.0)
    assert (journal.spent.stages_s, journal.spent.recovery_s) == (7.0, 5.0)
    journal.put("attempt_ended", 3, 32.0, reason="stage")
    journal.claim(4, 33.0, command_started=0.0)
    journal.claim(5, 40.0, command_started=0.0).start(5, 41.0, resumed=3).step(5, 44.0, 4, seconds=2.0)
    assert (journal.spent.stages_s, journal.spent.recovery_s) == (8.0, 5.0 + 9.0)


def random_run(draw: random.Random) -> Journal:
    """Return random commands with attempts that die, resume from any earlier step, evaluate and save.

    Times are multiples of 1/8 s, so that sums are exact.
    """
    now, attempt, step, journal = 0.0, 0, 0, Journal()

    def later() -> float:
        nonlocal now
        now += draw.choice((0, draw.randint(0, 8), draw.randint(0, 80))) / 8
        return now

    def failed() -> None:
        """Record a failure with random known times; clocks may differ."""
        known = {name: max(0.0, now - draw.randint(-8, 40) / 8) for name in ("fault_at", "detected_at")}
        shown = {name: time for name, time in known.items() if draw.random() < 0.5}
        journal.put("attempt_ended", attempt, later(), reason="failed: OSError: y", **shown)

    for command in range(draw.randint(1, 4)):
        session, times = f"c{command}", {"command_started": later(), "workers_asked": later()}
        for _ in range(draw.randint(1, 3)):
            attempt += 1
            journal.claim(attempt, later(), session, **times)
            for part in draw.sample(("build", "load", None), draw.randint(0, 3)):
                journal.put("phase", attempt, later(), session=session, phase="x", part=part)
            if draw.random() < 0.2:
                failed()
                continue
            step = draw.randint(0, step)
            journal.start(attempt, later(), resumed=step, session=session, **times)
            for _ in range(draw.randint(0, 4)):
                step += 1
                saving, begin = later(), later()
                journal.step(attempt, later(), step, seconds=now - begin, saving_seconds=begin - saving)
                if draw.random() < 0.3:
                    journal.put("evaluation", attempt, later(), step=step, loss=1.0, tokens=1, seconds=draw.random())
            if draw.random() < 0.6:
                reason = draw.choice(("stopped", "finished", "resized", "stage"))
                journal.put("attempt_ended", attempt, later(), reason=reason, saving_seconds=draw.randint(0, 8) / 8)
            while draw.random() < 0.4:
                failed()
        if draw.random() < 0.5:
            journal.put("command_ended", attempt, later(), session=session)
    return journal


@settings(max_examples=examples(500))
@given(draw=st.randoms(use_true_random=False))
def test_the_parts_add_up_to_the_time_of_the_commands(draw: random.Random) -> None:
    journal = random_run(draw)
    spent, commands, attempts = journal.spent, {}, {}
    for record in journal.records:
        session = attempts.setdefault(record["attempt"], record.get("session"))
        began, _ = commands.get(session, (record.get("command_started"), 0.0))
        commands[session] = (began, record["time"])
    ran = sum(end - began for began, end in commands.values())
    counted = steps_that_count(journal.events)
    assert spent.total_s == ran
    assert spent.total_s + spent.between_commands_s == (
        journal.records[-1]["time"] - journal.records[0]["command_started"]
    )
    assert spent.steps_s == sum(one.seconds for one in counted.kept)
    assert spent.lost_steps_s == sum(one.seconds for one in counted.lost)
    assert sum(asdict(spent.starts).values()) == spent.startup_s + spent.waiting_s
    assert sum(asdict(spent.recovery).values()) == spent.recovery_s
    assert all(seconds >= 0 for seconds in spent.metrics().values())
