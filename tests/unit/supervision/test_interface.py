"""The interface of the training's sockets is the one that leads to the other nodes, whatever this node's name says."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import psutil
import pytest

from ray_ulysses.supervision import child
from ray_ulysses.supervision.child import interface_towards


def _address(text: str) -> SimpleNamespace:
    return SimpleNamespace(family=socket.AF_INET6 if ":" in text else socket.AF_INET, address=text)


def test_this_node_is_reached_through_its_loopback_interface() -> None:
    found = interface_towards("127.0.0.1", 29500)
    assert found is not None and "127.0.0.1" in [one.address for one in psutil.net_if_addrs()[found]]


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ({"docker0": ["172.17.0.1"], "lo": ["127.0.0.1"], "eth0": ["10.0.0.5"]}, "lo"),
        ({"docker0": ["172.17.0.1"], "eth0": ["10.0.0.5"]}, None),
        ({"v6": ["::1"], "first": ["127.0.0.1"], "second": ["127.0.0.1"]}, "first"),
    ],
)
def test_the_interface_is_the_one_with_the_address_of_the_route(
    monkeypatch: pytest.MonkeyPatch, addresses: Mapping[str, Sequence[str]], expected: str | None
) -> None:
    given = {name: [_address(one) for one in texts] for name, texts in addresses.items()}
    monkeypatch.setattr(child.psutil, "net_if_addrs", lambda: given)
    assert interface_towards("127.0.0.1", 29500) == expected


def test_a_name_that_leads_nowhere_leaves_the_choice_to_gloo() -> None:
    assert interface_towards("no such host", 29500) is None
