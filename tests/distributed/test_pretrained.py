"""Weights loaded from a directory: partitioned as they come under ZeRO-3, else whole, and equal to those on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.zero import ZeroSettings, build_engine, partition_config
from ray_ulysses.errors import UserError
from tests.distributed.harness import run_ranks
from tests.unit.config.trees import small_tree

pytestmark = pytest.mark.distributed
SETTINGS = ZeroSettings(
    dtype="fp32",
    accumulation=1,
    max_grad_norm=None,
    learning_rate=1e-3,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
    partition_everything=True,
)


def loaded(
    rank: int, world_size: int, path: str, stage: Literal[1, 2, 3] = 3
) -> tuple[dict[str, torch.Tensor], int, str]:
    import deepspeed

    tree = small_tree(model__init="pretrained", model__path=path, model__config=None)
    settings = replace(SETTINGS, stage=stage)
    try:
        model: Any = build_model(parse_config(tree), partition=partition_config(settings))
    except UserError as error:
        return {}, 0, str(error)
    held = max(parameter.numel() for parameter in model.parameters())
    engine = build_engine(model, settings)
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            weights[name] = parameter.detach().clone()
    engine.destroy()
    return weights, held, ""


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_weights_are_partitioned_while_they_are_loaded(tmp_path: Path, tied: bool) -> None:
    tree = small_tree()
    tree["model"]["config"]["tie_word_embeddings"] = tied
    model = build_model(parse_config(tree))
    model.save_pretrained(tmp_path)
    wanted = dict(model.named_parameters())
    for weights, held, refused in run_ranks(loaded, 2, str(tmp_path)):
        assert refused == ""
        assert held == 0, "a parameter was whole on a rank"
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], wanted[name].detach()) for name in wanted)


def test_a_head_of_its_own_is_kept_though_the_configuration_ties_it(tmp_path: Path) -> None:
    # Transformers 5.23 compares the two while it loads: under ZeRO-3 two empty placeholders, and drops the head.
    model = build_model(parse_config(small_tree()))
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": True}))
    wanted = dict(model.named_parameters())
    for weights, _, refused in run_ranks(loaded, 2, str(tmp_path)):
        assert refused == ""
        assert weights.keys() == wanted.keys()
        assert torch.equal(weights["lm_head.weight"], wanted["lm_head.weight"].detach())


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_that_keep_weights_whole_load_them_whole(tmp_path: Path, stage: Literal[1, 2]) -> None:
    model = build_model(parse_config(small_tree()))
    model.save_pretrained(tmp_path)
    wanted = dict(model.named_parameters())
    largest = max(parameter.numel() for parameter in wanted.values())
    for weights, held, refused in run_ranks(loaded, 2, str(tmp_path), stage):
        assert (refused, held) == ("", largest)
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], wanted[name].detach()) for name in wanted)


def test_a_missing_tensor_is_refused_on_every_rank(tmp_path: Path) -> None:
    build_model(parse_config(small_tree())).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for _, _, refused in run_ranks(loaded, 2, str(tmp_path)):
        assert "1 of the model's tensors are not in its weights (model.layers.1.mlp.down_proj.weight)" in refused
