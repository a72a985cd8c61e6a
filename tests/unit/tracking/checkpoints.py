"""Builders for checkpoint updates and tracked checkpoints."""

from __future__ import annotations

from typing import Any

from ray_ulysses.tracking.events import CheckpointCommitted
from ray_ulysses.tracking.mlflow_models import CheckpointState, TrackedCheckpoint

STORE = "/runs/demo"


def _fields(step: int, attempt: int) -> dict[str, Any]:
    path, metrics = f"{STORE}/checkpoints/step-{step:08d}", {"loss": 5.0 - step / 100}
    return {"step": step, "attempt": attempt, "path": path, "metrics": metrics}


def committed(step: int, attempt: int = 1, **changes: Any) -> CheckpointCommitted:
    fields = {
        **_fields(step, attempt), "world_size": 4, "sp_size": 2, "next_row": 6 * step, "cursor": {"next_row": 6 * step},
        "digest": step, "tokens": 0, "time": 1_700_000_001.0 + step, "written_at": 1_700_000_000.0 + step,
    }  # fmt: skip
    return CheckpointCommitted(**{**fields, **changes})


def tracked(step: int, attempt: int = 1, state: CheckpointState = "committed", **changes: Any) -> TrackedCheckpoint:
    own = {"model_id": f"m-{step}-{attempt}", "is_complete": True, "state": state, "store": STORE, "cursor": {}}
    return TrackedCheckpoint(**{**_fields(step, attempt), **own, **changes})
