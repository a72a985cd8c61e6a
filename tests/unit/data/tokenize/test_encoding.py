"""Tokens that begin and end documents, and label spans."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ray_ulysses.commands.prepare import _request, _result
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare import unit_writer
from ray_ulysses.data.sources.rows import ChatRow, CompletionRow, RowError, TokenRow
from ray_ulysses.data.tokenize.encoding import load_encoder, weighted
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.data.tokenize.spans import LabelSpans, mask_spans, span_mask
from ray_ulysses.data.tokenize.tokenizers import load_tokenizer
from ray_ulysses.errors import UserError
from tests.unit.data.corpora import mask_of
from tests.unit.data.tokenize.test_chat import CHATML, CONVERSATION, FORGETFUL, chat_tokenizer
from tests.unit.data.tokenize.test_supervision import prepare_rows, reasons_of
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


def spans_of(documents: list[list[tuple[int, int]]]) -> LabelSpans:
    flat = np.array([span for spans in documents for span in spans], dtype=np.int64).reshape(-1, 2)
    offsets = np.cumsum([0, *(len(spans) for spans in documents)], dtype=np.int64)
    return LabelSpans(offsets=offsets, starts=flat[:, 0], stops=flat[:, 1])


@st.composite
def documents(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Draw documents with valid spans, including none, adjacent spans, and a span at the start."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        spans, at = [], 0
        for gap, size in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=6)):
            spans.append((at + gap, at + gap + size))
            at += gap + size
        found.append(spans)
    return found


RANGES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=20)


@given(documents(), RANGES)
@example([[(3, 5)], [(0, 2), (2, 4)]], [(0, 2, 3), (0, 2, 4), (0, 3, 5), (0, 4, 9), (0, 5, 9), (1, 0, 1_000)])
@example([[], []], [(0, 0, 5)])
def test_counts_and_masks_equal_a_loop_over_tokens(
    spans: list[list[tuple[int, int]]], ranges: list[tuple[int, int, int]]
) -> None:
    label_spans = spans_of(spans)
    ranges = [(document % len(spans), first, last) for document, first, last in ranges]
    expected = []
    for document, first, last in ranges:
        tokens = [any(start <= token < stop for start, stop in spans[document]) for token in range(first, last)]
        assert mask_of(label_spans, document, first, last).tolist() == tokens
        expected.append(sum(tokens))
    found = label_spans.count(*(np.array(column, dtype=np.int64) for column in zip(*ranges, strict=True)))
    assert found.dtype == np.int64 and found.tolist() == expected
    every = label_spans.count(np.arange(len(spans)), np.int64(1), np.int64(5))
    assert every.tolist() == [mask_of(label_spans, document, 1, 5).sum() for document in range(len(spans))]


@pytest.mark.parametrize("spans", [[(2, 2)], [(-1, 2)], [(0, 3), (2, 4)], [(5, 6), (0, 2)]])
def test_inconsistent_spans_and_offsets_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="span"):
        spans_of([spans])
    one = np.array([0], dtype=np.int64)
    for offsets in ([0, 2], [0, 2, 1]):
        with pytest.raises(ValueError, match="offsets must"):
            LabelSpans(offsets=np.array(offsets), starts=one, stops=one + 1)


@given(st.lists(st.booleans(), max_size=30))
def test_a_mask_and_its_spans_are_the_same(mask: list[bool]) -> None:
    starts, stops = mask_spans(np.array(mask, dtype=np.bool_))
    assert span_mask(starts, stops, 0, len(mask)).tolist() == mask
    assert (starts[1:] > stops[:-1]).all()
