from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from ray_ulysses.data.prepare import unit_writer
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import ChatRow, RowError
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.data.tokenize.encoding import load_encoder
from ray_ulysses.data.tokenize.tokenizers import ByteTokenizer, TokenizerInfo, load_tokenizer
from ray_ulysses.errors import UserError
from ray_ulysses.validation import checked
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


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bytes_are_the_tokens_and_the_end_token_is_no_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode_all([text])[0]
    assert ids.tolist() == [*text.encode()]
    assert tokenizer.decode(np.append(ids.astype(np.int64), 256)) == text
    assert tokenizer.info.vocab_size == 257


def test_a_hugging_face_tokenizer_cuts_and_fills_nothing(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(fast_tokenizer(tmp_path))
    text = "the quick brown fox jumps over the lazy dog, again and again"
    ids, _ = tokenizer.encode_all([text])
    assert tokenizer.info.eos_token_id == 1
    assert tokenizer.decode(ids) == text
    assert ids.max() < tokenizer.info.vocab_size <= 300
    assert ids.dtype == np.int64


def test_text_that_spells_a_special_token_does_not_end_a_document(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(fast_tokenizer(tmp_path))
    ids, _ = tokenizer.encode_all(["a</s>b<s>"])
    assert (ids > 1).all()
    assert tokenizer.decode(ids) == "a</s>b<s>"


def test_tokenizers_are_the_same_when_their_files_are(tmp_path: Path) -> None:
    one = load_tokenizer(fast_tokenizer(tmp_path / "one")).info
    two = load_tokenizer(fast_tokenizer(tmp_path / "two")).info
    three = load_tokenizer(fast_tokenizer(tmp_path / "three", {"eos_token": "<s>"})).info
    assert one.fingerprint == two.fingerprint != three.fingerprint
    assert checked(TypeAdapter(TokenizerInfo), json.loads(json.dumps(asdict(one)))) == one


def test_a_tokenizer_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[SEP]", "hello", "world"]))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]", "unk_token": "[UNK]"})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_all(["hello world"])[0].tolist() == [3, 4]


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: no such directory; use 'bytes', or the local directory"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no tokenizer file"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer.json can't be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("config", [{}, {"eos_token": None}, {"eos_token": "<unheard-of>"}])
def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path, config: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"names no eos_token that is in its vocabulary"):
        load_tokenizer(fast_tokenizer(tmp_path, config))


def test_code_that_a_tokenizer_brings_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(_: str = "") -> str:
        raise AssertionError("a worker has nobody to ask")

    monkeypatch.setattr("builtins.input", ask)
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own_tokenizer.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "own_tokenizer.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match=r"tokenizer=.*: needs its own Python code, .* never runs; give"):
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


def model_tokenizer(directory: Path, model: dict[str, object]) -> Path:
    fields = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text(json.dumps(fields))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return directory


WORDS = ["</s>", "a", "fox", "jumps"]
PIECES = {piece: place for place, piece in enumerate(dict.fromkeys([*WORDS, *"foxjumps"]))}
LACKING: dict[str, dict[str, object]] = {
    "WordLevel": {"type": "WordLevel", "vocab": PIECES, "unk_token": "<unk>"},
    "Unigram": {"type": "Unigram", "unk_id": None, "vocab": [[piece, -2.0] for piece in PIECES]},
    "BPE": {"type": "BPE", "vocab": PIECES, "merges": [], "unk_token": "?"},
}


@pytest.mark.parametrize("kind", LACKING)
def test_a_text_with_a_part_that_has_no_token_is_left_out_by_name(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model_tokenizer(tmp_path / "tokenizer", LACKING[kind])
    texts = ["a fox jumps", "a zebra", "fox fox", "a fox é", "jumps a"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for number, longest in enumerate((1 << 20, 1)):
        monkeypatch.setattr(unit_writer, "_LONG_CHARACTERS", longest)
        spec = SourceSpec(paths=(str(tmp_path / "rows.jsonl"),))
        corpus = prepare_local(PrepareRequest(sources=spec, out=tmp_path / str(number), tokenizer=str(directory)))
        assert [corpus.source(document).offset for document in range(corpus.num_documents)] == [1, 3, 5]
        lines = [json.loads(line) for line in (corpus.path / "quarantine.jsonl").read_text().splitlines()]
        assert [line["offset"] for line in lines] == [2, 4]
        assert all(line["reason"].startswith("the tokenizer has no token for a part of it: ") for line in lines)
        assert dict(corpus.info.reasons) == {"the tokenizer has no token for a part of it": 2}


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece", "Unigram"])
def test_a_tokenizer_that_can_not_write_a_letter_is_refused_with_the_way_out(tmp_path: Path, kind: str) -> None:
    vocab = {"</s>": 0, "fox": 1}
    models = {
        "WordLevel": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
        "WordPiece": {"type": "WordPiece", "vocab": vocab, "unk_token": "<unk>", "max_input_chars_per_word": 9}
        | {"continuing_subword_prefix": "##"},
        "Unigram": {"type": "Unigram", "unk_id": None, "vocab": [["</s>", 0.0], ["fox", -1.0]]},
    }
    with pytest.raises(UserError, match=r"^tokenizer=.*: can't write 'a' \(.*\); give it an unknown token"):
        load_tokenizer(model_tokenizer(tmp_path / "tokenizer", models[kind]))


def test_a_vocabulary_without_an_unknown_token_leaves_texts_out_or_is_refused(tmp_path: Path) -> None:
    config = {"tokenizer_class": "BertTokenizer", "unk_token": "[UNK]", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "vocab.txt").write_text("</s>\na\nfox\n")
    encoded = load_encoder(tmp_path).encode_texts(["a fox", "a zebra"])
    assert [*encoded.left_out] == [1] and "has no token" in encoded.left_out[1]
    (tmp_path / "vocab.txt").write_text("</s>\nfox\n")
    with pytest.raises(UserError, match=r"^tokenizer=.*: can't write 'a' \(.*\); give it an unknown token"):
        load_tokenizer(tmp_path)


def with_splitting(directory: Path, pattern: str) -> Path:
    """A tokenizer that divides texts by a regular expression before its own."""
    path = fast_tokenizer(directory) / "tokenizer.json"
    fields = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    fields["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, fields["pre_tokenizer"]]}
    path.write_text(json.dumps(fields))
    return directory


def test_a_text_at_which_the_tokenizers_expression_gives_up_is_left_out(tmp_path: Path) -> None:
    tokenizer = with_splitting(tmp_path / "tokenizer", r"(f+)+$")
    lines = ["".join(text) for text in ("the fox", "f" * 50 + "x", "the dog")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    spec = SourceSpec(paths=(str(tmp_path / "rows.jsonl"),))
    corpus = prepare_local(PrepareRequest(sources=spec, out=tmp_path / "corpus", tokenizer=str(tokenizer)))
    assert [corpus.source(document).offset for document in range(corpus.num_documents)] == [1, 3]
    (left_out,) = (corpus.path / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(left_out)["offset"] == 2 and "gives up" in json.loads(left_out)["reason"]


def test_a_long_text_that_takes_no_parts_is_refused_before_it_is_written(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(fast_tokenizer(tmp_path))
    with pytest.raises(RowError, match="33554433 characters"):
        tokenizer.encode_all(["x" * ((32 << 20) + 1)])


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"a":' * 100_000, '{"a": "\\ud800"}', '{"a": ' + "9" * 5000 + "}", "\xff"]
)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"])
def test_a_file_of_a_tokenizer_that_no_parser_reads_is_named(tmp_path: Path, name: str, content: str) -> None:
    path = fast_tokenizer(tmp_path) / name
    path.write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=rf"tokenizer=.*{name}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("token", [{"content": {}}, {"content": ["</s>"]}, [], 7, None])
def test_an_end_token_that_is_no_text_is_refused(tmp_path: Path, token: object) -> None:
    with pytest.raises(UserError, match="names no eos_token"):
        load_tokenizer(fast_tokenizer(tmp_path, {"eos_token": token}))


def test_a_tokenizer_file_with_a_list_in_place_of_an_object_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    path = fast_tokenizer(tmp_path) / "tokenizer.json"
    fields = json.loads(path.read_text())
    plain = load_tokenizer(tmp_path).encode_all(["the fox"])[0].tolist()
    fields["normalizer"] = ["NFC"]
    path.write_text(json.dumps(fields))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_all(["the fox"])[0].tolist() == plain
    assert "".join(tokenizer.divide("the fox\njumps " * 40_000)) == "the fox\njumps " * 40_000
