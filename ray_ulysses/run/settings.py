"""What follows from the configuration for the loop: engine settings, the last step, the model's shape."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from ray_ulysses.errors import UserError
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.storage.regular import read_regular

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.engine.zero import ZeroSettings

_LIBRARIES = ("ray-ulysses", "torch", "deepspeed", "transformers", "ray")


def model_shape(config: Config) -> ModelShape:
    """Return the shape of the configured model: inline, from a local directory, or from the hub.

    Raises:
        UserError: No model configuration can be read, or it lacks what a decoder has.
    """
    if config.model.part == "text":
        from ray_ulysses.engine.model_config import planned_config
        from ray_ulysses.engine.text_part import model_class, text_fields

        whole = planned_config(config)
        # Refuses a model that has no such part.
        model_class(whole, "text")
        return ModelShape.from_config_dict(text_fields(whole), source="the text part of the model's configuration")
    if config.model.config is not None:
        return ModelShape.from_config_dict(config.model.config)
    assert config.model.path is not None
    if Path(config.model.path).expanduser().is_dir():
        return ModelShape.from_path(Path(config.model.path).expanduser())
    from ray_ulysses.engine.model_config import hub_config

    return ModelShape.from_config_dict(hub_config(config.model.path), source=f"model.path={config.model.path!r}")


def local_model_config(directory: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a model directory.

    Raises:
        UserError: It is no JSON object.
    """
    path = directory / "config.json"
    try:
        fields = from_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read ({error}); restore it from the model's source") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path}: is not a JSON object; restore it from the model's source")
    return fields


def zero_settings(config: Config, accumulation: int) -> ZeroSettings:
    """Return the settings of the ZeRO engine."""
    from ray_ulysses.engine.zero import ZeroSettings

    return ZeroSettings(
        stage=config.memory.zero_stage,
        dtype=config.model.dtype,
        accumulation=accumulation,
        max_grad_norm=config.optimizer.max_grad_norm,
        learning_rate=config.optimizer.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
        offload_optimizer=config.memory.offload_optimizer,
        nvme_path=_swap_root(config),
    )


def _swap_root(config: Config) -> str | None:
    """Return where the run swaps to on each node: a directory of its own under ``memory.nvme_path``."""
    if config.memory.nvme_path is None:
        return None
    return str(Path(config.memory.nvme_path).expanduser() / config.run.name)


def last_step_of(config: Config, plan: Plan) -> int:
    """Return the step after which the run stops: ``run.stop_step``, else the end of the planned data."""
    return plan.num_steps if config.run.stop_step is None else min(config.run.stop_step, plan.num_steps)


def versions() -> dict[str, str]:
    """Return the versions of the libraries that decide the numbers."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def flat_settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Return settings by their dotted paths."""
    flat: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
