"""Documents that are left out of a corpus, and the reasons."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SAME = re.compile(r"^(the same \w+ as) .*", re.DOTALL)
# The text after the colon differs between documents, except in reasons about a message or a tool.
_DETAILED = re.compile(r"^(?!message |tool |the chat template refuses )([^:]+): .*", re.DOTALL)
_NUMBER = re.compile(r"(?<![-\w])(?<!line )\d+\b")


class RowError(ValueError):
    """The reason why a row can't be a document, which the quarantine lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A document that is left out.

    Attributes:
        source: Its file or data set.
        offset: Line or row in it, from 1; 0 for a whole file.
        reason: Why it is left out.
    """

    source: str
    offset: int
    reason: str


def reason_class(reason: str) -> str:
    """Return a reason without the parts that differ between documents, so that equal ones can be counted."""
    common = _SAME.sub(r"\1 another", reason)
    return _NUMBER.sub("N", _DETAILED.sub(r"\1", common))
