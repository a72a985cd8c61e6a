"""How rows reach the workers where the configuration leaves it open."""

from __future__ import annotations

from typing import Literal

from ray_ulysses.config import Config
from ray_ulysses.config.stages import stage_config
from ray_ulysses.storage.location import ObjectLocation, parse_location

DataEngine = Literal["ray", "local"]


def data_engine(config: Config) -> DataEngine:
    """Return the engine that reads the rows of a run.

    Reading files takes a worker less time than receiving their tokens from another process. A row from an object store
    takes requests, up to one per document, whose time is spent in tasks beside the workers.
    """
    if config.data.engine != "auto":
        return config.data.engine
    return "ray" if any(isinstance(parse_location(path), ObjectLocation) for path in _corpora(config)) else "local"


def engine_reason(config: Config) -> str:
    """Return in words how rows reach the workers, and why."""
    engine = data_engine(config)
    said = {"ray": "in tasks of Ray Data beside the workers", "local": "in the workers"}[engine]
    if config.data.engine != "auto":
        return f"{said} (data.engine={engine})"
    why = {"ray": "a corpus lies on an object store", "local": "all corpora lie in file systems"}[engine]
    return f"{said} (data.engine=auto: {why})"


def _corpora(config: Config) -> list[str]:
    stages = [stage_config(config, number) for number in range(max(1, len(config.stages)))]
    return [path for stage in stages for path, _ in stage.data_sources]
