"""The prepare command for an object store, with the units in this process instead of on Ray."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_ulysses.cluster import prepare_job, session
from ray_ulysses.commands.display import PrepareView
from ray_ulysses.commands.prepare import prepare_corpus
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare.preparation import Preparation, finish
from ray_ulysses.data.prepare.unit_writer import write_unit
from ray_ulysses.errors import UserError
from tests.s3_server import S3Server
from tests.unit.data.corpora import text_corpus, write_texts

TEXTS = ["one", "two " * 300, "three"]
OPTIONS: dict[str, Any] = {
    "kind": "auto",
    "pattern": "*",
    "exclude": None,
    "split": None,
    "tokenizer": "bytes",
    "bos": "tokenizer",
    "eos": "tokenizer",
    "chat_template": None,
    "turns": "auto",
    "train_on": "all",
    "duplicates": "quarantine",
    "without": None,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run units in this process; return the folder of the node's cache."""

    def run(preparation: Preparation, **_: object) -> Corpus:
        out = preparation.request.out
        units = [write_unit(out, unit, preparation.encoder) for unit in preparation.pending]
        return finish(preparation, (*preparation.done, *units))

    @contextlib.contextmanager
    def connected(*_: object, **__: object) -> Iterator[bool]:
        yield True

    monkeypatch.setattr(prepare_job, "run_preparation", run)
    monkeypatch.setattr(session, "ray_session", connected)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: types.SimpleNamespace(get_node_id=lambda: "a node"))
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def prepare(sources: Path, out: str, **options: Any) -> list[str]:
    return prepare_corpus(address=None, view=PrepareView(), sources=[str(sources)], out=out, **{**OPTIONS, **options})


def test_a_corpus_that_is_named_for_staging_stays(tmp_path: Path, s3: S3Server, prefix: str) -> None:
    own = text_corpus(tmp_path, TEXTS)
    (own.path / "notes.txt").write_text("mine")
    prepare(tmp_path / "texts", s3.uri(prefix), staging=own.path)
    assert Corpus.open(own.path).fingerprint == Corpus.open(s3.uri(prefix)).fingerprint
    assert (own.path / "notes.txt").read_text() == "mine"
    assert not [path for path in own.path.iterdir() if path.is_dir() and path.name != "shards"]


def test_what_failed_before_does_not_block_the_right_command(tmp_path: Path, s3: S3Server, prefix: str) -> None:
    one, other = (write_texts(tmp_path / name, [name, *TEXTS]) for name in ("one", "other"))
    (one / "bad.parquet").write_bytes(b"")
    (one / "rows.jsonl").write_text("no JSON")
    with pytest.raises(UserError, match=r"rows\.jsonl: none of its 1 lines is a JSON object"):
        prepare(one, s3.uri(prefix), exclude=["*.parquet"])
    good: dict[str, Any] = {"exclude": ["*.parquet", "*.jsonl"]}
    prepare(one, s3.uri(prefix), **good)
    with pytest.raises(
        UserError, match=r"contains a corpus made from other sources, options or source files, or a part of one"
    ):
        prepare(other, s3.uri(prefix))
    said = prepare(one, s3.uri(prefix), **good)
    assert said[0].endswith(" already holds this corpus")
    assert not any((tmp_path / "cache" / "prepare").iterdir())
