"""Opens the data of a run: its plan, and its corpora at their current paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ray_ulysses.config.stages import corpus_paths
from ray_ulysses.data.corpus.corpus import Corpus, corpus_exists
from ray_ulysses.data.plan.corpus_set import PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan_if_any
from ray_ulysses.errors import ConfigError, RunError, UserError
from ray_ulysses.run.secrets_file import stored_config
from ray_ulysses.run_names import PLAN_FOLDER
from ray_ulysses.storage.place import Place, UnnamedServerError, refuse_server


def open_plan(run_dir: Place, argument: str = "RUN") -> Plan:
    """Return the plan of a run.

    Args:
        run_dir: The run's directory.
        argument: Its name on the command line, for the text of an error.

    Raises:
        UserError: There is none yet, or it can't be read.
    """
    folder = run_dir / PLAN_FOLDER
    plan = load_plan_if_any(folder)
    if plan is None:
        raise UserError(
            f"{argument}={str(run_dir)!r}: has no data plan yet ({folder} holds none); `ray-ulysses train` writes "
            "it before the first step"
        )
    return plan


def find_sources(
    run_dir: Place, plan: Plan, given: Sequence[Place] = (), *, trust_run: bool = False
) -> tuple[PlannedSource, ...]:
    """Return the plan's corpora at their current paths.

    A corpus is searched in ``given``, then at its planned path, then at the paths in the run's configuration, which a
    resume keeps up to date.

    Args:
        run_dir: The run's directory.
        plan: Its plan.
        given: Directories of corpora, identified by their content.
        trust_run: Whether corpora are looked for on servers that only the run names.

    Raises:
        UserError: One of ``given`` can't be opened, or is not in the plan; or only the run names a corpus's server.
    """
    sources = {source.fingerprint: source for source in plan.newest.sources}
    found = {}
    for path in given:
        try:
            fingerprint = Corpus.open(str(path)).fingerprint
        except UserError as error:
            raise UserError(f"--corpus {path}: {error}") from error
        if fingerprint not in sources:
            known = "; ".join(f"{source.path} ({source.fingerprint})" for source in plan.newest.sources)
            raise UserError(
                f"--corpus {path}: holds corpus {fingerprint}, which is not in the plan: {known}; give the "
                "current directory of one of those"
            )
        found[fingerprint] = str(path)
    refusals = {} if trust_run else {source.path: _refusal(source.path, run_dir) for source in sources.values()}
    missing = {
        name
        for name, source in sources.items()
        if name not in found and (refusals.get(source.path) or not _is_there(source.path))
    }
    for place in _configured(run_dir) if missing else ():
        is_allowed = trust_run or _refusal(place, run_dir) is None
        there = _fingerprint_or_none(place) if is_allowed and _is_there(place) else None
        if there is not None and there in missing:
            found[there] = place
    for name, source in sources.items():
        if name not in found and (refusal := refusals.get(source.path)) is not None:
            raise refusal
    return tuple(replace(source, path=found.get(source.fingerprint, source.path)) for source in plan.newest.sources)


def _refusal(path: str, run_dir: Place) -> UnnamedServerError | None:
    """Return the error for a corpus on a server that only the run names."""
    try:
        refuse_server(path, f"a corpus of {run_dir / PLAN_FOLDER}", (run_dir,))
    except UnnamedServerError as error:
        return error
    except UserError:
        pass  # Reported where it is opened.
    return None


def _is_there(path: str) -> bool:
    try:
        return corpus_exists(path)
    except (UserError, RunError):
        # Reported where it is opened.
        return True


def _fingerprint_or_none(path: str) -> str | None:
    try:
        return Corpus.open(path).fingerprint
    except (UserError, RunError):
        # Not a missing corpus; those are reported by their own paths.
        return None


def _configured(run_dir: Place) -> tuple[str, ...]:
    """Return the corpora in the run's configuration; none if it can't be read."""
    try:
        return corpus_paths(stored_config(run_dir))
    except ConfigError:
        return ()
