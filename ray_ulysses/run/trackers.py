"""Connects a run's trackers to its journal."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from ray_ulysses.config import Config
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.run.checkpoint_store import checkpoint_location
from ray_ulysses.run.ownership import run_identity
from ray_ulysses.run.run_files import describing_files
from ray_ulysses.run_names import TENSORBOARD_FOLDER
from ray_ulysses.storage.place import node_folder
from ray_ulysses.tracking.mlflow_tracker import MlflowSink
from ray_ulysses.tracking.tail import JournalSource, ReadUpdates, Sink, Tail, following
from ray_ulysses.tracking.tensorboard_sink import TensorBoardSink
from ray_ulysses.tracking.updates import Translation
from ray_ulysses.tracking.wandb_sink import WandbSink

_POLL_S = 1.0
_POLL_STORE_S = 3.0
"""Polling interval in an object store, in seconds. Journal segments are written every 3 seconds there."""


def tracked(config: Config, *, drain_s: float = 20.0) -> AbstractContextManager[None]:
    """Return a context manager that delivers a run's journal to its trackers, starting with undelivered records.

    The caller must hold the run's claim, since only one process may deliver to a tracker.

    Args:
        config: The run's configuration.
        drain_s: Maximum time to deliver the remaining records at the end of the block, in seconds.
    """
    return following([_tail(config, name, sink) for name, sink in _sinks(config).items()], drain_s)


def _tail(config: Config, name: str, sink: Sink) -> Tail:
    def open_source(delivered: Mapping[str, int]) -> ReadUpdates:
        translation = Translation(
            run_dir=str(config.run_dir),
            location=checkpoint_location(config),
            log_every_steps=config.run.log_every_steps,
            tags=config.tracking.tags,
        )
        return JournalSource(config.run_dir, delivered, translation, lambda: describing_files(config.run_dir)).read

    poll_s = _POLL_S if isinstance(config.run_dir, Path) else _POLL_STORE_S
    return Tail(name, sink, config.run_dir, open_source, poll_s=poll_s)


def _sinks(config: Config) -> dict[str, Sink]:
    """Return a run's sinks by tracker name, or an empty dict if tracking is disabled."""
    own = node_folder(config.run_dir)
    sinks: dict[str, Sink] = {}
    if config.tracking_uri is not None:
        sinks["mlflow"] = MlflowSink(
            uri=config.tracking_uri,
            experiment=config.tracking.experiment,
            run_name=config.run.name,
            run_dir=config.run_dir,
            location=checkpoint_location(config),
            allow_http=config.tracking.allow_http,
        )
    if "wandb" in config.trackers:
        sinks["wandb"] = WandbSink(
            project=config.tracking.experiment,
            run_name=config.run.name,
            run_id=stable_hash(run_identity(config)),
            directory=own,
        )
    if "tensorboard" in config.trackers:
        sinks["tensorboard"] = TensorBoardSink(own / TENSORBOARD_FOLDER)
    return sinks
