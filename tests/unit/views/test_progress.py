"""What a person sees while a run goes on: in a terminal of 80 columns, and in a log that is grepped."""

import io
import json
import re
import time

from rich.console import Console

from ray_ulysses.tracking.journal import AttemptJournal
from ray_ulysses.views.journal_tail import JournalTail
from ray_ulysses.views.progress import ProgressView, render_line, render_panel
from ray_ulysses.views.progress_state import ProgressState
from tests.unit.tracking.journals import event


def started(attempt=1, resumed_step=0, **fields):
    return {
        "event": "attempt_started",
        "time": 1000.0,
        "attempt": attempt,
        "world_size": 4,
        "sp_size": 2,
        "dp_size": 2,
        "nodes": ["a"],
        "resumed_step": resumed_step,
        "resumed_from": None,
        **fields,
    }


def step(number, **fields):
    return {
        "event": "step",
        "time": 1000.0,
        "attempt": 1,
        "step": number,
        "loss": 3.5,
        "tokens": 24000,
        "rows": [0, 6],
        "digest": "0" * 16,
        "seconds": 2.0,
        "peak_memory_gib": 1.5,
        "mfu": None,
        **fields,
    }


def fold(*records, total=120):
    state = ProgressState(total_steps=total)
    for record in records:
        state = state.after(event(record))
    return state


def panel_lines(state, width=80, name="cpython-demo"):
    out = io.StringIO()
    Console(width=width, file=out, force_terminal=True, color_system=None).print(render_panel(name, state))
    return out.getvalue().splitlines()


def test_a_step_is_one_greppable_line():
    record = step(37)
    line = render_line(event(record), fold(started(), record))
    assert line == "step=37/120 loss=3.5000 tokens_per_s=12000 peak_memory_gib=1.50 eta=2m46s"
    assert re.search(r"step=(\d+)\S* loss=([\d.]+)", line).groups() == ("37", "3.5000")


def test_mfu_is_shown_only_where_it_is_known():
    record = step(37, mfu=0.412)
    assert " mfu=0.412 " in render_line(event(record), fold(started(), record))


def test_a_loss_that_is_no_number_is_shown_as_such():
    record = step(2, loss="nan")
    assert "loss=nan" in render_line(event(record), fold(started(), record))


def test_every_event_of_a_run_has_its_line():
    records = [
        started(attempt=2, resumed_step=30),
        {"event": "evaluation", "step": 30, "loss": 3.9, "tokens": 1},
        {"event": "checkpoint_committed", "step": 30, "path": "checkpoints/step-00000030", "world_size": 4},
        {"event": "checkpoint_set_aside", "step": 20, "reason": "a shard is cut"},
        {"event": "attempt_ended", "reason": "failed: RunError: a\nmore"},
        {"event": "run_finished", "step": 30},
        {"event": "preemption_notice"},
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
        "preemption notice: a node will be taken away",
    ]


def test_the_panel_fits_80_columns():
    saved = {"event": "checkpoint_committed", "step": 30, "path": "p", "world_size": 4}
    state = fold(started(), *[step(n) for n in range(1, 38)], saved)
    lines = panel_lines(state)
    assert len(lines) == 3
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("cpython-demo ━━━")
    assert lines[0].endswith("37/120 ETA 2m46s")
    assert lines[1].rstrip() == "loss 3.5000  12.0k tokens/s  2.00 s/step  peak 1.50 GiB"
    assert lines[2].rstrip() == "attempt 1  4 workers (dp 2 x sp 2)  saved 30"


def test_a_narrow_terminal_and_a_long_name_break_no_line():
    state = fold(started(), *[step(n) for n in range(1, 38)])
    lines = panel_lines(state, width=50, name="a-very-long-run-name-that-goes-on-and-on")
    assert len(lines) == 3
    assert all(len(line) <= 50 for line in lines)
    assert lines[0].rstrip().endswith("37/120 ETA 2m46s")


def test_before_the_first_attempt_it_says_what_is_waited_for():
    assert panel_lines(fold())[1].rstrip() == "waiting for the workers to start"


def test_a_new_attempt_measures_its_own_pace():
    state = fold(started(), step(1, seconds=100.0), started(attempt=2, resumed_step=1), step(2, seconds=1.0))
    assert state.seconds_per_step == 1.0
    assert state.eta_s == 118.0


def test_an_attempt_says_where_it_stops():
    assert fold(started(last_step=40), total=None).total_steps == 40


def test_a_tail_gives_each_whole_line_once(tmp_path):
    tail = JournalTail(tmp_path)
    assert tail.poll() == []
    folder = tmp_path / "journal"
    folder.mkdir()
    first = folder / "attempt-0001.jsonl"
    line = json.dumps(step(1)) + "\n"
    first.write_text(line + line[:20])
    assert [one.step for one in tail.poll()] == [1]
    assert tail.poll() == []
    with first.open("a") as stream:
        stream.write(line[20:] + "torn\n" + '{"event": "of a later version"}\n')
    (folder / "attempt-0002.jsonl").write_text(json.dumps(step(2, attempt=2)) + "\n")
    assert [one.step for one in tail.poll()] == [1, 2]


def journal_with_one_step(run_dir):
    journal = AttemptJournal.claim(run_dir)
    journal.append(started())
    journal.append(step(1))
    return journal


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_a_terminal_only_new_events_are_printed_as_plain_lines(tmp_path):
    journal_with_one_step(tmp_path).close()
    out = io.StringIO()
    console = Console(file=out, width=40)
    with ProgressView(tmp_path, name="demo", total_steps=3, console=console, interval_s=0.01) as view:
        journal = AttemptJournal.claim(tmp_path)
        journal.append(started(attempt=journal.attempt, resumed_step=1))
        journal.append(step(2, attempt=2))
        wait_until(lambda: view.state.step == 2)
        journal.append(step(3, loss=2.25, attempt=2))
    assert out.getvalue().splitlines() == [
        "attempt=2 started workers=4 dp=2 sp=2 resumed_step=1",
        "step=2/3 loss=3.5000 tokens_per_s=12000 peak_memory_gib=1.50 eta=2s",
        "step=3/3 loss=2.2500 tokens_per_s=12000 peak_memory_gib=1.50 eta=0s",
    ]


def test_steps_between_two_lines_are_left_out_but_never_the_last(tmp_path):
    out = io.StringIO()
    with ProgressView(
        tmp_path, name="demo", total_steps=7, console=Console(file=out), log_every_steps=3, interval_s=0.01
    ):
        journal = AttemptJournal.claim(tmp_path)
        for number in range(1, 8):
            journal.append(step(number))
    assert re.findall(r"step=(\d)/7", out.getvalue()) == ["3", "6", "7"]


def test_in_a_terminal_the_panel_is_live_and_stays_at_the_end(tmp_path):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    with ProgressView(tmp_path, name="demo", total_steps=3, console=console, interval_s=0.01) as view:
        journal_with_one_step(tmp_path)
        wait_until(lambda: view.state.step == 1)
    assert "waiting for the workers to start" in out.getvalue()
    assert "1/3 ETA 4s" in out.getvalue()
    assert "step=1" not in out.getvalue()
