from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare import unit_writer
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import ChatRow, RowError
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.data.tokenize.dividing import divide, dividing_pattern
from ray_ulysses.data.tokenize.encoding import load_encoder
from ray_ulysses.data.tokenize.tokenizers import ByteTokenizer, Vocabulary, load_tokenizer
from ray_ulysses.errors import UserError
from ray_ulysses.export.tokenizer_files import byte_tokenizer_files
from ray_ulysses.validation import adapter, checked
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
    with pytest.raises(UserError, match="requires custom Python code"):
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


@pytest.mark.parametrize("kind", ["WordLevel", "Unigram"])
def test_unknown_tokens_are_counted(tmp_path: Path, kind: str) -> None:
    directory = model_tokenizer(tmp_path / "tokenizer", kind, ["</s>", "<unk>", "a", "fox"])
    fields = json.loads((directory / "tokenizer.json").read_text())
    if kind == "Unigram":
        fields["model"]["unk_id"] = 1
        (directory / "tokenizer.json").write_text(json.dumps(fields))
    assert load_tokenizer(directory).unknown_token_id == 1
    prepare_texts(tmp_path / "made", ["a fox", "a zebra é"], directory)
    assert Corpus.open(tmp_path / "made" / "corpus").info.encoding.num_unknown > 0


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


Change = Callable[[dict[str, Any]], object]


def added(token_id: int, text: str, *, special: bool = True) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"id": token_id, "content": text, **flags}


def append(*texts: str) -> Change:
    def change(fields: dict[str, Any]) -> None:
        first = len(fields["model"]["vocab"])
        fields["added_tokens"] += [added(first + place, text) for place, text in enumerate(texts)]

    return change


def mark_as_added(fields: dict[str, Any]) -> None:
    """Add a token of the vocabulary to the added tokens, as a list of additional special tokens does."""
    fields["added_tokens"].append(added(fields["model"]["vocab"]["!"], "!"))


def rename_added(fields: dict[str, Any]) -> None:
    vocabulary = fields["model"]["vocab"]
    vocabulary["<mine>"] = vocabulary.pop("<s>")
    fields["added_tokens"][0]["content"] = "<mine>"


def swap_ids(fields: dict[str, Any]) -> None:
    vocabulary = fields["model"]["vocab"]
    vocabulary["!"], vocabulary['"'] = vocabulary['"'], vocabulary["!"]


def drop_last_token(fields: dict[str, Any]) -> None:
    vocabulary = fields["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    del vocabulary[last]
    fields["model"]["merges"] = [merge for merge in fields["model"]["merges"] if "".join(merge) != last]


def merges_as_text(fields: dict[str, Any]) -> None:
    """Store merges as strings, like versions of the library before 0.20."""
    fields["model"]["merges"] = [" ".join(merge) for merge in fields["model"]["merges"]]


def reorder_keys(fields: dict[str, Any]) -> None:
    model = fields["model"]
    model["vocab"] = dict(reversed(model["vocab"].items()))
    fields["model"] = dict(reversed(model.items()))


UNCHANGED: Change = lambda fields: None  # noqa: E731
# Changes to the corpus's and the model's tokenizer, and the difference that results.
CHANGES: dict[str, tuple[Change, Change, str | None]] = {
    "merges as another version of the library writes them": (UNCHANGED, merges_as_text, None),
    "another order of keys": (UNCHANGED, reorder_keys, None),
    "no truncation and no padding": (UNCHANGED, lambda fields: fields.update(truncation=None, padding=None), None),
    "one appended to each, and one more": (append("<tool>"), append("<tool>", "<pad>"), None),
    "tokens appended for the corpus": (append("<tool>", "</tool>"), UNCHANGED, None),
    "a token that is marked as special in the corpus": (mark_as_added, UNCHANGED, None),
    "a token that is marked as special in the model": (UNCHANGED, mark_as_added, None),
    "two ids swapped": (UNCHANGED, swap_ids, "have different texts"),
    "merges in another order": (UNCHANGED, lambda fields: fields["model"]["merges"].reverse(), "their merges"),
    "a renamed special token": (rename_added, UNCHANGED, "token 0 is '<mine>' in the corpus and '<s>' in the model"),
    "another appended token": (append("<a>", "<b>"), append("<b>"), "'<a>' in the corpus and '<b>' in the model"),
    "a token that the model's vocabulary has": (append("<b>"), append("<a>", "<b>"), "'<b>' is token"),
    "a model with one more token of its own": (drop_last_token, UNCHANGED, "have different texts"),
}


def difference(corpus: Path | str, model: Path | str) -> str | None:
    stored = json.loads(json.dumps(adapter(Vocabulary).dump_python(load_tokenizer(corpus).tokens.vocabulary())))
    return load_tokenizer(model).tokens.difference_from(checked(adapter(Vocabulary), stored))


@pytest.mark.parametrize("case", CHANGES)
def test_only_changed_meanings_of_ids_and_merges_are_a_difference(tmp_path: Path, case: str) -> None:
    *changes, expected = CHANGES[case]
    folders = [fast_tokenizer(tmp_path / name) for name in ("corpus", "model")]
    for folder, change in zip(folders, changes, strict=True):
        fields = json.loads((folder / "tokenizer.json").read_text())
        change(fields)
        (folder / "tokenizer.json").write_text(json.dumps(fields))
    settings = {"eos_token": "</s>", "chat_template": "{{ messages }}", "padding_side": "left", "model_max_length": 8}
    (folders[1] / "tokenizer_config.json").write_text(json.dumps(settings))
    found = difference(*folders)
    assert found is None if expected is None else expected in str(found)


def test_bytes_differ_from_any_bpe_and_equal_their_own_export(tmp_path: Path) -> None:
    assert "have different texts" in str(difference("bytes", fast_tokenizer(tmp_path / "bpe")))
    assert difference(tmp_path / "bpe", "bytes") is not None
    (tmp_path / "exported").mkdir()
    for name, content in byte_tokenizer_files().items():
        (tmp_path / "exported" / name).write_bytes(content)
    assert difference("bytes", tmp_path / "exported") is None and difference(tmp_path / "exported", "bytes") is None


_MARKS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    "llama 3": rf"{_MARKS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    "qwen 2": rf"{_MARKS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_MARKS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_MARKS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",
    "deepseek": r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}",
}
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
PIECES = [
    *("a", "B", "word", "1", "23", " ", "  ", "\n", "\n\n", "\r\n", "\t", ".", "'s", "/", "_"),
    *("é", "e\u0301", "漢字", "🙂", "ß"),
]


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def pre_tokenizer_of(kind: str) -> Any:
    if kind == "gpt 2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "deepseek":
        before = [split(r"\p{N}{1,3}"), split(r"[一-龥぀-ゟ゠-ヿ]+")]
        return pre_tokenizers.Sequence([*before, split(PATTERNS[kind]), BYTE_LEVEL])
    return pre_tokenizers.Sequence([split(PATTERNS[kind]), BYTE_LEVEL])


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Train a BPE with merges of line feeds, spaces and letters wherever the pre-tokenizer allows them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer_of(kind)
    rng = np.random.default_rng(0)
    texts = ["".join(PIECES[n] for n in rng.integers(0, len(PIECES), 300)) for _ in range(80)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


KINDS = [*PATTERNS, "gpt 2"]


@pytest.mark.parametrize("kind", KINDS)
@example(pieces=["\n\n", "a"], size=2)
@given(pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=60), size=st.integers(2, 12))
def test_the_parts_have_the_same_tokens_as_the_text(kind: str, pieces: list[str], size: int) -> None:
    tokenizer, text = tokenizer_of(kind), "".join(pieces)
    pattern = dividing_pattern(json.loads(tokenizer.to_str()))
    assert pattern is not None
    parts = list(divide(text, pattern, size))
    assert "".join(parts) == text
    assert [one for part in parts for one in ids(tokenizer, part)] == ids(tokenizer, text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_is_divided(kind: str) -> None:
    pattern = dividing_pattern(json.loads(tokenizer_of(kind).to_str()))
    breaks = "\n" if kind == "gpt 2" else "\n\n"
    text = f"A line of it.{breaks}" * 1000
    parts = list(divide(text, pattern, 500))
    assert len(parts) > 20 and max(map(len, parts)) < 540
    assert list(divide(text.replace("\n", " "), pattern, 500)) == [text.replace("\n", " ")], "no place is known"


def split_json(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("model", {"type": "Unigram"}),
        ("model", {"type": "BPE", "dropout": 0.1}),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}),
        ("pre_tokenizer", None),
        ("pre_tokenizer", {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first"}),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}),
        ("pre_tokenizer", split_json(r"\n.*|\s+")),
        ("pre_tokenizer", split_json(r"\p{N}|\s+")),
        ("added_tokens", [{"id": 1, "content": "a\nb", "special": False}]),
        ("added_tokens", [{"id": 1, "content": "ab", "special": False, "rstrip": True}]),
    ],
)
def test_a_tokenizer_that_may_merge_across_a_cut_does_not_divide(part: str, value: Any) -> None:
    assert dividing_pattern({**json.loads(tokenizer_of("llama 3").to_str()), part: value}) is None


def test_a_text_with_a_special_token_and_bytes_are_divided() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_of("llama 3").to_str())
    tokenizer.add_special_tokens([AddedToken("<x\ny>", special=True)])
    tokenizer.encode_special_tokens = True
    pattern = dividing_pattern(json.loads(tokenizer.to_str()))
    assert pattern is not None
    text = "one <x\ny> two <x\ny> three\n"
    parts = list(divide(text, pattern, 3))
    assert len(parts) == 3 and [one for part in parts for one in ids(tokenizer, part)] == ids(tokenizer, text)
    text, encode = "é漢🙂" * 100_000, ByteTokenizer().encode_all
    parts = list(ByteTokenizer().divide(text))
    assert len(parts) > 1 and "".join(parts) == text
    assert np.array_equal(np.concatenate([encode([part])[0] for part in parts]), encode([text])[0])
