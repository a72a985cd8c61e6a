"""What a person sees of a run's checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_ulysses.commands.inspect_checks import render_checkpoints, render_verdict
from ray_ulysses.inspect.checkpoint_listing import CheckpointListing, CheckpointReport, SetAside
from ray_ulysses.inspect.checkpoint_verification import CheckpointVerdict, FileVerdict


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
        text = render_checkpoints(SEVERAL, width)
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
