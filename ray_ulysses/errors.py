"""Errors that a person reads: what was set, to what, which rule it breaks, and the way out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class UlyssesError(Exception):
    """Base of every error that ray-ulysses raises on purpose."""


class UserError(UlyssesError, ValueError):
    """Something that the user gave can't be used; the command line exits with 2."""


class RunError(UlyssesError, RuntimeError):
    """A run failed for a reason that is not the user's input; the command line exits with 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong with one setting.

    Attributes:
        path: Dotted path of the setting, such as ``parallel.sp_size``.
        value: What it was set to.
        rule: The rule that the value breaks.
        way_out: What to do instead.
        nearest: The name that the user may have meant, for an unknown setting.
    """

    path: str
    value: object
    rule: str
    way_out: str
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f" (did you mean '{self.nearest}'?)" if self.nearest else ""
        return f"{self.path}={self.value!r}: {self.rule}; {self.way_out}{hint}"


class ConfigError(UserError):
    """Every problem of a configuration, all at once."""

    def __init__(self, problems: Sequence[Problem], source: str = "configuration") -> None:
        self.problems = tuple(problems)
        self.source = source
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(f"{source}: {count} problem{'s' if count != 1 else ''}\n{lines}")
