"""A stored corpus of format 3, as that version wrote it, goes on after its conversion: same plans, rows and digests."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ulysses.cli import app, run
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.prepare import convert
from ray_ulysses.data.prepare.convert import convert_corpus
from ray_ulysses.data.prepare.directory_lock import LOCK_FILE
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.read.digest import add_digests, row_digest, slice_checksum
from ray_ulysses.data.read.reader import RowReader
from ray_ulysses.data.sources.row_fields import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.errors import UserError
from ray_ulysses.storage.patience import Patience
from tests.local_preparation import prepare_local
from tests.unit.data.plans import build_plan
from tests.unit.storage.test_patience import SleepingClock, patience_of

# What the version that wrote it said of it.
FINGERPRINT, DIGEST, NUM_ROWS = "10f370509141fecb10c512308d8cec5c", 7661840667138417501, 167
NEW = ["corpus.json", "documents.index", "documents.parquet", "quarantine.jsonl", "spans.parquet"]
SHARDS = ["shard-00000", "shard-00001", "shard-00028"]


def rows() -> list[dict[str, str]]:
    rng = np.random.default_rng(5)

    def word(count: int) -> str:
        return "".join(chr(97 + value) for value in rng.integers(0, 26, count))

    found = [
        {"prompt": word(int(rng.integers(1, 60))), "completion": word(int(rng.integers(1, 200)))} for _ in range(40)
    ]
    found[7], found[30] = found[3], found[12]
    found[20] = {"prompt": "long: ", "completion": "ab" * 40_000}
    return found


@pytest.fixture
def old(tmp_path: Path) -> Path:
    shutil.copytree(Path(__file__).with_name("format_3"), tmp_path / "old")
    return tmp_path / "old"


def digest_of(corpus: Corpus) -> tuple[int, int]:
    settings = PlanSettings(seed=3, context_tokens=512, pad_multiple=8, rows_per_step=4, epochs=1)
    plan = build_plan(corpus.lengths, corpus.fingerprint, settings)
    reader = RowReader(corpus, plan)
    digests = (row_digest(row, slice_checksum(reader.read("train", row, 0, 1))) for row in range(plan.num_rows))
    return add_digests(*digests), plan.num_rows


def files_of(corpus: Path) -> dict[str, bytes]:
    return {str(path.relative_to(corpus)): path.read_bytes() for path in corpus.rglob("*") if path.is_file()}


def test_an_old_corpus_is_refused_with_the_command_that_converts_it(old: Path) -> None:
    with pytest.raises(
        UserError, match=rf"has format 3, this version reads 4; convert it with `ray-ulysses convert {old}`"
    ):
        Corpus.open(old)


def test_a_converted_corpus_has_the_plans_rows_and_digests_of_before(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["convert", str(old)]) == 0
    assert f"{old}: 38 documents, 84,772 tokens, as they were" in capsys.readouterr().out
    converted = Corpus.open(old)
    converted.check_files(checksums=True)
    assert sorted(files_of(old)) == sorted([*NEW, *(f"shards/{name}.tokens" for name in SHARDS)])
    assert converted.fingerprint == FINGERPRINT and digest_of(converted) == (DIGEST, NUM_ROWS)
    # This version prepares the same from the same rows.
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    fields = RowFields.from_options({"prompt_field": "prompt", "completion_field": "completion"})
    request = PrepareRequest(
        sources=SourceSpec(paths=(str(path),), fields=fields), out=tmp_path / "new", unit_bytes=3000
    )
    new = prepare_local(request)
    assert new.fingerprint == FINGERPRINT and digest_of(new) == (DIGEST, NUM_ROWS)
    ours, theirs = files_of(new.path), files_of(old)
    assert all(ours[name] == theirs[name] for name in ours if name.endswith((".tokens", ".index")))
    assert [converted.source(n).offset for n in range(38)] == [new.source(n).offset for n in range(38)]
    # Again, there is nothing to do.
    before = files_of(old)
    convert_corpus(old, pytest.fail)
    assert files_of(old) == before


class Killed(BaseException):
    """The process ends here."""


def test_a_conversion_that_is_killed_leaves_a_corpus_of_one_format_and_is_repeated(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(old, whole)
    convert_corpus(whole, print)
    replace, unlink, calls = os.replace, Path.unlink, [0]

    def dying(made: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            # The lock is the process's, and this one goes on.
            if not str(args[0]).endswith(LOCK_FILE):
                calls[0] -= 1
                if calls[0] == 0:
                    raise Killed
            return made(*args, **options)

        return call

    formats = []
    for at in range(1, 100):
        copy = tmp_path / f"killed-{at}"
        shutil.copytree(old, copy)
        calls[0] = at
        with monkeypatch.context() as patches:
            patches.setattr(os, "replace", dying(replace))
            patches.setattr(Path, "unlink", dying(unlink))
            try:
                convert_corpus(copy, print)
            except Killed:
                pass
            else:
                break
        formats.append(json.loads((copy / "corpus.json").read_text())["format_version"])
        assert convert_corpus(copy, print).fingerprint == FINGERPRINT
        assert files_of(copy) == files_of(whole)
    assert formats == sorted(formats) and set(formats) == {3, 4}


@pytest.mark.parametrize("name", ["shards/shard-00001.parquet", "documents.parquet"])
def test_a_damaged_old_corpus_is_named_and_stays_as_it_was(old: Path, name: str) -> None:
    content = bytearray((old / name).read_bytes())
    content[len(content) // 4] ^= 0xFF
    (old / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{Path(name).name} can't be used"):
        convert_corpus(old, print)
    assert json.loads((old / "corpus.json").read_text())["format_version"] == 3
    assert (old / name).read_bytes() == bytes(content)


def test_shards_of_another_corpus_are_refused(old: Path) -> None:
    shutil.copy(old / "shards/shard-00000.parquet", old / "shards/shard-00028.parquet")
    with pytest.raises(UserError, match=r"shard-00028\.parquet can't be used \(its tokens are not those that prepare"):
        convert_corpus(old, print)


def test_an_edited_corpus_json_is_refused(old: Path) -> None:
    fields = json.loads((old / "corpus.json").read_text())
    (old / "corpus.json").write_text(json.dumps({**fields, "num_tokens": 1}))
    with pytest.raises(UserError, match=r"corpus\.json can't be used \(its fields were changed"):
        convert_corpus(old, print)
    fields["fingerprint"] = "another"
    del fields["checksum"]
    (old / "corpus.json").write_text(json.dumps({**fields, "checksum": stable_hash(fields)}))
    with pytest.raises(UserError, match=r"corpus\.json can't be used \(its files do not give its fingerprint"):
        convert_corpus(old, print)


def test_a_storage_that_comes_back_is_waited_for(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, left = SleepingClock(), [2]
    old_rows = convert._old_rows

    def away(path: Path) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return old_rows(path)

    monkeypatch.setattr(convert, "_old_rows", away)
    assert convert_corpus(old, print, patience_of(clock)).fingerprint == FINGERPRINT
    assert clock.pauses == [0.1, 0.2]


def test_what_is_no_corpus_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a prepared corpus"):
        convert_corpus(tmp_path, print, Patience())
