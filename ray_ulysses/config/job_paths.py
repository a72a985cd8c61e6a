"""Relative paths in a Ray job: each submission unpacks its working directory elsewhere, and a run would begin anew."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ray_ulysses.config.difference import differences
from ray_ulysses.config.schema import Config
from ray_ulysses.errors import Problem, UserError

_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable that Ray 2.60 sets, in a submitted job's entry point alone."""
_UNPACKED = "working_dir_files"
"""The folder under which Ray 2.60 unpacks a job's working directory, under a name made from its content."""


def relative_path_problems(config: Config, base: Path, environment: Mapping[str, str]) -> tuple[Problem, ...]:
    """Return a problem for each setting that is a relative path, if the environment is that of a Ray job.

    Args:
        config: As it was loaded.
        base: Working directory.
        environment: Variables of this process.
    """
    if _JOB not in environment:
        return ()
    given, absolute = (one.model_dump(mode="json") for one in (config, config.with_absolute_paths(base)))
    return tuple(
        _problem(found.name, str(found.old), str(found.new), base)
        for found in differences(given, absolute)
        if not str(found.old).removeprefix("sqlite:///").startswith("~")
    )


def refuse_relative_in_job(
    option: str, path: Path, *, base: Path | None = None, environment: Mapping[str, str] = os.environ
) -> None:
    """Refuse a directory to write that is relative, in a Ray job.

    Args:
        option: Its name.
        path: What it was given.
        base: Working directory; this process's by default.
        environment: Variables of this process.

    Raises:
        UserError: Names the path to write instead.
    """
    if _JOB in environment and not path.expanduser().is_absolute():
        raise UserError(str(_problem(option, str(path), str((base or Path.cwd()) / path), base or Path.cwd())))


def _problem(setting: str, value: str, absolute: str, base: Path) -> Problem:
    if _UNPACKED in base.parts:
        # What the job has unpacked is gone with it; where the user's storage is, only the user knows.
        absolute = absolute.replace(str(base), "/mnt/shared")
        hint = f"write an absolute path that every node sees, such as {absolute}"
    else:
        hint = f"write {absolute}, if every node sees it, or another absolute path"
    rule = "is relative, and a Ray job's working directory is another one at each submission"
    return Problem(path=setting, value=value, rule=rule, hint=hint)
