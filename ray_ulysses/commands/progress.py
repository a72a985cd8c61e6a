"""Shows a run's progress: a live panel in a terminal, one greppable line per event elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ray_ulysses.clock import Clock
from ray_ulysses.commands.display import open_console, start_live
from ray_ulysses.commands.output import Display, PhaseWatch
from ray_ulysses.logging import one_line
from ray_ulysses.report.words import count, duration
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.events import (
    CONTINUED,
    STOP_REASONS,
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointSetAside,
    Evaluated,
    Event,
    PhaseStarted,
    PreemptionNoticed,
    RunFinished,
    Sampled,
    StartFailed,
    StepDone,
    WorkerWarned,
)
from ray_ulysses.tracking.failures import describe_failure
from ray_ulysses.tracking.journal_reader import JournalTail
from ray_ulysses.tracking.steps import StepGroup, ungroup_steps

_WINDOW = 20
_LINES_INTERVAL_S = 0.5

_THAT_STAY = (AttemptEnded, StartFailed, WorkerWarned, CheckpointFailed)
"""Events whose line is also printed above the panel, which keeps no history."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressState:
    """The displayed state of a run."""

    total_steps: int | None = None
    """Step at which the run stops; None if unknown."""
    phase: str | None = None
    """The current phase; None during training steps and after the attempt has ended."""
    awaits_workers: bool = True
    """Whether the workers of the next attempt have not reported yet."""
    attempt: int = 0
    """The attempt's number; 0 before it has started."""
    world_size: int = 0
    sp_size: int = 0
    dp_size: int = 0
    step: int = 0
    last: StepDone | None = None
    """The last completed step, of this attempt or an earlier one."""
    tokens_per_s: float | None = None
    seconds_per_step: float | None = None
    """Mean over this attempt's last steps, excluding its first step (warm-up); None before the second step."""
    evaluation: tuple[int, float] | None = None
    """Step and loss of the last evaluation, or None before the first evaluation."""
    checkpoint_step: int | None = None
    ended: str | None = None
    """Why the attempt ended, or "finished"; None while the attempt runs."""
    has_stepped: bool = False
    """Whether this attempt has completed a step."""
    recent: tuple[tuple[float, float], ...] = ()
    """Duration in seconds and number of tokens for each of this attempt's last steps, excluding its first step."""

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds until the last step, at the recent pace; None if the pace or the last step is unknown."""
        if self.total_steps is None or self.seconds_per_step is None:
            return None
        return max(0, self.total_steps - self.step) * self.seconds_per_step

    def before_attempt(self) -> ProgressState:
        """Return the state before a new attempt: the step is kept, and the measured pace is discarded."""
        return replace(self._without_pace(), attempt=0, ended=None)

    def awaiting_workers(self, phase: str) -> ProgressState:
        """Return the state while waiting for workers; unchanged if they have already reported."""
        return replace(self, phase=phase) if self.awaits_workers else self

    def _without_pace(self) -> ProgressState:
        return replace(
            self, has_stepped=False, recent=(), seconds_per_step=None, tokens_per_s=None, awaits_workers=True
        )

    def after(self, event: Event) -> ProgressState:
        """Return the state after a journal event; events that are not displayed leave it unchanged."""
        match event:
            case PhaseStarted():
                return replace(self, phase=event.phase, awaits_workers=False)
            case AttemptStarted():
                return replace(
                    self._without_pace(),
                    total_steps=event.run_last_step or event.last_step,
                    attempt=event.attempt,
                    world_size=event.world_size,
                    sp_size=event.sp_size,
                    dp_size=event.dp_size,
                    step=event.resumed_step,
                    ended=None,
                    phase="first step",
                    awaits_workers=False,
                )
            case StepDone():
                return self._after_step(event)
            case Evaluated():
                return replace(self, evaluation=(event.step, event.loss))
            case CheckpointCommitted():
                return replace(self, checkpoint_step=event.step)
            case AttemptEnded() | StartFailed():
                words = event.reason if event.restarts is None else describe_failure(event)
                is_last = event.reason not in CONTINUED and event.reason.startswith(STOP_REASONS)
                awaits = event.restarts is not False and not is_last
                ended = replace(self, ended=words, phase=None, awaits_workers=awaits)
                # Between attempts there is no pace and no ETA.
                return replace(ended, recent=(), seconds_per_step=None, tokens_per_s=None)
            case RunFinished():
                return replace(self, ended="finished", phase=None)
        return self

    def _after_step(self, event: StepDone) -> ProgressState:
        measured = (event.seconds, float(event.tokens))
        recent = (*self.recent, measured)[-_WINDOW:] if self.has_stepped else ()
        # Before the second step, the token rate comes from the first step, and there is no ETA.
        shown = recent or (measured,)
        seconds = sum(second for second, _ in shown)
        return replace(
            self,
            phase=None,
            awaits_workers=False,
            has_stepped=True,
            step=event.step,
            last=event,
            recent=recent,
            seconds_per_step=fmean(second for second, _ in recent) if recent else None,
            tokens_per_s=sum(tokens for _, tokens in shown) / seconds if seconds > 0 else None,
        )


class ProgressView(Display):
    """Displays a run's start and follows its journal.

    Only new events are printed; the events already in the journal are the initial state.
    """

    def __init__(
        self,
        run_dir: Place | str,
        *,
        name: str,
        console: Console | None = None,
        log_every_steps: int = 1,
        interval_s: float | None = None,
        clock: Clock | None = None,
        is_quiet: bool = False,
    ) -> None:
        """Set up the view; nothing is read or shown before the ``with`` block is entered.

        Args:
            run_dir: The run's directory; it need not exist yet.
            name: The run's name.
            console: Output console; standard output by default. Anything but a terminal gets plain lines.
            log_every_steps: Number of steps per plain line.
            interval_s: Seconds between reads of the journal.
            clock: Clock that measures the phases.
            is_quiet: Whether to print only warnings and failures, on standard error.
        """
        self._loud = open_console(stderr=True) if is_quiet else console or open_console()
        self.console = open_console(quiet=True) if is_quiet else self._loud
        """The console for the command's other output."""
        self._tail, self._name, self._every = JournalTail(run_dir), name, log_every_steps
        self._is_live = self._loud.is_terminal and not is_quiet
        super().__init__(clock, interval_s or (None if self._is_live else _LINES_INTERVAL_S))
        self._is_quiet = is_quiet
        self._state = ProgressState()
        self._live: Live | None = None

    @property
    def state(self) -> ProgressState:
        """The displayed state."""
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
        """Show that the workers are starting, unless they have already reported."""
        with self._lock:
            self._state = self._state.awaiting_workers(phase)

    def __enter__(self) -> Self:
        """Start following the journal."""
        for entry in self._tail.poll():
            # Of the steps before this command, only the last one is displayed.
            self._state = self._state.after(entry.last if isinstance(entry, StepGroup) else entry)
        # With an earlier command's stop step the bar would start full.
        self._state = replace(self._state.before_attempt(), total_steps=None, phase="starting")
        if self._is_live:
            self._live = start_live(self._panel(), self.console, transient=False)
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        """Show the remaining events and stop."""
        super().__exit__()
        with self._lock:
            self._state = replace(self._state, phase=None)
        self.look()
        if self._live is not None:
            # If the run did not start, the panel is removed.
            self._live.transient = self._state.attempt == 0
            self._live.stop()

    def look(self) -> None:
        """Read the journal's new entries and display them."""
        with self._lock:
            for event in ungroup_steps(self._tail.poll(at_once=self._stop.is_set())):
                self._state = self._state.after(event)
                line = render_line(event, self._state)
                if line is not None and self._is_due(event):
                    self._print(line, stays=isinstance(event, _THAT_STAY))
            line = self._watch.look(self._state.phase)
            if line is not None and not self._stop.is_set():
                self._print(line)
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)

    def _print(self, line: str, *, stays: bool = False) -> None:
        """Print a line. With a panel or in quiet mode, print it only if it must stay on the screen."""
        if stays or not (self._is_live or self._is_quiet):
            self._loud.print(line)

    def _panel(self) -> RenderableType:
        return render_panel(self._name, self._state, self._watch)

    def _is_due(self, event: Event) -> bool:
        if not isinstance(event, StepDone):
            return True
        return event.step % self._every == 0 or event.step == self._state.total_steps


def render_line(event: Event, state: ProgressState) -> str | None:
    """Return an event's plain line, given the state after the event, or None if such events are not displayed.

    Fields are ``name=value`` without spaces, so that ``grep 'step='`` and ``awk`` find them.
    """
    match event:
        case StepDone():
            return _step_line(event, state)
        case AttemptStarted():
            return (
                f"attempt={state.attempt} started workers={state.world_size} dp={state.dp_size} sp={state.sp_size} "
                f"resumed_step={state.step}"
            )
        case Evaluated():
            return f"evaluation step={event.step} eval_loss={event.loss:.4f}"
        case Sampled(samples=(first, *_)):
            return f"sample step={event.step} {_first_line(first.prompt)}{_first_line(first.text)}"
        case CheckpointCommitted():
            return f"checkpoint step={event.step} path={event.path}"
        case CheckpointFailed():
            return f"warning: checkpoint step={event.step} failed: {_first_line(event.reason)}"
        case WorkerWarned():
            return f"warning: {_first_line(event.text)}"
        case CheckpointSetAside():
            return f"checkpoint step={event.step} set_aside: {event.reason}"
        case PreemptionNoticed():
            left = "" if event.deadline is None else f" in {duration(max(0.0, event.deadline - event.time))}"
            return f"preemption notice: a node will be preempted{left}"
        case AttemptEnded(restarts=None):
            return f"attempt={state.attempt} ended step={state.step} reason: {_first_line(event.reason)}"
        case AttemptEnded() | StartFailed():
            return describe_failure(event)
        case RunFinished():
            return f"run finished step={event.step}"
    return None


def _first_line(text: object) -> str:
    return str(text).partition("\n")[0]


def _step_line(step: StepDone, state: ProgressState) -> str:
    total = "" if state.total_steps is None else f"/{state.total_steps}"
    known = _known(
        ("lr={:.2e}", step.learning_rate),
        ("grad_norm={:.3g}", step.grad_norm),
        ("tokens_per_s={:.0f}", state.tokens_per_s),
        ("peak_memory_gib={:.2f}", step.peak_memory_gib),
        ("mfu={:.3f}", step.mfu),
        ("eta={}", None if state.eta_s is None else duration(state.eta_s)),
    )
    return " ".join([f"step={state.step}{total}", f"loss={step.loss:.4f}", *known])


def _known(*values: tuple[str, float | str | None]) -> list[str]:
    return [form.format(value) for form, value in values if value is not None]


def render_panel(name: str, state: ProgressState, watch: PhaseWatch) -> RenderableType:
    """Return the live panel: a progress bar, the phase, the last steps' metrics and the attempt's status."""
    lines: list[RenderableType] = [_bar(name, state)]
    if state.phase is not None:
        text = Text(no_wrap=True, overflow="ellipsis").append(one_line(state.phase), style="yellow")
        times = f"  {duration(watch.phase_s)}  ({duration(watch.elapsed_s)} since the start)"
        lines.append(text.append(times, style="dim"))
    if state.has_stepped and state.last is not None:
        lines += _numbers(state.last, state)
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


def _numbers(last: StepDone, state: ProgressState) -> list[Text]:
    learning = [
        f"loss {last.loss:.4f}",
        *_known(("lr {:.2e}", last.learning_rate), ("grad norm {:.3g}", last.grad_norm)),
    ]
    speed = _known(
        ("{} tokens/s", None if state.tokens_per_s is None else count(state.tokens_per_s)),
        ("{:.2f} s/step", state.seconds_per_step),
        ("peak {:.2f} GiB", last.peak_memory_gib),
        ("MFU {:.1%}", last.mfu),
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
