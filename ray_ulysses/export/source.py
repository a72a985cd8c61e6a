"""Which checkpoint of a run is exported, where it lies, and why another one can't be."""

from __future__ import annotations

from pathlib import Path

from ray_ulysses.checkpoint.choice import Damage, committed_steps, examine, newest_committed
from ray_ulysses.checkpoint.manifest import Manifest
from ray_ulysses.checkpoint.named import best_of, nameable
from ray_ulysses.config import Config, load_config
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.export.request import StepChoice
from ray_ulysses.storage import Store
from ray_ulysses.trainer.settings import CONFIG_FILE


def read_config(run_dir: Path) -> Config:
    """Return a run's configuration.

    Raises:
        UserError: The directory is no run's, or its configuration can't be read.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise UserError(
            f"RUN={str(run_dir)!r}: is no run directory; give <run.storage>/<run.name>, which holds {CONFIG_FILE}"
        )
    return load_config(path)


def choose_checkpoint(store: Store, step: StepChoice) -> Manifest:
    """Return the manifest of the checkpoint that is asked for; no tensor is read, only sizes are compared.

    A damaged one is not passed over in silence: whoever asks for the newest is told which one is whole.

    Args:
        store: The run's checkpoints.
        step: A step, ``latest``, or ``best``: the lowest evaluation loss, or training loss where none was evaluated.

    Raises:
        UserError: There is no such checkpoint.
        RunError: There is one, and it can't be used.
    """
    steps = committed_steps(store)
    if not steps:
        raise UserError(
            "RUN: has no committed checkpoint; `ray-ulysses train` commits one every checkpoint.every_steps"
        )
    if step == "latest":
        return _latest(store)
    if step == "best":
        best = best_of(nameable(store))
        if best is None:
            raise UserError(f"--step=best: none of the run's checkpoints has a loss; give a step: {_listed(steps)}")
        step = best
    if step not in steps:
        raise UserError(f"--step={step}: is not a committed step of this run; give one of {_listed(steps)}")
    found = examine(store, step, "sizes")
    if isinstance(found, Damage):
        others = _listed(tuple(other for other in steps if other != step)) or "there is none"
        raise RunError(f"{found}; export another step with --step: {others}")
    return found


def _latest(store: Store) -> Manifest:
    choice = newest_committed(store, "sizes")
    # A late commit of a dead attempt never was the run's newest; anything else that is passed over is said.
    passed = [damage for damage in choice.damaged if damage.kind != "superseded"]
    if passed:
        way_out = (
            f"export --step {choice.manifest.step}, which is whole" if choice.manifest else "no other one is whole"
        )
        raise RunError(f"{passed[0]}; {way_out}")
    if choice.manifest is None:
        raise UserError("RUN: has no committed checkpoint that is part of the run; `ray-ulysses train` goes on with it")
    return choice.manifest


def _listed(steps: tuple[int, ...]) -> str:
    return ", ".join(map(str, steps))
