"""A tiny tied Llama with a frozen matrix, a frozen norm and a buffer, trained by ZeRO and saved."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from ray_ulysses.checkpoint import (
    CheckpointMeta,
    CheckpointRef,
    ShardedState,
    StateDescription,
    TorchRankMessenger,
    load_parts,
    newest_committed,
    save_checkpoint,
)
from ray_ulysses.checkpoint.state import StateSource
from ray_ulysses.engine import model as model_module
from ray_ulysses.engine.model import allocate_weights, torch_dtype, without_weights
from ray_ulysses.engine.optimizer import parameter_groups
from ray_ulysses.engine.zero import ZeroSettings, build_engine, partition_config
from ray_ulysses.engine.zero_state import StateReader, import_state, state_source
from ray_ulysses.storage import LocalStore

ROWS, TOKENS, VOCAB = 12, 16, 61
FROZEN = ("model.layers.0.mlp.gate_proj.weight", "model.layers.1.input_layernorm.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """What one group of ranks does."""

    load_from: str | None = None
    warm: bool = False
    save_to: str | None = None
    save_at: int = 0
    until: int = 0
    dtype: Literal["fp32", "bf16"] = "fp32"
    stage: Literal[1, 2, 3] = 3
    offload: Literal["none", "cpu"] = "none"
    offload_param: Literal["none", "cpu"] = "none"
    partition_everything: bool = True
    num_layers: int = 2
    all_trained: bool = False
    one_group: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LegResult:
    """What one rank saw."""

    losses: tuple[float, ...]
    start: ShardedState
    saved: ShardedState
    end: ShardedState
    micro_steps: int
    gathered: Mapping[str, torch.Tensor]


def run_leg(rank: int, world_size: int, leg: Leg) -> LegResult:
    """Build the engine, resume if asked, train, save; every rank runs this."""
    engine = _engine(leg)
    step = 0
    if leg.warm:
        _train_step(engine, 99, rank, world_size)
    if leg.load_from is not None:
        store = LocalStore(leg.load_from)
        manifest = newest_committed(store).manifest
        assert manifest is not None
        step = manifest.step
        messenger = TorchRankMessenger()
        import_state(engine, manifest.state, lambda parts: load_parts(store, manifest, parts, messenger))
    start = saved = _copy(state_source(engine))
    # As a run keeps it over all its steps.
    reader = StateReader(engine)
    losses = []
    while True:
        if leg.save_to is not None and step == leg.save_at:
            saved = _copy(state_source(engine))
            _save(engine, leg.save_to, step, rank, world_size)
        if step >= leg.until:
            break
        step += 1
        losses.append(_train_step(engine, step, rank, world_size))
    _check_equal(reader.source(), state_source(engine))
    return LegResult(
        losses=tuple(losses),
        start=start,
        saved=saved,
        end=_copy(state_source(engine)),
        micro_steps=engine.micro_steps,
        # Last, since gathering would hide a stale copy of a weight from the steps.
        gathered=_gathered(engine),
    )


def canonical(states: list[ShardedState]) -> dict[str, torch.Tensor]:
    """Put the ranks' parts together: each tensor flat and whole."""
    gathered: dict[str, list[tuple[int, torch.Tensor]]] = {key: [] for key in states[0].description.tensors}
    for state in states:
        for part in state.parts:
            gathered[part.key].append((part.start, part.tensor))
    return {
        key: torch.cat([tensor for _, tensor in sorted(held, key=lambda item: item[0]) if tensor.numel()])
        for key, held in gathered.items()
    }


def description_of(results: list[LegResult]) -> StateDescription:
    descriptions = [result.saved.description for result in results]
    assert all(description == descriptions[0] for description in descriptions)
    return descriptions[0]


def _engine(leg: Leg) -> Any:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=28,
        intermediate_size=33,
        num_hidden_layers=leg.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with contextlib.nullcontext() if leg.load_from is None else without_weights():
        model: torch.nn.Module = LlamaForCausalLM(config)
    seen = torch.arange(3, dtype=torch.float32)
    if not leg.all_trained:
        model.register_buffer("seen", seen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(leg.all_trained or name not in FROZEN)
    model.to(torch.float32 if leg.dtype == "fp32" else torch.bfloat16)
    settings = ZeroSettings(
        stage=leg.stage,
        dtype=leg.dtype,
        accumulation=1,
        max_grad_norm=1.0,
        learning_rate=1e-2,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        offload_optimizer=leg.offload,
        offload_param=leg.offload_param,
        partition_everything=leg.partition_everything,
    )
    if leg.load_from is not None:
        # Whatever is not restored must show.
        seen.fill_(0.5)
        model_module._memory = _spoiled
        allocate_weights(model, torch_dtype(leg.dtype), partition_config(settings))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained, **leg.one_group}] if leg.one_group else parameter_groups(model, 0.1)
    with mock.patch("ray_ulysses.engine.zero.parameter_groups", return_value=groups):
        engine = build_engine(model, settings)
    assert getattr(engine.optimizer, "offload_param", False) == (leg.offload_param == "cpu")
    return engine


def _spoiled(parameter: torch.nn.Parameter, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(parameter.shape, float("nan"), dtype=dtype, device=device)


def _train_step(engine: Any, step: int, rank: int, world_size: int) -> float:
    """Train on this rank's share of the step's rows; return the loss over all of them."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)[rank::world_size]
    logits = engine(input_ids=rows, use_cache=False).logits.float()
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
    num_tokens = ROWS * (TOKENS - 1)
    # The engine averages gradients over the world.
    engine.backward(loss * world_size / num_tokens)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total / num_tokens)


def _save(engine: Any, run_dir: str, step: int, rank: int, world_size: int) -> CheckpointRef:
    meta = CheckpointMeta(sp_size=1, cursor={"next_row": step * ROWS}, digest="0", tokens=step)
    return save_checkpoint(
        LocalStore(run_dir),
        step=step,
        attempt=1,
        rank=rank,
        world_size=world_size,
        state=state_source(engine),
        meta=meta,
        messenger=TorchRankMessenger(),
    )


def _check_equal(kept: StateSource, fresh: StateSource) -> None:
    """Check that a reader that was made before the steps reads what a new one does."""
    assert isinstance(kept, ShardedState) and isinstance(fresh, ShardedState)
    assert kept.description == fresh.description
    assert kept.intervals == fresh.intervals
    for one, other in zip(kept.parts, fresh.parts, strict=True):
        assert one.tensor.data_ptr() == other.tensor.data_ptr(), one.key


def _copy(state: StateSource) -> ShardedState:
    """Copy the live views, which the next step overwrites."""
    assert isinstance(state, ShardedState)
    parts = tuple(type(p)(key=p.key, start=p.start, tensor=p.tensor.clone()) for p in state.parts)
    return ShardedState(parts=parts, description=state.description)


def _gathered(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    if engine.zero_optimization_stage() < 3:
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}
