"""Opens a run's trackers, and describes the run's checkpoints for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_ulysses.checkpoint.choice import committed_steps, for_each_step
from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.checkpoint.manifest import ManifestError, read_facts
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.run.ownership import run_identity
from ray_ulysses.run_names import SPOOL_FOLDER, TENSORBOARD_FOLDER, spool_folder
from ray_ulysses.storage.place import node_folder, place_of
from ray_ulysses.tracking.checkpoint_updates import CheckpointInventory, CommittedCheckpoint
from ray_ulysses.tracking.delivery import SpooledTracker
from ray_ulysses.tracking.mlflow_tracker import MlflowSink, is_tracked
from ray_ulysses.tracking.tensorboard_sink import TensorBoardSink
from ray_ulysses.tracking.trackers import Trackers
from ray_ulysses.tracking.wandb_sink import WandbSink

if TYPE_CHECKING:
    from ray_ulysses.checkpoint import CheckpointMeta, CheckpointRef
    from ray_ulysses.config import Config
    from ray_ulysses.storage import Store


def open_trackers(config: Config) -> Trackers:
    """Return the trackers of a run; none if tracking is disabled."""
    names, run_dir = config.trackers, config.run_dir
    own = node_folder(run_dir)
    if own != run_dir and is_tracked(run_dir):
        # Another node may have recorded it so far.
        (own / SPOOL_FOLDER).mkdir(parents=True, exist_ok=True)
    found: list[SpooledTracker] = []
    if config.tracking_uri is not None:
        mlflow = MlflowSink(
            uri=config.tracking_uri,
            experiment=config.tracking.experiment,
            run_name=config.run.name,
            run_dir=run_dir,
            allow_http=config.tracking.allow_http,
        )
        found.append(SpooledTracker(mlflow, own / SPOOL_FOLDER))
    if "wandb" in names:
        sink = WandbSink(
            project=config.tracking.experiment,
            run_name=config.run.name,
            run_id=stable_hash(run_identity(config)),
            directory=own,
        )
        found.append(SpooledTracker(sink, own / spool_folder("wandb")))
    if "tensorboard" in names:
        files = TensorBoardSink(own / TENSORBOARD_FOLDER)
        found.append(SpooledTracker(files, own / spool_folder("tensorboard")))
    return Trackers(found)


def take_inventory(store: Store, location: str, attempt: int) -> CheckpointInventory:
    """Return all checkpoints that are part of a run.

    Args:
        store: The run's store.
        location: Its path or URI.
        attempt: The attempt that takes the inventory; commits of it or of later attempts are left out by the tracker.

    Raises:
        OSError: The store can't be listed.
    """

    def read(step: int) -> tuple[CheckpointRef, CheckpointMeta] | None:
        try:
            return read_facts(store, step)
        except ManifestError:
            return None

    steps = committed_steps(store)
    found = for_each_step(steps, read)
    lineage = read_lineage(store)
    return CheckpointInventory(
        attempt=attempt,
        store=location,
        checkpoints=tuple(
            committed_checkpoint(location, *one)
            for one in found
            if one is not None and lineage.holds(one[0].step, one[0].attempt)
        ),
        unread=tuple(step for step, one in zip(steps, found, strict=True) if one is None),
    )


def committed_checkpoint(location: str, ref: CheckpointRef, meta: CheckpointMeta) -> CommittedCheckpoint:
    """Return a checkpoint as the tracker records it (pure).

    Args:
        location: Root of its store.
        ref: Its name.
        meta: What the training loop added to it.
    """
    names = ("loss", "eval_loss")
    return CommittedCheckpoint(
        step=ref.step,
        attempt=ref.attempt,
        path=str(place_of(location) / ref.folder),
        store=location,
        topology={
            "world_size": ref.world_size,
            "sp_size": meta.sp_size,
            "ring_size": meta.ring_size,
            "dp_size": ref.world_size // meta.sp_size,
        },
        cursor=dict(meta.cursor),
        metrics={name: meta.metrics[name] for name in names if name in meta.metrics},
        digest=meta.digest,
        tokens=meta.tokens,
        reason=meta.reason,
        plan_id=str(meta.cursor.get("plan_id", "")),
        zero_stage=meta.zero_stage,
        parent=str(meta.extra.get("parent") or ""),
        written_at=meta.written_at,
        stage=meta.stage,
        measured=meta.measured,
    )
