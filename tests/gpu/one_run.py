"""Runs one worker of the real training loop on a GPU, in a process of its own, and writes what it trained."""

from __future__ import annotations

import json
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ray_ulysses.config.loading import parse_config
from tests.distributed.run_case import prepare_attempt, run_worker


def main(order: dict[str, Any]) -> None:
    """Train as ordered; a second attempt in the same process would not show what a new one has to load."""
    config, device = parse_config(order["config"]), order.get("device", "cuda")
    session = order["session"]
    prepare_attempt(config, session)
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1,
            timeout=timedelta(seconds=120),
        )  # fmt: skip
        end = run_worker(
            0, 1, config, session, kill=order.get("kill"), stop_at=order.get("stop_at"),
            peer_memory=order.get("peer_memory"), device=device,
        )  # fmt: skip
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        dist.destroy_process_group()
    Path(order["out"]).write_text(json.dumps({"end": end, "peak_bytes": peak}))


if __name__ == "__main__":
    made = json.loads(sys.argv[1])
    for field in ("kill", "peer_memory"):
        made[field] = None if made.get(field) is None else tuple(made[field])
    main(made)
