"""Edits of a running job's data: longer rows, fewer a step, and files that join, through kills and lost checkpoints."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.config import Config
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.errors import ConfigError, UserError
from ray_ulysses.run.preflight import check_resume, prepare_run
from ray_ulysses.tracking.history import RunHistory, read_history
from tests.distributed.harness import run_ranks, run_ranks_to_outcomes
from tests.distributed.run_case import MORE_FILES, make_config, make_corpus, prepare_attempt, run_worker

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
TIMEOUT_S = 200.0
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
    """Twice the context, three rows a step on two groups, and a second corpus."""
    change = {
        "run__stop_step": LAST_STEP,
        "data__path": None,
        "data__sources": [{"path": str(path)} for path in corpora],
        "data__context_tokens": 512,
        "data__rows_per_step": 3,
    }
    return before(folder, corpora, **{**change, **overrides})


def run(config: Config, session: str, branch: bool = False, **options: Any) -> tuple[str, int]:
    prepare_attempt(config, session, branch)
    ends = run_ranks(run_worker, config.cluster.workers.max, config, session, timeout_s=TIMEOUT_S, **options)
    end: tuple[str, int] = ends[0]
    return end


@pytest.fixture(scope="module")
def at_first_stop(corpora: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage of a run that has stopped there; tests go on with a copy of it."""
    folder = tmp_path_factory.mktemp("at-first-stop")
    assert run(before(folder, corpora, run__stop_step=FIRST_STOP), "first") == ("finished", FIRST_STOP)
    return folder


@pytest.fixture(scope="module")
def at_branch_step(corpora: tuple[Path, Path], at_first_stop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage of the same run, some steps later."""
    folder = tmp_path_factory.mktemp("at-branch")
    shutil.copytree(at_first_stop, folder, dirs_exist_ok=True)
    assert run(before(folder, corpora), "second") == ("finished", BRANCH_STEP)
    return folder


@pytest.fixture(scope="module")
def unbroken(corpora: tuple[Path, Path], at_branch_step: Path, tmp_path_factory: pytest.TempPathFactory) -> RunHistory:
    folder = tmp_path_factory.mktemp("unbroken")
    shutil.copytree(at_branch_step, folder, dirs_exist_ok=True)
    assert run(after(folder, corpora), "branch", branch=True) == ("finished", LAST_STEP)
    return read_history(folder / "run")


@pytest.mark.slow
def test_a_branch_goes_on_where_the_run_stood_and_repeats_nothing(
    corpora: tuple[Path, Path], at_first_stop: Path, unbroken: RunHistory, tmp_path: Path
) -> None:
    assert [step.rows for step in unbroken.steps[:BRANCH_STEP]] == [(5 * s, 5 * s + 5) for s in range(BRANCH_STEP)]
    assert [step.rows for step in unbroken.steps[BRANCH_STEP:]] == [
        (5 * BRANCH_STEP + 3 * s, 5 * BRANCH_STEP + 3 * s + 3) for s in range(LAST_STEP - BRANCH_STEP)
    ]
    shutil.copytree(at_first_stop, tmp_path, dirs_exist_ok=True)
    prepare_attempt(after(tmp_path, corpora), "branch", branch=True)
    plan = load_plan(tmp_path / "run" / "plan")
    targets = Counter(
        (piece.document, piece.start + at + 1)
        for step in range(1, plan.num_steps + 1)
        for row in plan.step_rows(step)
        for piece in plan.pieces(row)
        for at in range(piece.num_labels)
    )
    assert set(targets.values()) == {1}
    lengths = [length for path in corpora for length in _lengths(path)]
    assert sum(targets.values()) == sum(lengths) - len(lengths)


@pytest.mark.slow
def test_a_branch_that_is_killed_and_loses_its_checkpoint_is_the_one_that_was_not(
    corpora: tuple[Path, Path], at_branch_step: Path, unbroken: RunHistory, tmp_path: Path
) -> None:
    shutil.copytree(at_branch_step, tmp_path, dirs_exist_ok=True)
    config = after(tmp_path, corpora)
    prepare_attempt(config, "second", branch=True)
    outcomes = run_ranks_to_outcomes(run_worker, 4, config, "second", kill=(1, "step", 8), timeout_s=TIMEOUT_S)
    assert not any(outcome.ok for outcome in outcomes)
    # The checkpoint that the branch left from is torn: the one before is taken, in the middle of the old plan.
    shards = sorted((config.run_dir / "checkpoints/step-00000006").rglob("*.safetensors"))
    shards[0].write_bytes(shards[0].read_bytes()[:-9])
    # Another layout, and the change needs no flag any more: it is the run's own plan now.
    assert run(after(tmp_path, corpora, parallel__sp_size=4), "third") == ("finished", LAST_STEP)
    ours = read_history(config.run_dir)
    assert ours.attempts[-1].first_step == FIRST_STOP + 1
    assert [step.rows for step in ours.steps] == [step.rows for step in unbroken.steps]
    assert [step.tokens for step in ours.steps] == [step.tokens for step in unbroken.steps]
    assert ours.data_digest == unbroken.data_digest
    for mine, theirs in zip(ours.steps, unbroken.steps, strict=True):
        assert abs(mine.loss - theirs.loss) / theirs.loss <= 1e-5


def test_a_change_without_the_flag_is_refused_and_changes_nothing(
    corpora: tuple[Path, Path], at_first_stop: Path, tmp_path: Path
) -> None:
    shutil.copytree(at_first_stop, tmp_path, dirs_exist_ok=True)
    content = {path: path.read_bytes() for path in sorted((tmp_path / "run" / "plan").rglob("*")) if path.is_file()}
    with pytest.raises(ConfigError, match=r"data.context_tokens=512: .*make it a branch of the run with .*--branch"):
        prepare_attempt(after(tmp_path, corpora), "second")
    assert content == {
        path: path.read_bytes() for path in sorted((tmp_path / "run" / "plan").rglob("*")) if path.is_file()
    }


def test_a_branch_planned_while_the_run_went_on_is_refused(
    corpora: tuple[Path, Path], at_first_stop: Path, tmp_path: Path
) -> None:
    shutil.copytree(at_first_stop, tmp_path, dirs_exist_ok=True)
    prepared = prepare_run(after(tmp_path, corpora), Path("/"), branch=True)
    check_resume(prepared)
    # Another command trains meanwhile, and commits its last step.
    run(before(tmp_path, corpora), "second")
    with pytest.raises(UserError, match=r"has continued to step 6 while its branch from step 3 was planned; stop it"):
        check_resume(prepared)


def _lengths(path: Path) -> list[int]:
    from ray_ulysses.data.corpus.corpus import Corpus

    return [int(length) for length in Corpus.open(path).lengths]
