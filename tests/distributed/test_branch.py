"""Changes of a run's data: longer rows, files that join, and rows of a bad step left out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.clock import SystemClock
from ray_ulysses.config import Config
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.errors import ConfigError
from ray_ulysses.inspect.verification import verify_run
from ray_ulysses.run.planning import skip_bad_step
from ray_ulysses.run.preflight import prepare_run
from ray_ulysses.run.settings import resolve_run
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.events import AttemptStarted, StepDone
from ray_ulysses.tracking.history import read_history
from ray_ulysses.tracking.journal import claim_journal
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.tracking.steps import ungroup_steps
from tests.breadth import fast_only
from tests.distributed.harness import run_ranks_to_outcomes
from tests.distributed.run_case import (
    MORE_FILES,
    assert_same_run,
    claim_run,
    make_config,
    make_corpus,
    prepare_attempt,
    run_worker,
    targets_of,
    train,
    train_to_death,
)

FIRST_STOP, BRANCH_STEP, LAST_STEP = 3, 6, 10


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("data")
    return make_corpus(folder / "first"), make_corpus(folder / "more", MORE_FILES)


def before(folder: Path, corpora: tuple[Path, Path], **overrides: Any) -> Config:
    change = {"run__stop_step": BRANCH_STEP, "schedule__horizon_steps": None, "data__rows_per_step": 5}
    change["checkpoint__every_steps"] = 3
    return make_config(folder, corpora[0], **{**change, **overrides})


def after(folder: Path, corpora: tuple[Path, Path], **overrides: Any) -> Config:
    change = {
        "run__stop_step": LAST_STEP, "data__path": None, "data__sources": [{"path": str(path)} for path in corpora],
        "data__context_tokens": 512, "data__rows_per_step": 3,
    }  # fmt: skip
    return before(folder, corpora, **{**change, **overrides})


@pytest.mark.slow
def test_a_branch_repeats_nothing_even_if_it_is_killed_and_loses_its_checkpoint(
    corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    assert train(before(unbroken, corpora, run__stop_step=FIRST_STOP), "first") == ("finished", FIRST_STOP)
    assert train(before(unbroken, corpora), "second") == ("finished", BRANCH_STEP)
    shutil.copytree(unbroken, broken)
    assert train(after(unbroken, corpora), "branch", branch=True) == ("finished", LAST_STEP)
    wanted = read_history(unbroken / "run")
    assert [step.rows for step in wanted.steps] == [
        *((5 * s, 5 * s + 5) for s in range(BRANCH_STEP)),
        *((5 * BRANCH_STEP + 3 * s, 5 * BRANCH_STEP + 3 * s + 3) for s in range(LAST_STEP - BRANCH_STEP)),
    ]
    plan = load_plan(unbroken / "run" / "plan")
    targets = targets_of(plan, range(1, plan.num_steps + 1))
    lengths = [int(length) for path in corpora for length in Corpus.open(path).lengths]
    assert set(targets.values()) == {1} and sum(targets.values()) == sum(lengths) - len(lengths)

    config = after(broken, corpora)
    prepare_attempt(config, "branch", branch=True)
    train_to_death(config, "branch", (1, "step", 8))
    # The checkpoint that the branch left from is torn: the one before is taken, in the middle of the old plan.
    shards = sorted((config.run_dir / "checkpoints/step-00000006").rglob("*.safetensors"))
    shards[0].write_bytes(shards[0].read_bytes()[:-9])
    # Another layout, and the change needs no flag any more: it is the run's own plan now.
    assert train(after(broken, corpora, parallel__sp_size=4), "third") == ("finished", LAST_STEP)
    ours = read_history(config.run_dir)
    assert ours.attempts[-1].first_step == FIRST_STOP + 1
    assert_same_run(ours, wanted)


def test_a_change_without_the_flag_is_refused_and_changes_nothing(corpora: tuple[Path, Path], tmp_path: Path) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (tmp_path / "run/plan").rglob("*") if path.is_file()}

    claim_run(prepare_run(before(tmp_path, corpora), Path("/")))
    content = files()
    with pytest.raises(ConfigError, match=r"data.context_tokens=512: .*--branch"):
        prepare_attempt(after(tmp_path, corpora), "second")
    assert content and content == files()


@pytest.mark.slow
def test_another_learning_rate_applies_from_the_branch_on(corpora: tuple[Path, Path], tmp_path: Path) -> None:
    ours = {"cluster__workers": WORLD, "schedule__kind": "constant", "schedule__warmup_steps": 0}
    assert train(before(tmp_path, corpora, **ours, run__stop_step=2), "one") == ("finished", 2)
    lower = before(tmp_path, corpora, **ours, run__stop_step=3, optimizer__lr=1e-4)
    with pytest.raises(ConfigError, match=r"optimizer.lr=0.0001: .*--branch"):
        prepare_attempt(lower, "two")
    notes = prepare_run(lower, Path("/"), branch=True).notes
    assert "--branch: optimizer.lr changes from 0.0003 to 0.0001 after the newest saved state" in notes
    assert train(lower, "two", branch=True) == ("finished", 3)
    events = tuple(ungroup_steps(read_entries(lower.run_dir)))
    rates = [event.learning_rate for event in events if isinstance(event, StepDone)]
    assert rates == [3e-4, 3e-4, 1e-4]
    recorded = [event.settings["optimizer.lr"] for event in events if isinstance(event, AttemptStarted)]
    assert recorded == [3e-4, 1e-4]
    assert not prepare_run(lower, Path("/")).report.problems, "later commands do not need the flag"


WORLD = 2
CASES = [("loss", 3, "fp32"), ("gradient", 1, "fp32"), ("loss", 2, "bf16")]


def config_for(storage: Path, corpus: Path, **changes: Any) -> Config:
    settings = {
        "cluster__workers": WORLD, "run__stop_step": 8, "checkpoint__every_steps": 1, "checkpoint__keep_last": 99,
        "data__rows_per_step": 2,
    }  # fmt: skip
    return make_config(storage, corpus, **{**settings, **changes})


@pytest.mark.parametrize("case", fast_only(CASES, ("loss", 3, "fp32")), ids=str)
def test_a_bad_row_ends_every_rank_at_its_step_and_is_in_no_checkpoint(
    tmp_path: Path, corpus: Path, case: tuple[str, int, str]
) -> None:
    kind, stage, dtype = case
    # Row 9 of step 5, and on rank 0 alone: the other has it from the agreement.
    config = config_for(tmp_path, corpus, memory__zero_stage=stage, model__dtype=dtype)
    prepare_attempt(config, "one")
    outcomes = run_ranks_to_outcomes(run_worker, WORLD, config, "one", poison=(9, kind), timeout_s=200)
    assert all("BadStepError: step 5: the " in (outcome.error or "") for outcome in outcomes), outcomes
    assert committed_steps(LocalStore(config.run_dir)) == (1, 2, 3, 4)
    history = read_history(config.run_dir)
    assert [step.step for step in history.steps] == [1, 2, 3, 4]
    assert history.status == "failed"


@pytest.mark.slow
def test_a_run_goes_on_without_the_rows_of_a_bad_step(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, ("bisect.py", "cmd.py"))
    config = config_for(tmp_path, corpus, checkpoint__every_steps=2, elastic__bad_steps="skip", run__stop_step=None)
    prepare_attempt(config, "one")
    before = load_plan(config.run_dir / "plan")
    outcomes = run_ranks_to_outcomes(run_worker, WORLD, config, "one", poison=(11, "gradient"), timeout_s=200)
    assert all("elastic.bad_steps=skip" in (one.error or "") for one in outcomes)
    # What the command does next. The newest checkpoint is of step 4, the bad step is 6.
    said = skip_bad_step(resolve_run(config), SystemClock())
    plan = load_plan(config.run_dir / "plan")
    assert said is not None and "rows 10 to 11 " in said and "continues from step 4 with plan " in said
    # Nothing is done twice.
    assert skip_bad_step(resolve_run(config), SystemClock()) is None
    assert train(config, "two") == ("finished", plan.num_steps)
    history = read_history(config.run_dir)
    assert history.status == "finished" and history.step == plan.num_steps == before.num_steps - 1
    assert (history.attempts[1].first_step, history.lost_steps) == (5, 1)
    assert [step.rows[0] for step in history.steps] == list(range(0, 2 * plan.num_steps, 2))
    left_out = targets_of(before, range(6, 7))
    trained = targets_of(plan, range(1, plan.num_steps + 1))
    assert trained + left_out == targets_of(before, range(1, before.num_steps + 1)) and not trained.keys() & left_out
    found = verify_run(config.run_dir)
    assert found.holds, found.findings
    # The same command again: nothing is left to do, and a stop at the end of the first plan is no mistake.
    again = config_for(tmp_path, corpus, run__stop_step=before.num_steps, elastic__bad_steps="skip")
    prepare_run(again, Path("/")).report.raise_problems()


def test_a_run_that_stops_or_has_skipped_enough_leaves_nothing_out(
    tmp_path: Path, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_for(tmp_path, corpus)
    prepare_attempt(config, "one")
    plan = load_plan(config.run_dir / "plan")
    journal = claim_journal(config.run_dir)
    journal.append({"event": "bad_step", "step": 3, "rows": [4, 6], "plan_id": plan.plan_id, "reason": "NaN"})
    skips = {"elastic__bad_steps": "skip"}
    assert skip_bad_step(resolve_run(config), SystemClock()) is None
    for number in range(2):
        time = SystemClock().now() - 100.0 * (1 - number)
        journal.append({"event": "rows_skipped", "step": 0, "rows": [0, 2], "plan_id": "p", "time": time})
    enough = config_for(tmp_path, corpus, **skips, elastic__max_skipped_steps=2)
    assert skip_bad_step(resolve_run(enough), SystemClock()) is None
    assert "elastic.max_skipped_steps=2" in caplog.text
    assert len(load_plan(config.run_dir / "plan").segments) == 1
    window = config_for(tmp_path, corpus, **skips, elastic__max_skipped_steps=2, elastic__failure_window_s=50.0)
    said = skip_bad_step(resolve_run(window), SystemClock())
    assert said is not None and "continues from step 0 with plan " in said and "(skipped step 2 of " in said
    # An attempt that ended for another reason has no rows to leave out.
    claim_journal(config.run_dir)
    assert skip_bad_step(resolve_run(window), SystemClock()) is None
    journal.close()


def test_rows_that_can_not_be_left_out_end_the_run_and_say_why(
    tmp_path: Path, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_for(tmp_path, corpus, elastic__bad_steps="skip", data__epochs=2)
    prepare_attempt(config, "one")
    plan = load_plan(config.run_dir / "plan")
    journal = claim_journal(config.run_dir)
    first = plan.step_rows(plan.num_steps).start
    record = {"event": "bad_step", "step": plan.num_steps, "reason": "NaN", "rows": [first, first + 1]}
    journal.append({**record, "plan_id": plan.plan_id})
    assert skip_bad_step(resolve_run(config), SystemClock()) is None
    assert "they belong to epoch 2, but the newest checkpoint belongs to epoch 1; save more often" in caplog.text
    claim_journal(config.run_dir).append({**record, "plan_id": "another"})
    assert skip_bad_step(resolve_run(config), SystemClock()) is None
    assert f"the rows belong to plan another, but the run's plan is {plan.plan_id}" in caplog.text
    assert len(load_plan(config.run_dir / "plan").segments) == 1
