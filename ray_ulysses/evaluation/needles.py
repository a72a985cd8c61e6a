"""Retrieval tests: hides facts in held-out documents, asks about them, and counts correct answers.

Each kind of question is asked about facts at several depths of a row, after worked examples in the same form, so that
models without instruction tuning can answer:

- ``key_value``: the number of one key;
- ``several_keys``: the numbers of several keys, spread from the depth to the end of the row;
- ``variables``: the number of a variable at the end of a chain of assignments, spread in the same way.

The parts of facts and questions are tokenized separately, so that an answer has the same tokens as its fact with any
tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.errors import UserError
from ray_ulysses.evaluation.report import KINDS, Kind, RetrievalCell
from ray_ulysses.evaluation.scoring import Passage, Score

if TYPE_CHECKING:
    from ray_ulysses.data.tokenize.tokenizers import Tokenizer
    from ray_ulysses.evaluation.held_out import HeldOut

NUM_KEYS, NUM_VARIABLES = 4, 3
_NUM_EXAMPLES = 2
_SMALLEST, _NUM_NUMBERS = 10_000, 90_000
_MOST_FILLED = 0.75
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_SYLLABLES = tuple(consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS)

Tokens = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answer:
    """One question of a row."""

    depth: int
    """Index of its depth."""
    tokens: NDArray[np.int64]
    """int64, positions of the answer's tokens in the row; each must be the most probable token."""
    chance: float
    """Probability that a guess among all possible numbers is correct."""
    chance_shown: float
    """Probability that a guess among the numbers in the row is correct."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NeedleRow:
    """A row of held-out documents with facts and questions; every token of an answer is scored."""

    passage: Passage
    answers: tuple[Answer, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Question:
    """Facts, and a question about them."""

    depth: int | None
    """As in `Answer`; None for a worked example."""
    facts: tuple[tuple[float, Tokens], ...]
    """Share of the haystack before each fact, and the fact's tokens."""
    parts: tuple[tuple[Tokens, bool], ...]
    """Tokens of the question and its answer in parts, each with whether it belongs to the answer."""
    numbers: int
    """Numbers in the answer."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that it takes in a row."""
        return sum(tokens.size for _, tokens in self.facts) + sum(tokens.size for tokens, _ in self.parts)


class Haystack:
    """Text of held-out documents, and a tokenizer for the texts inserted into it."""

    def __init__(self, held: HeldOut, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._held, self._tokenizer, self._vocab_size = held, tokenizer, vocab_size
        self.encode = cache(self._encode)
        """Returns the int64 tokens of a text, without the end token."""

    def _encode(self, text: str) -> Tokens:
        tokens = self._tokenizer.encode_all([text])[0].astype(np.int64, copy=False)
        largest = int(tokens.max(initial=0))
        if largest >= self._vocab_size:
            raise UserError(
                f"--tokenizer: produces token {largest}, but the model's vocabulary has {self._vocab_size}; give the "
                "tokenizer that prepared the documents, or leave retrieval out with --task loss"
            )
        return tokens

    def take(self, num_tokens: int, rng: np.random.Generator) -> Tokens:
        """Return tokens of consecutive documents, from a random one on, without their end tokens."""
        held, parts, left = self._held, [], num_tokens
        place = int(rng.integers(held.numbers.size))
        while left:
            length = int(held.lengths[place]) - 1
            start = int(rng.integers(length - left + 1)) if length > left else 0
            parts.append(held.read(place, start, min(left, length)))
            left -= parts[-1].size
            parts.append(self.encode("\n\n")[:left])
            left -= parts[-1].size
            place = (place + 1) % held.numbers.size
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def needle_rows(
    haystack: Haystack, kind: Kind, *, length: int, depths: Sequence[float], cases: int, seed: int
) -> Iterator[NeedleRow]:
    """Yield the rows of one kind and length: each case asks once about every depth, in a single row if they fit.

    Rows are a function of the documents, the tokenizer and the arguments.

    Args:
        haystack: Text to hide the facts in.
        kind: Kind of facts and questions.
        length: Tokens of a row, question and answer included.
        depths: Share of the haystack before the first fact of each question.
        cases: Number of questions about each depth.
        seed: Seed of all random choices.

    Raises:
        UserError: A row has no room for one question.
    """
    for case in range(cases):
        rng = np.random.default_rng([seed, KINDS.index(kind), length, case])
        questions = _questions(haystack, kind, depths, rng)
        for asked in _shared_out(questions, kind, length):
            yield _row(haystack, asked, length, rng)


def depth_places(count: int) -> tuple[float, ...]:
    """Return evenly spaced depths from the beginning to the end of a haystack; the middle for a single one."""
    return tuple(place / (count - 1) for place in range(count)) if count > 1 else (0.5,)


def _questions(haystack: Haystack, kind: Kind, depths: Sequence[float], rng: np.random.Generator) -> list[_Question]:
    """Return the worked examples, then a question about each depth; all keys and numbers are different."""
    num_questions = _NUM_EXAMPLES + len(depths)
    per_question = {"key_value": 1, "several_keys": NUM_KEYS, "variables": NUM_VARIABLES}[kind]
    words = iter(_words(rng, num_questions * per_question))
    numbers = iter((rng.choice(_NUM_NUMBERS, num_questions * per_question, replace=False) + _SMALLEST).tolist())
    asked: list[tuple[int | None, float]] = [(None, float(share)) for share in rng.random(_NUM_EXAMPLES)]
    asked += list(enumerate(depths))
    return [
        _question(haystack, kind, depth, share, [next(words) for _ in range(per_question)], numbers)
        for depth, share in asked
    ]


def _question(
    haystack: Haystack, kind: Kind, depth: int | None, share: float, keys: list[str], numbers: Iterator[int]
) -> _Question:
    encode = haystack.encode
    end = encode(".\n")
    places = [share + (1 - share) * place / len(keys) for place in range(len(keys))]
    if kind == "variables":
        given = [f" {next(numbers)}", *(f" {key}" for key in keys[:-1])]
        facts = [np.concatenate([encode(f"\n{key} ="), encode(own), end]) for key, own in zip(keys, given, strict=True)]
        asked, answers = f"\nThe number of {keys[-1]} is", given[:1]
    else:
        answers = [f" {next(numbers)}" for _ in keys]
        facts = [
            np.concatenate([encode(f"\nThe number of {key} is"), encode(own), end])
            for key, own in zip(keys, answers, strict=True)
        ]
        asked = f"\nThe number of {keys[0]} is" if len(keys) == 1 else f"\nThe numbers of {', '.join(keys)} are"
    parts = [(encode(asked), False)]
    for place, own in enumerate(answers):
        parts += [(encode(","), False)] * (place > 0) + [(encode(own), True)]
    return _Question(
        depth=depth,
        facts=tuple(zip(places, facts, strict=True)),
        parts=(*parts, (end, False)),
        numbers=len(answers),
    )


def _shared_out(questions: Sequence[_Question], kind: Kind, length: int) -> Iterator[list[_Question]]:
    """Yield the questions of each row: the worked examples and as many questions as leave a quarter to documents.

    Raises:
        UserError: A row has no room for one question.
    """
    examples, open_ones = list(questions[:_NUM_EXAMPLES]), list(questions[_NUM_EXAMPLES:])
    taken = sum(one.num_tokens for one in examples)
    least = taken + max(one.num_tokens for one in open_ones)
    if least > _MOST_FILLED * length:
        raise UserError(
            f"--lengths={length}: has no room for the facts and questions of {kind}, which take {least} tokens with "
            f"this tokenizer, and documents around them; use at least {int(least / _MOST_FILLED) + 1}, or --task loss"
        )
    while open_ones:
        row, filled = list(examples), taken
        while open_ones and filled + open_ones[0].num_tokens <= _MOST_FILLED * length:
            filled += open_ones[0].num_tokens
            row.append(open_ones.pop(0))
        yield row


def _row(haystack: Haystack, questions: Sequence[_Question], length: int, rng: np.random.Generator) -> NeedleRow:
    """Hide the facts of all questions in documents, and ask the questions in random order, worked examples first."""
    text = haystack.take(length - sum(one.num_tokens for one in questions), rng)
    facts = sorted((fact for one in questions for fact in one.facts), key=lambda fact: fact[0])
    borders = [round(share * text.size) for share, _ in facts]
    pieces: list[Tokens] = []
    for start, stop, fact in zip([0, *borders], [*borders, text.size], [*(one for _, one in facts), None], strict=True):
        pieces += [text[start:stop]] if fact is None else [text[start:stop], fact]
    position = sum(piece.size for piece in pieces)
    shown = sum(len(one.facts) if one.numbers > 1 else 1 for one in questions)
    order = [*range(_NUM_EXAMPLES), *(rng.permutation(len(questions) - _NUM_EXAMPLES) + _NUM_EXAMPLES).tolist()]
    answers = []
    for question in (questions[place] for place in order):
        positions: list[int] = []
        for tokens, is_answer in question.parts:
            positions += range(position, position + tokens.size) if is_answer else ()
            pieces.append(tokens)
            position += tokens.size
        if question.depth is not None:
            answers.append(
                Answer(
                    depth=question.depth,
                    tokens=np.array(positions, dtype=np.int64),
                    chance=_NUM_NUMBERS ** -float(question.numbers),
                    chance_shown=shown ** -float(question.numbers),
                )
            )
    tokens = np.concatenate(pieces)
    is_scored = np.zeros(tokens.size, dtype=np.bool_)
    for answer in answers:
        is_scored[answer.tokens] = True
    return NeedleRow(passage=Passage(tokens=tokens, is_scored=is_scored), answers=tuple(answers))


def _words(rng: np.random.Generator, count: int) -> list[str]:
    """Return distinct made-up words of three syllables."""
    size = len(_SYLLABLES)
    drawn = rng.choice(size**3, count, replace=False).tolist()
    return ["".join(_SYLLABLES[one // size**place % size] for place in range(3)) for one in drawn]


def retrieval_cells(
    haystack: Haystack, score: Score, *, kind: Kind, length: int, num_depths: int, cases: int, seed: int
) -> tuple[RetrievalCell, ...]:
    """Return the cells of one kind and length, from the smallest depth to the largest.

    Raises:
        UserError: A row has no room for one question.
    """
    depths = depth_places(num_depths)
    rows = list(needle_rows(haystack, kind, length=length, depths=depths, cases=cases, seed=seed))
    found: list[list[tuple[bool, float, float]]] = [[] for _ in depths]
    for row, scores in zip(rows, score(row.passage for row in rows), strict=True):
        for answer in row.answers:
            is_right = bool(scores.is_correct[answer.tokens].all())
            found[answer.depth].append((is_right, answer.chance, answer.chance_shown))
    return tuple(
        RetrievalCell(
            kind=kind,
            length=length,
            depth=depth,
            cases=len(own),
            correct=sum(is_right for is_right, _, _ in own),
            chance=float(np.mean([chance for _, chance, _ in own])),
            chance_shown=float(np.mean([chance for _, _, chance in own])),
        )
        for depth, own in zip(depths, found, strict=True)
    )
