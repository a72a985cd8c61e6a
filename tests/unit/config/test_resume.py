from __future__ import annotations

import itertools
from typing import Any

import pytest

from ray_ulysses.config import parse_config, resume_conflicts, resume_fingerprint
from ray_ulysses.config.resume import BRANCHABLE, FIXED, FREE
from tests.unit.config.trees import small_tree


def test_the_same_configuration_has_no_conflict() -> None:
    assert resume_conflicts(parse_config(small_tree()), parse_config(small_tree())) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"cluster__workers": 3, "parallel__sp_size": 3},
        {"run__stop_step": 50, "run__log_every_steps": 10},
        {"run__storage": "/elsewhere", "tracking__tags": {"a": "b"}},
        {"data__engine": "local", "memory__offload_optimizer": "cpu", "checkpoint__every_steps": None},
    ],
)
def test_workers_stop_step_and_logging_may_change(changes: dict[str, Any]) -> None:
    old, new = parse_config(small_tree()), parse_config(small_tree(**changes))
    assert resume_conflicts(old, new) == ()
    assert resume_fingerprint(old) == resume_fingerprint(new)


def test_the_reference_does_not_promise_that_a_run_without_its_checkpoints_begins_anew() -> None:
    assert "the run restarts" not in FREE["checkpoint.storage"]
    assert "does not restart from step 0" in FREE["checkpoint.storage"]


def test_a_conflict_names_the_field_the_runs_value_and_how_to_start_a_new_run() -> None:
    old, new = parse_config(small_tree()), parse_config(small_tree(run__seed=7))
    (problem,) = resume_conflicts(old, new)
    assert str(problem) == (
        "run.seed=7: run 'first' was started with 0, and it determines the weights and the order of the data; "
        "restore run.seed to resume, or choose another run.name to start a new run"
    )
    assert resume_fingerprint(old) != resume_fingerprint(new)


def test_all_conflicts_come_at_once_with_model_data_and_seed_among_them() -> None:
    overrides = ["run.seed=1", "model.config.num_hidden_layers=1", "data.path=other", "optimizer.lr=1e-3"]
    conflicts = resume_conflicts(parse_config(small_tree()), parse_config(small_tree(), overrides))
    assert [problem.path for problem in conflicts] == [
        "data.path",
        "run.seed",
        "model.config",
        "optimizer.lr",
    ]


def test_the_data_may_change_where_a_branch_is_asked_for() -> None:
    overrides = ["data.path=", "data.sources=[{path: a, weight: 1}, {path: b, weight: 2}]", "data.context_tokens=2048"]
    old, new = parse_config(small_tree()), parse_config(small_tree(), overrides)
    assert [problem.path for problem in resume_conflicts(old, new)] == [
        "data.path",
        "data.sources",
        "data.context_tokens",
    ]
    assert "make it a branch of the run with `ray-ulysses train --branch`" in str(resume_conflicts(old, new)[0])
    assert resume_conflicts(old, new, branch=True) == ()
    assert resume_fingerprint(old) == resume_fingerprint(new), "the plan's own id stands in every checkpoint"
    assert [problem.path for problem in resume_conflicts(old, parse_config(small_tree(run__seed=3)), branch=True)] == [
        "run.seed"
    ]


_OTHER: dict[str, Any] = {
    "run.name": "second",
    "run.seed": 1,
    "model.path": "other",
    "model.init": "pretrained",
    "model.config": None,
    "model.part": "text",
    "schedule.kind": "linear",
    "schedule.decay_steps": 7,
    "data.row_order": "costliest",
    "model.rope": {"rope_theta": 1e6},
    "model.adapter": {"rank": 4},
    "model.dtype": "bf16",
    "data.path": "other",
    "data.context_tokens": 2048,
    "data.rows_per_step": 8,
    "data.epochs": 2,
    "data.packing": "concat",
    "data.overlong": "drop",
    "data.balance_steps": 2,
    "data.eval_fraction": 0.1,
    "data.eval_rows": 4,
    "parallel.allowed_sp": [1, 2],
    "optimizer.lr": 1e-3,
    "optimizer.betas": [0.9, 0.99],
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.0,
    "optimizer.max_grad_norm": None,
    "optimizer.z_loss": 1e-4,
    "optimizer.router_loss": 1e-3,
    "schedule.warmup_steps": 10,
    "schedule.horizon_steps": 1000,
    "schedule.min_lr_ratio": 0.0,
    "tracking.experiment": "other",
}


@pytest.mark.parametrize("path", [*FIXED, *(path for path in BRANCHABLE if path != "data.sources")])
def test_each_fixed_setting_conflicts_by_itself(path: str) -> None:
    # The decay of a schedule that has one.
    kind = {"schedule__kind": "wsd"} if path == "schedule.decay_steps" else {}
    old, changed = parse_config(small_tree(model__path="m", **kind)), small_tree(model__path="m", **kind)
    section, _, name = path.partition(".")
    changed.setdefault(section, {})[name] = _OTHER[path]
    assert [problem.path for problem in resume_conflicts(old, parse_config(changed))] == [path]


def test_the_fingerprint_tells_fixed_settings_apart() -> None:
    seeds = [resume_fingerprint(parse_config(small_tree(run__seed=seed))) for seed in range(3)]
    assert all(one != other for one, other in itertools.combinations(seeds, 2))
