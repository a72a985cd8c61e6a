"""Watches the nodes of a run for notices of their cloud, and tells Ray to drain a node that is going to be taken away.

Each node asks the metadata service of its cloud. What follows a notice is the same as for any drained node: the run
saves, and an elastic one continues without the node.
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
from ray_ulysses.cluster.session import nodes_of_workers
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
"""A metadata service that gives no answer for this long is reported; Azure's first one may take two minutes."""
_LOOK_EVERY_S = 2.0
_log = get_logger(__name__)


def drain_node(node: str, why: str, deadline: float | None) -> None:
    """Tell Ray that a node is going to be taken away; Ray itself ends nothing on it.

    Ray 2.60 has no public way to do so but for a hidden command; this is what that calls (a canary test covers it).

    Raises:
        RuntimeError: Ray refuses, or its head does not answer.
    """
    # A deadline of 0 is none.
    until_ms = 0 if deadline is None else max(1, round(deadline * 1000))
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    address = ray.get_runtime_context().gcs_address
    accepted, text = GcsClient(address=address).drain_node(node, reason, why, until_ms)
    if not accepted:
        raise RuntimeError(f"Ray refuses to drain node {node}: {text}")


class NodeWatch:
    """Watches the node that it is on.

    Args:
        provider: The node's cloud.
        look: Returns the notice that stands now, as the node's metadata service gives it; None if there is none.
        drain: Tells Ray; called with the reason and the deadline.
        clock: Time.
    """

    def __init__(
        self,
        provider: Provider,
        look: Callable[[], CloudNotice | None],
        drain: Callable[[str, float | None], None],
        clock: Clock,
    ) -> None:
        self._cloud, self._hint = PROVIDER_NAMES[provider], reach_hint(provider)
        self._look, self._drain, self._clock = look, drain, clock
        self._drained_for: CloudNotice | None = None
        self._untold: CloudNotice | None = None
        self._failures, self._failing_since = 0, clock.monotonic()
        self._is_reported = False

    def next_news(self) -> str:
        """Watch until there is something that a person should know, and return it."""
        while True:
            news = None
            try:
                notice = self._look()
            except (OSError, UnexpectedAnswerError) as error:
                news = self._failed(error)
            else:
                if notice is not None and replaces(notice, self._drained_for):
                    news = self._pass_on(notice)
                else:
                    self._succeeded()
            if news is not None:
                return news
            self._clock.sleep(pause_s(self._failures))

    def _pass_on(self, notice: CloudNotice) -> str | None:
        try:
            self._drain(f"{self._cloud}: {notice.what}", notice.deadline)
        except (OSError, RuntimeError, RayError) as error:
            self._failures += 1
            is_new, self._untold = replaces(notice, self._untold), notice
            return f"{self._told(notice)}; Ray can't be told yet: {error}" if is_new else None
        self._drained_for, self._untold = notice, None
        self._succeeded()
        return f"{self._told(notice)}; Ray drains it"

    def _failed(self, error: Exception) -> str | None:
        self._failures += 1
        if self._is_reported or self._clock.monotonic() - self._failing_since < PATIENCE_S:
            return None
        self._is_reported = True
        return f"is not watched for its end, since {self._cloud} gives no notices there ({error}); {self._hint}"

    def _succeeded(self) -> None:
        self._failures, self._failing_since = 0, self._clock.monotonic()
        self._is_reported = False

    def _told(self, notice: CloudNotice) -> str:
        if notice.deadline is None:
            when = "may be taken away soon" if notice.is_hint else "is going to be taken away"
        else:
            when = f"is going to be taken away at {time.strftime('%H:%M:%S', time.gmtime(notice.deadline))} UTC"
        return f"{when} ({self._cloud}: {notice.what})"


class NodeWatchActor:
    """Holds the watch of one node, in a process of its own there."""

    def __init__(self, setting: CloudSetting, url: str | None, hints: bool) -> None:
        provider, clock = found_provider(setting), SystemClock()
        self._watch = None
        if provider is not None:
            service = metadata_service(provider, url=url, hints=hints, clock=clock)
            drain = partial(drain_node, ray.get_runtime_context().get_node_id())
            self._watch = NodeWatch(provider, service.notice, drain, clock)

    def next_news(self) -> str | None:
        """Return the next news of this node; None at once if it is no cloud's."""
        return None if self._watch is None else self._watch.next_news()


class NodeWatches:
    """The watches of the nodes of a run, held by its command: they end with it.

    Args:
        start: Starts the watch of a node, given its id, and returns an actor with the method of `NodeWatchActor`.
        nodes: Returns the addresses of the nodes on which the run has workers, by id; None if they are not known now.
        say: Prints a line.
        clock: Time.
    """

    def __init__(
        self,
        start: Callable[[str], Any],
        nodes: Callable[[], Mapping[str, str] | None],
        say: Callable[[str], object],
        clock: Clock,
    ) -> None:
        self._start, self._nodes, self._say, self._clock = start, nodes, say, clock
        self._watches: dict[str, tuple[Any, Any] | None] = {}
        self._addresses: Mapping[str, str] = {}
        self._looked_at = clock.monotonic()

    def look(self) -> None:
        """Print what there is to say, and follow the nodes of the run; called often."""
        now = self._clock.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        nodes = self._nodes()
        if nodes is not None:
            self._addresses = nodes
            # An actor without a handle ends.
            self._watches = {node: self._watches[node] for node in nodes if node in self._watches}
            for node in nodes.keys() - self._watches.keys():
                actor = self._start(node)
                self._watches[node] = (actor, actor.next_news.remote())
        asked = {watch[1]: node for node, watch in self._watches.items() if watch is not None}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0) if asked else ([], [])
        for answer in answered:
            self._hear(asked[answer], answer)

    def _hear(self, node: str, answer: Any) -> None:
        try:
            news = ray.get(answer)
        except RayActorError as error:
            # Its node is gone, or drained already.
            _log.debug("the watch of node %s has ended: %s", node, error)
            news = None
        except RayError as error:
            _log.warning("node %s can't be watched for notices of its cloud (%s)", self._addresses[node], error)
            news = None
        watch = self._watches[node]
        if news is None or watch is None:
            self._watches[node] = None
            return
        self._say(f"node {self._addresses[node]} {news}")
        self._watches[node] = (watch[0], watch[0].next_news.remote())


def watch_nodes(elastic: ElasticSection, say: Callable[[str], object], *, embedded: bool) -> NodeWatches:
    """Return the watches of a run's nodes, to be looked at often."""
    setting = elastic.cloud_notices
    is_needless = found_provider(setting) is None if embedded else setting == "none"

    def start(node: str) -> Any:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        actor: Any = ray.remote(NodeWatchActor)
        on_node = actor.options(num_cpus=0, max_restarts=0, scheduling_strategy=there)
        return on_node.remote(setting, elastic.cloud_metadata_url, elastic.drain_on_rebalance)

    return NodeWatches(start, dict if is_needless else nodes_of_workers, say, SystemClock())


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
    """Return the provider whose notices are to be watched on this machine; nothing is sent over the network."""
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
