"""Tokens that begin and end documents, and the options that determine how documents are tokenized."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ulysses.commands.prepare import _request, _result
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.sources.rows import CompletionRow, TokenRow
from ray_ulysses.data.tokenize.encoding import load_encoder, weighted
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.data.tokenize.tokenizers import load_tokenizer
from ray_ulysses.errors import UserError
from tests.unit.data.tokenize.test_chat import CHATML, CONVERSATION, FORGETFUL, chat_tokenizer
from tests.unit.data.tokenize.test_supervision import prepare_rows
from tests.unit.data.tokenize.test_tokenizers import fast_tokenizer

BOS, EOS = 0, 1


def bos_tokenizer(directory: Path, processor: str | None = "<s> $A", **config: Any) -> Path:
    """Write a tokenizer that adds tokens around a text, like those of Llama 3 and Gemma."""
    from tokenizers import Tokenizer, processors

    fast_tokenizer(directory, {"eos_token": "</s>", "bos_token": "<s>", **config})
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if processor is not None:
        names = [("<s>", BOS), ("</s>", EOS)]
        tokenizer.post_processor = processors.TemplateProcessing(single=processor, special_tokens=names)
    tokenizer.save(path)
    return directory


@pytest.mark.parametrize(
    ("processor", "begins"),
    [("<s> $A", True), ("<s> $A </s>", True), ("$A </s>", False), (None, False)],
    ids=["bos", "both", "eos", "none"],
)
def test_a_text_begins_as_the_tokenizer_itself_begins_it(tmp_path: Path, processor: str | None, begins: bool) -> None:
    from transformers import AutoTokenizer

    directory = bos_tokenizer(tmp_path, processor)
    (found,) = load_encoder(directory).encode("the fox")
    expected = AutoTokenizer.from_pretrained(directory)("the fox")["input_ids"]
    assert found.ids.tolist() == [*expected, *([] if expected[-1] == EOS else [EOS])]
    assert (found.ids[0] == BOS) == begins and found.is_whole
    if processor is None:
        # The setting of Transformers 4.
        for value, bos in ((True, BOS), (False, None)):
            made = bos_tokenizer(tmp_path / str(value), None, add_bos_token=value)
            assert load_encoder(made).bos_token_id == bos


def test_the_tokens_around_a_document_are_chosen(tmp_path: Path) -> None:
    directory = bos_tokenizer(tmp_path)
    text = load_tokenizer(directory).encode_all(["the fox"])[0].tolist()
    for options, before, after in (
        (EncodingOptions(bos="none"), [], [EOS]),
        (EncodingOptions(bos="</s>", eos="<s>"), [EOS], [BOS]),
        (EncodingOptions(eos="none"), [BOS], []),
    ):
        (found,) = load_encoder(directory, options).encode("the fox")
        assert found.ids.tolist() == [*before, *text, *after]
    for tokenizer, name in ((directory, "bos"), (directory, "eos"), ("bytes", "bos")):
        with pytest.raises(UserError, match=f"^--{name}='<pad>': "):
            load_encoder(tokenizer, EncodingOptions(**{name: "<pad>"}))


@pytest.mark.parametrize("row", [("the quick", " fox"), ("th", "e fox"), ("", "fox")], ids=["whole", "inside", "empty"])
def test_a_prompt_keeps_its_own_tokens_which_are_not_supervised(tmp_path: Path, row: tuple[str, str]) -> None:
    directory, (prompt, completion) = bos_tokenizer(tmp_path), row
    tokenizer = load_tokenizer(directory)
    for options in (EncodingOptions(), EncodingOptions(eos="none"), EncodingOptions(bos="none")):
        (found,) = load_encoder(directory, options).encode(CompletionRow(prompt=prompt, completion=completion))
        begins = [BOS] if options.bos == "tokenizer" else []
        assert found.ids[: found.starts[0]].tolist() == [*begins, *tokenizer.encode_all([prompt])[0].tolist()]
        ends = [] if options.eos == "none" else [EOS]
        said = found.ids[found.starts[0] : found.stops[0]].tolist()
        assert said[len(said) - len(ends) :] == ends and (EOS in said) == bool(ends)
        assert tokenizer.decode(found.ids[len(begins) : found.ids.size - len(ends)]) == prompt + completion


def test_a_corpus_records_how_its_documents_were_tokenized(tmp_path: Path) -> None:
    tokenizer = str(bos_tokenizer(tmp_path / "tokenizer"))
    prepared = {
        name: prepare_rows(tmp_path / name, [{"text": "the fox"}], tokenizer, encoding=options)
        for name, options in (
            ("own", EncodingOptions()),
            ("bare", EncodingOptions(bos="none", eos="none")),
            ("other", EncodingOptions(eos="<s>")),
        )
    }
    assert prepared["own"].info.encoding.bos_token_id == BOS
    assert Corpus.open(prepared["own"].path).info == prepared["own"].info
    assert [corpus.info.end_tokens for corpus in prepared.values()] == [(EOS,), (), (BOS,)]
    assert len({corpus.fingerprint for corpus in prepared.values()}) == 3
    assert "texts begin with <s> (token 0)" in _result(prepared["own"].path)
    assert "documents have no end token" in _result(prepared["bare"].path)


def test_conversations_that_became_several_documents_are_counted(tmp_path: Path) -> None:
    tokenizer = str(chat_tokenizer(tmp_path / "tokenizer", FORGETFUL))
    corpus = prepare_rows(tmp_path, [{"m": CONVERSATION}, {"m": CONVERSATION[1:3]}], tokenizer, messages_field="m")
    assert corpus.num_documents == 3 and [corpus.source(number)[1] for number in range(3)] == [1, 1, 2]
    assert (corpus.info.encoding.num_chats, corpus.info.encoding.num_chat_documents) == (2, 3)
    assert any("2 conversations as 3 documents" in line for line in _result(corpus.path))


def test_other_options_or_another_template_make_another_corpus(tmp_path: Path) -> None:
    directory = chat_tokenizer(tmp_path / "tokenizer")
    again = partial(prepare_rows, tmp_path, [{"m": CONVERSATION}], str(directory), messages_field="m")
    again()
    for options in (
        *(EncodingOptions(turns="whole"), EncodingOptions(train_on="last"), EncodingOptions(bos="<s>")),
        *(EncodingOptions(eos="none"), EncodingOptions(chat_template=CHATML + " ")),
    ):
        with pytest.raises(UserError, match="contains a corpus"):
            again(encoding=options)
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(UserError, match="contains a corpus"):
        again()


def test_options_of_chats_without_chats_are_refused(tmp_path: Path) -> None:
    split, last = EncodingOptions(turns="split"), EncodingOptions(train_on="last")
    for options, name in ((split, "turns"), (last, "train-on")):
        with pytest.raises(UserError, match=f"^--{name}: applies to chats only"):
            prepare_rows(tmp_path, [{"text": "a"}], encoding=options)
    with pytest.raises(UserError, match=r"^--turns: --tokenizer=bytes"):
        prepare_rows(tmp_path, [{"m": CONVERSATION}], encoding=split, messages_field="m")
    corpus = prepare_rows(tmp_path, [{"m": CONVERSATION}], encoding=last, messages_field="m")
    assert corpus.info.spans is not None and corpus.info.spans.num_spans == 1


def test_the_options_reach_the_request_and_a_template_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("é{{ messages }}")
    given: dict[str, Any] = {"kind": "auto", "pattern": "*", "split": None, "duplicates": "keep", "tokenizer": "bytes"}
    given |= {"sources": ["a"], "out": tmp_path / "out", "exclude": None, "without": None}
    options: dict[str, Any] = {"bos": "none", "eos": "<x>", "turns": "split", "train_on": "last"}
    request = _request(chat_template=tmp_path / "t.jinja", **given, **options)
    assert request.encoding == EncodingOptions(chat_template="é{{ messages }}", **options)
    (tmp_path / "t.jinja").write_bytes(b"\xff")
    for name, reason in (("nowhere", "No such file"), ("t.jinja", "UTF-8"), ("training", "no chat template")):
        template = Path(name) if name == "training" else tmp_path / name
        with pytest.raises(UserError, match=reason):
            _request(chat_template=template, **given, **options)


def test_a_loss_mask_gives_the_same_document_as_equal_labels() -> None:
    encoder, tokens = load_encoder("bytes"), np.array([65, 66, 67, 256])
    (plain,) = encoder.encode(TokenRow(tokens=tokens, labels=None))
    (labeled,) = encoder.encode(TokenRow(tokens=tokens, labels=np.array([-100, -100, 67, 256])))
    special = encoder.tokenizer.special_ids
    first, second = (
        weighted(plain, np.array(mask, dtype=np.float32), special) for mask in ([0, 1, 1, 0], [0, 0, 1, 1])
    )
    assert first.digest != second.digest == labeled.digest != plain.digest
    assert second.weights is None and second.starts.tolist() == [2] and second.stops.tolist() == [4]
    assert (first.turn_ends, second.turn_ends) == (frozenset(), {256}) and labeled.turn_ends == {256}
    assert weighted(plain, np.full(4, 0.5, dtype=np.float32), special).digest == plain.digest


def test_a_loss_mask_ends_turns_as_labels_do(tmp_path: Path) -> None:
    encoder = load_encoder(chat_tokenizer(tmp_path), EncodingOptions(eos="</s>"))
    end = encoder.tokenizer.token_id("<|im_end|>")
    assert end is not None
    tokens, mask = np.array([65, end, 66, 67, end, 68, end]), np.array([0, 0, 1, 1, 1, 0, 0])
    (labeled,) = encoder.encode(TokenRow(tokens=tokens, labels=np.where(mask, tokens, -100)))
    (plain,) = encoder.encode(TokenRow(tokens=tokens, labels=None))
    for weights in (mask, [0, 0, 0.5, 1, 1, 0, 0]):
        masked = weighted(plain, np.array(weights, dtype=np.float32), encoder.tokenizer.special_ids)
        assert masked.ids[-1] == EOS and masked.turn_ends == labeled.turn_ends == {end}
    whole = weighted(plain, np.ones(7, dtype=np.float32), encoder.tokenizer.special_ids)
    assert whole.turn_ends == {end}
