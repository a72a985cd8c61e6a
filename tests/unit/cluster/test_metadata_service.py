"""Each provider's metadata service, asked over HTTP: a local one that is slow, broken or wrong is no notice."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_ulysses.cluster.node_watch import MetadataService, found_provider
from ray_ulysses.commands.doctor import check_cloud
from ray_ulysses.elastic.notices import Provider, UnexpectedAnswerError
from tests.breadth import fast_only
from tests.unit.cluster.metadata_fakes import FakeMetadata, fake_metadata

PROVIDERS: tuple[Provider, ...] = ("aws", "gcp", "azure")


@pytest.fixture
def fake() -> Iterator[FakeMetadata]:
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
    fake.clock_ahead_s = ahead_s
    fake.aws_interrupts(in_s=30.0)
    fake.gcp(preempted="TRUE")
    fake.azure(fake.azure_event("Freeze"), fake.azure_event("Preempt", in_s=30.0))
    notice = service.notice()
    assert notice is not None and notice.deadline is not None and not notice.is_hint
    assert notice.deadline - time.time() == pytest.approx(30.0, abs=5.0)


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
    with pytest.raises(UnexpectedAnswerError, match="HTTP 401 in spite of a new token"):
        service.notice()
    del fake.answers["/latest/api/token"]
    assert service.notice() is None


@pytest.mark.parametrize("provider", fast_only(PROVIDERS, "aws"))
def test_a_service_that_is_slow_or_away_does_not_hold_the_watch(fake: FakeMetadata, provider: Provider) -> None:
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
