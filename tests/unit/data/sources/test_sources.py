from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from ray_ulysses.data.sources.extraction import RawDocument, read_unit
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import Rejected, SourceSpec, Unit, list_units, open_dataset
from ray_ulysses.errors import UserError
from ray_ulysses.storage.retry import is_transient
from tests.unit.data.corpora import write_texts


def read_all(units: tuple[Unit, ...]) -> tuple[list[RawDocument], list[Rejected]]:
    found = [one for unit in units for one in read_unit(unit)]
    return [d for d in found if isinstance(d, RawDocument)], [r for r in found if isinstance(r, Rejected)]


def texts_of(spec: SourceSpec, unit_bytes: int = 1 << 20) -> list[str]:
    return [document.content for document in read_all(list_units(spec, unit_bytes)[0])[0]]


def test_a_tree_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for name in ("b/two.py", "a/one.py", "three.py", "b/skip.txt", ".git/x.py", "__pycache__/y.py", "b/gen/z.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    spec = SourceSpec(paths=(str(tmp_path),), pattern="*.py", exclude=(".*", "__pycache__", "gen"))
    assert texts_of(spec) == ["three.py", "a/one.py", "b/two.py"]
    assert texts_of(SourceSpec(paths=(str(tmp_path),), pattern="**/*.py", exclude=spec.exclude)) == texts_of(spec)
    assert texts_of(SourceSpec(paths=(str(tmp_path),), pattern="b/*.py")) == ["b/two.py", "b/gen/z.py"]


@pytest.mark.parametrize("name", ["notes.txt", "rows.json"])
def test_a_compressed_text_is_left_out_with_the_reason(tmp_path: Path, name: str) -> None:
    text = b'[{"text": "hello"}]'
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text))
    (tmp_path / name).write_bytes(zstandard.compress(text))
    (tmp_path / "BZh.txt").write_text("BZh is how this text begins")
    documents, rejected = read_all(list_units(SourceSpec(paths=(str(tmp_path),)))[0])
    assert [document.content for document in documents] == ["BZh is how this text begins"]
    rule = "only .jsonl.gz and .jsonl.zst are read compressed; decompress it, or store its documents as JSON Lines"
    assert {(Path(one.source).name, one.reason) for one in rejected} == {
        (f"{name}.gz", f"compressed with gzip: {rule}"),
        (name, f"compressed with zstd: {rule}"),
    }


def test_units_are_about_as_large_as_asked_and_never_empty(tmp_path: Path) -> None:
    write_texts(tmp_path, ["x" * size for size in (400, 400, 400, 2000, 10)])
    units, _ = list_units(SourceSpec(paths=(str(tmp_path),)), 1000)
    assert [len(unit.files) for unit in units] == [2, 1, 1, 1]
    assert [unit.index for unit in units] == [0, 1, 2, 3]


def test_a_units_signature_changes_with_its_files(tmp_path: Path) -> None:
    write_texts(tmp_path, ["one", "two"])
    spec = SourceSpec(paths=(str(tmp_path),))
    before = list_units(spec)[0][0].signature
    assert list_units(spec)[0][0].signature == before
    (tmp_path / "text-0001.txt").write_text("changed")
    assert list_units(spec)[0][0].signature != before


def test_links_and_repeated_files_are_told_apart(tmp_path: Path) -> None:
    write_texts(tmp_path / "tree", ["one"])
    (tmp_path / "tree" / "zz-link.txt").symlink_to("text-0000.txt")
    (tmp_path / "tree" / "zz-broken.txt").symlink_to("nowhere")
    (tmp_path / "elsewhere.txt").write_text("from elsewhere")
    (tmp_path / "tree" / "zz-out.txt").symlink_to(tmp_path / "elsewhere.txt")
    spec = SourceSpec(paths=(str(tmp_path / "tree"), str(tmp_path / "elsewhere.txt")))
    units, rejected = list_units(spec)
    assert [document.content for document in read_all(units)[0]] == ["one", "from elsewhere"]
    assert [(Path(one.source).name, one.reason.split("/")[0]) for one in rejected] == [
        ("zz-broken.txt", "a broken symbolic link"),
        ("zz-link.txt", "the same file as "),
        ("elsewhere.txt", "the same file as "),
    ]


def test_text_that_is_no_text_is_left_out_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"good")
    (tmp_path / "b").write_bytes(b"latin \xe9")
    (tmp_path / "c").write_bytes(b"")
    units, _ = list_units(SourceSpec(paths=(str(tmp_path),)))
    documents, rejected = read_all(units)
    assert [document.content for document in documents] == ["good"]
    assert [one.reason for one in rejected] == ["not UTF-8: byte 0xe9 at offset 6", "empty"]


def packed(name: str, data: bytes) -> bytes:
    if name.endswith(".zst"):
        return zstandard.ZstdCompressor().compress(data)
    return gzip.compress(data) if name.endswith(".gz") else data


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz", "data.jsonl.zst", "data.ndjson.zst"])
def test_json_lines_are_read_and_bad_ones_left_out(tmp_path: Path, name: str) -> None:
    lines = [
        b'{"text": "one"}',
        b"",
        b"{broken",
        b'{"other": 1}',
        b'{"text": 5}',
        b'{"text": ""}',
        b'{"text": "\\ud800"}',
        b"[1]",
        b'{"text": "\xff"}',
        '{"text": "zwölf"}'.encode(),
    ]
    data = b"\n".join(lines) + b"\n"
    (tmp_path / name).write_bytes(packed(name, data))
    documents, rejected = read_all(list_units(SourceSpec(paths=(str(tmp_path / name),)))[0])
    assert [(document.content, document.offset) for document in documents] == [("one", 1), ("zwölf", 10)]
    assert [(one.offset, one.reason.split(":")[0]) for one in rejected] == [
        (3, "not JSON"),
        (4, "no field 'text'"),
        (5, "the text is of type int, not a string"),
        (6, "empty"),
        (7, "a lone surrogate at character 0"),
        (8, "not a JSON object"),
        (9, "not UTF-8"),
    ]


@pytest.mark.parametrize("name", ["data.jsonl.gz", "data.jsonl.zst"])
@pytest.mark.parametrize("cut", [1, 20])
def test_a_truncated_packed_file_is_named(tmp_path: Path, name: str, cut: int) -> None:
    path = tmp_path / name
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(1000))
    path.write_bytes(packed(name, lines)[:-cut])
    with pytest.raises(
        UserError, match=rf"{re.escape(name)}: the JSONL file can't be read \(.+\); restore or remove it"
    ):
        read_all(list_units(SourceSpec(paths=(str(path),)))[0])


def test_a_file_that_is_not_zstd_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.zst"
    path.write_bytes(b'{"text": "not packed"}\n')
    with pytest.raises(UserError, match=r"data\.jsonl\.zst: the JSONL file can't be read"):
        read_all(list_units(SourceSpec(paths=(str(path),)))[0])


def test_zstd_frames_of_any_number_and_size_are_one_stream(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.zst"
    texts = ["a" * 300_000, "b", "c" * 70_000]
    frames = [zstandard.ZstdCompressor().compress(json.dumps({"text": text}).encode() + b"\n") for text in texts]
    path.write_bytes(b"".join(frames))
    assert texts_of(SourceSpec(paths=(str(path),))) == texts
    path.write_bytes(b"")
    assert texts_of(SourceSpec(paths=(str(path),))) == []


def parquet(path: Path, texts: list[str | None], row_group_size: int = 2) -> Path:
    pq.write_table(pa.table({"body": texts, "id": list(range(len(texts)))}), path, row_group_size=row_group_size)
    return path


def test_parquet_is_read_in_ranges_of_row_groups(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(7)]
    path = parquet(tmp_path / "data.parquet", texts)
    spec = SourceSpec(paths=(str(path),), fields=RowFields(text="body"))
    units, _ = list_units(spec, 1)
    assert [(unit.first, unit.last) for unit in units] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    documents, _ = read_all(units)
    assert [(document.content, document.offset) for document in documents] == list(zip(texts, range(1, 8), strict=True))
    assert texts_of(spec) == texts


@pytest.mark.parametrize(("num_rows", "num_bytes"), [(4000, 5000), (20, 1_000_000)], ids=["many rows", "long rows"])
def test_one_huge_row_group_is_read_in_little_memory(tmp_path: Path, num_rows: int, num_bytes: int) -> None:
    path = tmp_path / "data.parquet"
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(32, 127, num_bytes // 100))) * 100 for _ in range(num_rows)]
    pq.write_table(
        pa.table({"text": texts}),
        path,
        use_dictionary=False,
        compression="none",
        write_batch_size=1 if num_bytes > 1 << 16 else 16,
        data_page_size=1 << 16,
    )
    assert pq.read_metadata(path).num_row_groups == 1 and path.stat().st_size > 19_000_000
    (unit,) = list_units(SourceSpec(paths=(str(path),)))[0]
    before, most = pa.total_allocated_bytes(), 0
    for document, text in zip(read_unit(unit), texts, strict=True):
        assert isinstance(document, RawDocument) and document.content == text
        most = max(most, pa.total_allocated_bytes() - before)
    # The buffer, a page and a batch, each held twice while they are copied; the row group would be 20 MB.
    assert most < 12_000_000


def test_rows_without_text_are_left_out(tmp_path: Path) -> None:
    path = parquet(tmp_path / "data.parquet", ["one", None, ""])
    _, rejected = read_all(list_units(SourceSpec(paths=(str(path),), fields=RowFields(text="body")))[0])
    assert [(one.offset, one.reason) for one in rejected] == [
        (2, "the text is missing, not a string"),
        (3, "empty"),
    ]


def test_a_missing_column_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    path = parquet(tmp_path / "data.parquet", ["one"])
    with pytest.raises(
        UserError,
        match=r"--text-field=text: .*data\.parquet has .*; the fields are 'body', 'id'; use --text-field body",
    ):
        list_units(SourceSpec(paths=(str(path),)))


def test_an_unreadable_parquet_file_is_refused_before_any_work(tmp_path: Path) -> None:
    path = parquet(tmp_path / "data.parquet", ["one"])
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"data\.parquet: the Parquet file can't be read"):
        list_units(SourceSpec(paths=(str(path),), fields=RowFields(text="body")))


def test_parquet_that_is_damaged_inside_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = parquet(tmp_path / "data.parquet", [f"{n} " * 500 for n in range(100)], row_group_size=100)
    data = bytearray(path.read_bytes())
    data[4:400] = b"\xff" * 396
    path.write_bytes(data)
    units, _ = list_units(SourceSpec(paths=(str(path),), fields=RowFields(text="body")))
    with pytest.raises(UserError, match=r"data\.parquet: the Parquet file can't be read"):
        read_all(units)


def test_a_byte_of_a_parquet_page_that_was_flipped_is_noticed_by_the_checksum_of_the_page(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    table = pa.table({"text": [f"document {number}" for number in range(100)]})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    clean = path.read_bytes()
    assert len(texts_of(SourceSpec(paths=(str(path),)))) == 100
    path.write_bytes(clean.replace(b"document 57", b"document 75"))
    units, _ = list_units(SourceSpec(paths=(str(path),)))
    with pytest.raises(UserError, match=r"data\.parquet: the Parquet file can't be read"):
        read_all(units)


def test_a_missing_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: no such file or directory"):
        list_units(SourceSpec(paths=(str(tmp_path / "nowhere"),)))


def test_a_saved_dataset_is_read_in_ranges_of_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = [f"document {number}" for number in range(10)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "set"))
    spec = SourceSpec(paths=(str(tmp_path / "set"),))
    units, _ = list_units(spec, 60)
    assert len(units) > 1
    documents, _ = read_all(units)
    assert [(document.content, document.offset) for document in documents] == list(
        zip(texts, range(1, 11), strict=True)
    )
    with pytest.raises(
        UserError, match=r"--text-field=body: .* has no such column; the fields are 'text'; use --text-field text"
    ):
        list_units(SourceSpec(paths=(str(tmp_path / "set"),), fields=RowFields(text="body")))


def test_a_dataset_of_several_splits_needs_a_choice(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"text": ["one"]})
    two = datasets.Dataset.from_dict({"text": ["two"]})
    datasets.DatasetDict({"train": one, "test": two}).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(UserError, match=r"has the splits test, train; choose one of them"):
        list_units(SourceSpec(paths=(str(tmp_path / "set"),)))
    assert texts_of(SourceSpec(paths=(str(tmp_path / "set"),), split="test")) == ["two"]


def test_a_saved_dataset_that_lacks_a_part_is_refused_and_one_that_is_away_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"text": ["one"]})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "set"))
    load = datasets.load_from_disk
    for lost in ("test/data-00000-of-00001.arrow", "test/state.json", "test"):
        (tmp_path / "set" / lost).rename(tmp_path / "gone")
        with pytest.raises(UserError, match=r"FileNotFoundError: .*set/test/"):
            list_units(SourceSpec(paths=(str(tmp_path / "set"),), split="train"))
        (tmp_path / "gone").rename(tmp_path / "set" / lost)

    def away(path: str) -> None:
        raise FileNotFoundError(f"Directory {path} is neither a `Dataset` directory nor a `DatasetDict` directory.")

    monkeypatch.setattr(datasets, "load_from_disk", away)
    with pytest.raises(OSError, match="is neither") as caught:
        open_dataset(str(tmp_path / "set"), "train")
    assert is_transient(caught.value)
    monkeypatch.setattr(datasets, "load_from_disk", load)
    assert open_dataset(str(tmp_path / "set"), "train")[0]["text"][:] == ["one"]


def test_links_to_folders_are_followed_and_none_leads_in_a_circle(tmp_path: Path) -> None:
    write_texts(tmp_path / "tree" / "a" / "deep", ["in the tree"])
    write_texts(tmp_path / "elsewhere" / "inner", ["from elsewhere"])
    (tmp_path / "tree" / "a" / "b-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "tree" / "a" / "c-up").symlink_to(tmp_path / "tree")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "tree" / "a")
    (tmp_path / "tree" / "z-link").symlink_to("a/deep")
    (tmp_path / "tree" / "z-self").symlink_to("z-self")
    units, rejected = list_units(SourceSpec(paths=(str(tmp_path / "tree"),)))
    assert [document.content for document in read_all(units)[0]] == ["from elsewhere", "in the tree"]
    below = [(one.source.removeprefix(f"{tmp_path}/tree/"), one.reason.replace(str(tmp_path), "")) for one in rejected]
    assert below == [
        ("z-self", "a broken symbolic link"),
        ("a/c-up", "a link to one of its own parent folders"),
        ("a/b-link/back", "a link to one of its own parent folders"),
        ("z-link/text-0000.txt", "the same file as /tree/a/deep/text-0000.txt"),
    ]


CHAT = {"m": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def test_text_files_among_rows_of_chats_are_left_out_by_name(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# About")
    (tmp_path / "stats.json").write_text('{"rows": 1}')
    (tmp_path / "other.json").write_text('[{"text": "no chat"}]')
    (tmp_path / "rows.json").write_text(json.dumps([CHAT, {"n": 1}]))
    (tmp_path / "train.jsonl").write_text(json.dumps(CHAT))
    spec = SourceSpec(paths=(str(tmp_path),), fields=RowFields(messages="m"))
    units, listed = list_units(spec)
    documents, rejected = read_all(units)
    assert [(Path(one.source).name, one.offset) for one in documents] == [("rows.json", 1), ("train.jsonl", 1)]
    assert [(Path(one.source).name, one.offset, one.reason) for one in (*listed, *rejected)] == [
        ("README.md", 0, "a text file: --messages-field='m' asks for rows"),
        ("other.json", 0, "no row in it: no field 'm': the fields are 'text'; use --text-field text"),
        ("rows.json", 2, "no field 'm': the fields are 'n'"),
        ("stats.json", 0, "no row in it: no field 'm': the fields are 'rows'"),
    ]


def test_a_json_list_of_rows_is_rows_and_any_other_json_is_text(tmp_path: Path) -> None:
    texts = {
        "a.json": '\ufeff [{"text": "one"}, {"text": "two"}, {"no": "text"}]',
        "b.json": '[{"name": "x"}]',
        "c.json": '["text"]',
        "d.json": '{"text": "an object"}',
        "f.json": "[]",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    documents, rejected = read_all(list_units(SourceSpec(paths=(str(tmp_path),)))[0])
    assert [(one.content, one.offset) for one in documents] == [
        ("one", 1),
        ("two", 2),
        *((texts[name], 0) for name in ("b.json", "c.json", "d.json", "f.json")),
    ]
    assert [(one.offset, one.reason) for one in rejected] == [(3, "no field 'text': the fields are 'no'")]
    plain = SourceSpec(paths=(str(tmp_path),), kind="text")
    assert texts_of(plain) == [text.removeprefix("\ufeff") for text in texts.values()]


def test_json_lines_in_a_json_file_are_rows(tmp_path: Path) -> None:
    lines = ['{"text": "one"}', "", '{"text": "two"}', '{"no": "text"}', '{"text": "torn']
    (tmp_path / "rows.json").write_text("\n".join(lines))
    (tmp_path / "one.json").write_text(lines[0] + "\n")
    documents, rejected = read_all(list_units(SourceSpec(paths=(str(tmp_path),)))[0])
    assert [(one.content, one.offset) for one in documents] == [(lines[0] + "\n", 0), ("one", 1), ("two", 3)]
    assert [(one.offset, one.reason.partition(":")[0]) for one in rejected] == [(4, "no field 'text'"), (5, "not JSON")]


@pytest.mark.parametrize("name", ["data.JSONL", "data.jsonl.GZ", "DATA.NDJSON.ZST"])
def test_a_suffix_in_capitals_is_the_same_suffix(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(packed(name.lower(), b'{"text": "one"}\n'))
    assert texts_of(SourceSpec(paths=(str(tmp_path),)), 4) == ["one"]


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz", "data.jsonl.zst"])
@pytest.mark.parametrize("unit_bytes", [5, 1 << 20])
def test_a_byte_order_mark_costs_no_row_and_is_in_no_text(tmp_path: Path, name: str, unit_bytes: int) -> None:
    rows = "".join(json.dumps({"text": text}) + "\n" for text in ("one", "two"))
    (tmp_path / name).write_bytes(packed(name, ("\ufeff" + rows).encode()))
    assert texts_of(SourceSpec(paths=(str(tmp_path / name),)), unit_bytes) == ["one", "two"]
    (tmp_path / "a.txt").write_text("\ufeffa text\ufeff")
    assert texts_of(SourceSpec(paths=(str(tmp_path / "a.txt"),))) == ["a text\ufeff"]


def test_a_split_of_what_has_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    refused = r"^--split=test: counts for data sets with splits only, and no source is one; leave it out$"
    with pytest.raises(UserError, match=refused):
        list_units(SourceSpec(paths=(str(tmp_path / "rows.jsonl"),), split="test"))
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["one"]}).save_to_disk(str(tmp_path / "single"))
    with pytest.raises(UserError, match=refused):
        list_units(SourceSpec(paths=(str(tmp_path / "rows.jsonl"), str(tmp_path / "single")), split="test"))


def test_a_split_counts_for_the_data_sets_that_have_some(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one, two, three = (datasets.Dataset.from_dict({"text": [text]}) for text in ("one", "two", "three"))
    datasets.DatasetDict({"train": one, "test": two}).save_to_disk(str(tmp_path / "set"))
    three.save_to_disk(str(tmp_path / "single"))
    both = SourceSpec(paths=(str(tmp_path / "set"), str(tmp_path / "single")), split="test")
    assert texts_of(both) == ["two", "three"]
    for own in ("test", "train[:10%]"):
        path = str(tmp_path / own)
        datasets.Dataset(three.data, split=own).save_to_disk(path)
        assert texts_of(SourceSpec(paths=(path,), split=own)) == texts_of(SourceSpec(paths=(path,))) == ["three"]
        with pytest.raises(UserError) as error:
            list_units(SourceSpec(paths=(path,), split="train"))
        assert str(error.value) == (
            f"--split=train: the data set {path} holds the split {own} alone; choose that one, or leave it out"
        )
