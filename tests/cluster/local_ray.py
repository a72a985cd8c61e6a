"""A Ray of one's own for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray


@contextmanager
def local_ray(num_cpus: int = 4) -> Iterator[None]:
    """Start a local Ray, never the one that happens to run on the machine, and end it again."""
    with pytest.MonkeyPatch.context() as patch:
        # A plain ray.init() may create a token that later turns authentication on for other clusters.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.delenv("RAY_ADDRESS", raising=False)
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=256 << 20,
            log_to_driver=False,
            configure_logging=False,
        )
        try:
            yield
        finally:
            ray.shutdown()
