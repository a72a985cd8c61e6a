"""Documents that occur in several corpora are recognized by their content."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ray_ulysses.data.corpus.corpus import first_of_same_content, refuse_repeats
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.errors import UserError
from tests.local_preparation import prepare_local
from tests.unit.data.corpora import begin, varied_texts, write_texts
from tests.unit.data.plans import build_plan
from tests.unit.data.tokenize.test_supervision import reasons_of
from tests.unit.data.tokenize.test_tokenizers import fast_tokenizer


def request_of(folder: Path, *names: str, **changes: object) -> PrepareRequest:
    sources = SourceSpec(paths=tuple(str(folder / name) for name in names))
    return replace(PrepareRequest(sources=sources, out=folder / "-".join([*names, "corpus"])), **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two trees of texts of their own, a copy of some of the first, and rows that hold some of them."""
    texts = varied_texts(12)
    write_texts(tmp_path / "one", texts[:8])
    write_texts(tmp_path / "two", texts[8:])
    write_texts(tmp_path / "copied", [*texts[10:], *varied_texts(2, seed=5), texts[3]])
    rows = [{"text": text} for text in (*varied_texts(2, seed=9), texts[5])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_first_of_equal_documents_is_found_as_a_dictionary_finds_it() -> None:
    rng = random.Random(0)
    for _ in range(200):
        # Few values, so that halves agree where digests do not.
        sizes = [rng.randrange(6) for _ in range(rng.randrange(1, 5))]
        groups = [
            np.array([[rng.randrange(3), rng.randrange(3)] for _ in range(n)], np.uint64).reshape(-1, 2) for n in sizes
        ]
        seen: dict[tuple[int, int], int] = {}
        expected = []
        for number, (low, high) in enumerate(np.concatenate(groups).tolist()):
            expected.append(seen.get((low, high), -1))
            seen.setdefault((low, high), number)
        found = first_of_same_content(groups)
        assert [one.size for one in found] == sizes
        assert np.concatenate(found).tolist() == expected
    assert first_of_same_content([]) == []


def test_documents_of_two_corpora_are_refused_by_their_content(folder: Path) -> None:
    one, two = (prepare_local(request_of(folder, name)) for name in ("one", "two"))
    copied, rows = (prepare_local(request_of(folder, name)) for name in ("copied", "rows.jsonl"))
    refuse_repeats([one, two])
    refuse_repeats([one])
    with pytest.raises(
        UserError,
        match=r"^data\.sources: .*/copied-corpus repeats 1 .*copied/text-0004\.txt, .* `--without .*/one-corpus`",
    ):
        refuse_repeats([one, copied])
    with pytest.raises(UserError, match=r"rows\.jsonl-corpus repeats 1 .*rows\.jsonl at 3, also in .*one-corpus\)"):
        refuse_repeats([two, one, rows])
    # Corpora that the run already has are not checked again.
    refuse_repeats([one, copied], num_known=2)
    with pytest.raises(UserError, match=r"rows\.jsonl-corpus repeats 1"):
        refuse_repeats([one, copied, rows], num_known=2)


@pytest.mark.parametrize("duplicates", ["quarantine", "keep"])
def test_a_corpus_is_prepared_without_what_others_hold(folder: Path, duplicates: str) -> None:
    one, two = (prepare_local(request_of(folder, name)) for name in ("one", "two"))
    (folder / "copied" / "text-0009.txt").write_text((folder / "copied" / "text-0002.txt").read_text())
    request = request_of(folder, "copied", without=(str(one.path), str(two.path)), duplicates=duplicates)
    corpus = prepare_local(request)
    refuse_repeats([one, two, corpus])
    assert corpus.num_documents == (2 if duplicates == "quarantine" else 3)
    same = [re.findall(r"/(\w+/text-\d+)", reason)[-1] for _, reason in reasons_of(corpus)]
    assert same[:3] == ["two/text-0002", "two/text-0003", "one/text-0003"]
    assert same[3:] == (["copied/text-0002"] if duplicates == "quarantine" else [])
    assert corpus.info.reasons == (("the same content as another", corpus.info.num_quarantined),)
    assert begin(request).is_complete
    with pytest.raises(UserError, match=r"contains a corpus made from other sources, options"):
        begin(replace(request, without=(str(one.path),)))


def test_corpora_that_leave_out_other_documents_of_equal_lengths_differ_and_do_not_share_a_plan(tmp_path: Path) -> None:
    rows = [f"{number:04d}" * 8 for number in range(40)]
    for name, kept in {"all": rows, "val1": rows[:10], "val2": rows[10:20], "none": ["another"]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in kept))
    others = {name: prepare_local(request_of(tmp_path, f"{name}.jsonl")) for name in ("val1", "val2", "none")}
    corpora = {
        name: prepare_local(
            replace(request_of(tmp_path, "all.jsonl", without=(str(other.path),)), out=tmp_path / f"but-{name}")
        )
        for name, other in others.items()
    }
    assert [corpus.num_documents for corpus in corpora.values()] == [30, 30, 40]
    assert len({corpus.fingerprint for corpus in corpora.values()}) == 3
    settings = PlanSettings(seed=1, context_tokens=64, pad_multiple=8, rows_per_step=2)
    plan = build_plan(corpora["val1"].lengths, corpora["val1"].fingerprint, settings)
    with pytest.raises(UserError, match=r"the corpus was replaced since planning"):
        plan.check_corpus(corpora["val2"].fingerprint)


def test_a_corpus_to_leave_out_that_cannot_be_used_is_refused_before_any_work(folder: Path) -> None:
    with pytest.raises(UserError, match=r"^--without=.*nowhere: does not exist; create it with `ray-ulysses prepare`"):
        begin(request_of(folder, "one", without=(str(folder / "nowhere"),)))
    tokenizer = str(fast_tokenizer(folder / "tokenizer"))
    other = prepare_local(request_of(folder, "two", tokenizer=tokenizer))
    with pytest.raises(
        UserError, match=r"^--without=.*two-corpus: was prepared with the tokenizer .* instead of bytes;"
    ):
        begin(request_of(folder, "one", without=(str(other.path),)))
    assert not (folder / "one-corpus").exists()
