"""Unusual file names and malformed rows: each is stored or listed in the quarantine, and none ends a preparation."""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_ulysses.cluster import prepare_job
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.errors import RunError, UserError
from tests.local_preparation import prepare_local, preparing
from tests.unit.data.corpora import begin
from tests.unit.data.tokenize.test_chat import CHATML, TOOL_BLOCK, chat_tokenizer
from tests.unit.data.tokenize.test_supervision import reasons_of

ANSWER = {"role": "assistant", "content": "yes"}


def prepare_folder(folder: Path, tokenizer: str = "bytes", out: Path | None = None, **fields: str) -> Corpus:
    spec = SourceSpec(paths=(str(folder),), fields=RowFields.from_options(fields))
    return prepare_local(PrepareRequest(sources=spec, out=out or folder.parent / "corpus", tokenizer=tokenizer))


def nested(depth: int) -> str:
    # json.dumps can't write a list that is nested deeply.
    return "[" * depth + "]" * depth


def test_names_that_are_not_utf8_are_read_and_shown_with_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "in" / "d\udce9").mkdir(parents=True)
    (tmp_path / "in" / "d\udce9" / "vertr\udce4ge.txt").write_text("a text")
    (tmp_path / "in" / "rows\udcff.jsonl").write_text('{"text": "a row"}\n{broken\n')
    pq.write_table(pa.table({"text": ["a cell", ""]}), tmp_path / "in" / "cells.parquet")
    (tmp_path / "in" / "cells.parquet").rename(tmp_path / "in" / "cells\udcfe.parquet")
    corpus = prepare_folder(tmp_path / "in")
    names = [corpus.source(document).source.removeprefix(f"{tmp_path}/in/") for document in range(3)]
    assert names == [r"d\xe9/vertr\xe4ge.txt", r"rows\xff.jsonl", r"cells\xfe.parquet"]
    left_out = [json.loads(line)["source"] for line in (corpus.path / "quarantine.jsonl").read_text().splitlines()]
    assert [Path(name).name for name in left_out] == [r"rows\xff.jsonl", r"cells\xfe.parquet"]
    with pytest.raises(UserError, match=r"^--out=.*/out\\xff: the name is not UTF-8"):
        begin(PrepareRequest(sources=SourceSpec(paths=(str(tmp_path / "in"),)), out=tmp_path / "out\udcff"))
    (tmp_path / "in" / "bad\udcff.parquet").write_text("PAR1 not really")
    with pytest.raises(UserError, match=r"^source=.*/bad\\xff.parquet: the Parquet file"):
        prepare_folder(tmp_path / "in", out=tmp_path / "other")


def test_messages_and_tools_that_are_nested_too_deeply_are_left_out(tmp_path: Path) -> None:
    template = str(chat_tokenizer(tmp_path / "tokenizer", TOOL_BLOCK + CHATML))
    rows = []
    for depth in (50, 99, 300, 900, 960, 100_000):
        message = f'{{"role": "user", "content": "the fox? {depth}", "x": {nested(depth)}}}'
        rows.append(f'{{"m": [{message}, {json.dumps(ANSWER)}], "t": null}}')
    tools = json.dumps(f'[{{"name": {nested(900)}}}]')
    parts = f'[{{"role": "user", "content": [{{"type": {nested(900)}}}]}}]'
    chat = json.dumps([{"role": "user", "content": "jump"}, ANSWER])
    rows += [f'{{"m": {chat}, "t": {tools}}}', f'{{"m": {parts}, "t": null}}', f'{{"m": {chat}, "t": null}}']
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.jsonl").write_text("\n".join(rows))
    corpus = prepare_folder(tmp_path / "in", template, messages_field="m", tools_field="t")
    assert [corpus.source(document).offset for document in range(corpus.num_documents)] == [1, 9]
    reasons = dict(reasons_of(corpus))
    assert reasons.keys() == {2, 3, 4, 5, 6, 7, 8}
    assert all("nested" in reason for reason in reasons.values()) and "tools" in reasons[7]


def test_parquet_values_without_a_python_equivalent_are_left_out(tmp_path: Path) -> None:
    raw = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pa.py_buffer(b"ok\xff\xfe")]
    )
    (tmp_path / "a").mkdir()
    pq.write_table(pa.table({"text": raw}), tmp_path / "a" / "raw.parquet")
    corpus = prepare_folder(tmp_path / "a")
    assert corpus.num_documents == 1
    assert [reason for _, reason in reasons_of(corpus)] == ["not UTF-8: byte 0xff at offset 0"]
    kind = pa.list_(pa.struct({"role": pa.string(), "content": pa.string(), "at": pa.timestamp("us")}))
    chats = [[{**ANSWER, "at": at}] for at in (2**62, 0)]
    (tmp_path / "b" / "in").mkdir(parents=True)
    pq.write_table(pa.table({"m": pa.array(chats, kind)}), tmp_path / "b" / "in" / "times.parquet")
    corpus = prepare_folder(tmp_path / "b" / "in", messages_field="m")
    assert [reason for _, reason in reasons_of(corpus)] == ["the messages can't be read: date value out of range"]


def test_columns_of_a_wrong_type_are_left_out_and_repeated_columns_refused(tmp_path: Path) -> None:
    columns = {"text": ["one", "two"], "translation": [{"de": "b"}, None], "_id": [{"oid": 1}, None]}
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "in" / "rows.parquet")
    corpus = prepare_folder(tmp_path / "in", text_field="text", id_field="_id")
    assert reasons_of(corpus) == [(1, "the id is of type dict, not a string or an integer")]
    with pytest.raises(UserError, match=r"2 were left out: the text is of type dict"):
        prepare_folder(tmp_path / "in", out=tmp_path / "other", text_field="translation")
    twice = pa.Table.from_arrays([pa.array(["one"]), pa.array(["two"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"^--text-field=text: .*rows\.parquet has several columns"):
        prepare_folder(tmp_path / "rows.parquet")


HOSTILE: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: rng.choice(["", "a text", "\x00", "\ufeff", "\u2028", "<|im_end|>", "{{ 7 * 7 }}", "\U0010ffff"]),
    lambda rng: rng.choice([None, True, 0, -1, 257, 1 << 70, 1e400, float("nan"), 1.5]),
    lambda rng: "\ud800" * rng.randrange(1, 3),
    lambda rng: [rng.choice([1, 2, 300, -5, "x", None]) for _ in range(rng.randrange(4))],
    lambda rng: json.loads(nested(rng.choice([3, 90, 101, 600]))),
    lambda rng: {rng.choice(["role", "content", "type", "\udfff", ""]): hostile(rng) for _ in range(rng.randrange(4))},
    lambda rng: {"role": rng.choice(["user", "assistant", "tool", "x", ""]), "content": hostile(rng)},
    lambda rng: [{"role": rng.choice(["user", "assistant"]), "content": hostile(rng), "tool_calls": hostile(rng)}],
    lambda rng: [{"role": "assistant", "content": [{"type": rng.choice(["text", 5, None]), "text": hostile(rng)}]}],
    lambda rng: [{"role": "user", "content": "q"}, {**ANSWER, "weight": hostile(rng), "name": hostile(rng)}],
)


def hostile(rng: random.Random) -> Any:
    return rng.choice(HOSTILE)(rng)


FIELDS = {
    "text": {"text_field": "a"},
    "tokens": {"tokens_field": "a", "labels_field": "b"},
    "chat": {"messages_field": "a", "tools_field": "b"},
    "prompt": {"prompt_field": "a", "completion_field": "b", "id_field": "c"},
}


@pytest.mark.parametrize("kind", FIELDS)
def test_each_of_many_random_rows_is_stored_or_named(tmp_path: Path, kind: str) -> None:
    rng = random.Random(7)
    rows = [{name: hostile(rng) for name in "abc" if rng.random() < 0.95} for _ in range(400)]
    rows.append({"a": [{"role": "user", "content": "the fox?"}, ANSWER], "b": None})
    rows += [{"a": "the dog", "b": "jumps"}, {"a": [1, 2], "b": [-100, 2]}]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = str(chat_tokenizer(tmp_path / "tokenizer", TOOL_BLOCK + CHATML))
    corpus = prepare_folder(tmp_path / "in", template, **FIELDS[kind])
    offsets = [corpus.source(document).offset for document in range(corpus.num_documents)]
    left_out = [offset for offset, _ in reasons_of(corpus)]
    assert sorted(offsets + left_out) == list(range(1, len(rows) + 1))


def test_an_internal_error_in_a_unit_is_reported_in_one_line_with_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("text")
    request = PrepareRequest(sources=SourceSpec(paths=(str(tmp_path),)), out=tmp_path / "out")
    (unit,) = begin(request).units

    def faulty(*_: object) -> None:
        raise KeyError("of ours\nin two lines")

    monkeypatch.setattr(prepare_job, "write_unit", faulty)
    answer = prepare_job._run_unit(unit, out=request.out, tokenizer="bytes", options=request.encoding)
    assert str(answer) == rf"unit 0 of {request.out} ({tmp_path}/0.txt and 1 more): KeyError: 'of ours\nin two lines'"
    monkeypatch.setattr(prepare_job, "_run_units", lambda *_: iter([answer]))
    with pytest.raises(RunError, match=r"0\.txt and 1 more\): KeyError"), preparing(request) as preparation:
        prepare_job.run_preparation(preparation)


def test_random_columns_of_parquet_are_stored_or_named(tmp_path: Path) -> None:
    rng = random.Random(3)
    simple = [
        *((pa.string(), "a"), (pa.int64(), 3), (pa.binary(), b"\xff"), (pa.timestamp("us"), 2**62)),
        *((pa.date64(), datetime.date(2024, 1, 2)), (pa.float32(), 0.5), (pa.decimal128(9, 2), None)),
    ]

    def column(depth: int) -> tuple[pa.DataType, Any]:
        kind = rng.randrange(len(simple) + 4 * (depth > 0))
        if kind < len(simple):
            return simple[kind][0], rng.choice([simple[kind][1], None])
        inner, value = column(depth - 1)
        return [
            (pa.list_(inner), [value] * rng.randrange(3)),
            (pa.map_(pa.string(), inner), [("k", value)]),
            (pa.list_(pa.struct({"type": inner, "text": pa.string()})), [{"type": value, "text": "a"}]),
            (pa.list_(pa.struct({"role": pa.string(), "content": inner})), [{"role": "assistant", "content": value}]),
        ][kind - len(simple)]

    for number in range(60):
        (folder := tmp_path / str(number) / "in").mkdir(parents=True)
        columns = {name: column(3) for name in "abc"}
        table = {name: pa.array([value, value, None], kind) for name, (kind, value) in columns.items()}
        pq.write_table(pa.table(table), folder / "rows.parquet")
        (folder / "rows.jsonl").write_text('{"a": [{"role": "assistant", "content": "x"}], "b": null}\n')
        outcome = ""
        try:
            corpus = prepare_folder(folder, **rng.choice([*FIELDS.values()]))
        except UserError as error:
            outcome = str(error)
        if outcome:
            assert "the sources contain no usable document: 4 were left out: " in outcome
        else:
            assert corpus.num_documents + corpus.info.num_quarantined == 4


def test_the_home_directory_of_an_unknown_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    plain = PrepareRequest(sources=SourceSpec(paths=(str(tmp_path / "a.txt"),)), out=tmp_path / "out")
    for change in (
        {"sources": SourceSpec(paths=("~nobody-at-all/a",))},
        {"out": Path("~nobody-at-all/out")},
        {"tokenizer": "~nobody-at-all/tokenizer"},
        {"without": ("~nobody-at-all/corpus",)},
    ):
        with pytest.raises(UserError, match="home directory of a user that does not exist on this machine"):
            begin(replace(plain, **change))
    with pytest.raises(UserError, match="refers to the home directory"):
        Corpus.open("~nobody-at-all/corpus")
