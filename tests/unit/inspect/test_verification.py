"""Verification of law 3: each planted fault is found, a correct run passes, and two runs are compared step by step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.flat_file import FlatWriter
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.inspect import run_data
from ray_ulysses.inspect.journal_checks import Comparison
from ray_ulysses.inspect.row_checks import ReadingProgress
from ray_ulysses.inspect.run_data import PlanHistory, planned_data, read_plan_history
from ray_ulysses.inspect.verification import Verification, verify_run
from ray_ulysses.run_names import manifest_key
from ray_ulysses.storage import run_claim
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.inspect.runs import SETTINGS, Record, Run, configure, make_run
from tests.unit.inspect.saved import cut, flip


def train(run: Run, *steps: int | Record, resumed: int = 0, **started: Any) -> Run:
    """Write an attempt. A number stands for a planned step."""
    records = (run.step(one) if isinstance(one, int) else one for one in steps)
    return run.attempt([run.started(resumed, **started), *records])


def named(found: Verification) -> list[tuple[str, str]]:
    assert found.holds == (not found.findings)
    return [(finding.kind, finding.where.partition(", data cursor")[0]) for finding in found.findings]


def flipped(digest: int) -> str:
    return f"{digest ^ 1:016x}"


def manifest(step: int) -> str:
    return f"checkpoints/step-{step:08d}/manifest.json"


def test_a_correct_run_passes_and_its_digest_is_reproduced(run: Run) -> None:
    last = run.plan.num_steps
    train(run, *range(1, 5), run.committed(4), *range(5, last + 1))
    run.checkpoint(4)
    run.checkpoint(last)
    seen: list[ReadingProgress] = []
    found = verify_run(run.folder, watch=seen.append)
    assert named(found) == []
    assert (found.steps, found.rows, found.tokens) == (last, run.plan.num_rows, run.plan.newest.totals.supervised)
    assert found.data_digest == f"{run.sum(last):016x}"
    assert found.reading is not None
    assert found.reading.digest == run.sum(last)
    assert (found.reading.steps, found.reading.rows) == (last, run.plan.num_rows)
    assert found.reading.tokens == sum(run.plan.row_tokens(row) for row in range(run.plan.num_rows))
    assert (found.num_manifests, found.num_commits) == (2, 1)
    assert [progress.rows for progress in seen] == list(range(1, run.plan.num_rows + 1))


def test_replayed_steps_count_once_in_a_run_in_progress(run: Run) -> None:
    # The discarded attempt trained wrong data, which does not matter because its steps do not count.
    train(run, 1, 2, 3, run.step(4, digest="0" * 16), run.step(5, rows=[0, 4]))
    run.checkpoint(3)
    train(run, 4, 5, 6, resumed=3)
    with run_claim(run.folder):
        found = verify_run(run.folder)
    assert named(found) == []
    assert (found.status, found.steps, found.lost_steps, found.rows) == ("running", 6, 2, 24)


def test_a_run_without_steps_passes(run: Run) -> None:
    train(run)
    found = verify_run(run.folder)
    assert (named(found), found.reading, len(found.notes)) == ([], None, 1)


def wrong_cursors(run: Run) -> None:
    run.trained(8)
    run.checkpoint(2, cursor={**run.plan.cursor(4).to_json(), "step": 2})
    run.checkpoint(4, cursor=run.plan.cursor(5).to_json())
    run.checkpoint(6, cursor={**run.plan.cursor(6).to_json(), "plan_id": "0" * 16})
    run.checkpoint(8, cursor={"next_row": 32})


FAULTS: dict[str, tuple[Callable[[Run], object], list[tuple[str, str]]]] = {
    "a row twice": (
        lambda run: train(run, 1, 2, run.step(3, rows=[7, 12]), 4, 5),
        [("wrong_rows", "step 3 of attempt 1"), ("repeated_rows", "row 7")],
    ),
    "rows never": (
        lambda run: train(run, 1, 2, run.step(3, rows=[10, 12]), 4, 5),
        [("wrong_rows", "step 3 of attempt 1"), ("untrained_rows", "rows 8 to 9")],
    ),
    "rows of a step long before": (
        lambda run: train(run, run.step(1, rows=[0, 12]), 2, 3, 4),
        [("wrong_rows", "step 1 of attempt 1"), ("repeated_rows", "rows 4 to 7"), ("repeated_rows", "rows 8 to 11")],
    ),
    "steps without a record": (lambda run: train(run, 1, 2, 5, 6).checkpoint(6), [("missing_steps", "steps 3 to 4")]),
    "a step twice": (lambda run: train(run, 1, 2, 3, 4, run.step(4), 5), [("repeated_step", "step 4 of attempt 1")]),
    "the step resumed from again": (
        lambda run: train(train(run, 1, 2, 3, 4), 4, 5, 6, resumed=4),
        [("repeated_step", "step 4 of attempt 1")],
    ),
    "another count of tokens": (
        lambda run: train(run, 1, run.step(2, tokens=run.plan.step_tokens(2) - 1), 3),
        [("tokens", "step 2 of attempt 1")],
    ),
    "cursors": (wrong_cursors, [("checkpoint_cursor", manifest(step)) for step in (2, 4, 6, 8)]),
    "sums of checkpoints": (
        lambda run: run.trained(8).checkpoint(4, digest=flipped(run.sum(4))).checkpoint(6, tokens=7).checkpoint(8),
        [
            ("checkpoint_digest", manifest(4)),
            ("checkpoint_tokens", manifest(6)),
            ("checkpoint_digest", manifest(6)),
            ("checkpoint_tokens", manifest(8)),
        ],
    ),
    "the digest of a commit": (
        lambda run: train(run, 1, 2, 3, run.committed(3, digest="00000000000000ff"), 4, 5),
        [("checkpoint_digest", "commit of step 3 in the journal of attempt 1")],
    ),
    "beyond the journal": (lambda run: run.trained(3).checkpoint(5), [("checkpoint_step", manifest(5))]),
    "a torn manifest": (
        lambda run: cut(run.trained(3).checkpoint(3).folder / manifest_key(3), 20),
        [("checkpoint_unreadable", manifest(3))],
    ),
    "another plan": (
        lambda run: train(train(run, 1, 2), 3, 4, resumed=2, plan_ids=["feedfacefeedface"]),
        [("other_plan", "attempt 2, from step 3 on")],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_yields_exactly_its_findings(run: Run, fault: str) -> None:
    plant, expected = FAULTS[fault]
    plant(run)
    assert named(verify_run(run.folder, read=False)) == expected


def test_checkpoints_after_a_damaged_record_verify_the_later_steps(run: Run) -> None:
    run.trained(8)
    for step in (3, 5, 7, 8):
        run.checkpoint(step, **({"digest": flipped(run.sum(7))} if step == 7 else {}))
    path = run.folder / "journal/attempt-0001.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": 4,', b'"step": 5,'))
    found = verify_run(run.folder, read=False)
    kinds = [(finding.kind, finding.step) for finding in found.findings]
    assert kinds == [("missing_steps", 4), ("checkpoint_digest", 7), ("checkpoint_digest", 8)]
    assert found.notes == ("journal/attempt-0001.jsonl, line 5: the checksum is wrong; ignored",)


def test_steps_beyond_the_plan_are_reported_and_other_steps_are_read(run: Run) -> None:
    last = run.plan.num_steps
    beyond = {**run.step(last), "step": last + 1, "rows": [run.plan.num_rows, run.plan.num_rows + 4]}
    train(run, *range(1, last + 1), beyond)
    found = verify_run(run.folder)
    assert named(found) == [("wrong_rows", f"step {last + 1} of attempt 1")]
    assert found.reading is not None and found.reading.steps == last


@pytest.mark.parametrize("read", [True, False], ids=["read", "no-read"])
def test_a_digest_that_is_off_by_one_is_reported(run: Run, read: bool) -> None:
    train(run, 1, 2, run.step(3, digest=flipped(run.digest(3))), *range(4, 9), run.committed(8))
    for step in (2, 4, 6):
        run.checkpoint(step)
    # The journal's sum is wrong from step 3 on, which is reported only at the first later checkpoint.
    expected = [("checkpoint_digest", manifest(4)), ("digest", "step 3 of attempt 1, rows 8 to 11")]
    assert named(verify_run(run.folder, read=read)) == expected[: 1 + read]


def forge(corpus: Path, folder: Path, document: int = 20) -> Path:
    """Copy a corpus and flip one token of a document, with consistent sizes, footers and checksums."""
    copy = folder / "forged"
    shutil.copytree(corpus, copy)
    fields = json.loads((copy / "corpus.json").read_text())
    (shard,) = fields["shards"]
    path, num_tokens = copy / "shards" / shard["name"], shard["tokens"]["num_items"]
    tokens = np.fromfile(path, "<u2", num_tokens)
    tokens[Corpus.open(corpus).lengths[:document].sum() + 1] ^= 1
    writer = FlatWriter(path, tokens.dtype)
    writer.add(tokens)
    shard["tokens"]["blocks_crc32"] = writer.close().blocks_crc32
    del fields["checksum"]
    (copy / "corpus.json").write_text(json.dumps({**fields, "checksum": stable_hash(fields)}))
    return copy


def test_a_changed_token_is_found_by_reading(run: Run, corpus: Path, tmp_path: Path) -> None:
    run.trained(run.plan.num_steps).checkpoint(4)
    found = verify_run(run.folder, corpora=[forge(corpus, tmp_path)])
    holding = {
        step
        for step in range(1, run.plan.num_steps + 1)
        for row in run.plan.step_rows(step)
        for piece in run.plan.pieces(row)
        if piece.document == 20 and piece.start <= 1 < piece.start + piece.length
    }
    assert {(finding.kind, finding.step) for finding in found.findings} == {("digest", step) for step in holding}
    # Without reading there is no finding, because journal and checkpoints agree.
    assert verify_run(run.folder, read=False).holds


def test_a_corpus_with_equal_lengths_but_other_text_is_refused(run: Run, corpus: Path, tmp_path: Path) -> None:
    run.trained(3)
    other = text_corpus(tmp_path / "other", [text[::-1] for text in varied_texts(60)]).path
    moved = tmp_path / "moved"
    shutil.copytree(corpus, moved)
    in_place = make_run(tmp_path / "in-place", [moved])
    in_place.trained(3)
    shutil.rmtree(moved)
    shutil.copytree(other, moved)
    with pytest.raises(UserError, match="--corpus PATH"):
        verify_run(in_place.folder)
    with pytest.raises(UserError, match=f"{other}.* not in the plan"):
        verify_run(run.folder, corpora=[other])


def test_unreadable_rows_are_reported_and_other_rows_are_verified(tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path / "data", varied_texts(60), unit_bytes=2000).path
    run = make_run(tmp_path / "demo", [corpus])
    run.trained(run.plan.num_steps)
    shards = sorted((corpus / "shards").iterdir())
    assert len(shards) > 2
    flip(shards[1], 20)
    found = verify_run(run.folder)
    assert {kind for kind, _ in named(found)} == {"unreadable_rows"}
    assert shards[1].name in found.findings[0].what
    assert found.reading is not None
    assert found.reading.steps == run.plan.num_steps - len(found.findings)


def test_a_commit_of_discarded_steps_is_not_checked(run: Run) -> None:
    train(run, 1, 2, 3, 4, run.committed(4, digest="00000000000000ff"))
    train(run, 3, 4, run.committed(4), resumed=2)
    found = verify_run(run.folder)
    assert (named(found), found.num_commits) == ([], 1)


def test_a_branched_run_is_verified_across_its_segments(run: Run, corpus: Path, more: Path) -> None:
    train(run, *range(1, 8))
    run.checkpoint(5)
    before = run.branch(5, replace(SETTINGS, context_tokens=256, rows_per_step=3), [corpus, more])

    # No attempt has trained on the branch yet. Steps 6 and 7 belong to the old plan and will be discarded.
    pending = verify_run(run.folder)
    assert (named(pending), pending.steps, len(pending.notes)) == ([], 5, 1)

    train(run, *range(6, run.plan.num_steps + 1), resumed=5)
    run.checkpoint(run.plan.num_steps)
    found = verify_run(run.folder)
    assert (named(found), found.rows, found.lost_steps) == ([], run.plan.num_rows, 2)
    assert found.plan_ids == (before.plan_id, run.plan.plan_id)


def test_steps_of_the_old_plan_after_a_branch_are_reported(run: Run, corpus: Path) -> None:
    """An attempt resumed after the branch point: steps of the old plan still count, but have the wrong rows."""
    old = run.plan
    train(run, *range(1, 8))
    run.branch(5, replace(SETTINGS, rows_per_step=3), [corpus])
    assert old.step_rows(6) != run.plan.step_rows(6)
    train(run, 8, 9, resumed=7)
    found = verify_run(run.folder, read=False)
    assert {finding.step for finding in found.findings if finding.kind == "wrong_rows"} == {6, 7}


def test_a_moved_corpus_is_found_through_the_configuration_or_the_option(corpus: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(corpus, old)
    run = make_run(tmp_path / "demo", [old])
    run.trained(3)
    old.rename(new)
    with pytest.raises(UserError, match="does not exist"):
        verify_run(run.folder)
    assert verify_run(run.folder, read=False).holds
    assert verify_run(run.folder, corpora=[new]).holds
    (run.folder / "config.yaml").write_text("no: configuration")
    with pytest.raises(UserError, match="does not exist"):
        verify_run(run.folder)
    configure(run.folder, new)
    assert verify_run(run.folder).holds


@pytest.fixture
def other(tmp_path: Path, corpus: Path) -> Run:
    """A run with the same plan and a copy of the corpus at another path."""
    shutil.copytree(corpus, tmp_path / "copy")
    return make_run(tmp_path / "other", [tmp_path / "copy"])


def compared(run: Run, other: Run) -> tuple[Comparison, list[str]]:
    found = verify_run(run.folder, other=other.folder, read=False)
    assert found.comparison is not None
    assert found.comparison.other == str(other.folder)
    assert {finding.kind for finding in found.findings} <= {"comparison"}
    return found.comparison, [str(finding) for finding in found.findings]


def test_equal_runs_are_the_same_and_a_longer_run_is_the_same_so_far(run: Run, other: Run) -> None:
    run.trained(8)
    other.attempt([other.started(), *other.steps(1, 5)])
    comparison, findings = compared(run, other)
    assert (comparison.answer, comparison.common_steps, findings) == ("same_so_far", 5, [])
    assert (comparison.own_steps, comparison.other_steps) == (8, 5)
    other.attempt([other.started(3), *other.steps(4, 8)])
    comparison, findings = compared(run, other)
    assert (comparison.answer, comparison.common_steps, comparison.first_different_step) == ("same", 8, None)
    assert findings == []


def test_the_first_different_step_is_reported(run: Run, other: Run) -> None:
    run.trained(8)
    wrong = [other.step(step, digest=f"{step:016x}") for step in (5, 6)]
    other.attempt([other.started(), *other.steps(1, 4), *wrong, *other.steps(7, 8)])
    comparison, (finding,) = compared(run, other)
    assert (comparison.answer, comparison.first_different_step) == ("different", 5)
    assert finding.startswith("step 5 of attempt 1, the first difference: received data with digest")
    assert f"{other.folder} received 0000000000000005" in finding


def test_different_rows_or_token_counts_are_differences(run: Run, other: Run, tmp_path: Path, corpus: Path) -> None:
    run.trained(3)
    other.attempt([other.started(), other.step(1), other.step(2, rows=[4, 7]), other.step(3)])
    _, (finding,) = compared(run, other)
    assert f"trained rows 4 to 7, but {other.folder} trained rows 4 to 6" in finding
    third = make_run(tmp_path / "third", [corpus])
    third.attempt([third.started(), third.step(1, tokens=1)])
    _, (finding,) = compared(run, third)
    assert f"{third.folder} counted 1;" in finding


def test_another_seed_is_another_plan(run: Run, tmp_path: Path, corpus: Path) -> None:
    run.trained(3)
    seeded = make_run(tmp_path / "seeded", [corpus], replace(SETTINGS, seed=4))
    seeded.trained(3)
    comparison, (finding,) = compared(run, seeded)
    assert (comparison.answer, comparison.common_steps, comparison.first_different_step) == ("other_plan", 0, 1)
    assert run.plan.plan_id in finding and seeded.plan.plan_id in finding
    assert "another data setting is different" in finding


def test_runs_are_compared_up_to_a_branch(run: Run, other: Run, corpus: Path, more: Path) -> None:
    run.trained(5)
    other.trained(5)
    other.branch(5, replace(SETTINGS, rows_per_step=3), [corpus, more])
    # Neither run has trained beyond the branch, so the data is the same so far.
    comparison, findings = compared(run, other)
    assert (comparison.answer, findings) == ("same", [])
    other.attempt([other.started(5), *other.steps(6, 8)])
    comparison, findings = compared(run, other)
    assert (comparison.answer, comparison.common_steps, findings) == ("same_so_far", 5, [])
    run.attempt([run.started(5), *run.steps(6, 7)])
    comparison, (finding,) = compared(run, other)
    assert (comparison.answer, comparison.common_steps, comparison.first_different_step) == ("other_plan", 5, 6)
    assert f"{other.plan.segments[0].plan_id} > {other.plan.plan_id}" in finding


def test_an_invalid_second_run_is_refused(run: Run, tmp_path: Path) -> None:
    run.trained(2)
    with pytest.raises(UserError, match=r"OTHER=.*is not a run directory"):
        verify_run(run.folder, other=tmp_path, read=False)
    (tmp_path / "empty/journal").mkdir(parents=True)
    with pytest.raises(UserError, match=r"OTHER=.*the run has no data plan yet"):
        verify_run(run.folder, other=tmp_path / "empty", read=False)


def test_each_edit_of_a_run_is_a_segment(run: Run, corpus: Path, more: Path) -> None:
    first = run.plan.plan_id
    run.branch(5, replace(SETTINGS, context_tokens=256, rows_per_step=3, packing="concat"), [corpus, more])
    one, two = json.loads(json.dumps(read_plan_history(run.folder).to_json()))["plan"]
    sources = [{"path": str(path), "weight": None} for path in (corpus, more)]
    fields = {"segment": 0, "base_step": 0, "base_row": 0, "context_tokens": 128, "rows_per_step": 4}
    rest = {"validation": [], "stage": None}
    assert one == {"plan_id": first, **fields, "packing": "best_fit", "sources": sources[:1], **rest}
    fields = {"segment": 1, "base_step": 5, "base_row": 20, "context_tokens": 256, "rows_per_step": 3}
    assert two == {"plan_id": run.plan.plan_id, **fields, "packing": "concat", "sources": sources, **rest}


@pytest.mark.parametrize("error", [RunError("the store is away"), UserError("it is damaged"), OSError("gone")])
def test_a_plan_that_can_not_be_read_is_a_problem(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(run_data, "load_plan_if_any", Mock(side_effect=error))
    assert read_plan_history(run.folder) == PlanHistory(problem=str(error))
    with pytest.raises(UserError, match=rf"^the run's data plan can't be read \((plan: )?{error}\)"):
        planned_data(run.folder)
