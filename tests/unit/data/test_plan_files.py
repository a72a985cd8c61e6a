from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ray_ulysses.data.plan import Plan, PlanSettings, build_plan
from ray_ulysses.data.plan_files import has_plan, load_plan, save_plan
from ray_ulysses.errors import UserError

SETTINGS = PlanSettings(
    seed=3, context_tokens=50, pad_multiple=8, rows_per_step=6, epochs=2, eval_fraction=0.1, eval_rows=3
)


def plan_of(seed: int = 3) -> Plan:
    lengths = np.random.default_rng(0).integers(1, 160, 100).astype(np.int64)
    return build_plan(lengths, "f", replace(SETTINGS, seed=seed))


def test_a_plan_is_the_same_after_a_round_trip(tmp_path: Path) -> None:
    plan = plan_of()
    save_plan(plan, tmp_path)
    loaded = load_plan(tmp_path)
    assert loaded.plan_id == plan.plan_id
    assert loaded.settings == plan.settings
    assert (loaded.num_documents, loaded.held_out_documents, loaded.skipped_documents) == (
        plan.num_documents,
        plan.held_out_documents,
        plan.skipped_documents,
    )
    for ours, theirs in ((plan.train, loaded.train), (plan.evaluation, loaded.evaluation)):
        for name in type(ours).__slots__:
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name


def test_a_plan_without_evaluation_is_the_same_after_a_round_trip(tmp_path: Path) -> None:
    plan = build_plan(np.array([20, 30]), "f", replace(SETTINGS, eval_fraction=0.0))
    save_plan(plan, tmp_path)
    assert load_plan(tmp_path).evaluation.num_rows == 0


def test_saving_again_changes_nothing_and_another_plan_is_refused(tmp_path: Path) -> None:
    save_plan(plan_of(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    save_plan(plan_of(), tmp_path)
    with pytest.raises(UserError, match=r"already holds plan .*; nothing was written over"):
        save_plan(plan_of(seed=4), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_plan_whose_rows_were_changed_is_refused(tmp_path: Path) -> None:
    save_plan(plan_of(seed=4), tmp_path / "other")
    save_plan(plan_of(), tmp_path / "plan")
    (tmp_path / "plan" / "train.parquet").write_bytes((tmp_path / "other" / "train.parquet").read_bytes())
    with pytest.raises(UserError, match=f"names plan {plan_of().plan_id}, but its files give .*: they were changed"):
        load_plan(tmp_path / "plan")


def test_a_plan_whose_settings_were_changed_is_refused(tmp_path: Path) -> None:
    save_plan(plan_of(), tmp_path)
    header = json.loads((tmp_path / "plan.json").read_text())
    header["settings"]["rows_per_step"] = 12
    (tmp_path / "plan.json").write_text(json.dumps(header))
    with pytest.raises(UserError, match=r"they were changed since the plan was made"):
        load_plan(tmp_path)


def test_a_plan_of_another_version_is_refused(tmp_path: Path) -> None:
    save_plan(plan_of(), tmp_path)
    header = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**header, "planner_version": 99}))
    with pytest.raises(UserError, match=r"made by planner version 99, this is version 1"):
        load_plan(tmp_path)


def test_a_missing_plan_is_said(tmp_path: Path) -> None:
    assert not has_plan(tmp_path)
    with pytest.raises(UserError, match=r"holds no plan"):
        load_plan(tmp_path)


def test_a_truncated_plan_names_its_file(tmp_path: Path) -> None:
    save_plan(plan_of(), tmp_path)
    assert has_plan(tmp_path)
    path = tmp_path / "train.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"train\.parquet: the plan can't be read"):
        load_plan(tmp_path)


def test_rows_lie_in_plain_parquet(tmp_path: Path) -> None:
    plan = plan_of()
    save_plan(plan, tmp_path)
    table = pq.read_table(tmp_path / "train.parquet")
    assert table.column_names == ["row", "epoch", "document", "start", "length", "has_next_label"]
    assert table.num_rows == plan.train.num_pieces
