"""Tests of a start that failed before its first attempt: it reserves no settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.checkpoint.fence import claim_attempt
from ray_ulysses.config import load_config
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.errors import UserError
from ray_ulysses.run.preflight import PreparedRun, check_resume, claim_directory, prepare_run
from tests.distributed.run_case import make_config, make_corpus


@pytest.mark.parametrize("checkpoints", [None, "elsewhere"])
def test_settings_and_plan_of_a_start_without_an_attempt_are_replaced(checkpoints: str | None, tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    elsewhere = {} if checkpoints is None else {"checkpoint__storage": str(tmp_path / checkpoints)}

    def prepared(**changes: object) -> PreparedRun:
        found = prepare_run(make_config(tmp_path / "runs", corpus, **{**elsewhere, **changes}), Path("/"))
        found.report.raise_problems()
        check_resume(found)
        return found

    changes = {"run__seed": 7, "data__context_tokens": 96, "parallel__sp_size": 4, "cluster__workers": 4}
    claim_directory(prepared())
    corrected = prepared(**changes)
    claim_directory(corrected)
    run_dir = corrected.config.run_dir
    assert load_config(run_dir / "config.yaml").run.seed == 7
    assert [one.plan_id for one in load_plan(run_dir / "plan").segments] == [corrected.plan.plan_id]
    # From the first attempt on they are fixed, wherever the new configuration looks for checkpoints.
    claim_attempt(corrected.run.store, 1)
    assert prepared(**changes).plan.plan_id == corrected.plan.plan_id
    for other in ({}, {"checkpoint__storage": str(tmp_path / "third")}):
        with pytest.raises(UserError, match=r"run\.seed"):
            prepared(**other)
