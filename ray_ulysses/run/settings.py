"""Derives the model shape, parallel layout and checkpoint storage from a configuration, once per process."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_ulysses.config.stages import stage_config
from ray_ulysses.errors import UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.model_shape import HYBRID_LAYER_TYPES, ModelShape
from ray_ulysses.parallel.layout import ParallelLayout, largest_node_group
from ray_ulysses.planner.settings import run_layout, secondary_size
from ray_ulysses.run.checkpoint_store import checkpoint_location, checkpoint_store
from ray_ulysses.run_names import CONFIG_FILE

if TYPE_CHECKING:
    from ray_ulysses.checkpoint import Manifest
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.engine.zero import ZeroSettings
    from ray_ulysses.storage import Store

_log = get_logger(__name__)
_LIBRARIES = (
    "ray-ulysses",
    "torch",
    "deepspeed",
    "transformers",
    "ray",
    # The following are installed only with PyTorch's GPU builds.
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu13",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRun:
    """A run's configuration and the values derived from it."""

    config: Config
    """The configuration with absolute paths."""
    shape: ModelShape
    layout: ParallelLayout
    location: str
    """Path or URI of the folder that contains ``checkpoints/``."""
    store: Store
    """The checkpoint store at ``location``."""


def resolve_run(config: Config, world_size: int | None = None) -> ResolvedRun:
    """Derive the `ResolvedRun` of a configuration. Only the model's configuration file is read.

    Args:
        config: The configuration with absolute paths.
        world_size: Number of workers; None for the configured number.

    Raises:
        UserError: The model's configuration or the checkpoint location is invalid.
    """
    shape = model_shape(config)
    return ResolvedRun(
        config=config,
        shape=shape,
        layout=run_layout(config, shape, world_size),
        location=checkpoint_location(config),
        store=checkpoint_store(config),
    )


def model_shape(config: Config) -> ModelShape:
    """Return the shape of the configured model, which is defined inline, in a local directory or on the hub.

    Raises:
        UserError: The model configuration can't be read, is not a decoder, or does not fit the adapter or a
            name pattern.
    """
    shape = _whole_shape(config)
    if config.objective.needs_whole_documents:
        # There is no output head over the vocabulary.
        shape = replace(shape, tied_embeddings=True)
    if shape.experts is not None and config.optimizer.router_loss is not None:
        shape = replace(shape, experts=replace(shape.experts, has_router_loss=config.optimizer.router_loss > 0))
    if shape.model_type in HYBRID_LAYER_TYPES:
        from ray_ulysses.engine.model import with_mixers

        shape = with_mixers(config, shape)
    if config.objective.task != "causal_lm":
        from ray_ulysses.engine.encoder_shape import with_encoder

        shape = with_encoder(config, shape)
    if config.model.adapter is None and not config.model.freeze and not config.optimizer.is_by_parameter:
        return shape
    from ray_ulysses.engine.model import with_training

    return with_training(config, shape)


def _whole_shape(config: Config) -> ModelShape:
    if config.model.part == "text":
        from ray_ulysses.engine.model_config import planned_config
        from ray_ulysses.engine.text_part import model_class, text_fields

        whole = planned_config(config)
        model_class(whole, "text")  # raises UserError if the model has no text part
        return ModelShape.from_config_dict(text_fields(whole), source="the text part of the model's configuration")
    if config.model.config is not None:
        return ModelShape.from_config_dict(config.model.config)
    assert config.model.path is not None
    if Path(config.model.path).expanduser().is_dir():
        return ModelShape.from_path(Path(config.model.path).expanduser())
    from ray_ulysses.engine.model_config import stored_config

    fields = stored_config(config.model.path).to_dict()
    return ModelShape.from_config_dict(fields, source=f"model.path={config.model.path!r}")


def zero_settings(config: Config, accumulation: int, nodes: Sequence[str] = ()) -> ZeroSettings:
    """Return the settings of the ZeRO engine.

    ``nodes`` contains the node name of each rank, indexed by rank; without it, there are no secondary shards.
    """
    from ray_ulysses.engine.zero import ZeroSettings

    swap_root = config.memory.nvme_path
    return ZeroSettings(
        stage=config.zero_stage,
        dtype=config.model.dtype,
        accumulation=accumulation,
        max_grad_norm=config.optimizer.max_grad_norm,
        learning_rate=config.optimizer.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
        kind=config.optimizer.kind,
        groups=config.optimizer.groups,
        seed=config.run.seed,
        offload_optimizer=config.memory.offload_optimizer,
        offload_param=config.memory.offload_param,
        secondary_size=_secondary_size(config, nodes) if config.memory.zero_secondary == "node" and nodes else 1,
        # Each run swaps to its own directory.
        nvme_path=None if swap_root is None else str(Path(swap_root).expanduser() / config.run.name),
    )


def _secondary_size(config: Config, nodes: Sequence[str]) -> int:
    """Return the number of ranks that share secondary shards; 1 on one node, or if the shards would exceed the plan."""
    planned, size = secondary_size(config), largest_node_group(nodes)
    return size if 1 < planned <= size < len(nodes) else 1


def warn_of_unused_shards(config: Config, nodes: Sequence[str]) -> None:
    """Log a warning if the workers are on several nodes, but do not share the configured secondary shards."""
    per_node = [len(tuple(ranks)) for _, ranks in groupby(nodes)]
    cluster, planned = config.cluster, secondary_size(config)
    if config.memory.zero_secondary == "none" or len(per_node) < 2 or _secondary_size(config, nodes) > 1:
        return
    groups = f"groups of {planned} workers on one node; use a multiple of {planned} workers on each node"
    _log.warning(
        "memory.zero_secondary=node has no effect in this attempt: the nodes have %s workers, but memory is planned "
        "for cluster.workers.max=%d and cluster.gpus_per_node=%d, that is, for %s",
        " or ".join(map(str, sorted(set(per_node)))), cluster.workers.max, cluster.gpus_per_node,
        groups if planned > 1 else "one node; set cluster.gpus_per_node to the number of GPUs per node",
    )  # fmt: skip


def last_step_of(config: Config, plan: Plan) -> int:
    """Return the step after which the run stops: ``run.stop_step``, or the end of the plan if that comes first."""
    return plan.num_steps if config.run.stop_step is None else min(config.run.stop_step, plan.num_steps)


def config_of_checkpoint(config: Config, manifest: Manifest) -> Config:
    """Return the configuration of the stage that trained a checkpoint, or ``config`` for a run without stages.

    If a branch has added stages to a run without stages, earlier checkpoints use the first stage's configuration,
    which has the same fixed settings.

    Raises:
        UserError: The configuration has no stage with the checkpoint's stage name.
    """
    if not config.stages:
        return config
    names = [stage.name for stage in config.stages]
    if not manifest.meta.stage:
        return stage_config(config, 0)
    if manifest.meta.stage not in names:
        raise UserError(
            f"stages: the checkpoint of step {manifest.step} was trained in stage {manifest.meta.stage!r}, but "
            f"{config.run_dir / CONFIG_FILE} has only the stages {', '.join(names)}; restore that file"
        )
    return stage_config(config, names.index(manifest.meta.stage))


@cache
def versions() -> dict[str, str]:
    """Return the versions of libraries that affect numerical results. The dict is cached; do not modify it."""
    # Every saved state records the versions, and the lookup is slower than copying a small state.
    found = {}
    for name in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def flat_settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Flatten a settings tree to a dict with dotted paths as keys."""
    flat: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
