"""Streams whose blocks take long, whose readers or children die, or whose corpus goes away."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from ray.data import DataContext

from ray_ulysses.cluster.stream import RayStreams
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import CorpusSet, open_sources
from ray_ulysses.data.read.blocks import Block, Slot, requested, unpack
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run.secrets_file import SecretsFile
from ray_ulysses.supervision.remote_streams import RemoteStreams, serve_streams
from tests.breadth import fast_only
from tests.cluster.one_ray.test_stream import assert_same, direct, place_of, plan_of, source_of, sources_of, take
from tests.cluster.streams import Reads, WatchedStreams, executions, stored_bytes, streamed_source, wide_blocks
from tests.polling import wait_until
from tests.unit.data.corpora import text_corpus, varied_texts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return text_corpus(tmp_path, varied_texts(60, longest=3000), unit_bytes=20_000)


@pytest.mark.slow
def test_a_block_may_last_longer_than_ray_data_waits_for_progress(
    cluster: None, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataContext.get_current(), "execution_no_progress_timeout_s", 1.0)
    before, reads = executions(), Reads(tmp_path / "reads", held=6)
    blocks = wide_blocks(corpus, source_of(corpus), 12, 1 << 20)
    with closing(WatchedStreams(reads).read(blocks, threading.Event())) as tables:
        rows = [next(tables).column("row")[0].as_py() for _ in range(2)]
        (execution,) = executions() - before
        # One that counts would end meanwhile.
        execution.join(5.0)
        assert execution.is_alive()
        reads.go()
        rows += [table.column("row")[0].as_py() for table in tables]
    assert rows == list(range(12))


def test_a_block_is_read_again_whose_reader_was_killed(cluster: None, corpus: Corpus, tmp_path: Path) -> None:
    plan, reads = plan_of(corpus), Reads(tmp_path / "reads", held=6)
    (source,) = sources_of(corpus, plan, 1, 1, streams=WatchedStreams(reads), block_tokens=1)
    received = take([source], range(1, 2))[0]
    wait_until(lambda: reads.of(6), "the block is being read")
    os.kill(reads.of(6)[0][1], signal.SIGKILL)
    reads.go()
    received += take([source], range(2, plan.num_steps + 1))[0]
    assert_same(received, direct(corpus, plan, 0, 1, 1, range(1, plan.num_steps + 1)))
    assert len({process for _, process in reads.of(6)}) == 2
    source.close()


def _truncate(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-10])


def _forbid(shard: Path) -> None:
    shard.chmod(0)


@pytest.mark.parametrize("harm", fast_only([_truncate, _forbid], _truncate))
def test_a_file_that_becomes_unreadable_is_named_or_its_rows_are_the_same(
    cluster: None, corpus: Corpus, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    """A reader keeps the files open that it has read; another process, as here for the last blocks, opens them."""
    plan, reads = plan_of(corpus), Reads(tmp_path / "reads", held=6)
    steps = range(1, plan.num_steps + 1)
    expected = direct(corpus, plan, 0, 1, 1, steps)
    (source,) = sources_of(corpus, plan, 1, 1, streams=WatchedStreams(reads), block_tokens=1)
    received = take([source], range(1, 2))[0]
    wait_until(lambda: reads.of(6), "the block is being read")
    for shard in (corpus.path / "shards").glob("*.tokens"):
        harm(shard)
    os.kill(reads.of(6)[0][1], signal.SIGKILL)
    reads.go()
    if harm is _forbid and os.geteuid() == 0:
        received += take([source], range(2, plan.num_steps + 1))[0]
        assert_same(received, expected)
    else:
        with pytest.raises(UserError, match=r"the shard .*shard-\d+\.tokens can't be read"):
            take([source], range(2, plan.num_steps + 1))
    source.close()


@pytest.mark.slow
def test_an_object_store_that_never_answers_is_an_error_in_time(
    cluster: None, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, before = plan_of(corpus), executions()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_REGION": "us-east-1"}
        keys["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        secrets = tmp_path / "secrets.env"
        secrets.write_text("\n".join(f"{name}={value}" for name, value in keys.items()))
        secrets.chmod(0o600)
        for name, value in keys.items():
            monkeypatch.setenv(name, value)
        streams = WatchedStreams(secrets=SecretsFile(path=str(secrets), names=tuple(keys)))
        far = replace(source_of(corpus), path="s3://bucket/corpora/one")
        source = streamed_source(source_of(corpus), plan, streams, timeout_s=8.0, far=far, **place_of(0, 1, 1))
        with pytest.raises(RunError, match=r"step 1: no row arrived for 8 s.*set data\.engine=local"):
            list(source.step(1))
        silent.settimeout(30.0)
        silent.accept()[0].close()
        source.close()
        wait_until(lambda: executions() <= before, "the execution has ended")


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
