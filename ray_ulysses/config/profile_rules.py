"""Rules of the profiler's settings."""

from __future__ import annotations

from collections.abc import Iterator

from ray_ulysses.config.schema import Config
from ray_ulysses.errors import Problem


def profiled_steps_come(config: Config) -> Iterator[Problem]:
    """Yield a problem for a step or a rank to be traced that the run never has."""
    profile, stop, most = config.run.profile, config.run.stop_step, config.cluster.workers.max
    if profile is None:
        return
    if stop is not None and profile.steps[-1] > stop:
        rule = f"run.stop_step={stop} ends the run before step {profile.steps[-1]}"
        hint = "name earlier steps, or raise run.stop_step"
        yield Problem(path="run.profile.steps", value=list(profile.steps), rule=rule, hint=hint)
    if profile.ranks[-1] >= most:
        rule = f"the ranks of {most} workers (cluster.workers) are 0 to {most - 1}"
        hint = f"name ranks up to {most - 1}"
        yield Problem(path="run.profile.ranks", value=list(profile.ranks), rule=rule, hint=hint)
