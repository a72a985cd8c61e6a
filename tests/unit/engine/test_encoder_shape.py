"""What `plan` knows of an encoder, and the models that a run with a masked objective builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ray_ulysses.config import Config
from ray_ulysses.config.objective import ObjectiveSection, Task
from ray_ulysses.engine.model import build_model, check_architecture
from ray_ulysses.engine.model_config import described_config, disabled_noise
from ray_ulysses.errors import UserError
from ray_ulysses.planner.flops import step_flops
from ray_ulysses.run.settings import model_shape
from tests.unit.attention.models import ENCODERS, encoder_model
from tests.unit.planner.runs import make_config

GATED = {"modernbert", "eurobert"}


class Masked(ObjectiveSection):
    """An objective of masked tokens."""

    @property
    def task(self) -> Task:
        return "masked_lm"


def encoder_config(architecture: str, path: Path | None = None, **changes: Any) -> Config:
    described = ENCODERS[architecture](**changes).to_dict()
    source = {"init": "pretrained", "path": str(path), "rope": "unchanged"} if path is not None else {}
    config = make_config({name: value for name, value in described.items() if value is not None})
    model = config.model.model_copy(update={**source, "config": None} if source else {})
    memory = config.memory.model_copy(update={"gradient_checkpointing": False})
    return config.model_copy(update={"objective": Masked(), "model": model, "memory": memory})


@pytest.mark.parametrize("architecture", ENCODERS)
def test_the_planned_sizes_are_those_of_the_modules(architecture: str) -> None:
    shape, model = model_shape(encoder_config(architecture)), encoder_model(architecture)
    assert shape.is_exact
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.tied_embeddings == (architecture != "eurobert")
    assert (shape.is_gated, shape.has_mlp_modules) == (architecture in GATED,) * 2


@pytest.mark.parametrize("architecture", ENCODERS)
def test_the_planned_flops_are_those_that_torch_counts(architecture: str) -> None:
    shape, tokens = model_shape(encoder_config(architecture)), 64
    ids = torch.arange(tokens)[None] % 60
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        encoder_model(architecture)(input_ids=ids)
    counted = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    products = sum(counted.get(f"aten.{name}", 0) for name in ("mm", "addmm"))
    # ESM predicts contacts with a few weights that no token uses.
    assert products == pytest.approx(step_flops(shape, tokens=tokens, sum_squared_lengths=0) / 3, rel=1e-3)
    # Local windows are counted as full attention.
    assert counted["aten.bmm"] == step_flops(shape, tokens=0, sum_squared_lengths=tokens**2) / 3


@pytest.mark.parametrize("architecture", ["roberta", "modernbert"])
def test_random_and_pretrained_weights_are_those_of_the_class_for_masked_tokens(
    architecture: str, tmp_path: Path
) -> None:
    drawn: Any = build_model(encoder_config(architecture))
    assert type(drawn).__name__.endswith("ForMaskedLM")
    assert all(not layer.causal for layer in check_architecture(encoder_config(architecture)).layers.values())
    stored = encoder_model(architecture)
    stored.save_pretrained(tmp_path)
    loaded: Any = build_model(encoder_config(architecture, tmp_path))
    assert type(loaded) is type(stored)
    wanted = dict(stored.named_parameters())
    assert {name for name, _ in loaded.named_parameters()} == wanted.keys()
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, wanted[name].to(parameter.dtype)), name


def test_dropout_is_disabled_in_the_model_and_named_for_the_plan() -> None:
    config = encoder_config("bert", hidden_dropout_prob=0.1)
    assert disabled_noise(config) == {"hidden_dropout_prob": 0.1}
    assert described_config(config).hidden_dropout_prob == 0.0
    assert check_architecture(config).problems == []
    decoder = config.model_copy(update={"objective": ObjectiveSection()})
    assert disabled_noise(decoder) == {}
    with pytest.raises(UserError, match=r"hidden_dropout_prob=0\.1"):
        check_architecture(decoder)
