"""Asks the metadata service of a cloud provider, on the machine itself, for notices of its end."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Literal

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.elastic.notices import (
    Answer,
    CloudNotice,
    Provider,
    UnexpectedAnswerError,
    aws_interruption,
    aws_rebalance,
    azure_events,
    gcp_maintenance,
    gcp_preempted,
    http_time,
    provider_of,
)

CloudSetting = Literal["auto", "none", "aws", "gcp", "azure"]

_URL = "http://169.254.169.254"
"""The address of all three: it is local to each machine, as are its answers."""
_FIRMWARE = Path("/sys/class/dmi/id")
_FIRMWARE_FILES = ("product_name", "chassis_asset_tag", "sys_vendor", "bios_version")
_TIMEOUT_S = 2.0
_MOST_BYTES = 1 << 18
_PIECE = 1 << 14
_TOKEN_TTL_S = 21_600
_UNAUTHORIZED = 401
_OK = 200


def found_provider(setting: CloudSetting, firmware: Path = _FIRMWARE) -> Provider | None:
    """Return the provider whose notices are to be watched on this machine; nothing is sent over the network.

    Args:
        setting: ``elastic.cloud_notices``.
        firmware: Directory with what the machine's firmware says of it.
    """
    if setting in ("aws", "gcp", "azure"):
        return setting
    return None if setting == "none" else provider_of(dict(_read_firmware(firmware)))


def metadata_service(
    provider: Provider, *, url: str | None = None, hints: bool = False, clock: Clock | None = None
) -> _Aws | _Gcp | _Azure:
    """Return the metadata service of a provider.

    Asked for the notice that stands now, it raises `OSError` where the service does not answer, or not in time, and
    `UnexpectedAnswerError` where it gives an answer that is not of its provider.

    Args:
        provider: The provider.
        url: Its address; None for the provider's own.
        hints: Whether recommendations are of interest beside notices.
        clock: Time.
    """
    kinds: dict[Provider, type[_Aws | _Gcp | _Azure]] = {"aws": _Aws, "gcp": _Gcp, "azure": _Azure}
    return kinds[provider]((url or _URL).rstrip("/"), hints, clock or SystemClock())


class _Service:
    def __init__(self, base: str, hints: bool, clock: Clock) -> None:
        self._base, self._hints, self._clock = base, hints, clock
        # These services are on the machine itself, where no proxy leads.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def _ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> Answer:
        url = self._base + path
        request = urllib.request.Request(url, headers=dict(headers), method=method)
        end = self._clock.monotonic() + _TIMEOUT_S
        try:
            response = self._opener.open(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            response = error
        except (HTTPException, ValueError) as error:
            raise OSError(f"{url} gives no HTTP answer ({type(error).__name__})") from error
        with contextlib.closing(response):
            status, date = int(response.status or 0), response.headers.get("Date")
            body = b""
            try:
                # A service that sends a byte a second would never run into the timeout of one read.
                while len(body) < _MOST_BYTES and (piece := response.read1(_PIECE)):
                    body += piece
                    if self._clock.monotonic() > end:
                        raise TimeoutError(f"{url} does not answer within {_TIMEOUT_S:g} s")
            except HTTPException as error:
                raise OSError(f"{url} broke off its answer ({type(error).__name__})") from error
        return Answer(
            status=status,
            body=body.decode(errors="replace"),
            server_time=http_time(date),
            received_at=self._clock.now(),
        )


class _Aws(_Service):
    """The instance metadata service of EC2, in its second version."""

    _token: str | None = None

    def notice(self) -> CloudNotice | None:
        """Return the notice that stands now."""
        data = "/latest/meta-data"
        found = aws_interruption(self._get(f"{data}/spot/instance-action"))
        if found is not None or not self._hints:
            return found
        return aws_rebalance(self._get(f"{data}/events/recommendations/rebalance"))

    def _get(self, path: str) -> Answer:
        for _ in range(2):
            token = self._token = self._token or self._new_token()
            answer = self._ask(path, {"X-aws-ec2-metadata-token": token})
            if answer.status != _UNAUTHORIZED:
                return answer
            # The token has expired.
            self._token = None
        raise UnexpectedAnswerError("HTTP 401 with a new token")

    def _new_token(self) -> str:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
        answer = self._ask("/latest/api/token", lifetime, method="PUT")
        token = answer.body.strip()
        if answer.status != _OK or not token.isascii() or not token.isprintable() or " " in token or not token:
            raise UnexpectedAnswerError(f"HTTP {answer.status} to the request for a token")
        return token


class _Gcp(_Service):
    """The metadata server of Compute Engine."""

    def notice(self) -> CloudNotice | None:
        """Return the notice that stands now."""
        path, header = "/computeMetadata/v1/instance", {"Metadata-Flavor": "Google"}
        found = gcp_preempted(self._ask(f"{path}/preempted", header))
        return found or gcp_maintenance(self._ask(f"{path}/maintenance-event", header))


class _Azure(_Service):
    """The instance metadata service of Azure. Its first answer about events may take two minutes."""

    _name: str | None = None

    def notice(self) -> CloudNotice | None:
        """Return the notice that stands now."""
        header = {"Metadata": "true"}
        if self._name is None:
            answer = self._ask("/metadata/instance/compute/name?api-version=2021-02-01&format=text", header)
            if answer.status != _OK or not answer.body.strip():
                raise UnexpectedAnswerError(f"HTTP {answer.status} to the request for the machine's name")
            self._name = answer.body.strip()
        return azure_events(self._ask("/metadata/scheduledevents?api-version=2020-07-01", header), self._name)


def _read_firmware(folder: Path) -> Iterator[tuple[str, str]]:
    for name in _FIRMWARE_FILES:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            yield name, (folder / name).read_text().strip()
