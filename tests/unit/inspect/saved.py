"""Builders for runs with real checkpoints, and ways to damage them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ray_ulysses.checkpoint import CheckpointMeta, save_checkpoint
from ray_ulysses.config.loading import parse_config
from ray_ulysses.storage import LocalStore, Store
from ray_ulysses.storage.local import LocalFile
from tests.unit.checkpoint.fakes import on_ranks, shard_of
from tests.unit.checkpoint.manifests import signed
from tests.unit.config.trees import small_tree

WRITTEN = 1_790_000_000.0  # 2026-09-21 14:13:20 UTC
# A block of checksums is 64 KiB: the first tensor takes several of them on each rank.
TENSORS = {"fp32/weight": torch.arange(200_000, dtype=torch.float32), "frozen/bias": torch.ones(50)}


def make_folder(folder: Path, **settings: Any) -> LocalStore:
    """Make a run directory with a configuration and a journal folder; return its store."""
    (folder / "journal").mkdir(parents=True)
    tree = small_tree(run__storage=str(folder.parent), run__name=folder.name, **settings)
    (folder / "config.yaml").write_text(parse_config(tree).to_yaml())
    return LocalStore(folder)


def save(store: Store, step: int, *, attempt: int = 1, world_size: int = 2, **changes: Any) -> None:
    """Commit a checkpoint from ``world_size`` ranks."""
    fields: dict[str, Any] = {
        "sp_size": 2, "cursor": {"next_row": step}, "digest": f"{step:016x}", "tokens": 100 * step, "reason": "steps",
        "metrics": {"loss": 5.0 - step / 100}, "written_at": WRITTEN + step,
    }  # fmt: skip
    meta = CheckpointMeta(**{**fields, **changes})
    same = {"step": step, "attempt": attempt, "world_size": world_size, "meta": meta}

    def save_rank(rank: int, messenger: Any) -> None:
        save_checkpoint(store, rank=rank, state=shard_of(TENSORS, rank, world_size), messenger=messenger, **same)

    results = on_ranks(world_size, save_rank)
    for result in results:
        if isinstance(result, Exception):
            raise result


def shard(folder: Path, step: int, rank: int = 1, attempt: int = 1) -> Path:
    name = f"attempt-{attempt:04d}/rank-{rank:05d}-of-00002.safetensors"
    return folder / "checkpoints" / f"step-{step:08d}" / name


def manifest(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}" / "manifest.json"


def flip(path: Path, position: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def cut(path: Path, num_bytes: int) -> None:
    """Truncate a file."""
    path.write_bytes(path.read_bytes()[:-num_bytes])


def make_foreign(path: Path) -> None:
    """Change the schema version of a manifest, with a correct checksum."""
    values = json.loads(path.read_bytes())
    values["schema_version"] = 99
    path.write_bytes(signed(values))


@contextmanager
def denied(path: Path) -> Iterator[None]:
    """Deny read access to a file."""
    opened = LocalStore.open

    def guarded(store: LocalStore, key: str) -> LocalFile:
        if store.path(key) == path:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(store, key)

    with patch.object(LocalStore, "open", guarded):
        yield
