"""Refuses relative paths in a Ray job: each submission has its own working directory, so a resume can't find them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ray_ulysses.config.resume import differences
from ray_ulysses.config.schema import Config
from ray_ulysses.errors import ConfigError, Problem, UserError

_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray 2.60 sets in the entry point of a submitted job, and nowhere else."""
_UNPACKED = "working_dir_files"
"""Folder in which Ray 2.60 unpacks a job's working directory, under a name derived from the content."""


def relative_path_problems(config: Config, base: Path, environment: Mapping[str, str]) -> tuple[Problem, ...]:
    """Return a problem for each setting that is a relative path, if ``environment`` belongs to a Ray job."""
    return _relative_paths(config, base) if _JOB in environment else ()


def refuse_relative_in_submission(config: Config, base: Path) -> None:
    """Refuse relative paths in a configuration that is about to be submitted.

    Raises:
        ConfigError: A setting is a relative path. The error names every such setting, with the path to write instead.
    """
    if problems := _relative_paths(config, base):
        raise ConfigError(problems)


def _relative_paths(config: Config, base: Path) -> tuple[Problem, ...]:
    given, here, elsewhere = (
        one.model_dump(mode="json")
        for one in (config, config.with_absolute_paths(base), config.with_absolute_paths(base / "elsewhere"))
    )
    # An absolute path may change too, for example by losing a trailing slash.
    relative = {found.name for found in differences(here, elsewhere)}
    return tuple(
        _problem(found.name, str(found.old), str(found.new), base)
        for found in differences(given, here)
        if found.name in relative
    )


def refuse_relative_in_job(option: str, path: Path) -> None:
    """Refuse a relative output directory in a Ray job.

    Raises:
        UserError: The path is relative. The error names the path to write instead.
    """
    if _JOB in os.environ and not path.expanduser().is_absolute():
        raise UserError(str(_problem(option, str(path), str(Path.cwd() / path), Path.cwd())))


def _problem(setting: str, value: str, absolute: str, base: Path) -> Problem:
    if _UNPACKED in base.parts:
        # The unpacked files disappear with the job, and only the user knows where the shared storage is.
        absolute = absolute.replace(str(base), "/mnt/shared")
        hint = f"write an absolute path that every node can access, such as {absolute}"
    else:
        hint = f"write {absolute}, if every node can access it, or another absolute path"
    rule = "is relative, but a Ray job has a new working directory at each submission"
    return Problem(path=setting, value=value, rule=rule, hint=hint)
