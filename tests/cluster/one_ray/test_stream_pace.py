"""An execution of Ray Data that rests while its consumer takes nothing, and what it holds meanwhile."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from ray_ulysses.cluster import stream
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.read.streamed_source import BLOCK_TOKENS
from tests.cluster.one_ray.test_stream import source_of
from tests.cluster.streams import WAIT_S, Reads, WatchedStreams, executions, stored_bytes, wide_blocks
from tests.polling import wait_until
from tests.unit.data.corpora import text_corpus, varied_texts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
TOKENS = 1 << 19
_LONG_S = 3600.0
BLOCK_BYTES = 2 * BLOCK_TOKENS


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return text_corpus(tmp_path_factory.mktemp("pace"), varied_texts(20, longest=16_000), unit_bytes=200_000)


class Run:
    """A stream of which some tables were taken, and its execution."""

    def __init__(self, corpus: Corpus, folder: Path, tokens: int = TOKENS, count: int = 40) -> None:
        before = executions()
        self.reads = Reads(folder)
        # The corpus has ids of 2 bytes, and a request allows for 4: with those, as many blocks are held as are meant.
        blocks = [
            replace(one, num_bytes=one.num_bytes // 2) for one in wide_blocks(corpus, source_of(corpus), count, tokens)
        ]
        self.tables = WatchedStreams(self.reads).read(blocks, threading.Event())
        next(self.tables)
        (self.executor,) = executions() - before
        self.pace = next(one for one in self.executor._callbacks if isinstance(one, stream._Pace))

    def wait_until_it_rests(self) -> None:
        wait_until(lambda: self.pace._pause_s == stream._LONGEST_PAUSE_S[False], "the execution rests")


@pytest.fixture
def running(cluster: None, corpus: Corpus, tmp_path: Path) -> Iterator[Run]:
    run = Run(corpus, tmp_path / "reads")
    with closing(run.tables):
        yield run


@pytest.mark.parametrize("end", ["taken", "closed"])
def test_an_execution_that_rests_is_woken(running: Run, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    running.wait_until_it_rests()
    num_read = len(running.reads.noted())
    # From its next pause on, it rests for longer than the test may take.
    monkeypatch.setattr(stream, "_LONGEST_PAUSE_S", {True: _LONG_S, False: _LONG_S})
    running.pace._pause_s = _LONG_S
    # Its last short pause is over by then.
    time.sleep(2.0)
    if end == "taken":
        for _ in range(8):
            next(running.tables)
        wait_until(lambda: len(running.reads.noted()) > num_read, "it reads on")
    else:
        running.tables.close()
        assert not running.executor.is_alive()


@pytest.mark.slow
def test_two_blocks_of_each_rank_are_held_and_none_after_it(cluster: None, corpus: Corpus, tmp_path: Path) -> None:
    before, num_files = stored_bytes(), 0
    for attempt in range(3):
        runs = [Run(corpus, tmp_path / f"{attempt}-{rank}", tokens=BLOCK_TOKENS, count=8) for rank in range(2)]
        for run in runs * 3:
            run.wait_until_it_rests()
            next(run.tables)
        for run in runs:
            run.wait_until_it_rests()
            assert len(run.reads.noted()) < 8
        gc.collect()
        held = stored_bytes() - before
        # Besides what Ray keeps of each execution.
        assert BLOCK_TOKENS <= held <= len(runs) * (2 * BLOCK_BYTES + (1 << 20)), held
        while runs:
            runs.pop().tables.close()
        del run
        # The objects of an execution refer to each other, and to its last blocks.
        gc.collect()
        wait_until(lambda: stored_bytes() <= before, "all blocks are gone", said=lambda: str(stored_bytes() - before))
        num_files = num_files or psutil.Process().num_fds()
    assert psutil.Process().num_fds() <= num_files
    assert not [one.name for one in threading.enumerate() if one.name in ("Prefetcher", "iter_threaded")]


@pytest.mark.parametrize("end", ["comes", "stopped"])
def test_a_consumer_that_waits_is_seen_and_can_be_stopped(
    cluster: None, corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    """A canary of Ray Data 2.60."""
    before, reads, stopped = executions(), Reads(tmp_path / "reads", held=0), threading.Event()
    tables = WatchedStreams(reads).read(wide_blocks(corpus, source_of(corpus), 2, TOKENS), stopped)
    logging.getLogger("ray.data").addHandler(caplog.handler)
    received: list[pa.Table] = []
    thread = threading.Thread(target=lambda: received.extend(tables), daemon=True)
    thread.start()
    wait_until(lambda: reads.of(0), "the first block is being read")
    (executor,) = executions() - before
    wait_until(lambda: executor._output_node[1].num_waiting_consumers == 1, "the consumer is seen")
    assert sum(op.num_active_tasks() for op in executor._topology) == 1
    if end == "stopped":
        stopped.set()
    else:
        reads.go()
    thread.join(WAIT_S)
    assert not thread.is_alive() and not executor.is_alive()
    assert len(received) == (0 if end == "stopped" else 2)
    logging.getLogger("ray.data").removeHandler(caplog.handler)
    shown = [one for one in caplog.records if one.levelno >= logging.ERROR and not getattr(one, "hide", False)]
    assert not shown, "a report of a bug on the console"
    reads.go()
