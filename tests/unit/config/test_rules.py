from __future__ import annotations

from typing import Any

import pytest

from ray_ulysses.config import parse_config
from ray_ulysses.errors import ConfigError, Problem
from tests.unit.config.trees import small_tree


def problems_of(**changes: Any) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config(small_tree(**changes))
    return caught.value.problems


def test_pretrained_weights_require_a_learning_rate() -> None:
    tree = {**small_tree(model__init="pretrained", model__path="m"), "optimizer": None}
    for overrides in ((), ("data.context_tokens=0",)):
        with pytest.raises(ConfigError) as caught:
            parse_config(tree, overrides)
        problem = caught.value.problems[-1]
        assert problem.path == "optimizer.lr" and "1e-5 to 3e-5 is usual" in problem.hint
    assert parse_config(tree, ["model.init=random"]).optimizer.lr == 3e-4
    assert parse_config(tree, ["optimizer.lr=1e-5"]).optimizer.lr == 1e-5


NVME = {"memory__offload_optimizer": "nvme", "memory__nvme_path": "/nvme"}
SECONDARY = {"memory__zero_secondary": "node", "cluster__gpus_per_node": 4, "cluster__workers": 8}
SOURCES = {"data__path": None}
_CLASSES = {"objective__kind": "classification", "data__overlong": "drop"}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"memory__nvme_path": "s3://bucket/swap"}, "memory.nvme_path"),
        ({"run__profile": {"steps": [10, 21]}, "run__stop_step": 20}, "run.profile.steps"),
        ({"run__profile": {"steps": [10], "ranks": [0, 6]}}, "run.profile.ranks"),
        ({"run__profile": {"steps": [11, 10]}}, "run.profile.steps"),
        ({"run__early_stopping": {"patience": 3}}, "run.eval_every_steps"),
        ({"objective__kind": "simpo"}, "data.overlong"),
        ({"objective__kind": "classification"}, "data.overlong"),
        ({"objective__classes": ["a", "b"]}, "objective.classes"),
        ({**_CLASSES, "objective__classes": ["a"]}, "objective.classes"),
        ({**_CLASSES, "optimizer__z_loss": 1e-4}, "optimizer.z_loss"),
        ({**_CLASSES, "model__adapter": {"rank": 2}}, "model.adapter"),
        ({"objective__beta": 0.5}, "objective.beta"),
        ({"objective__kind": "orpo", "data__overlong": "drop", "objective__margin": 0.5}, "objective.margin"),
        ({"objective__kind": "orpo", "data__overlong": "drop", "data__packing": "concat"}, "data.packing"),
        ({"objective__kind": "orpo", "data__overlong": "drop", "optimizer__z_loss": 1e-4}, "optimizer.z_loss"),
        ({"objective__kind": "dpo", "data__overlong": "drop"}, "model.init"),
        ({"objective__kind": "kto", "data__overlong": "drop"}, "model.init"),
        (
            {"objective__kind": "orpo", "data__overlong": "drop", "objective__desirable_weight": 2.0},
            "objective.desirable_weight",
        ),
        (
            {
                "objective__kind": "ipo",
                "data__overlong": "drop",
                "objective__label_smoothing": 0.1,
                "model__init": "pretrained",
                "model__path": "m",
            },
            "objective.label_smoothing",
        ),
        (
            {
                "objective__kind": "dpo",
                "data__overlong": "drop",
                "model__rope": {"rope_theta": 1e6},
                "model__init": "pretrained",
                "model__path": "m",
            },
            "model.rope",
        ),
        ({"model__init": "pretrained"}, "model.path"),
        ({"model__config": None}, "model.config"),
        ({"parallel__sp_size": 4, "model__config": None, "model__path": "m"}, "parallel.sp_size"),
        ({"parallel__sp_size": 6, "parallel__ring_size": 4}, "parallel.ring_size"),
        ({"parallel__sp_size": 24, "cluster__workers": 24, "parallel__ring_size": 2}, "parallel.ring_size"),
        ({"memory__loss_tile": 40, "data__context_tokens": 64, "parallel__sp_size": 2}, "memory.loss_tile"),
        ({"memory__mlp_tile": 65, "data__context_tokens": 64}, "memory.mlp_tile"),
        ({"parallel__sp_size": 3, "parallel__allowed_sp": [1, 2]}, "parallel.sp_size"),
        ({"parallel__allowed_sp": [1, 2, 3], "data__context_tokens": 5}, "data.context_tokens"),
        ({"parallel__sp_size": 6, "parallel__ring_size": 3, "data__context_tokens": 8}, "data.context_tokens"),
        (SOURCES, "data.path"),
        ({"data__sources": [{"path": "a"}]}, "data.path"),
        ({**SOURCES, "data__sources": [{"path": "a", "weight": 1.0}, {"path": "b"}]}, "data.sources"),
        ({**SOURCES, "data__sources": [{"path": "a", "weight": 0.0}]}, "data.sources"),
        ({"schedule__horizon_steps": 100}, "schedule.warmup_steps"),
        ({"schedule__warmup_ratio": 0.1, "schedule__warmup_steps": 5}, "schedule.warmup_ratio"),
        ({"run__eval_every_steps": 5}, "run.eval_every_steps"),
        ({"model__attention": "flash_attn"}, "model.attention"),
        ({"model__attention": "varlen", "cluster__gpus_per_worker": 1}, "model.attention"),
        ({"model__attention": "sdpa", "cluster__gpus_per_worker": 1}, "model.attention"),
        ({"memory__offload_optimizer": "nvme"}, "memory.nvme_path"),
        ({**NVME, "checkpoint__host_buffers": 0}, "checkpoint.host_buffers"),
        ({**NVME, "memory__zero_stage": 2}, "memory.offload_optimizer"),
        (
            {"memory__offload_param": "cpu", "memory__offload_optimizer": "cpu", "memory__zero_stage": 2},
            "memory.offload_param",
        ),
        ({"memory__offload_param": "cpu"}, "memory.offload_param"),
        ({**SECONDARY, "memory__zero_stage": 2}, "memory.zero_secondary"),
        (
            {**SECONDARY, "memory__offload_param": "cpu", "memory__offload_optimizer": "cpu"},
            "memory.zero_secondary",
        ),
        # Three nodes with 4, 4 and 1 workers.
        ({**SECONDARY, "cluster__workers": 9}, "memory.zero_secondary"),
        ({**SECONDARY, "cluster__gpus_per_node": 1}, "memory.zero_secondary"),
        ({"optimizer__kind": "muon", "model__adapter": {}}, "optimizer.kind"),
        ({"optimizer__kind": "muon", "memory__offload_optimizer": "cpu"}, "optimizer.kind"),
        ({**NVME, "optimizer__kind": "muon"}, "optimizer.kind"),
        ({**NVME, "optimizer__kind": "adamw_bf16_moments"}, "optimizer.kind"),
        ({"model__freeze": ["*.embed_tokens.*"], "model__adapter": {}}, "model.freeze"),
        ({"model__base_dtype": "nf4"}, "model.base_dtype"),
        ({"model__base_dtype": "fp8", "model__adapter": {"dora": True}}, "model.base_dtype"),
        (
            {
                "model__base_dtype": "int8",
                "model__adapter": {},
                "model__compile": True,
                "memory__gradient_checkpointing": False,
                "cluster__workers": 1,
            },
            "model.base_dtype",
        ),
        ({"model__compile": True, "memory__zero_stage": 2}, "model.compile"),
        ({"model__compile": "mlp", "memory__mlp_tile": "off"}, "model.compile"),
        ({"model__compile": "mlp", "memory__gradient_checkpointing": False}, "model.compile"),
        ({"model__compile": True, "memory__gradient_checkpointing": False}, "model.compile"),
        (
            {"memory__offload_activations": ["layer_inputs"], "memory__gradient_checkpointing": False},
            "memory.offload_activations",
        ),
        (
            {"memory__offload_activations": ["attention_outputs"], "memory__attention_output": "none"},
            "memory.offload_activations",
        ),
        ({"run__storage_kind": "nfs", "tracking__uri": "sqlite:///runs/mlflow.db"}, "tracking.uri"),
        ({"run__storage": "s3://bucket/runs"}, "tracking.uri"),
        ({"run__storage": "az://container/runs", "tracking__trackers": ["tensorboard"]}, "tracking.trackers"),
        ({"model__resume_from": "mlflow:demo/40", "tracking__enabled": False}, "tracking.trackers"),
    ],
    ids=str,
)
def test_a_broken_rule_names_the_setting_and_the_way_out(changes: dict[str, Any], path: str) -> None:
    (problem,) = problems_of(**changes)
    assert problem.path == path and problem.hint


def test_a_size_that_does_not_divide_is_refused_with_sizes_that_do() -> None:
    (problem,) = problems_of(parallel__sp_size=4, model__config=None, model__path="m")
    assert str(problem) == (
        "parallel.sp_size=4: does not divide cluster.workers=6; "
        "use an sp_size of 1, 2, 3, 6, or 4 or 8 workers (a multiple of 4)"
    )
    (problem,) = problems_of(parallel__sp_size=24, cluster__workers=24, parallel__ring_size=2)
    assert "6 attention heads" in problem.rule and problem.hint.startswith("use 4, 6, 8, 12, 24, or null")


def test_secondary_shards_on_nodes_of_one_gpu_are_refused_with_a_way_out_that_helps() -> None:
    (problem,) = problems_of(**SECONDARY | {"cluster__gpus_per_node": 1})
    assert "cluster.gpus_per_node=1" in problem.rule and "multiple" not in problem.hint
    for hinted in ({"memory__zero_secondary": "none"}, {"cluster__gpus_per_node": 2}):
        parse_config(small_tree(**SECONDARY | {"cluster__gpus_per_node": 1} | hinted))


@pytest.mark.parametrize(
    "changes",
    [
        {"model__config": None, "model__path": "org/model"},
        {"model__init": "pretrained", "model__path": "org/model"},
        # Heads that are not divisible by the ranks, a ring chosen automatically, and the extreme rings.
        {"parallel__sp_size": 4, "cluster__workers": 8},
        {"parallel__sp_size": 12, "cluster__workers": 12, "parallel__allowed_sp": [1, 5, 12]},
        {"parallel__sp_size": 6, "parallel__ring_size": 1},
        {"parallel__sp_size": 6, "parallel__ring_size": 6},
        {"schedule__warmup_steps": 0, "schedule__horizon_steps": 1},
        {"schedule__warmup_ratio": 0.1, "schedule__horizon_steps": 50},
        {"run__eval_every_steps": 5, "data__eval_fraction": 0.01},
        {"run__eval_every_steps": 5, "data__validation": "validation"},
        {"model__attention": "flash_attn", "model__dtype": "bf16", "cluster__gpus_per_worker": 1},
        {"run__storage_kind": "nfs", "tracking__uri": "http://mlflow:5000"},
        {"run__storage": "gs://bucket/runs", "tracking__enabled": False},
        NVME,
        {"memory__offload_optimizer": "cpu", "memory__offload_param": "cpu"},
        SECONDARY,
        {**SECONDARY, "cluster__workers": {"min": 1, "max": 6}},
        {**SECONDARY, "cluster__workers": 3},
        {"model__compile": True, "memory__gradient_checkpointing": False, "cluster__workers": 1},
        {"model__compile": "mlp", "memory__zero_stage": 3},
        {"model__compile": "mlp", "memory__gradient_checkpointing": False, "memory__mlp_tile": 64},
        {"memory__offload_activations": ["layer_inputs"], "memory__attention_output": "none"},
        {"model__resume_from": "mlflow:demo/40"},
        {"model__resume_from": "runs/demo@40", "tracking__enabled": False},
    ],
    ids=str,
)
def test_settings_within_the_rules_are_accepted(changes: dict[str, Any]) -> None:
    assert parse_config(small_tree(**changes))


@pytest.mark.parametrize(
    ("changes", "paths"),
    [
        ({"optimizer__lr": "x", "memory__offload_param": "cpu"}, ["memory.offload_param", "optimizer.lr"]),
        ({"optimizer__lr": "x", "model__compile": True}, ["model.compile", "optimizer.lr"]),
        ({"optimizer__lr": "x", **NVME, "memory__zero_stage": 1}, ["memory.offload_optimizer", "optimizer.lr"]),
        (
            {"cluster__workers": 0, "model__resume_from": "mlflow:demo", "tracking__enabled": False},
            ["cluster.workers", "tracking.trackers"],
        ),
        # sp_size can't be held against a count of workers that is no number.
        (
            {"cluster__workers": "6", "parallel__sp_size": 8, "parallel__ring_size": 1},
            ["cluster.workers", "parallel.ring_size"],
        ),
    ],
    ids=lambda value: " and ".join(value) if isinstance(value, list) else "",
)
def test_rules_are_checked_despite_invalid_settings(changes: dict[str, Any], paths: list[str]) -> None:
    assert sorted(problem.path for problem in problems_of(**changes)) == paths


@pytest.mark.parametrize(("given", "nearest"), [("llma", "llama"), ("Llama", "llama"), ("gemma3_text", None)])
def test_a_model_without_sizes_is_refused_with_the_missing_sizes_and_a_similar_type(
    given: str, nearest: str | None
) -> None:
    (problem,) = problems_of(model__config={"model_type": given})
    assert problem.path == "model.config" and "num_attention_heads" in problem.rule
    assert ("did you mean" in str(problem)) == (nearest is not None)
    assert nearest is None or f"'{nearest}'" in str(problem)
