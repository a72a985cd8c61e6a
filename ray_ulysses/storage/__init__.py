"""Storage for a run's files: a small store protocol with atomic writes, and a claim that admits one writer."""

from ray_ulysses.storage.atomic import sweep_temporaries
from ray_ulysses.storage.claim import Claim, current_owner, run_claim
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.location import LocationError, parse_location
from ray_ulysses.storage.lock import LockOwner
from ray_ulysses.storage.place import open_store
from ray_ulysses.storage.probe import check_storage
from ray_ulysses.storage.store import AlreadyExistsError, Buffer, Store

__all__ = [
    "AlreadyExistsError",
    "Buffer",
    "Claim",
    "LocalStore",
    "LocationError",
    "LockOwner",
    "Store",
    "check_storage",
    "current_owner",
    "open_store",
    "parse_location",
    "run_claim",
    "sweep_temporaries",
]
