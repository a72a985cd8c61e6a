from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.data.prepare import unit_writer
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import ChatRow, RowError
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.data.tokenize.encoding import load_encoder
from ray_ulysses.data.tokenize.tokenizers import ByteTokenizer, load_tokenizer
from ray_ulysses.errors import UserError
from tests.local_preparation import prepare_local


def fast_tokenizer(directory: Path, config: dict[str, object] | None = None) -> Path:
    """A real byte-level BPE tokenizer, trained on a few words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 3, trainer)
    # What a chat model's file may carry, and what must not cut or fill a document.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}, "bos_token": "<s>"} if config is None else config)
    )
    return directory


def prepare_texts(folder: Path, texts: list[str], tokenizer: Path) -> tuple[list[int], dict[int, str]]:
    """Return the places of the texts that a corpus has, and the reasons for the others."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    spec = SourceSpec(paths=(str(folder / "rows.jsonl"),))
    corpus = prepare_local(PrepareRequest(sources=spec, out=folder / "corpus", tokenizer=str(tokenizer)))
    lines = [json.loads(line) for line in (corpus.path / "quarantine.jsonl").read_text().splitlines()]
    kept = [corpus.source(document).offset for document in range(corpus.num_documents)]
    return kept, {line["offset"]: line["reason"] for line in lines}


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bytes_are_the_tokens_and_the_end_token_is_no_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode_all([text])[0]
    assert ids.tolist() == [*text.encode()]
    assert tokenizer.decode(np.append(ids.astype(np.int64), 256)) == text


def test_a_hugging_face_tokenizer_cuts_and_fills_nothing_and_makes_no_special_token_of_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(fast_tokenizer(tmp_path))
    assert tokenizer.info.eos_token_id == 1
    for text in ("the quick brown fox jumps over the lazy dog, again and again", "a</s>b<s>"):
        ids, _ = tokenizer.encode_all([text])
        assert tokenizer.decode(ids) == text
        assert ids.min() > 1 and ids.max() < tokenizer.info.vocab_size <= 300


def test_tokenizers_are_the_same_when_their_files_are(tmp_path: Path) -> None:
    one = load_tokenizer(fast_tokenizer(tmp_path / "one")).info
    two = load_tokenizer(fast_tokenizer(tmp_path / "two")).info
    three = load_tokenizer(fast_tokenizer(tmp_path / "three", {"eos_token": "<s>"})).info
    assert one.fingerprint == two.fingerprint != three.fingerprint


def vocabulary_folder(folder: Path, *pieces: str, unknown: str = "[UNK]") -> Path:
    """A tokenizer without tokenizer.json, which goes through Transformers."""
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(pieces))
    config = {"tokenizer_class": "BertTokenizer", "unk_token": unknown, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_tokenizer_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    whole = load_tokenizer(vocabulary_folder(tmp_path, "[PAD]", "[UNK]", "</s>", "hello", "world"))
    assert whole.encode_all(["hello world"])[0].tolist() == [3, 4]
    encoded = load_encoder(vocabulary_folder(tmp_path, "</s>", "a", "fox")).encode_texts(["a fox", "a zebra"])
    assert [*encoded.left_out] == [1] and "has no token" in encoded.left_out[1]


@pytest.mark.parametrize(
    ("files", "refused"),
    [
        (None, "no such directory"),
        ({}, "holds no tokenizer file"),
        ({"tokenizer.json": "{}"}, r"tokenizer\.json can't be read"),
    ],
    ids=["missing", "empty", "broken"],
)
def test_a_directory_that_is_no_tokenizer_is_refused(
    tmp_path: Path, files: dict[str, str] | None, refused: str
) -> None:
    if files is not None:
        (tmp_path / "it").mkdir()
    for name, content in (files or {}).items():
        (tmp_path / "it" / name).write_text(content)
    with pytest.raises(UserError, match=rf"^tokenizer=.*it: {refused}"):
        load_tokenizer(tmp_path / "it")


@pytest.mark.parametrize(
    "config", [{}, *({"eos_token": token} for token in (None, "<unheard-of>", {"content": ["</s>"]}, [], 7))]
)
def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path, config: dict[str, object]) -> None:
    with pytest.raises(UserError, match="names no eos_token"):
        load_tokenizer(fast_tokenizer(tmp_path, config))


def test_code_that_a_tokenizer_brings_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(_: str = "") -> str:
        raise AssertionError("a worker has nobody to ask")

    monkeypatch.setattr("builtins.input", ask)
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own_tokenizer.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "own_tokenizer.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match="needs its own Python code"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_merges_are_never_skipped_at_random(tmp_path: Path) -> None:
    directory = fast_tokenizer(tmp_path / "tokenizer")
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    fields = json.loads((directory / "tokenizer.json").read_text())
    fields["model"]["dropout"] = 0.5
    (directory / "tokenizer.json").write_text(json.dumps(fields))
    text = "the quick brown fox jumps over the lazy dog " * 4
    chat = ChatRow(messages=({"role": "user", "content": text}, {"role": "assistant", "content": text}))
    for content in (text, chat):
        written = [load_encoder(directory).encode(content)[0].ids.tolist() for _ in range(4)]
        assert all(ids == written[0] for ids in written)


def model_tokenizer(directory: Path, kind: str, pieces: Sequence[str]) -> Path:
    """A tokenizer without a token for text that its vocabulary lacks."""
    vocab = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    model: dict[str, object] = {"type": kind, "vocab": vocab, "unk_token": "<unk>"}
    if kind == "Unigram":
        model = {"type": kind, "unk_id": None, "vocab": [[piece, -2.0] for piece in vocab]}
    elif kind == "BPE":
        model |= {"merges": []}
    elif kind == "WordPiece":
        model |= {"max_input_chars_per_word": 9, "continuing_subword_prefix": "##"}
    fields = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text(json.dumps(fields))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return directory


@pytest.mark.parametrize("kind", ["WordLevel", "Unigram", "BPE"])
def test_a_text_with_a_part_that_has_no_token_is_left_out_by_name(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model_tokenizer(tmp_path / "tokenizer", kind, ["</s>", "a", "fox", "jumps", *"foxjumps"])
    texts = ["a fox jumps", "a zebra", "fox fox", "a fox é", "jumps a"]
    for longest in (1 << 20, 1):
        monkeypatch.setattr(unit_writer, "_LONG_CHARACTERS", longest)
        kept, left_out = prepare_texts(tmp_path / str(longest), texts, directory)
        assert kept == [1, 3, 5] and left_out.keys() == {2, 4}
        assert all(reason.startswith("the tokenizer has no token for a part of it: ") for reason in left_out.values())


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece", "Unigram", "vocab.txt"])
def test_a_tokenizer_that_can_not_write_a_letter_is_refused_with_the_way_out(tmp_path: Path, kind: str) -> None:
    pieces, folder = ["</s>", "fox"], tmp_path / "tokenizer"
    made = vocabulary_folder(folder, *pieces) if kind == "vocab.txt" else model_tokenizer(folder, kind, pieces)
    with pytest.raises(UserError, match=r"^tokenizer=.*: can't write 'a' \(.*\); give it an unknown token"):
        load_tokenizer(made)


def test_a_text_at_which_the_tokenizers_expression_gives_up_is_left_out(tmp_path: Path) -> None:
    path = fast_tokenizer(tmp_path / "tokenizer") / "tokenizer.json"
    fields = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": r"(f+)+$"}, "behavior": "Isolated", "invert": False}
    fields["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, fields["pre_tokenizer"]]}
    path.write_text(json.dumps(fields))
    kept, left_out = prepare_texts(tmp_path, ["the fox", "f" * 50 + "x", "the dog"], path.parent)
    assert kept == [1, 3] and "gives up" in left_out[2]


def test_a_long_text_that_takes_no_parts_is_refused_before_it_is_written(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(fast_tokenizer(tmp_path))
    with pytest.raises(RowError, match="33554433 characters"):
        tokenizer.encode_all(["x" * ((32 << 20) + 1)])


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": "\\ud800"}', '{"a": ' + "9" * 5000 + "}", "\xff"])
def test_a_file_of_a_tokenizer_that_no_parser_reads_is_named(tmp_path: Path, name: str, content: str) -> None:
    (fast_tokenizer(tmp_path) / name).write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=rf"tokenizer=.*{name}"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_file_with_a_list_in_place_of_an_object_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    path = fast_tokenizer(tmp_path) / "tokenizer.json"
    fields = json.loads(path.read_text())
    plain = load_tokenizer(tmp_path).encode_all(["the fox"])[0].tolist()
    fields["normalizer"] = ["NFC"]
    path.write_text(json.dumps(fields))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_all(["the fox"])[0].tolist() == plain
    assert "".join(tokenizer.divide("the fox\njumps " * 40_000)) == "the fox\njumps " * 40_000
