"""How rows reach the workers where the configuration leaves it open."""

from __future__ import annotations

from typing import Literal

from ray_ulysses.config import Config

DataEngine = Literal["ray", "local"]


def data_engine(config: Config) -> DataEngine:
    """Return the engine that reads the rows of a run.

    Reading takes a worker less time than receiving tokens from another process, and of an object store it waits for no
    row either, since a row is fetched while the one before trains (``bench_data.py --object-store``).
    """
    return "local" if config.data.engine == "auto" else config.data.engine


def engine_reason(config: Config) -> str:
    """Return in words how rows reach the workers, and why."""
    said = {"ray": "in tasks of Ray Data beside the workers", "local": "in the workers"}[data_engine(config)]
    return f"{said} (data.engine={config.data.engine})"
