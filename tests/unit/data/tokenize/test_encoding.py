"""The tokens that begin and end documents, and the options that decide how documents are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ulysses.commands.prepare import _request, _result
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.prepare.unit_writer import unit_signature
from ray_ulysses.data.sources.files import FileStamp
from ray_ulysses.data.sources.rows import CompletionRow, RowFields, TokenRow
from ray_ulysses.data.sources.units import SourceSpec, Unit
from ray_ulysses.data.tokenize.encoding import load_encoder, weighted
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.data.tokenize.tokenizers import load_tokenizer
from ray_ulysses.errors import UserError
from tests.local_preparation import prepare_local
from tests.unit.data.tokenize.test_chat import CHATML, CONVERSATION, FORGETFUL, chat_tokenizer
from tests.unit.data.tokenize.test_tokenizers import fast_tokenizer

BOS, EOS = 0, 1


def bos_tokenizer(directory: Path, processor: str | None = "<s> $A", **config: Any) -> Path:
    """A tokenizer that puts tokens around a text, as those of Llama 3 and Gemma do."""
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
    ("processor", "own"),
    [("<s> $A", BOS), ("<s> $A </s>", BOS), ("$A </s>", None), (None, None)],
    ids=["bos", "both", "eos", "none"],
)
def test_a_text_begins_as_the_tokenizer_itself_begins_it(
    tmp_path: Path, processor: str | None, own: int | None
) -> None:
    from transformers import AutoTokenizer

    directory = bos_tokenizer(tmp_path, processor)
    (found,) = load_encoder(directory).encode("the fox")
    expected = AutoTokenizer.from_pretrained(directory)("the fox")["input_ids"]
    assert found.ids.tolist() == [*expected, *([] if expected[-1] == EOS else [EOS])]
    assert (found.ids[0] == BOS) == (own == BOS) and found.is_whole
    assert [*load_tokenizer(directory).encode_all(["the fox"])[0], EOS] == found.ids.tolist()[own is not None :]


def test_the_settings_of_an_old_tokenizer_begin_a_text(tmp_path: Path) -> None:
    assert load_encoder(bos_tokenizer(tmp_path / "a", None, add_bos_token=True)).bos_token_id == BOS
    assert load_encoder(bos_tokenizer(tmp_path / "b", None, add_bos_token=False)).bos_token_id is None


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
    for name in ("bos", "eos"):
        with pytest.raises(
            UserError, match=rf"^--{name}='<pad>': is no token of the tokenizer .*; give one that is, or tok"
        ):
            load_encoder(directory, EncodingOptions(**{name: "<pad>"}))
    with pytest.raises(UserError, match=r"^--bos='<s>': is no token of the tokenizer bytes"):
        load_encoder("bytes", EncodingOptions(bos="<s>"))


def test_a_prompt_begins_with_the_token_too_and_it_is_not_learned(tmp_path: Path) -> None:
    directory = bos_tokenizer(tmp_path)
    tokenizer = load_tokenizer(directory)
    for prompt, completion in (("the quick", " fox"), ("th", "e fox"), ("", "fox")):
        for options in (EncodingOptions(), EncodingOptions(eos="none"), EncodingOptions(bos="none")):
            (found,) = load_encoder(directory, options).encode(CompletionRow(prompt=prompt, completion=completion))
            begins = [BOS] if options.bos == "tokenizer" else []
            asked = [*begins, *tokenizer.encode_all([prompt])[0].tolist()]
            assert found.ids[: found.starts[0]].tolist() == asked
            ends = [] if options.eos == "none" else [EOS]
            said = found.ids[found.starts[0] : found.stops[0]].tolist()
            assert said[len(said) - len(ends) :] == ends and (EOS in said) == bool(ends)
            assert tokenizer.decode(found.ids[len(begins) : found.ids.size - len(ends)]) == prompt + completion


def corpus_of(
    directory: Path, tokenizer: str, options: EncodingOptions, rows: list[dict[str, Any]], **fields: str
) -> Corpus:
    directory.mkdir(exist_ok=True)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = SourceSpec(paths=(str(directory / "rows.jsonl"),), fields=RowFields.from_options(dict(fields)))
    return prepare_local(PrepareRequest(sources=spec, out=directory / "corpus", tokenizer=tokenizer, encoding=options))


def test_a_corpus_records_and_says_how_its_documents_were_written(tmp_path: Path) -> None:
    tokenizer = str(bos_tokenizer(tmp_path / "tokenizer"))
    corpus = corpus_of(tmp_path / "a", tokenizer, EncodingOptions(), [{"text": "the fox"}])
    assert corpus.info.encoding is not None and corpus.info.encoding.bos_token_id == BOS
    assert corpus.info.end_tokens == (EOS,) and Corpus.open(corpus.path).info == corpus.info
    assert "texts begin with <s> (token 0)" in _result(corpus.path)
    bare = corpus_of(tmp_path / "b", tokenizer, EncodingOptions(bos="none", eos="none"), [{"text": "the fox"}])
    assert bare.info.end_tokens == () and bare.fingerprint != corpus.fingerprint
    assert "documents end with no token of their own" in _result(bare.path)
    other = corpus_of(tmp_path / "c", tokenizer, EncodingOptions(eos="<s>"), [{"text": "the fox"}])
    assert other.info.end_tokens == (BOS,) and "documents end with <s> (token 0)" in _result(other.path)


def test_conversations_that_became_several_documents_are_counted(tmp_path: Path) -> None:
    tokenizer = str(chat_tokenizer(tmp_path / "tokenizer", FORGETFUL))
    rows = [{"m": CONVERSATION}, {"m": CONVERSATION[1:3]}]
    corpus = corpus_of(tmp_path / "a", tokenizer, EncodingOptions(), rows, messages_field="m")
    assert corpus.num_documents == 3 and [corpus.source(number)[1] for number in range(3)] == [1, 1, 2]
    said = next(line for line in _result(corpus.path) if line.startswith("chats"))
    assert said == (
        "chats: turns by rendering up to each; all turns of the assistant are learned; 2 conversations as 3 documents, "
        "since the chat template writes turns differently once the conversation goes on"
    )


def test_other_options_make_another_corpus(tmp_path: Path) -> None:
    tokenizer = str(chat_tokenizer(tmp_path / "tokenizer"))
    rows = [{"m": CONVERSATION}]
    corpus_of(tmp_path / "a", tokenizer, EncodingOptions(), rows, messages_field="m")
    for options in (
        EncodingOptions(turns="whole"),
        EncodingOptions(train_on="last"),
        EncodingOptions(eos="none"),
        EncodingOptions(chat_template=CHATML + " "),
    ):
        with pytest.raises(UserError, match=r"already holds a corpus of other sources, options or source files"):
            corpus_of(tmp_path / "a", tokenizer, options, rows, messages_field="m")


def test_units_without_the_token_that_begins_texts_are_made_again(tmp_path: Path) -> None:
    unit = Unit(index=0, kind="text", files=(FileStamp(path="a", num_bytes=1, modified_ns=1),))
    directory = bos_tokenizer(tmp_path)
    assert unit_signature(unit, load_encoder(directory)) != unit_signature(
        unit, load_encoder(directory, EncodingOptions(bos="none"))
    )


def test_options_of_chats_without_chats_are_refused(tmp_path: Path) -> None:
    for options, name in ((EncodingOptions(turns="split"), "turns"), (EncodingOptions(train_on="last"), "train-on")):
        with pytest.raises(
            UserError, match=rf"^--{name}: counts for chats only; leave it out, or set --messages-field$"
        ):
            corpus_of(tmp_path, "bytes", options, [{"text": "a"}])
    with pytest.raises(
        UserError, match=r"^--turns: --tokenizer=bytes has a format of its own for chats; leave it out$"
    ):
        corpus_of(tmp_path, "bytes", EncodingOptions(turns="split"), [{"m": CONVERSATION}], messages_field="m")
    bytes_last = corpus_of(
        tmp_path, "bytes", EncodingOptions(train_on="last"), [{"m": CONVERSATION}], messages_field="m"
    )
    assert bytes_last.info.spans is not None and bytes_last.info.spans.num_spans == 1


def test_the_options_reach_the_request_and_a_template_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("é{{ messages }}")
    given: dict[str, Any] = {"kind": "auto", "pattern": "*", "split": None, "duplicates": "keep", "tokenizer": "bytes"}
    given |= {"sources": ["a"], "out": tmp_path / "out", "exclude": None, "without": None}
    given |= {"bos": "none", "eos": "<x>", "turns": "split", "train_on": "last"}
    request = _request(chat_template=tmp_path / "t.jinja", **given)
    assert request.encoding == EncodingOptions(
        bos="none", eos="<x>", chat_template="é{{ messages }}", turns="split", train_on="last"
    )
    with pytest.raises(
        UserError, match=r"^--chat-template=.*nowhere: can't be read \(No such file .*\); name a Jinja file$"
    ):
        _request(chat_template=tmp_path / "nowhere", **given)
    (tmp_path / "t.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"^--chat-template=.*t\.jinja: is not UTF-8 \(.*\); save it as UTF-8$"):
        _request(chat_template=tmp_path / "t.jinja", **given)
    with pytest.raises(UserError, match=r"the tokenizer bytes has no chat template"):
        _request(chat_template=Path("training"), **given)


def test_a_loss_mask_makes_the_same_document_as_labels_and_another_than_other_masks() -> None:
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


def test_a_loss_mask_ends_turns_as_labels_do_wherever_an_end_token_is_added(tmp_path: Path) -> None:
    options = EncodingOptions(eos="</s>")
    encoder = load_encoder(chat_tokenizer(tmp_path), options)
    (end,) = (key for key in [encoder.tokenizer.token_id("<|im_end|>")] if key is not None)
    tokens = np.array([65, end, 66, 67, end, 68, end])
    mask = np.array([0, 0, 1, 1, 1, 0, 0])
    (labeled,) = encoder.encode(TokenRow(tokens=tokens, labels=np.where(mask, tokens, -100)))
    (plain,) = encoder.encode(TokenRow(tokens=tokens, labels=None))
    for weights in (mask, [0, 0, 0.5, 1, 1, 0, 0]):
        masked = weighted(plain, np.array(weights, dtype=np.float32), encoder.tokenizer.special_ids)
        assert masked.ids[-1] == EOS and masked.turn_ends == labeled.turn_ends == {end}
    whole = weighted(plain, np.ones(7, dtype=np.float32), encoder.tokenizer.special_ids)
    assert whole.turn_ends == {end}
