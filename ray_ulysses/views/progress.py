"""Shows a run's progress: a live panel in a terminal, one greppable line per event elsewhere."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.report.words import count, duration
from ray_ulysses.storage.place import Place
from ray_ulysses.terminal import one_line
from ray_ulysses.tracking.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointSetAside,
    Evaluated,
    Event,
    PreemptionNoticed,
    RunFinished,
    StartFailed,
    StepDone,
    WorkerWarned,
)
from ray_ulysses.tracking.failures import describe_failure
from ray_ulysses.tracking.journal_tail import JournalTail
from ray_ulysses.tracking.step_groups import StepGroup, ungroup_steps
from ray_ulysses.views.console import open_console, start_live
from ray_ulysses.views.progress_state import ProgressState
from ray_ulysses.views.waiting import PhaseWatch

_LIVE_INTERVAL_S = 0.25
_LINES_INTERVAL_S = 0.5

_THAT_STAY = (AttemptEnded, StartFailed, WorkerWarned, CheckpointFailed)
"""Events whose line is also printed above the panel, which keeps no history."""


class ProgressView:
    """Context manager that follows a run's start and its journal from its own thread.

    Only new events are printed; the events already in the journal are the initial state.
    """

    def __init__(
        self,
        run_dir: Place | str,
        *,
        name: str,
        total_steps: int | None = None,
        console: Console | None = None,
        log_every_steps: int = 1,
        interval_s: float | None = None,
        clock: Clock | None = None,
        is_quiet: bool = False,
    ) -> None:
        """Set up the view; nothing is read or shown before the block is entered.

        Args:
            run_dir: The run's directory; it need not exist yet.
            name: The run's name.
            total_steps: Step at which the run stops, if known.
            console: Where to write; standard output by default. Anything but a terminal gets plain lines.
            log_every_steps: Steps between two plain lines.
            interval_s: Seconds between two reads of the journal.
            clock: Source of time for the duration of phases.
            is_quiet: Whether nothing is printed but warnings and failures, on standard error.

        Attributes:
            console: Where other parts of the command print what they do.
        """
        self._loud = open_console(stderr=True) if is_quiet else console or open_console()
        self.console = open_console(quiet=True) if is_quiet else self._loud
        self._tail, self._name, self._every = JournalTail(run_dir), name, log_every_steps
        self._is_live = self._loud.is_terminal and not is_quiet
        self._is_quiet = is_quiet
        self._interval_s = interval_s or (_LIVE_INTERVAL_S if self._is_live else _LINES_INTERVAL_S)
        self._state = ProgressState(total_steps=total_steps)
        self._watch = PhaseWatch(clock or SystemClock())
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._live: Live | None = None

    @property
    def state(self) -> ProgressState:
        """The state that is shown."""
        return self._state

    @property
    def awaits_workers(self) -> bool:
        """Whether the workers have not reported yet."""
        return self._state.awaits_workers

    def expect(self, total_steps: int) -> None:
        """Set the step at which the run stops."""
        with self._lock:
            self._state = replace(self._state, total_steps=total_steps)

    def phase(self, name: str) -> None:
        """Set the current phase before the workers can report theirs."""
        with self._lock:
            self._state = replace(self._state, phase=name)

    def awaiting_workers(self, phase: str) -> None:
        """Set the phase of the workers' start, unless they have already reported."""
        with self._lock:
            self._state = self._state.awaiting_workers(phase)

    def __enter__(self) -> ProgressView:
        """Start to follow the journal."""
        planned = self._state.total_steps
        for entry in self._tail.poll():
            # Of earlier steps only the last one is shown.
            self._state = self._state.after(entry.last if isinstance(entry, StepGroup) else entry)
        # With the stop step of an earlier command the bar would start full.
        self._state = replace(self._state.before_attempt(), total_steps=planned, phase="starting")
        if self._is_live:
            self._live = start_live(self._panel(), self.console, transient=False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show the remaining events and stop."""
        self._stop.set()
        self._thread.join(timeout=10.0)
        with self._lock:
            self._state = replace(self._state, phase=None)
        self.look()
        if self._live is not None:
            # The panel of a refused start is of no interest.
            self._live.transient = self._state.attempt == 0
            self._live.stop()

    def look(self) -> None:
        """Read the new entries of the journal and show them."""
        with self._lock:
            for event in ungroup_steps(self._tail.poll(at_once=self._stop.is_set())):
                self._state = self._state.after(event)
                line = render_line(event, self._state)
                if line is not None and self._is_due(event):
                    self._print(line, stays=isinstance(event, _THAT_STAY))
            waited = self._watch.look(self._state.phase)
            if waited is not None and not self._stop.is_set():
                self._print(f"elapsed={duration(self._watch.elapsed_s)} phase: {waited}")
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)

    def _print(self, line: str, *, stays: bool = False) -> None:
        """Print a line; with a panel, or quiet, only lines that must stay on the screen are printed, above it."""
        if stays or not (self._is_live or self._is_quiet):
            self._loud.print(line)

    def _panel(self) -> RenderableType:
        return render_panel(self._name, self._state, self._watch)

    def _follow(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.look()

    def _is_due(self, event: Event) -> bool:
        if not isinstance(event, StepDone):
            return True
        return event.step % self._every == 0 or event.step == self._state.total_steps


def render_line(event: Event, state: ProgressState) -> str | None:
    """Return the plain line of an event, given the state after it; None for a kind that is not shown.

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
        case CheckpointFailed():
            return f"warning: checkpoint step={event.step} failed: {_first_line(event.reason)}"
        case WorkerWarned():
            return f"warning: {_first_line(event.text)}"
        case CheckpointSetAside():
            return f"checkpoint step={event.step} set_aside: {event.reason}"
        case PreemptionNoticed():
            return f"preemption notice: a node will be preempted{_when(event)}"
        case AttemptEnded(restarts=None):
            return f"attempt={state.attempt} ended step={state.step} reason: {_first_line(event.reason)}"
        case AttemptEnded() | StartFailed():
            return describe_failure(event)
        case RunFinished():
            return f"run finished step={event.step}"
    return None


def _when(notice: PreemptionNoticed) -> str:
    """Return the time until a notice's deadline, if it has one."""
    return "" if notice.deadline is None else f" in {duration(max(0.0, notice.deadline - notice.time))}"


def _first_line(text: object) -> str:
    """Return the first line of a text: each event is printed on one line."""
    return str(text).partition("\n")[0]


def _step_line(state: ProgressState) -> str:
    total = "" if state.total_steps is None else f"/{state.total_steps}"
    known = _known(
        ("lr={:.2e}", state.learning_rate),
        ("grad_norm={:.3g}", state.grad_norm),
        ("tokens_per_s={:.0f}", state.tokens_per_s),
        ("peak_memory_gib={:.2f}", state.peak_memory_gib),
        ("mfu={:.3f}", state.mfu),
        ("eta={}", None if state.eta_s is None else duration(state.eta_s)),
    )
    return " ".join([f"step={state.step}{total}", f"loss={state.loss:.4f}", *known])


def _known(*values: tuple[str, float | str | None]) -> list[str]:
    """Return the values that are known, each in its form."""
    return [form.format(value) for form, value in values if value is not None]


def render_panel(name: str, state: ProgressState, watch: PhaseWatch) -> RenderableType:
    """Return the live panel: a bar, the phase or the numbers of the last steps, and the last checkpoint."""
    lines: list[RenderableType] = [_bar(name, state)]
    if state.phase is not None:
        lines.append(_phase(state.phase, watch))
    if state.has_stepped:
        lines += _numbers(state)
    if state.attempt > 0:
        lines.append(_status(state))
    return Group(*lines)


def _bar(name: str, state: ProgressState) -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True, max_width=24, overflow="ellipsis")
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    title = Text(one_line(name), style="bold")
    if state.total_steps:
        unknown = "" if state.ended is not None else "ETA -"
        eta = unknown if state.eta_s is None else f"ETA {duration(state.eta_s)}"
        bar = ProgressBar(total=state.total_steps, completed=state.step)
        grid.add_row(title, bar, f"{state.step:,}/{state.total_steps:,}", Text(eta, style="cyan"))
    else:
        # A bar without a known end would be drawn full.
        grid.add_row(title, "", f"step {state.step:,}" if state.step else "", "")
    return grid


def _phase(phase: str, watch: PhaseWatch) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(one_line(phase), style="yellow")
    return text.append(f"  {duration(watch.phase_s)}  ({duration(watch.elapsed_s)} since the start)", style="dim")


def _numbers(state: ProgressState) -> list[Text]:
    loss = "-" if state.loss is None else f"{state.loss:.4f}"
    learning = [f"loss {loss}", *_known(("lr {:.2e}", state.learning_rate), ("grad norm {:.3g}", state.grad_norm))]
    speed = _known(
        ("{} tokens/s", None if state.tokens_per_s is None else count(state.tokens_per_s)),
        ("{:.2f} s/step", state.seconds_per_step),
        ("peak {:.2f} GiB", state.peak_memory_gib),
        ("MFU {:.1%}", state.mfu),
    )
    return [Text("  ".join(parts), no_wrap=True, overflow="ellipsis") for parts in (learning, speed) if parts]


def _status(state: ProgressState) -> Text:
    parts = [] if state.ended is None else [one_line(_first_line(state.ended))]
    parts += [f"attempt {state.attempt}", f"{state.world_size} workers (dp {state.dp_size} x sp {state.sp_size})"]
    if state.checkpoint_step is not None:
        parts.append(f"saved {state.checkpoint_step:,}")
    if state.evaluation is not None:
        parts.append(f"eval {state.evaluation[1]:.4f} @ {state.evaluation[0]:,}")
    return Text("  ".join(parts), style="dim", no_wrap=True, overflow="ellipsis")
