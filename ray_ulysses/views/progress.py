"""A run's progress while it goes on: a live panel in a terminal, one greppable line an event anywhere else."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ray_ulysses.tracking.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointSetAside,
    Evaluated,
    Event,
    PreemptionNoticed,
    RunFinished,
    StepDone,
)
from ray_ulysses.views.journal_tail import JournalTail
from ray_ulysses.views.progress_state import ProgressState
from ray_ulysses.views.words import count, duration

_LIVE_INTERVAL_S = 0.25
_LINES_INTERVAL_S = 0.5


class ProgressView:
    """Shows what a run's journal says, from a thread of its own, between ``with`` and the end of its block.

    Only what happens from now on is printed; what the journal already holds is where the view starts.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        name: str,
        total_steps: int | None,
        console: Console | None = None,
        log_every_steps: int = 1,
        interval_s: float | None = None,
    ) -> None:
        """Prepare; nothing is read or shown before the block is entered.

        Args:
            run_dir: The run's directory; it need not exist yet.
            name: The run's name.
            total_steps: Step at which the run stops, if known.
            console: Where to show it; standard output by default. A console that is no terminal gets plain lines.
            log_every_steps: Steps between two plain lines.
            interval_s: Seconds between two looks at the journal.
        """
        self._tail, self._name, self._every = JournalTail(run_dir), name, log_every_steps
        self._console = console or Console()
        self._is_live = self._console.is_terminal
        self._interval_s = interval_s or (_LIVE_INTERVAL_S if self._is_live else _LINES_INTERVAL_S)
        self._state = ProgressState(total_steps=total_steps)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._live: Live | None = None

    @property
    def state(self) -> ProgressState:
        """What the view shows now."""
        return self._state

    def __enter__(self) -> ProgressView:
        """Start to follow."""
        for event in self._tail.poll():
            self._state = self._state.after(event)
        self._state = self._state.before_attempt()
        if self._is_live:
            panel = render_panel(self._name, self._state)
            self._live = Live(panel, console=self._console, auto_refresh=False, transient=False)
            self._live.start(refresh=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show what is left, and stop."""
        self._stop.set()
        self._thread.join(timeout=10.0)
        self.look()
        if self._live is not None:
            self._live.stop()

    def look(self) -> None:
        """Read what was added to the journal, and show it."""
        for event in self._tail.poll():
            self._state = self._state.after(event)
            line = render_line(event, self._state)
            if self._live is None and line is not None and self._is_due(event):
                # Plain text: markup, colours and folding would break what a script reads.
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self._live is not None:
            self._live.update(render_panel(self._name, self._state), refresh=True)

    def _follow(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.look()

    def _is_due(self, event: Event) -> bool:
        if not isinstance(event, StepDone):
            return True
        return event.step % self._every == 0 or event.step == self._state.total_steps


def render_line(event: Event, state: ProgressState) -> str | None:
    """Return the plain line of an event, with the state after it; None for a kind that is not shown.

    Fields are ``name=value`` without spaces, so that ``grep 'step='`` and ``awk`` find them.
    """
    match event:
        case StepDone():
            return _step_line(state)
        case AttemptStarted():
            return (
                f"attempt={state.attempt} started workers={state.world_size} dp={state.dp_size} sp={state.sp_size} "
                f"resumed_step={state.step}"
            )
        case Evaluated():
            return f"evaluation step={event.step} eval_loss={event.loss:.4f}"
        case CheckpointCommitted():
            return f"checkpoint step={event.step} path={event.path}"
        case CheckpointSetAside():
            return f"checkpoint step={event.step} set_aside: {event.reason}"
        case PreemptionNoticed():
            return f"preemption notice: a node will be taken away{_when(event)}"
        case AttemptEnded():
            return f"attempt={state.attempt} ended step={state.step} reason: {_first_line(event.reason)}"
        case RunFinished():
            return f"run finished step={event.step}"
    return None


def _when(notice: PreemptionNoticed) -> str:
    """Return how long a notice leaves, if it says so."""
    return "" if notice.deadline is None else f" in {duration(max(0.0, notice.deadline - notice.time))}"


def _first_line(text: object) -> str:
    """Return the first line: an event is one line, and an error's text may be many."""
    return str(text).partition("\n")[0]


def _step_line(state: ProgressState) -> str:
    total = "" if state.total_steps is None else f"/{state.total_steps}"
    fields = [f"step={state.step}{total}", f"loss={state.loss:.4f}"]
    if state.tokens_per_s is not None:
        fields.append(f"tokens_per_s={state.tokens_per_s:.0f}")
    if state.peak_memory_gib is not None:
        fields.append(f"peak_memory_gib={state.peak_memory_gib:.2f}")
    if state.mfu is not None:
        fields.append(f"mfu={state.mfu:.3f}")
    if state.eta_s is not None:
        fields.append(f"eta={duration(state.eta_s)}")
    return " ".join(fields)


def render_panel(name: str, state: ProgressState) -> RenderableType:
    """Return the live panel: a bar, the numbers of the last steps, and what was saved."""
    if state.attempt == 0:
        return Group(_bar(name, state), Text("waiting for the workers to start", style="dim"))
    return Group(_bar(name, state), _numbers(state), _standing(state))


def _bar(name: str, state: ProgressState) -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True, max_width=24, overflow="ellipsis")
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    if state.total_steps:
        eta = "ETA -" if state.eta_s is None else f"ETA {duration(state.eta_s)}"
        bar = ProgressBar(total=state.total_steps, completed=state.step)
        grid.add_row(Text(name, style="bold"), bar, f"{state.step:,}/{state.total_steps:,}", Text(eta, style="cyan"))
    else:
        grid.add_row(Text(name, style="bold"), ProgressBar(total=None, pulse=True), f"step {state.step:,}", "")
    return grid


def _numbers(state: ProgressState) -> Text:
    parts = ["loss " + ("-" if state.loss is None else f"{state.loss:.4f}")]
    if state.tokens_per_s is not None:
        parts.append(f"{count(state.tokens_per_s)} tokens/s")
    if state.seconds_per_step is not None:
        parts.append(f"{state.seconds_per_step:.2f} s/step")
    if state.peak_memory_gib is not None:
        parts.append(f"peak {state.peak_memory_gib:.2f} GiB")
    if state.mfu is not None:
        parts.append(f"MFU {100 * state.mfu:.1f}%")
    return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")


def _standing(state: ProgressState) -> Text:
    parts = [] if state.ended is None else [_first_line(state.ended)]
    parts += [f"attempt {state.attempt}", f"{state.world_size} workers (dp {state.dp_size} x sp {state.sp_size})"]
    if state.checkpoint_step is not None:
        parts.append(f"saved {state.checkpoint_step:,}")
    if state.evaluation is not None:
        parts.append(f"eval {state.evaluation[1]:.4f} @ {state.evaluation[0]:,}")
    return Text("  ".join(parts), style="dim", no_wrap=True, overflow="ellipsis")
