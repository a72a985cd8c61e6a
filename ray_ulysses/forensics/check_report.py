"""Judges what the trial run of ``check`` has shown, line by line (pure)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ray_ulysses.tracking.events import StepDone

OUT_OF_MEMORY = "ran out of memory"
"""What the failure of a step without memory says."""
_GIB = 2**30
_WARM_STEPS = 3
"""Steps at the beginning whose speed does not count."""
_MOST_OF_PLANNED = 1.1
_LEAST_OF_MODELLED = 0.5
_SPREADS = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What a trial run was to do, and what it did.

    Attributes:
        num_steps: Steps after which it was to save and to load.
        row_tokens: Most tokens per row of the plan.
        longest_row: Tokens of its longest row, the first that was trained.
        step_tokens: Tokens of documents of each of its steps, padding excluded.
        steps: The steps of its first attempt.
        again: Those of its second, which has loaded the checkpoint.
        committed: Steps of its checkpoints.
        loaded_step: Step of the state that the second attempt has loaded; None if there was no second one.
        failure: Why it ended early; None if it did not.
        tolerance: Largest relative difference between the losses of the same step before and after the checkpoint.
        has_gpu: Whether its memory was measured on a GPU.
        planned_bytes: Memory of a rank as planned.
        limit_gib: Memory that there is, in GiB; None if unknown.
        most_of_limit: Share of that memory that it may take.
        modelled_s: Modelled seconds of a step with the rows of the trial; None where it is not modelled.
        is_pretrained: Whether the weights were trained before, so that the loss may stay where it is.
    """

    num_steps: int
    row_tokens: int
    longest_row: int
    step_tokens: Sequence[int]
    steps: Sequence[StepDone]
    again: Sequence[StepDone]
    committed: Sequence[int]
    loaded_step: int | None
    failure: str | None
    tolerance: float
    has_gpu: bool
    planned_bytes: int
    limit_gib: float | None
    most_of_limit: float
    modelled_s: float | None
    is_pretrained: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckLine:
    """One line of the report.

    Attributes:
        name: What is looked at.
        holds: Whether it is as it should be; None where there is nothing to compare with.
        found: What was found.
        rule: What should be.
    """

    name: str
    holds: bool | None
    found: str
    rule: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """The report.

    Attributes:
        name: The run that was checked.
        lines: Its lines.
    """

    name: str
    lines: tuple[CheckLine, ...]

    @property
    def failed(self) -> tuple[CheckLine, ...]:
        """The lines that do not hold."""
        return tuple(line for line in self.lines if line.holds is False)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {"name": self.name, "holds": not self.failed, "lines": [asdict(line) for line in self.lines]}


def judge(name: str, trial: Trial) -> CheckReport:
    """Return the report on a trial run."""
    return CheckReport(name=name, lines=tuple(_lines(trial)))


def _lines(trial: Trial) -> Iterator[CheckLine]:
    yield _documents(trial)
    yield _trained(trial)
    yield _memory(trial)
    yield _as_planned(trial)
    yield _finite(trial)
    yield _falling(trial)
    yield _speed(trial)
    yield _written(trial)
    yield _loaded(trial)


def _documents(trial: Trial) -> CheckLine:
    """The self-test compares a packed row with its documents one by one, before the first step of the attempt."""
    failed = trial.failure is not None and "the self-test" in trial.failure
    found = (
        str(trial.failure) if failed else "the self-test passed on the live devices" if trial.steps else "not tested"
    )
    rule = "attention and gradients of packed documents are those of each alone"
    return CheckLine(name="documents apart", holds=bool(trial.steps) and not failed, found=found, rule=rule)


def _trained(trial: Trial) -> CheckLine:
    full = f"{trial.longest_row:,} of {trial.row_tokens:,} tokens in the first row"
    done = f"{len(trial.steps)} steps, {full}"
    found = done if trial.failure is None else f"{done}; then: {trial.failure}"
    rule = f"{trial.num_steps + 1} steps, the costliest rows first"
    return CheckLine(name="trains", holds=len(trial.steps) > trial.num_steps, found=found, rule=rule)


def _memory(trial: Trial) -> CheckLine:
    peak, limit = _peak_gib(trial), trial.limit_gib
    if trial.failure is not None and OUT_OF_MEMORY in trial.failure:
        return CheckLine(name="memory", holds=False, found=trial.failure, rule=f"at most {trial.most_of_limit:.0%}")
    if peak is None or limit is None:
        found = "not measured" if peak is None else f"{peak:.2f} GiB; memory.device_gib is not given"
        return CheckLine(name="memory", holds=None, found=found, rule=f"at most {trial.most_of_limit:.0%} of a GPU")
    share = peak / limit
    rule = f"at most {trial.most_of_limit:.0%}"
    found = f"{peak:.2f} of {limit:g} GiB ({share:.0%})"
    return CheckLine(name="memory", holds=share <= trial.most_of_limit, found=found, rule=rule)


def _as_planned(trial: Trial) -> CheckLine:
    peak, planned = _peak_gib(trial), trial.planned_bytes / _GIB
    if peak is None or not trial.has_gpu:
        what = "not measured" if peak is None else f"{peak:.2f} GiB resident, libraries included"
        return CheckLine(name="memory as planned", holds=None, found=what, rule=f"{planned:.2f} GiB by plan, on a GPU")
    rule = f"at most {_MOST_OF_PLANNED:g} x the planned {planned:.2f} GiB"
    found = f"{peak:.2f} GiB ({peak / planned:.2f} x)"
    return CheckLine(name="memory as planned", holds=peak <= _MOST_OF_PLANNED * planned, found=found, rule=rule)


def _finite(trial: Trial) -> CheckLine:
    bad = [one.step for one in trial.steps if not (math.isfinite(one.loss) and math.isfinite(one.grad_norm or 0.0))]
    found = f"not in step {', '.join(map(str, bad))}" if bad else "in every step" if trial.steps else "no step"
    is_bad_step = trial.failure is not None and "not finite" in trial.failure
    holds = bool(trial.steps) and not bad and not is_bad_step
    return CheckLine(name="finite", holds=holds, found=str(trial.failure) if is_bad_step else found, rule="every step")


def _falling(trial: Trial) -> CheckLine:
    losses = [one.loss for one in trial.steps if math.isfinite(one.loss)]
    part = len(losses) // 3
    rule = "does not rise beyond the spread of its steps" if trial.is_pretrained else "falls"
    if part < 2:
        return CheckLine(name="loss", holds=False, found=f"{len(losses)} finite losses: too few to tell", rule=rule)
    first, last = losses[:part], losses[-part:]
    rise = statistics.fmean(last) - statistics.fmean(first)
    spread = math.sqrt((statistics.variance(first) + statistics.variance(last)) / part)
    most = _SPREADS * spread if trial.is_pretrained else 0.0
    found = f"{statistics.fmean(first):.4f} to {statistics.fmean(last):.4f} (first and last third)"
    return CheckLine(name="loss", holds=rise <= most if trial.is_pretrained else rise < 0.0, found=found, rule=rule)


def _speed(trial: Trial) -> CheckLine:
    timed = [(one.seconds, tokens) for one, tokens in zip(trial.steps, trial.step_tokens, strict=False)][_WARM_STEPS:]
    if not timed:
        return CheckLine(name="speed", holds=None, found="not measured", rule="as modelled")
    seconds = statistics.median(one for one, _ in timed)
    rate = sum(tokens for _, tokens in timed) / sum(one for one, _ in timed)
    found = f"{rate:,.0f} tokens/s, {seconds:.2f} s per step"
    if trial.modelled_s is None:
        return CheckLine(name="speed", holds=None, found=found, rule="not modelled (cluster.device, GPUs and bf16)")
    rule = f"at most {1 / _LEAST_OF_MODELLED:g} x the modelled {trial.modelled_s:.2f} s"
    holds = seconds <= trial.modelled_s / _LEAST_OF_MODELLED
    return CheckLine(name="speed", holds=holds, found=f"{found} ({seconds / trial.modelled_s:.2f} x)", rule=rule)


def _written(trial: Trial) -> CheckLine:
    holds = trial.num_steps in trial.committed
    found = f"step {trial.num_steps} is committed" if holds else trial.failure or "no checkpoint is committed"
    return CheckLine(name="checkpoint written", holds=holds, found=found, rule="whole on the configured storage")


def _loaded(trial: Trial) -> CheckLine:
    rule = f"the step after it has the same loss, to {trial.tolerance:g}"
    before = {one.step: one.loss for one in trial.steps}
    after = {one.step: one.loss for one in trial.again}
    both = [(before[step], after[step]) for step in before.keys() & after.keys()]
    if trial.loaded_step != trial.num_steps or not both:
        found = "no attempt has loaded it" if trial.failure is None else trial.failure
        return CheckLine(name="checkpoint loaded", holds=False, found=found, rule=rule)
    difference = max(abs(a - b) / max(abs(a), 1e-12) for a, b in both)
    holds = difference <= trial.tolerance
    return CheckLine(name="checkpoint loaded", holds=holds, found=f"differs by {difference:.1e}", rule=rule)


def _peak_gib(trial: Trial) -> float | None:
    return max((one.peak_memory_gib for one in trial.steps if one.peak_memory_gib is not None), default=None)
