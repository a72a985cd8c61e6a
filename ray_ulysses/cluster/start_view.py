"""What the driver shows while Ray Train has the workers: who is awaited, and where the curves will be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_ulysses.tracking.mlflow_page import mlflow_page

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.views.progress import ProgressView


class StartView:
    """Looks, a few times a second, for what there is to say; what does not change is said once."""

    def __init__(self, view: ProgressView, config: Config) -> None:
        self._view, self._config = view, config
        self._has_said_page = config.tracking_uri is None

    def look(self, there: int | None) -> None:
        """Say how many workers are there while none has spoken, and the page of the run's curves once it is known.

        Args:
            there: How many workers there are, where that is known.
        """
        if self._view.state.awaits_workers:
            self._view.awaiting_workers(awaited(self._config.cluster.workers, there))
        elif not self._has_said_page:
            self._say_page()

    def _say_page(self) -> None:
        """Say where the curves are; the tracker's own thread makes the run, perhaps long after the first step."""
        assert self._config.tracking_uri is not None
        page = mlflow_page(self._config.tracking_uri, self._config.run_dir)
        if page.is_run:
            self._has_said_page = True
            self._view.console.print(f"MLflow: {page.in_words()}", markup=False, highlight=False, soft_wrap=True)


def awaited(workers: int, there: int | None) -> str:
    """Return what is waited for before the workers say it themselves (pure).

    Args:
        workers: How many there will be.
        there: How many there are, where that is known.
    """
    number = f"{workers} worker{'s' if workers > 1 else ''}"
    if there is None:
        return f"waiting for {number}"
    return f"waiting for {number} ({there} there)" if there < workers else f"loading libraries on {number}"
