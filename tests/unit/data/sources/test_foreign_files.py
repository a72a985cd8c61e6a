"""Data sets of other tools are recognized, and never become a corpus of the texts beside them."""

from __future__ import annotations

import io
import json
import tarfile
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
CARD = "---\nlanguage: en\nlicense: mit\nconfigs:\n- config_name: default\n---\n# A data set\n"


def read(path: Path, fields: RowFields | None = None) -> tuple[list[str], dict[str, str]]:
    """Return the texts of a source, and the reasons of the files that are left out, by name."""
    units, rejected = list_units(SourceSpec(paths=(str(path),), fields=fields or RowFields()))
    found = [one for unit in units for one in read_unit(unit)]
    texts = [str(one.content) for one in found if isinstance(one, RawDocument)]
    left_out = [*rejected, *(one for one in found if not isinstance(one, RawDocument))]
    return texts, {Path(one.source).name: getattr(one, "reason", "") for one in left_out}


def an_mds_data_set(folder: Path) -> None:
    shard = {"column_names": ["text"], "format": "mds", "raw_data": {"basename": "shard.00000.mds", "bytes": 1300}}
    (folder / "index.json").write_text(json.dumps({"shards": [shard | {"samples": 2}], "version": 2}))
    (folder / "shard.00000.mds").write_bytes(np.arange(6, dtype="<u4").tobytes() + "".join(TEXTS).encode())


def mds_in_another_format(folder: Path) -> None:
    shard = {"columns": {"text": "str"}, "format": "json", "raw_data": {"basename": "shard.00000.json", "bytes": 1300}}
    (folder / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}, indent=1))
    (folder / "shard.00000.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


def a_litdata_data_set(folder: Path) -> None:
    chunk = {"chunk_bytes": 1300, "chunk_size": 2, "dim": None, "filename": "chunk-0-0.bin"}
    (folder / "index.json").write_text(json.dumps({"chunks": [chunk], "config": {"data_format": ["str"]}}))
    (folder / "chunk-0-0.bin").write_bytes(np.arange(3, dtype="<u4").tobytes() + "".join(TEXTS).encode())


def a_datatrove_data_set(folder: Path) -> None:
    (folder / "00000_tokens.ds").write_bytes(np.full(700, 65, dtype="<u2").tobytes())
    (folder / "00000_tokens.ds.index").write_bytes(np.array([350, 700], dtype="<u8").tobytes())
    (folder / "00000_tokens.ds.metadata").write_text("gpt2|2\n700\n700 B")


def a_webdataset(folder: Path) -> None:
    with tarfile.open(folder / "shard-000000.tar", "w") as archive:
        for number, text in enumerate(TEXTS):
            entry = tarfile.TarInfo(f"{number:06d}.txt")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    (folder / "dataset.json").write_text('{"shards": 1}')


def a_megatron_data_set(folder: Path) -> None:
    (folder / "train_text_document.idx").write_bytes(b"MMIDIDX\x00\x00" + np.arange(8, dtype="<u8").tobytes())
    (folder / "train_text_document.bin").write_bytes(np.full(700, 65, dtype="<u2").tobytes())


def numpy_arrays(folder: Path) -> None:
    np.save(folder / "tokens.npy", np.full(700, 65, dtype=np.uint16))


def arrow_files(folder: Path) -> None:
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
        out.write_table(table)


def tf_records(folder: Path) -> None:
    (folder / "train.tfrecord").write_bytes(b"\x05\x00\x00\x00\x00\x00\x00\x00" + "".join(TEXTS).encode())


def an_archive(folder: Path) -> None:
    (folder / "texts.zip").write_bytes(b"PK\x03\x04" + "".join(TEXTS).encode())


def a_cache_of_the_hub(folder: Path) -> None:
    cache = folder / "datasets--owner--name"
    for name, text in (("blobs/1f", CARD), ("blobs/2e", TEXTS[0]), ("refs/main", "5d")):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_text(text)
    snapshot = cache / "snapshots" / "5d"
    snapshot.mkdir(parents=True)
    (snapshot / "README.md").symlink_to("../../blobs/1f")
    (snapshot / "train.jsonl").symlink_to("../../blobs/2e")


FORMATS: dict[str, Callable[[Path], None]] = {
    "an MDS data set of MosaicML Streaming": an_mds_data_set,
    "an MDS data set": mds_in_another_format,
    "a data set of LitData": a_litdata_data_set,
    "a tokenized data set of datatrove": a_datatrove_data_set,
    "a tar archive, as WebDataset": a_webdataset,
    "a tokenized data set of Megatron-LM": a_megatron_data_set,
    "a NumPy array": numpy_arrays,
    "an Arrow file": arrow_files,
    "a TFRecord file": tf_records,
    "an archive": an_archive,
    "a folder of the hub's cache": a_cache_of_the_hub,
}


@pytest.mark.parametrize("fields", [RowFields(), RowFields(text="text")], ids=["found", "named"])
@pytest.mark.parametrize(("name", "write"), FORMATS.items(), ids=[write.__name__ for write in FORMATS.values()])
def test_a_data_set_of_another_tool_is_refused_by_name_with_a_way_out(
    tmp_path: Path, name: str, write: Callable[[Path], None], fields: RowFields
) -> None:
    write(tmp_path)
    (tmp_path / "README.md").write_text("# About these data\n")
    with pytest.raises(
        UserError, match=rf"^source={tmp_path}: holds {name}.* \({tmp_path}/(?!README).*can't be read; .*--exclude"
    ):
        read(tmp_path, fields)


@pytest.mark.parametrize("write", FORMATS.values(), ids=lambda write: write.__name__)
def test_a_data_set_of_another_tool_in_a_large_tree_is_left_out_with_its_way_out(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    (tmp_path / "fixtures").mkdir()
    write(tmp_path / "fixtures")
    source = "print('a text')\n" * 1000
    (tmp_path / "main.py").write_text(source)
    left = {path.name for path in (tmp_path / "fixtures").rglob("*") if path.is_file()} - {"dataset.json"}
    texts, left_out = read(tmp_path)
    assert texts[0] == source and left_out.keys() == left
    assert texts[1:] == ([] if write is not a_webdataset else ['{"shards": 1}'])
    assert all(": " in reason or reason.startswith("the same file") for reason in left_out.values())


@pytest.mark.parametrize("write", [an_mds_data_set, a_litdata_data_set])
def test_files_beside_an_index_that_does_not_name_them_are_read(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    (tmp_path / "notes.txt").write_text(TEXTS[0])
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "rows.jsonl").write_text(rows)
    texts, left_out = read(tmp_path)
    assert texts == [TEXTS[0], *TEXTS] and len([reason for reason in left_out.values() if reason]) == 2


def test_a_chosen_kind_overrides_the_suffix(tmp_path: Path) -> None:
    (tmp_path / "notes.ds").write_text("a text")
    units, rejected = list_units(SourceSpec(paths=(str(tmp_path),), kind="text"))
    assert len(units) == 1 and not rejected


@pytest.mark.parametrize("packed", ["c4.json.gz", "rows.jsonl.xz", "texts.txt.zst"])
def test_a_compressed_file_beside_rows_is_left_out_as_such(tmp_path: Path, packed: str) -> None:
    (tmp_path / packed).write_bytes(b"\x1f\x8b")
    with pytest.raises(UserError, match=rf"no source has rows.*{packed}, only \.jsonl\.gz"):
        read(tmp_path, RowFields(text="text"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "one"}))
    texts, left_out = read(tmp_path, RowFields(text="text"))
    assert texts == ["one"] and left_out[packed].startswith("only .jsonl.gz")


def test_token_ids_that_are_valid_utf8_are_left_out_as_binary(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(np.full(700, 65, dtype="<u2").tobytes())
    (tmp_path / "a.txt").write_text("a text")
    assert read(tmp_path) == (["a text"], {"train.bin": "a binary file: a NUL at character 1"})


@pytest.mark.parametrize("form", ["parquet", "jsonl", "json"])
@pytest.mark.parametrize("fields", [RowFields(), RowFields(text="text")], ids=["found", "named"])
def test_of_a_snapshot_of_the_hub_rows_alone_are_read(tmp_path: Path, form: str, fields: RowFields) -> None:
    path = tmp_path / "data" / f"train.{form}"
    path.parent.mkdir()
    if form == "parquet":
        pq.write_table(pa.table({"text": TEXTS}), path)
    else:
        path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    (tmp_path / "README.md").write_text(CARD)
    (tmp_path / "LICENSE").write_text("Free.")
    (tmp_path / "dataset_infos.json").write_text('{"default": {"features": {}}}')
    texts, left_out = read(tmp_path, fields)
    assert texts == TEXTS
    assert left_out.keys() >= {"README.md", "LICENSE", "dataset_infos.json"}


def test_a_readme_beside_parquet_is_left_out_though_it_is_not_a_card(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "train.parquet")
    (tmp_path / "README.md").write_text("# A data set\n")
    texts, left_out = read(tmp_path)
    assert texts == TEXTS and left_out == {"README.md": "a text file beside the rows of a data set of the hub"}


def test_each_copy_of_a_data_set_of_the_hub_in_a_folder_is_read_without_its_readme(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "data").mkdir(parents=True)
        pq.write_table(pa.table({"text": [f"{name} {text}" for text in TEXTS]}), tmp_path / name / "data" / "a.parquet")
        (tmp_path / name / "README.md").write_text(CARD)
    (tmp_path / "notes.txt").write_text("notes")
    texts, left_out = read(tmp_path)
    assert texts == ["notes", *(f"{name} {text}" for name in ("one", "two") for text in TEXTS)]
    assert left_out == {"README.md": "a text file beside the rows of a data set of the hub"}


@pytest.mark.parametrize("readme", ["# A program\n", CARD])
def test_a_source_tree_with_rows_or_a_configuration_keeps_its_texts(tmp_path: Path, readme: str) -> None:
    (tmp_path / "README.md").write_text(readme)
    (tmp_path / "main.py").write_text("print('a text')\n")
    if readme == CARD:
        (tmp_path / "config.json").write_text("{}")
    else:
        (tmp_path / "cases.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    texts, left_out = read(tmp_path)
    assert texts[:2] == [readme, "print('a text')\n"] and not [name for name, reason in left_out.items() if reason]


def test_a_source_tree_with_a_few_rows_keeps_its_texts(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\ntitle: A program\n---\n# A program\n")
    (tmp_path / "main.py").write_text("print('a text')\n" * 1000)
    (tmp_path / "package.json").write_text('{"name": "program"}')
    (tmp_path / "cases.jsonl").write_text(json.dumps({"text": "a row"}))
    texts, left_out = read(tmp_path)
    assert len(texts) == 4 and not [name for name, reason in left_out.items() if reason]
