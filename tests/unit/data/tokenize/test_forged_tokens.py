"""Texts that spell special tokens, with tokenizers whose own vocabulary or merges make these of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ray_ulysses.data.prepare import unit_writer
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import ChatRow, CompletionRow, RowError, RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.data.tokenize.encoding import load_encoder
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.data.tokenize.tokenizers import load_tokenizer
from tests.local_preparation import prepare_local
from tests.unit.data.tokenize.test_supervision import reasons_of
from tests.unit.data.tokenize.test_tokenizers import fast_tokenizer

FORGED = "text in it reads as the special token '</s>'"


def forgeable_tokenizer(directory: Path, kind: str) -> Path:
    """A tokenizer that makes its end token of a text that spells it, as T5's does."""
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


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("long", [False, True], ids=["batch", "long"])
def test_a_document_that_would_become_a_special_token_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, long: bool
) -> None:
    if long:
        monkeypatch.setattr(unit_writer, "_LONG_CHARACTERS", 4)
    directory = forgeable_tokenizer(tmp_path / "tokenizer", kind)
    # Unknown characters and what pads are no forgery.
    texts = ["he said so", "he said </s> and", "", "what? 7", "end</s>", "a <pad> b"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    spec = SourceSpec(paths=(str(tmp_path / "rows.jsonl"),), fields=RowFields())
    corpus = prepare_local(PrepareRequest(sources=spec, out=tmp_path / "corpus", tokenizer=str(directory)))
    assert [corpus.source(document).offset for document in range(corpus.num_documents)] == [1, 4, 6]
    assert sorted(reasons_of(corpus)) == [(2, FORGED), (3, "empty"), (5, FORGED)]
    for document, length in enumerate(corpus.lengths.tolist()):
        assert np.flatnonzero(corpus.read(document, 0, length) == 1).tolist() == [length - 1]


def test_a_completion_that_would_end_itself_is_left_out(tmp_path: Path) -> None:
    encoder = load_encoder(forgeable_tokenizer(tmp_path / "tokenizer", "unigram"))
    for row in (CompletionRow(prompt="a </s>", completion=" b"), CompletionRow(prompt="a", completion=" </s> b")):
        with pytest.raises(RowError, match=f"^{FORGED}$"):
            encoder.encode(row)


def test_most_tokenizers_make_no_special_token_of_text(tmp_path: Path) -> None:
    assert load_tokenizer(fast_tokenizer(tmp_path)).forgeable == {} == load_tokenizer("bytes").forgeable


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("long", [False, True], ids=["batch", "long"])
def test_a_text_can_not_forge_a_chosen_end_token_that_is_not_special(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, special: bool, long: bool
) -> None:
    from tokenizers import AddedToken, Tokenizer

    if long:
        monkeypatch.setattr(unit_writer, "_LONG_CHARACTERS", 4)
    directory = fast_tokenizer(tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<end>", special=special)])
    tokenizer.save(str(directory / "tokenizer.json"))
    number = tokenizer.token_to_id("<end>")
    texts = ["he said so", "he said <end> and"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    spec, kept = SourceSpec(paths=(str(tmp_path / "rows.jsonl"),)), {}
    for name, options in (("own", EncodingOptions()), ("chosen", EncodingOptions(eos="<end>"))):
        request = PrepareRequest(sources=spec, out=tmp_path / name, tokenizer=str(directory), encoding=options)
        corpus = prepare_local(request)
        kept[name] = [corpus.source(document).offset for document in range(corpus.num_documents)]
    # Another end token than the chosen one leaves text alone.
    assert kept == {"own": [1, 2], "chosen": [1, 2] if special else [1]}
    for document, length in enumerate(corpus.lengths.tolist()):
        assert np.flatnonzero(corpus.read(document, 0, length) == number).tolist() == [length - 1]


def test_a_chat_can_not_forge_a_chosen_end_token_that_is_not_special(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, normalizers

    directory = fast_tokenizer(tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens([AddedToken("<end>", special=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<end>{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    encoder = load_encoder(str(directory), EncodingOptions(eos="<end>"))
    asked = {"role": "user", "content": "said who?"}
    # The template's own ends are meant.
    (chat,) = encoder.encode(ChatRow(messages=(asked, {"role": "assistant", "content": "he said so"})))
    assert np.count_nonzero(chat.ids == tokenizer.token_to_id("<end>")) == 2
    forged = ChatRow(messages=(asked, {"role": "assistant", "content": "he said <end> and"}))
    with pytest.raises(RowError, match=r"^message 1 \(assistant\) spells the special token '<end>'$"):
        encoder.encode(forged)
    wide = ChatRow(messages=(asked, {"role": "assistant", "content": "he said \uff1cend\uff1e and"}))
    with pytest.raises(RowError, match=r"^'\uff1cend\uff1e' reads as the special token '<end>'$"):
        encoder.encode(wide)
    # Another end token than the chosen one leaves text alone.
    assert load_encoder(str(directory)).encode(forged)
