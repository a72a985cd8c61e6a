"""The complete configuration: its sections, and values derived from them alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field

from ray_ulysses.config.devices import Device
from ray_ulysses.config.learning import DataSection, RunSection, StageSection
from ray_ulysses.config.model import ModelSection
from ray_ulysses.config.objective import ObjectiveSection
from ray_ulysses.config.optimizer import OptimizerSection, ScheduleSection
from ray_ulysses.config.running import (
    CheckpointSection,
    ClusterSection,
    ElasticSection,
    MemorySection,
    ParallelSection,
    TrackerName,
    TrackingSection,
    mlflow_is_on,
)
from ray_ulysses.config.section import Section
from ray_ulysses.config.yaml_text import dump_yaml
from ray_ulysses.errors import NOT_GIVEN, Problem
from ray_ulysses.storage.location import SQLITE
from ray_ulysses.storage.place import Place, place_of


class Config(Section):
    """All settings of a run. Create it with `load_config`, which reports all errors at once."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    run: RunSection
    model: ModelSection
    data: DataSection
    objective: ObjectiveSection = Field(default_factory=ObjectiveSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    memory: MemorySection = Field(default_factory=MemorySection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    elastic: ElasticSection = Field(default_factory=ElasticSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)
    cluster: ClusterSection
    stages: tuple[StageSection, ...] = Field(default=(), strict=False)

    @property
    def run_dir(self) -> Place:
        """Directory of the run, ``<storage>/<name>``."""
        return place_of(self.run.storage) / self.run.name

    @property
    def dp_size(self) -> int:
        """Number of groups of ``parallel.sp_size`` workers. Each group trains on its own rows."""
        return self.cluster.workers.max // self.parallel.sp_size

    @property
    def gpu(self) -> Device | None:
        """GPU model of the workers, or None on CPUs and without ``cluster.device``."""
        device = self.cluster.device
        return None if device is None or self.cluster.gpus_per_worker == 0 else device.figures

    @property
    def device_gib(self) -> float | None:
        """Memory limit of one GPU in GiB: ``memory.device_gib``, or by default the memory of ``cluster.device``."""
        return self.memory.device_gib or (None if self.gpu is None else self.gpu.gib)

    @property
    def zero_stage(self) -> Literal[1, 2, 3]:
        """ZeRO stage: ``memory.zero_stage`` with ``auto`` resolved."""
        return zero_stage(self)

    @property
    def data_sources(self) -> tuple[tuple[str, float | None], ...]:
        """Path and weight of each corpus of a run without stages or of one stage. A None weight uses every document."""
        if self.data.sources is not None:
            return tuple((source.path, source.weight) for source in self.data.sources)
        # Only `plan` accepts a configuration without a corpus.
        return () if self.data.path is None else ((self.data.path, None),)

    @property
    def trackers(self) -> tuple[TrackerName, ...]:
        """Trackers in use; empty if tracking is disabled."""
        return self.tracking.trackers if self.tracking.enabled else ()

    @property
    def tracking_uri(self) -> str | None:
        """MLflow's URI with the default filled in, or None if the run is not tracked in MLflow."""
        if not mlflow_is_on(self.tracking):
            return None
        if self.tracking.uri is None:
            # A rule requires a server unless the storage is a path.
            assert isinstance(self.run_dir, Path)
            return f"{SQLITE}{self.run_dir.parent / 'mlflow.db'}"
        return self.tracking.uri

    def with_absolute_paths(self, base: Path) -> Config:
        """Return a copy with all paths that workers open made absolute, relative to ``base``.

        Workers have different working directories, so a relative path would be wrong there. ``base`` must be absolute.
        """
        return type(self).model_validate(self.model_dump(exclude_unset=True), context={"base": base})

    def to_yaml(self) -> str:
        """Return the configuration as YAML, with defaults filled in. Loading the text gives an equal configuration.

        The text is the record of a run, so it includes the settings that ``memory.plan: auto`` leaves to the planner.
        """
        return dump_yaml(self.model_dump(mode="json"))

    def as_written(self) -> str:
        """Return only the settings that were given, without defaults, as YAML for another command.

        That command fills in the planner's choices and the defaults itself.
        """
        return dump_yaml(self.model_dump(mode="json", exclude_unset=True))


def nested_paths() -> Iterator[str]:
    """Yield the dotted path of every setting, including those of a group within a section, such as model.adapter."""
    for section, model in section_models().items():
        for name, info in model.model_fields.items():
            yield f"{section}.{name}"
            for part in (info.annotation, *get_args(info.annotation)):
                if isinstance(part, type) and issubclass(part, Section):
                    yield from (f"{section}.{name}.{one.alias or below}" for below, one in part.model_fields.items())


def section_models() -> dict[str, type[Section]]:
    """Return the model class of each section by name, in schema order, without ``stages``, which is a list."""
    models: dict[str, type[Section]] = {}
    for name, field in Config.model_fields.items():
        if isinstance(model := field.annotation, type) and issubclass(model, Section):
            models[name] = model
    return models


def value_of(config: Config, path: str) -> Any:
    """Return the setting at a dotted path."""
    return attrgetter(path)(config)


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return a configuration with changed settings, by dotted path, without validation."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = value
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


def problem_of(config: Config, path: str, rule: str, hint: str) -> Problem:
    """Return a problem for the setting at a dotted path, including its value unless the value is null."""
    value = value_of(config, path)
    return Problem(path=path, value=NOT_GIVEN if value is None else value, rule=rule, hint=hint)


def zero_stage(config: Config) -> Literal[1, 2, 3]:
    """Return the ZeRO stage of a run. The other settings are not read, since they may be missing or invalid."""
    memory = config.memory
    if memory.zero_stage != "auto":
        return memory.zero_stage
    if memory.offload_optimizer != "none" or config.model.dtype != "fp32":
        return 3
    return 1 if config.cluster.workers.max == 1 else 3
