"""A long text that is divided has the same tokens as in one piece."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from ray_ulysses.data.tokenize.dividing import divide, dividing_pattern
from ray_ulysses.data.tokenize.tokenizers import ByteTokenizer

_MARKS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    "llama 3": rf"{_MARKS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    "qwen 2": rf"{_MARKS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_MARKS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_MARKS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",
    "deepseek": r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}",
}
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
PIECES = [
    *("a", "B", "word", "1", "23", " ", "  ", "\n", "\n\n", "\r\n", "\t", ".", "'s", "/", "_"),
    *("é", "e\u0301", "漢字", "🙂", "ß"),
]


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def pre_tokenizer_of(kind: str) -> Any:
    if kind == "gpt 2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "deepseek":
        before = [split(r"\p{N}{1,3}"), split(r"[一-龥぀-ゟ゠-ヿ]+")]
        return pre_tokenizers.Sequence([*before, split(PATTERNS[kind]), BYTE_LEVEL])
    return pre_tokenizers.Sequence([split(PATTERNS[kind]), BYTE_LEVEL])


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Train a BPE with merges of line feeds, spaces and letters wherever the pre-tokenizer allows them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer_of(kind)
    rng = np.random.default_rng(0)
    texts = ["".join(PIECES[n] for n in rng.integers(0, len(PIECES), 300)) for _ in range(80)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


KINDS = [*PATTERNS, "gpt 2"]


@pytest.mark.parametrize("kind", KINDS)
@example(pieces=["\n\n", "a"], size=2)
@given(pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=60), size=st.integers(2, 12))
def test_the_parts_have_the_same_tokens_as_the_text(kind: str, pieces: list[str], size: int) -> None:
    tokenizer, text = tokenizer_of(kind), "".join(pieces)
    pattern = dividing_pattern(json.loads(tokenizer.to_str()))
    assert pattern is not None
    parts = list(divide(text, pattern, size))
    assert "".join(parts) == text
    assert [one for part in parts for one in ids(tokenizer, part)] == ids(tokenizer, text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_is_divided(kind: str) -> None:
    pattern = dividing_pattern(json.loads(tokenizer_of(kind).to_str()))
    breaks = "\n" if kind == "gpt 2" else "\n\n"
    text = f"A line of it.{breaks}" * 1000
    parts = list(divide(text, pattern, 500))
    assert len(parts) > 20 and max(map(len, parts)) < 540
    assert list(divide(text.replace("\n", " "), pattern, 500)) == [text.replace("\n", " ")], "no place is known"


def split_json(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("model", {"type": "Unigram"}),
        ("model", {"type": "BPE", "dropout": 0.1}),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}),
        ("pre_tokenizer", None),
        ("pre_tokenizer", {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first"}),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}),
        ("pre_tokenizer", split_json(r"\n.*|\s+")),
        ("pre_tokenizer", split_json(r"\p{N}|\s+")),
        ("added_tokens", [{"id": 1, "content": "a\nb", "special": False}]),
        ("added_tokens", [{"id": 1, "content": "ab", "special": False, "rstrip": True}]),
    ],
)
def test_a_tokenizer_that_may_merge_across_a_cut_does_not_divide(part: str, value: Any) -> None:
    assert dividing_pattern({**json.loads(tokenizer_of("llama 3").to_str()), part: value}) is None


def test_a_text_with_a_special_token_and_bytes_are_divided() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_of("llama 3").to_str())
    tokenizer.add_special_tokens([AddedToken("<x\ny>", special=True)])
    tokenizer.encode_special_tokens = True
    pattern = dividing_pattern(json.loads(tokenizer.to_str()))
    assert pattern is not None
    text = "one <x\ny> two <x\ny> three\n"
    parts = list(divide(text, pattern, 3))
    assert len(parts) == 3 and [one for part in parts for one in ids(tokenizer, part)] == ids(tokenizer, text)
    text, encode = "é漢🙂" * 100_000, ByteTokenizer().encode_all
    parts = list(ByteTokenizer().divide(text))
    assert len(parts) > 1 and "".join(parts) == text
    assert np.array_equal(np.concatenate([encode([part])[0] for part in parts]), encode([text])[0])
