"""What becomes of a stream whose blocks last long, whose readers die, or whose corpus goes away."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from ray.data import DataContext

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run.secrets_file import SecretsFile
from tests.breadth import fast_only
from tests.cluster.one_ray.test_stream import (
    assert_same,
    direct,
    place_of,
    plan_of,
    source_of,
    sources_of,
    take,
)
from tests.cluster.streams import Reads, WatchedStreams, executions, streamed_source, wide_blocks
from tests.polling import wait_until
from tests.unit.data.corpora import text_corpus, varied_texts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


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
