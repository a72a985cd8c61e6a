"""No tracker stops a run: an outage waits on disk, and no step is ever sent twice."""

import errno
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.tracking.checkpoint_updates import GoneCheckpoint
from ray_ulysses.tracking.delivery import RefusedEvent, SpooledTracker, unsent
from tests.breadth import examples
from tests.polling import wait_until
from tests.unit.tracking.checkpoints import committed


class FakeSink:
    """Keeps what it is sent; can be away, lose its answer, refuse, or be slow."""

    def __init__(self):
        self.events = []
        self.is_away = False
        self.loses_answers = 0
        self.refused_step = None
        self.slow = threading.Event()
        self.slow.set()
        self.calls = 0
        self.reason = "no route to host"

    def connect(self):
        self.calls += 1
        if self.is_away:
            raise ConnectionError(self.reason)

    def existing_marks(self, events):
        marks = {}
        for event in self.events:
            if event["kind"] == "step":
                for name in event["metrics"]:
                    mark = f"metric:{name}"
                    marks[mark] = max(event["step"], marks.get(mark, -1))
        return marks

    def deliver(self, events):
        self.slow.wait(30)
        self.calls += 1
        if self.is_away:
            raise ConnectionError(self.reason)
        if any(event.get("step") == self.refused_step for event in events if event["kind"] == "step"):
            raise RefusedEvent("a bad name")
        self.events += events
        if self.loses_answers:
            self.loses_answers -= 1
            raise TimeoutError("the answer was lost")

    def points(self, name="loss"):
        return [e["step"] for e in self.events if e["kind"] == "step" and name in e["metrics"]]

    def kinds(self):
        return [event["kind"] for event in self.events]


def make_tracker(sink, path, **changes):
    return SpooledTracker(sink, path / "tracking", **{"retry_s": (0.01, 0.02), "drain_s": 5.0, **changes})


def log_steps(tracker, steps):
    for step in steps:
        tracker.log_step(step, {"loss": 5.0 - step / 10})


def test_everything_arrives_in_order(tmp_path):
    sink = FakeSink()
    tracker = make_tracker(sink, tmp_path)
    tracker.start({"lr": 0.1}, {"world_size": 4})
    log_steps(tracker, range(1, 6))
    tracker.log_checkpoint(committed(5))
    tracker.finish("finished")
    assert sink.kinds() == ["start", *["step"] * 5, "checkpoint", "finish"]
    assert sink.points() == [1, 2, 3, 4, 5]


def test_an_outage_costs_the_loop_nothing_and_loses_nothing(tmp_path):
    sink = FakeSink()
    sink.is_away = True
    tracker = make_tracker(sink, tmp_path)
    begin = time.monotonic()
    tracker.start({}, {})
    log_steps(tracker, range(1, 201))
    assert time.monotonic() - begin < 10
    sink.is_away = False
    tracker.finish("finished")
    assert sink.points() == list(range(1, 201))


def test_finish_waits_a_bounded_time_and_the_next_start_delivers_the_rest(tmp_path):
    away = FakeSink()
    away.is_away = True
    tracker = make_tracker(away, tmp_path, drain_s=0.2)
    tracker.start({}, {"attempt": 1})
    log_steps(tracker, range(1, 4))
    begin = time.monotonic()
    tracker.finish("failed")
    assert time.monotonic() - begin < 10
    sink = FakeSink()
    resumed = make_tracker(sink, tmp_path)
    resumed.start({}, {"attempt": 2})
    log_steps(resumed, range(3, 6))
    resumed.finish("finished")
    assert sink.kinds() == ["start", "step", "step", "step", "finish", "start", "step", "step", "finish"]
    assert sink.points() == [1, 2, 3, 4, 5]


def test_a_sink_that_hangs_does_not_hang_the_run(tmp_path):
    sink = FakeSink()
    sink.slow.clear()
    tracker = make_tracker(sink, tmp_path, drain_s=0.2)
    tracker.start({}, {})
    log_steps(tracker, range(1, 4))
    begin = time.monotonic()
    tracker.finish("finished")
    assert time.monotonic() - begin < 10
    sink.slow.set()


def test_a_replayed_step_is_not_sent_again(tmp_path):
    sink = FakeSink()
    for attempt in (range(1, 8), range(5, 11), range(3, 12)):
        tracker = make_tracker(sink, tmp_path)
        tracker.start({}, {})
        log_steps(tracker, attempt)
        tracker.finish("failed")
    assert sink.points() == list(range(1, 12))


def test_every_commit_is_told_also_of_a_step_that_another_attempt_had_committed(tmp_path):
    sink = FakeSink()
    for attempt, steps in ((1, (10, 20)), (2, (15, 20)), (3, (20,))):
        tracker = make_tracker(sink, tmp_path)
        tracker.start({}, {})
        for step in steps:
            tracker.log_checkpoint(committed(step, attempt))
        tracker.finish("failed")
    told = [(event["attempt"], event["step"]) for event in sink.events if event["kind"] == "checkpoint"]
    assert told == [(1, 10), (1, 20), (2, 15), (2, 20), (3, 20)]


def test_a_delivery_whose_answer_was_lost_is_not_repeated(tmp_path):
    sink = FakeSink()
    sink.loses_answers = 3
    tracker = make_tracker(sink, tmp_path)
    tracker.start({}, {})
    log_steps(tracker, range(1, 30))
    tracker.finish("finished")
    assert sink.points() == list(range(1, 30))


def test_what_is_told_of_a_checkpoint_comes_again_at_once_or_never(tmp_path):
    # Else the word that step 20 is damaged, repeated behind the commit that replaced it, would hit that one.
    sink = FakeSink()
    tracker = make_tracker(sink, tmp_path)
    tracker.log_checkpoint(GoneCheckpoint(step=20, attempt=None, state="damaged"))
    tracker.start({}, {})
    for step in (20, 30):
        log_steps(tracker, [step])
        tracker.log_checkpoint(committed(step, 2))
    sink.loses_answers = 100
    wait_until(lambda: len(sink.events) >= 10, "events are sent again")
    sink.loses_answers = 0
    tracker.finish("finished")
    told = [(event["kind"], event.get("step")) for event in sink.events if event["kind"].startswith("checkpoint")]
    order = [("checkpoint_gone", 20), ("checkpoint", 20), ("checkpoint", 30)]
    assert list(dict.fromkeys(told)) == order
    assert told == sorted(told, key=order.index)
    assert len(told) > len(order)
    assert sink.points() == [20, 30]


def test_a_checkpoint_set_aside_before_the_start_is_told_after_it(tmp_path):
    sink = FakeSink()
    tracker = make_tracker(sink, tmp_path)
    tracker.log_step(1, {"loss": 1.0})
    tracker.log_checkpoint(GoneCheckpoint(step=20, attempt=1, state="damaged", reason="a flipped byte"))
    tracker.start({}, {})
    tracker.finish("finished")
    assert sink.kinds() == ["start", "checkpoint_gone", "finish"]
    assert sink.events[1]["reason"] == "a flipped byte"


def test_a_spool_and_a_state_of_the_version_before_are_gone_on_with(tmp_path):
    spool = tmp_path / "tracking"
    spool.mkdir()
    (spool / "state.json").write_text('{"file": 1, "offset": 0, "marks": {"metric:loss": 3, "checkpoint": 20}}')
    old = (
        '{"kind":"step","step":3,"metrics":{"loss":1.0},"time_ms":1}\n'
        '{"kind":"checkpoint","step":20,"path":"/c/checkpoints/step-00000020","topology":{},"cursor":{},"digest":"",'
        '"metrics":{"loss":1.0},"time_ms":1}\n'
    )
    (spool / "00000001.jsonl").write_text(old)
    sink = FakeSink()
    tracker = make_tracker(sink, tmp_path)
    tracker.start({}, {})
    log_steps(tracker, [3, 4])
    tracker.log_checkpoint(committed(10, 2))
    tracker.finish("finished")
    assert sink.points() == [4]
    # The mark of the version before would have swallowed both.
    assert [event["step"] for event in sink.events if event["kind"] == "checkpoint"] == [20, 10]


def test_a_run_that_is_complete_is_caught_up_without_a_word_of_a_new_attempt(tmp_path):
    away = FakeSink()
    away.is_away = True
    tracker = make_tracker(away, tmp_path, drain_s=0.05)
    tracker.start({}, {})
    log_steps(tracker, range(1, 4))
    tracker.log_checkpoint(committed(3))
    tracker.finish("finished")
    still_away = make_tracker(away, tmp_path, drain_s=0.1)
    assert still_away.catch_up() == 6
    still_away._thread.join(5)
    sink = FakeSink()
    assert make_tracker(sink, tmp_path).catch_up() == 0
    assert sink.kinds() == ["start", *["step"] * 3, "checkpoint", "finish"]
    calls = sink.calls
    assert make_tracker(sink, tmp_path).catch_up() == 0
    assert sink.calls == calls
    assert len(list((tmp_path / "tracking").glob("*.jsonl"))) == 1


def test_a_tracker_that_was_given_up_delivers_nothing_beside_its_successor(tmp_path):
    slow = FakeSink()
    slow.slow.clear()
    first = make_tracker(slow, tmp_path, drain_s=0.1, batch_events=2)
    first.start({}, {})
    log_steps(first, range(1, 6))
    first.finish("failed")
    slow.slow.set()
    first._thread.join(5)
    assert not first._thread.is_alive()
    # What was under way arrived; its answer was not waited for, so that the next one asks what is there.
    assert slow.kinds() in (["start"], ["start", "step"])
    second = make_tracker(slow, tmp_path)
    second.start({}, {})
    second.finish("finished")
    assert slow.points() == [1, 2, 3, 4, 5]


def test_a_run_that_was_never_tracked_has_nothing_to_catch_up(tmp_path):
    assert make_tracker(FakeSink(), tmp_path).catch_up() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_death_between_delivery_and_acknowledgement_repeats_nothing(tmp_path):
    sink = FakeSink()
    first = make_tracker(sink, tmp_path)
    first.start({}, {})
    log_steps(first, range(1, 6))
    first.finish("failed")
    (tmp_path / "tracking" / "state.json").unlink()
    second = make_tracker(sink, tmp_path)
    second.start({}, {})
    log_steps(second, range(4, 8))
    second.finish("finished")
    assert sink.points() == list(range(1, 8))


def test_an_event_that_is_never_taken_does_not_block_the_others(tmp_path, caplog):
    sink = FakeSink()
    sink.refused_step = 3
    tracker = make_tracker(sink, tmp_path)
    with caplog.at_level("WARNING", logger="ray_ulysses"):
        tracker.start({}, {})
        log_steps(tracker, range(1, 6))
        tracker.finish("finished")
    assert sink.points() == [1, 2, 4, 5]
    assert "the tracker refuses an event, left out: RefusedEvent: a bad name" in caplog.text


def test_an_outage_is_said_once(tmp_path, caplog):
    sink = FakeSink()
    sink.is_away = True
    tracker = make_tracker(sink, tmp_path, drain_s=0.2)
    with caplog.at_level("WARNING", logger="ray_ulysses"):
        tracker.start({}, {})
        log_steps(tracker, range(1, 6))
        tracker.finish("failed")
    assert sink.calls > 2
    assert caplog.text.count("does not answer") == 1
    assert "are sent when the run is started again" in caplog.text


def test_a_password_in_the_address_is_not_in_the_log(tmp_path, caplog):
    sink = FakeSink()
    sink.is_away = True
    sink.reason = "no route to http://me:secret@host:5000/api"
    tracker = make_tracker(sink, tmp_path, drain_s=0.1)
    with caplog.at_level("WARNING", logger="ray_ulysses"):
        tracker.start({}, {})
        tracker.finish("failed")
    assert "no route to http://***@host:5000/api" in caplog.text
    assert "secret" not in caplog.text


def test_an_outage_is_not_met_with_a_busy_loop(tmp_path):
    sink = FakeSink()
    sink.is_away = True
    tracker = make_tracker(sink, tmp_path, retry_s=(0.1, 0.1), drain_s=0.3)
    tracker.start({}, {})
    log_steps(tracker, range(1, 100))
    tracker.finish("failed")
    assert sink.calls < 10


def test_a_spool_that_can_not_be_made_leaves_the_run_alone(tmp_path, caplog):
    (tmp_path / "tracking").write_text("a file where the directory should be")
    tracker = make_tracker(FakeSink(), tmp_path)
    with caplog.at_level("WARNING", logger="ray_ulysses"):
        tracker.start({}, {})
        log_steps(tracker, range(1, 3))
        tracker.finish("finished")
    assert "this attempt is not tracked" in caplog.text


def test_a_disk_that_keeps_no_position_sends_nothing_again_and_is_not_called_an_outage(tmp_path, caplog, monkeypatch):
    sink = FakeSink()
    # As of a receiver that says nothing of what it has.
    sink.existing_marks = lambda events: {}

    def refuse(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("ray_ulysses.tracking.spool.LocalStore.replace", refuse)
    tracker = make_tracker(sink, tmp_path, batch_events=2)
    with caplog.at_level("WARNING", logger="ray_ulysses"):
        tracker.start({}, {})
        log_steps(tracker, range(1, 6))
        tracker.finish("finished")
    assert sink.kinds() == ["start", *["step"] * 5, "finish"]
    assert "does not answer" not in caplog.text
    assert caplog.text.count("can't be written ([Errno 28] no space left on device)") == 1


def test_a_thread_that_dies_is_not_waited_for(tmp_path, caplog, monkeypatch):
    def fail(*_):
        raise RuntimeError("closed badly")

    monkeypatch.setattr("ray_ulysses.tracking.spool.Spool.close", fail)
    # pytest would warn of the exception, which is meant.
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    tracker = make_tracker(FakeSink(), tmp_path, drain_s=60.0)
    with caplog.at_level("WARNING", logger="ray_ulysses"):
        tracker.start({}, {})
        begin = time.monotonic()
        tracker.finish("finished")
    assert time.monotonic() - begin < 30
    tracker._thread.join(5)
    assert "could not be reached" not in caplog.text


def test_a_full_spool_drops_and_says_so(tmp_path, caplog):
    sink = FakeSink()
    sink.is_away = True
    tracker = make_tracker(sink, tmp_path, drain_s=0.05, max_bytes=1000)
    with caplog.at_level("WARNING", logger="ray_ulysses"):
        tracker.start({}, {})
        log_steps(tracker, range(1, 100))
        tracker.finish("failed")
    assert "is full: the tracker misses later events" in caplog.text


def test_two_metrics_of_one_step_may_come_apart(tmp_path):
    sink = FakeSink()
    tracker = make_tracker(sink, tmp_path)
    tracker.start({}, {})
    log_steps(tracker, range(1, 4))
    tracker.log_step(2, {"eval_loss": 4.0})
    tracker.finish("finished")
    assert sink.points() == [1, 2, 3]
    assert sink.points("eval_loss") == [2]


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), max_size=8), st.integers(1, 7))
def test_any_attempts_cut_anywhere_give_each_step_once_in_order(attempts, batch):
    events = [
        {"kind": "step", "step": step, "metrics": {"loss": 0.0}, "time_ms": 0}
        for first, length in attempts
        for step in range(first, first + length)
    ]
    marks, sent = {}, []
    for start in range(0, len(events), batch):
        left, marks = unsent(events[start : start + batch], marks)
        sent += [event["step"] for event in left]
    assert sent == sorted(set(sent))
    assert max(sent, default=-1) == max((event["step"] for event in events), default=-1)


@pytest.mark.parametrize("event", [{}, {"kind": None}])
def test_a_torn_event_is_nothing_to_send(event):
    assert unsent([event], {"metric:loss": 3}) == ([], {"metric:loss": 3})
