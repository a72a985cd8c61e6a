"""Memory and traffic of steps with secondary shards, beside the planner's, at a size that fits a small machine.

The model is several times as large as what DeepSpeed keeps gathered for reuse, as an 8B model is. For that, the limits
of DeepSpeed and those of the planner are made smaller by the same factor.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, loss_scale, shard_batch
from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine import zero
from ray_ulysses.engine.model import build_model, find_trained_part
from ray_ulysses.engine.zero import build_engine, partition_config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner import state_memory
from ray_ulysses.planner.memory import MemoryEstimate, configured_memory
from ray_ulysses.run.settings import zero_settings
from tests.distributed.harness import run_ranks
from tests.unit.config.trees import small_tree
from tests.unit.engine.steps import peak_bytes

LAYERS, TOKENS = 8, 64
MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": LAYERS,
    "vocab_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
LAYER = 512 * 512 * 3 + 3 * 512 * 2048
KEPT, PREFETCHED, BUCKET = 2 * LAYER, LAYER, LAYER
"""Parameters that stay gathered for reuse, are prefetched, and gradients that are reduced at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    world_size: int
    node: int
    """Ranks of a node."""
    is_adapted: bool = False
    accumulation: int = 1
    has_secondary: bool = True

    @property
    def num_parameters(self) -> int:
        """Number of the model's parameters, without adapters."""
        return ModelShape.from_config_dict(MODEL).num_parameters

    def config(self, base: str = "") -> Config:
        """Return the configuration, whose base model under adapters is in the directory ``base``."""
        tree = small_tree(
            model__dtype="bf16", model__config=MODEL, memory__zero_stage=3,
            memory__zero_secondary="node" if self.has_secondary else "none", cluster__workers=self.world_size,
            cluster__gpus_per_node=self.node, parallel__sp_size=1, data__context_tokens=TOKENS,
        )  # fmt: skip
        if self.is_adapted:
            tree["model"] |= {"adapter": {"rank": 8}, "init": "pretrained", "path": base, "config": None}
        return parse_config(tree)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a rank's steps took."""

    peak_bytes: int
    """Bytes of all tensors at the peak."""
    across: int
    """Bytes of weights that a step received over the world, of other ranks."""
    inside: int
    """Bytes of weights that a step received within the node, of other ranks."""


def planned(case: Case, base: str = "") -> MemoryEstimate:
    """Return the planner's memory, with its limits made smaller."""
    config, shape = case.config(base), ModelShape.from_config_dict(MODEL)
    if case.is_adapted:
        shape = replace(shape, part=find_trained_part(config))
    small: dict[str, Any] = {"_LIVE_PARAMETERS": KEPT, "_PREFETCHED_PARAMETERS": PREFETCHED, "REDUCE_BUCKET": BUCKET}
    with mock.patch.multiple(state_memory, **small):
        return configured_memory(config, shape)


def save_base(folder: Path) -> str:
    """Save a base model under adapters, and return its directory."""
    config = AutoConfig.for_model(**MODEL)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


def measured(case: Case, base: str = "") -> Measured:
    """Measure a case on ranks of its own: the median of the ranks' peaks, and the traffic, which is the same."""
    ranks: list[Measured] = run_ranks(_measure, case.world_size, case, base, timeout_s=300)
    assert len({(one.across, one.inside) for one in ranks}) == 1
    return replace(ranks[0], peak_bytes=int(median(one.peak_bytes for one in ranks)))


def _measure(rank: int, world_size: int, case: Case, base: str = "") -> Measured:
    """Train three steps on this rank."""
    nodes = [str(one // case.node) for one in range(world_size)]
    config = case.config(base)
    settings = zero_settings(config, case.accumulation, nodes)
    assert settings.secondary_size == (case.node if case.has_secondary else 1)
    mesh = SequenceMesh.from_group([dist.new_group([one]) for one in range(world_size)][rank])
    counts = {"across": 0, "inside": 0}
    with small_limits(), counted(counts):
        model: Any = build_model(config, partition_config(settings))
        apply_ulysses(model, mesh)
        engine = build_engine(model.train(), settings)
        batch = shard_batch(torch.randint(0, 2048, (1, TOKENS)), None, None, mesh)
        scale = loss_scale((TOKENS - 1) * world_size * case.accumulation, mesh, zero_stage=3)

        def passes() -> None:
            loss_sum, _ = causal_lm_loss(engine, batch)
            engine.backward(loss_sum * scale)

        peak = 0
        # DeepSpeed allocates the moments in the first step, and prefetches from the second step on.
        for _ in range(3):
            counts.update(across=0, inside=0)
            for _ in range(case.accumulation):
                # One after the other: what was allocated before a profile begins is not seen to be freed in it.
                for run in (passes, engine.step):
                    peak = max(peak, held_bytes() + peak_bytes(run))
    return Measured(peak_bytes=peak, **counts)


def held_bytes() -> int:
    """Return the bytes of all tensors."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and not one.is_meta]
    return sum({one.data_ptr(): one.nbytes() for one in (tensor.untyped_storage() for tensor in tensors)}.values())


@contextmanager
def small_limits() -> Iterator[None]:
    """Build engines within this context that keep as few parameters gathered as a large model's do in proportion."""
    whole = zero.zero_config

    def smaller(settings: Any) -> dict[str, Any]:
        config = whole(settings)
        config["zero_optimization"] |= {
            "stage3_max_live_parameters": KEPT, "stage3_max_reuse_distance": KEPT,
            "stage3_prefetch_bucket_size": PREFETCHED, "reduce_bucket_size": BUCKET,
        }  # fmt: skip
        return config

    with mock.patch.object(zero, "zero_config", smaller):
        yield


@contextmanager
def counted(into: dict[str, int]) -> Iterator[None]:
    """Count the bytes of weights that this rank receives."""
    from deepspeed.runtime.zero import partition_parameters

    gather = partition_parameters._dist_allgather_fn

    def counting(part: torch.Tensor, whole: torch.Tensor, group: Any = None) -> Any:
        size = dist.get_world_size(group)
        into["across" if size == dist.get_world_size() else "inside"] += whole.nbytes * (size - 1) // size
        return gather(part, whole, group)

    with mock.patch.object(partition_parameters, "_dist_allgather_fn", counting):
        yield
