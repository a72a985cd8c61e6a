"""What a person sees of a run, its plan, its rows, its checkpoints and its verification."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from ray_ulysses.commands.inspect import ReadingReport, history_json, render_history, render_row
from ray_ulysses.commands.inspect_checks import render_checkpoints, render_verdict, render_verification
from ray_ulysses.inspect.checkpoint_listing import CheckpointListing, CheckpointReport, SetAside
from ray_ulysses.inspect.checkpoint_verification import CheckpointVerdict, FileVerdict
from ray_ulysses.inspect.journal_checks import Comparison, Finding
from ray_ulysses.inspect.row import PieceText, RowCorpus, RowPiece, RowReport, TimesTrained
from ray_ulysses.inspect.row_checks import Reading, ReadingProgress
from ray_ulysses.inspect.run_data import PlanHistory, SegmentRecord, SourceRecord
from ray_ulysses.inspect.verification import Verification
from ray_ulysses.report.words import folded
from ray_ulysses.tracking.events import Evaluated, EvaluatedCorpus, RunFailed, Sample, Sampled
from ray_ulysses.tracking.run_time import StartTime, TimeSpent
from ray_ulysses.tracking.steps import Steps, step_rows
from tests.unit.commands.histories import HandClock, make_history, make_step


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


def test_the_newest_samples_are_shown_and_no_text_starts_a_line_of_its_own() -> None:
    samples = (Sample(prompt="Once", text=" upon\nrun finished", tokens=4),)
    history = make_history(samples=tuple(Sampled(time=0.0, attempt=1, step=n, samples=samples) for n in (4, 8)))
    lines = render_history(history).splitlines()
    first = lines.index("samples (the last 1 of 2)")
    assert lines[first + 1] == "  step 8: Once" and lines[first + 2].startswith("     upon")
    assert not any(line.startswith("run finished") for line in lines)
    shown = json.loads("".join(history_json(history, PlanHistory())))["samples"]
    assert shown[1] == {"step": 8, "samples": [{"prompt": "Once", "text": " upon\nrun finished", "tokens": 4}]}


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


def test_the_newest_evaluation_is_shown_by_corpus() -> None:
    corpora = tuple(
        EvaluatedCorpus(name=name, path=f"/{name}", loss=loss, tokens=8)
        for name, loss in (("code", 2.0), ("books", 2.5))
    )
    evaluated = Evaluated(time=1.0, attempt=1, step=40, loss=2.25, tokens=16, corpora=corpora)
    text = render_history(make_history(evaluation=evaluated))
    assert "\n  eval loss      2.2500 after step 40\n    by corpus    code 2.0000, books 2.5000\n" in text


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
    for line in (
        "  segment   plan  stage  after step  from row  context  rows per step   packing  sources",
        "        0  plan0  short           0         0    8,192              4  best_fit  /data/a",
        "        1  plan1   long       1,000     4,000   16,384              4  best_fit  /data/a (weight 3),",
    ):
        assert line in text
    validated = make_segment(0, validation=("/data/v", "/data/w"))
    assert "/data/a; validation: /data/v, /data/w" in render_history(make_history(), PlanHistory(segments=(validated,)))
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


PIECE = RowPiece(
    document=1234, corpus_document=1234, start=0, length=2000, goes_on=True, corpus="/data/a", labels=((1, 2001),),
    source="/texts/a.jsonl", offset=17, id="key", text=PieceText(head="first\nline", tail="the end", left_out=1983),
)  # fmt: skip
REPORT = RowReport(
    run="demo", row=5, planned_step=2, trained=(TimesTrained(step=2, attempt=3),),
    thrown_away=(TimesTrained(step=2, attempt=1),), segment=0, plan_id="aaaa", epoch=0, row_tokens=2008, tokens=2000,
    padding=8, supervised=2000, cost=4_000_000, corpora=(RowCorpus(path="/data/a", fingerprint="f", problem=None),),
    pieces=(PIECE,),
)  # fmt: skip


def test_what_is_missing_is_said_and_the_rest_still_told() -> None:
    gone = replace(PIECE, labels=None, source=None, offset=None, id=None, text=None)
    corpus = RowCorpus(path="/data/a", fingerprint="f", problem="does not exist")
    text = render_row(replace(REPORT, corpora=(corpus,), pieces=(gone,)))
    assert "0  /data/a: CAN'T BE READ: does not exist" in text
    assert "      0     1,234      0   2,000       -        yes       0   -       -  -" in text
    assert "piece 0: tokens" not in text
    untold = render_row(replace(REPORT, pieces=(replace(PIECE, text=None, text_problem="no tokenizer"),)))
    assert "  NO TEXT: no tokenizer" in untold


def test_no_document_drives_the_terminal() -> None:
    text = render_row(
        replace(REPORT, pieces=(replace(PIECE, text=PieceText(head="\x1b]0;x\x07", tail="", left_out=0)),))
    )
    assert "\x1b" not in text and "\x07" not in text


def test_what_is_supervised_in_part_is_named_token_by_token() -> None:
    text = render_row(replace(REPORT, pieces=(replace(PIECE, labels=((7, 9), (1500, 1611))),)))
    assert "      0     1,234      0   2,000     113        yes" in text
    assert (
        "piece 0: tokens [0, 2,000) of document 1,234; supervised (between ⟦ and ⟧): [7, 9), [1,500, 1,611)\n" in text
    )
    assert "; supervised (between ⟦ and ⟧): nothing\n" in render_row(
        replace(REPORT, pieces=(replace(PIECE, labels=()),))
    )


SOUND = Verification(
    name="demo", status="finished", plan_ids=("aaaa", "bbbb"), last_step=12, planned_steps=12, steps=12, rows=48,
    tokens=12_000, data_digest="00000000deadbeef", lost_steps=2, num_manifests=3, num_commits=5,
    reading=Reading(steps=12, rows=48, tokens=12_288, digest=0xDEADBEEF), findings=(), notes=(), comparison=None,
)  # fmt: skip


def finding(step: int) -> Finding:
    return Finding(kind="digest", step=step, where=f"step {step}", what="what was found", meaning="what it means")


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({}, "every planned row was trained on once, with the right tokens"),
        ({"last_step": 48, "planned_steps": 1270}, "every planned row up to step 48 of 1,270"),
        ({"reading": None}, "the corpus was not read again"),
        ({"steps": 0, "reading": None}, "nothing to verify yet"),
        ({"findings": (finding(3),)}, "DOES NOT HOLD: 1 finding"),
    ],
    ids=["whole", "part", "unread", "empty", "finding"],
)
def test_the_first_line_claims_no_more_than_was_verified(changes: dict[str, Any], claim: str) -> None:
    assert claim in render_verification(replace(SOUND, **changes)).splitlines()[0]


@pytest.mark.parametrize(
    ("answer", "first", "said"),
    [
        ("same", None, "in all 12 steps"),
        ("same_so_far", None, "in the 12 steps of both runs (12 here, 20 there)"),
        ("different", 7, "runs/b differs from step 7 on"),
        ("other_plan", 9, "runs/b follows another plan from step 9 on"),
    ],
)
def test_a_comparison_is_said(answer: Any, first: int | None, said: str) -> None:
    compared = Comparison(
        other="runs/b", answer=answer, common_steps=12, own_steps=12, other_steps=20, first_different_step=first
    )
    assert said in render_verification(replace(SOUND, comparison=compared))


def test_a_long_reading_says_how_far_it_is_and_a_short_one_nothing() -> None:
    clock, said = HandClock(), list[str]()
    report = ReadingReport(said.append, clock)
    for rows in range(1, 21):
        report.rows(ReadingProgress(rows=rows, num_rows=40, tokens=rows * 1000))
        clock.at += 1.0
    assert len(said) == 3
    assert said[0] == "read 6 of 40 rows (15.00%), 1.20k tokens/s, about 28s left"
    quiet, gib = list[str](), 1 << 30
    ReadingReport(quiet.append, HandClock()).rows(ReadingProgress(rows=1, num_rows=1, tokens=8))
    assert quiet == []
    clock = HandClock()
    report = ReadingReport(quiet.append, clock)
    for second in range(21):
        clock.at = float(second)
        report.bytes(second * gib, 40 * gib)
    assert len(quiet) == 4 and quiet[0] == "read 5.00 GiB of 40.0 GiB (12.50%), 1.00 GiB/s, about 35s left"


def report(step: int, **changes: Any) -> CheckpointReport:
    fields: dict[str, Any] = {
        "path": f"checkpoints/step-{step:08d}", "committed": True, "condition": "whole", "attempt": 1, "world_size": 8,
        "sp_size": 4, "ring_size": 1, "dp_size": 2, "zero_stage": 3, "num_bytes": 3 << 30,
        "written_at": 1_790_000_000.0, "reason": "steps", "metrics": {"loss": 2.5}, "kept": ("last 3",),
    }  # fmt: skip
    return CheckpointReport(step=step, **{**fields, **changes})


def listing(*reports: CheckpointReport, resumes_from: int | None = 100) -> CheckpointListing:
    return CheckpointListing(name="demo", location="/runs/demo", checkpoints=reports, resumes_from=resumes_from)


SEVERAL = listing(
    report(100, kept=("last 3", "every 100", "best loss")),
    report(200, condition="damaged", why="rank-00001-of-00008.safetensors has 7 bytes instead of 9"),
    report(
        300, committed=False, condition="set_aside", why="a flipped byte", kept=(),
        set_aside=(SetAside(attempt=2, reason="a flipped byte", at=1_790_000_000.0),), is_swept=True,
    ),
    report(400, condition="superseded", why="attempt 1 committed it too late", kept=()),
    CheckpointReport(
        step=500, path="checkpoints/step-00000500", committed=False, condition="not_committed",
        why="left by attempt 1; a later commit deletes it", num_bytes=5 << 20,
    ),
)  # fmt: skip


def test_each_that_can_not_be_used_says_why() -> None:
    text = render_checkpoints(SEVERAL)
    head, table, *notes = text.split("\n\n")
    assert "1 damaged, 1 fenced out, 1 set aside, 1 leftover" in head.split("\n")[0]
    states = ["whole", "DAMAGED", "set", "fenced", "leftover"]
    assert [line.split()[1] for line in table.split("\n")[1:]] == states
    assert [note.split(":")[0] for note in notes] == [
        "  step 200, DAMAGED",
        "  step 300, set aside by attempt 2, 2026-09-21 14",
        "  step 400, fenced out",
        "  step 500, leftover",
    ]
    assert "a flipped byte; a later commit deletes its remaining files" in notes[1]


def test_no_line_is_longer_than_the_terminal_and_what_does_not_fit_is_named() -> None:
    for width in (80, 100, 120):
        text = folded(render_checkpoints(SEVERAL, width), width)
        assert max(map(len, text.split("\n")[6:])) <= width
    narrow = render_checkpoints(SEVERAL, 80)
    assert "not shown, since the line is too short: ranks, dp x sp, zero, saved by" in narrow
    assert "written UTC" in narrow and "last, every, best" in narrow
    assert "not shown" not in render_checkpoints(SEVERAL, 120)
    # The least that is shown stands however narrow it is.
    assert "  step       state  size\n" in render_checkpoints(SEVERAL, 20)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (listing(resumes_from=None), ("no checkpoint yet",)),
        (
            listing(report(100, condition="superseded", leftover_bytes=1 << 20), resumes_from=None),
            ("from model.resume_from if set, else from step 0", "plus 1.00 MiB of leftover files"),
        ),
        (
            replace(listing(report(100), resumes_from=None), refusal="step 200 is of another version"),
            ("  resumes  would be refused (see below)\n", "\n\n  step 200 is of another version\n\n"),
        ),
        (
            replace(listing(resumes_from=None), refusal="the journal knows of 3 checkpoints"),
            ("NO CHECKPOINT FOUND", "would be refused", "\n\n  the journal knows of 3 checkpoints"),
        ),
        (
            replace(listing(report(100), report(200, condition="unreadable", why="Permission denied")), unless=(200,)),
            ("or from step 200 if that checkpoint is readable by then", "step 200, UNREADABLE: Permission denied"),
        ),
    ],
    ids=["none", "leftovers", "refused", "lost", "unreadable"],
)
def test_the_next_start_is_said_and_not_promised(found: CheckpointListing, said: tuple[str, ...]) -> None:
    text = render_checkpoints(found)
    assert all(words in text for words in said), text
    assert not found.refusal or "from step" not in text


def verdict(*files: FileVerdict, **changes: Any) -> CheckpointVerdict:
    fields: dict[str, Any] = {
        "name": "demo", "location": "/runs/demo", "step": 100, "path": "checkpoints/step-00000100", "problem": None,
        "attempt": 2, "world_size": 2, "num_tensors": 291, "num_elements": 8_030_000_000, "seconds": 30.0,
    }  # fmt: skip
    return CheckpointVerdict(files=files, **{**fields, **changes})


def file(rank: int, problem: str | None = None) -> FileVerdict:
    name = f"attempt-0002/rank-{rank:05d}-of-00002.safetensors"
    return FileVerdict(file=name, num_bytes=45 << 30, num_tensors=291, problem=problem)


GONE = file(0, "rank-00000 is missing")
UNREAD = replace(file(1, "rank-00001 can't be read"), is_unread=True)


@pytest.mark.parametrize(
    ("found", "word", "last"),
    [
        (verdict(problem="the manifest is torn", attempt=None, world_size=None), "DAMAGED", "the manifest is torn"),
        (verdict(file(0), problem="too late", kind="superseded"), "NOT PART OF THE RUN", ""),
        (verdict(problem="schema version 99", kind="foreign", attempt=None), "OF ANOTHER VERSION", ""),
        (verdict(file(0), UNREAD), "UNREADABLE", "repair the storage and verify again"),
        (verdict(problem="manifest.json can't be read", kind="unreadable", attempt=None), "UNREADABLE", ""),
        (verdict(GONE, UNREAD), "DAMAGED", ""),
    ],
)
def test_the_verdict_on_the_whole_is_said_first(found: CheckpointVerdict, word: str, last: str) -> None:
    text = render_verdict(found)
    assert text.split("\n")[0] == f"checkpoint of step 100 of run 'demo': {word}" and text.endswith(last)
    assert word == "DAMAGED" or "DAMAGED" not in text
