"""Error classes. A message specifies the setting, its value, the violated rule and a way to fix the problem."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from ray_ulysses.logging import indented

INTERRUPTED = 130
"""Exit code of a command that was interrupted with Ctrl-C, the same as in shells."""
_MOST_SHOWN = 50
# A password may contain slashes and at signs. Ports and paths with an at sign must not be mistaken for passwords, and
# neither must checkpoint references, in which an at sign precedes the step.
_PASSWORD = re.compile(
    r"(:/{1,3}|(?:endpoint_override|blob_storage_authority)=)[^/?&\s]*:(?!\d+(?:[/?&]|@\d+$|$))\S*@", re.IGNORECASE
)
# Buckets have no port, so text between a colon and an at sign is a password. Endpoints have no user, so text before an
# at sign is a password.
_IN_BUCKET = re.compile(
    r"(\b(?:s3a?|gc?s|abfss?|az):/{1,3})(?!\*\*\*@)[^?\s]*:[^?\s]*@"
    r"|((?:endpoint_override|blob_storage_authority)=)(?!\*\*\*@)[^&\s]*@(?!(?:latest|best|\d+)$)",
    re.IGNORECASE,
)
# For these schemes, a user without a password may be an access token. A database user or Azure container is no secret.
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
        args: Message, optionally followed by items to list below the message.
    """

    def __str__(self) -> str:
        return "\n  - ".join(indented(str(one)) for one in self.args)


class UserError(UlyssesError, ValueError):
    """Error in the user's input. The command exits with code 2."""


class RunError(UlyssesError, RuntimeError):
    """Failure of a run for a reason other than invalid input. The command exits with code 1."""


class _Value(Enum):
    NOT_GIVEN = "not given"


NOT_GIVEN: Final = _Value.NOT_GIVEN
"""Placeholder for the value of a setting that the user did not set."""


class _Shown(reprlib.Repr):
    """Formatter that uses YAML's notation for null, booleans and lists, and shortens long values."""

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
    """Format a setting's value on one line, with YAML's notation for null, booleans and lists. Shorten long values."""
    return _Shown().repr(value)


def without_secret(text: str) -> str:
    """Replace secrets in URIs, such as ``user:password@`` and options such as ``token=``, with ``***``."""
    text = _IN_BUCKET.sub(r"\1\2***@", _PASSWORD.sub(r"\1***@", text))
    return _IN_QUERY.sub(r"\1***", _ONLY_USER.sub(r"\1***@", text))


def names_secret(option: str) -> bool:
    """Return whether `without_secret` hides the value of a URI option with this name."""
    return re.fullmatch(_SECRET_NAME, option, re.IGNORECASE) is not None


class FinalError(RunError):
    """A failure that would recur after a restart, so the run ends instead of restarting its workers."""


class BrokenRanksError(RunError):
    """Some ranks compute or communicate incorrectly. Every rank raises the same error.

    Args:
        text: Error message.
        ranks: Faulty ranks, or empty if unknown.
    """

    def __init__(self, text: str, ranks: Collection[int] = ()) -> None:
        super().__init__(text)
        self.ranks = frozenset(ranks)


class PeerError(RunError):
    """This rank could not continue because another rank failed. The other rank's error contains the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A problem with one setting."""

    path: str
    """Dotted path of the setting, such as ``parallel.sp_size``."""
    value: object = NOT_GIVEN
    """Value of the setting, or `NOT_GIVEN` if the user did not set it."""
    rule: str
    hint: str
    nearest: str | None = None
    """Existing setting with the most similar name, if the setting is unknown."""

    def __str__(self) -> str:
        suggestion = f" (did you mean '{self.nearest}'?)" if self.nearest else ""
        value = "" if self.value is NOT_GIVEN else f"={shown(self.value)}"
        return f"{self.path}{value}: {self.rule}; {self.hint}{suggestion}"


class ConfigError(UserError):
    """An error that lists all problems found in a configuration.

    Args:
        problems: Problems to list, in order.
        source: Display name of the configuration.
        beside: Error that ended the search for problems. The error's problems, or its message, are listed last.
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
