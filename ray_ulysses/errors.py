"""Errors that a person reads: what was set, to what, which rule it breaks, and the way out."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

INTERRUPTED = 130
"""Exit code of a command that a signal ended before it was done, as shells have it."""
_MOST_SAID = 50
# A password may hold slashes and at signs; a port and a path with an at sign are none.
_IN_ADDRESS = re.compile(r"(?<=://)[^/?\s]*:(?!\d+(?:[/?]|$))\S*@|(?<=https://)[^/?\s]+@|(?<=http://)[^/?\s]+@")
_IN_QUERY = re.compile(
    r"([?&](?:[^=&\s]*(?:password|passwd|secret)[^=&\s]*|(?:[^=&\s]*[_-])?"
    r"(?:(?:api|access)?key|token|pwd|credentials?|signature|sig|sas))=)[^&\s]+",
    re.IGNORECASE,
)


class UlyssesError(Exception):
    """Base of every error that ray-ulysses raises on purpose."""


class UserError(UlyssesError, ValueError):
    """Something that the user gave can't be used; the command line exits with 2."""


class RunError(UlyssesError, RuntimeError):
    """A run failed for a reason that is not the user's input; the command line exits with 1."""


class _Value(Enum):
    NOT_GIVEN = "not given"


NOT_GIVEN: Final = _Value.NOT_GIVEN
"""Stands for the value of a setting that nobody has written."""


class _Shown(reprlib.Repr):
    """Values as a configuration has them, cut where they are long."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 300
        self.maxdict = self.maxlist = self.maxtuple = 12

    def repr_str(self, value: str, level: int) -> str:
        return super().repr_str(without_secret(value), level)

    def repr_NoneType(self, _: None, __: int) -> str:
        return "null"

    def repr_bool(self, value: bool, _: int) -> str:
        return "true" if value else "false"

    def repr_tuple(self, value: tuple[object, ...], level: int) -> str:
        return self.repr_list(list(value), level)


def shown(value: object) -> str:
    """Return a setting's value in one line, as YAML writes null, true and lists, and cut where it is long."""
    return _Shown().repr(value)


def without_secret(text: str) -> str:
    """Return a text in which what is secret in a URI is stars: ``user:password@``, and options such as ``token=``."""
    return _IN_QUERY.sub(r"\1***", _IN_ADDRESS.sub("***@", text))


class PeerError(RunError):
    """This rank could not go on because of another one, whose own error says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong with one setting.

    Attributes:
        path: Dotted path of the setting, such as ``parallel.sp_size``.
        value: What it was set to; left out where nobody has set it.
        rule: The rule that the value breaks.
        hint: What to do instead.
        nearest: The name that the user may have meant, for an unknown setting.
    """

    path: str
    value: object = NOT_GIVEN
    rule: str
    hint: str
    nearest: str | None = None

    def __str__(self) -> str:
        suggestion = f" (did you mean '{self.nearest}'?)" if self.nearest else ""
        value = "" if self.value is NOT_GIVEN else f"={shown(self.value)}"
        return f"{self.path}{value}: {self.rule}; {self.hint}{suggestion}"


class ConfigError(UserError):
    """Every problem of a configuration, all at once.

    Args:
        problems: The problems.
        source: What is wrong.
        beside: An error that ended the search for more; its text or its problems are the last.
    """

    def __init__(
        self, problems: Sequence[Problem], source: str = "configuration", *, beside: UserError | None = None
    ) -> None:
        more = beside.problems if isinstance(beside, ConfigError) else ()
        self.problems: tuple[Problem, ...] = (*problems, *more)
        self.source = source
        said = [str(problem) for problem in self.problems[:_MOST_SAID]]
        if len(self.problems) > _MOST_SAID:
            said.append(f"and {len(self.problems) - _MOST_SAID:,} more of their kind")
        if beside is not None and not more:
            said.append(str(beside))
        count = len(self.problems) + (beside is not None and not more)
        lines = "\n".join(f"  - {one}" for one in said)
        super().__init__(f"{source}: {count:,} problem{'s' if count != 1 else ''}\n{lines}")
