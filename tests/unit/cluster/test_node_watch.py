"""What a watch does with notices and failures, and which nodes are watched; no Ray is started here."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from ray._raylet import InnerGcsClient
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.exceptions import ActorDiedError, RpcError
from ray.runtime_context import RuntimeContext

from ray_ulysses.cluster import node_watch
from ray_ulysses.cluster.node_watch import PATIENCE_S, NodeWatchActor, NodeWatches, node_news, watch_nodes
from ray_ulysses.config.running import ElasticSection
from ray_ulysses.elastic.notices import CloudNotice, UnexpectedAnswerError
from tests.unit.peer_memory.test_agent import SetClock

NOON = 43_200.0
HINT = CloudNotice(what="rebalance recommendation", deadline=None, is_hint=True)
NOTICE = CloudNotice(what="spot interruption: terminate", deadline=NOON)


def test_a_node_is_drained_as_rays_own_command_does() -> None:
    """A canary of Ray 2.60; a slow test of tests/cluster drains one."""
    assert inspect.signature(InnerGcsClient.drain_node).parameters.keys() >= {
        "node_id", "reason", "reason_message", "deadline_timestamp_ms",
    }  # fmt: skip
    assert DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION") > 0
    assert isinstance(RuntimeContext.gcs_address, property)


class EndOfScript(Exception): ...


class Script:
    """A metadata service that gives one answer after another, repeating the last, and a Ray that may refuse."""

    def __init__(self, *said: CloudNotice | Exception | None, refusals: Sequence[Exception] = ()) -> None:
        self.said, self.refusals, self.clock = list(said), list(refusals), SetClock()
        self.drained: list[tuple[str, float | None]] = []
        self.news = node_news("aws", self.notice, self.drain, self.clock)

    def notice(self) -> CloudNotice | None:
        answer = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        if answer is None and len(self.said) == 1:
            raise EndOfScript
        if isinstance(answer, Exception):
            raise answer
        return answer

    def drain(self, why: str, deadline: float | None) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.drained.append((why, deadline))


def test_a_notice_drains_the_node_once_and_an_earlier_deadline_again() -> None:
    later = CloudNotice(what="spot interruption: terminate", deadline=NOON - 60.0)
    script = Script(None, HINT, HINT, NOTICE, NOTICE, later, later, None, None)
    said = [next(script.news) for _ in range(3)]
    assert "12:00:00 UTC (AWS: spot interruption: terminate)" in said[1] and "11:59:00 UTC" in said[2]
    with pytest.raises(EndOfScript):
        next(script.news)
    why = "AWS: spot interruption: terminate"
    assert script.drained == [("AWS: rebalance recommendation", None), (why, NOON), (why, NOON - 60.0)]


@pytest.mark.parametrize("error", [RuntimeError("not now"), RpcError("not now"), OSError("not now")])
def test_a_head_that_can_not_be_told_is_told_again_and_that_is_said_once(error: Exception) -> None:
    script = Script(TimeoutError("slow"), NOTICE, NOTICE, NOTICE, None, None, refusals=[error, error])
    assert next(script.news).endswith("terminate); Ray can't drain the node yet: not now")
    assert next(script.news).endswith("terminate); Ray drains the node")
    assert len(script.drained) == 1


def test_a_service_that_is_not_there_is_reported_once_and_asked_rarely() -> None:
    script = Script(*[UnexpectedAnswerError("HTTP 403: ''")] * 40, None, None, None)
    assert "HTTP 403" in next(script.news)
    assert PATIENCE_S <= script.clock.time < PATIENCE_S + 60.0
    with pytest.raises(EndOfScript):
        next(script.news)
    assert script.clock.time > 30 * 60.0
    # One that answers now and then is not reported.
    script = Script(*[*[TimeoutError()] * 4, None] * 20, NOTICE, NOTICE)
    assert "Ray drains the node" in next(script.news)


class Ray:
    """The actors of nodes, and what they answered: `answers` has the news of a node by their number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[Any, Any] = {}
        self.started: list[str] = []
        self.said: list[str] = []
        monkeypatch.setattr(node_watch.ray, "wait", lambda refs, **_: ([r for r in refs if r in self.answers], []))
        monkeypatch.setattr(node_watch.ray, "get", self.get)
        self.watches = NodeWatches(self.start, self.said.append)

    def start(self, node: str) -> Any:
        self.started.append(node)
        numbers = count(1)
        return SimpleNamespace(next_news=SimpleNamespace(remote=lambda: (node, next(numbers))))

    def get(self, answer: Any) -> Any:
        if isinstance(self.answers[answer], Exception):
            raise self.answers[answer]
        return self.answers[answer]

    def look(self, nodes: str, times: int = 2) -> None:
        for _ in range(times):
            self.watches.look({node: f"host-{node}" for node in nodes})


def test_the_nodes_that_have_workers_are_watched_by_one_actor_each(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(monkeypatch)
    for nodes in ("", "a", "ab"):
        ray.look(nodes)
    assert ray.started == ["a", "b"]
    ray.answers["b", 1] = "will be taken away"
    ray.look("ab")
    assert ray.said == ["node host-b will be taken away"]
    ray.answers |= {("b", 2): "for the second time", ("a", 1): None}
    ray.look("ab")
    assert ray.said[1:] == ["node host-b for the second time"] and ray.started == ["a", "b"]
    ray.look("a")
    ray.look("ab")
    assert ray.started == ["a", "b", "b"]
    said = [*ray.said]
    for node, error in {"c": ActorDiedError(), "d": RpcError("gone")}.items():
        ray.answers[node, 1] = error
        ray.look(node, times=3)
    assert ray.started[3:] == ["c", "d"] and ray.said == said, "a watch that is lost is not started again"


@pytest.mark.parametrize(
    ("setting", "embedded", "watched"),
    [("none", False, False), ("none", True, False), ("auto", True, False), ("auto", False, True), ("aws", True, True)],
)
def test_no_process_is_started_where_nothing_is_to_be_watched(
    monkeypatch: pytest.MonkeyPatch, setting: Any, embedded: bool, watched: bool
) -> None:
    monkeypatch.setattr(node_watch, "found_provider", lambda setting: None if setting in ("auto", "none") else setting)
    watches = watch_nodes(ElasticSection(cloud_notices=setting), print, embedded=embedded)
    assert (watches is not None) == watched
    assert NodeWatchActor("none", None, False).next_news() is None


@pytest.mark.parametrize("url", ["ftp://a", "http://", "169.254.169.254", "http://a/b", "http://u:p@a", "http://a b"])
def test_the_address_of_a_mock_is_a_host(url: str) -> None:
    with pytest.raises(ValueError, match="cloud_metadata_url"):
        ElasticSection(cloud_metadata_url=url)
    ElasticSection(cloud_metadata_url="http://127.0.0.1:1338/")
