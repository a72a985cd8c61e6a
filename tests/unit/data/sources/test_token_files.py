"""Datasets of other training tools. `tests.unit.data.tool_files` names the library versions that were compared."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.prepare.unit_writer import write_unit
from ray_ulysses.data.sources.extraction import RawDocument, read_unit
from ray_ulysses.data.sources.rows import RowFields, TokenRow
from ray_ulysses.data.sources.units import Rejected, SourceSpec, list_units
from ray_ulysses.data.tokenize.encoding import load_encoder
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.errors import UserError
from tests.local_preparation import prepare_local
from tests.unit.data.corpora import begin
from tests.unit.data.tokenize.test_tokenizers import fast_tokenizer
from tests.unit.data.tool_files import Documents, write_datatrove, write_mds, write_megatron

EOS = 256
DOCUMENTS = [[*np.random.default_rng(number).integers(0, 256, 2 + 7 * number).tolist(), EOS] for number in range(9)]


def read(path: Path, fields: RowFields | None = None, unit_bytes: int = 200) -> tuple[list[RawDocument], int]:
    """Return the documents of a source without rejected ones, and the number of units."""
    units, rejected = list_units(SourceSpec(paths=(str(path),), fields=fields or RowFields()), unit_bytes)
    found = [one for unit in units for one in read_unit(unit)]
    assert not rejected and not [one for one in found if isinstance(one, Rejected)]
    return [one for one in found if isinstance(one, RawDocument)], len(units)


def rows(documents: list[RawDocument]) -> list[TokenRow]:
    return [one.content for one in documents if isinstance(one.content, TokenRow)]


def token_samples(name: str, encoding: str, packing: str = "") -> Callable[[Path], object]:
    samples = [{name: document, "n": number} for number, document in enumerate(DOCUMENTS)]
    return lambda folder: write_mds(folder, {name: encoding, "n": "int"}, samples, 4, packing)


TOKEN_SETS: dict[str, tuple[Callable[[Path], object], int]] = {
    "megatron uint16": (lambda folder: write_megatron(folder / "a", DOCUMENTS), 4),
    "megatron int32 in sequences": (lambda folder: write_megatron(folder / "a.x", DOCUMENTS, "int32", [1, 3]), 7),
    "datatrove": (lambda folder: write_datatrove(folder / "0", DOCUMENTS, 2), 4),
    "datatrove of 4 bytes": (lambda folder: write_datatrove(folder / "0", DOCUMENTS, 4, "unknown tokenizer"), 7),
    "mds array": (token_samples("tokens", "ndarray"), 7),
    "mds int32": (token_samples("tokens", "ndarray:int32"), 7),
    "mds bytes": (token_samples("tokens", "bytes"), 8),
    "mds zstd": (token_samples("tokens", "ndarray:uint16", "zstd"), 3),
    "mds gzip": (token_samples("tokens", "ndarray", "gz"), 3),
}


@pytest.mark.parametrize("case", TOKEN_SETS)
def test_tokens_are_read_in_parts_with_the_documents_of_their_index(tmp_path: Path, case: str) -> None:
    write, num_units = TOKEN_SETS[case]
    write(tmp_path)
    whole, _ = read(tmp_path, unit_bytes=1 << 20)
    documents, found_units = read(tmp_path)
    assert found_units == num_units
    for found in (whole, documents):
        assert [row.tokens.tolist() for row in rows(found)] == DOCUMENTS
        assert not any(row.is_window or row.labels is not None for row in rows(found))
    starts = [one.offset for one in documents if Path(one.source).name.startswith(("a", "0", "shard.00000"))]
    assert starts == list(range(1, len(starts) + 1))


def test_other_columns_of_mds_are_rows_like_any_other(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    labels = [-100, 5, 6]
    sample = {"text": "zwölf", "messages": chat, "input_ids": [4, 5, 6], "labels": labels, "n": 7}
    columns = {"text": "str", "messages": "json", "input_ids": "ndarray:uint32", "labels": "bytes", "n": "int"}
    write_mds(tmp_path, columns, [sample, {**sample, "text": "two", "n": 8}])
    documents, _ = read(tmp_path, RowFields(text="text", id="n"))
    assert [(one.content, one.id) for one in documents] == [("zwölf", "7"), ("two", "8")]
    (row, _) = rows(read(tmp_path, RowFields(tokens="input_ids", labels="labels"))[0])
    assert row.labels is not None and (row.tokens.tolist(), row.labels.tolist()) == ([4, 5, 6], labels)
    (found, _) = (one.content for one in read(tmp_path, RowFields(messages="messages"))[0])
    assert found == replace(found, messages=tuple(chat))  # type: ignore[type-var, call-arg]
    with pytest.raises(UserError, match=r"--text-field=body: .*shard\.00000\.mds has no such column"):
        read(tmp_path, RowFields(text="body"))
    write_mds(tmp_path, {"text": "pkl"}, [])
    write_mds(tmp_path, {"text": "ndarray:int32", "body": "pkl"}, [{"text": [1], "body": []}])
    with pytest.raises(UserError, match=r"--text-field=body: .* as pkl, which can't be read"):
        read(tmp_path, RowFields(text="body"))


def test_the_loss_file_of_datatrove_masks_labels(tmp_path: Path) -> None:
    write_datatrove(tmp_path / "0", DOCUMENTS, masked=2)
    for row, tokens in zip(rows(read(tmp_path)[0]), DOCUMENTS, strict=True):
        assert row.labels is not None and row.labels.tolist() == [-100, -100, *tokens[2:]]


def cut(path: Path, num_bytes: int = 1) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def put(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


MEGATRON, DATATROVE = "a.idx", "0.ds.index"
NUM, AT_OFFSETS, AT_BORDERS = len(DOCUMENTS), 34 + 4 * len(DOCUMENTS), 34 + 12 * len(DOCUMENTS)
DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("a.bin", cut, "the index lists .* tokens of 2 bytes"),
    (MEGATRON, cut, "an index of 9 sequences and 10 borders has"),
    (MEGATRON, lambda path: path.write_bytes(path.read_bytes()[:20]), "byte 20: the index ends within its header"),
    (MEGATRON, lambda path: put(path, 9, b"\2"), "byte 9: unsupported version 2 or token type 8"),
    (MEGATRON, lambda path: put(path, 17, b"\6"), "byte 9: unsupported version 1 or token type 6"),
    (MEGATRON, lambda path: put(path, 17, b"\4"), "byte 78: the sequence does not follow"),
    (MEGATRON, lambda path: path.write_bytes(path.read_bytes() + bytes(NUM)), "multimodal"),
    (MEGATRON, lambda path: put(path, AT_OFFSETS + 24, b"\7"), f"byte {AT_OFFSETS + 24}: the sequence does not follow"),
    (MEGATRON, lambda path: put(path, AT_BORDERS + 16, b"\0"), f"byte {AT_BORDERS + 16}: the document's border"),
    (MEGATRON, lambda path: put(path, AT_BORDERS + 8 * NUM, b"\0"), "do not go from sequence 0 to 9"),
    ("0.ds", cut, "byte .*: the index lists .* tokens, but the file does not have 2 bytes for each"),
    (DATATROVE, cut, "ends within a number of 8 bytes"),
    (DATATROVE, lambda path: cut(path, 8), "the index lists"),
    (DATATROVE, lambda path: put(path, 16, b"\0"), "byte 16: the document's border"),
    ("0.ds.metadata", lambda path: path.write_text("x|4\n"), "does not have 4 bytes for each"),
    ("0.ds.metadata", lambda path: path.write_text("x|two\n"), "byte 0: the first line"),
    ("0.ds.loss", cut, "one byte for each of"),
    ("shard.00000.mds", cut, "index.json states"),
    ("shard.00000.mds", lambda path: path.unlink(), "is missing"),
    ("shard.00000.mds", lambda path: put(path, 8, b"\0"), "byte 4: the offsets of 3 samples are not in order"),
    ("shard.00000.mds", lambda path: put(path, 0, b"\xff\xff"), "byte .*: the shard ends before"),
    ("shard.00000.mds", lambda path: put(path, 24, b"{,"), "byte 20: the description of the columns"),
    (
        "shard.00000.mds",
        lambda path: put(path, int.from_bytes(path.read_bytes()[8:12], "little"), b"\1"),
        "byte .*: the sizes of the columns",
    ),
]


@pytest.mark.parametrize(("name", "damage", "rule"), DAMAGE)
def test_a_damaged_file_is_refused_with_its_name_and_the_violated_rule(
    tmp_path: Path, name: str, damage: Callable[[Path], None], rule: str
) -> None:
    write_megatron(tmp_path / "a", DOCUMENTS)
    write_datatrove(tmp_path / "0", DOCUMENTS, tokenizer="x", masked=1)
    write_mds(tmp_path, {"tokens": "ndarray", "z": "str"}, [{"tokens": one, "z": "z"} for one in DOCUMENTS])
    read(tmp_path)
    damage(tmp_path / name)
    with pytest.raises(UserError, match=rf"^source={tmp_path}/\w+\.\S*: .*{rule}"):
        read(tmp_path)


@pytest.mark.parametrize("packing", ["zstd", "gz"])
def test_a_truncated_compressed_shard_is_refused(tmp_path: Path, packing: str) -> None:
    paths = write_mds(tmp_path, {"text": "str"}, [{"text": str(number) * 99} for number in range(99)], 99, packing)
    units, _ = list_units(SourceSpec(paths=(str(tmp_path),)))
    cut(paths[0], 9)
    with pytest.raises(UserError, match=rf"mds\.{packing}: .*(can't be read|the shard ends within)"):
        list(read_unit(units[0]))


def test_parts_without_their_index_are_left_out_and_unselected_shards_are_not_missed(tmp_path: Path) -> None:
    samples = [{"text": str(number)} for number in range(6)]
    write_mds(tmp_path / "mds" / "sub", {"text": "str"}, samples)
    index = (tmp_path / "mds" / "sub" / "index.json").read_text()
    # As of a merged index, which lists the shards of subfolders again.
    (tmp_path / "mds" / "index.json").write_text(index.replace('"shard.', '"sub/shard.'))
    assert [one.content for one in read(tmp_path)[0]] == list("012345")
    spec = SourceSpec(paths=(str(tmp_path),), exclude=("shard.00000*",))
    assert [one.content for unit in list_units(spec)[0] for one in read_unit(unit) if isinstance(one, RawDocument)] == [
        *"345"
    ]
    (tmp_path / "notes.txt").write_text("notes " * 999)
    orphans = {*write_megatron(tmp_path / "a", DOCUMENTS)[1:], *write_datatrove(tmp_path / "0", DOCUMENTS)[:1]}
    (tmp_path / "a.bin").unlink()
    (tmp_path / "0.ds.index").unlink()
    _, rejected = list_units(SourceSpec(paths=(str(tmp_path),)))
    assert {one.source for one in rejected} == set(map(str, orphans))
    assert all(" together" in one.reason for one in rejected)


def request(folder: Path, **changes: Any) -> PrepareRequest:
    sources = SourceSpec(paths=(str(folder / "data"),))
    return replace(PrepareRequest(sources=sources, out=folder / "corpus", unit_bytes=200), **changes)


def data(folder: Path) -> Path:
    (folder / "data").mkdir()
    return folder / "data"


def corpus_documents(prepared: PrepareRequest) -> Documents:
    corpus = prepare_local(prepared)
    return [corpus.read(number, 0, int(length)).tolist() for number, length in enumerate(corpus.lengths)]


@pytest.mark.parametrize("case", TOKEN_SETS)
def test_a_corpus_has_the_documents_also_after_a_resume(tmp_path: Path, case: str) -> None:
    TOKEN_SETS[case][0](data(tmp_path))
    started = begin(request(tmp_path))
    for unit in started.units[:2]:
        write_unit(tmp_path / "corpus", unit, load_encoder("bytes"))
    assert len(begin(request(tmp_path)).pending) == len(started.units) - 2
    assert corpus_documents(request(tmp_path)) == DOCUMENTS


def test_windows_of_equal_length_are_divided_after_end_tokens(tmp_path: Path) -> None:
    windows = [[1, 2, EOS, 3, 4], [5, EOS, EOS, 6, 7], [8, 9, 10, 11, EOS], [12, 13, 14, 15, 16]]
    write_mds(data(tmp_path), {"tokens": "ndarray:int32"}, [{"tokens": window} for window in windows])
    divided = [[1, 2, EOS], [3, 4], [5, EOS], [6, 7], [8, 9, 10, 11, EOS], [12, 13, 14, 15, 16]]
    assert corpus_documents(request(tmp_path)) == divided
    whole = request(tmp_path, out=tmp_path / "whole", encoding=EncodingOptions(eos="none"))
    assert corpus_documents(whole) == windows


# The tokenizer has 300 tokens, of which 0 is <s> and 1 is </s>.
WORDS = [[5, 6, 7 + number] for number in range(20)]
MISMATCHES: dict[str, tuple[Callable[[Path], object], str]] = {
    "vocabulary": (lambda path: write_megatron(path / "a", [[1], [5, 300, 1]]), "document 2: token 300 at index 1"),
    "width": (lambda path: write_megatron(path / "a", [[5, 6, 1]], "uint8"), "stores tokens as uint8, which can't"),
    "array width": (
        lambda path: write_mds(path, {"tokens": "ndarray:int8"}, [{"tokens": [5, 6, 1]}]),
        "stores tokens as int8, which can't",
    ),
    "other width of bytes": (
        lambda path: write_mds(path, {"tokens": "bytes"}, [{"tokens": [5 << 32 | 6, 1]}]),
        "token 21474836486 at index 0",
    ),
    "name": (lambda path: write_datatrove(path / "0", [[5, 6, 1]], 2, "owner/other"), "the tokenizer owner/other"),
    "special end": (
        lambda path: write_datatrove(path / "0", [[5, 6, 0]]),
        r"end with the token 0 \('<s>'\)",
    ),
    "same end": (lambda path: write_megatron(path / "a", [[*one, 90] for one in WORDS]), "end with the token 90 "),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_tokens_of_another_tokenizer_are_refused_before_anything_is_written(tmp_path: Path, case: str) -> None:
    write, rule = MISMATCHES[case]
    write(data(tmp_path))
    tokenizer = str(fast_tokenizer(tmp_path / "Words-300"))
    with pytest.raises(UserError, match=rf"^source={tmp_path}/data/.*{rule}.*set --tokenizer"):
        prepare_local(request(tmp_path, tokenizer=tokenizer))
    assert not (tmp_path / "corpus").exists()


def test_tokens_that_fit_the_tokenizer_are_accepted(tmp_path: Path) -> None:
    tokenizer = str(fast_tokenizer(tmp_path / "Words-300"))
    write_datatrove(data(tmp_path) / "0", WORDS, 2, "owner/words-300")
    assert corpus_documents(request(tmp_path, tokenizer=tokenizer)) == [[*one, 1] for one in WORDS]
    kept = request(tmp_path, tokenizer=tokenizer, out=tmp_path / "kept", encoding=EncodingOptions(eos="none"))
    assert corpus_documents(kept) == WORDS


def test_a_later_document_outside_the_vocabulary_ends_the_preparation(tmp_path: Path) -> None:
    write_megatron(data(tmp_path) / "a", [*DOCUMENTS, [1, 257]])
    with pytest.raises(UserError, match=r"a\.bin: document 10: token 257 at index 1 .*--tokenizer=bytes"):
        prepare_local(request(tmp_path))


def test_an_empty_or_short_document_is_left_out_by_number(tmp_path: Path) -> None:
    write_megatron(data(tmp_path) / "a", [[1, EOS], [], [2, EOS]])
    corpus = prepare_local(request(tmp_path))
    assert corpus.num_documents == 2
    assert '"offset": 2, "reason": "empty"' in (corpus.path / "quarantine.jsonl").read_text()
    assert struct.calcsize("<9sQBQQ") == 34, "the header of the index"
