"""The providers' answers, as their documents show them, and whatever else a service may say."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.elastic import notices
from ray_ulysses.elastic.notices import Answer, CloudNotice, UnexpectedAnswerError, aws_interruption, azure_events

NOW = 1_505_722_800.0  # 2017-09-18T08:20:00Z
READERS = {
    "aws": aws_interruption,
    "aws rebalance": notices.aws_rebalance,
    "gcp": notices.gcp_preempted,
    "gcp maintenance": notices.gcp_maintenance,
    "azure": lambda answer: azure_events(answer, "gpu_3"),
}


def answer(body: object, status: int = 200, ahead_s: float = 0.0) -> Answer:
    text = body if isinstance(body, str) else json.dumps(body)
    return Answer(status=status, body=text, server_time=NOW + ahead_s, received_at=NOW)


def azure(*events: dict[str, Any], ahead_s: float = 0.0) -> CloudNotice | None:
    return azure_events(answer({"DocumentIncarnation": 2, "Events": list(events)}, ahead_s=ahead_s), "gpu_3")


def event(kind: str, minute: int = 22, **fields: Any) -> dict[str, Any]:
    when = f"Mon, 18 Sep 2017 08:{minute}:00 GMT"
    return {"EventType": kind, "EventStatus": "Scheduled", "Resources": ["gpu_3"], "NotBefore": when} | fields


@pytest.mark.parametrize(
    ("firmware", "provider"),
    [
        ({"sys_vendor": "Amazon EC2", "product_name": "p5.48xlarge"}, "aws"),
        ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}, "azure"),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Surface Laptop"}, None),
        ({"sys_vendor": "Google", "product_name": "Eve"}, None),
        ({}, None),
    ],
)
def test_the_firmware_names_the_cloud(firmware: dict[str, str], provider: str | None) -> None:
    assert notices.provider_of(firmware) == provider


@pytest.mark.parametrize("ahead_s", [0.0, 300.0, -300.0])
def test_aws_gives_a_deadline_on_its_own_clock_and_an_action_without_a_time_is_a_notice(ahead_s: float) -> None:
    assert aws_interruption(answer("<html>", 404)) is None is notices.aws_rebalance(answer("<html>", 404))
    when = datetime.fromtimestamp(NOW + ahead_s + 120.0, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for fields, deadline in ({"time": when}, NOW + 120.0), ({}, None), ({"time": None}, None), ({"time": "soon"}, None):
        notice = aws_interruption(answer({"action": "terminate", **fields}, ahead_s=ahead_s))
        assert notice == CloudNotice(what="spot interruption: terminate", deadline=deadline)
    # Without the server's clock the deadline is taken as it is.
    body = '{"action": "stop", "time": "2017-09-18T08:22:00Z"}'
    notice = aws_interruption(Answer(status=200, body=body, server_time=None, received_at=9.0))
    assert notice is not None and notice.deadline == NOW + 120.0
    hint = notices.aws_rebalance(answer({"noticeTime": "2017-09-18T08:22:00Z"}))
    assert hint == CloudNotice(what="rebalance recommendation", deadline=None, is_hint=True)


@pytest.mark.parametrize(
    ("read", "body", "notice"),
    [
        (notices.gcp_preempted, "FALSE\n", None),
        (notices.gcp_preempted, "TRUE", CloudNotice(what="preemption", deadline=NOW + 30.0)),
        (notices.gcp_maintenance, "NONE", None),
        (notices.gcp_maintenance, "MIGRATE_ON_HOST_MAINTENANCE", None),
        (notices.gcp_maintenance, "TERMINATE_ON_HOST_MAINTENANCE", CloudNotice(what="host maintenance", deadline=None)),
    ],
)
def test_google_gives_30_s_and_a_migration_is_not_an_end(read: Any, body: str, notice: CloudNotice | None) -> None:
    assert read(answer(body)) == notice


@pytest.mark.parametrize("ahead_s", [0.0, 60.0])
def test_azure_gives_the_soonest_end_of_this_machine(ahead_s: float) -> None:
    found = azure(
        event("Freeze", 20), event("Preempt", 21, Resources=["gpu_33", "gpu"]), event("Terminate", 25),
        event("Redeploy", 24), event("Preempt", NotBefore=""), event("Preempt", 22, EventStatus="Completed"),
        ahead_s=ahead_s,
    )  # fmt: skip
    assert found == CloudNotice(what="redeployment", deadline=NOW + 240.0 - ahead_s)
    assert azure() is None
    assert azure(event("Preempt", NotBefore="")) == CloudNotice(what="preemption", deadline=None)
    assert azure(event("Terminate", NotBefore="", EventStatus="Started")) == CloudNotice(
        what="termination", deadline=NOW
    )


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    ("status", "body"),
    [(200, ""), (200, "<html>"), (200, "[]"), (200, "[" * 100_000), (200, '{"Events": [1]}'), (503, "{}")],
)
def test_an_answer_of_something_else_is_no_notice(read: Any, status: int, body: str) -> None:
    with pytest.raises(UnexpectedAnswerError, match=f"HTTP {status}"):
        read(answer(body, status))


JSON = st.none() | st.booleans() | st.integers() | st.text() | st.just([]) | st.just(["gpu_3"]) | st.just({})
AZURE_FIELDS = {
    "EventType": JSON | st.just("Preempt"),
    "EventStatus": JSON | st.just("Scheduled"),
    "Resources": JSON,
    "NotBefore": JSON | st.just("Mon, 18 Sep 99999 08:22:00 GMT"),
}
AWS_FIELDS = {"action": JSON, "time": JSON | st.just("9999-12-31T23:59:59-23:59")}


@given(
    fields=st.fixed_dictionaries({}, optional=AZURE_FIELDS),  # type: ignore[arg-type]
    action=st.fixed_dictionaries({}, optional=AWS_FIELDS),
)
def test_no_field_makes_a_reader_fail_in_another_way(fields: dict[str, Any], action: dict[str, Any]) -> None:
    azure(event("Preempt") | fields)
    azure(fields)
    try:
        aws_interruption(answer(action))
    except UnexpectedAnswerError:
        assert not isinstance(action.get("action"), str)


def test_a_notice_that_says_more_than_the_one_before_it_is_passed_on() -> None:
    hint = CloudNotice(what="rebalance", deadline=None, is_hint=True)
    vague, late = CloudNotice(what="maintenance", deadline=None), CloudNotice(what="preemption", deadline=NOW + 60.0)
    early, same = CloudNotice(what="preemption", deadline=NOW), CloudNotice(what="preemption", deadline=NOW + 59.5)
    more = [(hint, None), (vague, None), (late, None), (vague, hint), (late, hint), (late, vague), (early, late)]
    less = [(one, one) for one in (hint, vague, late)] + [(hint, vague), (vague, late), (late, early), (same, late)]
    assert all(notices.replaces(*pair) for pair in more) and not any(notices.replaces(*pair) for pair in less)


def test_times_of_http_are_read_and_the_pauses_after_failures_grow() -> None:
    when = datetime(2017, 9, 18, 8, 20, tzinfo=UTC)
    for text in (format_datetime(when, usegmt=True), "Mon, 18 Sep 2017 08:20:00 -0000"):
        assert notices.http_time(text) == NOW
    assert [notices.http_time(text) for text in (None, "", "yesterday", "Mon, 99 Sep 2017 08:20:00 GMT")] == [None] * 4
    assert [notices.pause_s(failures) for failures in (0, 1, 2, 39)] == [2.0, 4.0, 8.0, 60.0]
