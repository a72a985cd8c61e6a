"""Other tools' data sets are recognized and refused instead of being read as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_ulysses.data.sources.extraction import RawDocument, read_unit
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec, list_units
from ray_ulysses.errors import UserError

TEXTS = ["the first text " * 40, "the second text " * 40]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
CARD = "---\nlanguage: en\nlicense: mit\nconfigs:\n- config_name: default\n---\n# A data set\n"


def read(path: Path, fields: RowFields | None = None) -> tuple[list[str], dict[str, str]]:
    """Return a source's texts, and the reason for each file that is left out, by file name."""
    units, rejected = list_units(SourceSpec(paths=(str(path),), fields=fields or RowFields()))
    found = [one for unit in units for one in read_unit(unit)]
    texts = [str(one.content) for one in found if isinstance(one, RawDocument)]
    left_out = [*rejected, *(one for one in found if not isinstance(one, RawDocument))]
    return texts, {Path(one.source).name: getattr(one, "reason", "") for one in left_out}


def mds(folder: Path) -> None:
    shard = {"column_names": ["text"], "format": "mds", "raw_data": {"basename": "shard.00000.mds", "bytes": 1300}}
    (folder / "index.json").write_text(json.dumps({"shards": [shard | {"samples": 2}], "version": 2}))
    (folder / "shard.00000.mds").write_bytes(np.arange(6, dtype="<u4").tobytes() + "".join(TEXTS).encode())


def litdata(folder: Path) -> None:
    chunk = {"chunk_bytes": 1300, "chunk_size": 2, "dim": None, "filename": "chunk-0-0.bin"}
    (folder / "index.json").write_text(json.dumps({"chunks": [chunk], "config": {"data_format": ["str"]}}))
    (folder / "chunk-0-0.bin").write_bytes(np.arange(3, dtype="<u4").tobytes() + "".join(TEXTS).encode())


def megatron(folder: Path) -> None:
    (folder / "train_text_document.idx").write_bytes(b"MMIDIDX\x00\x00" + np.arange(8, dtype="<u8").tobytes())
    (folder / "train_text_document.bin").write_bytes(np.full(700, 65, dtype="<u2").tobytes())


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
    "mds": ("an MDS data set from MosaicML Streaming", mds),
    "litdata": ("a LitData data set", litdata),
    "datatrove": ("a tokenized datatrove data set", with_suffix("0_tokens.ds", "0.ds.index", "0.ds.metadata")),
    "webdataset": ("a tar archive, such as a WebDataset shard", with_suffix("shard-000000.tar")),
    "megatron": ("a tokenized Megatron-LM data set", megatron),
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


@pytest.mark.parametrize("write", [mds, litdata])
def test_files_that_an_index_does_not_list_are_read(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    (tmp_path / "notes.txt").write_text(TEXTS[0])
    (tmp_path / "rows.jsonl").write_text(LINES)
    texts, left_out = read(tmp_path)
    assert texts == [TEXTS[0], *TEXTS] and len([reason for reason in left_out.values() if reason]) == 2


@pytest.mark.parametrize("packed", ["c4.json.gz", "texts.txt.zst"])
def test_a_compressed_file_among_rows_is_left_out_with_the_reason(tmp_path: Path, packed: str) -> None:
    (tmp_path / packed).write_bytes(b"\x1f\x8b")
    with pytest.raises(UserError, match=rf"no source has rows.*{packed}, only \.jsonl\.gz"):
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
    for name, readme in (("one", CARD), ("two", "# A data set\n")):
        (tmp_path / name / "data").mkdir(parents=True)
        pq.write_table(pa.table({"text": [f"{name} {text}" for text in TEXTS]}), tmp_path / name / "data" / "a.parquet")
        (tmp_path / name / "README.md").write_text(readme)
    (tmp_path / "notes.txt").write_text("notes")
    texts, left_out = read(tmp_path)
    assert texts == ["notes", *(f"{name} {text}" for name in ("one", "two") for text in TEXTS)]
    assert left_out == {"README.md": "a text file in a Hub data set that has rows"}


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
