from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.peer_memory import AgentAddresses, partners

ZONES = st.dictionaries(st.integers(0, 99).map(lambda n: f"n{n:02d}"), st.sampled_from([None, "x", "y", "z"]))


@given(zones=ZONES)
def test_every_node_keeps_one_other_nodes_copy_in_another_zone_where_possible(zones: dict[str, str | None]) -> None:
    found = partners(zones)
    if len(zones) < 2:
        assert found == dict.fromkeys(zones)
        return
    assert sorted(map(str, found.values())) == sorted(zones) == sorted(found)
    assert all(node != partner for node, partner in found.items())
    sizes = [list(zones.values()).count(zone) for zone in set(zones.values())]
    apart = sum(partner is not None and zones[node] != zones[partner] for node, partner in found.items())
    assert apart == min(len(zones), 2 * (len(zones) - max(sizes)))


def test_the_same_nodes_give_the_same_pairs_in_any_order() -> None:
    zones = {"n1": "east", "n2": "east", "n3": "west", "n4": "west"}
    pairs = {"n1": "n3", "n2": "n4", "n3": "n1", "n4": "n2"}
    assert partners(zones) == partners(dict(reversed(zones.items()))) == pairs
    assert partners({"n1": None, "n2": None, "n3": None}) == {"n1": "n2", "n2": "n3", "n3": "n1"}


def test_a_worker_goes_to_its_own_node_first_then_to_the_partner() -> None:
    agents = {"c": "h:3", "a": "h:1", "b": "h:2"}
    for node, partner, order in (("b", "c", "bca"), ("b", None, "bac"), ("gone", "c", "cab")):
        addresses = AgentAddresses(agents=agents, node=node, partner=partner, token="secret")
        assert addresses.order() == tuple(order) and "secret" not in repr(addresses)
