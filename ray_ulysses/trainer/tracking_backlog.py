"""What a run that has ended could not tell its tracker, told later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_ulysses.logging import get_logger
from ray_ulysses.tracking.mlflow_tracker import MlflowTracker

if TYPE_CHECKING:
    from ray_ulysses.config import Config

_log = get_logger(__name__)


def catch_up_tracking(config: Config) -> int:
    """Deliver what the attempts of a run have left undelivered; the caller holds the run's lock.

    Takes a bounded time, and never raises: an outage of MLflow is no error of a run.

    Returns:
        How many events are left.
    """
    if config.tracking_uri is None:
        return 0
    tracker = MlflowTracker(
        uri=config.tracking_uri,
        experiment=config.tracking.experiment,
        run_name=config.run.name,
        run_dir=config.run_dir,
    )
    try:
        return tracker.catch_up()
    except OSError as error:
        _log.warning("what MLflow was not told of run %s can't be read (%s)", config.run.name, error)
        return 0
