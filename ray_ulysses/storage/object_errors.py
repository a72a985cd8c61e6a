"""Classifies the errors of `obstore`, and describes them without hosts or addresses.

`obstore` says most things in the text of its errors: the status and the XML code that S3-compatible servers send
(https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html), or how the connection failed.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from typing import Literal

from obstore.exceptions import (
    AlreadyExistsError,
    NotModifiedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

Meaning = Literal["taken", "changed", "absent", "denied", "full", "away", "transient", "refused"]

_STATUS = re.compile(r"status code: (\d{3}) ?([A-Za-z -]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>|\"code\": ?\"(\w+)\"")
_CONNECTION = re.compile(r"kind: (Connect|Request|Timeout|Interrupted|Decode|Unknown)\b")
_TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
# A conditional write met another one in flight, and neither was decided.
_TRANSIENT_CODES = {"ConditionalRequestConflict", "OperationAborted", "RequestTimeout", "SlowDown", "InternalError"}
_DENIED_CODES = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
_FULL_CODES = {"QuotaExceeded", "XMinioStorageFull"}
_CONNECTION_WORDS = {
    "Timeout": "it did not answer in time",
    "Interrupted": "the connection broke",
}
_NO_CREDENTIALS = ("latest/api/token", "metadata.google.internal", "metadata/identity/oauth2")
_NUMBERS: dict[Meaning, int] = {
    "absent": errno.ENOENT,
    "denied": errno.EACCES,
    "full": errno.ENOSPC,
    "changed": errno.ESTALE,
    "away": errno.EHOSTUNREACH,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """The meaning of an error of the library.

    Attributes:
        meaning: What happened. `away`: nobody heard the request; `transient`: nobody knows what became of it.
        reason: The same for a person.
    """

    meaning: Meaning
    reason: str

    @property
    def may_pass(self) -> bool:
        """Return whether the same request may succeed later."""
        return self.meaning in ("away", "transient")

    def as_os_error(self, name: str, tried_s: float) -> OSError:
        """Return it as the standard library's error.

        Args:
            name: What was asked for.
            tried_s: For how long it was tried, in seconds.
        """
        said = f"failed for {tried_s:.1f} s" if self.may_pass else "refused"
        # OSError picks FileNotFoundError or PermissionError by the number.
        return OSError(_NUMBERS.get(self.meaning, errno.EIO), f"the store {said}: {self.reason}", name)


def explain(error: Exception) -> Refusal:
    """Return what an error of the library means (pure)."""
    text = str(error)
    status, code = _status_and_code(text)
    reason = " ".join(part for part in (status, code) if part) or "it gave no reason"
    if any(address in text for address in _NO_CREDENTIALS):
        reason = "no credentials in the environment, and no role of this machine; commands that take a RUN read its "
        return Refusal(meaning="denied", reason=f"{reason}cluster.secrets_file with --trust-run alone")
    number = int(status[:3]) if status else None
    if isinstance(error, ConnectionError):
        return Refusal(meaning="transient", reason=text)
    if code in _TRANSIENT_CODES or number in _TRANSIENT_STATUS:
        return Refusal(meaning="transient", reason=reason)
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return Refusal(meaning="absent", reason="there is no such bucket")
    if isinstance(error, AlreadyExistsError):
        return Refusal(meaning="taken", reason=reason)
    if isinstance(error, PreconditionError | NotModifiedError):
        return Refusal(meaning="changed", reason=reason)
    if isinstance(error, FileNotFoundError):
        return Refusal(meaning="absent", reason="there is no such file")
    is_denied = isinstance(error, PermissionError | PermissionDeniedError | UnauthenticatedError)
    if is_denied or code in _DENIED_CODES or number in (401, 403):
        return Refusal(meaning="denied", reason=f"its answer to the credentials was {reason}")
    if number == 507 or code in _FULL_CODES:
        return Refusal(meaning="full", reason="no space left")
    connection = _CONNECTION.search(text)
    if number is None and connection is not None and connection[1] == "Connect":
        return Refusal(meaning="away", reason="it could not be reached")
    if number is None and connection is not None:
        return Refusal(meaning="transient", reason=_CONNECTION_WORDS.get(connection[1], "the exchange was cut short"))
    return Refusal(meaning="refused", reason=reason if number is not None else _first_line(text))


def _status_and_code(text: str) -> tuple[str, str]:
    """Return the HTTP status with its words, and the store's own code; empty where there is none."""
    status, code = _STATUS.search(text), _CODE.search(text)
    return (f"{status[1]} {status[2]}".strip() if status else "", (code[1] or code[2]) if code else "")


def _first_line(text: str) -> str:
    """Return what the library says, less any address."""
    return re.sub(r"\s*\bhttps?://\S+", "", text.partition("\n")[0])
