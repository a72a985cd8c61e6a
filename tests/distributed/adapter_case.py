"""One training step of a model with `model.adapter`, on many ranks, held against one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, loss_scale, shard_batch
from ray_ulysses.attention.batch import IGNORE_INDEX
from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.activation_offload import offload_activations
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.tiled_mlp import tile_mlps
from ray_ulysses.engine.zero import ZeroSettings, build_engine, partition_config
from ray_ulysses.engine.zero_state import state_source
from ray_ulysses.planner.settings import kept_attention
from tests.distributed.seam_case import gradient_error
from tests.distributed.tiled_loss_case import LENGTHS, gradients_of, make_row
from tests.unit.attention.models import ARCHITECTURES
from tests.unit.config.trees import small_tree
from tests.unit.export.runs import fields_of

ADAPTERS: dict[str, dict[str, Any]] = {
    "linear": {"rank": 4},
    "extension": {
        "rank": 4, "rslora": True, "targets": ["q_proj", "v_proj"], "train_embeddings": True, "train_norms": True,
    },
    "mlp": {"rank": 4, "targets": ["gate_proj", "up_proj", "down_proj"]},
    "head": {"rank": 4, "targets": ["lm_head", "down_proj"], "modules_to_save": ["up_proj"]},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterCase:
    """A point of the matrix."""

    adapter: str
    kind: str = ""
    base: str = ""
    is_tied: bool = False
    is_lean: bool = True
    has_mlp_tiles: bool = False
    ulysses_size: int = 1
    ring_size: int = 1
    zero_stage: int = 3
    accumulation: int = 1

    @property
    def world_size(self) -> int:
        return self.ulysses_size * self.ring_size

    @property
    def label(self) -> str:
        layout = f"u{self.ulysses_size}-r{self.ring_size}-zero{self.zero_stage}-acc{self.accumulation}"
        tied = self.kind or ("tied" if self.is_tied else "untied")
        kinds = f"{'pretrained' if self.base else 'drawn'}-{tied}"
        memory = "lean" if self.is_lean else "tiles" if self.has_mlp_tiles else "plain"
        return f"{self.adapter}-{kinds}-{layout}-{memory}"

    def config(self, *, is_lean: bool) -> Config:
        tree = small_tree(model__adapter=ADAPTERS[self.adapter], memory__gradient_checkpointing=is_lean)
        tree["model"]["config"]["tie_word_embeddings"] = self.is_tied
        if self.kind:
            tree["model"]["config"] = fields_of(ARCHITECTURES[self.kind]())
        if self.base:
            tree["model"] |= {"init": "pretrained", "path": self.base}
        return parse_config(tree)


def drawn(model: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@cache
def reference(case: AdapterCase, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    model = drawn(build_model(case.config(is_lean=False))).to(dtype)
    if hasattr(model, "set_experts_implementation"):
        # Grouped products of experts know no fp64.
        model.set_experts_implementation("eager")
    total, count = torch.zeros((), dtype=dtype), 0
    for index in range(case.accumulation):
        input_ids, labels, _ = make_row(index, "masked")
        start = 0
        for length in LENGTHS[index]:
            part = slice(start, start + length)
            logits = model(input_ids=input_ids[:, part], use_cache=False).logits[0, :-1]
            targets = labels[0, part][1:]
            total = total + nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE_INDEX)
            count += int((targets != IGNORE_INDEX).sum())
            start += length
    (total / count).backward()
    return float(total.detach()) / count, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterResult:
    """What one case measured."""

    case: AdapterCase
    loss_error: float
    gradient_error: float
    worst_tensor: str
    norm_error: float
    num_stepped: int
    num_trained: int


def run_cases(rank: int, world_size: int, cases: list[AdapterCase], device: str = "cpu") -> list[AdapterResult]:
    """Run every case of one world on this rank, held against one process on the CPU."""
    return [_run_case(case, torch.device(device)) for case in cases]


def _run_case(case: AdapterCase, device: torch.device) -> AdapterResult:
    mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=case.ring_size)
    rows = [make_row(index, "masked")[:2] for index in range(case.accumulation)]
    batches = [
        shard_batch(ids.to(device), labels.to(device), LENGTHS[index], mesh) for index, (ids, labels) in enumerate(rows)
    ]
    tokens = torch.stack([(batch.labels_BL != IGNORE_INDEX).sum() for batch in batches]).sum()
    dist.all_reduce(tokens)
    scale = loss_scale(int(tokens), mesh, zero_stage=case.zero_stage, accumulation=case.accumulation)
    engine = _engine(case, mesh, device)
    loss = torch.zeros((), device=device)
    for number, batch in enumerate(batches):
        loss_sum, _ = causal_lm_loss(engine, batch, tile=5 if case.is_lean else "off")
        loss += loss_sum.detach()
        engine.backward(loss_sum * scale)
        if number + 1 < len(batches):
            engine.step()
    gradients = gradients_of(engine)
    engine.step()
    norm = float(engine.get_global_grad_norm())
    held = state_source(engine).intervals
    stepped = torch.tensor(sum(one.num_elements for one in held if one.key.startswith("exp_avg/")), device=device)
    dist.all_reduce(stepped)
    engine.destroy()
    dist.all_reduce(loss)
    wanted_loss, wanted = reference(case, torch.float64)
    _, own = reference(case, torch.float32)
    error, worst = gradient_error(gradients, own, wanted)
    wanted_norm = float(torch.stack([one.norm() for one in wanted.values()]).norm())
    return AdapterResult(
        case=case,
        loss_error=abs(float(loss) / int(tokens) - wanted_loss) / wanted_loss,
        gradient_error=error,
        worst_tensor=worst,
        norm_error=abs(norm - wanted_norm) / wanted_norm,
        num_stepped=int(stepped),
        num_trained=sum(one.numel() for one in wanted.values()),
    )


def _engine(case: AdapterCase, mesh: SequenceMesh, device: torch.device) -> Any:
    settings = ZeroSettings(
        stage=case.zero_stage, dtype="fp32", accumulation=case.accumulation, max_grad_norm=1e9, learning_rate=1e-3,
        betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, partition_everything=True,
    )  # fmt: skip
    config = case.config(is_lean=case.is_lean)
    model = drawn(build_model(config, partition_config(settings)))
    apply_ulysses(model, mesh)
    if case.is_lean or case.has_mlp_tiles:
        tile_mlps(model, 3)
    if case.is_lean:
        kinds = ("layer_inputs", "attention_outputs")
        keep = kept_attention(config)
        offload_activations(model, kinds, keep=keep, budget_bytes=2**24, device=device)
    return build_engine(model, settings)
