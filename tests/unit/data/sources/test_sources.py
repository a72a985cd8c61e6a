from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
from tests.hub_server import AWAY, refuse_waits, serve_hub, use_hub
from tests.unit.data.corpora import write_texts
from tests.unit.data.tool_files import write_mds, write_megatron

BODY = RowFields(text="body")


def spec_of(*paths: Path, **options: Any) -> SourceSpec:
    return SourceSpec(paths=tuple(map(str, paths)), **options)


def read_all(units: tuple[Unit, ...]) -> tuple[list[RawDocument], list[Rejected]]:
    found = [one for unit in units for one in read_unit(unit)]
    return [d for d in found if isinstance(d, RawDocument)], [r for r in found if isinstance(r, Rejected)]


def texts_of(spec: SourceSpec, unit_bytes: int = 1 << 20) -> list[object]:
    return [document.content for document in read_all(list_units(spec, unit_bytes)[0])[0]]


def places(rejected: Sequence[Rejected]) -> list[tuple[int, str]]:
    return [(one.offset, one.reason.split(":")[0]) for one in rejected]


def named(rejected: Sequence[Rejected]) -> list[tuple[str, str]]:
    return [(Path(one.source).name, one.reason.split("/")[0].split(":")[0]) for one in rejected]


def test_a_tree_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for name in ("b/two.py", "a/one.py", "three.py", "b/skip.txt", ".git/x.py", "__pycache__/y.py", "b/gen/z.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    exclude = (".*", "__pycache__", "gen")
    for pattern in ("*.py", "**/*.py"):
        assert texts_of(spec_of(tmp_path, pattern=pattern, exclude=exclude)) == ["three.py", "a/one.py", "b/two.py"]
    assert texts_of(spec_of(tmp_path, pattern="b/*.py")) == ["b/two.py", "b/gen/z.py"]


@pytest.mark.parametrize("name", ["notes.txt", "rows.json"])
def test_a_compressed_text_is_left_out_with_the_reason(tmp_path: Path, name: str) -> None:
    text = b'[{"text": "hello"}]'
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text))
    (tmp_path / name).write_bytes(zstandard.compress(text))
    (tmp_path / "BZh.txt").write_text("BZh is how this text begins")
    documents, rejected = read_all(list_units(spec_of(tmp_path))[0])
    assert [document.content for document in documents] == ["BZh is how this text begins"]
    assert set(named(rejected)) == {(f"{name}.gz", "compressed with gzip"), (name, "compressed with zstd")}


def test_units_have_about_the_requested_size_and_are_never_empty(tmp_path: Path) -> None:
    write_texts(tmp_path, ["x" * size for size in (400, 400, 400, 2000, 10)])
    units, _ = list_units(spec_of(tmp_path), 1000)
    assert [(unit.index, len(unit.files)) for unit in units] == [(0, 2), (1, 1), (2, 1), (3, 1)]


def test_links_are_followed_without_circles_and_each_file_is_read_once(tmp_path: Path) -> None:
    write_texts(tmp_path / "tree" / "a" / "deep", ["in the tree"])
    write_texts(tmp_path / "elsewhere" / "inner", ["from elsewhere"])
    (tmp_path / "tree" / "a" / "b-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "tree" / "a" / "c-up").symlink_to(tmp_path / "tree")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "tree" / "a")
    (tmp_path / "tree" / "y-file").symlink_to("a/deep/text-0000.txt")
    (tmp_path / "tree" / "z-link").symlink_to("a/deep")
    (tmp_path / "tree" / "z-self").symlink_to("z-self")
    again = tmp_path / "elsewhere/inner/text-0000.txt"
    units, rejected = list_units(spec_of(tmp_path / "tree", again))
    assert sorted(str(document.content) for document in read_all(units)[0]) == ["from elsewhere", "in the tree"]
    assert sorted(named(rejected)) == [
        ("back", "a symbolic link to one of its own parent folders"),
        ("c-up", "a symbolic link to one of its own parent folders"),
        *[("text-0000.txt", "the same file as ")] * 3,
        ("z-self", "a broken symbolic link"),
    ]


def test_files_that_are_not_text_are_left_out_with_the_reason(tmp_path: Path) -> None:
    token_ids = np.full(700, 65, dtype="<u2").tobytes()
    files = {"a": b"\xef\xbb\xbfgood\xef\xbb\xbf", "b": b"latin \xe9", "c": b"", "d.bin": token_ids}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    documents, rejected = read_all(list_units(spec_of(tmp_path))[0])
    assert [document.content for document in documents] == ["good\ufeff"]
    reasons = ["not UTF-8: byte 0xe9 at offset 6", "empty", "a binary file: NUL at character 1"]
    assert [one.reason for one in rejected] == reasons


def packed(name: str, data: bytes) -> bytes:
    if name.endswith(".zst"):
        return zstandard.ZstdCompressor().compress(data)
    return gzip.compress(data) if name.endswith(".gz") else data


@pytest.mark.parametrize("name", ["data.jsonl", "data.JSONL.gz", "data.ndjson.ZST"])
def test_json_lines_are_read_and_bad_ones_left_out(tmp_path: Path, name: str) -> None:
    lines = [
        '\ufeff{"text": "one"}'.encode(),
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
    (tmp_path / name).write_bytes(packed(name.lower(), b"\n".join(lines) + b"\n"))
    documents, rejected = read_all(list_units(spec_of(tmp_path / name))[0])
    assert [(document.content, document.offset) for document in documents] == [("one", 1), ("zwölf", 10)]
    num_units = len(list_units(spec_of(tmp_path / name), 50)[0])
    assert (num_units > 1) == (name == "data.jsonl"), "a compressed file is one unit"
    assert places(rejected) == [
        (3, "not JSON"),
        (4, "no field 'text'"),
        (5, "the text is of type int, not a string"),
        (6, "empty"),
        (7, "a lone surrogate at character 0"),
        (8, "not a JSON object"),
        (9, "not UTF-8"),
    ]


@pytest.mark.parametrize("name", ["data.jsonl.gz", "data.jsonl.zst"])
def test_a_truncated_or_mislabeled_compressed_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(1000))
    for data in (packed(name, lines)[:-1], packed(name, lines)[:-20], lines):
        path.write_bytes(data)
        with pytest.raises(UserError, match=rf"{name}: the JSONL file can't be read"):
            read_all(list_units(spec_of(path))[0])


def test_several_zstd_frames_are_one_stream(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.zst"
    texts = ["a" * 300_000, "b", "c" * 70_000]
    path.write_bytes(b"".join(packed(path.name, json.dumps({"text": text}).encode() + b"\n") for text in texts))
    assert texts_of(spec_of(path)) == texts
    path.write_bytes(b"")
    assert texts_of(spec_of(path)) == []


def parquet(path: Path, texts: list[str | None], row_group_size: int = 2, **options: Any) -> Path:
    table = pa.table({"body": texts, "id": list(range(len(texts)))})
    pq.write_table(table, path, row_group_size=row_group_size, **options)
    return path


def test_parquet_is_read_in_ranges_of_row_groups(tmp_path: Path) -> None:
    texts = [*(f"document {number}" for number in range(5)), None, ""]
    path = parquet(tmp_path / "data.parquet", texts)
    units, _ = list_units(spec_of(path, fields=BODY), 1)
    assert [(unit.first, unit.last) for unit in units] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    documents, rejected = read_all(units)
    found = [(document.content, document.offset) for document in documents]
    assert found == list(zip(texts[:5], range(1, 6), strict=True))
    assert places(rejected) == [(6, "the text is missing, not a string"), (7, "empty")]
    assert texts_of(spec_of(path, fields=BODY)) == texts[:5]
    with pytest.raises(UserError, match=r"--text-field=text: .*data\.parquet.* 'body', 'id'; use --text-field body"):
        list_units(spec_of(path))


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
    (unit,) = list_units(spec_of(path))[0]
    before, most = pa.total_allocated_bytes(), 0
    for document, text in zip(read_unit(unit), texts, strict=True):
        assert isinstance(document, RawDocument) and document.content == text
        most = max(most, pa.total_allocated_bytes() - before)
    # The buffer, a page and a batch, each twice during copying. The complete row group takes 20 MB.
    assert most < 12_000_000


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    parquet(path, [f"{n} " * 500 for n in range(100)], 100)
    damaged = bytearray(path.read_bytes())
    damaged[4:400] = b"\xff" * 396
    parquet(path, ["document 57"], compression="none", use_dictionary=False, write_page_checksum=True)
    whole = path.read_bytes()
    for data in (bytes(damaged), whole.replace(b"document 57", b"document 75")):
        path.write_bytes(data)
        units, _ = list_units(spec_of(path, fields=BODY))
        with pytest.raises(UserError, match=r"data\.parquet: the Parquet file can't be read"):
            read_all(units)
    path.write_bytes(whole[:-8])
    with pytest.raises(UserError, match=r"data\.parquet: the Parquet file can't be read"):
        list_units(spec_of(path, fields=BODY))


def saved(path: Path, *texts: str, split: str | None = None, **splits: str) -> Path:
    datasets = pytest.importorskip("datasets")
    if splits:
        found = {name: datasets.Dataset.from_dict({"text": [text]}) for name, text in splits.items()}
        datasets.DatasetDict(found).save_to_disk(str(path))
    else:
        table = datasets.Dataset.from_dict({"text": list(texts)}).data
        datasets.Dataset(table, split=split).save_to_disk(str(path))
    return path


def test_a_saved_dataset_is_read_in_ranges_of_rows(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(10)]
    path = saved(tmp_path / "set", *texts)
    units, _ = list_units(spec_of(path), 60)
    assert len(units) > 1
    found = [(document.content, document.offset) for document in read_all(units)[0]]
    assert found == list(zip(texts, range(1, 11), strict=True))
    with pytest.raises(UserError, match=r"--text-field=body: .*; use --text-field text"):
        list_units(spec_of(path, fields=BODY))


def test_an_incomplete_saved_data_set_is_refused_and_an_unreachable_one_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    path = saved(tmp_path / "set", train="one", test="one")
    load = datasets.load_from_disk
    for lost in ("test/data-00000-of-00001.arrow", "test/state.json", "test"):
        (path / lost).rename(tmp_path / "gone")
        with pytest.raises(UserError, match=r"FileNotFoundError: .*set/test/"):
            list_units(spec_of(path, split="train"))
        (tmp_path / "gone").rename(path / lost)

    def away(path: str) -> None:
        raise FileNotFoundError(f"Directory {path} is neither a `Dataset` directory nor a `DatasetDict` directory.")

    monkeypatch.setattr(datasets, "load_from_disk", away)
    with pytest.raises(OSError, match="is neither") as caught:
        open_dataset(str(path), "train")
    assert is_transient(caught.value)
    monkeypatch.setattr(datasets, "load_from_disk", load)
    assert open_dataset(str(path), "train")[0]["text"][:] == ["one"]


def test_a_split_is_required_only_if_there_are_several(tmp_path: Path) -> None:
    splits, single = saved(tmp_path / "set", train="one", test="two"), saved(tmp_path / "single", "three")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    assert texts_of(spec_of(splits, split="test")) == ["two"]
    assert texts_of(spec_of(splits, single, split="test")) == ["two", "three"]
    with pytest.raises(UserError, match="has the splits test, train"):
        list_units(spec_of(splits))
    for paths in ([tmp_path / "rows.jsonl"], [tmp_path / "rows.jsonl", single]):
        with pytest.raises(UserError, match=r"^--split=test: "):
            list_units(spec_of(*paths, split="test"))
    for own in ("test", "train[:10%]"):
        path = saved(tmp_path / own, "four", split=own)
        assert texts_of(spec_of(path, split=own)) == texts_of(spec_of(path)) == ["four"]
        with pytest.raises(UserError, match=r"^--split=train: the dataset"):
            list_units(spec_of(path, split="train"))


def test_text_files_among_rows_are_left_out_by_name(tmp_path: Path) -> None:
    chat = {"m": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    spec = spec_of(tmp_path, fields=RowFields(messages="m"))
    (tmp_path / "README.md").write_text("# About")
    with pytest.raises(UserError, match="--messages-field='m'"):
        list_units(spec)
    files = {
        "stats.json": '{"rows": 1}',
        "other.json": '[{"text": "no chat"}]',
        "rows.json": json.dumps([chat, {"n": 1}]),
        "train.jsonl": json.dumps(chat),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    units, listed = list_units(spec)
    documents, rejected = read_all(units)
    assert [(Path(one.source).name, one.offset) for one in documents] == [("rows.json", 1), ("train.jsonl", 1)]
    assert named([*listed, *rejected]) == [
        ("README.md", "a text file, but --messages-field='m' requires rows"),
        ("other.json", "no row has the required fields"),
        ("rows.json", "no field 'm'"),
        ("stats.json", "no row has the required fields"),
    ]
    assert rejected[0].reason.endswith("use --text-field text")


def test_json_lists_and_lines_of_rows_are_rows_and_other_json_is_text(tmp_path: Path) -> None:
    texts = {
        "a.json": '\ufeff [{"text": "one"}, {"text": "two"}, {"no": "text"}]',
        "b.json": '[{"name": "x"}]',
        "c.json": '["text"]',
        "d.json": '{"data": [\n{"text": "an object"}\n]}\n',
        "e.json": '{"text": "three"}\n\n{"text": "four"}\n{"no": "text"}\n{"text": "torn',
        "f.json": "[]",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    documents, rejected = read_all(list_units(spec_of(tmp_path))[0])
    assert [(one.content, one.offset) for one in documents] == [
        ("one", 1),
        ("two", 2),
        *((texts[name], 0) for name in ("b.json", "c.json", "d.json")),
        ("three", 1),
        ("four", 3),
        (texts["f.json"], 0),
    ]
    assert places(rejected) == [(3, "no field 'text'"), (4, "no field 'text'"), (5, "not JSON")]
    assert texts_of(spec_of(tmp_path, kind="text")) == [text.removeprefix("\ufeff") for text in texts.values()]
    (tmp_path / "torn.json").write_text(texts["a.json"][:-1])
    with pytest.raises(UserError, match=r"torn\.json: the JSON file can't be read"):
        texts_of(spec_of(tmp_path))


TEXTS = ["the first text " * 40, "the second text " * 40]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
CARD = "---\nlanguage: en\nlicense: mit\nconfigs:\n- config_name: default\n---\n# A dataset\n"


def read(path: Path, fields: RowFields | None = None) -> tuple[list[str], dict[str, str]]:
    """Return a source's texts, and the reason for each file that is left out, by file name."""
    units, rejected = list_units(SourceSpec(paths=(str(path),), fields=fields or RowFields()))
    found = [one for unit in units for one in read_unit(unit)]
    texts = [str(one.content) for one in found if isinstance(one, RawDocument)]
    left_out = [*rejected, *(one for one in found if not isinstance(one, RawDocument))]
    return texts, {Path(one.source).name: getattr(one, "reason", "") for one in left_out}


def streaming_json(folder: Path) -> None:
    shard = {"format": "json", "raw_data": {"basename": "shard.00000.json", "bytes": 1300}, "samples": 2}
    (folder / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))
    (folder / "shard.00000.json").write_text("".join(TEXTS))


def litdata(folder: Path) -> None:
    chunk = {"chunk_bytes": 1300, "chunk_size": 2, "dim": None, "filename": "chunk-0-0.bin"}
    (folder / "index.json").write_text(json.dumps({"chunks": [chunk], "config": {"data_format": ["str"]}}))
    (folder / "chunk-0-0.bin").write_bytes(np.arange(3, dtype="<u4").tobytes() + "".join(TEXTS).encode())


def brotli_mds(folder: Path) -> None:
    write_mds(folder, {"text": "str"}, [{"text": text} for text in TEXTS], packing="br")


def hub_cache(folder: Path) -> None:
    cache = folder / "datasets--owner--name"
    for name, text in (("blobs/1f", CARD), ("blobs/2e", TEXTS[0]), ("refs/main", "5d")):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_text(text)
    snapshot = cache / "snapshots" / "5d"
    snapshot.mkdir(parents=True)
    (snapshot / "README.md").symlink_to("../../blobs/1f")
    (snapshot / "train.jsonl").symlink_to("../../blobs/2e")


def with_suffix(*names: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in names:
            (folder / name).write_bytes(b"\x05\x00\x00" + "".join(TEXTS).encode())

    return write


FORMATS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "streaming": ("a MosaicML Streaming dataset in a format other than MDS", streaming_json),
    "brotli": ("a MosaicML Streaming dataset .* packed by other means", brotli_mds),
    "mds alone": ("an MDS shard that no index.json lists", with_suffix("shard.00000.mds")),
    "litdata": ("a LitData dataset", litdata),
    "datatrove": (
        "a part of a tokenized datatrove dataset",
        with_suffix("0_tokens.ds", "0.ds.index", "0.ds.metadata"),
    ),
    "webdataset": ("a tar archive, such as a WebDataset shard", with_suffix("shard-000000.tar")),
    "megatron": (
        "the index of a tokenized Megatron-LM dataset",
        lambda folder: write_megatron(folder / "a", [])[0].unlink(),
    ),
    "numpy": ("a NumPy array", with_suffix("tokens.npy")),
    "arrow": ("an Arrow file", with_suffix("data-00000-of-00001.arrow")),
    "tfrecord": ("a TFRecord file", with_suffix("train.tfrecord")),
    "zip": ("an archive", with_suffix("texts.zip")),
    "hub cache": ("an internal Hub cache folder", hub_cache),
}


@pytest.mark.parametrize("case", FORMATS)
def test_a_data_set_of_another_tool_is_refused_by_name_or_left_out_of_a_large_tree(tmp_path: Path, case: str) -> None:
    name, write = FORMATS[case]
    alone, tree = tmp_path / "alone", tmp_path / "tree"
    for folder in (alone, tree / "fixtures"):
        folder.mkdir(parents=True)
        write(folder)
    (alone / "README.md").write_text("# About these data\n")
    for fields in (RowFields(), RowFields(text="text")):
        with pytest.raises(UserError, match=rf"^source={alone}: is mostly {name}.* \({alone}/(?!README).*--exclude"):
            read(alone, fields)
    units, rejected = list_units(SourceSpec(paths=(str(alone),), kind="text"))
    assert units and not [one for one in rejected if name in one.reason], "an explicit kind overrides the suffix"
    source = "print('a text')\n" * 1000
    (tree / "main.py").write_text(source)
    left = {path.name for path in (tree / "fixtures").rglob("*") if path.is_file()}
    texts, left_out = read(tree)
    assert texts == [source] and left_out.keys() == left


@pytest.mark.parametrize("write", [streaming_json, litdata])
def test_files_that_an_index_does_not_list_are_read(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    (tmp_path / "notes.txt").write_text(TEXTS[0])
    (tmp_path / "rows.jsonl").write_text(LINES)
    texts, left_out = read(tmp_path)
    assert texts == [TEXTS[0], *TEXTS] and len([reason for reason in left_out.values() if reason]) == 2


@pytest.mark.parametrize("packed", ["c4.json.gz", "texts.txt.zst"])
def test_a_compressed_file_among_rows_is_left_out_with_the_reason(tmp_path: Path, packed: str) -> None:
    (tmp_path / packed).write_bytes(b"\x1f\x8b")
    with pytest.raises(UserError, match=rf"no source has any.*{packed}, only \.jsonl\.gz"):
        read(tmp_path, RowFields(text="text"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "one"}))
    texts, left_out = read(tmp_path, RowFields(text="text"))
    assert texts == ["one"] and left_out[packed].startswith("only .jsonl.gz")


@pytest.mark.parametrize("form", ["parquet", "json"])
def test_only_rows_are_read_from_a_hub_snapshot(tmp_path: Path, form: str) -> None:
    path = tmp_path / "data" / f"train.{form}"
    path.parent.mkdir()
    if form == "parquet":
        pq.write_table(pa.table({"text": TEXTS}), path)
    else:
        path.write_text(LINES)
    for name, text in (("README.md", CARD), ("LICENSE", "Free."), ("dataset_infos.json", '{"default": {}}')):
        (tmp_path / name).write_text(text)
    for fields in (RowFields(), RowFields(text="text")):
        texts, left_out = read(tmp_path, fields)
        assert texts == TEXTS
        assert left_out.keys() >= {"README.md", "LICENSE", "dataset_infos.json"}


def test_a_readme_next_to_parquet_is_left_out_even_if_it_is_not_a_data_set_card(tmp_path: Path) -> None:
    for name, readme in (("one", CARD), ("two", "# A dataset\n")):
        (tmp_path / name / "data").mkdir(parents=True)
        pq.write_table(pa.table({"text": [f"{name} {text}" for text in TEXTS]}), tmp_path / name / "data" / "a.parquet")
        (tmp_path / name / "README.md").write_text(readme)
    (tmp_path / "notes.txt").write_text("notes")
    texts, left_out = read(tmp_path)
    assert texts == ["notes", *(f"{name} {text}" for name in ("one", "two") for text in TEXTS)]
    assert left_out == {"README.md": "a text file in a Hub dataset that has rows"}


def hub_folder(folder: Path, configs: str, *names: str) -> Path:
    """Write a dataset card and a JSONL file of each name, whose rows contain the name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"text": name}))
    (folder / "README.md").write_text(f"---\nlicense: mit\nconfigs:\n{configs}---\n# About\n")
    return folder


ONE = "- config_name: default\n  data_files: 'data/**/*.jsonl'\n"
TWO = (
    "- config_name: {}\n  data_dir: {}\n  data_files:\n  - split: train\n    path: [a.jsonl, 'b*']\n"
    "  - split: test\n    path: t*\n"
)
FILES = ("data/a.jsonl", "data/b1.jsonl", "data/b/c.jsonl", "data/t.jsonl", "other/a.jsonl", "stray.jsonl")


@pytest.mark.parametrize(
    ("configs", "split", "expected"),
    [
        (ONE, None, {"data/a.jsonl", "data/b1.jsonl", "data/b/c.jsonl", "data/t.jsonl"}),
        (TWO.format("x", "data"), "train", {"data/a.jsonl", "data/b1.jsonl"}),
        (TWO.format("x", "data"), "test", {"data/t.jsonl"}),
        (TWO.format("y", "other") + TWO.format("default", "data"), "test", {"data/t.jsonl"}),
        (ONE + TWO.format("y", "other") + "  default: true\n", "train", {"other/a.jsonl"}),
        ("- config_name: z\n  data_dir: other\n", None, {"other/a.jsonl"}),
    ],
)
def test_a_hub_folder_is_read_by_the_data_files_of_its_card(
    tmp_path: Path, configs: str, split: str | None, expected: set[str]
) -> None:
    hub_folder(tmp_path / "set", configs, *FILES)
    (tmp_path / "beside.jsonl").write_text('{"text": "beside"}')
    units, rejected = list_units(SourceSpec(paths=(str(tmp_path),), split=split))
    found = {str(one.content) for unit in units for one in read_unit(unit) if isinstance(one, RawDocument)}
    assert found == expected | {"beside"}
    assert {one.source for one in rejected} == {
        str(tmp_path / "set" / name) for name in {*FILES, "README.md"} - expected
    }
    selected = SourceSpec(paths=(str(tmp_path / "set"),), pattern="stray*")
    assert [
        one.content for unit in list_units(selected)[0] for one in read_unit(unit) if isinstance(one, RawDocument)
    ] == ["stray.jsonl"], "--pattern overrides the card"


@pytest.mark.parametrize(
    ("configs", "split", "rule"),
    [
        (TWO.format("x", "data"), None, "has the splits test, train; set one"),
        (TWO.format("x", "data"), "dev", "--split=dev: .* has the splits test, train"),
        (TWO.format("x", "data") + TWO.format("y", "other"), "test", "has the subsets x, y and no default"),
        (TWO.format("x", "nowhere"), "test", r"lists for split test \(nowhere/t\*\)"),
        ("- config_name: [\n", None, "its front matter can't be read"),
        ("- config_name: " + "[" * 9999 + "\n", None, "its front matter can't be read"),
        ("- config_name: c\n  data_files: '*.csv'\n", None, r"stray\.csv: .* neither Parquet, .*--kind=datasets"),
    ],
)
def test_a_card_that_does_not_select_files_is_refused(
    tmp_path: Path, configs: str, split: str | None, rule: str
) -> None:
    hub_folder(tmp_path, configs, *FILES, "stray.csv")
    with pytest.raises(UserError, match=rule):
        list_units(SourceSpec(paths=(str(tmp_path),), split=split))


@pytest.mark.parametrize(
    ("readme", "beside"),
    [
        ("# A program\n", {"cases.jsonl": LINES}),
        (CARD, {"config.json": "{}"}),
        ("---\ntitle: A program\n---\n", {"package.json": '{"name": "x"}', "cases.jsonl": '{"text": "a row"}'}),
    ],
    ids=["rows", "configuration", "few rows"],
)
def test_a_source_tree_with_rows_or_a_configuration_keeps_its_texts(
    tmp_path: Path, readme: str, beside: dict[str, str]
) -> None:
    for name, text in {"README.md": readme, "main.py": "print('a text')\n" * 100, **beside}.items():
        (tmp_path / name).write_text(text)
    texts, left_out = read(tmp_path)
    assert readme in texts and len(texts) >= 2 + len(beside)
    assert not [name for name, reason in left_out.items() if reason]


ROWS = b"".join(json.dumps({"text": f"row {number}"}).encode() + b"\n" for number in range(5))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_a_hub_data_set_is_found_by_its_id_and_later_in_the_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "Owner/MyRows_2k"
    card = b"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: rows.jsonl\n---\n"
    files = {"README.md": card, "rows.jsonl": ROWS, "unused.jsonl": ROWS}
    with serve_hub({f"datasets/{name}": files}) as (address, _):
        use_hub(address, cache, monkeypatch)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", address)
        found = list_units(SourceSpec(paths=(name,)))
    (unit,), rejected = found
    assert (unit.kind, unit.first, unit.last, rejected) == ("datasets", 0, 5, ())
    assert "Generating" not in capfd.readouterr().err, "no progress bar"
    refuse_waits(monkeypatch)
    use_hub(AWAY, cache, monkeypatch)
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", AWAY)
    assert list_units(SourceSpec(paths=(name,))) == found


@pytest.mark.parametrize(
    ("kind", "path", "requests"),
    [
        ("auto", "owner/none", 1),
        ("auto", "none.jsonl", 1),
        ("auto", "here/none", 0),
        ("datasets", "/none/of/these", 0),
    ],
)
def test_a_source_that_is_neither_here_nor_on_the_hub_is_refused_after_one_request_at_most(
    kind: Any, path: str, requests: int, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    with serve_hub({}) as (address, asked):
        use_hub(address, cache, monkeypatch)
        with pytest.raises(UserError, match="no such file or directory") as refused:
            list_units(SourceSpec(paths=(path,), kind=kind))
        assert len(asked) == requests
    assert ("has no dataset with this id" in str(refused.value)) == (requests > 0)


def test_an_unreachable_hub_is_reported_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_waits(monkeypatch)
    use_hub(AWAY, cache, monkeypatch)
    with pytest.raises(UserError, match="does not respond"):
        list_units(SourceSpec(paths=("owner/rows",), kind="datasets"))
