"""The updates that trackers receive: outages only delay them, and no death loses an update or repeats a point."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.run_names import cursor_key
from ray_ulysses.storage.place import Place, open_store, place_of
from ray_ulysses.tracking import tail as tail_module
from ray_ulysses.tracking.events import CheckpointCommitted, CheckpointEvent
from ray_ulysses.tracking.journal import claim_journal
from ray_ulysses.tracking.tail import JournalSource, Sink, Tail, following
from ray_ulysses.tracking.updates import AttemptBegan, AttemptOver, GoneCheckpoint, StepMetrics, Translation, Update
from tests.breadth import examples
from tests.polling import wait_until
from tests.s3_server import S3Server
from tests.unit.tracking import journals
from tests.unit.tracking.checkpoints import committed
from tests.unit.tracking.journals import event
from tests.unit.tracking.tails import ScriptedTracker

KINDS = {AttemptBegan: "start", StepMetrics: "step", AttemptOver: "finish", CheckpointCommitted: "checkpoint"}


def marks_of(points: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the newest step of each metric."""
    marks: dict[str, int] = {}
    for name, number in points:
        marks[name] = max(number, marks.get(name, -1))
    return marks


class FakeSink(Sink):
    """Stores updates; can be unavailable, lose responses, or be slow."""

    def __init__(self, is_away=False, loses_answers=0, reason="no route to host"):
        self.is_away, self.loses_answers, self.reason = is_away, loses_answers, reason
        self.updates, self.calls = [], 0
        self.slow = threading.Event()
        self.slow.set()

    def connect(self):
        self.calls += 1
        if self.is_away:
            raise ConnectionError(self.reason)
        return "one"

    def existing_marks(self):
        return marks_of(
            (name, one.step) for one in self.updates if isinstance(one, StepMetrics) for name in one.metrics
        )

    def deliver(self, updates):
        self.slow.wait(30)
        self.calls += 1
        if self.is_away:
            raise ConnectionError(self.reason)
        self.updates += updates
        if self.loses_answers:
            self.loses_answers -= 1
            raise TimeoutError("the answer was lost")

    def points(self, name="loss"):
        return [one.step for one in self.updates if isinstance(one, StepMetrics) and name in one.metrics]

    def kinds(self):
        return [KINDS[type(update)] for update in self.updates]


def make_tracker(sink, path, **changes):
    return ScriptedTracker(sink, path, **{"drain_s": 60.0, **changes})


def log_steps(tracker, steps):
    for number in steps:
        tracker.log_step(number, {"loss": 5.0 - number / 10})


def track(sink, path, steps=(), status="finished", **changes):
    """Track an attempt from its start to its end; return how long that took in seconds."""
    tracker, begin = make_tracker(sink, path, **changes), time.monotonic()
    tracker.start()
    log_steps(tracker, steps)
    tracker.finish(status)
    return time.monotonic() - begin


def test_the_end_waits_briefly_and_the_next_start_delivers_the_rest(tmp_path):
    assert track(FakeSink(is_away=True), tmp_path, range(1, 4), "failed", drain_s=0.2) < 10
    sink = FakeSink()
    track(sink, tmp_path, range(3, 6))
    assert sink.kinds() == ["start", "step", "step", "step", "finish", "start", "step", "step", "finish"]
    assert sink.points() == [1, 2, 3, 4, 5]


def test_a_delivery_with_a_lost_response_is_not_repeated(tmp_path):
    sink = FakeSink(loses_answers=3)
    track(sink, tmp_path, range(1, 30))
    assert sink.points() == list(range(1, 30))


def test_a_complete_run_is_delivered_without_a_new_attempt(tmp_path):
    away, sink = FakeSink(is_away=True), FakeSink()
    tracker = make_tracker(away, tmp_path, drain_s=0.05)
    tracker.start()
    log_steps(tracker, range(1, 4))
    tracker.log(committed(3))
    tracker.finish("finished")
    assert not make_tracker(away, tmp_path, drain_s=0.1).catch_up()
    assert make_tracker(sink, tmp_path).catch_up()
    assert sink.kinds() == ["start", *["step"] * 3, "checkpoint", "finish"]
    calls = sink.calls
    assert make_tracker(sink, tmp_path).catch_up()
    assert sink.calls == calls, "nothing is asked of a tracker that lacks nothing"


def test_an_abandoned_tracker_delivers_nothing_after_its_successor_starts(tmp_path):
    slow = FakeSink()
    slow.slow.clear()
    first = make_tracker(slow, tmp_path, drain_s=0.1, batch_updates=2)
    first.start()
    log_steps(first, range(1, 6))
    wait_until(lambda: slow.calls, "a delivery begins")
    first.finish("failed")
    slow.slow.set()
    first.tail._thread.join(5)
    assert not first.tail._thread.is_alive()
    # The delivery in progress arrived, but its response was ignored, so the next tracker queries the receiver.
    assert slow.kinds() in (["start"], ["start", "step"])
    second = make_tracker(slow, tmp_path)
    second.start()
    second.finish("finished")
    assert slow.points() == [1, 2, 3, 4, 5]


def test_a_damaged_cursor_delivers_the_run_again(tmp_path, caplog):
    sink = FakeSink()
    track(sink, tmp_path)
    (tmp_path / cursor_key("mlflow")).write_text('{"files": 3}')
    assert make_tracker(sink, tmp_path).catch_up()
    assert "trackers/mlflow.json is damaged" in caplog.text


def test_a_pipe_in_place_of_the_cursor_does_not_block_the_end(tmp_path, caplog):
    sink = FakeSink()
    tracker = make_tracker(sink, tmp_path, drain_s=60.0)
    cursor = tmp_path / cursor_key("mlflow")
    cursor.parent.mkdir()
    os.mkfifo(cursor)
    tracker.start()
    tracker.tail.stop()
    assert tracker.tail.wait(60.0)
    assert "mlflow.json: is a pipe" in caplog.text and not sink.updates


def test_a_batch_with_a_read_error_is_read_again(tmp_path):
    sink = FakeSink()
    tracker = make_tracker(sink, tmp_path)
    failures = [ValueError("a line that nothing can read"), MemoryError()]
    begin = tracker.tail._open_source

    def failing(read):
        for number, one in enumerate(read()):
            if number == 3 and failures:
                raise failures.pop()
            yield one

    def open_source(delivered):
        read = begin(delivered)
        return lambda: failing(read)

    tracker.tail._open_source = open_source
    log_steps(tracker, range(1, 8))
    tracker.start()
    tracker.finish("finished")
    assert sink.points() == [1, 2, 3, 4, 5, 6, 7] and not failures


def test_an_unwritable_cursor_repeats_no_update_and_is_not_an_outage(tmp_path, caplog, monkeypatch):
    sink = FakeSink()
    # The receiver does not report existing metrics.
    sink.existing_marks = dict

    full = OSError(errno.ENOSPC, "no space left on device")
    monkeypatch.setattr("ray_ulysses.storage.local.LocalStore.replace", Mock(side_effect=full))
    track(sink, tmp_path, range(1, 6), batch_updates=2)
    assert sink.kinds() == ["start", *["step"] * 5, "finish"]
    assert "is unavailable" not in caplog.text
    assert caplog.text.count("no space left on device") == 1


def test_a_deleted_run_directory_is_not_created_again(tmp_path):
    run_dir = tmp_path / "run"
    sink = FakeSink()
    tracker = make_tracker(sink, run_dir)
    tracker.start()
    wait_until(lambda: (run_dir / cursor_key("mlflow")).exists(), "a cursor")
    moved = run_dir.rename(tmp_path / "moved")
    (moved / "script-mlflow").rename(tmp_path / "script")
    tracker.drain()
    assert not run_dir.exists()


def test_trackers_do_not_wait_for_each_other(tmp_path):
    away, well = FakeSink(is_away=True), FakeSink()
    trackers = [make_tracker(away, tmp_path / "a"), make_tracker(well, tmp_path / "b")]
    for tracker in trackers:
        tracker.log(AttemptBegan(time=1.0))
    with following([tracker.tail for tracker in trackers], drain_s=0.3):
        for tracker in trackers:
            log_steps(tracker, range(1, 4))
        wait_until(lambda: well.points() == [1, 2, 3], "what is delivered beside a tracker that is away")
        begin = time.monotonic()
    assert time.monotonic() - begin < 10
    assert (away.points(), well.points()) == ([], [1, 2, 3])


def test_an_outage_is_logged_once_and_retried_with_pauses(tmp_path, caplog):
    sink = FakeSink(is_away=True, reason="no route to http://me:secret@host:5000/api")
    tracker, begin = make_tracker(sink, tmp_path, retry_s=(0.1, 0.1), drain_s=0.4), time.monotonic()
    tracker.start()
    log_steps(tracker, range(1, 100))
    wait_until(lambda: sink.calls > 2, "a third try")
    tracker.finish("failed")
    assert sink.calls <= (time.monotonic() - begin) / 0.1 + 3
    assert caplog.text.count("is unavailable") == 1
    assert "http://***@host:5000/api" in caplog.text and "secret" not in caplog.text


def translation(**changes: Any) -> Translation:
    return Translation(**{"run_dir": "/runs/demo", "location": "/runs/demo", **changes})


def started(attempt: int = 1, resumed_step: int = 0, **fields: Any) -> dict[str, Any]:
    return journals.started(resumed_step, attempt=attempt, settings={"optimizer.lr": 0.1}, **fields)


def step(number: int, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    own = {"loss": 5.0 - number / 10, "tokens": 9, "rows": [number, number + 1], "seconds": 2.0}
    return journals.step(number, attempt=attempt, time=100.0 + 3 * number, **{**own, **fields})


def commit(number: int, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    return journals.commit(number, attempt=attempt, sp_size=2, written_at=50.0 + number, **fields)


def found(newest: int, steps: Sequence[int], attempt: int, written_by: int = 1) -> dict[str, Any]:
    return {**commit(newest, attempt), "event": "checkpoints_found", "steps": steps, "written_by": written_by}


def updates(records: Sequence[Mapping[str, Any]], **changes: Any) -> list[Update]:
    translated = translation(**changes)
    return [update for record in records for update in translated.updates(event(record))]


def checkpoints(told: Sequence[Update]) -> list[tuple[Any, ...]]:
    return [
        ("committed" if isinstance(one, CheckpointEvent) else one.state, one.step, one.attempt)
        for one in told
        if isinstance(one, CheckpointEvent | GoneCheckpoint)
    ]  # fmt: skip


def test_an_attempt_begins_with_its_settings_and_its_facts() -> None:
    stages = [{"path": "/c"}, {"sources": [{"path": "/a"}, {"path": "/d"}]}]
    settings = {
        "run.seed": 3,
        "data.validation": ["/v"],
        "data.path": None,
        "data.sources": [{"path": "/a"}, {"path": "/b"}],
        "stages": stages,
    }
    fields = {"plan_ids": ["a", "b"], "versions": {"torch": "2.13.0"}, "stage": "long"}
    (began,) = updates([{**started(2, **fields), "settings": settings}], tags={"team": "x"})
    assert isinstance(began, AttemptBegan)
    assert began.params == {**settings, "world_size": 4, "sp_size": 2, "ring_size": 1, "dp_size": 2}
    assert (began.corpora, began.validation, began.plan_id) == (("/a", "/b", "/c", "/d"), ("/v",), "b")
    assert began.tags == {
        "team": "x", "run_dir": "/runs/demo", "attempt": 2, "plan_id": "b", "plan_segment": 1, "world_size": 4,
        "sp_size": 2, "ring_size": 1, "dp_size": 2, "stage": "long", "version.torch": "2.13.0",
    }  # fmt: skip


def test_metrics_are_logged_every_n_steps() -> None:
    records = [started(), *(step(number, mfu=None, grad_norm=1.5, system={"system/x": 3.0}) for number in range(1, 6))]
    told = [one for one in updates(records, log_every_steps=2) if isinstance(one, StepMetrics)]
    assert [one.step for one in told] == [2, 4]
    first = dict(told[0].metrics)
    assert {name: first.pop(name) for name in list(first) if not name.startswith("time/")} == {
        "train/loss": 4.8, "train/grad_norm": 1.5, "train/step_s": 2.0, "train/tokens_per_s": 4.5,
        "train/world_size": 4.0, "system/x": 3.0,
    }  # fmt: skip
    assert first["time/steps_s"] == 4.0 and "time/goodput" in first


def test_each_validation_corpus_has_a_metric_from_step_0_on() -> None:
    corpora = [{"name": name, "path": f"/{name}", "loss": loss, "tokens": 1} for name, loss in (("a", 3.0), ("b", 5.0))]
    (told,) = updates([{"event": "evaluation", "step": 0, "loss": 4.0, "tokens": 2, "corpora": corpora}])
    assert isinstance(told, StepMetrics) and told.step == 0
    assert told.metrics == {"eval/loss": 4.0, "eval/a/loss": 3.0, "eval/b/loss": 5.0}


def test_a_replayed_step_is_logged_once() -> None:
    evaluation = {"event": "evaluation", "step": 2, "loss": 4.0, "tokens": 1}
    unknown = {"event": "evaluation", "step": 1, "loss": "nan", "tokens": 1}
    first = [started(), step(1), unknown, step(2), evaluation, step(3, z_loss="nan")]
    again = [started(2, 1), step(2, 2), {**evaluation, "attempt": 2}, step(3, 2), step(4, 2)]
    told = [one for one in updates([*first, *again]) if isinstance(one, StepMetrics)]
    assert [one.step for one in told if "train/loss" in one.metrics] == [1, 2, 3, 4]
    assert [one.step for one in told if "eval/loss" in one.metrics] == [2]
    assert not any("train/z_loss" in one.metrics for one in told), "NaN is omitted"


@pytest.mark.parametrize(
    ("records", "ends"),
    [
        ([{"event": "attempt_ended", "reason": "stopped"}], [("stopped", 3)]),
        ([{"event": "attempt_ended", "reason": "resized"}], [("stopped", 3)]),
        ([{"event": "attempt_ended", "reason": "finished"}, {"event": "run_finished", "step": 3}], [("finished", 3)]),
        ([{"event": "attempt_ended", "reason": "failed: ValueError"}], [("failed", 3)]),
        ([{"event": "attempt_ended", "reason": "lost worker 1", "restarts": True}], []),
        ([{"event": "attempt_ended", "reason": "lost", "restarts": False}, {"event": "run_failed", "reason": "lost"}],
         [("failed", 3)]),
        ([started(2, resumed_step=3), {"event": "run_failed", "reason": "of attempt 1, read late", "attempt": 1}], []),
    ],
)  # fmt: skip
def test_the_end_of_an_attempt_is_reported_unless_another_follows(
    records: list[dict[str, Any]], ends: list[Any]
) -> None:
    told = updates([started(), step(3), *({"time": 110.0, **one} for one in records)])
    over = [one for one in told if isinstance(one, AttemptOver)]
    assert [(one.status, one.step) for one in over] == ends
    assert all(one.tags.get("failure.reason") == "lost" for one in over if records[-1]["event"] == "run_failed")


def test_the_end_has_the_time_metrics_that_changed() -> None:
    paused = {"event": "attempt_ended", "reason": "stopped", "time": 108.0, "saving_seconds": 2.0}
    over = updates([started(), step(1), step(2), paused])[-1]
    assert isinstance(over, AttemptOver) and over.metrics["time/saves_s"] == 2.0
    assert "time/steps_s" not in over.metrics


def test_checkpoint_updates_have_the_writing_attempt() -> None:
    records = [
        started(), commit(10), commit(20), {"event": "checkpoint_deleted", "step": 10}, commit(30), commit(40),
        {"event": "checkpoint_set_aside", "attempt": 2, "step": 40, "reason": "a flipped byte", "kind": "damaged"},
        {"event": "checkpoint_set_aside", "attempt": 2, "step": 30, "reason": "no", "kind": "unreadable"},
        started(2, 20), commit(30, 2), started(3, 20),
    ]  # fmt: skip
    assert checkpoints(updates(records)) == [
        ("committed", 10, 1), ("committed", 20, 1), ("deleted", 10, 1), ("committed", 30, 1), ("committed", 40, 1),
        ("damaged", 40, 1), ("superseded", 30, 1), ("committed", 30, 2), ("superseded", 30, 2),
    ]  # fmt: skip


def test_the_next_attempt_reports_unrecorded_commits_and_deletions() -> None:
    # Attempt 1 died before it recorded that it had deleted 10 and committed 40.
    records = [started(), commit(10), commit(20), found(40, [20, 40], 2), started(2, 40), found(40, [20, 40], 3)]
    told = updates(records)
    assert checkpoints(told) == [("committed", 10, 1), ("committed", 20, 1), ("deleted", 10, 1), ("committed", 40, 1)]
    (gone,) = [one for one in told if isinstance(one, GoneCheckpoint)]
    assert gone.reason == "was not among the run's checkpoints when attempt 2 started"


def test_a_committed_checkpoint_has_all_that_a_tracker_shows() -> None:
    fields = {"cursor": {"plan_id": "p", "next_row": 3}, "metrics": {"loss": 2.0}, "zero_stage": 3, "parent": "other"}
    (_, told) = updates(
        [started(), commit(5, reason="steps", stage="long", measured="m", **fields)], location="s3://b/r"
    )
    assert isinstance(told, CheckpointEvent)
    assert (told.attempt, told.path) == (1, "s3://b/r/checkpoints/step-00000005")
    assert (told.world_size, told.sp_size, told.ring_size) == (4, 2, 1)
    assert (told.cursor["plan_id"], told.zero_stage, told.parent, told.metrics) == ("p", 3, "other", {"loss": 2.0})
    assert (told.reason, told.stage, told.measured, told.written_at) == ("steps", "long", "m", 55.0)


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), max_size=8))
def test_any_attempts_give_each_step_once_in_order(attempts: list[tuple[int, int]]) -> None:
    records = []
    for number, (first, length) in enumerate(attempts, 1):
        records.append(started(number, first))
        records += [step(one, number) for one in range(first + 1, first + 1 + length)]
    sent = [one.step for one in updates(records) if isinstance(one, StepMetrics)]
    assert sent == sorted(set(sent))
    assert max(sent, default=-1) == max((first + length for first, length in attempts), default=-1)


class Died(BaseException):
    """The process was killed."""


class Deaths:
    """Kills the process at the write or request number ``at``, before or after it takes effect."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.count = at, 0

    def __call__(self, do: Callable[[], Any]) -> Any:
        self.count += 1
        if self.count == self.at:
            raise Died
        result = do()
        self.count += 1
        if self.count == self.at:
            raise Died
        return result


class Tracker(Sink):
    """Stores updates like an MLflow server, in the order of arrival."""

    def __init__(self, deaths: Deaths) -> None:
        self.points: list[tuple[str, int, float]] = []
        self.others: list[Update] = []
        self.deaths = deaths

    def connect(self) -> str:
        self.deaths(lambda: None)
        return "one"

    def existing_marks(self) -> Mapping[str, int]:
        return marks_of((name, number) for name, number, _ in self.points)

    def deliver(self, updates: Sequence[Update]) -> None:
        for update in updates:
            self.deaths(lambda update=update: self._take(update))

    def _take(self, update: Update) -> None:
        if isinstance(update, StepMetrics):
            self.points += [(name, update.step, value) for name, value in update.metrics.items()]
        elif update not in self.others:
            self.others.append(update)
        elif isinstance(update, CheckpointEvent | GoneCheckpoint) and update != self.others[-1]:
            pytest.fail("an update of a checkpoint was repeated behind another update")


class MortalStore:
    """A store whose writes may kill the process."""

    def __init__(self, store: Any, deaths: Deaths) -> None:
        self._store, self._deaths = store, deaths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def replace(self, key: str, chunks: Any) -> None:
        content = list(chunks)
        self._deaths(lambda: self._store.replace(key, content))


PARTS: list[list[dict[str, Any]]] = [
    [started(), step(1), step(2), commit(2), step(3)],
    [started(2, 2), step(3, 2), commit(3, 2), {"event": "checkpoint_deleted", "attempt": 2, "step": 2}],
    [step(4, 2), {"event": "attempt_ended", "attempt": 2, "reason": "finished", "time": 115.0}],
    [{"event": "run_finished", "attempt": 2, "step": 4, "time": 116.0}],
]
"""Records that are appended to the journal between two polls of the tail."""


def _play(run_dir: Place, deaths: Deaths, batch: int) -> Tracker:
    """Train and track a run, and start another command whenever one has died."""
    sink, opened, time = Tracker(deaths), list[Any](), 100.0

    def source(done: Mapping[str, int]) -> Any:
        return JournalSource(run_dir, done, translation()).read

    def lives() -> bool:
        one = Tail("mlflow", sink, run_dir, source, batch_updates=batch)
        one.stop()
        try:
            # Run in this thread, so that `Died` ends the loop.
            one._follow()
        except Died:
            return False
        return True

    store = MortalStore(open_store(run_dir), deaths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail_module, "open_store", lambda *_, **__: store)
        for records in PARTS:
            for record in records:
                if record["event"] == "attempt_started":
                    opened.append(claim_journal(run_dir))
                time += 3.0
                opened[-1].append({**record, "time": time})
            for journal in opened:
                journal.sync()
            while not lives():
                pass
    for journal in opened:
        journal.close()
    return sink


@pytest.mark.parametrize("batch", [2, 200])
@pytest.mark.parametrize("kind", ["files", pytest.param("object store", marks=pytest.mark.slow)])
def test_wherever_a_command_dies_updates_arrive_once_and_in_order(
    kind: str, tmp_path: Path, s3: S3Server, prefix: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only processes die here, so syncing to disk is unnecessary.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    top = tmp_path if kind == "files" else place_of(s3.uri(prefix))
    deaths = Deaths()
    whole = _play(top / "whole", deaths, batch)
    assert [number for name, number, _ in whole.points if name == "train/loss"] == [1, 2, 3, 4]
    assert [type(one) for one in whole.others] == [
        AttemptBegan, CheckpointCommitted, AttemptBegan, CheckpointCommitted, GoneCheckpoint, AttemptOver
    ]  # fmt: skip
    assert deaths.count > 30
    for at in range(1, deaths.count + 1, 1 if kind == "files" else 5):
        sink = _play(top / f"dies-at-{at}", Deaths(at), batch)
        assert len(sink.points) == len({(name, number) for name, number, _ in sink.points}), at
        # The next command repeats time metrics that have not changed.
        extra = set(sink.points) - set(whole.points)
        assert all(name.startswith("time/") for name, _, _ in extra), at
        assert [one for one in sink.points if one not in extra] == whole.points, at
        assert [_without_time(one) for one in sink.others] == [_without_time(one) for one in whole.others], at


def _without_time(update: Update) -> Update:
    return replace(update, metrics={}) if isinstance(update, AttemptOver) else update
