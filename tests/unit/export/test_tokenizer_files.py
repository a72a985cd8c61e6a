"""The tokenizer of an export gives the tokens that the run was trained on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from transformers import AutoTokenizer

from ray_ulysses.data.tokenize.tokenizers import ByteTokenizer, load_tokenizer
from ray_ulysses.errors import UserError
from ray_ulysses.export.tokenizer_files import byte_tokenizer_files, find_tokenizer
from ray_ulysses.storage import LocalStore
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.export.runs import word_tokenizer
from tests.unit.inspect.runs import make_run


@pytest.fixture(scope="module")
def byte_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    for name, content in byte_tokenizer_files().items():
        (folder / name).write_bytes(content)
    return folder


def texts() -> list[str]:
    draw = random.Random(0)
    points = [[draw.randrange(0x110000) for _ in range(60)] for _ in range(200)]
    drawn = ["".join(chr(point) for point in row if not 0xD800 <= point < 0xE000) for row in points]
    return ["", " lead", "<|end|>", "a<|end|>b <|end|>", "\x00\r\n\t  x ", "don't 12 345", "日本語 é 😀", *drawn]


def test_the_byte_tokenizer_is_exact_for_every_text_in_every_library(byte_directory: Path) -> None:
    ours = ByteTokenizer()
    hugging_face = AutoTokenizer.from_pretrained(byte_directory)
    rust = RustTokenizer.from_file(str(byte_directory / "tokenizer.json"))
    again = load_tokenizer(byte_directory)
    for text in texts():
        wanted = ours.encode_all([text])[0].tolist()
        assert hugging_face(text)["input_ids"] == wanted
        assert rust.encode(text).ids == wanted
        assert again.encode_all([text])[0].tolist() == wanted
        assert hugging_face.decode([*wanted, ours.info.eos_token_id], skip_special_tokens=True) == text
    draw = random.Random(1)
    for _ in range(200):
        # Characters are cut.
        ids = [draw.randrange(256) for _ in range(20)]
        assert hugging_face.decode(ids) == bytes(ids).decode("utf-8", errors="replace")
    assert hugging_face.eos_token_id == again.info.eos_token_id == ours.info.eos_token_id
    assert len(hugging_face) == ours.info.vocab_size


def test_a_tokenizer_that_is_given_is_copied_and_nothing_else_of_its_directory(tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path / "words", 8)
    found = find_tokenizer(tmp_path / "run", folder)
    assert found.files.keys() == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert found.files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert (found.end_tokens, found.vocab_size) == ((8,), 9)
    assert found.words == f"from {folder}, as requested by --tokenizer"


def test_a_tokenizer_with_tokens_that_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    found = find_tokenizer(tmp_path / "run", word_tokenizer(tmp_path / "words", 8))
    found.refuse_unknown_tokens(9)
    with pytest.raises(UserError, match="--tokenizer: its largest token id is 8"):
        found.refuse_unknown_tokens(8)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        find_tokenizer(tmp_path / "run", tmp_path / "none")


def test_a_run_whose_corpus_is_not_known_says_so(tmp_path: Path) -> None:
    found = find_tokenizer(tmp_path, None)
    assert found.files == {}
    assert found.words.startswith("none: the run's corpus, which names its tokenizer, is not there")


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    """Return a run whose plan and corpus, of bytes, are there."""
    corpus = text_corpus(tmp_path / "data", varied_texts(20))
    return make_run(tmp_path / "run", [corpus.path]).folder


@pytest.mark.parametrize("has_corpus", [True, False])
def test_the_end_token_of_the_corpus_is_not_lost_to_another_tokenizer(
    planned: Path, tmp_path: Path, has_corpus: bool
) -> None:
    folder = word_tokenizer(tmp_path / "words", 65)
    if not has_corpus:
        (tmp_path / "data").rename(tmp_path / "away")
    found = find_tokenizer(planned, folder)
    assert found.end_tokens == (256, 65)
    assert found.words == f"from {folder}, as requested by --tokenizer, NOT the one that prepared the corpus"
    assert find_tokenizer(planned, Path("bytes")).end_tokens == (256,)
    assert find_tokenizer(planned, None).end_tokens == (256,)


@pytest.mark.parametrize("file", ["plan.json", "rows.parquet"])
def test_a_plan_that_is_torn_costs_the_tokenizer_and_nothing_else(planned: Path, file: str) -> None:
    path = planned / "plan/segment-0000" / file
    path.write_bytes(path.read_bytes()[:40])
    found = find_tokenizer(planned, None)
    assert found.files == {} and found.end_tokens == ()
    assert found.words.startswith(f"none: the run's data plan can't be read ({path}: ")
    assert find_tokenizer(planned, Path("bytes")).words == "from bytes, as requested by --tokenizer"


def test_a_plan_or_a_tokenizer_that_may_not_be_read_is_named(
    planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = word_tokenizer(tmp_path / "words", 8)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    monkeypatch.setattr(LocalStore, "list", lambda store, folder: refuse(store.path(folder)))
    assert f"can't be read ({planned}/plan: Permission denied)" in find_tokenizer(planned, None).words
    with pytest.raises(UserError, match=f"--tokenizer='{folder}': .*Permission denied"):
        find_tokenizer(planned, folder)
