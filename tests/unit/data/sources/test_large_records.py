"""Records that need too much memory are left out with their line or row number, and their neighbors are kept."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from ray_ulysses.data.sources.extraction import RawDocument, read_unit
from ray_ulysses.data.sources.rows import TOO_LARGE, Rejected, RowFields
from ray_ulysses.data.sources.units import SourceSpec, list_units
from tests.breadth import fast_only

LARGE = (256 << 20) + 10
PIECE = b"x" * (1 << 20)


def zstd_of(*parts: tuple[bytes, int]) -> bytes:
    """Compress repeated pieces without building the complete data in memory."""
    packer = zstandard.ZstdCompressor().compressobj()
    return b"".join(packer.compress(piece) for piece, times in parts for _ in range(times)) + packer.flush()


def found_in(file: Path, fields: RowFields | None = None) -> list[tuple[int, str]]:
    units, _ = list_units(SourceSpec(paths=(str(file),), fields=fields or RowFields()))
    found = [one for unit in units for one in read_unit(unit)]
    return [
        (one.offset, one.reason if isinstance(one, Rejected) else str(one.content))
        for one in found
        if isinstance(one, Rejected | RawDocument)
    ]


def test_a_large_line_of_a_compressed_file_is_left_out_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.zst"
    line = ((b'{"text": "', 1), (PIECE, LARGE // len(PIECE) + 1), (b'"}\n', 1))
    path.write_bytes(zstd_of((b'{"text": "a"}\n', 1), *line, (b'{"text": "b"}\n', 1)))
    assert found_in(path) == [(1, "a"), (2, TOO_LARGE), (3, "b")]


def test_a_line_of_very_many_objects_is_left_out(tmp_path: Path) -> None:
    line = b'{"text": [' + b"{}," * (9 << 20) + b"0]}"
    with gzip.open(tmp_path / "rows.jsonl.gz", "wb", compresslevel=1) as file:
        file.write(line + b'\n{"text": "a"}\n')
    (place, reason), kept = found_in(tmp_path / "rows.jsonl.gz")
    assert place == 1 and "lists and objects" in reason and kept == (2, "a")


@pytest.mark.parametrize("suffix", fast_only(("txt", "jsonl", "json"), "txt"))
def test_a_large_sparse_file_is_left_out(tmp_path: Path, suffix: str) -> None:
    with open(tmp_path / f"rows.{suffix}", "wb") as file:
        file.truncate(LARGE)
    assert found_in(tmp_path / f"rows.{suffix}")[0][1] == TOO_LARGE


@pytest.mark.slow
def test_a_large_value_of_a_list_is_left_out_with_the_rest(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_bytes(b'[{"text": "a"}, {"text": [' + b"[]," * (9 << 20) + b'0]}, {"text": "b"}]')
    kept, (place, reason) = found_in(tmp_path / "rows.json")
    assert (kept, place) == ((1, "a"), 2)
    assert "lists and objects" in reason and "the rest of the list" in reason


def large_table() -> pa.Table:
    return pa.table({"text": pa.chunked_array([pa.array([text]) for text in ("a", "x" * LARGE, "b")])})


@pytest.mark.slow
def test_a_row_group_that_unpacks_beyond_any_text_is_left_out(tmp_path: Path) -> None:
    pq.write_table(large_table(), tmp_path / "rows.parquet", row_group_size=1, compression="zstd")
    (_, a), (place, reason), (_, b) = found_in(tmp_path / "rows.parquet")
    assert (a, place, b) == ("a", 2, "b")
    assert "'text' expands from" in reason


def test_a_large_cell_of_parquet_that_is_not_packed_is_left_out(tmp_path: Path) -> None:
    pq.write_table(large_table(), tmp_path / "rows.parquet", compression="none")
    assert found_in(tmp_path / "rows.parquet") == [(1, "a"), (2, f"the text is {TOO_LARGE}"), (3, "b")]


@pytest.mark.slow
def test_a_list_that_is_stored_as_one_value_is_left_out(tmp_path: Path) -> None:
    tokens = pa.ListArray.from_arrays(pa.array([0, 3, 140 << 20]), pa.array(np.zeros(140 << 20, np.int32)))
    pq.write_table(pa.table({"tokens": tokens}), tmp_path / "rows.parquet", row_group_size=1)
    _, (place, reason) = found_in(tmp_path / "rows.parquet", RowFields(tokens="tokens"))
    assert place == 2 and "'tokens.list.element' expands from" in reason
