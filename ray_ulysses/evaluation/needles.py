"""Retrieval tests: hides facts in held-out documents, asks about them, and counts correct answers.

Questions of each kind ask about facts at several depths of a row. Worked examples in the same form come first, so that
models without instruction tuning can answer:

- ``key_value`` asks for the number of one key;
- ``several_keys`` asks for the numbers of several keys, spread from the depth to the end of the row;
- ``variables`` asks for the number of the last variable in a chain of assignments, spread in the same way.

The parts of facts and questions are tokenized separately, so any tokenizer gives an answer the same tokens in the fact
as after the question.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.tokenize.tokenizers import Tokenizer
from ray_ulysses.errors import UserError
from ray_ulysses.evaluation.held_out import HeldOut
from ray_ulysses.evaluation.report import KINDS, Kind, RetrievalCell
from ray_ulysses.evaluation.scoring import Passage, Score

NUM_KEYS, NUM_VARIABLES = 4, 3
_NUM_EXAMPLES = 2
_SMALLEST, _NUM_NUMBERS = 10_000, 90_000
_MOST_FILLED = 0.75
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_SYLLABLES = tuple(consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS)

Tokens = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answer:
    """A question in a row, and the positions of its expected answer."""

    depth: int
    """Index of the question's depth."""
    tokens: NDArray[np.int64]
    """int64. Positions of the answer's tokens in the row. The answer is correct if each is the most probable token."""
    chance: float
    """Probability of a correct guess among all possible numbers."""
    chance_shown: float
    """Probability of a correct guess among the numbers in the row."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NeedleRow:
    """A row of held-out documents with facts and questions. Every answer token is scored."""

    passage: Passage
    answers: tuple[Answer, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Question:
    """Facts, and a question about them."""

    depth: int | None
    """See `Answer.depth`; None for a worked example."""
    facts: tuple[tuple[float, Tokens], ...]
    """Position of each fact as a fraction of the haystack, and the fact's tokens."""
    parts: tuple[tuple[Tokens, bool], ...]
    """Parts of the question and its answer: the tokens, and whether the part belongs to the answer."""
    numbers: int
    """How many numbers the answer contains."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the facts and the question take up in a row."""
        return sum(tokens.size for _, tokens in self.facts) + sum(tokens.size for tokens, _ in self.parts)


class Haystack:
    """Text of held-out documents, and a tokenizer for the texts to insert."""

    def __init__(self, held: HeldOut, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._held, self._tokenizer, self._vocab_size = held, tokenizer, vocab_size
        self.encode = cache(self._encode)
        """Tokenize a text to int64 tokens, without an end token."""

    def _encode(self, text: str) -> Tokens:
        tokens = self._tokenizer.encode_all([text])[0].astype(np.int64, copy=False)
        largest = int(tokens.max(initial=0))
        if largest >= self._vocab_size:
            raise UserError(
                f"--tokenizer: produces token {largest}, but the model has only {self._vocab_size} tokens; use the "
                "tokenizer that prepared the documents, or skip retrieval with --task loss"
            )
        return tokens

    def take(self, num_tokens: int, rng: np.random.Generator) -> Tokens:
        """Return ``num_tokens`` tokens of consecutive documents, without end tokens, starting at a random document."""
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
    """Yield the rows of one kind and length. Each case has one question per depth, all in one row if they fit.

    The rows depend only on the documents, the tokenizer and the arguments.

    Args:
        haystack: Text to hide the facts in.
        kind: Kind of facts and questions.
        length: Number of tokens in a row, including questions and answers.
        depths: Position of each question's first fact, as a fraction of the haystack.
        cases: Number of questions per depth.
        seed: Seed of all random choices.

    Raises:
        UserError: A row is too short for one question.
    """
    for case in range(cases):
        rng = np.random.default_rng([seed, KINDS.index(kind), length, case])
        questions = _questions(haystack, kind, depths, rng)
        for asked in _shared_out(questions, kind, length):
            yield _row(haystack, asked, length, rng)


def depth_places(count: int) -> tuple[float, ...]:
    """Return evenly spaced depths from the beginning to the end of a haystack, or its middle if ``count`` is 1."""
    return tuple(place / (count - 1) for place in range(count)) if count > 1 else (0.5,)


def _questions(haystack: Haystack, kind: Kind, depths: Sequence[float], rng: np.random.Generator) -> list[_Question]:
    """Return the worked examples, then one question per depth. All keys and numbers are distinct."""
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
    """Yield each row's questions: the worked examples, then questions. They fill at most three quarters of the row."""
    examples, open_ones = list(questions[:_NUM_EXAMPLES]), list(questions[_NUM_EXAMPLES:])
    taken = sum(one.num_tokens for one in examples)
    least = taken + max(one.num_tokens for one in open_ones)
    if least > _MOST_FILLED * length:
        raise UserError(
            f"--lengths={length}: is too short, since the facts and questions of {kind} take {least} tokens with "
            f"this tokenizer and need surrounding text; use at least {int(least / _MOST_FILLED) + 1}, or --task loss"
        )
    while open_ones:
        row, filled = list(examples), taken
        while open_ones and filled + open_ones[0].num_tokens <= _MOST_FILLED * length:
            filled += open_ones[0].num_tokens
            row.append(open_ones.pop(0))
        yield row


def _row(haystack: Haystack, questions: Sequence[_Question], length: int, rng: np.random.Generator) -> NeedleRow:
    """Hide the facts in documents, and append the worked examples and then the questions in random order."""
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
    size = len(_SYLLABLES)
    drawn = rng.choice(size**3, count, replace=False).tolist()
    return ["".join(_SYLLABLES[one // size**place % size] for place in range(3)) for one in drawn]


def retrieval_cells(
    haystack: Haystack, score: Score, *, kind: Kind, length: int, num_depths: int, cases: int, seed: int
) -> tuple[RetrievalCell, ...]:
    """Measure retrieval for one kind and length, and return one cell per depth, ascending.

    Raises:
        UserError: A row is too short for one question.
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
