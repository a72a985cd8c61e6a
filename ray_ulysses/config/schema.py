"""The whole configuration: its sections, and what follows from them alone."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import ConfigDict, Field

from ray_ulysses.config.learning import (
    DataSection,
    ModelSection,
    OptimizerSection,
    RunSection,
    ScheduleSection,
)
from ray_ulysses.config.reference_to_checkpoint import absolute_reference
from ray_ulysses.config.running import (
    CheckpointSection,
    ClusterSection,
    ElasticSection,
    MemorySection,
    ParallelSection,
    TrackingSection,
)
from ray_ulysses.config.section import Section
from ray_ulysses.config.yaml_text import dump_yaml
from ray_ulysses.storage.location import absolute_location

_SQLITE = "sqlite:///"
_S = TypeVar("_S", bound=Section)


class Config(Section):
    """Everything that a run is made from; make one with `load_config`, which says all errors at once."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    run: RunSection
    model: ModelSection
    data: DataSection
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    memory: MemorySection = Field(default_factory=MemorySection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    elastic: ElasticSection = Field(default_factory=ElasticSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)
    cluster: ClusterSection

    @property
    def run_dir(self) -> Path:
        """The run's directory, ``<storage>/<name>``."""
        return Path(self.run.storage) / self.run.name

    @property
    def dp_size(self) -> int:
        """Groups of ``parallel.sp_size`` workers, each of which works on rows of its own."""
        return self.cluster.workers // self.parallel.sp_size

    @property
    def data_sources(self) -> tuple[tuple[str, float | None], ...]:
        """Path and weight of each corpus; a weight of None stands for all of it."""
        if self.data.sources is not None:
            return tuple((source.path, source.weight) for source in self.data.sources)
        assert self.data.path is not None, "a rule asks for a path or sources"
        return ((self.data.path, None),)

    @property
    def tracking_uri(self) -> str | None:
        """MLflow's URI with the default filled in; None when tracking is off."""
        if not self.tracking.enabled:
            return None
        return self.tracking.uri or f"{_SQLITE}{Path(self.run.storage) / 'mlflow.db'}"

    def with_absolute_paths(self, base: Path) -> Config:
        """Return this configuration with every path that workers open made absolute.

        Workers of a cluster have working directories of their own, in which a relative path means something
        else.

        Args:
            base: Absolute directory that relative paths start from.
        """

        def moved(section: _S, *names: str) -> _S:
            given = {name: getattr(section, name) for name in names}
            return section.model_copy(
                update={name: absolute_location(path, base) for name, path in given.items() if path is not None}
            )

        data, model, tracking = moved(self.data, "path"), self.model, self.tracking
        if data.sources is not None:
            data = data.model_copy(update={"sources": tuple(moved(source, "path") for source in data.sources)})
        if model.path is not None and (base / Path(model.path).expanduser()).is_dir():
            # Else it is a hub id, which is no path.
            model = moved(model, "path")
        if model.resume_from is not None:
            model = model.model_copy(update={"resume_from": str(absolute_reference(model.resume_from, base))})
        if tracking.uri is not None and tracking.uri.startswith(_SQLITE):
            file = absolute_location(tracking.uri.removeprefix(_SQLITE), base)
            tracking = tracking.model_copy(update={"uri": f"{_SQLITE}{file}"})
        changed: dict[str, Section] = {
            "run": moved(self.run, "storage"),
            "data": data,
            "model": model,
            "memory": moved(self.memory, "nvme_path"),
            "checkpoint": moved(self.checkpoint, "storage"),
            "tracking": tracking,
            "cluster": moved(self.cluster, "secrets_file"),
        }
        return self.model_copy(update=changed)

    def to_yaml(self) -> str:
        """Return the configuration, defaults filled in, as YAML that loads into an equal one."""
        return dump_yaml(self.model_dump(mode="json"))


def setting_paths() -> tuple[str, ...]:
    """Return the dotted path of every setting, in the order of the schema."""
    return tuple(f"{name}.{field}" for name, model in section_models().items() for field in model.model_fields)


def section_models() -> dict[str, type[Section]]:
    """Return the model of each section by its name, in the order of the schema."""
    models: dict[str, type[Section]] = {}
    for name, field in Config.model_fields.items():
        model = field.annotation
        assert isinstance(model, type) and issubclass(model, Section)
        models[name] = model
    return models
