"""Rehearses faults: trains a run under a name of its own, makes faults happen to it, and compares it with its plan.

The run trains until every fault has happened and the run has recovered from it. Then the same configuration is trained
once more without faults, for as many steps, so that the losses can be compared.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ray_ulysses.clock import SystemClock
from ray_ulysses.cluster.fault_injection import FaultInjector
from ray_ulysses.cluster.local_cluster import LocalCluster
from ray_ulysses.cluster.train_command import TrainCommand
from ray_ulysses.errors import RunError
from ray_ulysses.rehearsal.recoveries import Recovery, Strike, recoveries
from ray_ulysses.report.words import minutes
from ray_ulysses.run.ownership import vault_key
from ray_ulysses.tracking.events import AttemptStarted, Event, StepDone
from ray_ulysses.tracking.history import read_history
from ray_ulysses.tracking.journal_reader import JournalTail
from ray_ulysses.tracking.steps import ungroup_steps

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.rehearsal.schedule import Fault, Ground
    from ray_ulysses.run.preflight import PreparedRun

CALM_S = 10.0
"""The run trains for this long after the last recovery."""
_LOOK_EVERY_S = 0.5
_REST_S = 5.0
_RECOVERY_S = 300.0
"""A run that has not trained for this long after the last fault does not recover."""
_REMIND_EVERY_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A rehearsal that is ready to start."""

    prepared: PreparedRun
    faults: tuple[Fault, ...]
    for_s: float
    """The run trains for so long at least, in seconds after its first step."""
    drain_s: float
    """Seconds from a drain to the node's end."""
    ground: Ground
    nodes: int | None
    """Nodes to start on this machine; None on a cluster that others have started."""


@dataclass(slots=True)
class _Watch:
    """What is known of the run while it trains."""

    tail: JournalTail
    say: Callable[[str], object]
    most: int
    events: list[Event] = field(default_factory=list)
    strikes: list[Strike] = field(default_factory=list)
    began: float | None = None
    said: set[int] = field(default_factory=set)

    def look(self) -> None:
        """Read what is new in the journal, and print each recovery once."""
        self.events += ungroup_steps(self.tail.poll())
        if self.began is None:
            first = next((event for event in self.events if isinstance(event, StepDone)), None)
            if first is not None:
                self.began = first.time
                self.say(f"the run trains on {self.workers} workers; times count from its first step")
        for number, one in enumerate(self.found()):
            if one.is_over and number not in self.said:
                self.said.add(number)
                self.say(_recovery_line(one, self.began or 0.0))

    def found(self) -> tuple[Recovery, ...]:
        """Return what followed each fault so far."""
        return recoveries(self.events, self.strikes, most=self.most)

    @property
    def workers(self) -> int:
        """World size of the newest attempt."""
        sizes = [event.world_size for event in self.events if isinstance(event, AttemptStarted)]
        return sizes[-1] if sizes else 0


def rehearse(
    request: Request,
    config: Config,
    folder: Path,
    *,
    local: LocalCluster | None,
    patient: bool,
    seed: int,
    say: Callable[[str], object],
) -> tuple[list[Strike], list[str]]:
    """Train a run while faults happen to it; connected to its cluster.

    Returns the faults that happened, and what went wrong.

    Args:
        request: What happens, and for how long.
        config: The rehearsal's configuration, with the address of its cluster.
        folder: For the configuration file and the output of the command.
        local: The cluster, if it was started for the rehearsal.
        patient: Whether a fault waits until the run has recovered from the one before.
        seed: Chooses the nodes and processes that faults happen to.
        say: Prints a line.
    """
    command = _command(config, folder)
    draw, drain_s = random.Random(seed), request.drain_s
    injector = FaultInjector(command, lambda: vault_key(config), local=local, drain_s=drain_s, draw=draw)
    watch, problems = _Watch(JournalTail(config.run_dir), say, config.cluster.workers.max), list[str]()
    command.start()
    try:
        try:
            _run_faults(watch, command, injector, request, patient=patient)
        except RunError as error:
            problems.append(str(error))
        stopped = command.stop(config.checkpoint.save_timeout_s) if command.is_running else command.wait()
        if stopped != 0:
            how = "had to be killed when it was to stop" if stopped is None else f"ended with {stopped}"
            problems.append(f"the command {how}; the end of {command.log}:\n{command.last_lines}")
    finally:
        command.kill()
    return watch.strikes, problems


def _run_faults(
    watch: _Watch, command: TrainCommand, injector: FaultInjector, request: Request, *, patient: bool
) -> None:
    """Make the faults happen at their times, and return once the run has recovered from them, or has ended."""
    left, said_at = list(request.faults), time.monotonic()
    over_since: float | None = None
    while command.is_running:
        time.sleep(_LOOK_EVERY_S)
        watch.look()
        gone = injector.look()
        if watch.began is None:
            if time.monotonic() - said_at >= _REMIND_EVERY_S:
                said_at = time.monotonic()
                watch.say("  " + command.last_lines.rpartition("\n")[2])
            continue
        now_s = SystemClock().now() - watch.began
        if gone is not None:
            watch.say(_strike_line(now_s, gone))
        if not all(one.is_over for one in watch.found()):
            over_since = None
        elif over_since is None:
            over_since = now_s
        is_due = bool(left) and now_s >= left[0].at_s
        if is_due and (not patient or (over_since is not None and now_s >= over_since + _REST_S)):
            over_since = None
            strike = injector.inflict(left.pop(0))
            watch.strikes.append(strike)
            watch.say(_strike_line(strike.at - watch.began, strike.what))
        elif not left and over_since is not None:
            if now_s >= max(request.for_s, over_since + CALM_S) and not injector.awaits_an_end:
                return
        elif watch.strikes and (not left or is_due) and SystemClock().now() - watch.strikes[-1].at >= _RECOVERY_S:
            return


def train_unbroken(config: Config, folder: Path, stop_step: int, say: Callable[[str], object]) -> None:
    """Train the same run without faults.

    Raises:
        RunError: It did not reach the step.
    """
    command, tail, said_at = _command(config, folder), JournalTail(config.run_dir), time.monotonic()
    command.start()
    try:
        while command.is_running:
            time.sleep(_LOOK_EVERY_S)
            steps = [event.step for event in ungroup_steps(tail.poll()) if isinstance(event, StepDone)]
            if steps and time.monotonic() - said_at >= _REMIND_EVERY_S:
                said_at = time.monotonic()
                say(f"  step {steps[-1]} of {stop_step}")
        code = command.wait()
    finally:
        command.kill()
    reached = read_history(config.run_dir).step
    if code == 0 and reached < stop_step:
        raise RunError(f"the run without faults ended at step {reached} of {stop_step}; see {command.log}")
    if code != 0:
        raise RunError(f"the run without faults ended with {code}; the end of {command.log}:\n{command.last_lines}")


def _command(config: Config, folder: Path) -> TrainCommand:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{config.run.name}.yaml"
    path.write_text(config.as_written())
    return TrainCommand(path, path.with_suffix(".log"))


def _strike_line(at_s: float, what: str) -> str:
    """Return the line about something that has happened."""
    return f"{minutes(at_s):>6}  {what}"


def _recovery_line(one: Recovery, began: float) -> str:
    """Return the line about the first step after a fault.

    Args:
        one: The recovery.
        began: When the run's first step had ended, in seconds since the epoch.
    """
    assert one.first_step_s is not None
    at_s = one.strike.at + one.first_step_s - began
    if one.attempt is None:
        return f"{minutes(at_s):>6}    training goes on"
    parts = [("noticed", one.detected_s), ("formed", one.formed_s), ("loaded", one.loaded_s)]
    times = ", ".join(f"{name} after {seconds:.1f} s" for name, seconds in parts if seconds is not None)
    lost = "no step lost" if not one.lost_steps else f"{one.lost_steps} step{'s' * (one.lost_steps != 1)} lost"
    paused = "" if one.pause_s is None else f"; training paused for {one.pause_s:.1f} s"
    again = f"trains again on {one.workers[1]} workers after {one.first_step_s:.1f} s"
    return f"{minutes(at_s):>6}    {again} ({times}); {lost}{paused}"
