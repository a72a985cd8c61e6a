"""Law 3 looked at afterwards: each fault that is planted is named, and a sound run has none."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.flat_file import FlatWriter
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.errors import UserError
from ray_ulysses.inspect.journal_checks import Finding
from ray_ulysses.inspect.row_checks import ReadingProgress
from ray_ulysses.inspect.verification import Verification, verify_run
from ray_ulysses.run_names import manifest_key
from ray_ulysses.storage import run_claim
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.inspect.runs import SETTINGS, Run, configure, make_run


def kinds(found: Verification) -> list[str]:
    return [finding.kind for finding in found.findings]


def only(found: Verification) -> Finding:
    assert len(found.findings) == 1, found.findings
    return found.findings[0]


def flipped(digest: str) -> str:
    return f"{int(digest, 16) ^ 1:016x}"


def test_a_sound_run_holds_and_its_digest_is_found_again(run: Run) -> None:
    last = run.plan.num_steps
    run.attempt([run.started(), *run.steps(1, 4), run.committed(4), *run.steps(5, last)])
    run.checkpoint(4)
    run.checkpoint(last)
    seen: list[ReadingProgress] = []
    found = verify_run(run.folder, watch=seen.append)
    assert found.findings == ()
    assert found.holds
    assert (found.steps, found.rows) == (last, run.plan.num_rows)
    assert found.tokens == run.plan.newest.totals.supervised
    assert found.data_digest == f"{run.sum(last):016x}"
    assert found.reading is not None
    assert found.reading.digest == run.sum(last)
    assert (found.reading.steps, found.reading.rows) == (last, run.plan.num_rows)
    assert found.reading.tokens == sum(run.plan.row_tokens(row) for row in range(run.plan.num_rows))
    assert (found.num_manifests, found.num_commits) == (2, 1)
    assert [progress.rows for progress in seen] == list(range(1, run.plan.num_rows + 1))


def test_replayed_steps_count_once_and_a_run_in_progress_as_far_as_it_has_come(run: Run) -> None:
    # Trained otherwise by the attempt that was thrown away: what does not count is not held against the run.
    lost = [run.step(4, digest="0" * 16), run.step(5, rows=[0, 4])]
    run.attempt([run.started(), *run.steps(1, 3), *lost])
    run.checkpoint(3)
    run.attempt([run.started(3), *run.steps(4, 6)])
    with run_claim(run.folder):
        found = verify_run(run.folder)
    assert found.holds, found.findings
    assert (found.status, found.steps, found.lost_steps) == ("running", 6, 2)
    assert found.rows == 24


def test_a_run_that_has_trained_nothing_has_nothing_wrong(run: Run) -> None:
    run.attempt([run.started()])
    found = verify_run(run.folder)
    assert found.holds
    assert found.reading is None
    assert "no step that counts has been trained yet" in found.notes[0]


def test_rows_that_two_steps_trained_are_named(run: Run) -> None:
    run.attempt([run.started(), *run.steps(1, 2), run.step(3, rows=[7, 12]), *run.steps(4, 5)])
    found = verify_run(run.folder, read=False)
    assert kinds(found) == ["wrong_rows", "repeated_rows"]
    wrong, repeated = found.findings
    assert wrong.step == 3
    assert "trained rows 7 to 11, the plan assigns it rows 8 to 11" in str(wrong)
    assert str(repeated).startswith("row 7: trained by step 2 of attempt 1 and by step 3 of attempt 1")
    assert not found.holds


def test_rows_that_no_step_trained_are_named(run: Run) -> None:
    run.attempt([run.started(), *run.steps(1, 2), run.step(3, rows=[10, 12]), *run.steps(4, 5)])
    found = verify_run(run.folder, read=False)
    assert kinds(found) == ["wrong_rows", "untrained_rows"]
    assert str(found.findings[1]).startswith("rows 8 to 9: trained by no step, though step 3 of attempt 1")


def test_a_row_inside_those_of_a_step_long_before_is_named(run: Run) -> None:
    wide = run.step(1, rows=[0, 12])
    run.attempt([run.started(), wide, *run.steps(2, 4)])
    found = verify_run(run.folder, read=False)
    assert kinds(found) == ["wrong_rows", "repeated_rows", "repeated_rows"]
    assert [finding.where for finding in found.findings[1:]] == ["rows 4 to 7", "rows 8 to 11"]


def test_a_step_without_a_record_is_named_with_its_rows(run: Run) -> None:
    run.attempt([run.started(), *run.steps(1, 2), *run.steps(5, 6)])
    run.checkpoint(6)
    finding = only(verify_run(run.folder))
    assert finding.kind == "missing_steps"
    assert str(finding).startswith("steps 3 to 4: the journal has no record of training rows 8 to 15")


def test_the_steps_after_a_damaged_record_are_proved_by_the_sums_of_later_checkpoints(run: Run) -> None:
    run.trained(8)
    for step in (3, 5, 7, 8):
        run.checkpoint(step, **({"digest": flipped(f"{run.sum(7):016x}")} if step == 7 else {}))
    path = run.folder / "journal/attempt-0001.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": 4,', b'"step": 5,'))
    found = verify_run(run.folder, read=False)
    assert [(finding.kind, finding.step) for finding in found.findings] == [
        ("missing_steps", 4),
        ("checkpoint_digest", 7),
        ("checkpoint_digest", 8),
    ]
    assert found.notes == ("journal/attempt-0001.jsonl, line 5: its checksum is wrong; it was left out",)


def test_a_step_that_an_attempt_trained_twice_without_a_resume_is_named(run: Run) -> None:
    run.attempt([run.started(), *run.steps(1, 4), run.step(4), *run.steps(5, 6)])
    finding = only(verify_run(run.folder))
    assert (finding.kind, finding.step) == ("repeated_step", 4)
    assert "trained, and then again by attempt 1, which had not resumed before it" in finding.what
    assert "rows 12 to 15 went into the model's state twice" in finding.meaning


def test_an_attempt_that_repeats_the_step_that_it_resumed_from_is_named(run: Run) -> None:
    run.attempt([run.started(), *run.steps(1, 4)])
    run.attempt([run.started(4), *run.steps(4, 6)])
    finding = only(verify_run(run.folder))
    assert (finding.kind, finding.where) == ("repeated_step", "step 4 of attempt 1")
    assert "again by attempt 2" in finding.what


def test_another_count_of_supervised_tokens_is_named(run: Run) -> None:
    wrong = run.step(2, tokens=run.plan.step_tokens(2) - 1)
    run.attempt([run.started(), run.step(1), wrong, run.step(3)])
    finding = only(verify_run(run.folder))
    assert (finding.kind, finding.step) == ("tokens", 2)
    assert f"counted {run.plan.step_tokens(2) - 1} supervised tokens, the plan has {run.plan.step_tokens(2)}" in str(
        finding
    )


def test_steps_beyond_the_plan_are_named_and_the_others_still_read(run: Run) -> None:
    last = run.plan.num_steps
    beyond = {**run.step(last), "step": last + 1, "rows": [run.plan.num_rows, run.plan.num_rows + 4]}
    run.attempt([run.started(), *run.steps(1, last), beyond])
    found = verify_run(run.folder)
    assert only(found).kind == "wrong_rows"
    assert f"the plan ends after step {last}" in found.findings[0].what
    assert found.reading is not None and found.reading.steps == last
    assert f"steps from {last + 1} on are beyond the plan" in found.notes[0]


@pytest.mark.parametrize("read", [True, False], ids=["read", "no-read"])
def test_a_digest_that_is_off_by_one_is_named(run: Run, read: bool) -> None:
    wrong = run.step(3)
    wrong["digest"] = flipped(wrong["digest"])
    run.attempt([run.started(), *run.steps(1, 2), wrong, *run.steps(4, 8), run.committed(8)])
    run.checkpoint(2)
    run.checkpoint(4)
    run.checkpoint(6)
    found = verify_run(run.folder, read=read)
    # The journal's sum is off from step 3 on: said once, at the first checkpoint beyond it.
    assert kinds(found) == (["checkpoint_digest", "digest"] if read else ["checkpoint_digest"])
    assert found.findings[0].where == "checkpoints/step-00000004/manifest.json"
    if read:
        assert found.findings[1].where == "step 3 of attempt 1, rows 8 to 11"
        assert f"of digest {wrong['digest']}, plan and corpus have {run.digest(3):016x}" in found.findings[1].what


def forge(corpus: Path, folder: Path, document: int = 20) -> Path:
    """Copy a corpus and flip one token of a document, every size, footer and checksum being those of the first."""
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


def test_a_token_that_the_model_received_otherwise_is_named(run: Run, corpus: Path, tmp_path: Path) -> None:
    run.trained(run.plan.num_steps)
    run.checkpoint(4)
    found = verify_run(run.folder, corpora=[forge(corpus, tmp_path)])
    holding = {
        step
        for step in range(1, run.plan.num_steps + 1)
        for row in run.plan.step_rows(step)
        for piece in run.plan.pieces(row)
        if piece.document == 20 and piece.start <= 1 < piece.start + piece.length
    }
    assert set(kinds(found)) == {"digest"}
    assert {finding.step for finding in found.findings} == holding
    assert "a token, label or position of these rows differed from the plan" in found.findings[0].meaning
    # Without reading nothing is wrong: journal and checkpoints agree.
    assert verify_run(run.folder, read=False).holds


def test_another_text_of_the_same_lengths_in_the_corpus_place_is_refused(
    run: Run, corpus: Path, tmp_path: Path
) -> None:
    run.trained(3)
    other = text_corpus(tmp_path / "other", [text[::-1] for text in varied_texts(60)]).path
    moved = tmp_path / "moved"
    shutil.copytree(corpus, moved)
    in_place = make_run(tmp_path / "in-place", [moved])
    in_place.trained(3)
    shutil.rmtree(moved)
    shutil.copytree(other, moved)
    with pytest.raises(UserError, match="the corpus was replaced since planning") as refused:
        verify_run(in_place.folder)
    assert "--corpus PATH" in str(refused.value) and "--no-read" in str(refused.value)
    with pytest.raises(UserError, match="which is not in the plan") as stranger:
        verify_run(run.folder, corpora=[other])
    assert str(other) in str(stranger.value) and str(corpus) in str(stranger.value)


def test_rows_of_a_damaged_shard_are_named_and_the_others_still_proved(tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path / "data", varied_texts(60), unit_bytes=2000).path
    run = make_run(tmp_path / "demo", [corpus])
    run.trained(run.plan.num_steps)
    shards = sorted((corpus / "shards").iterdir())
    assert len(shards) > 2
    content = bytearray(shards[1].read_bytes())
    content[20] ^= 1
    shards[1].write_bytes(bytes(content))
    found = verify_run(run.folder)
    assert set(kinds(found)) == {"unreadable_rows"}
    assert shards[1].name in found.findings[0].what
    assert found.reading is not None
    assert found.reading.steps == run.plan.num_steps - len(found.findings)


def test_a_checkpoint_with_another_cursor_is_named(run: Run) -> None:
    run.trained(8)
    cursor = run.plan.cursor(4).to_json()
    run.checkpoint(2, cursor={**cursor, "step": 2})
    run.checkpoint(4, cursor={**run.plan.cursor(5).to_json()})
    run.checkpoint(6, cursor={**run.plan.cursor(6).to_json(), "plan_id": "0" * 16})
    run.checkpoint(8, cursor={"next_row": 32})
    found = verify_run(run.folder, read=False)
    assert kinds(found) == ["checkpoint_cursor"] * 4
    assert [finding.step for finding in found.findings] == [2, 4, 6, 8]
    first, second, third, fourth = map(str, found.findings)
    assert first.startswith("checkpoints/step-00000002/manifest.json, data cursor") and "'next_row': 8" in first
    assert "it is of step 5" in second
    assert "belongs to plan 0000000000000000" in third
    assert "segment is missing" in fourth


def test_a_checkpoint_with_another_digest_or_count_of_tokens_is_named(run: Run) -> None:
    run.trained(8)
    run.checkpoint(4, digest=flipped(f"{run.sum(4):016x}"))
    run.checkpoint(6, tokens=7)
    run.checkpoint(8)
    found = verify_run(run.folder, read=False)
    assert [(finding.kind, finding.step) for finding in found.findings] == [
        ("checkpoint_digest", 4),
        ("checkpoint_tokens", 6),
        ("checkpoint_digest", 6),
        ("checkpoint_tokens", 8),
    ]
    assert f"sum to {run.sum(4):016x}" in found.findings[0].what
    assert "counts 7 supervised tokens" in found.findings[1].what


def test_a_commit_in_the_journal_with_another_digest_is_named(run: Run) -> None:
    wrong = run.committed(3, digest="00000000000000ff")
    run.attempt([run.started(), *run.steps(1, 3), wrong, *run.steps(4, 5)])
    finding = only(verify_run(run.folder, read=False))
    assert finding.kind == "checkpoint_digest"
    assert finding.where == "the commit of step 3 in the journal of attempt 1"


def test_the_commit_of_an_attempt_that_was_thrown_away_is_not_held_against_the_run(run: Run) -> None:
    run.attempt([run.started(), *run.steps(1, 4), run.committed(4, digest="00000000000000ff")])
    run.attempt([run.started(2), *run.steps(3, 4), run.committed(4)])
    found = verify_run(run.folder)
    assert found.holds, found.findings
    assert found.num_commits == 1


def test_a_checkpoint_beyond_the_journal_is_named(run: Run) -> None:
    run.trained(3)
    run.checkpoint(5)
    finding = only(verify_run(run.folder))
    assert (finding.kind, finding.step) == ("checkpoint_step", 5)


def test_a_torn_manifest_is_named(run: Run) -> None:
    run.trained(3)
    run.checkpoint(3)
    path = run.folder / manifest_key(3)
    path.write_bytes(path.read_bytes()[:-20])
    finding = only(verify_run(run.folder))
    assert (finding.kind, finding.what) == ("checkpoint_unreadable", "the manifest is torn or no JSON")


def test_an_attempt_that_trained_by_another_plan_is_named(run: Run) -> None:
    run.attempt([run.started(), *run.steps(1, 2)])
    run.attempt([run.started(2, plan_ids=["feedfacefeedface"]), *run.steps(3, 4)])
    finding = only(verify_run(run.folder))
    assert (finding.kind, finding.step, finding.where) == ("other_plan", 3, "attempt 2, from step 3 on")
    assert "feedfacefeedface" in finding.what and run.plan.plan_id in finding.what


def test_a_branched_run_is_proved_through_its_segments(run: Run, corpus: Path, tmp_path: Path) -> None:
    more = text_corpus(tmp_path / "more", varied_texts(20, seed=5)).path
    run.attempt([run.started(), *run.steps(1, 7)])
    run.checkpoint(5)
    before = run.branch(5, replace(SETTINGS, context_tokens=256, rows_per_step=3), [corpus, more])

    # Nobody has gone on yet: steps 6 and 7 are of the plan before, and will be thrown away.
    pending = verify_run(run.folder)
    assert pending.holds, pending.findings
    assert pending.steps == 5
    assert "the plan was branched after step 5" in pending.notes[0] and "steps 6 to 7" in pending.notes[0]

    run.attempt([run.started(5), *run.steps(6, run.plan.num_steps)])
    run.checkpoint(run.plan.num_steps)
    found = verify_run(run.folder)
    assert found.holds, found.findings
    assert found.rows == run.plan.num_rows
    assert found.lost_steps == 2
    assert found.plan_ids == (before.plan_id, run.plan.plan_id)


def test_steps_of_the_plan_before_a_branch_that_was_taken_up_are_named(run: Run, corpus: Path) -> None:
    """An attempt under the branch that resumed beyond it: steps of the plan before stay, and are none of its rows."""
    old = run.plan
    run.attempt([run.started(), *run.steps(1, 7)])
    run.branch(5, replace(SETTINGS, rows_per_step=3), [corpus])
    assert old.step_rows(6) != run.plan.step_rows(6)
    run.attempt([run.started(7), *run.steps(8, 9)])
    found = verify_run(run.folder, read=False)
    assert {finding.step for finding in found.findings if finding.kind == "wrong_rows"} == {6, 7}


def test_a_corpus_that_moved_is_found_where_a_resume_or_the_user_says(corpus: Path, tmp_path: Path) -> None:
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


def test_a_run_without_a_plan_is_refused_with_the_hint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        verify_run(tmp_path)
    (tmp_path / "journal").mkdir()
    with pytest.raises(UserError, match=r"has no data plan yet.*ray-ulysses train"):
        verify_run(tmp_path)


def test_every_row_of_many_steps_is_read_in_order(tmp_path: Path, corpus: Path) -> None:
    """More rows than threads hold at once, one a step: each digest meets its own step."""
    run = make_run(tmp_path / "demo", [corpus], replace(SETTINGS, rows_per_step=1, context_tokens=64))
    run.trained(run.plan.num_steps)
    found = verify_run(run.folder)
    assert found.holds
    assert found.reading is not None
    assert found.reading.rows == run.plan.num_rows > 100
    assert np.uint64(found.reading.digest) == np.uint64(int(found.data_digest, 16))
