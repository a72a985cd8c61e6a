from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_ulysses.cluster.prepare_job import run_preparation
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare.preparation import PrepareProgress, PrepareRequest
from ray_ulysses.data.prepare.unit_writer import write_unit
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.data.tokenize.encoding import load_encoder
from ray_ulysses.errors import RunError, UserError
from tests.local_preparation import prepare_local, preparing
from tests.unit.data.corpora import begin, check_content, varied_texts, write_texts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def prepare(request: PrepareRequest, **options: Any) -> Corpus:
    with preparing(request) as preparation:
        return run_preparation(preparation, **options)


def mixed_sources(directory: Path) -> SourceSpec:
    """Some of each kind, good documents and bad."""
    write_texts(directory / "tree", varied_texts(20))
    (directory / "tree" / "latin.txt").write_bytes(b"latin \xe9")
    lines = [json.dumps({"text": text}) for text in varied_texts(10, seed=1)]
    (directory / "lines.jsonl").write_text("\n".join([*lines, "{broken"]))
    (directory / "lines.jsonl.gz").write_bytes(gzip.compress("\n".join([*lines[:3], '{"text": "zip"}']).encode()))
    table = pa.table({"text": [*varied_texts(9, seed=2), None]})
    pq.write_table(table, directory / "rows.parquet", row_group_size=3)
    names = ("tree", "lines.jsonl", "lines.jsonl.gz", "rows.parquet")
    return SourceSpec(paths=tuple(str(directory / name) for name in names))


def content(corpus: Corpus) -> list[list[int]]:
    return [corpus.read(d, 0, int(corpus.lengths[d])).tolist() for d in range(corpus.num_documents)]


def test_the_job_makes_the_same_corpus_as_one_process(cluster: None, tmp_path: Path) -> None:
    request = PrepareRequest(sources=mixed_sources(tmp_path), out=tmp_path / "ray", unit_bytes=1500)
    seen: list[PrepareProgress] = []
    through_ray = prepare(request, progress=seen.append)
    alone = prepare_local(replace(request, out=tmp_path / "alone"))
    assert through_ray.fingerprint == alone.fingerprint
    assert content(through_ray) == content(alone)
    assert through_ray.num_documents == 20 + 10 + 1 + 9
    quarantine = (through_ray.path / "quarantine.jsonl").read_text()
    assert quarantine == (alone.path / "quarantine.jsonl").read_text()
    reasons = sorted(json.loads(line)["reason"].split(":")[0].split(" as ")[0] for line in quarantine.splitlines())
    missing = "the text is missing, not a string"
    assert reasons == ["not JSON", "not UTF-8", "the same content", "the same content", "the same content", missing]
    assert [one.units_done for one in seen] == list(range(1, seen[0].num_units + 1))
    assert through_ray.info.byte_unigram_nats is not None
    assert 0 < through_ray.info.byte_unigram_nats < math.log(256)
    check_content(through_ray)


def test_a_stopped_job_does_only_what_is_left(cluster: None, tmp_path: Path) -> None:
    request = PrepareRequest(sources=mixed_sources(tmp_path), out=tmp_path / "out", unit_bytes=1500)
    started = begin(request)
    for unit in started.units[::2]:
        write_unit(request.out, unit, load_encoder("bytes"))
    kept = {p.name: p.stat().st_mtime_ns for p in (request.out / "shards").iterdir()}
    seen: list[PrepareProgress] = []
    corpus = prepare(request, progress=seen.append)
    assert len(seen) == len(started.units) - len(started.units[::2])
    assert all((request.out / "shards" / name).stat().st_mtime_ns == when for name, when in kept.items())
    assert corpus.fingerprint == prepare_local(replace(request, out=tmp_path / "alone")).fingerprint
    assert prepare(request, progress=lambda _: pytest.fail("nothing is left to do")).fingerprint == corpus.fingerprint


@pytest.mark.slow
def test_files_that_cannot_be_read_are_named_all_at_once(cluster: None, tmp_path: Path) -> None:
    write_texts(tmp_path / "tree", varied_texts(5))
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 999)[:-9])
    paths = ("tree", "one.jsonl.gz", "two.jsonl.gz")
    request = PrepareRequest(
        sources=SourceSpec(paths=tuple(str(tmp_path / path) for path in paths)), out=tmp_path / "out"
    )
    with pytest.raises(UserError) as caught:
        prepare(request)
    text = str(caught.value)
    assert "one.jsonl.gz: the JSONL file can't be read" in text
    assert "two.jsonl.gz: the JSONL file can't be read" in text
    assert not (request.out / "corpus.json").exists()
    assert [p.name for p in (request.out / "shards").iterdir()] == ["shard-00000.tokens"]
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(f'{{"text": "{name}"}}'.encode()))
    assert prepare(request).num_documents == 7


def test_an_output_that_cannot_be_written_fails_the_job_with_its_reason(cluster: None, tmp_path: Path) -> None:
    write_texts(tmp_path / "tree", ["one"])
    request = PrepareRequest(sources=SourceSpec(paths=(str(tmp_path / "tree"),)), out=tmp_path / "out")
    begin(request)
    (request.out / "shards").write_text("a file where the directory should be")
    with pytest.raises(RunError, match=r"unit 0 of .*out: .*Not a directory"):
        prepare(request)
    assert not (request.out / "corpus.json").exists()
