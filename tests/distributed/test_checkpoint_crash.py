"""A death at any point of a save: the checkpoint before stays, the new one is committed and whole, or absent."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_ulysses.checkpoint import (
    CheckpointError,
    CheckpointMeta,
    CheckpointRef,
    KeepRules,
    Retention,
    ShardedState,
    StateDescription,
    TensorPart,
    TensorSpec,
    TorchRankMessenger,
    load_parts,
    newest_committed,
    save_checkpoint,
)
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.intervals import partition
from ray_ulysses.checkpoint.messenger import RankMessenger, SingleRankMessenger
from ray_ulysses.storage import LocalStore
from tests.distributed.harness import run_ranks, run_ranks_to_outcomes

SIZE = 5000
BEFORE, AFTER = 10, 20


CHANGES = frozenset(
    f"os.{name}" for name in ("chmod", "link", "mkdir", "remove", "rename", "rmdir", "truncate", "utime")
)
"""What Python reports before it makes such a call, by whatever module and with whatever arguments it is made."""


class _Countdown:
    """Kills its process just before the n-th call that changes the disk or makes bytes durable.

    Such a call makes, links, renames or deletes a name, writes a chunk, or syncs a file or a folder.
    """

    def __init__(self, calls: int) -> None:
        self.left = calls
        sync = os.fsync

        def counted(descriptor: int) -> None:
            # The one of them that Python does not report.
            self.count()
            sync(descriptor)

        os.fsync = counted
        sys.addaudithook(self._hear)

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and arguments[2] & os.O_CREAT):
            self.count()


class _DeadlyStore(LocalStore):
    """A local store with a countdown before each chunk as well."""

    def __init__(self, root: Path, calls: int) -> None:
        super().__init__(root)
        self.countdown = _Countdown(calls)

    def create(self, key: str, chunks: Any) -> int:
        return super().create(key, self._counted(chunks))

    def _counted(self, chunks: Any) -> Any:
        for chunk in chunks:
            self.countdown.count()
            yield chunk


def _state(rank: int, world_size: int, step: int) -> ShardedState:
    whole = torch.arange(SIZE, dtype=torch.float32) + step
    parts = []
    for key in ("fp32/a", "exp_avg/a"):
        start, stop = partition(SIZE, world_size, rank)
        parts.append(TensorPart(key=key, start=start, tensor=whole[start:stop].clone()))
    spec = TensorSpec(shape=(SIZE,), dtype="F32")
    description = StateDescription(tensors={"fp32/a": spec, "exp_avg/a": spec})
    return ShardedState(parts=tuple(parts), description=description)


def _save(
    store: LocalStore, rank: int, world_size: int, step: int, attempt: int, messenger: RankMessenger
) -> CheckpointRef:
    meta = CheckpointMeta(sp_size=1, cursor={"step": step}, digest="0", tokens=0)
    return save_checkpoint(
        store, step=step, attempt=attempt, rank=rank, world_size=world_size, state=_state(rank, world_size, step),
        meta=meta, messenger=messenger,
    )  # fmt: skip


def _die_in_single_save(rank: int, world_size: int, run_dir: str, calls: int) -> None:
    store = _DeadlyStore(Path(run_dir), calls)
    _save(store, rank, world_size, AFTER, 2, SingleRankMessenger())
    store.countdown.left = -1


def _die_in_joint_save(rank: int, world_size: int, run_dir: str, calls: dict[int, int]) -> str:
    store = _DeadlyStore(Path(run_dir), calls.get(rank, -1))
    try:
        _save(store, rank, world_size, AFTER, 2, TorchRankMessenger())
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "survived"


def _fill_the_disk(rank: int, world_size: int, run_dir: str, limits: dict[int, int]) -> str:
    """The kernel itself refuses this rank's bytes beyond a file size, as a full disk or a quota does."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = limits.get(rank, resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        _save(LocalStore(run_dir), rank, world_size, AFTER, 2, TorchRankMessenger())
    except CheckpointError as error:
        return str(error)
    return "saved"


def _check_loadable(run_dir: Path, world_size: int = 3) -> int:
    """Load the newest checkpoint at another world size and return its step."""
    store = LocalStore(run_dir)
    choice = newest_committed(store)
    assert choice.damaged == ()
    assert choice.manifest is not None
    for rank in range(world_size):
        state = _state(rank, world_size, choice.manifest.step)
        blank = [TensorPart(key=p.key, start=p.start, tensor=torch.zeros_like(p.tensor)) for p in state.parts]
        load_parts(store, choice.manifest, blank)
        for loaded, expected in zip(blank, state.parts, strict=True):
            assert torch.equal(loaded.tensor, expected.tensor)
    return choice.manifest.step


def test_sigkill_at_every_call_of_a_save_leaves_the_checkpoint_before_or_the_whole_new_one(tmp_path: Path) -> None:
    committed = []
    for calls in range(1, 100):
        run_dir = tmp_path / str(calls)
        store = LocalStore(run_dir)
        _save(store, 0, 1, BEFORE, 1, SingleRankMessenger())
        (outcome,) = run_ranks_to_outcomes(
            _die_in_single_save, 1, str(run_dir), calls, process_group=False, timeout_s=60
        )
        newest = _check_loadable(run_dir)
        assert newest == max(committed_steps(store))
        if outcome.ok:
            break
        assert outcome.exit_code == -signal.SIGKILL
        committed.append(newest == AFTER)
        # The next attempt is not in the way of what the dead one left, and clears it.
        if newest == BEFORE:
            ref = _save(store, 0, 1, AFTER, 3, SingleRankMessenger())
            assert _check_loadable(run_dir) == AFTER
            Retention(store, KeepRules(last=1)).apply(ref)
            assert [key.split("/")[1:3] for key in store.list("checkpoints")] == [
                ["step-00000020", "attempt-0003"],
                ["step-00000020", "manifest.json"],
            ]
    else:
        pytest.fail("the save never came to its end")
    # Two folders (made, synced), the shard (opened, 4 chunks, synced, linked, its temporary name deleted, its folder
    # synced) and the manifest (the same, 1 chunk): absent up to the manifest's link, there at the two calls after it.
    assert committed == [False] * (4 + 9 + 4) + [True] * 2


# The 6th call is in the shard's file, whichever rank makes the folders.
@pytest.mark.parametrize(("dying", "calls"), [(0, 1), (1, 6)], ids=["rank-0-at-once", "rank-1-in-its-shard"])
def test_a_rank_killed_in_a_save_ends_the_others_and_commits_nothing(tmp_path: Path, dying: int, calls: int) -> None:
    _save(LocalStore(tmp_path), 0, 1, BEFORE, 1, SingleRankMessenger())
    outcomes = run_ranks_to_outcomes(_die_in_joint_save, 2, str(tmp_path), {dying: calls}, timeout_s=60)
    assert outcomes[dying].exit_code == -signal.SIGKILL
    # The other hears of it from gloo and is not left hanging.
    assert outcomes[1 - dying].value is None or "survived" not in outcomes[1 - dying].value
    assert outcomes[1 - dying].stacks is None
    assert committed_steps(LocalStore(tmp_path)) == (BEFORE,)
    assert _check_loadable(tmp_path) == BEFORE


def test_a_disk_that_is_full_for_one_rank_is_the_same_error_on_every_rank(tmp_path: Path) -> None:
    _save(LocalStore(tmp_path), 0, 1, BEFORE, 1, SingleRankMessenger())
    errors = run_ranks(_fill_the_disk, 2, str(tmp_path), {1: 4096}, timeout_s=60)
    assert errors[0] == errors[1]
    assert "rank 1: attempt-0002/rank-00001-of-00002.safetensors" in errors[0] and "File too large" in errors[0]
    assert _check_loadable(tmp_path) == BEFORE
