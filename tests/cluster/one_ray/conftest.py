"""The Ray that the tests of this folder share: theirs is what runs on a cluster, not how one starts or ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from ray_ulysses.cluster.ray_access import private_session


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """Start a local Ray, never the one that happens to run on the machine, and end it again."""
    with pytest.MonkeyPatch.context() as patch, private_session():
        patch.delenv("RAY_ADDRESS", raising=False)
        ray.init(
            address="local", num_cpus=4, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False,
            configure_logging=False,
        )  # fmt: skip
        try:
            yield
        finally:
            ray.shutdown()
