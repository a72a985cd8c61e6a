"""The whole configuration: its sections, and what follows from them alone."""

from __future__ import annotations

from pathlib import Path

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
        run = self.run.model_copy(update={"storage": str(base / Path(self.run.storage).expanduser())})
        data = self.data
        if data.path is not None:
            data = data.model_copy(update={"path": str(base / Path(data.path).expanduser())})
        if data.sources is not None:
            moved = tuple(
                source.model_copy(update={"path": str(base / Path(source.path).expanduser())})
                for source in data.sources
            )
            data = data.model_copy(update={"sources": moved})
        model = self.model
        if model.path is not None and (base / Path(model.path).expanduser()).is_dir():
            # Else it is a hub id, which is no path.
            model = model.model_copy(update={"path": str(base / Path(model.path).expanduser())})
        if model.resume_from is not None:
            model = model.model_copy(update={"resume_from": str(absolute_reference(model.resume_from, base))})
        checkpoint = self.checkpoint
        if checkpoint.storage is not None:
            where = absolute_location(checkpoint.storage, base)
            checkpoint = checkpoint.model_copy(update={"storage": where})
        memory, tracking, cluster = self.memory, self.tracking, self.cluster
        if cluster.secrets_file is not None:
            file = base / Path(cluster.secrets_file).expanduser()
            cluster = cluster.model_copy(update={"secrets_file": str(file)})
        if memory.nvme_path is not None:
            memory = memory.model_copy(update={"nvme_path": str(base / Path(memory.nvme_path).expanduser())})
        if tracking.uri is not None and tracking.uri.startswith(_SQLITE):
            file = base / Path(tracking.uri.removeprefix(_SQLITE)).expanduser()
            tracking = tracking.model_copy(update={"uri": f"{_SQLITE}{file}"})
        changed = {"run": run, "data": data, "model": model, "checkpoint": checkpoint, "cluster": cluster}
        return self.model_copy(update={**changed, "memory": memory, "tracking": tracking})

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
