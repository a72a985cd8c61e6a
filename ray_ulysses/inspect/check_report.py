"""Evaluates the trial run of ``ray-ulysses check`` and builds its report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ray_ulysses.tracking.events import StepDone

OUT_OF_MEMORY = "ran out of memory"
"""Text in the error message of a step that runs out of memory."""
_WARM_STEPS = 3
"""Number of initial steps that are excluded from the speed measurement."""
_MOST_OF_PLANNED = 1.1
_LEAST_OF_MODELLED = 0.5
_SPREADS = 3.0
_NOT_REACHED = "not reached"
_CAUSES = {
    "the self-test": "documents apart",
    OUT_OF_MEMORY: "memory",
    "not finite": "finite",
    "elastic.loss_spike_mads": "loss",
}
"""Report line for a failure, by text in its message. Other failures are attributed by the trial's progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The plan and the outcome of a trial run."""

    num_steps: int
    """Number of steps before the trial saves and loads a checkpoint."""
    row_tokens: int
    longest_row: int
    """Tokens in the longest row, which is trained first."""
    step_tokens: Sequence[int]
    """Document tokens per step, excluding padding."""
    steps: Sequence[StepDone]
    """Steps of the first attempt."""
    again: Sequence[StepDone]
    """Steps of the second attempt, which loaded the checkpoint."""
    committed: Sequence[int]
    unsaved: str | None
    """Reason why saving a checkpoint failed; None if no save failed."""
    loaded_step: int | None
    """Step from which the second attempt resumed; None if there was no second attempt."""
    failure: str | None
    tolerance: float
    """Largest allowed relative difference between the losses of a step before and after loading the checkpoint."""
    has_gpu: bool
    planned_bytes: int
    """Planned memory per rank, in bytes."""
    limit_gib: float | None
    """Available memory per rank, in GiB; None if unknown."""
    most_of_limit: float
    modelled_s: float | None
    """Modelled duration of a step of the trial, in seconds; None if it can't be modelled."""
    is_compared: bool
    """Whether the model was compared with measured steps on this device. If not, the speed is shown, but not judged."""
    is_pretrained: bool
    """Whether training starts from pretrained weights, in which case the loss need not fall."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckLine:
    """A line of the report, which states the result of one check."""

    name: str
    holds: bool | None
    """Whether the check passed; None if the trial did not reach it or there is nothing to compare."""
    found: str
    rule: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """The report of a trial run."""

    name: str
    lines: tuple[CheckLine, ...]

    @property
    def failed(self) -> tuple[CheckLine, ...]:
        """Lines whose check failed."""
        return tuple(line for line in self.lines if line.holds is False)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-serializable values."""
        return {"name": self.name, "holds": not self.failed, "lines": [asdict(line) for line in self.lines]}


def judge(name: str, trial: Trial) -> CheckReport:
    """Return the report of a trial run. A failure of the trial fails only the line to which it is attributed."""
    judges = (_documents, _trained, _memory, _as_planned, _finite, _falling, _speed, _written, _loaded)
    lines, cause = [judged(trial) for judged in judges], _cause(trial)
    lines = [replace(one, holds=False, found=str(trial.failure)) if one.name == cause else one for one in lines]
    return CheckReport(name=name, lines=tuple(lines))


def _cause(trial: Trial) -> str | None:
    """Return the name of the report line to which the trial's failure is attributed, or None if nothing failed."""
    if trial.failure is None:
        return None
    for words, line in _CAUSES.items():
        if words in trial.failure:
            return line
    if trial.num_steps in trial.committed and len(trial.steps) > trial.num_steps:
        return "checkpoint loaded"
    is_unsaved = trial.unsaved is not None or len(trial.steps) >= trial.num_steps
    return "checkpoint written" if is_unsaved else "trains"


def _documents(trial: Trial) -> CheckLine:
    # The self-test compares a packed row with its separate documents, before the first step of the attempt.
    found = "the self-test passed on the live devices" if trial.steps else _NOT_REACHED
    rule = "packed documents have the same attention and gradients as separate documents"
    return CheckLine(name="documents apart", holds=True if trial.steps else None, found=found, rule=rule)


def _trained(trial: Trial) -> CheckLine:
    found = f"{len(trial.steps)} steps, {trial.longest_row:,} of {trial.row_tokens:,} tokens in the first row"
    rule = f"{trial.num_steps + 1} steps, with the most expensive rows in the first"
    is_done = len(trial.steps) > trial.num_steps
    return CheckLine(name="trains", holds=None if trial.failure and not is_done else is_done, found=found, rule=rule)


def _memory(trial: Trial) -> CheckLine:
    peak, limit = _peak_gib(trial), trial.limit_gib
    if peak is None or limit is None:
        found = _NOT_REACHED if peak is None else f"{peak:.2f} GiB; memory.device_gib is not set"
        return CheckLine(name="memory", holds=None, found=found, rule=f"at most {trial.most_of_limit:.0%} of a GPU")
    share = peak / limit
    rule = f"at most {trial.most_of_limit:.0%}"
    found = f"{peak:.2f} of {limit:.4g} GiB ({share:.0%})"
    return CheckLine(name="memory", holds=share <= trial.most_of_limit, found=found, rule=rule)


def _as_planned(trial: Trial) -> CheckLine:
    peak, planned = _peak_gib(trial), trial.planned_bytes / 2**30
    if peak is None or not trial.has_gpu:
        what = _NOT_REACHED if peak is None else f"{peak:.2f} GiB resident, including libraries"
        return CheckLine(name="memory as planned", holds=None, found=what, rule=f"planned {planned:.2f} GiB on a GPU")
    rule = f"at most {_MOST_OF_PLANNED:g} x the planned {planned:.2f} GiB"
    found = f"{peak:.2f} GiB ({peak / planned:.2f} x)"
    return CheckLine(name="memory as planned", holds=peak <= _MOST_OF_PLANNED * planned, found=found, rule=rule)


def _finite(trial: Trial) -> CheckLine:
    bad = [one.step for one in trial.steps if not (math.isfinite(one.loss) and math.isfinite(one.grad_norm or 0.0))]
    found = f"not in step {', '.join(map(str, bad))}" if bad else "in every step" if trial.steps else _NOT_REACHED
    return CheckLine(name="finite", holds=not bad if trial.steps else None, found=found, rule="every step")


def _falling(trial: Trial) -> CheckLine:
    # Exclude the first step: its rows were selected by cost, the others' rows are a representative sample.
    losses = [one.loss for one in trial.steps[1:] if math.isfinite(one.loss)]
    part = len(losses) // 3
    rule = "does not rise beyond its variation" if trial.is_pretrained else "falls"
    if part < 2 or (trial.failure is not None and len(trial.steps) <= trial.num_steps):
        return CheckLine(name="loss", holds=None, found=_NOT_REACHED, rule=rule)
    first, last = losses[:part], losses[-part:]
    rise = statistics.fmean(last) - statistics.fmean(first)
    spread = math.sqrt((statistics.variance(first) + statistics.variance(last)) / part)
    most = _SPREADS * spread if trial.is_pretrained else 0.0
    found = f"{statistics.fmean(first):.4f} to {statistics.fmean(last):.4f} (first and last third, from step 2)"
    return CheckLine(name="loss", holds=rise <= most if trial.is_pretrained else rise < 0.0, found=found, rule=rule)


def _speed(trial: Trial) -> CheckLine:
    timed = [(one.seconds, tokens) for one, tokens in zip(trial.steps, trial.step_tokens, strict=False)][_WARM_STEPS:]
    if not timed:
        return CheckLine(name="speed", holds=None, found=_NOT_REACHED, rule="as modelled")
    seconds = statistics.median(one for one, _ in timed)
    rate = sum(tokens for _, tokens in timed) / sum(one for one, _ in timed)
    found = f"{rate:,.0f} tokens/s, {seconds:.2f} s per step"
    if trial.modelled_s is None:
        return CheckLine(name="speed", holds=None, found=found, rule="no model (needs cluster.device, GPUs and bf16)")
    found += f" ({seconds / trial.modelled_s:.2f} x)"
    if not trial.is_compared:
        rule = f"{trial.modelled_s:.2f} s modelled from the data sheet of a GPU that was never measured"
        return CheckLine(name="speed", holds=None, found=found, rule=rule)
    rule = f"at most {1 / _LEAST_OF_MODELLED:g} x the modelled {trial.modelled_s:.2f} s"
    return CheckLine(name="speed", holds=seconds <= trial.modelled_s / _LEAST_OF_MODELLED, found=found, rule=rule)


def _written(trial: Trial) -> CheckLine:
    rule = "complete on the configured storage"
    if trial.num_steps in trial.committed:
        return CheckLine(name="checkpoint written", holds=True, found=f"step {trial.num_steps} is committed", rule=rule)
    holds = None if trial.failure is not None else False
    found = trial.unsaved or (_NOT_REACHED if holds is None else "no checkpoint is committed")
    return CheckLine(name="checkpoint written", holds=holds, found=found, rule=rule)


def _loaded(trial: Trial) -> CheckLine:
    rule = f"the next step has the same loss, within {trial.tolerance:g}"
    before = {one.step: one.loss for one in trial.steps}
    after = {one.step: one.loss for one in trial.again}
    both = [(before[step], after[step]) for step in before.keys() & after.keys()]
    if trial.num_steps not in trial.committed or (trial.failure is not None and not both):
        return CheckLine(name="checkpoint loaded", holds=None, found=_NOT_REACHED, rule=rule)
    if trial.loaded_step != trial.num_steps or not both:
        return CheckLine(name="checkpoint loaded", holds=False, found="no attempt loaded the checkpoint", rule=rule)
    differences = [abs(a - b) / max(abs(a), 1e-12) for a, b in both]
    holds = all(one <= trial.tolerance for one in differences)
    return CheckLine(name="checkpoint loaded", holds=holds, found=f"differs by {max(differences):.1e}", rule=rule)


def _peak_gib(trial: Trial) -> float | None:
    return max((one.peak_memory_gib for one in trial.steps if one.peak_memory_gib is not None), default=None)
