"""Parses cloud providers' notices that a machine will be preempted, terminated or rebooted.

Sources:
    * AWS: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html and
      https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html
    * Google Cloud: https://cloud.google.com/compute/docs/instances/create-use-preemptible#detecting_if_a_vm_was_preempted
      and https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
    * Azure: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal

Provider = Literal["aws", "gcp", "azure"]

PROVIDER_NAMES: dict[Provider, str] = {"aws": "AWS", "gcp": "Google Cloud", "azure": "Azure"}
_GCP_NOTICE_S = 30.0
"""Seconds from the preemption signal to a VM's end. Google Cloud does not report when the signal was sent."""
_AZURE_CHASSIS = "7783-7084-3265-9085-8269-3286-77"
_AZURE_ENDS = {"Preempt": "preemption", "Terminate": "termination", "Redeploy": "redeployment", "Reboot": "reboot"}
"""Azure events that end a node's processes. `Freeze` only pauses a VM for a few seconds."""
_NOT_FOUND, _OK = 404, 200
_MOST_SHOWN = 80
_LONGEST_PAUSE_S = 60.0
_PAUSE_S = 2.0


class UnexpectedAnswerError(ValueError):
    """A metadata service's response does not have its provider's format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Response of a metadata service."""

    status: int
    body: str
    server_time: float | None
    """Time on the service's clock, in seconds since the epoch, or None if unknown."""
    received_at: float
    """Time on this node's clock when the response arrived, in seconds since the epoch."""

    def on_this_clock(self, server_time: float) -> float:
        """Convert a time on the service's clock to this node's clock; the two may differ by minutes."""
        return server_time if self.server_time is None else self.received_at + server_time - self.server_time


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudNotice:
    """A cloud's announcement that it will stop this node."""

    what: str
    deadline: float | None
    """Time at which the node will stop, in seconds since the epoch on this node's clock, or None if unknown."""
    is_hint: bool = False
    """Whether the notice is only a recommendation, so that the node may stay."""


def provider_of(firmware: Mapping[str, str]) -> Provider | None:
    """Return a machine's cloud provider, detected from its firmware, or None if it belongs to no known cloud.

    The firmware consists of the readable files of Linux's ``/sys/class/dmi/id``, which cloud-init also checks, by name.
    """
    if firmware.get("product_name") == "Google Compute Engine":
        return "gcp"
    if firmware.get("chassis_asset_tag") == _AZURE_CHASSIS:
        return "azure"
    # Nitro instances have the vendor "Amazon EC2", and Xen instances a BIOS version such as 4.11.amazon.
    makers = (firmware.get("sys_vendor", ""), firmware.get("bios_version", ""))
    return "aws" if makers[0] == "Amazon EC2" or makers[1].endswith(".amazon") else None


def aws_interruption(answer: Answer) -> CloudNotice | None:
    """Parse a response of ``spot/instance-action``, available two minutes before an interruption; 404 means none."""
    if answer.status == _NOT_FOUND:
        return None
    told = _object(answer)
    if not isinstance(told.get("action"), str):
        raise _unexpected(answer)
    when = _iso_time(told.get("time"))
    return CloudNotice(
        what=f"spot interruption: {_short(told['action'])}",
        deadline=None if when is None else answer.on_this_clock(when),
    )


def aws_rebalance(answer: Answer) -> CloudNotice | None:
    """Parse a response of ``events/recommendations/rebalance``; 404 means no recommendation."""
    if answer.status == _NOT_FOUND:
        return None
    if "noticeTime" not in _object(answer):
        raise _unexpected(answer)
    return CloudNotice(what="rebalance recommendation", deadline=None, is_hint=True)


def gcp_preempted(answer: Answer) -> CloudNotice | None:
    """Parse a response of ``instance/preempted``."""
    match answer.status, answer.body.strip():
        case 200, "FALSE":
            return None
        case 200, "TRUE":
            return CloudNotice(what="preemption", deadline=answer.received_at + _GCP_NOTICE_S)
    raise _unexpected(answer)


def gcp_maintenance(answer: Answer) -> CloudNotice | None:
    """Parse a response of ``instance/maintenance-event``, available a minute ahead, or an hour ahead with GPUs.

    A VM that migrates to another host keeps running.
    """
    match answer.status, answer.body.strip():
        case 200, "NONE" | "MIGRATE_ON_HOST_MAINTENANCE":
            return None
        case 200, "TERMINATE_ON_HOST_MAINTENANCE":
            return CloudNotice(what="host maintenance", deadline=None)
    raise _unexpected(answer)


def azure_events(answer: Answer, machine: str) -> CloudNotice | None:
    """Return the earliest notice for a machine, by name, in a response of ``scheduledevents``.

    The response lists the events of all machines in an availability set or scale set.
    """
    events = _object(answer).get("Events")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise _unexpected(answer)
    own = (_azure_event(event, answer) for event in events if _is_of(event, machine))
    return min(own, key=lambda notice: math.inf if notice.deadline is None else notice.deadline, default=None)


def replaces(new: CloudNotice, old: CloudNotice | None) -> bool:
    """Return whether a notice adds information to the previous notice."""
    if old is None or old.is_hint > new.is_hint:
        return True
    if old.is_hint < new.is_hint or new.deadline is None:
        return False
    # Deadlines computed from the time of an answer move with each answer; only an earlier deadline is new.
    return old.deadline is None or new.deadline < old.deadline - 1.0


def pause_s(failures: int) -> float:
    """Return the seconds to wait before the next request, given the number of consecutive failures."""
    return min(_PAUSE_S * 2.0 ** min(failures, 10), _LONGEST_PAUSE_S)


def reach_hint(provider: Provider) -> str:
    """Return the suggested fix for a provider's metadata service that does not respond."""
    if provider == "aws":
        return "in a container, the instance's metadata option HttpPutResponseHopLimit must be at least 2"
    return "let containers reach 169.254.169.254, or set elastic.cloud_notices: none"


def http_time(text: str | None) -> float | None:
    """Return a time in HTTP or Azure format as seconds since the epoch, or None if it is invalid."""
    try:
        when = parsedate_to_datetime(text or "")
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def _azure_event(event: Mapping[str, Any], answer: Answer) -> CloudNotice:
    when = http_time(event["NotBefore"]) if isinstance(event.get("NotBefore"), str) else None
    if event.get("EventStatus") == "Started":
        deadline: float | None = answer.received_at
    else:
        deadline = None if when is None else answer.on_this_clock(when)
    return CloudNotice(what=_AZURE_ENDS[event["EventType"]], deadline=deadline)


def _is_of(event: Mapping[str, Any], machine: str) -> bool:
    kind, resources, status = event.get("EventType"), event.get("Resources"), event.get("EventStatus")
    is_end = isinstance(kind, str) and kind in _AZURE_ENDS and status in ("Scheduled", "Started")
    return is_end and isinstance(resources, list) and machine in resources


def _object(answer: Answer) -> dict[str, Any]:
    try:
        told = json.loads(answer.body) if answer.status == _OK else None
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise _unexpected(answer)
    return told


def _iso_time(text: object) -> float | None:
    try:
        when = datetime.fromisoformat(str(text))
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def _unexpected(answer: Answer) -> UnexpectedAnswerError:
    return UnexpectedAnswerError(f"HTTP {answer.status}: {_short(answer.body)!r}")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_SHOWN else line[: _MOST_SHOWN - 3] + "..."
