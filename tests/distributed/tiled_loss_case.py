"""One training step whose loss is computed over tiles, on many ranks, held against one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, loss_scale, shard_batch
from ray_ulysses.attention.batch import IGNORE_INDEX
from ray_ulysses.attention.recompute import checkpoint_contexts
from ray_ulysses.engine.loss import training_loss
from ray_ulysses.engine.tiled_mlp import tile_mlps
from ray_ulysses.engine.zero import ZeroSettings, build_engine
from ray_ulysses.parallel.layout import ParallelLayout, TileSetting
from tests.distributed.seam_case import counted_gathers, gradient_error
from tests.unit.attention.models import VOCAB, magnified, plain_config, zoo_model

Rows = Literal["short", "masked", "weighted"]
MLP_TILE = 3
Z_LOSS = 0.1
LENGTHS = ((17, 1, 9, 5), (1, 30, 9), (24,))


def _with_adapter(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    targets = ["lm_head", "q_proj"]
    return get_peft_model(
        model,
        LoraConfig(r=4, lora_dropout=0.0, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"),
    )


def _with_bias() -> Any:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(plain_config("phi"), attn_implementation="eager")
    torch.nn.init.normal_(model.lm_head.bias)
    return magnified(model)


HEADS: dict[str, Callable[[], Any]] = {
    "plain": lambda: zoo_model("llama"),
    "softcap": lambda: zoo_model("gemma2", tie_word_embeddings=False),
    "scale": lambda: zoo_model("granite", tie_word_embeddings=False),
    "bias": _with_bias,
    "tied": lambda: zoo_model("qwen3"),
    "adapter": lambda: _with_adapter(zoo_model("llama")),
    "mlp": lambda: zoo_model("qwen3", tie_word_embeddings=False),
    "experts": lambda: zoo_model("mixtral"),
}
"""Models by what is special about their output head; of the last two, MLPs and norms go over tiles too, under
checkpointing; the first of them has norms of queries and keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TileCase:
    """A point of the matrix."""

    head: str
    rows: Rows
    ulysses_size: int = 1
    ring_size: int = 1
    zero_stage: int = 3
    accumulation: int = 1

    @property
    def world_size(self) -> int:
        return self.ulysses_size * self.ring_size

    @property
    def tile(self) -> int:
        """Tokens per tile."""
        return 64 if self.rows == "short" else 5

    @property
    def z_loss(self) -> float:
        """Coefficient of the z-loss."""
        return Z_LOSS if self.rows == "weighted" else 0.0

    @property
    def label(self) -> str:
        layout = f"u{self.ulysses_size}-r{self.ring_size}-zero{self.zero_stage}-acc{self.accumulation}"
        return f"{self.head}-{layout}-{self.rows}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TileResult:
    """What one case measured."""

    case: TileCase
    loss_error: float
    gradient_error: float
    worst_tensor: str
    head_gathers: tuple[dict[str, int], dict[str, int]]


def make_row(index: int, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, labels and label weights ``[1, S]`` of a row."""
    tokens = sum(LENGTHS[index])
    generator = torch.Generator().manual_seed(50 + index)
    input_ids = torch.randint(0, VOCAB, (1, tokens), generator=generator)
    labels, weights = input_ids.clone(), torch.ones(1, tokens)
    labels[:, 2:4] = IGNORE_INDEX
    if rows == "masked":
        # What the first of two ranks has: half of the row, or its first and last quarter on a ring.
        labels[:, : tokens // 2 + 1] = IGNORE_INDEX
        labels[:, 3 * tokens // 4 :] = IGNORE_INDEX
    if rows == "weighted":
        weights = torch.rand(1, tokens, generator=generator) * 2
        weights[:, 10:16] = 0
    return input_ids, labels, weights


@cache
def reference(head: str, rows: Rows, num_rows: int, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    model = HEADS[head]().to(dtype)
    total, count = torch.zeros((), dtype=dtype), 0
    for index in range(num_rows):
        input_ids, labels, weights = make_row(index, rows)
        start = 0
        for length in LENGTHS[index]:
            part = slice(start, start + length)
            logits = model(input_ids=input_ids[:, part], use_cache=False).logits[0, :-1]
            targets = labels[0, part][1:]
            losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            if rows == "weighted":
                losses = losses + Z_LOSS * logits.logsumexp(-1).square() * (targets != IGNORE_INDEX)
            total = total + (losses * weights[0, part][1:].to(dtype)).sum()
            count += int((targets != IGNORE_INDEX).sum())
            start += length
    loss = total / count
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def run_cases(rank: int, world_size: int, cases: list[TileCase]) -> list[TileResult]:
    """Run every case of one world on this rank."""
    return [_run_case(case) for case in cases]


def _run_case(case: TileCase) -> TileResult:
    mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=case.ring_size)
    rows = [make_row(index, case.rows) for index in range(case.accumulation)]
    batches = [
        shard_batch(
            ids, labels, LENGTHS[index], mesh, label_weights=weights if case.rows == "weighted" else None
        )
        for index, (ids, labels, weights) in enumerate(rows)
    ]  # fmt: skip
    is_masked = case.rows == "masked" and case.world_size > 1 and mesh.sp_rank == 0
    assert not is_masked or all((batch.labels_BL == IGNORE_INDEX).all() for batch in batches)
    tokens = torch.stack([(batch.labels_BL != IGNORE_INDEX).sum() for batch in batches]).sum()
    dist.all_reduce(tokens)
    scale = loss_scale(int(tokens), mesh, zero_stage=case.zero_stage, accumulation=case.accumulation)
    engine = make_engine(case.head, mesh, case.zero_stage, case.accumulation)
    loss, gathers = torch.zeros(()), (Counter[str](), Counter[str]())
    for number, batch in enumerate(batches):
        with counted_gathers(engine, gathers[0]):
            loss_sum = training_loss(engine, batch, tile=case.tile, z_loss=case.z_loss).objective_sum
        assert loss_sum.dtype == torch.float32
        loss += loss_sum.detach()
        with counted_gathers(engine, gathers[1]):
            engine.backward(loss_sum * scale)
        if number + 1 < len(batches):
            engine.step()
    gradients = gradients_of(engine)
    engine.step()
    engine.destroy()
    dist.all_reduce(loss)
    wanted_loss, wanted = reference(case.head, case.rows, case.accumulation, torch.float64)
    _, own = reference(case.head, case.rows, case.accumulation, torch.float32)
    error, worst = gradient_error(gradients, own, wanted)
    return TileResult(
        case=case,
        loss_error=abs(float(loss) / int(tokens) - wanted_loss) / abs(wanted_loss),
        gradient_error=error,
        worst_tensor=worst,
        head_gathers=tuple(  # type: ignore[arg-type]
            {name: n for name, n in each.items() if weight_of(case.head) in name} for each in gathers
        ),
    )


def make_engine(head: str, mesh: SequenceMesh, zero_stage: int, accumulation: int = 1) -> Any:
    settings = ZeroSettings(
        stage=zero_stage, dtype="fp32", accumulation=accumulation, max_grad_norm=None, learning_rate=1e-3,
        betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, partition_everything=True,
    )  # fmt: skip
    model: Any = apply_ulysses(HEADS[head](), mesh)
    if is_mlp(head):
        options = {"use_reentrant": False, "context_fn": checkpoint_contexts("both")}
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        tile_mlps(model, MLP_TILE)
    return build_engine(model, settings)


def is_mlp(head: str) -> bool:
    return head in ("mlp", "experts")


def weight_of(head: str) -> str:
    return "mlp" if is_mlp(head) else "embed_tokens" if head == "tied" else "lm_head"


def gradients_of(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    full = deepspeed.utils.safe_get_full_grad
    return {name: full(p).clone().cpu() for name, p in engine.module.named_parameters() if p.requires_grad}


def gathers_by_tile(
    rank: int, world_size: int, head: str, tiles: list[TileSetting]
) -> list[tuple[Counter[str], Counter[str]]]:
    """Count the gathers of a step in which each rank has a row of another length, by the tile's size."""
    layout = ParallelLayout(world_size=world_size, sp_size=1)
    made = [dist.new_group(list(ranks)) for ranks in layout.sp_groups()]
    mesh = SequenceMesh.from_group(made[rank])
    length = 8 + 24 * rank
    batch = shard_batch(torch.arange(length) % VOCAB, None, (length,), mesh)
    counts = []
    for tile in tiles:
        engine = make_engine(head, mesh, 3)
        forward, backward = Counter[str](), Counter[str]()
        with counted_gathers(engine, forward):
            loss_sum, _ = causal_lm_loss(engine, batch, tile=tile)
        with counted_gathers(engine, backward):
            engine.backward(loss_sum * 0.01)
        engine.destroy()
        counts.append((forward, backward))
    return counts


def report(rank: int, world_size: int, cases: list[TileCase]) -> dict[str, Any]:
    """Run cases, and count gathers by the tile's size: one start of ranks for all fast tests."""
    gathers = {head: gathers_by_tile(rank, world_size, head, [64, 3]) for head in ("plain", "tied", "adapter")}
    return {"cases": run_cases(rank, world_size, cases), "gathers": gathers}
