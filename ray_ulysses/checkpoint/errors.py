"""Checkpoint errors, with a separate class for each case that callers handle differently."""

from __future__ import annotations

from ray_ulysses.errors import FinalError, RunError


class CheckpointError(RunError):
    """A checkpoint could not be saved or loaded; every rank raises the same message."""

    reason: str | None = None
    """Reason for the failure, without the message's advice about storage, which does not apply to peer memory."""


class DamagedCheckpointError(CheckpointError):
    """A committed checkpoint is damaged; the caller should fall back to the previous checkpoint."""


class UnreadableCheckpointError(CheckpointError):
    """The storage returned an error for a committed checkpoint; the failure may be temporary."""


class StorageFailedError(CheckpointError, FinalError):
    """Saves have failed too often and for too long; a new attempt would not help."""


class FencedError(CheckpointError):
    """A newer attempt has started, so this attempt must not commit or delete anything."""
