from __future__ import annotations

from typing import Any

import pytest

from ray_ulysses.config import Config, parse_config, resume_conflicts, resume_fingerprint
from ray_ulysses.config.resume import BRANCHABLE, FIXED, resume_settings, settings_that_differ
from tests.unit.config.trees import small_tree


def conflicts(old: Config, new: Config, **options: bool) -> list[str]:
    return [problem.path for problem in resume_conflicts(old, new, **options)]


def test_workers_storage_length_and_logging_may_change() -> None:
    changes = {
        "cluster__workers": 3, "parallel__sp_size": 3, "run__stop_step": 50, "run__log_every_steps": 10,
        "run__storage": "/elsewhere", "tracking__tags": {"a": "b"}, "data__engine": "local",
        "memory__offload_optimizer": "cpu", "memory__zero_secondary": "node", "checkpoint__every_steps": None,
    }  # fmt: skip
    old, new = parse_config(small_tree()), parse_config(small_tree(**changes))
    assert conflicts(old, new) == []
    assert resume_fingerprint(old) == resume_fingerprint(new)


def test_a_conflict_gives_both_values_the_reason_and_the_way_out() -> None:
    old, new = parse_config(small_tree()), parse_config(small_tree(run__seed=7))
    (problem,) = resume_conflicts(old, new)
    assert str(problem) == (
        "run.seed=7: run 'first' was started with 0, and a change would alter the initial weights and the data order; "
        "restore run.seed to resume, or choose another run.name to start a new run"
    )
    assert resume_fingerprint(old) != resume_fingerprint(new)


def test_the_data_may_change_in_a_branch() -> None:
    overrides = ["data.path=", "data.sources=[{path: a, weight: 1}, {path: b, weight: 2}]", "data.context_tokens=2048"]
    old, new = parse_config(small_tree()), parse_config(small_tree(), overrides)
    assert conflicts(old, new) == ["data.path", "data.sources", "data.context_tokens"]
    assert "--branch" in str(resume_conflicts(old, new)[0])
    assert conflicts(old, new, branch=True) == []
    assert resume_fingerprint(old) == resume_fingerprint(new), "checkpoints record the plan id separately"
    other_seed = parse_config(small_tree(), [*overrides, "run.seed=3"])
    assert conflicts(old, other_seed) == ["data.path", "data.sources", "data.context_tokens", "run.seed"]
    assert conflicts(old, other_seed, branch=True) == ["run.seed"]


def test_the_learning_rate_may_change_in_a_branch() -> None:
    old = parse_config(small_tree())
    new = parse_config(small_tree(optimizer__lr=1e-4, schedule__horizon_steps=900))
    assert conflicts(old, new) == ["optimizer.lr", "schedule.horizon_steps"]
    assert "`ray-ulysses train --branch`" in str(resume_conflicts(old, new)[0])
    assert conflicts(old, new, branch=True) == []
    assert resume_fingerprint(old) == resume_fingerprint(new), "the run's own states load"
    assert settings_that_differ(resume_settings(old), new).startswith("optimizer.lr is 0.0001 and was 0.0003; schedule")


_OTHER: dict[str, dict[str, Any]] = {
    "run": {"name": "second", "seed": 1, "plugins": ["package.module:Plugin"]},
    "model": {
        "path": "other", "init": "pretrained", "config": None, "part": "text", "rope": {"rope_theta": 1e6},
        "adapter": {"rank": 4}, "dtype": "bf16", "base_dtype": "nf4",
        "freeze": ["*.embed_tokens.*"],
    },
    "data": {
        "path": "other", "context_tokens": 2048, "rows_per_step": 8, "epochs": 2, "packing": "concat",
        "overlong": "drop", "balance_steps": 2, "eval_fraction": 0.1, "eval_rows": 4, "row_order": "costliest",
        "validation": ["held-out"],
    },
    "parallel": {"allowed_sp": [1, 2]},
    "optimizer": {
        "lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.0, "max_grad_norm": None, "z_loss": 1e-4,
        "router_loss": 1e-3, "router_bias_rate": 1e-3, "kind": "adamw_bf16_moments", "groups": [{"match": ["*"]}],
    },
    "schedule": {"kind": "linear", "decay_steps": 7, "warmup_steps": 10, "warmup_ratio": 0.1, "horizon_steps": 1000,
                 "min_lr_ratio": 0.0},
    "tracking": {"experiment": "other"},
    "objective": {"kind": "orpo", "beta": 0.5, "margin": 0.5, "label_smoothing": 0.1, "sft_weight": 1.0,
                  "mask_fraction": 0.3, "mask_unit": "word", "mask_replacement": "mask", "classes": ["a", "b"],
                  "desirable_weight": 2.0, "undesirable_weight": 0.5, "pooling": "last", "temperature": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("path", [*FIXED, *(path for path in BRANCHABLE if path != "data.sources")])
def test_each_fixed_setting_alone_is_a_conflict(path: str) -> None:
    required = {"schedule.decay_steps": {"schedule__kind": "wsd"}, "model.base_dtype": {"model__adapter": {}}}
    of_pairs = {"data__overlong": "drop", "objective__kind": "simpo"}
    required |= {f"objective.{name}": of_pairs for name in _OTHER["objective"]}
    required["objective.classes"] = {"data__overlong": "drop", "objective__kind": "classification"}
    of_texts = {"data__overlong": "drop", "objective__kind": "embedding"}
    required |= {f"objective.{name}": of_texts for name in ("pooling", "temperature")}
    required |= {f"objective.{name}": {"objective__kind": "mlm"} for name in _OTHER["objective"] if "mask" in name}
    of_answers = {"data__overlong": "drop", "objective__kind": "kto", "model__init": "pretrained"}
    required |= {f"objective.{name}": of_answers for name in ("desirable_weight", "undesirable_weight")}
    kind = required.get(path, {})
    old, changed = parse_config(small_tree(model__path="m", **kind)), small_tree(model__path="m", **kind)
    section, _, name = path.partition(".")
    changed.setdefault(section, {})[name] = _OTHER[section][name]
    assert conflicts(old, parse_config(changed)) == [path]
