"""What a person sees while a run goes on: in a terminal of 80 columns, and in a log that is grepped."""

import errno
import io
import json
import os
import re
from unittest.mock import Mock

from rich.console import Console

from ray_ulysses.commands.display import PlainConsole
from ray_ulysses.commands.output import PhaseWatch
from ray_ulysses.commands.progress import ProgressState, ProgressView, render_line, render_panel
from ray_ulysses.tracking.journal import claim_journal
from ray_ulysses.tracking.journal_lines import with_checksum
from ray_ulysses.tracking.journal_reader import JournalTail
from ray_ulysses.tracking.steps import ungroup_steps
from tests.polling import wait_until
from tests.unit.commands.histories import HandClock
from tests.unit.tracking import journals
from tests.unit.tracking.journals import event


def started(attempt=1, resumed_step=0, **fields):
    return journals.started(resumed_step, **{"time": 1000.0, "attempt": attempt, "last_step": 120, **fields})


def step(number, **fields):
    values = {"loss": 3.5, "tokens": 24000, "seconds": 2.0, "peak_memory_gib": 1.5, "mfu": None}
    return journals.step(number, **{"time": 1000.0, "attempt": 1, **values, **fields})


LOST_WORKER = {
    "event": "attempt_ended", "reason": "lost worker 0 (killed by signal 9)", "committed_step": 10, "lost_steps": 9,
    "failure": 1, "max_failures": 3, "restarts": True,
}  # fmt: skip
SAVED = journals.commit(30)


def fold(*records, total=120):
    state = ProgressState(total_steps=total)
    for record in records:
        state = state.after(event(record))
    return state


def panel_lines(state, width=80, name="cpython-demo", waited=0.0):
    out, clock = io.StringIO(), HandClock()
    watch = PhaseWatch(clock)
    watch.look(state.phase)
    clock.at = waited
    Console(width=width, file=out, force_terminal=True, color_system=None).print(render_panel(name, state, watch))
    return out.getvalue().splitlines()


def test_a_step_is_one_greppable_line():
    record = step(37, learning_rate=5e-4, grad_norm=1.2345)
    line = render_line(event(record), fold(started(), step(36), record))
    assert line == (
        "step=37/120 loss=3.5000 lr=5.00e-04 grad_norm=1.23 tokens_per_s=12000 peak_memory_gib=1.50 eta=2m46s"
    )
    record = step(2, loss="nan", mfu=0.412)
    line = render_line(event(record), fold(started(), record))
    assert "loss=nan" in line and line.endswith(" mfu=0.412")


def test_every_event_of_a_run_has_its_line():
    records = [
        started(attempt=2, resumed_step=30),
        {"event": "evaluation", "step": 30, "loss": 3.9, "tokens": 1},
        SAVED,
        {"event": "checkpoint_set_aside", "step": 20, "reason": "a shard is cut"},
        {"event": "attempt_ended", "reason": "failed: RunError: a\nmore"},
        {"event": "run_finished", "step": 30},
        {"event": "samples", "step": 30, "samples": [{"prompt": "Once", "text": " upon\na", "tokens": 3}]},
        {"event": "preemption_notice"},
        {"event": "preemption_notice", "time": 1000.0, "deadline": 1120.0},
        {"event": "checkpoint_failed", "step": 35, "reason": "No space left on device\nat line 1"},
        {"event": "warning", "text": "rank 3 waits for its rows"},
        LOST_WORKER,
    ]
    state, lines = fold(), []
    for record in records:
        state = state.after(event(record))
        lines.append(render_line(event(record), state))
    assert lines == [
        "attempt=2 started workers=4 dp=2 sp=2 resumed_step=30",
        "evaluation step=30 eval_loss=3.9000",
        "checkpoint step=30 path=checkpoints/step-00000030",
        "checkpoint step=20 set_aside: a shard is cut",
        "attempt=2 ended step=30 reason: failed: RunError: a",
        "run finished step=30",
        "sample step=30 Once upon",
        "preemption notice: a node will be preempted",
        "preemption notice: a node will be preempted in 2m00s",
        "warning: checkpoint step=35 failed: No space left on device",
        "warning: rank 3 waits for its rows",
        "lost worker 0 (killed by signal 9); restarting from step 10; 9 steps lost; failure 1 of 3",
    ]


def test_a_restart_shows_its_reason_and_no_eta():
    state = fold(started(), *[step(n) for n in range(1, 20)])
    assert state.eta_s is not None
    state = state.after(event(LOST_WORKER))
    assert state.eta_s is None
    lines = panel_lines(state, width=100)
    assert lines[0].rstrip().endswith("19/120") and LOST_WORKER["reason"] in lines[-1]
    # It is over when the next attempt begins.
    assert state.after(event(started(attempt=2, resumed_step=10))).ended is None


def test_the_panel_fits_80_columns():
    steps = [step(n, learning_rate=5e-4, grad_norm="inf", mfu=0.412) for n in range(1, 38)]
    state = fold(started(), *steps, SAVED)
    lines = panel_lines(state)
    assert lines[0].startswith("cpython-demo ━━━") and lines[0].endswith("37/120 ETA 2m46s")
    assert [line.rstrip() for line in lines[1:]] == [
        "loss 3.5000  lr 5.00e-04  grad norm inf",
        "12.0k tokens/s  2.00 s/step  peak 1.50 GiB  MFU 41.2%",
        "attempt 1  4 workers (dp 2 x sp 2)  saved 30",
    ]
    narrow = panel_lines(state, width=60, name="a-very-long-run-name-that-goes-on-and-on")
    assert max(map(len, lines)) <= 80 and max(map(len, narrow)) <= 60
    assert len(narrow) == 4 and narrow[0].rstrip().endswith("37/120 ETA 2m46s")


def test_a_phase_is_the_workers_until_they_fail_and_nobodys_once_they_train_or_have_ended():
    phase, waits = {"event": "phase", "phase": "building the model", "session": "s"}, "waiting for 4 workers"
    state = fold(phase).awaiting_workers(waits)
    assert (state.phase, state.awaits_workers) == ("building the model", False)
    assert fold(phase, started()).phase == "first step"
    assert fold(phase, started(), step(1)).phase is None
    for reason, found in (("failed: RunError: a", waits), ("finished", None), ("stopped", None)):
        ended = fold(started(), step(1), step(2), {"event": "attempt_ended", "reason": reason})
        assert ended.awaiting_workers(waits).phase == found


def test_the_first_step_of_an_attempt_is_kept_out_of_its_pace():
    first = fold(started(), step(1, seconds=100.0))
    assert (first.seconds_per_step, first.eta_s, first.tokens_per_s) == (None, None, 240.0)
    assert "eta" not in render_line(event(step(1)), first)
    second = fold(started(), step(1, seconds=100.0), step(2, seconds=2.0))
    assert (second.seconds_per_step, second.eta_s, second.tokens_per_s) == (2.0, 236.0, 12000.0)
    resumed = fold(started(), step(1, seconds=1.0), started(attempt=2, resumed_step=1), step(2, seconds=50.0))
    assert (resumed.seconds_per_step, resumed.eta_s) == (None, None)


def test_a_tail_gives_each_whole_line_once_also_when_its_storage_is_away_for_a_moment(tmp_path, monkeypatch):
    tail, folder = JournalTail(tmp_path), tmp_path / "journal"
    assert tail.poll() == []
    folder.mkdir()
    first = folder / "attempt-0001.jsonl"
    line, other = (with_checksum(json.dumps(one).encode()).decode() + "\n" for one in (step(1), step(2, attempt=2)))
    first.write_text(line + line[:20])
    assert [one.step for one in ungroup_steps(tail.poll())] == [1]
    assert tail.poll() == []
    with first.open("a") as stream:
        stream.write(line[20:] + "torn\n" + '{"event": "of a later version"}\n')
    (folder / "attempt-0002.jsonl").write_text(other)

    with monkeypatch.context() as away:
        away.setattr(os, "listdir", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
        tail.poll()
    assert [one.step for one in ungroup_steps(tail.poll())][-1] == 2


def journal_with_one_step(run_dir):
    journal = claim_journal(run_dir)
    journal.append(started(last_step=3))
    journal.append(step(1))
    return journal


def test_without_a_terminal_only_new_events_are_printed_as_plain_lines(tmp_path):
    journal_with_one_step(tmp_path).close()
    out = io.StringIO()
    console = PlainConsole(out, width=40)
    clock = HandClock()
    with ProgressView(tmp_path, name="demo", console=console, interval_s=0.01, clock=clock) as view:
        view.expect(3)
        wait_until(out.getvalue, "something is printed")
        journal = claim_journal(tmp_path)
        journal.append(started(attempt=journal.attempt, resumed_step=1, last_step=3))
        journal.append(step(2, attempt=2))
        wait_until(lambda: view.state.step == 2, "step 2")
        journal.append(step(3, loss=2.25, attempt=2))
    lines = out.getvalue().splitlines()
    assert lines[0] == "elapsed=0s phase: starting"
    assert [line for line in lines if "phase: " not in line] == [
        "attempt=2 started workers=4 dp=2 sp=2 resumed_step=1",
        "step=2/3 loss=3.5000 tokens_per_s=12000 peak_memory_gib=1.50",
        "step=3/3 loss=2.2500 tokens_per_s=12000 peak_memory_gib=1.50 eta=0s",
    ]


def test_steps_between_two_lines_are_left_out_but_never_the_last(tmp_path):
    out = io.StringIO()
    given = {"console": Console(file=out), "log_every_steps": 3, "interval_s": 0.01}
    with ProgressView(tmp_path, name="demo", **given) as view:
        view.expect(7)
        journal = claim_journal(tmp_path)
        for number in range(1, 8):
            journal.append(step(number))
    assert re.findall(r"step=(\d)/7", out.getvalue()) == ["3", "6", "7"]


def test_in_a_terminal_the_panel_is_live_and_stays_only_where_the_run_began(tmp_path):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    with ProgressView(tmp_path, name="demo", console=console, interval_s=0.01) as view:
        view.phase("starting Ray")
        wait_until(lambda: "starting Ray" in out.getvalue(), "the phase is told")
    assert out.getvalue().endswith("\x1b[1A\x1b[2K"), "the cursor goes up and the line is erased"
    with ProgressView(tmp_path, name="demo", console=console, interval_s=0.01) as view:
        view.expect(3)
        journal_with_one_step(tmp_path).append(step(2))
        wait_until(lambda: view.state.step == 2, "step 2")
    assert "2/3 ETA 2s" in out.getvalue() and "step=1" not in out.getvalue()


def test_a_finished_run_that_goes_on_does_not_begin_with_a_full_bar(tmp_path):
    journal = claim_journal(tmp_path)
    journal.append(started(last_step=1))
    journal.append(step(1))
    with ProgressView(tmp_path, name="demo", console=Console(file=io.StringIO())) as view:
        assert (view.state.step, view.state.total_steps) == (1, None)
        view.expect(5)
        assert (view.state.step, view.state.total_steps) == (1, 5)


def test_a_quiet_view_prints_warnings_and_failures_alone(tmp_path, capsys):
    with ProgressView(tmp_path, name="demo", interval_s=0.01, is_quiet=True) as view:
        journal = claim_journal(tmp_path)
        view.phase("planning")
        view.console.print("MLflow: http://mlflow:5000")
        warning = {"event": "warning", "text": "a slow disk"}
        for record in (started(), step(1), warning, {"event": "attempt_ended", "reason": "failed: RunError: a"}):
            journal.append(record)
        wait_until(lambda: view.state.step == 1 and view.state.ended is not None, "all is read")
    told = capsys.readouterr()
    assert told.out == ""
    first, second = told.err.splitlines()
    assert first == "warning: a slow disk" and "RunError: a" in second
