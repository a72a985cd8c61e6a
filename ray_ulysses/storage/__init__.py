"""Storage of a run's files: atomic files behind one small protocol, with one writer at a time."""

from ray_ulysses.storage.atomic import sweep_temporaries
from ray_ulysses.storage.hold import RunLease, current_owner, run_hold
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.location import LocationError, join_location, parse_location
from ray_ulysses.storage.lock import LockOwner, RunLock
from ray_ulysses.storage.place import open_store
from ray_ulysses.storage.probe import check_storage
from ray_ulysses.storage.store import AlreadyExistsError, Buffer, Store

__all__ = [
    "AlreadyExistsError",
    "Buffer",
    "LocalStore",
    "LocationError",
    "LockOwner",
    "RunLease",
    "RunLock",
    "Store",
    "check_storage",
    "current_owner",
    "join_location",
    "open_store",
    "parse_location",
    "run_hold",
    "sweep_temporaries",
]
