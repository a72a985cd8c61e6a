"""Finds the problems that prevent a run, before any worker starts; each check is pure and gives a working hint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ray_ulysses.config import Config
from ray_ulysses.config.rules import ring_problem
from ray_ulysses.config.running import KeptActivation
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.errors import Problem
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.memory import MemoryEstimate, estimate
from ray_ulysses.planner.memory_terms import GIB, MemoryTerm
from ray_ulysses.planner.settings import allowed_sp, mlp_tile, ring_size

_MOST_WORKERS = 1024
_MOST_CHOICES = 3


def configured_memory(config: Config, shape: ModelShape) -> MemoryEstimate:
    """Return the estimate for a configuration as it stands."""
    return _memory_with(config, shape, _Change())


def heads_problems(config: Config, shape: ModelShape) -> Iterator[Problem]:
    """Refuse a ring that leaves more Ulysses ranks than the model has query heads."""
    sp_size, ring = config.parallel.sp_size, config.parallel.ring_size
    if ring is not None and sp_size // ring > shape.num_heads:
        yield ring_problem(sp_size, ring, shape)


def vocabulary_problems(max_token_id: int, vocab_size: int, corpus_path: str) -> Iterator[Problem]:
    """Refuse a corpus with a token id that the model's embedding does not have."""
    if max_token_id >= vocab_size:
        yield Problem(
            path="data.path",
            value=corpus_path,
            rule=f"holds token id {max_token_id}, and the model's vocab_size={vocab_size} ends at {vocab_size - 1}",
            hint="prepare the corpus with the model's own tokenizer, or use a model whose vocab_size is at "
            f"least {max_token_id + 1}",
        )


def position_problems(config: Config, longest_document: int, row_tokens: int, num_positions: int) -> Iterator[Problem]:
    """Refuse documents that are longer than a model's table of positions."""
    longest = min(longest_document, row_tokens)
    if longest > num_positions:
        yield Problem(
            path="data.context_tokens",
            value=config.data.context_tokens,
            rule=f"lets documents of up to {longest} tokens into a row, and the model's table of positions ends at "
            f"{num_positions}",
            hint=f"use at most {num_positions}, or a model with rotary positions",
        )


def plan_problems(config: Config, plan: Plan) -> Iterator[Problem]:
    """Refuse a stop beyond the planned data, and an evaluation without rows."""
    stop = config.run.stop_step
    # Without the rows of a bad step, a run may end a little earlier.
    if stop is not None and stop > plan.num_steps and not plan.leaves_out_rows:
        rows_per_epoch = max(1, plan.newest.train.num_rows // max(1, len(plan.newest.epochs)))
        missing = (stop - plan.num_steps) * plan.settings.rows_per_step
        epochs = plan.settings.epochs - (-missing // rows_per_epoch)
        yield Problem(
            path="run.stop_step",
            value=stop,
            rule=f"is beyond the planned data, which ends after {plan.num_steps} steps "
            f"({plan.num_rows} rows, {plan.settings.rows_per_step} per step)",
            hint=f"use at most {plan.num_steps}, or data.epochs={epochs} (for a run that has begun, with --branch)",
        )
    if config.run.eval_every_steps is not None and plan.evaluation.num_rows == 0:
        yield Problem(
            path="data.eval_fraction",
            value=config.data.eval_fraction,
            rule="holds out no document with a target, and run.eval_every_steps needs an evaluation",
            hint="use a larger share, or set run.eval_every_steps=null",
        )


def corpus_problems(config: Config, plan: Plan) -> Iterator[Problem]:
    """Refuse a corpus that is shorter than one step."""
    num_rows = plan.newest.train.num_rows
    if num_rows < plan.settings.rows_per_step and plan.newest.branch is None:
        yield Problem(
            path="data.rows_per_step",
            value=config.data.rows_per_step,
            rule=f"is more than the {num_rows} rows of the corpus, so that not even one step is full",
            hint=f"use at most {num_rows}, a shorter data.context_tokens, more data.epochs or a longer corpus",
        )


def memory_problems(config: Config, shape: ModelShape, memory: MemoryEstimate) -> Iterator[Problem]:
    """Refuse a run that does not fit into the configured memory."""
    limits = (
        ("memory.device_gib", config.memory.device_gib, memory.device_bytes, memory.device),
        ("memory.host_gib", config.memory.host_gib, memory.host_bytes, memory.host),
    )
    for path, limit_gib, needed, terms in limits:
        if limit_gib is None or needed <= limit_gib * GIB:
            continue
        yield Problem(
            path=path,
            value=limit_gib,
            rule=f"each rank is estimated to take {needed / GIB:.1f} GiB ({memory.note}), most of it {_largest(terms)}",
            hint=_hint(config, shape),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    """Settings to try instead of the configured ones; None keeps one."""

    workers: int | None = None
    sp_size: int | None = None
    ring_size: int | None = None
    shard_weights: bool = False
    offload: bool = False
    checkpointing: bool = False
    tiled_loss: bool = False
    tiled_mlp: bool = False
    offload_activations: tuple[KeptActivation, ...] | None = None
    without_peer_memory: bool = False

    def describe(self) -> str:
        """Return the change as settings."""
        parts = {
            f"cluster.workers={self.workers}": self.workers,
            f"parallel.sp_size={self.sp_size}": self.sp_size,
            f"parallel.ring_size={self.ring_size}": self.ring_size,
            "memory.zero_stage=3": self.shard_weights,
            "memory.offload_optimizer=cpu": self.offload,
            "memory.gradient_checkpointing=true": self.checkpointing,
            "memory.loss_tile=auto": self.tiled_loss,
            "memory.mlp_tile=auto": self.tiled_mlp,
            f"memory.offload_activations=[{', '.join(self.offload_activations or ())}]": (
                self.offload_activations is not None
            ),
            "elastic.peer_memory=false": self.without_peer_memory,
        }
        return " with ".join(text for text, is_changed in parts.items() if is_changed)


def _memory_with(config: Config, shape: ModelShape, change: _Change) -> MemoryEstimate:
    return estimate(
        shape,
        world_size=change.workers or config.cluster.workers.min,
        sp_size=change.sp_size or config.parallel.sp_size,
        ring_size=ring_size(config, shape, change.sp_size),
        context_tokens=config.data.context_tokens,
        dtype=config.model.dtype,
        zero_stage=3 if change.shard_weights else config.memory.zero_stage,
        offload_optimizer="cpu" if change.offload else config.memory.offload_optimizer,
        gradient_checkpointing=change.checkpointing or config.memory.gradient_checkpointing,
        attention_output=config.memory.attention_output,
        offload_activations=(
            config.memory.offload_activations if change.offload_activations is None else change.offload_activations
        ),
        attention_chunks=config.memory.attention_chunks,
        mlp_tile="auto" if change.tiled_mlp or change.checkpointing else mlp_tile(config),
        loss_tile="auto" if change.tiled_loss else config.memory.loss_tile,
        init=config.model.init,
        accelerator=config.cluster.gpus_per_worker > 0,
        host_buffers=config.checkpoint.host_buffers,
        peer_memory=config.elastic.peer_memory and not change.without_peer_memory,
    )


def _hint(config: Config, shape: ModelShape) -> str:
    """Return up to three changes that fit by the same estimate, the smallest first."""
    fitting: list[str] = []
    for change in _changes(config, shape):
        if len(fitting) == _MOST_CHOICES:
            break
        if _fits(config, _memory_with(config, shape, change)):
            fitting.append(change.describe())
    shorter = "a smaller data.context_tokens"
    if fitting:
        return f"by this estimate these fit: {'; '.join(fitting)}; or use {shorter}"
    return f"more workers, a larger parallel.sp_size and offload do not suffice; use {shorter} or a smaller model"


def _changes(config: Config, shape: ModelShape) -> Iterator[_Change]:
    workers, sp_size = config.cluster.workers.min, config.parallel.sp_size
    # A configured ring is for the configured sp size, so another sp size needs another ring.
    is_set = config.parallel.ring_size is not None
    larger = [(n, ring_size(config, shape, n) if is_set else None) for n in allowed_sp(config, shape) if n > sp_size]
    can_offload = config.memory.offload_optimizer == "none"
    if config.elastic.peer_memory:
        yield _Change(without_peer_memory=True)
    if config.memory.offload_activations:
        yield _Change(offload_activations=())
    if config.memory.loss_tile != "auto":
        yield _Change(tiled_loss=True)
    if config.memory.mlp_tile != "auto" and config.memory.gradient_checkpointing:
        yield _Change(tiled_mlp=True)
    if not config.memory.gradient_checkpointing:
        yield _Change(checkpointing=True)
    if config.memory.zero_stage < 3:
        yield _Change(shard_weights=True)
    for size, ring in larger:
        if workers % size == 0:
            yield _Change(sp_size=size, ring_size=ring)
    if can_offload:
        yield _Change(offload=True)
        for size, ring in larger:
            if workers % size == 0:
                yield _Change(sp_size=size, ring_size=ring, offload=True)
    if config.memory.gradient_checkpointing:
        keeps_outputs = config.memory.attention_output != "none"
        both: tuple[KeptActivation, ...] = ("layer_inputs", "attention_outputs")
        yield _Change(offload_activations=both if keeps_outputs else both[:1])
    more = 2 * workers
    while more <= _MOST_WORKERS:
        yield _Change(workers=more)
        for size, ring in larger:
            if more % size == 0:
                yield _Change(workers=more, sp_size=size, ring_size=ring)
        more *= 2


def _fits(config: Config, memory: MemoryEstimate) -> bool:
    device, host = config.memory.device_gib, config.memory.host_gib
    return (device is None or memory.device_bytes <= device * GIB) and (host is None or memory.host_bytes <= host * GIB)


def _largest(terms: tuple[MemoryTerm, ...]) -> str:
    ordered = sorted(terms, key=lambda term: term.bytes, reverse=True)
    return " and ".join(f"{term.name} ({term.bytes / GIB:.1f} GiB)" for term in ordered[:2])
