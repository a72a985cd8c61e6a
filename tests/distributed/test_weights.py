"""Weights are partitioned while they are read, and neither read nor drawn where a state replaces them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.initialization import TORCH_INIT_FUNCTIONS

from ray_ulysses.checkpoint.manifest import read_manifest
from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.config.objective import ObjectiveSection
from ray_ulysses.engine import model as model_module
from ray_ulysses.engine import stored_weights
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.zero import build_engine, partition_config
from ray_ulysses.engine.zero_state import state_source
from ray_ulysses.errors import UserError
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.history import read_history
from ray_ulysses.trainer import loop
from tests.breadth import fast_cases
from tests.distributed.harness import RankFailure, run_calls
from tests.distributed.run_case import make_config, run_worker, train
from tests.distributed.seam_case import zero_settings
from tests.unit.attention.models import encoder_model
from tests.unit.config.trees import small_tree
from tests.unit.engine.test_encoder_shape import Masked


def loaded(
    rank: int, world_size: int, path: str, stage: int, objective: ObjectiveSection
) -> tuple[dict[str, torch.Tensor], int, str]:
    """Return the gathered weights, the most elements of a parameter that this rank held, and what was refused."""
    import deepspeed

    tree = small_tree(model__init="pretrained", model__path=path, model__config=None)
    config, settings = parse_config(tree).model_copy(update={"objective": objective}), zero_settings(stage=stage)
    try:
        model: Any = build_model(config, partition=partition_config(settings))
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


MISSING = "model.layers.1.mlp.down_proj.weight"
Loads = dict[str, tuple[dict[str, torch.Tensor], list[Any]]]


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> Loads:
    """By case the weights that were saved, and what each rank made of them."""
    folder, wanted = tmp_path_factory.mktemp("saved"), {}
    stages = {"untied": 3, "tied": 3, "zero2": 2, "own head": 3, "missing": 3}
    for name in stages:
        tree = small_tree()
        tree["model"]["config"]["tie_word_embeddings"] = name == "tied"
        model: Any = build_model(parse_config(tree))
        model.save_pretrained(folder / name)
        wanted[name] = {key: one.detach() for key, one in model.named_parameters()}
    config, tensors = folder / "own head/config.json", load_file(folder / "missing/model.safetensors")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    del tensors[MISSING]
    save_file(tensors, folder / "missing/model.safetensors", {"format": "pt"})
    calls: dict[str, Any] = {
        name: (loaded, str(folder / name), stage, ObjectiveSection()) for name, stage in stages.items()
    }
    # Its output head is tied in weight and bias.
    masked = encoder_model("roberta")
    masked.save_pretrained(folder / "masked")
    wanted["masked"] = {key: one.detach() for key, one in masked.named_parameters()}
    calls["masked"] = (loaded, str(folder / "masked"), 3, Masked())
    ranks = run_calls(2, calls)
    return {name: (wanted[name], ranks[name]) for name in calls}


@pytest.mark.parametrize("name", ["untied", "tied", "zero2", "masked"])
def test_weights_are_loaded_and_partitioned_at_once_under_zero_3(loads: Loads, name: str) -> None:
    wanted, ranks = loads[name]
    largest = max(one.numel() for one in wanted.values())
    for weights, held, refused in ranks:
        # Under ZeRO-3 no parameter is ever whole on a rank.
        assert (refused, held) == ("", largest if name == "zero2" else 0)
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_a_head_of_its_own_is_kept_though_the_configuration_ties_it(loads: Loads) -> None:
    # Transformers 5.23 compares the two while it loads: under ZeRO-3 two empty placeholders, and drops the head.
    wanted, ranks = loads["own head"]
    for weights, _, refused in ranks:
        assert refused == ""
        assert weights.keys() == wanted.keys()
        assert torch.equal(weights["lm_head.weight"], wanted["lm_head.weight"])


def test_a_missing_tensor_is_refused_on_every_rank(loads: Loads) -> None:
    assert all(MISSING in refused for _, _, refused in loads["missing"][1])


WORLD, SAVED_AT, LAST = 2, 2, 4
CASES = {
    "zero3-random-tied-fp32": (3, "random", True, "fp32"),
    "zero3-pretrained-untied-bf16": (3, "pretrained", False, "bf16"),
    "zero1-random-untied-bf16": (1, "random", False, "bf16"),
    "zero2-pretrained-tied-fp32": (2, "pretrained", True, "fp32"),
}


def resuming_worker(rank: int, world_size: int, config: Config, session: str) -> tuple[str, int]:
    """Be one worker of an attempt that finds a state: drawing or reading weights raises, and unfilled ones are NaN."""
    load = loop.resume

    def drawn(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        assert tensor.is_meta, "a weight was initialized"
        return tensor

    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    def spoiled(parameter: torch.nn.Parameter, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(parameter.shape, float("nan"), dtype=dtype, device=device)

    def loaded(engine: Any, *others: Any) -> Any:
        held = {parameter.numel() for parameter in engine.module.parameters()}
        assert config.zero_stage < 3 or held == {0}, "a parameter was whole on a rank"
        position = load(engine, *others)
        source = state_source(engine)
        copies = [torch.empty(interval.num_elements, dtype=interval.dtype) for interval in source.intervals]
        source.copy_to(copies)
        filled = {one.key: bool(torch.isfinite(copy).all()) for one, copy in zip(source.intervals, copies, strict=True)}
        assert all(filled.values()), filled
        return position

    for name in TORCH_INIT_FUNCTIONS:
        setattr(torch.nn.init, name, drawn)
        TORCH_INIT_FUNCTIONS[name] = drawn
    stored_weights.safe_open = read
    model_module._memory = spoiled
    loop.resume = loaded
    return run_worker(rank, world_size, config, session)


def _config(storage: Path, corpus: Path, stop_step: int, **settings: Any) -> Config:
    return make_config(
        storage, corpus, cluster__workers=WORLD, checkpoint__every_steps=SAVED_AT, run__stop_step=stop_step,
        data__rows_per_step=2, **settings,
    )  # fmt: skip


def _run(config: Config, session: str, worker: Any = run_worker) -> list[float]:
    train(config, session, worker=worker)
    return [step.loss for step in read_history(config.run_dir).steps]


def _model(storage: Path, corpus: Path, init: str, tied: bool, dtype: str) -> dict[str, Any]:
    random = _config(storage, corpus, LAST).model_dump(mode="json")["model"]
    random["config"]["tie_word_embeddings"] = tied
    settings = {"model__init": init, "model__dtype": dtype, "model__config": random["config"]}
    if init == "pretrained":
        tree = make_config(storage, corpus, model__config=random["config"], run__seed=5).model_dump(mode="json")
        build_model(parse_config(tree)).save_pretrained(storage / "base")
        settings |= {"model__path": str(storage / "base"), "model__config": None}
    return settings


@pytest.mark.parametrize(("stage", "init", "tied", "dtype"), fast_cases(CASES, "zero3-random-tied-fp32"))
def test_a_restart_goes_on_bitwise_and_draws_and_reads_nothing(
    tmp_path: Path, corpus: Path, stage: int, init: str, tied: bool, dtype: str
) -> None:
    settings = {**_model(tmp_path, corpus, init, tied, dtype), "memory__zero_stage": stage}
    unbroken = _run(_config(tmp_path / "unbroken", corpus, LAST, **settings), "unbroken")
    first = _run(_config(tmp_path / "broken", corpus, SAVED_AT, **settings), "first")
    both = _run(_config(tmp_path / "broken", corpus, LAST, **settings), "second", resuming_worker)
    assert (len(first), len(unbroken)) == (SAVED_AT, LAST)
    assert both == unbroken


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_that_is_damaged_leaves_nothing_in_the_model(tmp_path: Path, corpus: Path, stage: int) -> None:
    """The older one is loaded into the same engine, which holds part of the newer one by then."""
    config = _config(tmp_path, corpus, LAST, memory__zero_stage=stage)
    before = _run(config, "first")
    _flip_the_last_tensor(config, LAST)
    assert _run(config, "second", resuming_worker) == before
    assert read_history(config.run_dir).lost_steps == LAST - SAVED_AT


def _flip_the_last_tensor(config: Config, step: int) -> None:
    store = LocalStore(config.run_dir)
    shard = read_manifest(store, step).shards[-1]
    path = store.path(f"checkpoints/step-{step:08d}/{shard.file}")
    content = bytearray(path.read_bytes())
    content[max(one.offset for one in shard.intervals)] ^= 1
    path.write_bytes(content)


def test_a_first_start_is_noticed_to_draw(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(RankFailure, match="a weight was initialized"):
        _run(_config(tmp_path, corpus, LAST), "first", resuming_worker)
