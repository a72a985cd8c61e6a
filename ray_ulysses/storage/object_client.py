"""Creates object store clients from a URI and the environment, and classifies `obstore` errors.

`obstore` reports most details only in the error text, such as the HTTP status, the XML code of S3-compatible servers
(https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html), or the kind of connection failure.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotModifiedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, S3Store

from ray_ulysses.errors import UserError, without_secret
from ray_ulysses.storage.location import RETRY_S, ObjectLocation, Provider, is_clear_text

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, S3Config

Client = S3Store | GCSStore | AzureStore

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_CONNECT_S, _STALL_S = 5.0, 60.0
_NO_ACCOUNT = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
# Effectively no time limit per request, since one ranged GET may fetch gigabytes. `_STALL_S` ends stalled requests.
_REQUEST_S = 24 * 3600.0


def connect(location: ObjectLocation, *, retry_s: float = RETRY_S) -> Client:
    """Return a client for a location without sending a request.

    The client reads the same ``AWS_*``, ``GOOGLE_*`` and ``AZURE_*`` variables as the providers' own tools, and uses
    the machine's role if no credentials are set. The URI's options take precedence.

    Args:
        location: Bucket, prefix and options.
        retry_s: Maximum time, in seconds, to retry a request while the store is unreachable or overloaded.

    Raises:
        UserError: The client can't be created from the URI and the environment.
    """
    makers: dict[Provider, tuple[type[Client], Callable[[ObjectLocation], tuple[Any, ClientConfig]]]]
    makers = {"s3": (S3Store, _s3_config), "gs": (GCSStore, _gcs_config), "az": (AzureStore, _azure_config)}
    make, configure = makers[location.provider]
    try:
        config, options = configure(location)
        return make(
            location.bucket,
            prefix=location.prefix or None,
            config=config,
            client_options=options,
            # Retries are limited by time, not by number.
            retry_config={
                "max_retries": 10_000,
                "retry_timeout": timedelta(seconds=retry_s),
                "backoff": {
                    "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
                    "max_backoff": timedelta(seconds=_LONGEST_PAUSE_S),
                    "base": 2,
                },
            },
        )
    except (BaseError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"storage {str(location)!r}: invalid settings ({reason}); check the environment") from error


def _s3_config(location: ObjectLocation) -> tuple[S3Config, ClientConfig]:
    config: S3Config = {}
    used = location.server or _s3_endpoint_of_environment()
    region = location.option("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    virtual = location.option("force_virtual_addressing") == "true"
    if virtual:
        config["virtual_hosted_style_request"] = True
    if used:
        # With virtual addressing, obstore expects the bucket's host as the endpoint. The S3-specific variable would
        # override the general option, so the chosen endpoint is passed as both options.
        used = used.replace("://", f"://{location.bucket}.", 1) if virtual else used
        config["endpoint"] = config["aws_endpoint_url_s3"] = used
    if region:
        config["region"] = region
    options = _client_options(used)
    if os.environ.get("AWS_CA_BUNDLE"):
        options["root_certificate"] = Path(os.environ["AWS_CA_BUNDLE"]).read_bytes()
    return config, options


def _s3_endpoint_of_environment() -> str:
    name = next((name for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if os.environ.get(name)), "")
    endpoint = os.environ.get(name, "")
    if is_clear_text(endpoint) and os.environ.get("AWS_ALLOW_HTTP", "").lower() not in ("true", "1", "yes", "on"):
        rule = f"{name}={without_secret(endpoint)} would send credentials in clear text"
        raise ValueError(f"{rule}; use https://, or set AWS_ALLOW_HTTP=true if the network is private")
    return endpoint


def _gcs_config(location: ObjectLocation) -> tuple[GCSConfig, ClientConfig]:
    config: GCSConfig = {}
    endpoint = location.server or os.environ.get("STORAGE_EMULATOR_HOST") or ""
    if endpoint:
        endpoint = endpoint if "://" in endpoint else f"http://{endpoint}"
        config["base_url"] = endpoint
    if "STORAGE_EMULATOR_HOST" in os.environ:
        # Like Google's own libraries, send no credentials to an emulator. With only `skip_signature`, obstore 0.12.1
        # still requests a token from the machine's role before a put.
        config = {"skip_signature": True, "service_account_key": json.dumps({**_NO_ACCOUNT, "gcs_base_url": endpoint})}
    return config, _client_options(endpoint)


def _azure_config(location: ObjectLocation) -> tuple[AzureConfig, ClientConfig]:
    config: AzureConfig = {}
    account = location.account or location.option("account_name")
    if account:
        config["account_name"] = account
    authority, endpoint = location.option("blob_storage_authority"), ""
    if authority:
        scheme = "http" if location.option("enable_tls") == "false" else "https"
        account = account or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
        endpoint = f"{scheme}://{account}{authority}" if authority[0] == "." else f"{scheme}://{authority}/{account}"
        config["endpoint"] = endpoint
    return config, _client_options(endpoint)


def _client_options(endpoint: str) -> ClientConfig:
    return {
        # Plain HTTP requires an explicit http:// endpoint.
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        "read_timeout": timedelta(seconds=_STALL_S),
        "timeout": timedelta(seconds=_REQUEST_S),
    }


Meaning = Literal["taken", "changed", "absent", "denied", "full", "away", "transient", "refused"]

_STATUS = re.compile(r"status code: (\d{3}) ?([A-Za-z -]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>|\"code\": ?\"(\w+)\"")
_CONNECTION = re.compile(r"kind: (Connect|Request|Timeout|Interrupted|Decode|Unknown)\b")
_TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
# S3 returns the first two codes if concurrent conditional writes conflict; neither write may have succeeded.
_TRANSIENT_CODES = {"ConditionalRequestConflict", "OperationAborted", "RequestTimeout", "SlowDown", "InternalError"}
_DENIED_CODES = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
_FULL_CODES = {"QuotaExceeded", "XMinioStorageFull"}
_CONNECTION_WORDS = {
    "Timeout": "the request timed out",
    "Interrupted": "the connection was interrupted",
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
    """A classified `obstore` error."""

    meaning: Meaning
    """Error class. `away`: the request did not reach a server; `transient`: the request's outcome is unknown."""
    reason: str
    """Reason in plain English, for error messages."""

    @property
    def may_pass(self) -> bool:
        """Whether a retry of the same request may succeed."""
        return self.meaning in ("away", "transient")

    def as_os_error(self, name: str, tried_s: float) -> OSError:
        """Return the refusal as an `OSError` with the matching error number, after ``tried_s`` seconds of retries."""
        said = f"failed for {tried_s:.1f} s" if self.may_pass else "refused"
        # OSError(...) creates a FileNotFoundError or PermissionError according to the error number.
        return OSError(_NUMBERS.get(self.meaning, errno.EIO), f"the store {said}: {self.reason}", name)


def explain(error: Exception) -> Refusal:
    """Classify an `obstore` error."""
    text = str(error)
    in_status, in_code = _STATUS.search(text), _CODE.search(text)
    status = f"{in_status[1]} {in_status[2]}".strip() if in_status else ""
    code = (in_code[1] or in_code[2]) if in_code else ""
    reason = " ".join(part for part in (status, code) if part) or "no reason given"
    if any(address in text for address in _NO_CREDENTIALS):
        reason = "no credentials in the environment, and this machine has no role; commands that take a RUN read its "
        return Refusal(meaning="denied", reason=f"{reason}cluster.secrets_file only with --trust-run")
    number = int(status[:3]) if status else None
    if isinstance(error, ConnectionError):
        return Refusal(meaning="transient", reason=text)
    if code in _TRANSIENT_CODES or number in _TRANSIENT_STATUS:
        return Refusal(meaning="transient", reason=reason)
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return Refusal(meaning="absent", reason="the bucket does not exist")
    if isinstance(error, AlreadyExistsError):
        return Refusal(meaning="taken", reason=reason)
    if isinstance(error, PreconditionError | NotModifiedError):
        return Refusal(meaning="changed", reason=reason)
    if isinstance(error, FileNotFoundError):
        return Refusal(meaning="absent", reason="the file does not exist")
    is_denied = isinstance(error, PermissionError | PermissionDeniedError | UnauthenticatedError)
    if is_denied or code in _DENIED_CODES or number in (401, 403):
        return Refusal(meaning="denied", reason=f"the credentials were rejected with {reason}")
    if number == 507 or code in _FULL_CODES:
        return Refusal(meaning="full", reason="no space left")
    connection = _CONNECTION.search(text)
    if number is None and connection is not None and connection[1] == "Connect":
        return Refusal(meaning="away", reason="the server is unreachable")
    if number is None and connection is not None:
        return Refusal(meaning="transient", reason=_CONNECTION_WORDS.get(connection[1], "the response was incomplete"))
    if number is None:
        reason = re.sub(r"\s*\bhttps?://\S+", "", text.partition("\n")[0])
    return Refusal(meaning="refused", reason=reason)
