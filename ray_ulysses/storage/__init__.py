"""Where a run keeps its files: atomic files behind one small protocol, one writer at a time."""

from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.lock import LockOwner, RunLock, current_owner
from ray_ulysses.storage.probe import check_storage
from ray_ulysses.storage.store import AlreadyExistsError, Buffer, Store

__all__ = [
    "AlreadyExistsError",
    "Buffer",
    "LocalStore",
    "LockOwner",
    "RunLock",
    "Store",
    "check_storage",
    "current_owner",
]
