"""Tokenizers of biological sequences, which are named by their letters and need no files.

``chars:ACGTN`` has one token per letter; ``chars:dna`` and ``chars:protein`` are names of common alphabets. ``kmer:6``
has one token for each six bases, without overlap, and single letters for the rest of a run of bases and for ``N``, as
the Nucleotide Transformer has them (https://doi.org/10.1038/s41592-024-02523-z). Letters are case-sensitive.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.errors import UserError
from ray_ulysses.storage.atomic import make_folders, write_text
from ray_ulysses.storage.block_cache import cache_folder

_BASES = "ACGT"
_ALPHABETS = {"dna": "ACGTN", "protein": "ACDEFGHIKLMNPQRSTVWYBJOUXZ*-"}
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_UNKNOWN, _BEGIN, _END = 1, 2, 3
_KMERS = range(2, 9)
_NAME = re.compile(r"(chars|kmer):(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceVocabulary:
    """The tokens of a sequence tokenizer: special tokens, then letters, then k-mers in the order of ``_BASES``."""

    letters: str
    k: int = 1
    """Number of bases of a k-mer, or 1 if there are none."""

    @classmethod
    def named(cls, name: str) -> SequenceVocabulary | None:
        """Return the vocabulary that a name such as ``chars:ACGT`` describes, or None for any other name.

        Raises:
            UserError: The letters or the length can't be used.
        """
        if (found := _NAME.fullmatch(name)) is None:
            return None
        kind, given = found.groups()
        if kind == "kmer":
            if given not in map(str, _KMERS):
                raise UserError(
                    f"tokenizer={name}: use a length from {_KMERS.start} to {_KMERS.stop - 1}, as in kmer:6"
                )
            return cls(letters=_ALPHABETS["dna"], k=int(given))
        letters = _ALPHABETS.get(given, given)
        is_usable = letters.isascii() and all(letter.isalnum() or letter in "*-." for letter in letters)
        if not letters or not is_usable or len({*letters}) < len(letters):
            raise UserError(
                f"tokenizer={name}: list different letters, digits or *-. after the colon, as in chars:ACGTN, or use "
                f"{' or '.join(f'chars:{one}' for one in _ALPHABETS)}"
            )
        return cls(letters=letters)

    @property
    def tokens(self) -> dict[str, int]:
        """Token ids by token text."""
        kmers = map("".join, itertools.product(_BASES, repeat=self.k)) if self.k > 1 else ()
        return {token: number for number, token in enumerate([*_SPECIAL, *self.letters, *kmers])}

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the tokens of a text without special tokens."""
        data = _bytes_of(text)
        ids = _table(self.letters, len(_SPECIAL), _UNKNOWN)[data]
        if self.k == 1:
            return ids
        bases = _table(_BASES, 0, -1)[data]
        # A run of bases has k-mers from its beginning, and letters after the last complete one.
        edges = np.flatnonzero(np.diff(bases >= 0, prepend=False, append=False))
        places, lengths = np.flatnonzero(bases >= 0), edges[1::2] - edges[::2]
        in_run = places - np.repeat(edges[::2], lengths)
        is_covered = in_run < np.repeat(lengths // self.k * self.k, lengths)
        starts = places[is_covered & (in_run % self.k == 0)]
        values = bases[starts[:, None] + np.arange(self.k)] @ (len(_BASES) ** np.arange(self.k)[::-1])
        ids[starts] = len(_SPECIAL) + len(self.letters) + values
        is_token = np.ones(ids.size, dtype=np.bool_)
        is_token[places[is_covered]] = False
        is_token[starts] = True
        return ids[is_token]

    def cut(self, text: str) -> int:
        """Return the last index at which a text, which begins with a token, may be cut between two tokens."""
        if self.k == 1:
            return len(text)
        others = np.flatnonzero(_table(_BASES, 0, -1)[_bytes_of(text)] < 0)
        run = int(others[-1]) + 1 if others.size else 0
        return run + (len(text) - run) // self.k * self.k

    def folder(self, name: str) -> Path:
        """Return the folder of the tokenizer for Transformers, which is in this node's cache."""
        # A hash, because some file systems ignore case.
        folder = cache_folder("tokenizers") / f"{name.partition(':')[0]}-{stable_hash([self.letters, self.k])}"
        make_folders(folder)
        for file, content in self._files().items():
            text = json.dumps(content, indent=2) + "\n"
            if not (folder / file).is_file() or (folder / file).read_text() != text:
                write_text(folder / file, text)
        return folder

    def _files(self) -> dict[str, Any]:
        """Return the files of a ``PreTrainedTokenizerFast`` with the same tokens, independent of library versions."""
        pieces = [{"SpecialToken": {"id": _SPECIAL[_BEGIN], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        end = {"SpecialToken": {"id": _SPECIAL[_END], "type_id": 0}}
        pattern = rf"[{_BASES}]{{{self.k}}}|[\s\S]" if self.k > 1 else r"[\s\S]"
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = [{"id": number, "content": token, **flags, "special": True} for number, token in enumerate(_SPECIAL)]
        framed = {
            _SPECIAL[one]: {"id": _SPECIAL[one], "ids": [one], "tokens": [_SPECIAL[one]]} for one in (_BEGIN, _END)
        }
        tokenizer = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [*pieces, end],
                "pair": [*pieces, end, {"Sequence": {"id": "B", "type_id": 1}}, end],
                "special_tokens": framed,
            },
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": self.tokens, "unk_token": _SPECIAL[_UNKNOWN]},
        }
        names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **dict(zip(names, _SPECIAL, strict=True)),
            "clean_up_tokenization_spaces": False,
        }
        return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _bytes_of(text: str) -> NDArray[np.uint8]:
    """Return a byte per character. Characters other than ASCII become question marks, which are in no alphabet."""
    return np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8)


def _table(letters: str, first: int, other: int) -> NDArray[np.int64]:
    """Return a table of 256 numbers: consecutive ones for ``letters`` from ``first`` on, and ``other`` elsewhere."""
    table = np.full(256, other, dtype=np.int64)
    table[[*letters.encode()]] = np.arange(first, first + len(letters))
    return table
