"""Builders for checkpoint updates and tracked checkpoints."""

from __future__ import annotations

from typing import Any

from ray_ulysses.tracking.events import CheckpointCommitted
from ray_ulysses.tracking.mlflow_models import CheckpointState, TrackedCheckpoint

STORE = "/runs/demo"


def committed(step: int, attempt: int = 1, **changes: Any) -> CheckpointCommitted:
    fields: dict[str, Any] = {
        "step": step,
        "attempt": attempt,
        "path": f"{STORE}/checkpoints/step-{step:08d}",
        "world_size": 4,
        "sp_size": 2,
        "next_row": 6 * step,
        "cursor": {"next_row": 6 * step},
        "metrics": {"loss": 5.0 - step / 100},
        "digest": step,
        "tokens": 0,
        "time": 1_700_000_001.0 + step,
        "written_at": 1_700_000_000.0 + step,
    }
    return CheckpointCommitted(**{**fields, **changes})


def tracked(step: int, attempt: int = 1, state: CheckpointState = "committed", **changes: Any):
    fields: dict[str, Any] = {
        "model_id": f"m-{step}-{attempt}",
        "is_complete": True,
        "step": step,
        "attempt": attempt,
        "state": state,
        "path": f"{STORE}/checkpoints/step-{step:08d}",
        "store": STORE,
        "cursor": {},
        "metrics": {"loss": 5.0 - step / 100},
    }
    return TrackedCheckpoint(**{**fields, **changes})
