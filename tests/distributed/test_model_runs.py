"""Runs of adapters, hybrids, text decoders and every ZeRO stage: resumed at other layouts, and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

from ray_ulysses import SequenceMesh, apply_ulysses, shard_batch, unshard
from ray_ulysses.checkpoint import read_manifest
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_cli
from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model import build_model
from ray_ulysses.errors import UserError
from ray_ulysses.evaluation.model_source import find_model
from ray_ulysses.evaluation.report import ModelRequest
from ray_ulysses.run.preflight import prepare_run
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.events import Evaluated, StepDone
from ray_ulysses.tracking.history import read_history
from tests.apart import losses_apart, relative
from tests.distributed.harness import RankFailure
from tests.distributed.run_case import assert_same_run, claim_run, make_config, train, train_to_death
from tests.unit.attention.multimodal import multimodal_model
from tests.unit.tracking.journals import read_events

STEPS = 4

ADAPTERS: dict[str, dict[str, Any]] = {
    "linear": {"rank": 4},
    "extension": {"rank": 4, "alpha": 4, "rslora": True, "train_embeddings": True, "train_norms": True},
    "head": {"rank": 2, "targets": ["lm_head", "q_proj"], "modules_to_save": ["mlp"]},
}
ROPE = {"rope_type": "linear", "factor": 4.0}
CASES = {
    "extension-tied-fp32": ("extension", True, "fp32", None),
    "linear-untied-fp32-rope": ("linear", False, "fp32", ROPE),
    "head-untied-bf16": ("head", False, "bf16", None),
}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"cluster__workers": 1, "parallel__sp_size": 1, "memory__zero_stage": 2, "memory__offload_optimizer": "cpu"},
    {"cluster__workers": 2, "parallel__sp_size": 2, "memory__zero_stage": 3, "memory__mlp_tile": 40},
    {"cluster__workers": 2, "parallel__sp_size": 1, "memory__zero_stage": 1, "memory__gradient_checkpointing": False},
)


def logits_of(model: Any) -> torch.Tensor:
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    ids = torch.randint(0, 264, (1, 48), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return found


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_tied", "dtype", "rope"), CASES.values(), ids=CASES)
def test_an_adapter_is_trained_resumed_elsewhere_and_loaded_by_peft(
    tmp_path: Path, corpus: Path, kind: str, is_tied: bool, dtype: str, rope: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    described = make_config(tmp_path, corpus).model_dump(mode="json")["model"]["config"]
    tree = make_config(tmp_path, corpus, model__config=described | {"tie_word_embeddings": is_tied}, run__seed=5)
    base: Any = build_model(parse_config(tree.model_dump(mode="json")))
    base.to(torch.bfloat16 if dtype == "bf16" else torch.float32).save_pretrained(tmp_path / "base")
    settings: dict[str, Any] = {
        "model__init": "pretrained", "model__path": str(tmp_path / "base"), "model__config": None,
        "model__dtype": dtype, "model__adapter": ADAPTERS[kind], "model__rope": rope,
        "optimizer__lr": 3e-2, "checkpoint__every_steps": 1,
    }  # fmt: skip

    def trained(folder: str, stop: int, layout: dict[str, Any]) -> Path:
        config = make_config(tmp_path / folder, corpus, run__stop_step=stop, **settings, **layout)
        train(config, f"until-{stop}")
        return config.run_dir

    unbroken = trained("unbroken", STEPS, LAYOUTS[0])
    for stop, layout in zip((1, 3, STEPS), LAYOUTS, strict=True):
        run = trained("changing", stop, layout)
    assert [attempt.first_step for attempt in read_history(run).attempts] == [1, 2, 4]
    wanted, ours = ([step.loss for step in read_history(one).steps] for one in (unbroken, run))
    assert len(ours) == len(wanted) == STEPS
    assert ours[-1] < ours[0] - 0.01
    tolerance = 1e-5 if dtype == "fp32" else 1e-3
    assert relative(ours, wanted) <= tolerance

    assert run_cli(app, ["export", str(run), "--out", str(tmp_path / "adapter")]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert run_cli(app, ["export", str(run), "--merge", "--out", str(tmp_path / "merged")]) == 0, (
        capsys.readouterr().err
    )
    settings_file = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert settings_file["base_model_name_or_path"] == str(tmp_path / "base")

    # The files alone, as anyone loads them.
    options = {"config": AutoConfig.from_pretrained(tmp_path / "adapter")} if rope else {}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto", **options)
    before = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto", **options))
    adapted = logits_of(PeftModel.from_pretrained(loaded, tmp_path / "adapter"))
    said_names: dict[str, Any] = {}
    exec("\n".join(said.split("\n\n")[1].splitlines()), said_names)
    merged = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto"))
    assert apart(adapted, before) > 1e-3, "nothing was learned"
    assert apart(logits_of(said_names["model"]), adapted) <= 1e-6
    evaluated = find_model(ModelRequest(model=run, is_run=True, dtype="fp32")).build()
    assert apart(logits_of(evaluated), adapted) <= (1e-5 if dtype == "fp32" else 3e-2)
    # The merged weights are rounded once more in bf16.
    assert apart(merged, adapted) <= (1e-5 if dtype == "fp32" else 3e-2)


def test_a_run_needs_its_existing_adapter_only_until_a_checkpoint_is_committed(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base: Any = build_model(make_config(tmp_path, corpus, run__seed=5))
    base.save_pretrained(tmp_path / "base")
    options: dict[str, Any] = {"r": 2, "lora_alpha": 3, "target_modules": ["v_proj"], "lora_dropout": 0.1}
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options))
    adapted.save_pretrained(adapter := tmp_path / "adapter")
    settings: dict[str, Any] = {
        "model__init": "pretrained", "model__path": str(tmp_path / "base"), "model__config": None,
        "model__adapter": {"from": str(adapter), "rank": 2, "alpha": 3, "targets": ["v_proj"]}, **LAYOUTS[0],
    }  # fmt: skip

    def prepared(stop: int) -> Any:
        config = make_config(tmp_path, corpus, run__stop_step=stop, **settings)
        return prepare_run(config, Path("/"))

    claim_run(first := prepared(1))
    assert any("lora_dropout=0.1" in note for note in first.report.notes)
    adapter.rename(moved := tmp_path / "moved")
    # An attempt has begun, but nothing is stored yet.
    with pytest.raises(UserError, match=r"model\.adapter\.from="):
        prepared(1)
    moved.rename(adapter)
    train(first.config, "one")
    adapter.rename(moved)
    resumed = prepared(2)
    assert not any("lora_dropout" in note for note in resumed.report.notes)
    assert train(resumed.config, "two") == ("finished", 2)
    run = str(resumed.config.run_dir)
    for command in (
        ["export", run, "--out", str(tmp_path / "exported")],
        ["export", run, "--merge", "--out", str(tmp_path / "merged")],
        ["generate", run, "--tokenizer", "bytes", "--prompt", "def ", "--max-new-tokens", "2", "-q"],
        ["evaluate", run, "--task", "loss", "--data", str(corpus), "--out", str(tmp_path / "evaluation"), "-q"],
    ):
        assert run_cli(app, command) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("base_dtype", ["nf4", "int8"])
def test_a_quantized_base_survives_a_kill_and_another_world_and_another_base_is_refused(
    tmp_path: Path, corpus: Path, base_dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base: Any = build_model(make_config(tmp_path, corpus, run__seed=5))
    base.save_pretrained(tmp_path / "base")
    settings: dict[str, Any] = {
        "model__init": "pretrained", "model__path": str(tmp_path / "base"), "model__config": None,
        "model__adapter": ADAPTERS["linear"], "model__base_dtype": base_dtype, "optimizer__lr": 3e-3,
        "checkpoint__every_steps": 5, "run__stop_step": 40,
    }  # fmt: skip

    unbroken = make_config(tmp_path / "unbroken", corpus, **settings, **LAYOUTS[0])
    train(unbroken, "unbroken")
    first = make_config(tmp_path / "killed", corpus, **settings, **LAYOUTS[1])
    train_to_death(first, "first", (1, "step", 23))
    # Only the trained weights are stored.
    manifest = read_manifest(LocalStore(first.run_dir), committed_steps(LocalStore(first.run_dir))[-1])
    assert len(manifest.state.base_fingerprint) == 16
    assert not [key for key in manifest.state.tensors if ".lora_" not in key]

    # A base with one other weight is refused, and the original is taken at another world, stage and layout.
    weight = base.get_output_embeddings().weight.data
    original = weight.clone()
    weight[3, 5] += 0.1
    base.save_pretrained(tmp_path / "base")
    second = make_config(tmp_path / "killed", corpus, **settings, **LAYOUTS[2])
    with pytest.raises(RankFailure, match=r"model\.path=.*base.*another fingerprint"):
        train(second, "refused")
    weight.copy_(original)
    base.save_pretrained(tmp_path / "base")
    assert train(second, "second") == ("finished", 40)
    ours, wanted = (read_history(one.run_dir) for one in (second, unbroken))
    assert ours.attempts[-1].first_step == 21
    assert ours.steps[-1].loss < ours.steps[0].loss - 0.01
    assert_same_run(ours, wanted)

    for options in (["--out", str(tmp_path / "adapter")], ["--merge", "--out", str(tmp_path / "merged")]):
        assert run_cli(app, ["export", str(second.run_dir), *options]) == 0, capsys.readouterr().err
    evaluated = find_model(ModelRequest(model=second.run_dir, is_run=True, dtype="fp32")).build()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert apart(logits_of(evaluated), logits_of(merged)) <= 1e-5


QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6,
    "linear_value_head_dim": 5, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    # With a router loss, which is one of whole rows whatever the layout.
    "output_router_logits": True, "router_aux_loss_coef": 0.02,
}  # fmt: skip


@pytest.mark.slow
def test_a_hybrid_is_trained_killed_resumed_and_exported(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def config_of(folder: str, workers: int, sp_size: int, zero_stage: int) -> Any:
        settings = {"model__config": QWEN3_NEXT, "checkpoint__every_steps": 2, "run__stop_step": STEPS}
        layout = {"cluster__workers": workers, "parallel__sp_size": sp_size, "parallel__allowed_sp": [1, 2, 4]}
        return make_config(tmp_path / folder, corpus, **settings, **layout, memory__zero_stage=zero_stage)

    unbroken = config_of("unbroken", 1, 1, 2)
    assert train(unbroken) == ("finished", STEPS)
    train_to_death(config_of("changing", 4, 2, 3), "first", (1, "step", 3))
    changed = config_of("changing", 4, 4, 2)
    assert train(changed, "second") == ("finished", STEPS)
    ours = read_history(changed.run_dir)
    assert [attempt.first_step for attempt in ours.attempts] == [1, 3]
    assert_same_run(ours, read_history(unbroken.run_dir))
    # Of each step, as the journal has it at last.
    routers, wanted = (
        {one.step: one.router_loss for one in read_events(config.run_dir) if isinstance(one, StepDone)}
        for config in (changed, unbroken)
    )
    # At least top_k times the coefficient, which is that of equal shares.
    assert len(wanted) == STEPS and all(0.04 <= value < 0.08 for value in wanted.values())
    assert relative([routers[step] for step in wanted], [*wanted.values()]) <= 1e-5

    assert run_cli(app, ["export", str(changed.run_dir)]) == 0, capsys.readouterr().err
    loaded = AutoModelForCausalLM.from_pretrained(changed.run_dir / f"export/step-{STEPS:08d}", dtype="auto")
    assert type(loaded).__name__ == "Qwen3NextForCausalLM"
    # A packed row gives the logits that each document gives alone.
    lengths = (90, 1, 37)
    ids = torch.randint(0, 256, (1, sum(lengths)), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        alone = torch.cat([loaded(input_ids=part, use_cache=False).logits for part in ids.split(lengths, dim=1)], dim=1)
        mesh = SequenceMesh.from_group(None)
        batch = shard_batch(ids, None, lengths, mesh)
        packed = unshard(apply_ulysses(loaded, mesh)(**batch.model_inputs()).logits, batch)
    assert float((packed - alone).norm() / alone.norm()) <= 1e-5


@pytest.mark.slow
def test_a_decoder_is_trained_resumed_and_exported_into_its_whole(tmp_path: Path, corpus: Path) -> None:
    whole = multimodal_model("qwen2_5_vl", vocab_size=264)
    whole.save_pretrained(tmp_path / "base", max_shard_size="50KB")
    model = {"model__init": "pretrained", "model__path": str(tmp_path / "base"), "model__part": "text"}

    def trained(workers: int, sp_size: int, stop: int, session: str) -> tuple[str, int]:
        split = {"cluster__workers": workers, "parallel__sp_size": sp_size, "run__stop_step": stop}
        config = make_config(tmp_path, corpus, model__config=None, checkpoint__every_steps=2, **model, **split)
        return train(config, session)

    assert trained(2, 2, 2, "first") == ("finished", 2)
    assert trained(1, 1, 4, "second") == ("finished", 4)
    history = read_history(tmp_path / "run")
    assert [step.step for step in history.steps] == [1, 2, 3, 4]
    assert [attempt.first_step for attempt in history.attempts] == [1, 3]

    assert run_cli(app, ["export", str(tmp_path / "run")]) == 0
    out = tmp_path / "run/export/step-00000004"
    before = dict(whole.named_parameters())
    for name, parameter in AutoModelForMultimodalLM.from_pretrained(out).named_parameters():
        is_new = name.startswith(("model.language_model.", "lm_head."))
        assert torch.equal(parameter, before[name]) != is_new, name


ANOTHER_LAYOUT = 1e-5
"""Law 2 over these few steps, fp32: layouts add in another order."""


def _run(storage: Path, corpus: Path, session: str, **settings: Any) -> Config:
    # With a z-loss: it too is a sum over tokens, whatever the layout.
    config = make_config(storage, corpus, checkpoint__every_steps=2, optimizer__z_loss=1e-2, **settings)
    train(config, session)
    return config


@pytest.mark.slow
def test_stage_offload_tiles_and_world_may_change_at_every_resume(corpus: Path, tmp_path: Path) -> None:
    wanted = read_history(_run(tmp_path / "unbroken", corpus, "unbroken", run__stop_step=8).run_dir)
    changing = tmp_path / "changing"
    _run(changing, corpus, "first", run__stop_step=2, memory__zero_stage=1, cluster__workers=2)
    _run(changing, corpus, "second", run__stop_step=4, memory__zero_stage=2, parallel__sp_size=1, memory__loss_tile=50)
    _run(changing, corpus, "third", run__stop_step=6, memory__zero_stage=1, memory__offload_optimizer="cpu")
    lean = {
        "memory__loss_tile": 30, "memory__mlp_tile": 40, "memory__offload_optimizer": "cpu",
        "memory__offload_param": "cpu",
    }  # fmt: skip
    _run(changing, corpus, "fourth", run__stop_step=7, cluster__workers=2, **lean)
    ours = read_history(_run(changing, corpus, "fifth", run__stop_step=8, memory__zero_stage=2).run_dir)
    assert_same_run(ours, wanted)
    assert ours.lost_steps == 0


@pytest.mark.slow
def test_compiled_layers_train_evaluate_and_go_on_as_others_do(corpus: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "memory__gradient_checkpointing": False, "memory__zero_stage": 2, "cluster__workers": 2,
        "run__eval_every_steps": 2, "data__eval_fraction": 0.3,
    }  # fmt: skip
    wanted = read_history(_run(tmp_path / "eager", corpus, "eager", run__stop_step=4, **settings).run_dir)
    compiled = settings | {"model__compile": True}
    _run(tmp_path / "compiled", corpus, "first", run__stop_step=2, **compiled)
    ours = read_history(_run(tmp_path / "compiled", corpus, "second", run__stop_step=4, **compiled).run_dir)
    assert 0 < losses_apart(ours, wanted) <= ANOTHER_LAYOUT, "the same bits: nothing was compiled"
    assert [attempt.first_step for attempt in ours.attempts] == [1, 3]
    losses = [
        [event.loss for event in read_events(tmp_path / name / "run") if isinstance(event, Evaluated)]
        for name in ("compiled", "eager")
    ]
    assert len(losses[0]) == 3 and losses[0] == pytest.approx(losses[1], rel=ANOTHER_LAYOUT)


def losses(folder: Path, corpus: Path, workers: int, zero_stage: int, mlp_tile: int | str) -> list[tuple[float, float]]:
    config = make_config(
        folder, corpus, run__stop_step=2, cluster__workers=workers, parallel__sp_size=1, data__rows_per_step=2,
        checkpoint__every_steps=None, memory__zero_stage=zero_stage, memory__mlp_tile=mlp_tile, optimizer__lr=3e-3,
    )  # fmt: skip
    train(config)
    # With the norm: the optimizer hides a gradient that is scaled.
    return [(step.loss, step.grad_norm) for step in read_history(config.run_dir).steps]


def test_a_filler_changes_no_gradient_in_any_stage(corpus: Path, tmp_path: Path) -> None:
    """Two rows on three ranks: one trains a filler of a few tokens, while the others' MLPs go over tiles."""
    wanted = losses(tmp_path / "alone", corpus, 1, 1, "off")
    for stage in (1, 2, 3):
        found = losses(tmp_path / str(stage), corpus, 3, stage, 33)
        for one, other in zip(found, wanted, strict=True):
            assert one == pytest.approx(other, rel=1e-6), f"ZeRO-{stage}"
