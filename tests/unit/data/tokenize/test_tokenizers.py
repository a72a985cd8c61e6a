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
    """Write a byte-level BPE tokenizer that was trained on a few words."""
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
    # Settings of some chat models' files, which must neither truncate nor pad documents.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}, "bos_token": "<s>"} if config is None else config)
    )
    return directory


def prepare_texts(folder: Path, texts: list[str], tokenizer: Path) -> tuple[list[int], dict[int, str]]:
    """Return the line numbers of the stored texts, and the reasons for the rejected ones."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    spec = SourceSpec(paths=(str(folder / "rows.jsonl"),))
    corpus = prepare_local(PrepareRequest(sources=spec, out=folder / "corpus", tokenizer=str(tokenizer)))
    lines = [json.loads(line) for line in (corpus.path / "quarantine.jsonl").read_text().splitlines()]
    kept = [corpus.source(document).offset for document in range(corpus.num_documents)]
    return kept, {line["offset"]: line["reason"] for line in lines}


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_tokens_of_the_byte_tokenizer_are_bytes(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode_all([text])[0]
    assert ids.tolist() == [*text.encode()]
    assert tokenizer.decode(np.append(ids.astype(np.int64), 256)) == text


def test_a_hugging_face_tokenizer_neither_truncates_nor_pads_nor_makes_special_tokens_of_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(fast_tokenizer(tmp_path / "one"))
    assert tokenizer.info.eos_token_id == 1 and tokenizer.forgeable == {} == load_tokenizer("bytes").forgeable
    for text in ("the quick brown fox jumps over the lazy dog, again and again", "a</s>b<s>"):
        ids, _ = tokenizer.encode_all([text])
        assert tokenizer.decode(ids) == text
        assert ids.min() > 1 and ids.max() < tokenizer.info.vocab_size <= 300
    same = load_tokenizer(fast_tokenizer(tmp_path / "two")).info
    other = load_tokenizer(fast_tokenizer(tmp_path / "three", {"eos_token": "<s>"})).info
    assert tokenizer.info.fingerprint == same.fingerprint != other.fingerprint


def vocabulary_folder(folder: Path, *pieces: str, unknown: str = "[UNK]") -> Path:
    """Write a tokenizer without tokenizer.json, which Transformers must load."""
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


def test_a_directory_without_a_usable_tokenizer_is_refused(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, str], str]] = [({}, "has no tokenizer file")]
    refused += [({"tokenizer.json": "{}"}, r"tokenizer\.json can't be read")]
    with pytest.raises(UserError, match=r"^tokenizer=.*none: no such directory"):
        load_tokenizer(tmp_path / "none")
    for number, (files, reason) in enumerate(refused):
        (tmp_path / str(number)).mkdir()
        for name, content in files.items():
            (tmp_path / str(number) / name).write_text(content)
        with pytest.raises(UserError, match=rf"^tokenizer=.*{number}: {reason}"):
            load_tokenizer(tmp_path / str(number))
    for number, token in enumerate((None, "<unheard-of>", {"content": ["</s>"]}, 7)):
        with pytest.raises(UserError, match="has no eos_token"):
            load_tokenizer(fast_tokenizer(tmp_path / f"end {number}", {"eos_token": token}))


def test_a_tokenizers_own_code_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(_: str = "") -> str:
        raise AssertionError("a worker has nobody to ask")

    monkeypatch.setattr("builtins.input", ask)
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own_tokenizer.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "own_tokenizer.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match="requires its own Python code"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_bpe_dropout_is_disabled(tmp_path: Path) -> None:
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
    """Write a tokenizer without an unknown token."""
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
def test_a_text_with_a_part_that_has_no_token_is_rejected(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model_tokenizer(tmp_path / "tokenizer", kind, ["</s>", "a", "fox", "jumps", *"foxjumps"])
    texts = ["a fox jumps", "a zebra", "fox fox", "a fox é", "jumps a"]
    for longest in (1 << 20, 1):
        monkeypatch.setattr(unit_writer, "_LONG_CHARACTERS", longest)
        kept, left_out = prepare_texts(tmp_path / str(longest), texts, directory)
        assert kept == [1, 3, 5] and left_out.keys() == {2, 4}
        assert all(reason.startswith("part of the text has no token: ") for reason in left_out.values())


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece", "Unigram", "vocab.txt"])
def test_a_tokenizer_that_can_not_encode_a_letter_is_refused(tmp_path: Path, kind: str) -> None:
    pieces, folder = ["</s>", "fox"], tmp_path / "tokenizer"
    made = vocabulary_folder(folder, *pieces) if kind == "vocab.txt" else model_tokenizer(folder, kind, pieces)
    with pytest.raises(UserError, match=r"^tokenizer=.*: can't encode 'a' \(.*\); add an unknown token"):
        load_tokenizer(made)


def test_a_text_on_which_the_tokenizer_panics_is_rejected(tmp_path: Path) -> None:
    path = fast_tokenizer(tmp_path / "tokenizer") / "tokenizer.json"
    fields = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": r"(f+)+$"}, "behavior": "Isolated", "invert": False}
    fields["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, fields["pre_tokenizer"]]}
    path.write_text(json.dumps(fields))
    kept, left_out = prepare_texts(tmp_path, ["the fox", "f" * 50 + "x", "the dog"], path.parent)
    assert kept == [1, 3] and "the tokenizer panicked" in left_out[2]


def test_a_long_text_that_can_not_be_divided_is_rejected_early(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(fast_tokenizer(tmp_path))
    with pytest.raises(RowError, match="33554433 characters"):
        tokenizer.encode_all(["x" * ((32 << 20) + 1)])


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": "\\ud800"}', '{"a": ' + "9" * 5000 + "}", "\xff"])
def test_a_malformed_tokenizer_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    (fast_tokenizer(tmp_path) / name).write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=rf"tokenizer=.*{name}"):
        load_tokenizer(tmp_path)


def test_a_list_that_the_library_accepts_in_place_of_an_object_is_accepted(tmp_path: Path) -> None:
    path = fast_tokenizer(tmp_path) / "tokenizer.json"
    fields = json.loads(path.read_text())
    plain = load_tokenizer(tmp_path).encode_all(["the fox"])[0].tolist()
    fields["normalizer"] = ["NFC"]
    path.write_text(json.dumps(fields))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_all(["the fox"])[0].tolist() == plain
    assert "".join(tokenizer.divide("the fox\njumps " * 40_000)) == "the fox\njumps " * 40_000
