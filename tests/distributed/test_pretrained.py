"""Weights loaded from a directory: partitioned as they come under ZeRO-3, else whole, and equal to those on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.zero import build_engine, partition_config
from ray_ulysses.errors import UserError
from tests.distributed.harness import run_ranks
from tests.distributed.seam_case import zero_settings
from tests.unit.config.trees import small_tree

pytestmark = pytest.mark.distributed


def loaded(rank: int, world_size: int, path: str, stage: int = 3) -> tuple[dict[str, torch.Tensor], int, str]:
    """Return the gathered weights, the most elements of a parameter that this rank held, and what was refused."""
    import deepspeed

    tree = small_tree(model__init="pretrained", model__path=path, model__config=None)
    settings = zero_settings(stage=stage)
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


def saved(folder: Path, is_tied: bool = False) -> dict[str, torch.Tensor]:
    """Save a model, and return its weights."""
    tree = small_tree()
    tree["model"]["config"]["tie_word_embeddings"] = is_tied
    model: Any = build_model(parse_config(tree))
    model.save_pretrained(folder)
    return {name: one.detach() for name, one in model.named_parameters()}


@pytest.mark.parametrize(("stage", "is_tied"), [(3, False), (3, True), (2, False)], ids=["untied", "tied", "zero2"])
def test_weights_are_loaded_and_partitioned_at_once_under_zero_3(tmp_path: Path, stage: int, is_tied: bool) -> None:
    wanted = saved(tmp_path, is_tied)
    largest = max(one.numel() for one in wanted.values())
    for weights, held, refused in run_ranks(loaded, 2, str(tmp_path), stage):
        # Under ZeRO-3 no parameter is ever whole on a rank.
        assert (refused, held) == ("", 0 if stage == 3 else largest)
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_a_head_of_its_own_is_kept_though_the_configuration_ties_it(tmp_path: Path) -> None:
    # Transformers 5.23 compares the two while it loads: under ZeRO-3 two empty placeholders, and drops the head.
    wanted = saved(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": True}))
    for weights, _, refused in run_ranks(loaded, 2, str(tmp_path)):
        assert refused == ""
        assert weights.keys() == wanted.keys()
        assert torch.equal(weights["lm_head.weight"], wanted["lm_head.weight"])


def test_a_missing_tensor_is_refused_on_every_rank(tmp_path: Path) -> None:
    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for _, _, refused in run_ranks(loaded, 2, str(tmp_path)):
        assert "model.layers.1.mlp.down_proj.weight" in refused
