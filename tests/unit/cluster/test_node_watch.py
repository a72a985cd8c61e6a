"""The providers' metadata services, and what the watch of a node does with notices and failures; no Ray is started."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RpcError

from ray_ulysses.cluster import node_watch
from ray_ulysses.cluster.node_watch import (
    PATIENCE_S,
    MetadataService,
    NodeWatchActor,
    NodeWatches,
    found_provider,
    node_news,
    watch_nodes,
)
from ray_ulysses.commands.doctor import check_cloud
from ray_ulysses.config.running import ElasticSection
from ray_ulysses.elastic.notices import CloudNotice, Provider, UnexpectedAnswerError
from tests.breadth import fast_only
from tests.unit.cluster.metadata_fakes import FakeMetadata, fake_metadata
from tests.unit.peer_memory.test_agent import SetClock

NOON = 43_200.0
HINT = CloudNotice(what="rebalance recommendation", deadline=None, is_hint=True)
NOTICE = CloudNotice(what="spot interruption: terminate", deadline=NOON)


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


PROVIDERS: tuple[Provider, ...] = ("aws", "gcp", "azure")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMetadata]:
    # The service is a thread of this process, which may be slow.
    monkeypatch.setattr(node_watch, "_TIMEOUT_S", 60.0)
    with fake_metadata() as service:
        service.gcp()
        service.azure()
        yield service


@pytest.mark.parametrize("ahead_s", [0.0, 600.0, -600.0])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_deadline_is_of_this_machines_clock_and_no_proxy_is_asked(
    fake: FakeMetadata, monkeypatch: pytest.MonkeyPatch, provider: Provider, ahead_s: float
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    service = MetadataService(provider, url=f"{fake.url}/", hints=True)
    assert service.notice() is None, "a machine that stays has none"
    fake.clock_ahead_s, before = ahead_s, time.time()
    fake.aws_interrupts(in_s=30.0)
    fake.gcp(preempted="TRUE")
    fake.azure(fake.azure_event("Freeze"), fake.azure_event("Preempt", in_s=30.0))
    notice = service.notice()
    assert notice is not None and notice.deadline is not None and not notice.is_hint
    assert before + 28.0 <= notice.deadline <= time.time() + 32.0


def test_a_recommendation_is_asked_for_only_where_it_matters_and_a_notice_comes_first(fake: FakeMetadata) -> None:
    fake.aws_recommends()
    assert MetadataService("aws", url=fake.url).notice() is None
    assert not any("recommendations" in path for _, path in fake.asked)
    service = MetadataService("aws", url=fake.url, hints=True)
    hint = service.notice()
    assert hint is not None and hint.is_hint
    fake.aws_interrupts(in_s=120.0)
    notice = service.notice()
    assert notice is not None and not notice.is_hint


def test_a_token_is_asked_for_once_and_again_when_it_has_expired(fake: FakeMetadata) -> None:
    service = MetadataService("aws", url=fake.url)
    service.notice()
    service.notice()
    assert fake.tokens_given == 1
    fake.token = "token-2"
    assert service.notice() is None
    assert fake.tokens_given == 2
    fake.answers["/latest/api/token"] = (200, "one that is not accepted")
    fake.token = "token-3"
    with pytest.raises(UnexpectedAnswerError, match="request for a token returned HTTP 200"):
        service.notice()
    fake.answers["/latest/api/token"] = (200, "stale")
    with pytest.raises(UnexpectedAnswerError, match="HTTP 401 even with a new token"):
        service.notice()
    del fake.answers["/latest/api/token"]
    assert service.notice() is None


@pytest.mark.parametrize("provider", fast_only(PROVIDERS, "aws"))
def test_a_service_that_is_slow_or_away_does_not_hold_the_watch(
    fake: FakeMetadata, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_watch, "_TIMEOUT_S", 2.0)
    fake.drips = True
    drip = "x" * 1000
    fake.answers = dict.fromkeys(("/latest/api/token", *fake.answers), (200, drip))
    start = time.monotonic()
    with pytest.raises(OSError):
        MetadataService(provider, url=fake.url).notice()
    assert time.monotonic() - start < 30.0  # the whole answer would take 100 s
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(OSError):
        MetadataService(provider, url=f"http://127.0.0.1:{silent.getsockname()[1]}").notice()
    with pytest.raises(OSError):  # nobody listens there any more
        MetadataService(provider, url=f"http://127.0.0.1:{silent.getsockname()[1]}").notice()


def test_the_provider_is_found_without_a_request(tmp_path: Path) -> None:
    assert found_provider("auto", tmp_path) is None
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    (tmp_path / "sys_vendor").write_bytes(b"\xff\xfe")
    (tmp_path / "bios_version").mkdir()
    assert found_provider("auto", tmp_path) == "gcp"
    assert found_provider("none", tmp_path) is None
    assert found_provider("azure", tmp_path) == "azure"


def test_the_doctor_says_what_it_found(fake: FakeMetadata) -> None:
    assert check_cloud("http://127.0.0.1:9", "none").level == "ok"
    good = check_cloud(fake.url, "aws")
    assert (good.level, good.detail) == ("ok", "AWS, with preemption notices")
    fake.aws_interrupts(60.0)
    assert "spot interruption: terminate" in check_cloud(fake.url, "aws").detail
    fake.answers["/latest/api/token"] = (403, "")
    bad = check_cloud(fake.url, "aws")
    assert bad.level == "warn" and "HTTP 403" in bad.detail and "HttpPutResponseHopLimit" in bad.hint
