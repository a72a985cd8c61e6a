"""Shows how many workers have started, and the page of the run's curves, while Ray Train runs the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ray_ulysses.tracking.mlflow_page import mlflow_page

if TYPE_CHECKING:
    from rich.console import Console

    from ray_ulysses.config import Config


class RunDisplay(Protocol):
    """The progress display of the command that trains, which is above this room."""

    console: Console

    @property
    def awaits_workers(self) -> bool:
        """Whether the workers have not reported yet."""

    def phase(self, name: str) -> None:
        """Set the current phase."""

    def awaiting_workers(self, phase: str) -> None:
        """Set the phase of the workers' start, unless they have already reported."""


class StartView:
    """Updates the progress view a few times a second; information that does not change is printed once."""

    def __init__(self, view: RunDisplay, config: Config, workers: int) -> None:
        self._view, self._config, self._workers = view, config, workers
        self._has_printed_page = config.tracking_uri is None

    def look(self, started: int | None) -> None:
        """Show how many workers have started until they report themselves, and then the page of the run's curves."""
        if self._view.awaits_workers:
            self._view.awaiting_workers(awaited(self._workers, started))
        elif not self._has_printed_page:
            self._print_page()

    def _print_page(self) -> None:
        """Print where the curves are; the tracker's own thread creates the run, perhaps long after the first step."""
        assert self._config.tracking_uri is not None
        page = mlflow_page(self._config.tracking_uri, self._config.run_dir)
        if page.is_run:
            self._has_printed_page = True
            self._view.console.print(f"MLflow: {page.in_words()}")


def awaited(workers: int, started: int | None) -> str:
    """Return what is waited for before the workers report it themselves (pure)."""
    number = f"{workers} worker{'s' if workers > 1 else ''}"
    if started is None:
        return f"waiting for {number}"
    return f"waiting for {number} ({started} started)" if started < workers else f"loading libraries on {number}"
