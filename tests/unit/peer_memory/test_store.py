from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.checkpoint import newest_committed
from ray_ulysses.checkpoint.fence import start_attempt
from ray_ulysses.checkpoint.manifest import HEAD_BYTES, attempt_of
from ray_ulysses.peer_memory import AgentAddresses, PeerMemoryAgent, PeerMemoryStore, partners
from ray_ulysses.peer_memory.authentication import Gate
from ray_ulysses.peer_memory.client import PARTNER_S, PROGRESS_S, AgentClient
from ray_ulysses.peer_memory.wire import receive_head, send_frame, split_address
from ray_ulysses.run_names import manifest_key, note_key
from ray_ulysses.storage import AlreadyExistsError
from tests.polling import wait_until
from tests.unit.checkpoint.fakes import TENSORS, save
from tests.unit.peer_memory.conftest import FOLDER, NODES, TOKEN
from tests.unit.peer_memory.test_agent import SetClock
from tests.unit.storage.test_contract import (  # noqa: F401
    test_a_file_is_read_back_and_its_size_returned,
    test_a_file_of_several_parts_is_whole_although_its_chunks_are_reused,
    test_a_file_that_is_not_there_is_not_found,
    test_a_list_is_sorted_recursive_and_of_whole_folders,
    test_a_list_of_more_than_a_page_and_its_deletion_are_whole,
    test_a_name_may_hold_what_a_uri_would_not,
    test_a_replacement_that_breaks_off_keeps_the_old_file,
    test_any_range_is_read_exactly,
    test_broken_writes_leave_nothing,
    test_create_never_writes_over,
    test_delete_takes_files_folders_and_what_is_gone,
    test_many_threads_read_ranges_at_once,
)

MIB = 2**20
SHARD = f"{FOLDER}/rank-00000-of-00001.safetensors"
OTHER_SHARD = SHARD.replace("rank-00000", "rank-00001")
MANIFEST = manifest_key(7)
StoreOf = Callable[[str], PeerMemoryStore]
Agents = dict[str, PeerMemoryAgent]


def shard(number: int, version: int = 0) -> str:
    return SHARD.replace(".safetensors", f"-try-{10 * number + version}.safetensors")


@contextlib.contextmanager
def store_over(addresses: dict[str, str], **options: Any) -> Iterator[PeerMemoryStore]:
    """Open the store of node a, whose partner is b."""
    partner = "b" if "b" in addresses else None
    store = PeerMemoryStore(AgentAddresses(agents=addresses, node="a", partner=partner, token=TOKEN), **options)
    yield store
    store.close()


def started(agents: Agents, nodes: Iterable[str] = NODES) -> dict[str, str]:
    return {node: agents[node].start() for node in nodes}


def start_again(agents: Agents, node: str, address: str) -> None:
    agents[node].close()
    agents[node] = PeerMemoryAgent(TOKEN, port=split_address(address)[1])
    assert agents[node].start() == address


def holders(agents: Agents, key: str) -> list[str]:
    return [node for node, agent in agents.items() if key in agent.files.sizes(key)]


def test_a_shard_is_on_two_nodes_and_a_manifest_on_every_node(agents: Agents, store_of: StoreOf) -> None:
    store = store_of("b")
    content = bytes(range(256)) * 4096
    assert store.create(SHARD, [content] * 20 + [b"end"]) == 20 * MIB + 3
    store.create(MANIFEST, [b"manifest"])
    assert holders(agents, SHARD) == ["b", "c"]
    assert holders(agents, MANIFEST) == ["a", "b", "c"]
    for node in NODES:
        assert store_of(node).read_whole(SHARD) == content * 20 + b"end"


MANY = ("a", "b", "c", "d", "e", "f")


@contextlib.contextmanager
def many_nodes() -> Iterator[tuple[Agents, StoreOf]]:
    """Run the agents of six nodes, each the partner of the one before it."""
    with contextlib.ExitStack() as stack:
        agents = {node: stack.enter_context(contextlib.closing(PeerMemoryAgent(TOKEN))) for node in MANY}
        addresses = started(agents, MANY)

        def make(node: str) -> PeerMemoryStore:
            partner = MANY[(MANY.index(node) + 1) % len(MANY)]
            peers = AgentAddresses(agents=addresses, node=node, partner=partner, token=TOKEN)
            return stack.enter_context(contextlib.closing(PeerMemoryStore(peers)))

        yield agents, make


def test_a_manifest_is_only_on_the_first_node_and_where_its_writers_shard_is() -> None:
    with many_nodes() as (agents, store_of):
        store_of("d").create(SHARD, [b"state"])
        store_of("d").create(MANIFEST, [b"manifest"])
        store_of("d").create("attempts/0003.claimed", [b"claim"])
        assert holders(agents, SHARD) == ["d", "e"]
        assert holders(agents, MANIFEST) == ["a", "d", "e"]
        # A claim fences earlier attempts, so it is wherever one of them may look.
        assert holders(agents, "attempts/0003.claimed") == [*MANY]
        store_of("d").create(note_key(7, 3), [b"note"])
        assert holders(agents, note_key(7, 3)) == [*MANY]
        assert store_of("c").read_whole(MANIFEST) == b"manifest"


def test_a_manifest_is_on_every_node_if_one_with_its_writers_shard_does_not_answer() -> None:
    with many_nodes() as (agents, store_of):
        store = store_of("d")
        store.create(SHARD, [b"state"])
        agents["e"].close()
        store.create(MANIFEST, [b"manifest"])
        rest = {node: agent for node, agent in agents.items() if node != "e"}
        assert holders(rest, MANIFEST) == [node for node in MANY if node != "e"]


def without(store: PeerMemoryStore, nodes: str) -> PeerMemoryStore:
    """Exclude the agents of some nodes from a store and return it, as if the network did not reach them."""
    for node in nodes:
        store._leave_out(node, OSError())
    return store


def attempts(agents: Agents, key: str) -> dict[str, int]:
    """Return the attempt that wrote each agent's version of a manifest, by node."""
    found = {}
    for node in holders(agents, key):
        with agents[node].files.reading(key) as file, file.pages.view(0, file.size) as content:
            found[node] = attempt_of(bytes(content[:HEAD_BYTES]))
    return found


def save_step_7(attempt: int, stores: list[PeerMemoryStore]) -> None:
    """Save step 7 from an attempt that started from step 6; the first store is that of rank 0."""
    start_attempt(stores[0], attempt, 6)
    refs = save(stores[0], 7, attempt=attempt, tensors=TENSORS, stores=dict(enumerate(stores)))
    assert [ref.attempt for ref in refs] == [attempt] * len(stores)


def test_a_manifest_that_the_first_node_does_not_have_is_not_created_again() -> None:
    with many_nodes() as (agents, store_of):
        without(store_of("d"), "a").create(MANIFEST, [b"manifest"])
        assert holders(agents, MANIFEST) == ["b", "d", "e"]
        with pytest.raises(AlreadyExistsError, match="already exists"):
            store_of("f").create(MANIFEST, [b"another"])
        assert holders(agents, MANIFEST) == ["b", "d", "e"]


def test_a_repeated_step_replaces_a_dead_attempts_manifest_that_the_first_node_does_not_have() -> None:
    with many_nodes() as (agents, store_of):
        save_step_7(1, [without(store_of("d"), "a"), without(store_of("e"), "a")])
        assert attempts(agents, MANIFEST) == dict.fromkeys("bde", 1)
        save_step_7(2, [store_of("f"), store_of("a")])
        assert attempts(agents, MANIFEST) == dict.fromkeys("af", 2)


def test_a_readmitted_node_with_a_dead_attempts_manifest_does_not_hide_the_state_of_the_next() -> None:
    with many_nodes() as (agents, store_of):
        save_step_7(1, [store_of("a"), store_of("b")])
        save_step_7(2, [without(store_of("d"), "ab"), without(store_of("e"), "ab")])
        assert attempts(agents, MANIFEST) == {**dict.fromkeys("ab", 1), **dict.fromkeys("cde", 2)}
        for node in MANY:
            chosen = newest_committed(store_of(node), "content")
            assert chosen.manifest is not None and chosen.manifest.ref.attempt == 2 and not chosen.damaged
        store = store_of("a")
        with pytest.raises(AlreadyExistsError):
            store.create(MANIFEST, [b"manifest"])
        save_step_7(3, [store, store_of("b")])
        assert attempts(agents, MANIFEST) == dict.fromkeys("ab", 3)


def test_a_late_writer_neither_replaces_nor_deletes_a_newer_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    with many_nodes() as (agents, store_of):
        late, newer = without(store_of("d"), "a"), store_of("e")
        put = AgentClient.put

        def put_late(client: AgentClient, *values: Any, **options: Any) -> int:
            # The newer attempt commits the step after the late one has asked all agents that it reaches.
            monkeypatch.undo()
            newer.create(MANIFEST, [b"newer"])
            return put(client, *values, **options)

        monkeypatch.setattr(AgentClient, "put", put_late)
        with pytest.raises(AlreadyExistsError):
            late.create(MANIFEST, [b"late"])
        assert holders(agents, MANIFEST) == ["a", "e", "f"]
        assert all(store_of(node).read_whole(MANIFEST) == b"newer" for node in MANY)


def test_a_step_without_a_manifest_is_asked_of_all_nodes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with many_nodes() as (_, store_of):
        store_of("a").create(SHARD, [b"state"])
        reader, barrier = store_of("c"), threading.Barrier(len(MANY), timeout=20)
        plain = AgentClient._connection

        def connection(client: AgentClient) -> contextlib.AbstractContextManager[socket.socket]:
            barrier.wait()
            return plain(client)

        monkeypatch.setattr(AgentClient, "_connection", connection)
        with pytest.raises(FileNotFoundError):
            reader.open(MANIFEST)


def test_nothing_is_known_of_files_that_were_deleted(store_of: StoreOf) -> None:
    store = store_of("a")
    for key in (SHARD, OTHER_SHARD, MANIFEST, "checkpoints/step-00000070/manifest.json"):
        store.create(key, [b"content"])
    store.list("checkpoints")
    store.delete(SHARD)
    assert {*store.holders("checkpoints/step-00000007")} == {OTHER_SHARD, MANIFEST}
    store.delete("checkpoints/step-00000007")
    assert {*store.holders("checkpoints")} == {"checkpoints/step-00000070/manifest.json"}


@pytest.mark.parametrize("lost", ["ab", "ad", "ae", "bad", "abcef", "abcdf"])
def test_a_manifest_is_there_as_long_as_its_writers_shard_is(lost: str) -> None:
    with many_nodes() as (agents, store_of):
        store_of("d").create(SHARD, [b"state"])
        store_of("d").create(MANIFEST, [b"manifest"])
        for node in lost:
            agents[node].close()
        reader = store_of("c")
        assert (reader.list("checkpoints"), reader.read_whole(MANIFEST)) == ([SHARD, MANIFEST], b"manifest")


def test_a_reader_that_learned_the_holders_asks_only_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with many_nodes() as (agents, store_of):
        store_of("d").create(SHARD, [b"state"])
        agents["d"].close()
        first, reader = store_of("a"), store_of("b")
        first.list("checkpoints")
        assert first.holders(FOLDER) == {SHARD: ("e",)}
        reader.learn(first.holders(FOLDER))
        opened: list[str] = []
        plain = AgentClient._connect

        def connect(client: AgentClient) -> socket.socket:
            opened.append(client.address)
            return plain(client)

        monkeypatch.setattr(AgentClient, "_connect", connect)
        assert reader.read_whole(SHARD) == b"state"
        assert opened == [reader._clients["e"].address]


@pytest.mark.parametrize("lost", NODES)
def test_any_single_agent_may_be_lost(agents: Agents, store_of: StoreOf, lost: str) -> None:
    shards = {node: f"{FOLDER}/rank-0000{rank}-of-00003.safetensors" for rank, node in enumerate(NODES)}
    for node, shard in shards.items():
        store_of(node).create(shard, [node.encode() * MIB])
    store_of("a").create(MANIFEST, [b"manifest"])
    agents[lost].close()
    for reader in NODES:
        store = store_of(reader)
        assert store.list("checkpoints") == [*shards.values(), MANIFEST]
        assert [store.read_whole(shard) for shard in shards.values()] == [n.encode() * MIB for n in NODES]
        assert lost not in store.nodes


def test_a_lost_pair_is_missing_and_without_agents_every_call_fails(agents: Agents, store_of: StoreOf) -> None:
    store_of("b").create(SHARD, [b"state"])
    agents["b"].close()
    agents["c"].close()
    store = store_of("a")
    with pytest.raises(FileNotFoundError):
        store.open(SHARD)
    assert store.list("checkpoints") == []
    agents["a"].close()
    calls: list[Callable[[], object]] = [
        lambda: store.list("checkpoints"),
        lambda: store.open(SHARD),
        lambda: store.create(SHARD, [b"state"]),
        lambda: store.create(MANIFEST, [b"manifest"]),
        lambda: store.delete("checkpoints"),
    ]
    for call in calls:
        with pytest.raises(OSError, match="none of the 3"):
            call()


def test_after_an_agent_dies_in_a_write_the_next_file_goes_elsewhere(agents: Agents, store_of: StoreOf) -> None:
    store = store_of("a")

    def chunks() -> Iterator[bytes]:
        yield b"1" * MIB
        agents["a"].close()
        yield b"2" * MIB
        yield b"3" * MIB

    with pytest.raises(OSError, match="does not respond"):
        store.create(SHARD, chunks())
    assert store.list("checkpoints") == []
    assert store.create(SHARD, [b"again"]) == 5
    assert holders(agents, SHARD) == ["b", "c"]


def test_a_partner_that_stops_answering_while_it_copies_is_replaced_by_the_next_node(agents: Agents) -> None:
    with breaking_agent(num_answers=1) as broken, store_over({**started(agents, "ac"), "b": broken}) as store:
        store.create(SHARD, [b"state" * MIB] * 2)
        assert holders(agents, SHARD) == ["a", "c"] == list(store.nodes)


def test_a_partner_that_was_started_again_at_its_address_gets_the_next_copy(agents: Agents) -> None:
    addresses = started(agents, "ab")
    with store_over(addresses) as store:
        store.create(SHARD, [b"first"])
        start_again(agents, "b", addresses["b"])
        store.create(OTHER_SHARD, [b"second"])
        assert holders(agents, OTHER_SHARD) == ["a", "b"] == list(store.nodes)
    # If the port is taken, an agent listens elsewhere.
    with contextlib.closing(PeerMemoryAgent(TOKEN, port=split_address(addresses["a"])[1])) as other:
        assert other.start() != addresses["a"]


@pytest.mark.parametrize("num_answers", [0, 1], ids=["from the start", "in the middle"])
def test_frozen_partner_is_left_out(agents: Agents, monkeypatch: pytest.MonkeyPatch, num_answers: int) -> None:
    assert 2 * PARTNER_S <= PROGRESS_S
    monkeypatch.setattr("ray_ulysses.peer_memory.agent.PARTNER_S", 0.2)
    with (
        breaking_agent(num_answers, is_frozen=True) as frozen,
        store_over({**started(agents, "a"), "b": frozen}) as store,
    ):
        assert store.create(SHARD, [b"state" * MIB] * 2) == 10 * MIB
        assert store.nodes == ("a",)
        assert store.read_whole(SHARD) == b"state" * 2 * MIB


def test_an_agent_that_accepts_and_never_answers_is_left_out(agents: Agents) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = {"a": f"127.0.0.1:{silent.getsockname()[1]}", **started(agents, "b")}
        with store_over(addresses) as store:
            store._clients["a"]._progress_s = 1.0
            store.create(SHARD, [b"state"])
            assert store.nodes == ("b",) and store.read_whole(SHARD) == b"state"


@pytest.mark.parametrize(
    ("lost", "later_s", "pause_s"), [(("b",), 61.0, 5.0), (NODES, 1.0, 10.0)], ids=["the partner", "all"]
)
def test_an_agent_that_is_started_again_at_its_address_is_used_again(
    agents: Agents, lost: tuple[str, ...], later_s: float, pause_s: float
) -> None:
    clock, addresses = SetClock(), started(agents)
    with store_over(addresses, clock=clock) as store:
        store.create(SHARD, [b"before"])
        for node in lost:
            agents[node].close()
        with contextlib.suppress(OSError):
            store.list("checkpoints")
        for node in lost:
            start_again(agents, node, addresses[node])
        # It is not asked at every file.
        with contextlib.suppress(OSError):
            store.create(shard(2), [b"too early"])
        assert (store.num_readmitted, set(store.nodes)) == (0, set(NODES) - {*lost})
        clock.time = 5.1
        store.create(shard(3), [b"after"])
        wait_until(lambda: store.nodes == NODES, "all are asked again")
        store.create(shard(4), [b"after"])
        assert holders(agents, shard(4)) == ["a", "b"]
        assert store.num_readmitted == len(lost)
        # The next time it is left out for longer, if it has not been there for long.
        clock.time += later_s
        for node in lost:
            agents[node].close()
        with contextlib.suppress(OSError):
            store.list("checkpoints")
        assert {node: round(at - clock.time, 1) for node, at in store._left_out.items()} == dict.fromkeys(lost, pause_s)


def test_agents_that_do_not_answer_hold_up_no_state_that_others_keep(agents: Agents) -> None:
    clock = SetClock()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(16)]
        addresses = {f"z{number}": f"127.0.0.1:{one.getsockname()[1]}" for number, one in enumerate(silent)}
        there = started(agents, "ab")
        store = stack.enter_context(store_over({**there, **addresses}, progress_s=20.0, clock=clock))
        for node in addresses:
            store._leave_out(node, OSError())
        clock.time = 5.1
        begun = time.monotonic()
        store.create(SHARD, [b"state"])
        store.create(MANIFEST, [b"manifest"])
        # The silent ones are being asked, which takes twenty seconds.
        assert time.monotonic() - begun < 10.0
        assert holders(agents, MANIFEST) == ["a", "b"]


def test_an_agent_is_asked_less_and_less_often_but_for_the_first_half_minute(agents: Agents) -> None:
    clock = SetClock()
    with store_over({**started(agents, "a"), "b": "127.0.0.1:9"}, clock=clock) as store:
        store._leave_out("b", OSError())
        pauses = []
        for number in range(10):
            at = store._left_out["b"]
            pauses.append(round(at - clock.time))
            clock.time = at
            store.create(shard(number), [b"state"])
            wait_until(lambda now=clock.time: now < store._left_out["b"] < math.inf, "it was asked")  # type: ignore[misc]
        assert pauses == [5] * 7 + [10, 20, 40]


def test_a_single_copy_is_logged_once_until_there_were_two_and_never_for_a_single_node(
    agents: Agents, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ray_ulysses"), "propagate", True)
    clock, addresses = SetClock(), started(agents, "ab")
    with store_over({"a": addresses["a"]}) as single:
        single.create(SHARD, [b"state"])
        assert single.read_whole(SHARD) == b"state"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with store_over(addresses, clock=clock) as store:
        for number in range(2):
            agents["b"].close()
            caplog.clear()
            for version in (0, 1):
                store.create(shard(number, version), [b"state"])
            # A record may be captured twice where another test has given the package's logger a handler of its own.
            assert len({id(record) for record in caplog.records if "single copy" in record.message}) == 1
            start_again(agents, "b", addresses["b"])
            clock.time += 100.0
            store.create(shard(number, 2), [b"state"])
            wait_until(lambda: len(store.nodes) == 2, "it is back")
            store.create(shard(number, 3), [b"state"])


def test_a_partner_without_room_refuses_the_shard_and_nothing_of_it_stays(agents: Agents) -> None:
    agents["b"].close()
    agents["b"] = PeerMemoryAgent(TOKEN, limit_bytes=MIB)
    with store_over(started(agents, "ab")) as store:
        with pytest.raises(OSError, match=r"elastic\.peer_memory_gib"):
            store.create(SHARD, [b"x" * MIB] * 2)
        wait_until(lambda: not any(agent.files.num_bytes for agent in agents.values()), "the memory is given back")
        assert store.list("checkpoints") == []


def test_a_reader_goes_on_at_the_other_node_when_one_dies_between_two_reads(agents: Agents, store_of: StoreOf) -> None:
    content = bytes(range(256)) * 4096
    store_of("a").create(SHARD, [content])
    with store_of("a").open(SHARD) as stream:
        first = stream.read(300_000)
        agents["a"].close()
        assert first + stream.read() == content


def test_a_file_that_was_listed_is_asked_of_a_node_that_has_it(
    agents: Agents, store_of: StoreOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in NODES:
        store_of(node).create(f"{FOLDER}/of-{node}", [node.encode()])
    store = store_of("a")
    asked: list[str] = []
    plain = AgentClient.sizes

    def sizes(client: AgentClient, prefix: str) -> dict[str, int]:
        asked.append(prefix)
        return plain(client, prefix)

    monkeypatch.setattr(AgentClient, "sizes", sizes)
    keys = store.list("checkpoints")
    assert len(asked) == 3
    assert [store.read_whole(key) for key in keys] == [b"a", b"b", b"c"]
    assert asked[3:] == keys


def test_of_writers_on_different_nodes_exactly_one_creates_the_manifest(agents: Agents, store_of: StoreOf) -> None:
    stores = [store_of(node) for node in NODES for _ in range(2)]
    barrier, won = threading.Barrier(len(stores), timeout=20), []

    def create(number: int) -> None:
        barrier.wait()
        with contextlib.suppress(RuntimeError):
            stores[number].create(MANIFEST, [str(number).encode()])
            won.append(str(number).encode())

    threads = [threading.Thread(target=create, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(won) == 1
    assert [store.read_whole(MANIFEST) for store in stores] == won * len(stores)


def test_a_manifest_is_seen_by_all_from_its_decision_on_although_its_writer_died_before_spreading_it(
    agents: Agents, store_of: StoreOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of("b")
    save(store, 7, attempt=2, tensors=TENSORS, stores=dict(enumerate(map(store_of, ("b", "c")))))

    writer = store_of("c")
    ask_all = writer._of_all

    def die(*arguments: Any, **options: Any) -> dict[str, Any]:
        if holders(agents, MANIFEST):
            raise KeyboardInterrupt
        return ask_all(*arguments, **options)

    monkeypatch.setattr(writer, "_of_all", die)
    content = store.read_whole(MANIFEST)
    store.delete(MANIFEST)
    with pytest.raises(KeyboardInterrupt):
        writer.create(MANIFEST, [content])
    assert holders(agents, MANIFEST) == ["a"]
    for node in NODES:
        chosen = newest_committed(store_of(node), "content").manifest
        assert chosen is not None and chosen.step == 7
    agents["a"].close()
    # The deciding node is gone, too: the state was not committed, and nothing of it is loaded.
    for node in ("b", "c"):
        assert newest_committed(store_of(node), "content").manifest is None


@contextlib.contextmanager
def breaking_agent(num_answers: int, *, is_frozen: bool = False) -> Iterator[str]:
    """Run an agent that answers some requests and then closes the connection or stops answering."""
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    assert Gate(TOKEN).admits(connection)
                    for _ in range(num_answers):
                        receive_head(connection)
                        send_frame(connection, {})
                    if is_frozen:
                        is_over.wait(60)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        is_over.set()
        thread.join(10)


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
