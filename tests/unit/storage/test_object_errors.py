"""What an object store's refusal means."""

from __future__ import annotations

import errno

import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError, PreconditionError

from ray_ulysses.storage.object_client import explain

_AT = "Generic S3 error: Error performing PUT http://host.example:9000/bucket/key in 3ms - "


def _status(status: str, code: str = "") -> str:
    body = f"<Error><Code>{code}</Code></Error>" if code else ""
    return f"{_AT}Server returned non-2xx status code: {status}: {body}\n\nDebug source:\n..."


@pytest.mark.parametrize(
    ("error", "meaning", "reason"),
    [
        (GenericError(_status("503 Service Unavailable", "SlowDown")), "transient", "503 Service Unavailable SlowDown"),
        (AlreadyExistsError(_status("409 Conflict", "ConditionalRequestConflict")), "transient", "409 Conflict Cond"),
        (AlreadyExistsError(_status("412 Precondition Failed", "PreconditionFailed")), "taken", "412 Precondition"),
        (PreconditionError(_status("412 Precondition Failed")), "changed", "412 Precondition Failed"),
        (FileNotFoundError(_status("404 Not Found", "NoSuchKey")), "absent", "the file does not exist"),
        (GenericError(_status("404 Not Found", "NoSuchBucket")), "absent", "the bucket does not exist"),
        (GenericError(_status("404 Not Found", "ContainerNotFound")), "absent", "the bucket does not exist"),
        (PermissionDeniedError(_status("403 Forbidden", "AccessDenied")), "denied", "403 Forbidden AccessDenied"),
        (GenericError(_status("400 Bad Request", "ExpiredToken")), "denied", "ExpiredToken"),
        (GenericError(_status("507 Insufficient Storage")), "full", "no space left"),
        (GenericError(_status("501 Not Implemented", "NotImplemented")), "refused", "501 Not Implemented"),
        (GenericError(_AT + "HTTP error\n inner: HttpError { kind: Connect,"), "away", "unreachable"),
        (GenericError(_AT + "HTTP error\n inner: HttpError { kind: Timeout,"), "transient", "timed out"),
        (
            GenericError("Generic S3 error: Error performing PUT http://1.2.3.4/latest/api/token"),
            "denied",
            "--trust-run",
        ),
        (GenericError("Generic S3 error: cannot parse http://host.example/x answer"), "refused", "cannot parse answer"),
    ],
)
def test_an_error_means_one_thing(error: Exception, meaning: str, reason: str) -> None:
    refusal = explain(error)
    assert refusal.meaning == meaning
    assert reason in refusal.reason
    assert "host.example" not in str(refusal.as_os_error("s3://bucket/key", 1.0))


@pytest.mark.parametrize(
    ("status", "kind", "number"),
    [
        ("404 Not Found", FileNotFoundError, errno.ENOENT),
        ("403 Forbidden", PermissionError, errno.EACCES),
        ("507 Insufficient Storage", OSError, errno.ENOSPC),
        ("400 Bad Request", OSError, errno.EIO),
    ],
)
def test_it_becomes_the_standard_library_s_error(status: str, kind: type[OSError], number: int) -> None:
    raised = FileNotFoundError if status.startswith("404") else GenericError
    error = explain(raised(_status(status))).as_os_error("s3://bucket/key", 1.0)
    assert type(error) is kind
    assert (error.errno, error.filename) == (number, "s3://bucket/key")
