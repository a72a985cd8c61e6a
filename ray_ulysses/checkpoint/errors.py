"""Checkpoint errors, one class for each way in which the caller reacts."""

from __future__ import annotations

from ray_ulysses.errors import FinalError, RunError


class CheckpointError(RunError):
    """A checkpoint could not be saved or loaded; every rank raises the same text."""

    reason: str | None = None
    """Why it could not be saved, without the advice that is for checkpoints on storage."""


class DamagedCheckpointError(CheckpointError):
    """A committed checkpoint is not what was written: the one before it is to be taken."""


class UnreadableCheckpointError(CheckpointError):
    """The storage does not give a committed checkpoint now; that may pass."""


class StorageFailedError(CheckpointError, FinalError):
    """Saves have failed more often, and for longer, than the run tolerates; the next attempt's would as well."""


class FencedError(CheckpointError):
    """A newer attempt has begun; this one must not commit or delete anything."""
