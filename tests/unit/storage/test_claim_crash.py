"""A claim whose holder's store fails at any call: the next one gets it, and never both have it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.storage import LocalStore, Store
from ray_ulysses.storage.claim import Claim
from tests.stores import FaultyStore, Kind, MemoryStore
from tests.unit.storage.test_claim import LEASE_S, ManualClock

_KINDS: tuple[Kind, ...] = ("create", "replace", "list", "delete", "open", "read")
_BEATS = 12


@pytest.fixture(params=["files", "an object store"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(tmp_path) if request.param == "files" else MemoryStore()


def _claim(store: Store, clock: ManualClock) -> Claim:
    return Claim(store, run="demo", clock=clock, lease_s=LEASE_S, machine="")


def _life(claim: Claim, clock: ManualClock) -> Iterator[None]:
    """Take a free claim, beat, fall silent for longer than the lease, win it again, beat and give it back."""
    with contextlib.suppress(OSError, UserError):
        claim.acquire(beat_in_background=False)
    yield
    for number in range(_BEATS):
        if number == _BEATS // 2:
            clock.sleep(LEASE_S * 2)
        _live_on(claim, clock)
        yield
    claim.release()


def _live_on(claim: Claim, clock: ManualClock) -> None:
    clock.sleep(LEASE_S / 6)
    with contextlib.suppress(OSError):
        claim.beat()


def _next_has_it(store: Store) -> bool:
    """Return whether a newcomer who sees nobody's process takes it, in the time that a silent holder is given."""
    clock = ManualClock()
    second = _claim(store, clock)
    second.acquire(beat_in_background=False)
    assert clock.time <= LEASE_S * 1.2
    return second.held


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_a_holder_whose_store_fails_at_any_call_never_has_it_beside_another(
    files: Store, when: Literal["before", "after"], lasting: bool
) -> None:
    """The next one comes after each call that failed, and the first one goes on: one that dies is one that fails."""
    fail_at, has_failed = 0, True
    while has_failed:
        fail_at += 1
        files.delete("lock")
        error = OSError(5, "away")
        faulty = FaultyStore(files, fail_at=fail_at, error=error, kinds=_KINDS, when=when, lasting=lasting)
        clock = ManualClock()
        first, second = _claim(faulty, clock), None
        for _ in _life(first, clock):
            if faulty.has_failed and second is None:
                # It watches while the first one beats, as that does by its own clock.
                watching = ManualClock()
                second = _claim(files, watching)
                for step in range(1, 8):
                    watching.at(5.0 * step, partial(_live_on, first, clock))
                with contextlib.suppress(UserError):
                    second.acquire(beat_in_background=False)
            elif second is not None:
                second.beat()
            assert second is None or not (first.held and second.held), fail_at
        has_failed = faulty.has_failed
        if second is not None:
            second.release()
        assert _next_has_it(files), fail_at
    assert fail_at > _BEATS
