"""Where an attempt starts: the newest committed checkpoint, or the beginning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ray_ulysses.checkpoint import load_pieces, newest_committed, set_aside
from ray_ulysses.config.resume import resume_fingerprint
from ray_ulysses.data.cursor import Cursor
from ray_ulysses.engine.zero_state import import_state
from ray_ulysses.errors import UserError
from ray_ulysses.logging import get_logger

if TYPE_CHECKING:
    from ray_ulysses.checkpoint import Choice
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan import Plan
    from ray_ulysses.trainer.record import Recorder

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: Completed steps.
        digest: Sum of the digests of every row trained on, modulo 2**64.
        tokens: Supervised tokens trained on.
        resumed_from: The checkpoint's folder in the run directory; ``None`` at the beginning.
    """

    step: int = 0
    digest: int = 0
    tokens: int = 0
    resumed_from: str | None = None


def resume(engine: Any, config: Config, plan: Plan, recorder: Recorder) -> Progress:
    """Put the newest whole checkpoint into the engine; every rank must call.

    Damaged checkpoints are set aside with their reason and the one before is taken.

    Raises:
        UserError: The checkpoint belongs to another configuration or plan.
        CheckpointError: It can't be loaded.
    """
    chosen: Choice | None = newest_committed(recorder.store) if recorder.rank == 0 else None
    choice: Choice = recorder.exchange.broadcast(chosen)
    if recorder.rank == 0:
        for damage in choice.damaged:
            _log.warning("%s", damage)
            set_aside(recorder.store, damage, attempt=recorder.attempt)
            recorder.checkpoint_set_aside(damage.step, damage.reason)
    manifest = choice.manifest
    if manifest is None:
        return Progress()
    if manifest.meta.config_fingerprint != resume_fingerprint(config):
        raise UserError(
            f"the checkpoint of step {manifest.step} was written under another configuration than "
            f"{config.run_dir / 'config.yaml'} says; restore that file, or start a new run under another run.name"
        )
    cursor = Cursor.from_json(dict(manifest.meta.cursor))
    plan.check_cursor(cursor)
    import_state(engine, manifest.state, partial(load_pieces, recorder.store, manifest, exchange=recorder.exchange))
    return Progress(
        step=manifest.step,
        digest=int(manifest.meta.digest, 16),
        tokens=manifest.meta.tokens,
        resumed_from=manifest.ref.folder,
    )
