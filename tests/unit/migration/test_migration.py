"""Conversion of other tools' files: every option has a fate, and the fate is what the written file says."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
from accelerate.commands.launch import launch_command_parser
from deepspeed.runtime import constants, precision_config
from deepspeed.runtime.zero import config as zero_config
from deepspeed.runtime.zero import offload_config
from torch import nn, optim
from transformers import Seq2SeqTrainingArguments, get_scheduler

from ray_ulysses.cli import app, run
from ray_ulysses.config import Config, parse_config
from ray_ulysses.config.resume import setting
from ray_ulysses.config.yaml_text import parse_yaml
from ray_ulysses.engine.optimizer import learning_rate
from ray_ulysses.errors import ConfigError, UserError
from ray_ulysses.migration.tables import TOOLS, load_table, owner_of
from ray_ulysses.migration.write import convert

GIVEN = {"--model": "org/model", "--context": 4096, "--gpus": 8}
# The least file of a tool by which it is recognized.
LEAST: dict[str, dict[str, Any]] = {
    "transformers": {"adam_beta2": 0.99},
    "trl": {"padding_free": False},
    "deepspeed": {"train_micro_batch_size_per_gpu": 1},
    "accelerate": {"compute_environment": "LOCAL_MACHINE"},
    "axolotl": {"base_model": "org/model"},
    "llamafactory": {"stage": "sft"},
    "ms_swift": {"target_modules": "all-linear"},
    "torchtitan": {"model": {"flavor": "8B"}},
}
# A value of each fact, the setting that it decides, and the setting's value.
FACTS: dict[str, tuple[Any, str, Any]] = {
    "model": ("org/other", "model.path", "org/other"),
    "output_dir": ("out/first", "run.name", "first"),
    "run_name": ("my run", "run.name", "my-run"),
    "seed": (7, "run.seed", 7),
    "max_steps": (500, "run.stop_step", 500),
    "horizon": (500, "schedule.horizon_steps", None),
    "log_steps": (5, "run.log_every_steps", 5),
    "eval_fraction": (0.1, "data.eval_fraction", 0.1),
    "validation": ("a,b", "data.validation", ["validation-1", "validation-2"]),
    "eval_steps": (50, "run.eval_every_steps", 50),
    "eval_strategy": ("no", "run.eval_every_steps", None),
    "keep_best": (True, "checkpoint.keep_best", 1),
    "patience": (3, "run.early_stopping.patience", 3),
    "from_scratch": (True, "model.init", "random"),
    "pretrained": (True, "model.init", "pretrained"),
    "bf16": (True, "model.dtype", "bf16"),
    "fp32": (True, "model.dtype", "fp32"),
    "precision": ("bf16", "model.dtype", "bf16"),
    "adapter": ("lora", "model.adapter.targets", "all-linear"),
    "lora_rank": (4, "model.adapter.rank", 4),
    "lora_alpha": (64, "model.adapter.alpha", 64),
    "lora_targets": ("q_proj,v_proj", "model.adapter.targets", ["q_proj", "v_proj"]),
    "lora_all_linear": (True, "model.adapter.targets", "all-linear"),
    "lora_modules": (["lm_head"], "model.adapter.modules_to_save", ["lm_head"]),
    "lora_dropout": (0.1, "model.adapter.rank", None),
    "rslora": (True, "model.adapter.rslora", True),
    "dora": (True, "model.adapter.dora", True),
    "lora_parameters": (["mlp.experts.down_proj"], "model.adapter.targets", ["q_proj", "mlp.experts.down_proj"]),
    "lora_ranks": ({"q_proj": 32}, "model.adapter.ranks", {"q_proj": 32}),
    "lora_alphas": ({"layers.0.q_proj": 64}, "model.adapter.alphas", {"layers.0.q_proj": 64}),
    "adapter_from": (["hub/adapter"], "model.adapter.from", "hub/adapter"),
    "four_bit": (True, "model.base_dtype", "nf4"),
    "eight_bit": (True, "model.base_dtype", "int8"),
    "quant_bits": (8, "model.base_dtype", "int8"),
    "freeze": (["model.embed_tokens", "model.layers.0."], "model.freeze", ["model.embed_tokens*", "model.layers.0.*"]),
    "use_muon": (True, "optimizer.kind", "muon"),
    "dataset": ("a,b", "data.prepare.sources", ["a", "b"]),
    "dataset_split": ("train", "data.prepare.split", "train"),
    "dataset_type": ("alpaca", "data.prepare.input_field", "input"),
    "text_field": ("body", "data.prepare.text_field", "body"),
    "messages_field": ("turns", "data.prepare.messages_field", "turns"),
    "tools_field": ("tools", "data.prepare.tools_field", "tools"),
    "prompt_field": ("ask", "data.prepare.prompt_field", "ask"),
    "completion_field": ("say", "data.prepare.completion_field", "say"),
    "chat_template": ("t.jinja", "data.prepare.chat_template", "t.jinja"),
    "context": (1024, "data.context_tokens", 1024),
    "packing": (True, "data.packing", "best_fit"),
    "packing_strategy": ("wrapped", "data.packing", "concat"),
    "overlong": ("truncate", "data.overlong", "truncate"),
    "epochs": (2.5, "data.epochs", 3),
    "micro_batch": (4, "data.rows_per_step", None),
    "accumulation": (4, "data.rows_per_step", None),
    "global_batch": (48, "data.rows_per_step", 48),
    "world": (16, "cluster.workers", 16),
    "sp": (4, "parallel.sp_size", 4),
    "tp": (2, "parallel.sp_size", 1),
    "pp": (2, "parallel.sp_size", 1),
    "optimizer": ("AdamW", "optimizer.lr", None),
    "lr": ("3e-5", "optimizer.lr", 3e-5),
    "betas": ([0.8, 0.9], "optimizer.betas", [0.8, 0.9]),
    "beta1": (0.8, "optimizer.betas", None),
    "beta2": (0.9, "optimizer.betas", None),
    "eps": (1e-6, "optimizer.eps", 1e-6),
    "weight_decay": (0.2, "optimizer.weight_decay", 0.2),
    "max_grad_norm": (0, "optimizer.max_grad_norm", None),
    "router_loss": (0.01, "optimizer.router_loss", 0.01),
    "schedule": ("constant", "schedule.kind", "constant"),
    "min_lr": (1e-6, "schedule.min_lr_ratio", None),
    "min_lr_ratio": (0.3, "schedule.min_lr_ratio", 0.3),
    "decay_steps": (10, "schedule.decay_steps", 10),
    "decay_ratio": (0.1, "schedule.decay_steps", None),
    "decay_shape": ("linear", "schedule.kind", "wsd"),
    "warmup_steps": (20, "schedule.warmup_steps", 20),
    "warmup_ratio": (0.1, "schedule.warmup_ratio", None),
    "checkpointing": (True, "memory.gradient_checkpointing", True),
    "offload_activations": (True, "memory.offload_activations", ["layer_inputs"]),
    "zero_stage": (2, "memory.zero_stage", 2),
    "offload_optimizer": ("cpu", "memory.offload_optimizer", "cpu"),
    "offload_param": ("cpu", "memory.offload_param", "cpu"),
    "nvme_path": ("/nvme", "memory.nvme_path", "/nvme"),
    "save_steps": (70, "checkpoint.every_steps", 70),
    "save_strategy": ("no", "checkpoint.every_steps", None),
    "save_limit": (2, "checkpoint.keep_last", 2),
    "trackers": (["wandb"], "tracking.trackers", ["wandb"]),
    "use_mlflow": (True, "tracking.trackers", ["mlflow"]),
    "use_wandb": (True, "tracking.trackers", ["wandb"]),
    "use_tensorboard": (True, "tracking.trackers", ["tensorboard"]),
    "experiment": ("mine", "tracking.experiment", None),
    "mlflow_uri": ("http://host:5000", "tracking.uri", None),
    "cpu": (True, "cluster.gpus_per_worker", 0),
}  # fmt: skip
# Facts that take effect only beside others.
BESIDE: dict[str, dict[str, Any]] = {
    **{name: {"adapter": "lora"} for name in FACTS if name.startswith("lora_") or name in ("rslora", "dora")},
    **{name: {"adapter": "lora"} for name in ("adapter_from", "four_bit", "eight_bit", "quant_bits")},
    **{name: {"adapter": "full"} for name in ("freeze", "use_muon")},
    "lora_parameters": {"adapter": "lora", "lora_targets": ["q_proj"]},
    **{name: {"eval_fraction": 0.1} for name in ("eval_steps", "eval_strategy", "keep_best", "patience")},
    "packing_strategy": {"packing": True},
    "nvme_path": {"offload_optimizer": "nvme"},
    "min_lr_ratio": {"schedule": "cosine"},
    "decay_steps": {"schedule": "warmup_stable_decay"},
    "decay_shape": {"schedule": "warmup_stable_decay"},
}  # fmt: skip


def tree_of(options: dict[str, Any]) -> dict[str, Any]:
    """Nest dotted options."""
    tree: dict[str, Any] = {}
    for option, value in options.items():
        node = tree
        *sections, name = option.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    both = {name: merged(first[name], second[name]) for name in first if isinstance(second.get(name), dict)}
    return first | second | both


def converted(folder: Path, *trees: dict[str, Any], given: dict[str, Any] = GIVEN) -> tuple[str, Config]:
    """Return the text for files with this content, and its configuration."""
    paths = [folder / f"foreign{number}.json" for number, _ in enumerate(trees)]
    for path, tree in zip(paths, trees, strict=True):
        path.write_text(json.dumps(tree))
    text = convert(paths, given)
    return text, parse_config(parse_yaml(text, "converted")[0])


@pytest.mark.parametrize("tool", ["trl", "axolotl", "llamafactory", "ms_swift", "torchtitan"])
def test_every_option_of_a_stored_reference_has_a_fate(tool: str) -> None:
    references = yaml.safe_load(Path(__file__).with_name("references.yaml").read_text())[tool]
    table = load_table(tool)
    assert table.version == str(references["version"])
    assert [name for name in references["options"].split() if table.entry(name) is None] == []


def installed_options() -> list[tuple[str, str]]:
    """Return the options of the tools that are installed, from the classes that define them."""
    arguments = [("transformers", field.name) for field in fields(Seq2SeqTrainingArguments) if field.init]
    cluster = [("accelerate", field.name) for kind in (ClusterConfig, SageMakerConfig) for field in fields(kind)]
    flags = [flag for action in launch_command_parser()._actions for flag in action.option_strings]
    launch = [("accelerate", flag[2:]) for flag in flags if re.fullmatch(r"--[a-z_0-9]+", flag) and flag != "--help"]
    # The file keeps the options of a plugin in a section of their own.
    sections = ("deepspeed", "fsdp", "fp8", "megatron_lm", "parallelism", "dynamo", "mpirun")
    launch = [
        (tool, next((f"{section}_config.{name}" for section in sections if name.startswith(f"{section}_")), name))
        for tool, name in launch
    ]
    parts = {
        "zero_optimization": zero_config.DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "fp16": precision_config.DeepSpeedFP16Config,
        "bf16": precision_config.DeepSpeedBF16Config,
    }
    engine = [
        ("deepspeed", f"{section}.{info.alias or name}")
        for section, kind in parts.items()
        for name, info in kind.model_fields.items()
    ]
    top = (
        "TRAIN_BATCH_SIZE",
        "TRAIN_MICRO_BATCH_SIZE_PER_GPU",
        "GRADIENT_ACCUMULATION_STEPS",
        "OPTIMIZER",
        "SCHEDULER",
    )
    top += (
        "ZERO_ALLOW_UNTESTED_OPTIMIZER",
        "ZERO_FORCE_DS_CPU_OPTIMIZER",
        "STEPS_PER_PRINT",
        "BFLOAT16",
        "FP16",
        "AMP",
    )
    top += ("TORCH_AUTOCAST", "GRADIENT_CLIPPING", "GRAPH_HARVESTING", "COMMUNICATION_DATA_TYPE", "PRESCALE_GRADIENTS")
    top += ("SEQ_PARALLEL_COMMUNICATION_DATA_TYPE", "GRADIENT_PREDIVIDE_FACTOR", "GRADIENT_ALLREDUCE_OP", "DUMP_STATE")
    top += ("DISABLE_ALLGATHER", "DISABLE_PYTHON_GC", "WALL_CLOCK_BREAKDOWN", "MEMORY_BREAKDOWN", "EIGENVALUE", "SEED")
    top += (
        "PROGRESSIVE_LAYER_DROP",
        "CHECKPOINT",
        "DATA_TYPES",
        "DATALOADER_DROP_LAST",
        "LOG_LEVEL",
        "SPARSE_GRADIENTS",
    )
    top += ("USE_DATA_BEFORE_EXPERT_PARALLEL", "MANAGED_GRADIENT_ACCUMULATION", "DDP_BFLOAT16")
    engine += [("deepspeed", getattr(constants, name)) for name in top if hasattr(constants, name)]
    return [*arguments, *cluster, *launch, *engine]


def test_every_option_of_an_installed_tool_has_a_fate() -> None:
    options = installed_options()
    assert len(options) > 250
    assert [(tool, name) for tool, name in options if load_table(tool).entry(name) is None] == []


@pytest.mark.parametrize("tool", TOOLS)
def test_a_carried_option_decides_its_setting(tool: str, tmp_path: Path) -> None:
    carried = {name: entry.text for name, entry in load_table(tool).entries.items() if entry.kind == "carried"}
    inherited = load_table("transformers").entries if tool != "transformers" else {}
    wrong = []
    for option, fact in carried.items():
        if option in inherited and inherited[option].text == fact:
            continue
        value, path, expected = FACTS[fact]
        options = {option: value}
        for other, needed in BESIDE.get(fact, {}).items():
            names = [name for name, text in carried.items() if text == other]
            options |= dict.fromkeys(names[:1], needed)
            expected = expected if names else None
        given = {name: one for name, one in GIVEN.items() if fact != name.replace("gpus", "world").strip("-")}
        text, config = converted(tmp_path, merged(LEAST[tool], tree_of(options)), given=given)
        section, name, *rest = path.split(".")
        found: Any = setting(config, f"{section}.{name}")
        for part in rest if expected is not None else ():
            found = found[part]
        # Named beside a line, or among the options that are left out.
        if not re.search(rf"(?<![\w.]){re.escape(option)}(?!\w)", text) or expected not in (None, found):
            wrong.append((option, value, found))
    assert wrong == []


@pytest.mark.parametrize("tool", TOOLS)
def test_an_option_without_a_setting_is_named_with_its_reason(tool: str, tmp_path: Path) -> None:
    table = load_table(tool)
    left = {option: entry.text for option, entry in table.entries.items() if entry.kind == "left out"}
    # A section is left out as a whole where it has no options of its own in the table.
    left = {option: why for option, why in left.items() if not any(o.startswith(f"{option}.") for o in table.entries)}
    tree = merged(LEAST[tool], tree_of({**dict.fromkeys(left, 1), "no_such_option": 1}))
    text, _ = converted(tmp_path, tree)
    block = text.partition("# Left out:\n")[2].splitlines()
    lost = [option for option, why in left.items() if not any(option in one and one.endswith(why) for one in block)]
    assert lost == []
    assert any(f"no_such_option: 1: unknown: {table.tool}" in line for line in block)


@pytest.mark.parametrize("tool", TOOLS)
def test_an_option_that_changes_the_result_is_refused_unless_it_is_off(tool: str, tmp_path: Path) -> None:
    table = load_table(tool)
    refused = {option: entry for option, entry in table.entries.items() if entry.kind == "refused"}
    # Options of a section that is refused as a whole do not reach the file beside it.
    refused = {option: entry for option, entry in refused.items() if option != "compute_environment"}
    on = merged(LEAST[tool], tree_of(dict.fromkeys(refused, "something")))
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, on)
    assert {problem.path: problem.rule for problem in error.value.problems} == {
        option: entry.text for option, entry in refused.items()
    }
    off = {option: next(iter(entry.harmless), False) for option, entry in refused.items()}
    text, _ = converted(tmp_path, merged(LEAST[tool], tree_of(off)))
    assert all(option in text for option in refused)


@pytest.mark.parametrize(
    ("tool", "wrong"),
    [
        ("axolotl", {"lora_rank_pattern": {"layers.[01].q_proj": 32}}),
        ("axolotl", {"lora_alpha_pattern": "q_proj"}),
        ("ms_swift", {"target_parameters": ["mlp.experts.down_proj"]}),  # with all linear layers
        ("llamafactory", {"adapter_name_or_path": "one,other"}),
        ("llamafactory", {"quantization_bit": 3}),
        ("llamafactory", {"quantization_type": "fp4"}),
        ("ms_swift", {"quant_method": "hqq"}),
    ],
)
def test_settings_of_adapters_without_an_exact_equivalent_are_refused(
    tool: str, wrong: dict[str, Any], tmp_path: Path
) -> None:
    kind = {"axolotl": "adapter", "ms_swift": "tuner_type", "llamafactory": "finetuning_type"}[tool]
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, LEAST[tool] | {kind: "lora"} | wrong)
    assert {problem.path for problem in error.value.problems} == {*wrong}


@pytest.mark.parametrize(
    ("tool", "given", "option", "named"),
    [
        ("axolotl", {"load_in_4bit": True}, "load_in_4bit", "only adapters"),
        ("llamafactory", {"finetuning_type": "full", "quantization_bit": 4}, "quantization_bit", "only adapters"),
        ("llamafactory", {"finetuning_type": "freeze"}, "finetuning_type", "model.freeze"),
        ("axolotl", {"unfrozen_parameters": ["lm_head"]}, "unfrozen_parameters", "model.freeze"),
        ("axolotl", {"embedding_lr": 1e-5}, "embedding_lr", "optimizer.groups"),
        ("ms_swift", {"tuner_type": "full", "freeze_llm": True}, "freeze_llm", "model.freeze"),
        ("axolotl", {"optimizer": "muon"}, "optimizer", "optimizer.kind: muon"),
        ("deepspeed", {"optimizer": {"type": "Muon"}}, "optimizer.type", "optimizer.kind: muon"),
    ],
)
def test_an_option_with_another_meaning_is_refused_with_the_name_of_the_setting(
    tool: str, given: dict[str, Any], option: str, named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, LEAST[tool] | given)
    (problem,) = error.value.problems
    assert problem.path == option and named in str(problem)


def test_qlora_is_an_adapter_of_a_base_of_four_bits(tmp_path: Path) -> None:
    for own in ({"adapter": "qlora"}, {"adapter": "qlora", "load_in_4bit": True}):
        _, config = converted(tmp_path, LEAST["axolotl"] | own)
        assert config.model.base_dtype == "nf4" and config.model.adapter is not None
    _, config = converted(tmp_path, LEAST["axolotl"] | {"adapter": "lora", "load_in_4bit": False})
    assert config.model.base_dtype == "bf16"


def test_every_line_has_a_comment_and_every_value_that_is_wrong_is_reported_at_once(tmp_path: Path) -> None:
    text, _ = converted(tmp_path, LEAST["axolotl"])
    settings = [line for line in text.splitlines() if line.startswith("  ") and not line.rstrip().endswith(":")]
    assert len(settings) > 20 and all(re.search(r"  # \S", line) for line in settings)
    wrong = {
        "optimizer": "muon",
        "lr_scheduler": "inverse_sqrt",
        "adapter": "ia3",
        "learning_rate": "fast",
        "bf16": "x",
    }
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, LEAST["axolotl"] | wrong, given={"--model": "m"})
    assert {problem.path for problem in error.value.problems} == {*wrong, "--gpus"}


def test_sets_of_evaluation_become_corpora_that_the_file_says_how_to_prepare(tmp_path: Path) -> None:
    chats = {"path": "chats", "type": "chat_template", "field_messages": "turns", "split": "dev", "name": "all"}
    sets: dict[str, Any] = {"test_datasets": [{"path": "books", "split": "test"}, {"path": "code.jsonl"}, chats]}
    sets["eval_steps"] = 20
    sets["datasets"] = [{"path": "all", "type": "completion", "split": "train"}]
    text, config = converted(tmp_path, LEAST["axolotl"] | sets)
    assert config.data.validation == ("validation-1", "validation-2", "validation-3")
    assert config.run.eval_every_steps == 20
    line = next(line for line in text.splitlines() if line.startswith("  validation:"))
    options = {
        "books": "--text-field text --split test",
        "code.jsonl": "--text-field text",
        "chats": "--messages-field turns --split dev",
    }
    commands = " && ".join(
        f"ray-ulysses prepare {name} --tokenizer org/model --out validation-{number} {own}"
        for number, (name, own) in enumerate(options.items(), 1)
    )
    assert line.endswith(f"  # edit: {commands} (from test_datasets)")
    assert "test_datasets.name: 'all'" in text.partition("# Left out:")[2]


def test_several_files_state_one_run_and_the_first_that_states_a_fact_decides(tmp_path: Path) -> None:
    training = LEAST["trl"] | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    launch = LEAST["accelerate"] | {"num_processes": 4, "deepspeed_config": {"gradient_accumulation_steps": 2}}
    engine = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "train_batch_size": "auto"}
    text, config = converted(tmp_path, training, launch, engine, given={"--model": "org/model"})
    assert config.data.rows_per_step == 2 * 8 * 4
    assert (config.memory.zero_stage, config.memory.offload_optimizer) == (3, "cpu")
    assert "deepspeed_config.gradient_accumulation_steps: 2: gradient_accumulation_steps decides" in text


def test_a_secret_is_not_written_and_text_stays_in_its_comment(tmp_path: Path) -> None:
    tree = LEAST["trl"] | {"hub_token": "hf_secret", "eos_token": "<end>\nrun: {name: x}", "bad\nname: {": "x"}
    text, config = converted(tmp_path, tree)
    assert "hf_secret" not in text and "<end>" in text
    assert config.run.name == "foreign0"


@pytest.mark.parametrize(
    ("content", "tool"),
    [
        ({"base_model": "x", "sequence_len": 8}, "Axolotl"),
        ({"model_name_or_path": "x", "stage": "sft", "cutoff_len": 8}, "LLaMA-Factory"),
        ({"model": "x", "tuner_type": "lora", "template": "qwen"}, "ms-swift"),
        ({"model_name_or_path": "x", "max_length": 8, "packing": True}, "TRL"),
        ({"learning_rate": 1e-4, "num_train_epochs": 1}, "Transformers"),
        ({"distributed_type": "FSDP", "num_processes": 8}, "Accelerate"),
        ({"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}, "DeepSpeed"),
        ({"training": {"seq_len": 8}, "optimizer": {"lr": 1e-4}, "checkpoint": {"interval": 5}}, "torchtitan"),
    ],
)
def test_a_file_is_recognized_by_its_options(content: dict[str, Any], tool: str) -> None:
    owner = owner_of(content)
    assert owner is not None and owner.tool == tool


@pytest.mark.parametrize(
    ("name", "content", "tool"),
    [
        ("a.yaml", "base_model: x\nsequence_len: 8\nlearning_rate: 2e-5\n", "Axolotl"),
        ("a.toml", '[model]\nflavor = "8B"\n[training]\nsteps = 500\n', "torchtitan"),
        ("a.json", '{\n\t"train_batch_size": 8\n}', "DeepSpeed"),
    ],
)
def test_plan_and_train_say_whose_a_file_is_and_name_the_command(
    name: str, content: str, tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(content)
    for command in ("plan", "train"):
        assert run(app, [command, str(path)]) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert f"is a configuration of {tool}" in error and "ray-ulysses init --from" in error
    out = tmp_path / "ours.yaml"
    options = ["--model", "org/model", "--context", "4096", "--gpus", "8"]
    assert run(app, ["init", "--from", str(path), "--out", str(out), *options]) == 0
    assert parse_config(parse_yaml(out.read_text(), "ours")[0]).cluster.workers.max == 8


@pytest.mark.parametrize("content", ["run: {name: a}\nlearning_rate: 1e-4\n", "words", "[1, 2]", "{", "other: 1\n"])
def test_a_file_of_no_tool_is_not_converted(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(content)
    assert owner_of(parse_yaml(content, "a")[0]) is None
    with pytest.raises(UserError):
        convert([path], GIVEN)


def rates(config: Config, steps: int) -> list[float]:
    own = config.schedule
    return [
        learning_rate(
            step,
            base_rate=config.optimizer.lr,
            warmup_steps=own.warmup_steps,
            horizon_steps=own.horizon_steps or steps,
            min_ratio=own.min_lr_ratio,
            kind=own.kind,
            decay_steps=own.decay_steps,
        )
        for step in range(1, steps + 1)
    ]


@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        ("linear", {}),
        ("constant", {}),
        ("warmup_stable_decay", {"num_decay_steps": 12, "decay_type": "linear", "min_lr_ratio": 0.1}),
    ],
)
def test_a_schedule_without_warm_up_has_the_rates_of_the_trainer(
    schedule: str, more: dict[str, Any], tmp_path: Path
) -> None:
    tree = LEAST["trl"] | {"lr_scheduler_type": schedule, "max_steps": 40, "learning_rate": 1e-3}
    _, config = converted(tmp_path, tree | {"lr_scheduler_kwargs": more})
    optimizer = optim.AdamW([nn.Parameter()], lr=1e-3)
    theirs = get_scheduler(
        schedule, optimizer, num_warmup_steps=0, num_training_steps=40, scheduler_specific_kwargs=more
    )
    found = []
    for _ in range(40):
        found.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert rates(config, 40) == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize("ratio", [None, 0.25])
def test_a_schedule_of_torchtitan_keeps_its_rates(ratio: float | None, tmp_path: Path) -> None:
    own = {"warmup_steps": 10, "min_lr_factor": 0.1} | ({} if ratio is None else {"decay_ratio": ratio})
    tree = {"model": {"flavor": "8B"}, "training": {"steps": 40}, "optimizer": {"lr": 1.0}, "lr_scheduler": own}
    _, config = converted(tmp_path, tree)
    decay = 30 if ratio is None else 10
    # torchtitan/components/lr_scheduler.py, linear_warmup_stable_decay: steps from 0, and one stable step more.
    theirs = [
        (step + 1) / 10
        if step < 10
        else 1.0
        if step < 41 - decay
        else 0.1 + 0.9 * (1 - (step + 1 - (41 - decay)) / decay)
        for step in range(40)
    ]
    assert rates(config, 40) == pytest.approx(theirs, rel=1e-12)


PAGE = (Path(__file__).parents[3] / "docs/migrating.md").read_text(encoding="utf-8")


def test_the_page_names_options_that_decide_the_setting_beside_them() -> None:
    header, _, *rows = (line for line in PAGE.splitlines() if line.startswith("|") and line.count("|") == 8)
    columns = ["trl" if "TRL" in name else name.strip().lower().replace("-", "_") for name in header.split("|")[2:-1]]
    columns = [{"llama_factory": "llamafactory"}.get(name, name) for name in columns]
    cells = [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in rows]
    named = [(path, tool, option) for path, *own in cells for tool, option in zip(columns, own, strict=True) if option]
    assert len(named) > 60
    entries = [(path, load_table(tool).entries[option]) for path, tool, option in named]
    assert [path for path, entry in entries if entry.kind != "carried" or FACTS[entry.text][1] != path] == []


def test_the_recipe_of_the_page_is_converted_as_it_says(tmp_path: Path) -> None:
    recipe = yaml.safe_load(PAGE.partition("```yaml\n")[2].partition("```")[0])
    _, config = converted(tmp_path, recipe, given={"--gpus": 1})
    assert (config.data.rows_per_step, config.data.packing, config.data.overlong) == (8, "none", "truncate")
    assert (config.optimizer.betas, config.optimizer.eps, config.optimizer.weight_decay) == ((0.9, 0.999), 1e-8, 0.0)
    assert rates(config, 200) == pytest.approx([2e-5 * (200 - step) / 200 for step in range(200)], rel=1e-12)
