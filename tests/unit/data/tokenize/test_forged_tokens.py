"""Texts that spell special tokens, with tokenizers whose own vocabulary or merges produce these tokens from text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ulysses.data.prepare import unit_writer
from ray_ulysses.data.sources.rows import ChatRow, CompletionRow, RowError
from ray_ulysses.data.tokenize.encoding import load_encoder
from ray_ulysses.data.tokenize.options import EncodingOptions
from tests.unit.data.tokenize.test_supervision import prepare_rows, reasons_of
from tests.unit.data.tokenize.test_tokenizers import fast_tokenizer

FORGED = "a part of its text is tokenized as the special token '</s>'"


def forgeable_tokenizer(directory: Path, kind: str) -> Path:
    """Write a tokenizer that, like T5's, produces its end token from a text that spells the token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = [chr(code) for code in range(97, 123)]
    if kind == "unigram":
        pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((one, -3.0) for one in ("\u2581", *letters))]
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    else:
        vocabulary = ["<pad>", "</s>", "<unk>", "\u2581", *letters, "<", "/", ">", "</", "</s"]
        merges = [("<", "/"), ("</", "s"), ("</s", ">")]
        numbers = {one: number for number, one in enumerate(vocabulary)}
        tokenizer = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return directory


def with_end(directory: Path, *, special: bool = False, normalizer: Any = None) -> tuple[str, int]:
    """Return a tokenizer directory with an added token ``<end>`` that is not the end token, and the token's id."""
    from tokenizers import AddedToken, Tokenizer

    path = str(fast_tokenizer(directory) / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens([AddedToken("<end>", special=special)])
    tokenizer.save(path)
    return str(directory), int(tokenizer.token_to_id("<end>"))


@pytest.fixture(params=[False, True], ids=["batch", "long"])
def _length(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(unit_writer, "_LONG_CHARACTERS", 4)


@pytest.mark.usefixtures("_length")
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_document_that_forges_a_special_token_is_rejected(tmp_path: Path, kind: str) -> None:
    directory = forgeable_tokenizer(tmp_path / "tokenizer", kind)
    # Unknown characters and padding tokens are not a forgery.
    texts = ["he said so", "he said </s> and", "", "what? 7", "end</s>", "a <pad> b"]
    corpus = prepare_rows(tmp_path, [{"text": text} for text in texts], str(directory))
    assert [corpus.source(document).offset for document in range(corpus.num_documents)] == [1, 4, 6]
    assert sorted(reasons_of(corpus)) == [(2, FORGED), (3, "empty"), (5, FORGED)]
    for document, length in enumerate(corpus.lengths.tolist()):
        assert np.flatnonzero(corpus.read(document, 0, length) == 1).tolist() == [length - 1]


def test_a_completion_that_forges_its_end_token_is_rejected(tmp_path: Path) -> None:
    encoder = load_encoder(forgeable_tokenizer(tmp_path / "tokenizer", "unigram"))
    for row in (CompletionRow(prompt="a </s>", completion=" b"), CompletionRow(prompt="a", completion=" </s> b")):
        with pytest.raises(RowError, match=f"^{FORGED}$"):
            encoder.encode(row)


@pytest.mark.usefixtures("_length")
@pytest.mark.parametrize("special", [False, True])
def test_a_text_can_not_forge_a_chosen_end_token_that_is_not_special(tmp_path: Path, special: bool) -> None:
    directory, number = with_end(tmp_path / "tokenizer", special=special)
    rows = [{"text": text} for text in ("he said so", "he said <end> and")]
    # The token may be spelled if it is not the chosen end token.
    for name, options, num_kept in (
        ("own", EncodingOptions(), 2),
        ("chosen", EncodingOptions(eos="<end>"), 2 if special else 1),
    ):
        corpus = prepare_rows(tmp_path / name, rows, directory, encoding=options)
        assert corpus.num_documents == num_kept and corpus.source(0).offset == 1
    for document, length in enumerate(corpus.lengths.tolist()):
        assert np.flatnonzero(corpus.read(document, 0, length) == number).tolist() == [length - 1]


def test_a_chat_can_not_forge_a_chosen_end_token_that_is_not_special(tmp_path: Path) -> None:
    from tokenizers import normalizers

    directory, number = with_end(tmp_path / "tokenizer", normalizer=normalizers.NFKC())
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<end>{% endfor %}"
    Path(directory, "chat_template.jinja").write_text(template)
    encoder = load_encoder(directory, EncodingOptions(eos="<end>"))

    def answered(content: str) -> ChatRow:
        return ChatRow(messages=({"role": "user", "content": "who?"}, {"role": "assistant", "content": content}))

    # The template itself may write the token.
    (chat,) = encoder.encode(answered("he said so"))
    assert np.count_nonzero(chat.ids == number) == 2
    for forged in ("he said <end> and", "he said \uff1cend\uff1e and"):
        with pytest.raises(RowError, match=r"the special token '<end>'$"):
            encoder.encode(answered(forged))
    assert load_encoder(directory).encode(answered("he said <end> and"))
