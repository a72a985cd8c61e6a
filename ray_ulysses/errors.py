"""Errors for users: the setting, its value, the rule that it breaks, and the way out."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from ray_ulysses.logging import indented

INTERRUPTED = 130
"""Exit code of a command that was interrupted by a signal, as in shells."""
_MOST_SHOWN = 50
# A password may contain slashes and at signs. A port, and a path with an at sign, are not passwords, and in a reference
# to a checkpoint an at sign precedes the step.
_PASSWORD = re.compile(
    r"(:/{1,3}|(?:endpoint_override|blob_storage_authority)=)[^/?&\s]*:(?!\d+(?:[/?&]|@\d+$|$))\S*@", re.IGNORECASE
)
# A bucket has no port, and its endpoint no user.
_IN_BUCKET = re.compile(
    r"(\b(?:s3a?|gc?s|abfss?|az):/{1,3})(?!\*\*\*@)[^?\s]*:[^?\s]*@"
    r"|((?:endpoint_override|blob_storage_authority)=)(?!\*\*\*@)[^&\s]*@(?!(?:latest|best|\d+)$)",
    re.IGNORECASE,
)
# Without a password, the user of a database and Azure's container are not secrets.
_ONLY_USER = re.compile(
    r"\b((?:https?|ftps?|s3a?|gc?s):/{1,2})(?!\*\*\*@)[^/?\s]+@(?!(?:latest|best|\d+)$)", re.IGNORECASE
)
_SECRET_NAME = (
    r"(?:[^=&\s]*(?:password|passwd|secret)[^=&\s]*|[^=&\s]*(?:key|token|credentials?)(?:[_-][^=&\s]*)?"
    r"|(?:[^=&\s]*[_-])?(?:pwd|signature|sig|sas))"
)
_IN_QUERY = re.compile(rf"([?&]{_SECRET_NAME}=)[^&\s]+", re.IGNORECASE)


class UlyssesError(Exception):
    """Base class of all errors that ray-ulysses raises on purpose.

    Args:
        args: The text, and the items of a list below it; their continuation lines are marked.
    """

    def __str__(self) -> str:
        return "\n  - ".join(indented(str(one)) for one in self.args)


class UserError(UlyssesError, ValueError):
    """The user's input can't be used; the command line exits with 2."""


class RunError(UlyssesError, RuntimeError):
    """A run failed for a reason other than the user's input; the command line exits with 1."""


class _Value(Enum):
    NOT_GIVEN = "not given"


NOT_GIVEN: Final = _Value.NOT_GIVEN
"""The value of a setting that is not given."""


class _Shown(reprlib.Repr):
    """Formats values as YAML does, and shortens long ones."""

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
    """Format a setting's value on one line, as YAML writes null, true and lists; long values are shortened."""
    return _Shown().repr(value)


def without_secret(text: str) -> str:
    """Replace secrets of URIs in a text with stars: ``user:password@``, and options such as ``token=``."""
    text = _IN_BUCKET.sub(r"\1\2***@", _PASSWORD.sub(r"\1***@", text))
    return _IN_QUERY.sub(r"\1***", _ONLY_USER.sub(r"\1***@", text))


def names_secret(option: str) -> bool:
    """Return whether `without_secret` replaces the value of a URI's option."""
    return re.fullmatch(_SECRET_NAME, option, re.IGNORECASE) is not None


class FinalError(RunError):
    """A failure that would recur in the same run, so its workers are not restarted."""


class BrokenRanksError(RunError):
    """Some ranks compute or communicate incorrectly; every rank raises the same error.

    Args:
        text: The text.
        ranks: The ranks at fault.
    """

    def __init__(self, text: str, ranks: Collection[int] = ()) -> None:
        super().__init__(text)
        self.ranks = frozenset(ranks)


class PeerError(RunError):
    """This rank could not continue because another one failed; that rank's error has the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One problem of one setting."""

    path: str
    """Dotted path of the setting, such as ``parallel.sp_size``."""
    value: object = NOT_GIVEN
    """Its value; omitted if it is not given."""
    rule: str
    hint: str
    nearest: str | None = None
    """The name that the user may have meant, for an unknown setting."""

    def __str__(self) -> str:
        suggestion = f" (did you mean '{self.nearest}'?)" if self.nearest else ""
        value = "" if self.value is NOT_GIVEN else f"={shown(self.value)}"
        return f"{self.path}{value}: {self.rule}; {self.hint}{suggestion}"


class ConfigError(UserError):
    """All problems of a configuration.

    Args:
        problems: The problems.
        source: Name of the configuration.
        beside: An error that ended the search for problems; its problems or its text are listed last.
    """

    def __init__(
        self, problems: Sequence[Problem], source: str = "configuration", *, beside: UserError | None = None
    ) -> None:
        more = beside.problems if isinstance(beside, ConfigError) else ()
        self.problems: tuple[Problem, ...] = (*problems, *more)
        self.source = source
        texts = [str(problem) for problem in self.problems[:_MOST_SHOWN]]
        if len(self.problems) > _MOST_SHOWN:
            texts.append(f"and {len(self.problems) - _MOST_SHOWN:,} more")
        if beside is not None and not more:
            texts.append(str(beside))
        count = len(self.problems) + (beside is not None and not more)
        super().__init__(f"{source}: {count:,} problem{'s' if count != 1 else ''}", *texts)
