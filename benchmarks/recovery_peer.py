"""The same training loop under Ray Train as it comes: elastic scaling, its own failure policy and health checks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests.distributed.run_case import prepare_attempt


def train(job: dict[str, Any]) -> None:
    """Run one attempt in a Ray Train worker, whose process group Ray has set up."""
    from ray_ulysses.config.loading import parse_config
    from ray_ulysses.data.read.row_source import DirectSource
    from ray_ulysses.trainer.loop import run_attempt
    from ray_ulysses.trainer.worker import Worker

    config, context = parse_config(job["config"]), ray.train.get_context()
    run_attempt(
        config,
        Worker(
            rank=context.get_world_rank(),
            local_rank=context.get_local_rank(),
            world_size=context.get_world_size(),
            node=ray.util.get_node_ip_address(),
            device=torch.device("cpu"),
            session="peer",
            make_source=lambda plan, reader, layout, rank: DirectSource(
                reader,
                plan,
                layout.dp_rank(rank),
                layout.dp_size,
                layout.sp_rank(rank),
                layout.sp_size,
                ring_size=layout.ring_size,
            ),
        ),
    )


def main(path: str) -> None:
    """Train the run of a configuration."""
    from ray_ulysses.config.loading import load_config

    config = load_config(Path(path))
    prepare_attempt(config, "peer")
    ray.init(address=config.cluster.address, log_to_driver=False)
    limits = config.cluster.workers
    TorchTrainer(
        train,
        train_loop_config={"config": config.model_dump(mode="json")},
        scaling_config=ScalingConfig(num_workers=(limits.min, limits.max), resources_per_worker={"CPU": 1.0}),
        run_config=RunConfig(
            name="peer", storage_path=str(config.run_dir / "ray"), failure_config=FailureConfig(max_failures=5)
        ),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1])
