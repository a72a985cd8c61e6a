"""Tokenizers of sequences: their tokens equal those of Transformers, cut anywhere, and documents are framed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.commands.prepare import _result
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.read.masking import masking_with
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.data.tokenize import tokenizers
from ray_ulysses.data.tokenize.encoding import DocumentEncoder, load_encoder
from ray_ulysses.data.tokenize.sequences import SequenceVocabulary
from ray_ulysses.data.tokenize.tokenizers import Tokenizer, load_tokenizer, tokenizer_folder, transformers_tokenizer
from ray_ulysses.errors import UserError
from ray_ulysses.export.tokenizer_files import tokenizer_in
from ray_ulysses.storage.block_cache import FOLDER_VARIABLE
from tests.local_preparation import prepare_local
from tests.unit.data.corpora import write_texts
from tests.unit.data.tokenize.test_supervision import prepare_rows, tokens_of

NAMES = ("chars:ACGTN", "chars:protein", "chars:dna", "kmer:2", "kmer:6")
SEQUENCES = st.text("ACGTN", max_size=60) | st.text("ACGTNRacgt?*[]é \n\U0001f600", max_size=40)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_all([text])[0].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_exported_tokenizer(name: str) -> None:
    encoder, exported = load_encoder(name), transformers_tokenizer(tokenizer_folder(name))
    tokenizer = encoder.tokenizer
    assert (encoder.bos_token_id, encoder.eos_token_id) == (2, 3)

    @given(text=SEQUENCES)
    def check(text: str) -> None:
        assert ids_of(tokenizer, text) == exported(text, add_special_tokens=False)["input_ids"]
        assert [2, *ids_of(tokenizer, text), 3] == exported(text)["input_ids"]

    check()
    assert exported.mask_token_id == tokenizer.mask_token_id == 4 and exported.pad_token_id == 0
    assert exported.unk_token_id == tokenizer.unknown_token_id == 1 and len(exported) == tokenizer.info.vocab_size
    assert exported.decode(exported("ACGTN", add_special_tokens=False)["input_ids"]) == "ACGTN"


def test_kmers_do_not_overlap_and_letters_are_the_rest() -> None:
    vocabulary = SequenceVocabulary.named("kmer:3")
    assert vocabulary is not None
    texts = {number: token for token, number in vocabulary.tokens.items()}
    found = [texts[token] for token in vocabulary.encode("ACGTACGTNNTTTGAxCCC").tolist()]
    assert found == ["ACG", "TAC", "G", "T", "N", "N", "TTT", "G", "A", "[UNK]", "CCC"]
    assert len(texts) == 5 + 5 + 64 and texts[5] == "A" and texts[10] == "AAA" and texts[73] == "TTT"


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_long_sequence_have_its_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(name)
    monkeypatch.setattr(tokenizers, "PART_CHARACTERS", 16)

    @given(seed=st.integers(0, 99), size=st.integers(0, 400))
    def check(seed: int, size: int) -> None:
        text = "".join(random.Random(seed).choices("ACGTN", [1, 1, 1, 1, 0.02], k=size))
        parts = list(tokenizer.divide(text))
        assert "".join(parts) == text and max(map(len, parts)) <= 16 and len(parts) <= 1 + size / 9
        assert [token for part in parts for token in ids_of(tokenizer, part)] == ids_of(tokenizer, text)

    check()


def test_documents_are_framed_and_unknown_letters_are_counted(tmp_path: Path) -> None:
    rows = [{"text": "ACGT"}, {"text": "ACXXN"}]
    corpus = prepare_rows(tmp_path, rows, tokenizer="chars:ACGTN", text_field="text")
    assert tokens_of(corpus, 0) == [2, 5, 6, 7, 8, 3] and tokens_of(corpus, 1) == [2, 5, 6, 1, 1, 9, 3]
    assert corpus.info.encoding.num_unknown == 2 and corpus.info.tokenizer.name == "chars:ACGTN"
    assert any(line.startswith("warning: 2 tokens (15.38%) stand for text") for line in _result(corpus.path))
    known = prepare_rows(tmp_path / "known", rows[:1], tokenizer="chars:ACGTN", text_field="text")
    assert not any("warning" in line for line in _result(known.path))


def test_a_long_sequence_is_stored_in_parts(tmp_path: Path) -> None:
    text = "".join(random.Random(3).choices("ACGTN", [1, 1, 1, 1, 0.001], k=1_200_000))
    write_texts(tmp_path / "texts", [text])
    spec = SourceSpec(paths=(str(tmp_path / "texts"),))
    corpus = prepare_local(PrepareRequest(sources=spec, out=tmp_path / "corpus", tokenizer="kmer:6"))
    vocabulary = SequenceVocabulary.named("kmer:6")
    assert vocabulary is not None
    found = corpus.read(0, 0, int(corpus.lengths[0]))
    assert np.array_equal(found, [2, *vocabulary.encode(text).tolist(), 3]) and found.size < 210_000


def test_masks_of_sequences_are_tokens_or_spans() -> None:
    tokenizer = load_tokenizer("kmer:2")
    masking = masking_with(tokenizer, seed=1, fraction=0.15, unit="span", replace="bert")
    assert masking.mask_id == 4 and masking.special_ids == frozenset(range(5)) and masking.word_starts is None
    with pytest.raises(UserError, match="mask_unit=word: the vocabulary of the tokenizer kmer:2 does not mark"):
        masking_with(tokenizer, seed=1, fraction=0.15, unit="word", replace="bert")


def test_an_export_has_the_tokenizer() -> None:
    files = tokenizer_in(Path("chars:protein"))
    assert {*files.files} == {"tokenizer.json", "tokenizer_config.json"} and files.vocab_size == 33


@pytest.mark.parametrize(
    "name", ["chars:", "chars:AA", "chars:A C", "chars:Ä", "chars:A?", "kmer:1", "kmer:9", "kmer:x"]
)
def test_other_letters_and_lengths_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"tokenizer=(chars|kmer):"):
        load_tokenizer(name)


def test_an_encoders_documents_are_framed_by_its_own_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers.models import WordPiece
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import BertProcessing

    vocabulary = {
        token: n for n, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fox", "##es", "a"])
    }
    made = RustTokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer, made.post_processor = Whitespace(), BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    made.save(str(tmp_path / "tokenizer.json"))
    # As bert-base-uncased: no file names the tokens.
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    encoder = DocumentEncoder(load_tokenizer(tmp_path))
    (document,) = encoder.encode("foxes fox")
    assert document.ids.tolist() == [2, 5, 6, 5, 3]
    assert encoder.tokenizer.mask_token_id == 4 and encoder.tokenizer.unknown_token_id == 1
    masking = masking_with(encoder.tokenizer, seed=1, fraction=0.15, unit="word", replace="bert")
    assert masking.word_starts is not None and masking.word_starts.tolist() == [True] * 6 + [False, True]
