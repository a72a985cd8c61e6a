"""The corpus does not depend on whether texts are encoded in batches, in parts or one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare import unit_writer
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.data.tokenize import dividing
from ray_ulysses.data.tokenize.encoding import load_encoder
from ray_ulysses.data.tokenize.options import EncodingOptions
from tests.local_preparation import prepare_local
from tests.unit.data.tokenize.test_encoding import bos_tokenizer

ROWS: list[Any] = [
    {"text": "the quick brown fox"},
    {"text": ""},
    {"text": "x"},
    {"text": "weighted", "w": 2},
    {"text": "the fox\njumps over\nthe dog " * 40},
    {"text": 7},
    {"text": "é漢🙂 and\nmore"},
    {"text": "the quick brown fox"},
    {"text": "y"},
    {"text": "last\none"},
]


def prepared(root: Path, tokenizer: str, options: EncodingOptions) -> tuple[Corpus, list[Any]]:
    root.mkdir()
    path = root.parent / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    spec = SourceSpec(paths=(str(path),), fields=RowFields(text="text", weight="w"))
    corpus = prepare_local(PrepareRequest(sources=spec, out=root / "corpus", tokenizer=tokenizer, encoding=options))
    lines = (corpus.path / "quarantine.jsonl").read_text().splitlines()
    left_out = [(one["offset"], one["reason"]) for one in map(json.loads, lines)]
    return corpus, left_out


@pytest.mark.parametrize("options", [EncodingOptions(), EncodingOptions(eos="none")], ids=["ends", "no end"])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_corpus_is_the_same_however_texts_are_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: EncodingOptions
) -> None:
    tokenizer = "bytes" if kind == "bytes" else str(bos_tokenizer(tmp_path / "bpe", None))
    monkeypatch.setattr(dividing, "PART_CHARACTERS", 30)
    found = {}
    for name, limits in {
        "many at once": {},
        "by two": {"_BATCH_TEXTS": 2},
        "one by one": {"_BATCH_CHARACTERS": 1},
        "in parts": {"_LONG_CHARACTERS": 0},
    }.items():
        with monkeypatch.context() as patch:
            for limit, value in limits.items():
                patch.setattr(unit_writer, limit, value)
            corpus, left_out = prepared(tmp_path / name, tokenizer, options)
        files = {path.name: path.read_bytes() for path in corpus.path.rglob("*") if path.suffix in (".tokens", ".bin")}
        found[name] = (corpus.fingerprint, left_out, files, corpus.digests().tobytes())
        assert corpus.info.spans is not None and corpus.has_weights
    assert len({(one[0], str(one[1])) for one in found.values()}) == 1
    assert all(one == found["many at once"] for one in found.values())
    singles = [3, 9] if options.eos == "none" else []
    assert sorted(offset for offset, _ in found["by two"][1]) == sorted([2, 6, 8, *singles])

    encoder = load_encoder(tokenizer, options)
    texts = [row["text"] for number, row in enumerate(ROWS, start=1) if number not in (2, 6, 8, *singles)]
    assert corpus.num_documents == len(texts)
    for number, text in enumerate(texts):
        (expected,) = encoder.encode(text)
        assert np.array_equal(corpus.read(number, 0, int(corpus.lengths[number])), expected.ids)


def test_a_long_document_is_never_held_as_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    add = unit_writer.FlatWriter.add

    def watched(writer: Any, ids: Any) -> Any:
        nonlocal most
        most = max(most, ids.nbytes)
        return add(writer, ids)

    monkeypatch.setattr(unit_writer.FlatWriter, "add", watched)
    path = tmp_path / "long.txt"
    path.write_text("0123456789abcdef" * 500_000)
    corpus = prepare_local(PrepareRequest(sources=SourceSpec(paths=(str(path),)), out=tmp_path / "corpus"))
    assert corpus.lengths.tolist() == [8_000_001] and 0 < most <= 8 << 18
    assert corpus.read(0, 7_999_999, 2).tolist() == [ord("f"), 256]
