"""Damage to files and texts, drawn from a seed: flipped bits, cuts, copies, and tokens that parsers may fear."""

from __future__ import annotations

import random
import re

NASTY = (
    *(b"null", b"true", b"-1", b"0", b"1.5", b"1e999999", b"-1e999", b"NaN", b"Infinity", b"9" * 5000, b"\n", b","),
    *(b'""', b'"\\ud800"', b'"\\u0000"', b"\x00", b"\xff\xfe", b'"' + b"x" * 5000 + b'"', b"[]", b"{}", b"[[]]", b"{"),
    *(b"[" * 3000, b'{"a":' * 3000, b"[" * 300 + b"]" * 300, b'"../../etc/passwd"', b'"s3://a:b@c/d"'),
)
NASTY_YAML = (
    *(b"&a [*a]", b"*a", b"!!float ''", b"!!bool x", b"!!timestamp x", b"!!python/object:os.system x", b"<<: 1"),
    *(b"- " * 300, b"\t", b"|9", b"%YAML 9.9", b"---", b".inf", b".nan", b"~", b"1_" * 3000, b'"\\UFFFFFFFF"'),
    *(b"&a [x,x,x,x,x,x,x,x,x]", b"{<<: [*a, *a]}", b"[*a,*a,*a,*a,*a,*a,*a]", b"\xef\xbb\xbf", b"'" * 99, b"? [a]"),
)
_TOKEN = re.compile(rb'"[^"\n]*"|-?\d+(?:\.\d+)?|[A-Za-z_]+')


def mutated(content: bytes, drawn: random.Random, nasty: tuple[bytes, ...] = NASTY) -> bytes:
    for _ in range(drawn.choice((1, 1, 1, 2, 3))):
        content = drawn.choice(_KINDS)(content, drawn, nasty)
    return content


def _flip(content: bytes, drawn: random.Random, _: tuple[bytes, ...]) -> bytes:
    if not content:
        return content
    place = drawn.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << drawn.randrange(8))]) + content[place + 1 :]


def _span(content: bytes, drawn: random.Random) -> tuple[int, int]:
    begin = drawn.randint(0, len(content))
    return begin, min(len(content), begin + drawn.choice((1, 2, 10, 100, 1000)))


def _cut(content: bytes, drawn: random.Random, _: tuple[bytes, ...]) -> bytes:
    begin, end = _span(content, drawn)
    return content[:begin] + content[end:]


def _end(content: bytes, drawn: random.Random, _: tuple[bytes, ...]) -> bytes:
    return content[: drawn.randint(0, len(content))]


def _copy(content: bytes, drawn: random.Random, _: tuple[bytes, ...]) -> bytes:
    begin, end = _span(content, drawn)
    place = drawn.randint(0, len(content))
    return content[:place] + content[begin:end] + content[place:]


def _zero(content: bytes, drawn: random.Random, _: tuple[bytes, ...]) -> bytes:
    begin, end = _span(content, drawn)
    return content[:begin] + bytes(end - begin) + content[end:]


def _insert(content: bytes, drawn: random.Random, nasty: tuple[bytes, ...]) -> bytes:
    place = drawn.randint(0, len(content))
    return content[:place] + drawn.choice(nasty) + content[place:]


def _replace(content: bytes, drawn: random.Random, nasty: tuple[bytes, ...]) -> bytes:
    tokens = list(_TOKEN.finditer(content))
    if not tokens:
        return drawn.choice(nasty)
    token = drawn.choice(tokens)
    return content[: token.start()] + drawn.choice(nasty) + content[token.end() :]


def _lines(content: bytes, drawn: random.Random, _: tuple[bytes, ...]) -> bytes:
    lines = content.split(b"\n")
    one, other = drawn.randrange(len(lines)), drawn.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


_KINDS = (_flip, _flip, _cut, _end, _copy, _zero, _insert, _replace, _replace, _replace, _lines)
