"""Streams of children that are killed at random moments end, and leave nothing in their supervisor or in Ray."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import psutil
import pytest
import ray
from ray._private.internal_api import node_stats

from ray_ulysses.cluster.stream import RayStreams
from ray_ulysses.data.plan.corpus_set import CorpusSet, open_sources
from ray_ulysses.data.read.blocks import Block, Slot, requested, unpack
from ray_ulysses.errors import RunError
from ray_ulysses.supervision.remote_streams import RemoteStreams, serve_streams
from tests.cluster.one_ray.test_stream import executions
from tests.polling import wait_until
from tests.unit.data.corpora import text_corpus, varied_texts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
WARM_KILLS, KILLS = 2, 30


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> list[Block]:
    """Sixty blocks, each of one document."""
    corpus = text_corpus(tmp_path_factory.mktemp("killed"), varied_texts(60, longest=30_000))
    sources = open_sources([(str(corpus.path), None)]).sources
    lengths = CorpusSet(sources).corpora[0].lengths
    return [
        requested(sources, [Slot(row=row, ranges=np.array([[row, 0, length]]))]) for row, length in enumerate(lengths)
    ]


class Child:
    """A child that reads a stream through this process, its supervisor; its death closes its end of the connection."""

    def __init__(self, blocks: list[Block]) -> None:
        mine, theirs = socket.socketpair()
        serve_streams(RayStreams, Connection(mine.detach()))
        self._end = theirs.dup()
        self._remote, self.rows = RemoteStreams(theirs.detach()), list[int]()
        self._thread = threading.Thread(target=self._read, args=(blocks,))
        self._thread.start()

    def _read(self, blocks: list[Block]) -> None:
        try:
            for table in self._remote.read(blocks, threading.Event()):
                self.rows += [received.row for received in unpack(table)]
                time.sleep(0.05)
        except RunError:
            pass
        self._remote._connection.close()

    def kill(self) -> None:
        """Die."""
        self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()
        self._thread.join(60.0)


def stored_bytes() -> int:
    (node,) = ray.nodes()
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return int(stats.store_stats.object_store_bytes_used)


@pytest.mark.slow
def test_nothing_of_a_stream_outlives_its_child(cluster: None, blocks: list[Block]) -> None:
    chance, lasts, process = random.Random(43), executions(), psutil.Process()
    counts: dict[str, tuple[Callable[[], float], float]] = {
        # What the last one held is freed as the next one starts.
        "bytes in the object store": (stored_bytes, stored_bytes() + 1.5 * max(block.num_bytes for block in blocks)),
        "CPUs in use": (lambda: 4.0 - ray.available_resources().get("CPU", 0.0), 0.0),
    }
    num_streamed = 0
    for number in range(WARM_KILLS + KILLS):
        child = Child(blocks)
        if number < WARM_KILLS or number == WARM_KILLS + KILLS - 1:
            wait_until(lambda child=child: child.rows, "the stream has come")
        else:
            time.sleep(chance.uniform(0.0, 4.0))
        child.kill()
        assert child.rows == list(range(len(child.rows)))
        num_streamed += bool(child.rows)
        if number == WARM_KILLS - 1:
            wait_until(lambda: executions() <= lasts, "the executions have ended")
            # What lasts as long as the process, such as Ray's own threads, is there by now.
            counts["threads"] = (threading.active_count, threading.active_count())
            counts["descriptors"] = (process.num_fds, process.num_fds() + KILLS / 2)
    print(f"{num_streamed} of {WARM_KILLS + KILLS} children received rows before they died")
    wait_until(lambda: executions() <= lasts, "the executions have ended")
    for name, (count, most) in counts.items():
        wait_until(
            lambda count=count, most=most: count() <= most,
            f"{name} back at {most:g}",
            said=lambda count=count: str(count()),
        )
    assert not [one for one in threading.enumerate() if one.name == "row-stream"]
