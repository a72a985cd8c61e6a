"""What a person sees of a run's checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ray_ulysses.commands.inspect import ReadingReport
from ray_ulysses.commands.inspect_checks import render_checkpoints, render_verdict
from ray_ulysses.inspect.checkpoint_listing import CheckpointListing, CheckpointReport, SetAside
from ray_ulysses.inspect.checkpoint_verification import CheckpointVerdict, FileVerdict


def report(step: int, **changes: Any) -> CheckpointReport:
    fields: dict[str, Any] = {
        "step": step,
        "path": f"checkpoints/step-{step:08d}",
        "committed": True,
        "condition": "whole",
        "attempt": 1,
        "world_size": 8,
        "sp_size": 4,
        "ring_size": 1,
        "dp_size": 2,
        "zero_stage": 3,
        "num_bytes": 3 << 30,
        "written_at": 1_790_000_000.0,
        "reason": "steps",
        "metrics": {"loss": 2.5},
        "kept": ("last 3",),
    }
    return CheckpointReport(**{**fields, **changes})


def listing(*reports: CheckpointReport, resumes_from: int | None = 100) -> CheckpointListing:
    return CheckpointListing(name="demo", location="/runs/demo", checkpoints=reports, resumes_from=resumes_from)


SEVERAL = listing(
    report(100, kept=("last 3", "every 100", "best loss")),
    report(200, condition="damaged", why="rank-00001-of-00008.safetensors has 7 bytes instead of 9"),
    report(
        300,
        committed=False,
        condition="set_aside",
        why="a flipped byte",
        kept=(),
        set_aside=(SetAside(attempt=2, reason="a flipped byte", at=1_790_000_000.0),),
        is_swept=True,
    ),
    report(400, condition="superseded", why="attempt 1 committed it too late", kept=()),
    CheckpointReport(
        step=500,
        path="checkpoints/step-00000500",
        committed=False,
        condition="not_committed",
        why="left by attempt 1, which ended before the commit; a later commit deletes it",
        num_bytes=5 << 20,
    ),
)


def test_a_table_says_what_there_is_and_where_the_next_attempt_starts() -> None:
    text = render_checkpoints(listing(report(100, ring_size=2, metrics={"loss": 2.5, "eval_loss": 2.75})))
    assert text.split("\n") == [
        "run 'demo': 1 checkpoint with files of the right size",
        "  store    /runs/demo",
        "  resumes  from step 100",
        "  size     3.00 GiB",
        "  kept by  last 3",
        "",
        "  step  state  attempt  ranks         dp x sp  zero      size  written UTC    loss  eval loss  saved by  "
        "kept by",
        "   100  whole        1      8  2 x 4 (ring 2)     3  3.00 GiB  09-21 14:13  2.5000     2.7500     steps  last",
    ]


def test_each_that_can_not_be_used_says_why() -> None:
    text = render_checkpoints(SEVERAL)
    head, *notes = text.split("\n\n")
    assert (
        head.split("\n")[0]
        == "run 'demo': 1 checkpoint with files of the right size, 1 damaged, 1 fenced out, 1 set aside, 1 leftover"
    )
    assert notes[1:] == [
        "  step 200, DAMAGED: rank-00001-of-00008.safetensors has 7 bytes instead of 9",
        "  step 300, set aside by attempt 2, 2026-09-21 14:13 UTC: a flipped byte; a later commit deletes the "
        "rest of it",
        "  step 400, fenced out: attempt 1 committed it too late",
        "  step 500, leftover: left by attempt 1, which ended before the commit; a later commit deletes it",
    ]
    table = notes[0].split("\n")
    assert [line.split()[:2] for line in table[1:]] == [
        ["100", "whole"],
        ["200", "DAMAGED"],
        ["300", "set"],
        ["400", "fenced"],
        ["500", "leftover"],
    ]
    assert table[1].endswith("last, every, best")


def test_no_line_is_longer_than_the_terminal_and_what_does_not_fit_is_named() -> None:
    for width in (80, 100, 120):
        text = render_checkpoints(SEVERAL, width)
        assert max(map(len, text.split("\n")[6:])) <= width
    narrow = render_checkpoints(SEVERAL, 80)
    assert "not shown for lack of space: ranks, dp x sp, zero, saved by" in narrow
    assert "written UTC" in narrow and "last, every, best" in narrow
    assert "not shown" not in render_checkpoints(SEVERAL, 120)
    # The least that is shown stands however narrow it is.
    assert "  step       state  size\n" in render_checkpoints(SEVERAL, 20)


def test_a_run_without_one_says_so() -> None:
    text = render_checkpoints(listing(resumes_from=None))
    assert text == "run 'demo': no checkpoint yet\n  store  /runs/demo"
    left = render_checkpoints(
        listing(report(100, condition="superseded", why="x", leftover_bytes=1 << 20), resumes_from=None)
    )
    assert "resumes  from model.resume_from if set, else from step 0" in left
    assert "size     3.00 GiB, plus 1.00 MiB of leftover files" in left


def test_a_start_that_would_be_refused_is_said_and_not_promised() -> None:
    reports = (report(100), report(200, condition="foreign", why="schema version 99"))
    other = replace(listing(*reports, resumes_from=None), refusal="the checkpoint of step 200 is of another version")
    text = render_checkpoints(other)
    assert "  resumes  would be refused (see below)\n" in text
    assert "\n\n  the checkpoint of step 200 is of another version\n\n" in text
    assert "from step" not in text
    lost = replace(listing(resumes_from=None), refusal="the journal knows of 3 checkpoints")
    assert render_checkpoints(lost).split("\n") == [
        "run 'demo': NO CHECKPOINT FOUND",
        "  store    /runs/demo",
        "  resumes  would be refused (see below)",
        "",
        "  the journal knows of 3 checkpoints",
    ]


def test_a_newer_one_that_may_be_readable_by_then_is_said() -> None:
    unread = report(200, condition="unreadable", why="manifest.json can't be read (Permission denied)")
    text = render_checkpoints(replace(listing(report(100), unread), unless=(200,)))
    assert "resumes  from step 100, or from step 200 if it can be read by then" in text
    assert "step 200, UNREADABLE: manifest.json can't be read (Permission denied)" in text


def test_only_what_a_later_commit_deletes_is_said_to_go() -> None:
    aside = SetAside(attempt=2, reason="a flipped byte", at=None)
    gone = report(300, committed=False, condition="set_aside", kept=(), set_aside=(aside,))
    assert render_checkpoints(listing(gone)).endswith("step 300, set aside by attempt 2: a flipped byte")


def verdict(*files: FileVerdict, **changes: Any) -> CheckpointVerdict:
    fields: dict[str, Any] = {
        "name": "demo",
        "location": "/runs/demo",
        "step": 100,
        "path": "checkpoints/step-00000100",
        "problem": None,
        "attempt": 2,
        "world_size": 2,
        "num_tensors": 291,
        "num_elements": 8_030_000_000,
        "seconds": 30.0,
        "files": files,
    }
    return CheckpointVerdict(**{**fields, **changes})


def file(rank: int, problem: str | None = None) -> FileVerdict:
    name = f"attempt-0002/rank-{rank:05d}-of-00002.safetensors"
    return FileVerdict(file=name, num_bytes=45 << 30, num_tensors=291, problem=problem)


def test_a_whole_checkpoint_is_said_file_by_file() -> None:
    assert render_verdict(verdict(file(0), file(1))).split("\n") == [
        "checkpoint of step 100 of run 'demo': whole",
        "  store       /runs/demo",
        "  directory   checkpoints/step-00000100",
        "  written by  attempt 2, 2 ranks",
        "  manifest    291 tensors, 8.03B elements, each stored once",
        "  read        90.0 GiB in 30s, 3.00 GiB/s",
        "",
        "      size  parts  state  file",
        "  45.0 GiB    291  whole  attempt-0002/rank-00000-of-00002.safetensors",
        "  45.0 GiB    291  whole  attempt-0002/rank-00001-of-00002.safetensors",
    ]


def test_a_damaged_file_is_named_below_the_table() -> None:
    problem = "attempt-0002/rank-00001-of-00002.safetensors: the checksum of fp32/w is wrong (bytes 8 to 9)"
    text = render_verdict(verdict(file(0), file(1, problem)))
    assert text.startswith("checkpoint of step 100 of run 'demo': DAMAGED\n")
    assert "DAMAGED  attempt-0002/rank-00001" in text and "whole  attempt-0002/rank-00000" in text
    assert text.endswith(f"\n\n  {problem}")


def test_of_thousands_of_files_the_damaged_ones_are_shown() -> None:
    files = [file(rank) for rank in range(1000)]
    files[700] = file(700, "rank-00700 is missing")
    lines = render_verdict(verdict(*files)).split("\n")
    assert sum("DAMAGED  " in line for line in lines) == 1
    assert sum(line.endswith(".safetensors") for line in lines) == 64
    assert "  and 936 more, all whole (--json lists them)" in lines


def test_what_is_wrong_with_the_whole_is_said_first() -> None:
    torn = verdict(problem="the manifest is torn or no JSON", attempt=None, world_size=None)
    assert render_verdict(torn).split("\n") == [
        "checkpoint of step 100 of run 'demo': DAMAGED",
        "  store      /runs/demo",
        "  directory  checkpoints/step-00000100",
        "",
        "  the manifest is torn or no JSON",
    ]
    fenced = render_verdict(verdict(file(0), problem="it is not part of the run", kind="superseded"))
    assert fenced.startswith("checkpoint of step 100 of run 'demo': NOT PART OF THE RUN\n")
    foreign = render_verdict(verdict(problem="the manifest has schema version 99", kind="foreign", attempt=None))
    assert foreign.startswith("checkpoint of step 100 of run 'demo': OF ANOTHER VERSION\n")


def test_what_can_not_be_read_now_is_not_called_damaged() -> None:
    unread = replace(file(1, "rank-00001 can't be read (Permission denied), perhaps only for now"), is_unread=True)
    text = render_verdict(verdict(file(0), unread))
    assert text.startswith("checkpoint of step 100 of run 'demo': UNREADABLE\n")
    assert "UNREADABLE  attempt-0002/rank-00001" in text and "DAMAGED" not in text
    assert text.endswith("files that can't be read may be whole: repair the storage and verify again")
    manifest = render_verdict(verdict(problem="manifest.json can't be read", kind="unreadable", attempt=None))
    assert manifest.startswith("checkpoint of step 100 of run 'demo': UNREADABLE\n")
    both = render_verdict(verdict(file(0, "rank-00000 is missing"), unread))
    assert both.startswith("checkpoint of step 100 of run 'demo': DAMAGED\n")


class _Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def test_a_long_reading_says_how_far_it_is_and_a_short_one_nothing() -> None:
    clock, said = _Clock(), []
    progress = ReadingReport(said.append, clock).bytes
    gib = 1 << 30
    for second in range(21):
        clock.time = float(second)
        progress(second * gib, 40 * gib)
    assert said[0] == "read 5.00 GiB of 40.0 GiB (12.50%), 1.00 GiB/s, about 35s left"
    assert len(said) == 4
