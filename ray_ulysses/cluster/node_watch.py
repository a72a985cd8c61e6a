"""Watches a run's nodes for preemption notices from their cloud, and makes Ray drain the affected nodes.

Each node polls its cloud's metadata service. After a notice the run saves, as for any draining node, and an elastic run
continues without the node.
"""

from __future__ import annotations

import contextlib
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.elastic.notices import (
    PROVIDER_NAMES,
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
    pause_s,
    provider_of,
    reach_hint,
    replaces,
)
from ray_ulysses.logging import get_logger

if TYPE_CHECKING:
    from ray_ulysses.config.running import ElasticSection

PATIENCE_S = 180.0
"""Seconds before a metadata service that does not respond is reported. Azure's first answer may take two minutes."""
_log = get_logger(__name__)


def drain_node(node: str, why: str, deadline: float | None) -> None:
    """Make Ray mark a node as draining. Ray does not end processes on the node.

    Ray 2.60 offers this only as a hidden CLI command; this function calls the command's code (a canary test covers it).

    Raises:
        RuntimeError: Ray rejects the request, or its head does not respond.
    """
    # Ray interprets 0 as no deadline.
    until_ms = 0 if deadline is None else max(1, round(deadline * 1000))
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    address = ray.get_runtime_context().gcs_address
    accepted, text = GcsClient(address=address).drain_node(node, reason, why, until_ms)
    if not accepted:
        raise RuntimeError(f"Ray refused to drain node {node}: {text}")


def node_news(
    provider: Provider,
    look: Callable[[], CloudNotice | None],
    drain: Callable[[str, float | None], None],
    clock: Clock,
) -> Iterator[str]:
    """Watch this process's node, and yield status messages for the user.

    Args:
        provider: Cloud provider of the node.
        look: Returns the metadata service's current notice, or None if there is none.
        drain: Makes Ray drain the node; called with the reason and the deadline.
        clock: Time source.
    """
    cloud, drained_for, untold = PROVIDER_NAMES[provider], None, None
    failures, failing_since, is_reported = 0, clock.monotonic(), False
    while True:
        try:
            notice = look()
        except (OSError, UnexpectedAnswerError) as error:
            failures += 1
            if not is_reported and clock.monotonic() - failing_since >= PATIENCE_S:
                is_reported = True
                hint = reach_hint(provider)
                yield f"is not watched for preemption: {cloud}'s metadata service does not respond ({error}); {hint}"
        else:
            if notice is not None and replaces(notice, drained_for):
                try:
                    drain(f"{cloud}: {notice.what}", notice.deadline)
                except (OSError, RuntimeError, RayError) as error:
                    failures += 1
                    is_new, untold = replaces(notice, untold), notice
                    if is_new:
                        yield f"{_when(notice)} ({cloud}: {notice.what}); Ray can't drain the node yet: {error}"
                    clock.sleep(pause_s(failures))
                    continue
                drained_for, untold = notice, None
                yield f"{_when(notice)} ({cloud}: {notice.what}); Ray drains the node"
            failures, failing_since, is_reported = 0, clock.monotonic(), False
        clock.sleep(pause_s(failures))


def _when(notice: CloudNotice) -> str:
    if notice.deadline is None:
        return "may be taken away soon" if notice.is_hint else "will be taken away"
    return f"will be taken away at {time.strftime('%H:%M:%S', time.gmtime(notice.deadline))} UTC"


class NodeWatchActor:
    """Watches the node on which the actor runs."""

    def __init__(self, setting: CloudSetting, url: str | None, hints: bool) -> None:
        provider, clock = found_provider(setting), SystemClock()
        self._news: Iterator[str] = iter(())
        if provider is not None:
            service = MetadataService(provider, url=url, hints=hints, clock=clock)
            drain = partial(drain_node, ray.get_runtime_context().get_node_id())
            self._news = node_news(provider, service.notice, drain, clock)

    def next_news(self) -> str | None:
        """Wait for the node's next message and return it, or return None at once if the node is not in a cloud."""
        return next(self._news, None)


class NodeWatches:
    """Actors that watch a run's nodes. They exit when the command that owns this object exits.

    Args:
        start: Starts watching a node, given its ID, and returns an actor with `NodeWatchActor`'s methods.
        say: Prints a line.
    """

    def __init__(self, start: Callable[[str], Any], say: Callable[[str], object]) -> None:
        self._start, self._say = start, say
        self._watches: dict[str, tuple[Any, Any] | None] = {}

    def look(self, nodes: Mapping[str, str]) -> None:
        """Print new messages, and start or end watches as the run's nodes change; call this often.

        Args:
            nodes: Addresses of the nodes on which the run has workers, by node ID.
        """
        # Dropping the last handle of an actor makes Ray end the actor.
        self._watches = {node: self._watches[node] for node in nodes if node in self._watches}
        for node in nodes.keys() - self._watches.keys():
            actor = self._start(node)
            self._watches[node] = (actor, actor.next_news.remote())
        asked = {watch[1]: (node, watch[0]) for node, watch in self._watches.items() if watch is not None}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0) if asked else ([], [])
        for answer in answered:
            (node, actor), news = asked[answer], None
            try:
                news = ray.get(answer)
            except RayActorError as error:
                # The node is gone, or has already been drained.
                _log.debug("the watch of node %s has ended: %s", node, error)
            except RayError as error:
                _log.warning("node %s can't be watched for preemption notices (%s)", nodes[node], error)
            if news is not None:
                self._say(f"node {nodes[node]} {news}")
            self._watches[node] = None if news is None else (actor, actor.next_news.remote())


def watch_nodes(elastic: ElasticSection, say: Callable[[str], object], *, embedded: bool) -> NodeWatches | None:
    """Return the watches of a run's nodes, or None if there is nothing to watch."""
    setting = elastic.cloud_notices
    if setting == "none" or (embedded and found_provider(setting) is None):
        return None

    def start(node: str) -> Any:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        actor: Any = ray.remote(NodeWatchActor)
        on_node = actor.options(num_cpus=0, max_restarts=0, scheduling_strategy=there)
        return on_node.remote(setting, elastic.cloud_metadata_url, elastic.drain_on_rebalance)

    return NodeWatches(start, say)


CloudSetting = Literal["auto", "none", "aws", "gcp", "azure"]

_URL = "http://169.254.169.254"
"""Link-local address of the metadata service on all three clouds."""
_FIRMWARE = Path("/sys/class/dmi/id")
_FIRMWARE_FILES = ("product_name", "chassis_asset_tag", "sys_vendor", "bios_version")
_TIMEOUT_S = 2.0
_MOST_BYTES = 1 << 18
_PIECE = 1 << 14
_TOKEN_TTL_S = 21_600
_UNAUTHORIZED = 401
_OK = 200


def found_provider(setting: CloudSetting, firmware: Path = _FIRMWARE) -> Provider | None:
    """Return the provider whose notices to watch on this machine, without any network request."""
    if setting in ("aws", "gcp", "azure"):
        return setting
    return None if setting == "none" else provider_of(dict(_read_firmware(firmware)))


class MetadataService:
    """Client for the provider's metadata service on this machine.

    Args:
        provider: Cloud provider of the machine.
        url: Address of the service, or None for the provider's default.
        hints: Whether to request rebalance recommendations in addition to notices.
        clock: Time source.
    """

    def __init__(
        self, provider: Provider, *, url: str | None = None, hints: bool = False, clock: Clock | None = None
    ) -> None:
        self._provider, self._base, self._hints = provider, (url or _URL).rstrip("/"), hints
        self._clock = clock or SystemClock()
        # The service is local to the machine, so no proxy can reach it.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._token: str | None = None
        self._name = ""

    def notice(self) -> CloudNotice | None:
        """Return the current notice, or None if there is none.

        Raises:
            OSError: The service does not respond in time. Azure's first answer may take two minutes.
            UnexpectedAnswerError: The answer does not follow the provider's protocol.
        """
        if self._provider == "aws":
            found = aws_interruption(self._aws("spot/instance-action"))
            if found is not None or not self._hints:
                return found
            return aws_rebalance(self._aws("events/recommendations/rebalance"))
        if self._provider == "gcp":
            path, flavor = "/computeMetadata/v1/instance", {"Metadata-Flavor": "Google"}
            found = gcp_preempted(self._ask(f"{path}/preempted", flavor))
            return found or gcp_maintenance(self._ask(f"{path}/maintenance-event", flavor))
        header = {"Metadata": "true"}
        if not self._name:
            answer = self._ask("/metadata/instance/compute/name?api-version=2021-02-01&format=text", header)
            self._name = answer.body.strip()
            if answer.status != _OK or not self._name:
                self._name = ""
                raise UnexpectedAnswerError(f"the request for the instance name returned HTTP {answer.status}")
        return azure_events(self._ask("/metadata/scheduledevents?api-version=2020-07-01", header), self._name)

    def _aws(self, path: str) -> Answer:
        """Query EC2's metadata service, version 2 (IMDSv2), which requires a token."""
        for _ in range(2):
            token = self._token = self._token or self._new_token()
            answer = self._ask(f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": token})
            if answer.status != _UNAUTHORIZED:
                return answer
            # The token has expired.
            self._token = None
        raise UnexpectedAnswerError("the request returned HTTP 401 even with a new token")

    def _new_token(self) -> str:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
        answer = self._ask("/latest/api/token", lifetime, method="PUT")
        token = answer.body.strip()
        if answer.status != _OK or not token.isascii() or not token.isprintable() or " " in token or not token:
            raise UnexpectedAnswerError(f"the request for a token returned HTTP {answer.status}")
        return token

    def _ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> Answer:
        url = self._base + path
        request = urllib.request.Request(url, headers=dict(headers), method=method)
        end = self._clock.monotonic() + _TIMEOUT_S
        try:
            response = self._opener.open(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            response = error
        except (HTTPException, ValueError) as error:
            raise OSError(f"{url} did not return a valid HTTP response ({type(error).__name__})") from error
        with contextlib.closing(response):
            status, date = int(response.status or 0), response.headers.get("Date")
            body = b""
            try:
                # A service that sends a byte per second would never hit the timeout of a single read.
                while len(body) < _MOST_BYTES and (piece := response.read1(_PIECE)):
                    body += piece
                    if self._clock.monotonic() > end:
                        raise TimeoutError(f"{url} did not respond within {_TIMEOUT_S:g} s")
            except HTTPException as error:
                raise OSError(f"{url} sent an incomplete HTTP response ({type(error).__name__})") from error
        return Answer(
            status=status,
            body=body.decode(errors="replace"),
            server_time=http_time(date),
            received_at=self._clock.now(),
        )


def _read_firmware(folder: Path) -> Iterator[tuple[str, str]]:
    for name in _FIRMWARE_FILES:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            yield name, (folder / name).read_text().strip()
