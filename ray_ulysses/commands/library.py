"""The commands ``plan`` and ``train`` as functions, for notebooks and scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_ulysses.clock import SystemClock
from ray_ulysses.config import Config, parse_config
from ray_ulysses.run.secrets_file import use_secrets

if TYPE_CHECKING:
    from ray_ulysses.cluster.train_job import TrainResult
    from ray_ulysses.planner.report import PlanReport


def plan(
    config: Path | str | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    branch: bool = False,
    synthetic: bool = False,
) -> PlanReport:
    """Return what a run will do, without starting it, like the command ``plan``.

    Args:
        config: Path of a configuration file, or its content as nested mappings.
        overrides: Changed settings as in ``--set``, such as ``"run.stop_step=20"``; later ones win.
        branch: Whether an existing run's data and learning rate may change.
        synthetic: Whether to assume documents in place of a missing corpus.

    Returns:
        The report. If its ``problems`` are not empty, the run can't start.

    Raises:
        UserError: The configuration, the model or a corpus can't be used.
    """
    from ray_ulysses.run.preflight import report_run

    return report_run(_loaded(config, overrides), Path.cwd(), branch=branch, synthetic=synthetic)


def train(
    config: Path | str | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    branch: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Train a model, or resume the run with this name and storage, like the command ``train``.

    Connects to Ray for the duration of the call; Ray must not be initialized in this process.

    Args:
        config: Path of a configuration file, or its content as nested mappings.
        overrides: Changed settings as in ``--set``, such as ``"run.stop_step=20"``; later ones win.
        branch: Whether an existing run's data and learning rate may change.
        quiet: Whether to hide the progress.

    Raises:
        UserError: The run can't start; all problems with the configuration are in one error.
        RunError: Training failed. All committed checkpoints are kept, and the same call resumes the run.
    """
    from ray_ulysses.commands.train import train_config

    started = SystemClock().now()
    loaded = _loaded(config, overrides)
    return train_config(loaded, to_stderr=False, started=started, branch=branch, is_quiet=quiet).result


def _loaded(config: Path | str | Mapping[str, Any], overrides: Sequence[str]) -> Config:
    if not isinstance(config, Mapping):
        from ray_ulysses.commands.options import load_run_config

        return load_run_config(Path(config), list(overrides))
    loaded = parse_config(config, overrides)
    use_secrets(loaded)
    return loaded
