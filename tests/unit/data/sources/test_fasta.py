"""FASTA files: each record is one document, whole at every division of the file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources import extraction, records
from ray_ulysses.data.sources.records import byte_ranges, fasta_records
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec, list_units
from ray_ulysses.errors import UserError
from tests.local_preparation import prepare_local
from tests.unit.data.test_pairs import reasons_of

LINES = st.sampled_from(["ACGT", "acgtn", "", "AC GT", "A", "C" * 30, ">one", ">two words", ">", "> three", "G>T"])


def corpus_of(path: Path, out: Path, unit_bytes: int = 1 << 20, tokenizer: str = "bytes") -> Corpus:
    spec = SourceSpec(paths=(str(path),))
    return prepare_local(PrepareRequest(sources=spec, out=out, unit_bytes=unit_bytes, tokenizer=tokenizer))


def texts_of(corpus: Corpus) -> list[str]:
    tokens = [corpus.read(document, 0, int(corpus.lengths[document]) - 1) for document in range(corpus.num_documents)]
    return [bytes(one.tolist()).decode() for one in tokens]


def parsed(text: str) -> list[tuple[str, str]]:
    """Return the ids and sequences of a FASTA text in the plainest way."""
    found: list[tuple[str, str]] = []
    for line in text.split("\n"):
        if line.startswith(">"):
            found.append(((line[1:].split() or [""])[0], ""))
        elif line.strip():
            found[-1] = (found[-1][0], found[-1][1] + "".join(line.split()).upper())
    return found


@pytest.mark.parametrize("read_bytes", [3, 7, 1 << 20])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(LINES, max_size=12),
    ending=st.sampled_from(["\n", "\r\n"]),
    ends=st.booleans(),
    size=st.integers(1, 60),
)
def test_ranges_yield_each_record_once(
    tmp_path: Path, read_bytes: int, lines: list[str], ending: str, ends: bool, size: int
) -> None:
    text = ending.join([">zero", *lines]) + (ending if ends else "")
    path = tmp_path / "records.fa"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_READ_BYTES", read_bytes)
        ranges = byte_ranges(len(text), size)
        found = [one for first, last in ranges for one in fasta_records(str(path), first, last)]
        names = [name for name, _ in found]
    expected = parsed(text.replace("\r", ""))
    assert [bytes(sequence).decode() for _, sequence in found] == [sequence for _, sequence in expected]
    # A header longer than a part is cut off.
    assert names == [name for name, _ in expected] or read_bytes < 20


def test_records_are_documents_with_their_ids_and_numbers_in_every_division(tmp_path: Path) -> None:
    path = tmp_path / "genes.fna"
    path.write_text(
        "".join(f">gene{n} of a genome\n{'acgtN' * (n % 4)}\n{'GGA' * (n % 3)}{n % 7 * 'T'}\n" for n in range(40))
    )
    whole, divided = corpus_of(path, tmp_path / "whole"), corpus_of(path, tmp_path / "divided", 150)
    assert len(divided.info.shards) > 5 and texts_of(whole) == texts_of(divided)
    assert texts_of(whole)[:3] == ["ACGTNGGAT", "ACGTNACGTNGGAGGATT", "ACGTNACGTNACGTNTTT"]
    sources = [divided.source(document) for document in range(divided.num_documents)]
    assert sources == [whole.source(document) for document in range(whole.num_documents)]
    assert (sources[0].id, sources[0].offset) == ("gene1", 2)
    assert {sources.offset: sources.id for sources in sources} == {
        number + 1: f"gene{number}" for number in range(40) if f"gene{number}" in {one.id for one in sources}
    }
    # Record 1 has no sequence.
    assert "empty" in reasons_of(divided)


@pytest.mark.parametrize("suffix", ["fasta", "FA", "faa.gz", "fa.gz", "fna.gz"])
def test_suffixes_of_fasta_are_read_also_compressed(tmp_path: Path, suffix: str) -> None:
    data, path = b">a x\nac\n>b\n\nGT\n", tmp_path / f"records.{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    (unit,) = list_units(SourceSpec(paths=(str(path),)), 4 if suffix.endswith("gz") else 1 << 20)[0]
    assert unit.kind == "fasta"
    assert texts_of(corpus_of(path, tmp_path / "corpus")) == ["AC", "GT"]


def test_a_sequence_before_the_first_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.fa"
    path.write_text("\n \nACGT\n>a\nACGT\n")
    with pytest.raises(UserError, match=r"records.fa: begins with a sequence, not with a header .*--kind=text"):
        corpus_of(path, tmp_path / "corpus")
    truncated = tmp_path / "records.fa.gz"
    truncated.write_bytes(gzip.compress(b">a\n" + b"ACGT" * 1000)[:-10])
    with pytest.raises(UserError, match="the FASTA file can't be read"):
        corpus_of(truncated, tmp_path / "other")


def test_what_is_no_sequence_is_left_out_or_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (records, extraction):
        monkeypatch.setattr(module, "MOST_BYTES", 20)
    path = tmp_path / "records.fa"
    path.write_bytes(b">ok\nACGTX\n>long\n" + b"ACGTACGT\n" * 4 + b">latin\nAC\xe9\n>last\nAC")
    corpus = corpus_of(path, tmp_path / "corpus", tokenizer="chars:ACGTN")
    assert [corpus.source(document).id for document in range(2)] == ["ok", "last"]
    assert corpus.info.encoding.num_unknown == 1
    found = [json.loads(line) for line in (corpus.path / "quarantine.jsonl").read_text().splitlines()]
    assert [one["offset"] for one in found] == [2, 3]
    assert found[0]["reason"].startswith("larger than a document may be") and "not UTF-8" in found[1]["reason"]


def test_fasta_has_no_fields(tmp_path: Path) -> None:
    (tmp_path / "records.fa.gz").write_bytes(gzip.compress(b">a\nAC\n"))
    spec = SourceSpec(paths=(str(tmp_path / "records.fa.gz"),), fields=RowFields(label="y"))
    with pytest.raises(UserError, match="a text file, but --label-field='y' requires rows"):
        list_units(spec)
