"""Connects to an object store: endpoint, region and credentials from the URI and the environment, and patience."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from ray_ulysses.errors import UserError, without_secret
from ray_ulysses.storage.location import RETRY_S, ObjectLocation, Provider, is_clear_text

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, RetryConfig, S3Config

Client = S3Store | GCSStore | AzureStore

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_CONNECT_S, _STALL_S = 5.0, 60.0
_NO_ACCOUNT = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
# No limit of time for a whole request: one ranged GET may fetch gigabytes. A stall ends it.
_REQUEST_S = 24 * 3600.0


def connect(location: ObjectLocation, *, retry_s: float = RETRY_S) -> Client:
    """Return a client for a location; nothing is sent yet.

    What the environment says is read as the clouds' own tools read it: ``AWS_*``, ``GOOGLE_*`` and ``AZURE_*``
    variables, and the machine's role where there are none. The URI's options come before it.

    Args:
        location: Bucket, prefix and options.
        retry_s: How long a request is tried again while the store is away or overloaded, in seconds.

    Raises:
        UserError: What the environment says can't be used.
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
            retry_config=_retry_config(retry_s),
        )
    except (BaseError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"storage {str(location)!r} can't be set up ({reason}); check the environment") from error


def _s3_config(location: ObjectLocation) -> tuple[S3Config, ClientConfig]:
    config: S3Config = {}
    used = location.server or _s3_endpoint_of_environment()
    region = location.option("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    virtual = location.option("force_virtual_addressing") == "true"
    if virtual:
        config["virtual_hosted_style_request"] = True
    if used:
        # With virtual addressing the library expects the bucket's own host as its endpoint. A variable for S3
        # alone comes before the general one, so the choice is made here and given as both.
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
        rule = f"{name}={without_secret(endpoint)} would get credentials in clear text"
        raise ValueError(f"{rule}; give https://, or set AWS_ALLOW_HTTP=true for a network that nobody else reads")
    return endpoint


def _gcs_config(location: ObjectLocation) -> tuple[GCSConfig, ClientConfig]:
    config: GCSConfig = {}
    endpoint = location.server or os.environ.get("STORAGE_EMULATOR_HOST") or ""
    if endpoint:
        endpoint = endpoint if "://" in endpoint else f"http://{endpoint}"
        config["base_url"] = endpoint
    if "STORAGE_EMULATOR_HOST" in os.environ:
        # As in Google's own libraries: an emulator knows no credentials. With `skip_signature` alone obstore 0.12.1
        # still asks the machine's role for a token before a put.
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
        # Plain HTTP only where somebody wrote it out.
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        "read_timeout": timedelta(seconds=_STALL_S),
        "timeout": timedelta(seconds=_REQUEST_S),
    }


def _retry_config(retry_s: float) -> RetryConfig:
    return {
        # The time alone decides.
        "max_retries": 10_000,
        "retry_timeout": timedelta(seconds=retry_s),
        "backoff": {
            "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
            "max_backoff": timedelta(seconds=_LONGEST_PAUSE_S),
            "base": 2,
        },
    }
