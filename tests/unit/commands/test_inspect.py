import json
import math
from dataclasses import replace

import pytest

from ray_ulysses.commands.inspect import history_json, render_history
from ray_ulysses.inspect.run_data import PlanHistory, SegmentRecord, SourceRecord
from ray_ulysses.tracking.events import RunFailed
from ray_ulysses.tracking.run_time import StartTime, TimeSpent
from ray_ulysses.tracking.steps import Steps, step_rows
from tests.unit.commands.histories import make_history, make_step


def test_a_run_is_told_in_full():
    text = render_history(make_history())
    assert text.splitlines()[0] == "run 'demo': finished at step 12"
    assert "data digest    00000000deadbeef" in text
    assert "lost steps     2 (discarded by a failure and trained again)" in text
    assert "goodput        81.25% of the time was spent on steps that count" in text
    assert "        1        4   2   2                    -    1-7            12s  end not recorded" in text
    assert "        2        2   2   1  peer memory, step 5   6-12          1m15s  finished" in text
    assert "    10        2      committed  checkpoints/step-00000010" in text
    assert "    12        -  not committed  checkpoints/step-00000012" in text
    assert "steps (the last 10 of 12)" in text
    assert "    12  3.8000   1,000  [44, 48)  2" in text


def test_where_the_time_went_is_told_by_name() -> None:
    lines = render_history(make_history()).splitlines()
    first = lines.index("time")
    assert lines[first + 1 : first + 4] == [
        "  seconds    share  spent on",
        "    26.0s   81.25%  steps that count",
        "     3.0s    9.38%  start-up",
    ]
    assert "    32.0s  100.00%  total of all commands" in lines
    assert "  not counted: 2h05m between commands, when nothing ran" in lines
    assert "time" not in render_history(make_history(time_spent=TimeSpent())).splitlines()
    staged = render_history(make_history(time_spent=TimeSpent(steps_s=30.0, stages_s=10.0)))
    assert "    10.0s   25.00%  between stages\n" in staged


@pytest.mark.parametrize(
    ("recovery", "told"),
    [
        (
            StartTime(cut_off_s=0.91, detect_s=0.4, form_s=8.06, load_s=2.0, build_s=1.64, unknown_s=0.04),
            "cut-off steps 0.9s, detection 0.4s, workers 8.1s, loading 2.0s, building 1.6s",
        ),
        (StartTime(unknown_s=12.0, detect_s=1.05), "detection 1.1s, unknown 12.0s"),
    ],
)
def test_what_recoveries_went_into_is_told_where_it_is_known(recovery: StartTime, told: str) -> None:
    starts = StartTime(unknown_s=3.0)
    spent = TimeSpent(steps_s=26.0, startup_s=3.0, recovery_s=13.05, starts=starts, recovery=recovery)
    text = render_history(make_history(time_spent=spent))
    assert f"\n  recovery: {told}\n" in text and "start-up and waiting:" not in text


def test_missing_steps_are_not_hidden():
    text = render_history(make_history(missing_steps=((3, 3), (7, 9))))
    assert "MISSING: the journal has no record of steps 3, 7-9" in text


def make_segment(number, **changes):
    fields = {
        "plan_id": f"plan{number}", "segment": number, "base_step": 1000 * number, "base_row": 4000 * number,
        "context_tokens": 8192, "rows_per_step": 4, "packing": "best_fit",
        "sources": (SourceRecord(path="/data/a", weight=None),),
    }  # fmt: skip
    return SegmentRecord(**{**fields, **changes})


def test_the_segments_of_the_plan_are_a_line_each():
    weighted = (SourceRecord(path="/data/a", weight=3.0), SourceRecord(path="/data/b", weight=0.5))
    segments = (make_segment(0, stage="short"), make_segment(1, stage="long", context_tokens=16384, sources=weighted))
    text = render_history(make_history(), PlanHistory(segments=segments))
    assert "  segment   plan  stage  after step  from row  context  rows per step   packing  sources" in text
    assert "        0  plan0  short           0         0    8,192              4  best_fit  /data/a" in text
    assert (
        "        1  plan1   long       1,000     4,000   16,384              4  best_fit  /data/a (weight 3)," in text
    )
    unstaged = render_history(make_history(), PlanHistory(segments=(make_segment(0),)))
    assert "  segment   plan  after step" in unstaged


def test_a_plan_that_cannot_be_read_is_said_and_one_that_is_not_there_is_not():
    text = render_history(make_history(), PlanHistory(problem="segment-0000: another version"))
    assert "  PLAN: segment-0000: another version" in text
    assert "data digest    00000000deadbeef" in text
    assert "plan" not in render_history(make_history(), PlanHistory())


def test_a_failed_run_says_why_and_what_to_do() -> None:
    failure = RunFailed(
        time=1.0, attempt=1, session="s", kind="lost", reason="lost worker 3 (its node died)", rank=3,
        node="host/10.0.0.3", committed_step=40, lost_steps=2, way_out="repair or replace the node", failure=4,
        max_failures=3, restarts=False,
    )  # fmt: skip
    text = render_history(make_history(status="failed", failure=failure))
    said = ("lost worker 3", "elastic.max_failures=3", "host/10.0.0.3", "replace the node; the same command resumes")
    assert all(words in text for words in said)


@pytest.mark.parametrize("num_steps", [0, 1, 12, 2500])
def test_the_json_has_a_line_for_each_step_and_every_field(num_steps):
    losses = {0: math.nan, 3: math.inf}
    steps = [make_step(n + 1, losses.get(n)) for n in range(num_steps)]
    history = make_history(num_steps, name='"steps": [', steps=Steps(step_rows(steps)))
    text = "".join(history_json(history, PlanHistory(problem="gone")))
    expected = {**history.to_json(), "plan": [], "plan_problem": "gone"}
    assert json.loads(text, parse_constant=pytest.fail) == json.loads(json.dumps(expected))
    assert len([line for line in text.splitlines() if line.startswith('    {"step": ')]) == num_steps


def test_attempts_whose_stream_never_started_are_named() -> None:
    attempt = make_history().attempts[0]
    started = replace(attempt, attempt=1, stream_step=4, direct_rows=14)
    never = [replace(attempt, attempt=number, direct_rows=6, lacks_stream=True) for number in range(2, 9)]
    # One that ended soon, one without a step, and one of data.engine: local.
    others = [
        replace(attempt, attempt=9, direct_rows=6), replace(attempt, attempt=10, direct_rows=0),
        replace(attempt, attempt=11),
    ]  # fmt: skip
    told = "  the stream never started, and the workers read all rows: attempt"
    for attempts, named in (
        (others, None),
        ([never[0], *others], " 2"),
        ([*never[:2], *others], "s 2, 3"),
        ([*never, *others], "s 4, 5, 6, 7, 8 and 2 earlier attempts"),
    ):
        text = render_history(make_history(attempts=(started, *attempts)))
        assert told not in text if named is None else f"\n{told}{named}\n" in text
