"""Which differences between two tokenizers change the meaning of a corpus's token ids, and which do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.data.tokenize.tokenizers import Vocabulary, load_tokenizer
from ray_ulysses.export.tokenizer_files import byte_tokenizer_files
from ray_ulysses.validation import adapter, checked
from tests.unit.data.tokenize.test_tokenizers import fast_tokenizer

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
