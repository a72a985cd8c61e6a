"""Tracker outages only delay delivery, and no step is delivered twice."""

import errno
import os
import threading
import time

from ray_ulysses.run_names import cursor_key
from ray_ulysses.tracking.events import CheckpointCommitted
from ray_ulysses.tracking.tail import Sink, following
from ray_ulysses.tracking.updates import AttemptBegan, AttemptOver, GoneCheckpoint, StepMetrics
from tests.polling import wait_until
from tests.unit.tracking.checkpoints import committed
from tests.unit.tracking.tails import ScriptedTracker

KINDS = {
    AttemptBegan: "start",
    StepMetrics: "step",
    AttemptOver: "finish",
    CheckpointCommitted: "checkpoint",
    GoneCheckpoint: "gone",
}


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
        marks = {}
        for update in self.updates:
            if isinstance(update, StepMetrics):
                marks |= {name: max(update.step, marks.get(name, -1)) for name in update.metrics}
        return marks

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
    return ScriptedTracker(sink, path, **{"drain_s": 5.0, **changes})


def log_steps(tracker, steps):
    for step in steps:
        tracker.log_step(step, {"loss": 5.0 - step / 10})


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

    def refuse(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("ray_ulysses.storage.local.LocalStore.replace", refuse)
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
    begin = time.monotonic()
    for tracker in trackers:
        tracker.log(AttemptBegan(time=1.0))
    with following([tracker.tail for tracker in trackers], drain_s=0.3):
        for tracker in trackers:
            log_steps(tracker, range(1, 4))
    assert time.monotonic() - begin < 10
    assert (away.points(), well.points()) == ([], [1, 2, 3])


def test_an_outage_is_logged_once_and_retried_with_pauses(tmp_path, caplog):
    sink = FakeSink(is_away=True, reason="no route to http://me:secret@host:5000/api")
    track(sink, tmp_path, range(1, 100), "failed", retry_s=(0.1, 0.1), drain_s=0.4)
    assert 2 < sink.calls < 10
    assert caplog.text.count("is unavailable") == 1
    assert "http://***@host:5000/api" in caplog.text and "secret" not in caplog.text
