from __future__ import annotations

from typing import Any

import pytest

from ray_ulysses.config import parse_config
from ray_ulysses.errors import ConfigError
from tests.unit.config.trees import small_tree

_NO_MODEL: dict[str, Any] = {"model__config": None}

_BROKEN: list[tuple[dict[str, Any], str]] = [
    (
        {"memory__nvme_path": "s3://bucket/swap"},
        "memory.nvme_path='s3://bucket/swap': is not a local directory; give a path, such as /mnt/nvme/swap",
    ),
    (
        {"run__profile": {"steps": [10, 21]}, "run__stop_step": 20},
        "run.profile.steps=[10, 21]: run.stop_step=20 ends the run before step 21; name earlier steps, or raise "
        "run.stop_step",
    ),
    (
        {"run__profile": {"steps": [10], "ranks": [0, 6]}, "cluster__workers": 6},
        "run.profile.ranks=[0, 6]: the ranks of 6 workers (cluster.workers) are 0 to 5; name ranks up to 5",
    ),
    (
        {"run__profile": {"steps": [11, 10]}},
        "run.profile.steps=[11, 10]: must be different numbers in ascending order; write it as [10, 11]",
    ),
    (
        {"model__init": "pretrained"},
        "model.path: model.init=pretrained needs the weights of a model; "
        "give a local directory or a hub id, or set model.init=random",
    ),
    (
        _NO_MODEL,
        "model.config: model.init=random needs a model configuration; "
        "write it inline under model.config, or give a model.path that has a config.json",
    ),
    (
        {"parallel__sp_size": 4, "cluster__workers": 6, "model__config": None, "model__path": "m"},
        "parallel.sp_size=4: does not divide cluster.workers=6; "
        "use an sp_size of 1, 2, 3, 6, or 4 or 8 workers (a multiple of 4)",
    ),
    (
        {"parallel__sp_size": 6, "cluster__workers": 4},
        "parallel.sp_size=6: does not divide cluster.workers=4; "
        "use an sp_size of 1, 2, 4, or 6 workers (a multiple of 6)",
    ),
    (
        {"parallel__sp_size": 6, "parallel__ring_size": 4},
        "parallel.ring_size=4: does not divide parallel.sp_size=6; use 1, 2, 3, 6, or null to choose automatically",
    ),
    (
        {"parallel__sp_size": 24, "cluster__workers": 24, "parallel__ring_size": 2},
        "parallel.ring_size=2: leaves 12 of parallel.sp_size=24 ranks to share the model's 6 attention heads; "
        "use 4, 6, 8, 12, 24, or null to choose automatically",
    ),
    (
        {"memory__loss_tile": 40, "data__context_tokens": 64, "parallel__sp_size": 2},
        "memory.loss_tile=40: is longer than a rank's 32 tokens of the longest row "
        "(data.context_tokens=64 / parallel.sp_size=2), so nothing would be tiled; use at most 32, auto or off",
    ),
    (
        {"memory__mlp_tile": 65, "data__context_tokens": 64},
        "memory.mlp_tile=65: is longer than a rank's 64 tokens of the longest row "
        "(data.context_tokens=64 / parallel.sp_size=1), so nothing would be tiled; use at most 64, auto or off",
    ),
    (
        {"parallel__sp_size": 3, "parallel__allowed_sp": [1, 2]},
        "parallel.sp_size=3: is not in parallel.allowed_sp (1, 2); "
        "use one of these, or add it to allowed_sp of a new run",
    ),
    (
        {"parallel__allowed_sp": [1, 2, 3], "data__context_tokens": 5},
        "data.context_tokens=5: is below 6, the multiple that rows are padded to; use 6 or more",
    ),
    (
        {"parallel__sp_size": 12, "cluster__workers": 12, "data__context_tokens": 20},
        "data.context_tokens=20: is below 24, the multiple that rows are padded to; use 24 or more",
    ),
    (
        {"parallel__sp_size": 6, "parallel__ring_size": 3, "data__context_tokens": 8},
        "data.context_tokens=8: is below 12, the multiple that rows are padded to; use 12 or more",
    ),
    (
        {"data__path": None},
        "data.path: no corpus is given; give a directory that `ray-ulysses prepare` wrote, or several under "
        "data.sources",
    ),
    (
        {"data__sources": [{"path": "a"}]},
        "data.path='runs/corpus': data.sources lists corpora too; list every corpus under data.sources, and remove "
        "data.path",
    ),
    (
        {"data__path": None, "data__sources": [{"path": "a", "weight": 1.0}, {"path": "b"}]},
        "data.sources=[1.0, null]: some sources have a weight and some have none; give each one a weight, "
        "or none of them",
    ),
    (
        {"data__path": None, "data__sources": [{"path": "a", "weight": 0.0}, {"path": "b", "weight": 0.0}]},
        "data.sources=[0.0, 0.0]: the weights sum to zero, so no source is used; give at least one source a "
        "weight above 0",
    ),
    (
        {"schedule__horizon_steps": 100},
        "schedule.warmup_steps=100: must be below schedule.horizon_steps=100; use at most 99, or a longer horizon",
    ),
    (
        {"run__eval_every_steps": 5},
        "run.eval_every_steps=5: needs held-out documents, and data.eval_fraction is 0; "
        "set data.eval_fraction to a fraction such as 0.01, or remove eval_every_steps",
    ),
    (
        {"model__attention": "flash_attn"},
        "model.attention='flash_attn': the kernel needs a GPU, and cluster.gpus_per_worker is 0; use auto or sdpa",
    ),
    (
        {"model__attention": "varlen", "cluster__gpus_per_worker": 1},
        "model.attention='varlen': the kernel has no fp32, and model.dtype is fp32; use auto or math",
    ),
    (
        {"model__attention": "cudnn"},
        "model.attention='cudnn': the kernel needs a GPU, and cluster.gpus_per_worker is 0; use auto or sdpa",
    ),
    (
        {"model__attention": "sdpa", "cluster__gpus_per_worker": 1},
        "model.attention='sdpa': the kernel runs on a CPU, and cluster.gpus_per_worker is 1; use auto",
    ),
    (
        {"memory__offload_optimizer": "nvme"},
        "memory.nvme_path: memory.offload_optimizer=nvme needs a directory to swap to; give a directory on a "
        "local NVMe disk of each node, or set memory.offload_optimizer: cpu",
    ),
    (
        {"memory__offload_optimizer": "nvme", "memory__nvme_path": "/nvme", "checkpoint__host_buffers": 0},
        "checkpoint.host_buffers=0: memory.offload_optimizer=nvme has no state in memory to write a checkpoint from; "
        "set checkpoint.host_buffers to 1 or 2",
    ),
    (
        {"memory__offload_optimizer": "nvme", "memory__nvme_path": "/nvme", "memory__zero_stage": 2},
        "memory.offload_optimizer='nvme': memory.zero_stage=2 keeps the optimizer state in memory; "
        "set memory.zero_stage: 3, or memory.offload_optimizer: cpu",
    ),
    (
        {"memory__offload_param": "cpu", "memory__offload_optimizer": "cpu", "memory__zero_stage": 2},
        "memory.offload_param='cpu': needs memory.zero_stage=auto or 3 and memory.offload_optimizer=cpu, and they are "
        "2 and cpu; set both, or memory.offload_param: none",
    ),
    (
        {"memory__offload_param": "cpu"},
        "memory.offload_param='cpu': needs memory.zero_stage=auto or 3 and memory.offload_optimizer=cpu, and they are "
        "auto and none; set both, or memory.offload_param: none",
    ),
    (
        {"model__compile": True, "memory__zero_stage": 2},
        "model.compile=true: needs memory.gradient_checkpointing=false and memory.zero_stage=1 or 2, and they are "
        "true and 2; set both, or model.compile: false",
    ),
    (
        {"model__compile": True, "memory__gradient_checkpointing": False},
        "model.compile=true: needs memory.gradient_checkpointing=false and memory.zero_stage=1 or 2, and they are "
        "false and 3; set both, or model.compile: false",
    ),
    (
        {"memory__offload_activations": ["layer_inputs"], "memory__gradient_checkpointing": False},
        "memory.offload_activations=['layer_inputs']: needs gradient checkpointing, and "
        "memory.gradient_checkpointing is false; set memory.gradient_checkpointing: true, or "
        "memory.offload_activations: []",
    ),
    (
        {"memory__offload_activations": ["layer_inputs", "attention_outputs"], "memory__attention_output": "none"},
        "memory.offload_activations=['layer_inputs', 'attention_outputs']: includes attention_outputs, and "
        "memory.attention_output=none keeps none; set memory.attention_output: kernel, or leave attention_outputs out",
    ),
    (
        {"run__storage_kind": "nfs"},
        "tracking.uri: run.storage_kind=nfs needs an MLflow server, since SQLite is not safe there; "
        "give the server's http:// or https:// address, or leave mlflow out of tracking.trackers",
    ),
    (
        {"run__storage_kind": "nfs", "tracking__uri": "sqlite:///runs/mlflow.db"},
        "tracking.uri='sqlite:///runs/mlflow.db': run.storage_kind=nfs needs an MLflow server, "
        "since SQLite is not safe there; give the server's http:// or https:// address, or leave mlflow out of "
        "tracking.trackers",
    ),
    (
        {"run__storage": "s3://bucket/runs"},
        "tracking.uri: run.storage=s3://bucket/runs needs an MLflow server, since SQLite can't use an object store; "
        "give the server's http:// or https:// address, or leave mlflow out of tracking.trackers",
    ),
    (
        {"run__storage": "az://container/runs", "tracking__trackers": ["tensorboard"]},
        "tracking.trackers=['tensorboard']: TensorBoard appends to its event files, and "
        "run.storage=az://container/runs can't append; leave tensorboard out, or set run.storage to a path that every "
        "node can access",
    ),
    (
        {"model__resume_from": "mlflow:demo/40", "tracking__enabled": False, "tracking__uri": "http://mlflow:5000"},
        "tracking.trackers=[]: model.resume_from='mlflow:demo/40' is looked up in MLflow, which is off; "
        "record the run there too, or name the run's directory or store in model.resume_from",
    ),
]


@pytest.mark.parametrize(("changes", "error"), _BROKEN, ids=[error.partition(":")[0] for _, error in _BROKEN])
def test_a_broken_rule_says_the_setting_the_rule_and_the_hint(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(small_tree(**changes))
    assert [str(problem) for problem in caught.value.problems] == [error]


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"memory__offload_param": "cpu"}, "memory.offload_param"),
        ({"model__compile": True}, "model.compile"),
        (
            {"memory__offload_optimizer": "nvme", "memory__nvme_path": "/nvme", "memory__zero_stage": 1},
            "memory.offload_optimizer",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rule_of_the_zero_stage_is_told_beside_a_setting_that_is_not_usable(
    changes: dict[str, Any], path: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(small_tree(optimizer__lr="x", **changes))
    assert {problem.path for problem in caught.value.problems} == {"optimizer.lr", path}


@pytest.mark.parametrize(
    "changes",
    [
        {"model__config": None, "model__path": "org/model"},
        {"model__init": "pretrained", "model__path": "org/model"},
        {"parallel__sp_size": 6, "parallel__allowed_sp": [1, 6]},
        # Heads that do not divide, a ring that is chosen, and rings that are set.
        {"parallel__sp_size": 4, "cluster__workers": 8},
        {"parallel__sp_size": 12, "cluster__workers": 12, "parallel__allowed_sp": [1, 5, 12]},
        {"parallel__sp_size": 6, "parallel__ring_size": 1},
        {"parallel__sp_size": 6, "parallel__ring_size": 6},
        {"schedule__warmup_steps": 0, "schedule__horizon_steps": 1},
        {"run__eval_every_steps": 5, "data__eval_fraction": 0.01},
        {"model__attention": "flash_attn", "model__dtype": "bf16", "cluster__gpus_per_worker": 1},
        {"run__storage_kind": "nfs", "tracking__uri": "http://mlflow:5000"},
        {"run__storage_kind": "nfs", "tracking__enabled": False},
        {"run__storage": "gs://bucket/runs", "tracking__uri": "https://mlflow"},
        {"run__storage": "file:///runs"},
        {"memory__offload_optimizer": "nvme", "memory__nvme_path": "/nvme"},
        {"memory__offload_optimizer": "cpu", "memory__zero_stage": 1},
        {"model__compile": True, "memory__gradient_checkpointing": False, "cluster__workers": 1},
        {"memory__offload_activations": ["layer_inputs", "attention_outputs"]},
        {"memory__offload_param": "cpu", "memory__offload_optimizer": "cpu"},
        {"memory__offload_activations": ["layer_inputs"], "memory__attention_output": "none"},
        {"run__stop_step": 5, "schedule__horizon_steps": 1000},
        {"model__resume_from": "mlflow:demo/40"},
        {"model__resume_from": "runs/demo@40", "tracking__enabled": False},
    ],
)
def test_what_keeps_the_rules_is_accepted(changes: dict[str, Any]) -> None:
    config = parse_config(small_tree(**changes)).model_dump(mode="json")
    for path, value in changes.items():
        section, name = path.split("__")
        assert config[section][name] == value


def test_mlflow_that_is_off_comes_with_all_other_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(small_tree(model__resume_from="mlflow:demo", tracking__enabled=False, cluster__workers=0))
    assert [problem.path for problem in caught.value.problems] == ["cluster.workers", "tracking.trackers"]


@pytest.mark.parametrize("uri", ["postgresql://me:hunter2@host/db", "postgres://me:hunter2@host/db"])
def test_a_refused_tracking_uri_is_shown_without_its_password(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(small_tree(run__storage_kind="nfs", tracking__uri=uri))
    assert "hunter2" not in str(caught.value)
    assert "://***@host/db'" in str(caught.value)


def test_a_model_configuration_without_sizes_is_refused_by_what_is_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(small_tree(model__config={"model_type": "llama"}))
    (problem,) = caught.value.problems
    assert problem.path == "model.config"
    assert "num_attention_heads" in problem.rule and "did you mean" not in problem.rule


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("llma", "llama"), ("Llama", "llama"), ("mistal", "mistral"), ("llama4", None), ("gemma3_text", None)],
)
def test_a_misspelled_model_type_beside_missing_sizes_is_told_the_nearest_family(
    given: str, nearest: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(small_tree(model__config={"model_type": given}))
    text = str(caught.value)
    assert (f"(did you mean model_type '{nearest}'?)" in text) == (nearest is not None)
    assert ("did you mean" in text) == (nearest is not None)


def test_a_rule_that_needs_a_bad_setting_does_not_report_it_again() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(small_tree(cluster__workers="6", parallel__sp_size=8, parallel__ring_size=1))
    assert [(problem.path, problem.value) for problem in caught.value.problems] == [
        ("cluster.workers", "6"),
        ("parallel.ring_size", 1),
    ]
    assert "attention heads" in caught.value.problems[1].rule
