"""Facts are at their depths, answers have the tokens of their facts, and guesses score the reported chance."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers, trainers

from ray_ulysses.data.tokenize.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from ray_ulysses.errors import UserError
from ray_ulysses.evaluation.held_out import HeldOut
from ray_ulysses.evaluation.needles import (
    NUM_KEYS,
    NUM_VARIABLES,
    Haystack,
    NeedleRow,
    depth_places,
    needle_rows,
    retrieval_cells,
)
from ray_ulysses.evaluation.report import KINDS, Kind
from tests.unit.data.corpora import varied_texts
from tests.unit.evaluation.documents import VOCAB, guesses, held_out, knows, saying, score_with


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> HeldOut:
    return held_out(tmp_path_factory.mktemp("held"))


def merging_tokenizer(folder: Path) -> Tokenizer:
    """Train a tokenizer that merges letters and digits into longer tokens."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = [*varied_texts(50), *(f"The number of {word} is 4." for word in "abcd")]
    rust.train_from_iterator([*texts, *map(str, range(10_000, 12_000))], trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    ))  # fmt: skip
    folder.mkdir()
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return load_tokenizer(folder)


def text_of(row: NeedleRow) -> str:
    return bytes(token if token < 256 else 0 for token in row.passage.tokens.tolist()).decode()


def rows_of(held: HeldOut, kind: Kind, **changes: object) -> list[NeedleRow]:
    options = {"length": 3000, "depths": depth_places(5), "cases": 2, "seed": 0, **changes}
    return list(needle_rows(Haystack(held, ByteTokenizer(), VOCAB), kind, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_their_length_and_one_question_per_depth_and_depend_on_the_seed(held: HeldOut, kind: Kind) -> None:
    for length in (1024, 3000):
        rows = rows_of(held, kind, length=length)
        assert {row.passage.tokens.size for row in rows} == {length}
        depths = [answer.depth for row in rows for answer in row.answers]
        assert sorted(depths) == sorted([0, 1, 2, 3, 4] * 2)
        for row in rows:
            scored = np.concatenate([answer.tokens for answer in row.answers])
            assert sorted(scored.tolist()) == np.flatnonzero(row.passage.is_scored).tolist()
    first, again, other = (
        [row.passage.tokens.tolist() for row in rows_of(held, kind, seed=seed)] for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other and len({tuple(row) for row in first}) == len(first)


def test_a_fact_appears_once_at_its_depth_and_is_asked_for_by_its_key(held: HeldOut) -> None:
    for row in rows_of(held, "key_value"):
        text = text_of(row)
        facts = [
            (found[1], found[2], found.start()) for found in re.finditer(r"\nThe number of (\w+) is (\d{5})\.\n", text)
        ]
        assert len(facts) == 2 * 7, "once as a fact and once with its question"
        given, asked = facts[:7], facts[7:]
        assert sorted(fact[:2] for fact in given) == sorted(fact[:2] for fact in asked)
        assert len({number for _, number, _ in given}) == 7
        where = {key: start for key, _, start in given}
        last = asked[0][2]
        for answer in row.answers:
            said = text[answer.tokens[0] : answer.tokens[-1] + 1]
            key = next(key for key, number, _ in asked if f" {number}" == said)
            assert where[key] / last == pytest.approx(answer.depth / 4, abs=0.12)


def test_a_variable_is_asked_for_through_its_assignments(held: HeldOut) -> None:
    for row in rows_of(held, "variables"):
        text = text_of(row)
        assigned = dict(re.findall(r"\n(\w{6}) = (\w+)\.\n", text))
        asked = re.findall(r"\nThe number of (\w+) is (\d{5})\.\n", text)
        assert (len(assigned), len(asked)) == (7 * NUM_VARIABLES, 7)
        for key, number in asked:
            steps = 0
            while not key.isdigit():
                key, steps = assigned[key], steps + 1
            assert (key, steps) == (number, NUM_VARIABLES)
        places = [text.index(f"\n{key} =") for key in assigned]
        assert max(places) < text.index("\nThe number of")


def test_several_keys_are_asked_for_at_once(held: HeldOut) -> None:
    for row in rows_of(held, "several_keys"):
        assert row.answers[0].chance == pytest.approx(90_000.0**-NUM_KEYS)
        assert row.answers[0].chance_shown == pytest.approx((7 * NUM_KEYS) ** -float(NUM_KEYS))
        text = text_of(row)
        facts = dict(re.findall(r"\nThe number of (\w+) is (\d{5})\.\n", text))
        asked = re.findall(r"\nThe numbers of ([\w, ]+) are ([\d, ]+)\.\n", text)
        assert len(asked) == 7 and len(facts) == 7 * NUM_KEYS
        for keys, numbers in asked:
            assert [facts[key] for key in keys.split(", ")] == numbers.split(", ")
        for answer in row.answers:
            said = "".join(text[place] for place in answer.tokens)
            assert re.fullmatch(r"( \d{5}){4}", said), "commas are not part of the answer"


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_has_the_tokens_of_its_fact_with_any_tokenizer(held: HeldOut, tmp_path: Path, kind: Kind) -> None:
    haystack = Haystack(held, merging_tokenizer(tmp_path / "merging"), 1000)
    assert haystack.encode(" 10345").size < 6
    rows = list(needle_rows(haystack, kind, length=2000, depths=(0.2, 0.9), cases=2, seed=0))
    for row in rows:
        tokens = row.passage.tokens
        for answer in row.answers:
            own = tokens[answer.tokens][: answer.tokens.size // (NUM_KEYS if kind == "several_keys" else 1)]
            shown = [
                start for start in range(tokens.size - own.size) if (tokens[start : start + own.size] == own).all()
            ]
            assert shown[0] < answer.tokens[0], "the number precedes its question"


def test_a_token_beyond_the_models_vocabulary_is_refused(held: HeldOut, tmp_path: Path) -> None:
    tokenizer = merging_tokenizer(tmp_path / "merging")
    used = int(tokenizer.encode_all([" 10345"])[0].max())
    assert used < tokenizer.info.vocab_size - 1
    assert Haystack(held, tokenizer, used + 1).encode(" 10345").size
    with pytest.raises(UserError, match=rf"--tokenizer: produces token {used}, but the model has only {used} tokens;"):
        Haystack(held, tokenizer, used).encode(" 10345")


def test_a_single_wrong_token_makes_an_answer_wrong(held: HeldOut) -> None:
    haystack = Haystack(held, ByteTokenizer(), VOCAB)

    def slips(**inputs: object) -> object:
        labels = inputs["ulysses"].labels_BL  # type: ignore[attr-defined]
        said = labels.clamp(min=0)
        said[:, :-1] += (labels[:, :-1] >= 0) & (labels[:, 1:] < 0)
        return saying(said)

    for kind in KINDS:
        for model, share in ((knows, 1.0), (slips, 0.0)):
            cells = retrieval_cells(haystack, score_with(model), kind=kind, length=1200, num_depths=3, cases=1, seed=0)
            assert [cell.depth for cell in cells] == [0.0, 0.5, 1.0]
            assert [(cell.accuracy, cell.cases) for cell in cells] == [(share, 1)] * 3


@pytest.mark.parametrize("kind", ["key_value", "variables"])
def test_a_model_that_guesses_scores_the_chance_that_is_reported(held: HeldOut, kind: Kind) -> None:
    haystack = Haystack(held, ByteTokenizer(), VOCAB)
    cells = retrieval_cells(haystack, score_with(guesses(7)), kind=kind, length=1024, num_depths=5, cases=80, seed=0)
    cases, correct = sum(cell.cases for cell in cells), sum(cell.correct for cell in cells)
    chance = cells[0].chance_shown
    assert cases == 400 and chance == pytest.approx(1 / 7)
    assert abs(correct / cases - chance) < 4 * math.sqrt(chance * (1 - chance) / cases)
    assert cells[0].chance == pytest.approx(1 / 90_000)


def test_a_row_that_is_too_short_is_refused_with_a_sufficient_length(held: HeldOut) -> None:
    with pytest.raises(UserError) as error:
        rows_of(held, "several_keys", length=512)
    text = str(error.value)
    assert text.startswith("--lengths=512: is too short, since the facts and questions of several_keys take ")
    least = int(text.removesuffix(", or --task loss").rpartition(" ")[2])
    assert len(rows_of(held, "several_keys", length=least + 8)) == 10
