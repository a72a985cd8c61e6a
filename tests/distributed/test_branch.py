"""Edits of a running job's data: longer rows, fewer a step, and files that join, through kills and lost checkpoints."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.config import Config
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.errors import ConfigError
from ray_ulysses.run.preflight import prepare_run
from ray_ulysses.tracking.history import read_history
from tests.distributed.run_case import (
    MORE_FILES,
    assert_same_run,
    claim_run,
    make_config,
    make_corpus,
    prepare_attempt,
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
    """Twice the context, three rows a step on two groups, and a second corpus."""
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
    targets = Counter(
        (piece.document, piece.start + at + 1)
        for step in range(1, plan.num_steps + 1)
        for row in plan.step_rows(step)
        for piece in plan.pieces(row)
        for at in range(piece.num_labels)
    )
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
