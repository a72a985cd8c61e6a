"""The self-test of a training step: a tiny decoder in a ZeRO engine of the run's stage, against one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ray_ulysses.attention.batch import IGNORE_INDEX, shard_batch
from ray_ulysses.attention.ulysses import apply_ulysses
from ray_ulysses.engine import loss as losses
from ray_ulysses.engine.zero import build_engine

if TYPE_CHECKING:
    from ray_ulysses.attention.kernels import KernelName
    from ray_ulysses.engine.zero import ZeroSettings
    from ray_ulysses.parallel.mesh import SequenceMesh

_SEED = 21
_VOCAB = 61
_HEAD_SIZE = 64
"""Head size of the tiny decoder, which every kernel supports."""
_ROWS: tuple[tuple[int, tuple[int, ...]], ...] = ((48, (29, 1, 12)), (40, (7, 33)))
"""Length of each row and lengths of its documents; the rest is padding."""
_MOST_ACCUMULATION = 2
_NOTHING = 1e-7


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeasured:
    """A step on all ranks compared with one process."""

    gradient_error: float
    """Norm-wise relative error of the worst tensor against one process in fp64."""
    worst_tensor: str
    own_error: float
    """The same error of one process in the run's dtype."""
    norm_ratio: float
    """The engine's global gradient norm over one process's."""


def measure_step(
    mesh: SequenceMesh, device: torch.device, settings: ZeroSettings, kernel: KernelName, chunks: int = 1
) -> StepMeasured:
    """Train one step of a tiny decoder and compare its gradients with one process's; every rank must call."""
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    accumulation = min(settings.accumulation, _MOST_ACCUMULATION)
    sp_first = dist.get_global_rank(mesh.group("sp"), 0)
    dp_rank, dp_size = sp_first // mesh.sp_size, mesh.world_size // mesh.sp_size
    # Two alternating rows, so that the reference for any world size is two weighted rows.
    weights = [0, 0]
    for index in range(dp_size * accumulation):
        weights[index % 2] += 1
    mine = [(dp_rank * accumulation + micro) % 2 for micro in range(accumulation)]

    tiny = replace(
        settings,
        accumulation=accumulation,
        offload_optimizer="none",
        offload_param="none",
        partition_everything=True,
        max_grad_norm=1.0,
    )
    with _collected():
        model = apply_ulysses(_tiny_decoder(mesh, dtype, device), mesh, kernel, chunks=chunks)
        gradients, norm = _engine_step(model, tiny, mesh, device, mine)
        del model
    own = _one_process(_tiny_decoder(mesh, dtype, device), weights)
    wanted = _one_process(_tiny_decoder(mesh, dtype, device).double(), weights)
    error, worst = worst_error(gradients, wanted)
    whole = float(torch.stack([gradient.norm() for gradient in wanted.values()]).norm())
    return StepMeasured(
        gradient_error=error, worst_tensor=worst, own_error=worst_error(own, wanted)[0], norm_ratio=norm / whole
    )


def worst_error(ours: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest norm-wise relative error of a tensor, and its name.

    The error of a tensor whose norm is below 1e-7 of the whole gradient's is relative to the whole. NaN counts as
    infinite.
    """
    assert ours.keys() == truth.keys()
    whole = float(torch.stack([gradient.double().norm() for gradient in truth.values()]).norm())
    errors = {}
    for name, wanted in truth.items():
        norm = float(wanted.double().norm())
        error = float((ours[name].double() - wanted.double()).norm()) / (norm if norm >= _NOTHING * whole else whole)
        errors[name] = error if error == error else float("inf")
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def _engine_step(
    model: Any, settings: ZeroSettings, mesh: SequenceMesh, device: torch.device, mine: list[int]
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the engine's whole gradients and their norm, and destroy the engine."""
    import deepspeed

    batches = [shard_batch(*_row(index, device), _ROWS[index][1], mesh) for index in mine]
    tokens = torch.stack([(batch.labels_BL != IGNORE_INDEX).sum() for batch in batches]).sum()
    dist.all_reduce(tokens, group=mesh.group("loss"))
    scale = losses.loss_scale(int(tokens), mesh, zero_stage=settings.stage, accumulation=settings.accumulation)
    engine = build_engine(model, settings)
    try:
        engine.train()
        for place, batch in enumerate(batches):
            loss_sum, _ = losses.causal_lm_loss(engine, batch)
            engine.backward(loss_sum * scale)
            # Gradients exist until the engine steps, on the last micro-batch.
            if place + 1 < len(batches):
                engine.step()
        gradients = {
            name: deepspeed.utils.safe_get_full_grad(parameter).clone()
            for name, parameter in engine.module.named_parameters()
        }
        engine.step()
        norm = float(engine.get_global_grad_norm())
    finally:
        engine.destroy()
        _forget(model)
    return gradients, norm


def _forget(model: Any) -> None:
    """Remove a model from the global stack in which each ZeRO-3 engine of DeepSpeed 0.19.8 keeps its model alive."""
    from deepspeed.runtime.zero import parameter_offload

    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not model]


@contextmanager
def _collected() -> Iterator[None]:
    """Free an engine's reference cycles (hooks and partitions) right away.

    Older objects are frozen meanwhile, since scanning them takes up to a second, more than the rest.
    """
    is_first = gc.get_freeze_count() == 0
    if is_first:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if is_first:
            gc.unfreeze()


def _tiny_decoder(mesh: SequenceMesh, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a two-layer model, the same on every rank, with two KV heads and at least one query head per rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(_SEED)
    num_heads = max(4, mesh.ulysses_size + mesh.ulysses_size % 2)
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=num_heads * (8 if num_heads < 32 else 1),
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        head_dim=_HEAD_SIZE,
        max_position_embeddings=64,
        # Large enough that attention is far from uniform and its gradients matter.
        initializer_range=0.15,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        # Not buffers: rounded rotary frequencies would differ from the run's.
        parameter.data = parameter.data.to(dtype)
    return model.to(device)


def _row(index: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels ``[1, S]`` of a row; some labels are ignored."""
    generator = torch.Generator().manual_seed(_SEED + index)
    input_ids = torch.randint(0, _VOCAB, (1, _ROWS[index][0]), generator=generator).to(device)
    labels = input_ids.clone()
    labels[:, 3:6] = IGNORE_INDEX
    return input_ids, labels


def _one_process(model: Any, weights: list[int]) -> dict[str, torch.Tensor]:
    """Return the gradients of one process, with every document processed alone."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for index, weight in enumerate(weights):
        if not weight:
            continue
        input_ids, labels = _row(index, model.device)
        start = 0
        for length in _ROWS[index][1]:
            part = slice(start, start + length)
            logits = model(input_ids=input_ids[:, part], use_cache=False).logits[0, :-1]
            targets = labels[0, part][1:]
            loss = torch.nn.functional.cross_entropy(
                logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="sum"
            )
            total = total.to(loss.device) + weight * loss
            count += weight * int((targets != IGNORE_INDEX).sum())
            start += length
    (total / count).backward()
    return {name: parameter.grad.detach() for name, parameter in model.named_parameters()}
