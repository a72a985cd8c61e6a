r"""Divides a long text into parts whose concatenated tokens equal the tokens of the complete text.

Tokenizing a text requires memory of more than a hundred times the text's size. A long text is therefore tokenized in
parts if the tokens are provably the same: with byte-level BPE whose pre-tokenizer splits between a line feed and an
ASCII letter.

Such a pre-tokenizer scans the text from left to right. At each position, the first alternative of its pattern that
matches yields a word. None of the supported alternatives matches a line feed and a letter together, and none looks
behind. Of the alternatives that look ahead, only ``\s+(?!\S)`` inspects characters beyond the white space that it
matches. A line feed between a visible ASCII character and an ASCII letter always ends a word, whether or not the letter
follows, so the text up to the line feed and the text from the letter on yield the same words separately as together. If
``\s*[\r\n]+`` precedes ``\s+(?!\S)``, the same holds for several line feeds. BPE never merges across words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ray_ulysses.data.sources.rows import RowError
from ray_ulysses.data.tokenize.chat_template import MOST_CHARACTERS

PART_CHARACTERS = 1 << 18
_ONE_LINE_FEED = re.compile(r"[!-~]\n(?=[A-Za-z])")
_LINE_FEEDS = re.compile(r"[!-~]\n+(?=[A-Za-z])")
_BREAKS = r"\s*[\r\n]+"
_SPACES = r"\s+"
_MARKS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = frozenset(
    (
        r" ?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_MARKS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_MARKS}?",
    )
)
_OTHERS = frozenset(
    (
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
        _MARKS,
        r"'(?:[sdmt]|ll|ve|re)",
        *(r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r" ?\p{N}+"),
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        r"[一-龥぀-ゟ゠-ヿ]+",
        _BREAKS,
        r"\s*[\r\n]",
        r"\s+(?!\S)",
        _SPACES,
    )
)
# The pattern of the library's ByteLevel pre-tokenizer, which is GPT-2's.
_GPT_2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def dividing_pattern(tokenizer: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Return a pattern that matches up to each safe cut, or None if texts must be tokenized in one piece.

    Args:
        tokenizer: Content of ``tokenizer.json``.
    """
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE" or model.get("dropout") or not _is_local(tokenizer.get("normalizer")):
        return None
    # Special tokens in a text are encoded as plain text. Other added tokens are matched before the pre-tokenizer runs.
    for token in tokenizer.get("added_tokens") or ():
        is_plain = not (token.get("lstrip") or token.get("rstrip") or token.get("single_word"))
        if not token.get("special") and (not is_plain or "\n" in token.get("content", "")):
            return None
    patterns = _patterns(tokenizer.get("pre_tokenizer"))
    if patterns is None:
        return None
    cutting = [one for one in patterns if _SPACES in one and not _WORDS.isdisjoint(one)]
    if not cutting:
        return None
    return _LINE_FEEDS if all(_takes_breaks_first(one) for one in patterns if _SPACES in one) else _ONE_LINE_FEED


def divide(text: str, pattern: re.Pattern[str] | None, size: int = PART_CHARACTERS) -> Iterator[str]:
    """Yield the parts of a text. Each part ends at the first safe cut after about ``size`` characters."""
    start = 0
    while pattern is not None and len(text) - start > size and (found := pattern.search(text, start + size - 2)):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:] if start else text


@contextmanager
def unwritable_text_refused(*texts: str) -> Iterator[None]:
    """Convert a tokenizer's failure into a RowError.

    A text is refused if it is too long to tokenize at once, if it contains a part for which the tokenizer has no token,
    or if one of the tokenizer's regular expressions exceeds its limits.
    """
    if (longest := max(map(len, texts), default=0)) > MOST_CHARACTERS:
        raise RowError(f"{longest} characters exceed this tokenizer's limit of {MOST_CHARACTERS}; split the text")
    try:
        yield
    except BaseException as error:
        # The library raises a bare Exception, or pyo3's PanicException, which is not exported.
        if type(error).__name__ == "PanicException":
            raise RowError(f"the tokenizer panicked: {error}") from error
        if type(error) is not Exception:
            raise
        raise RowError(f"part of the text has no token: {error}") from error


def _takes_breaks_first(alternatives: Sequence[str]) -> bool:
    if _BREAKS not in alternatives:
        return False
    others = [place for place, one in enumerate(alternatives) if one.startswith(r"\s+")]
    return alternatives.index(_BREAKS) < min(others)


def _is_local(normalizer: Any) -> bool:
    if normalizer is None:
        return True
    if normalizer.get("type") == "Sequence":
        return all(map(_is_local, normalizer.get("normalizers") or ()))
    # Neither a line feed nor a letter combines with the character before it.
    return bool(normalizer.get("type") == "NFC")


def _patterns(pre_tokenizer: Any) -> list[list[str]] | None:
    """Return the alternatives of each splitting pattern, in order, or None if a pre-tokenizer is not supported."""
    kind = None if pre_tokenizer is None else pre_tokenizer.get("type")
    if kind == "Sequence":
        found: list[list[str]] = []
        for one in pre_tokenizer.get("pretokenizers") or ():
            inner = _patterns(one)
            if inner is None:
                return None
            found += inner
        return found
    if kind == "ByteLevel" and not pre_tokenizer.get("add_prefix_space", True):
        return [_alternatives(_GPT_2)] if pre_tokenizer.get("use_regex", True) else []
    if kind == "Digits":
        return []
    if kind != "Split" or pre_tokenizer.get("behavior") != "Isolated" or pre_tokenizer.get("invert"):
        return None
    alternatives = _alternatives((pre_tokenizer.get("pattern") or {}).get("Regex") or "")
    return [alternatives] if _WORDS.union(_OTHERS).issuperset(alternatives) else None


def _alternatives(pattern: str) -> list[str]:
    found, depth, is_escaped, is_class = [""], 0, False, False
    for character in pattern:
        if character == "|" and not (depth or is_escaped or is_class):
            found.append("")
            continue
        if not is_escaped:
            if is_class or character == "[":
                is_class = character != "]"
            depth += (character == "(" and not is_class) - (character == ")" and not is_class)
        is_escaped = character == "\\" and not is_escaped
        found[-1] += character
    return found
