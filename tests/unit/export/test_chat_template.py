"""An export publishes the chat template that the run was trained with, or says that it may not be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.export.tokenizer_files import find_tokenizer
from tests.local_preparation import prepare_local
from tests.unit.data.tokenize.test_chat import CHATML, CONVERSATION, MARKED, chat_tokenizer
from tests.unit.inspect.runs import make_run

OTHER = CHATML.replace("message['role'] +", "message['role'] + ':' +")
TRAINED = ", with the chat template that was trained instead of its own"
UNKNOWN = "; the chat template of a corpus that is not there is unknown"


def chats(folder: Path, tokenizer: Path, template: str | None = None, start: int = 0) -> Corpus:
    folder.mkdir()
    rows = "".join(json.dumps({"messages": one}) + "\n" for one in [CONVERSATION, CONVERSATION[1:3]][start:])
    (folder / "rows.jsonl").write_text(rows)
    spec = SourceSpec(
        paths=(str(folder / "rows.jsonl"),), fields=RowFields.from_options({"messages_field": "messages"})
    )
    options = EncodingOptions(chat_template=template)
    request = PrepareRequest(sources=spec, out=folder / "corpus", tokenizer=str(tokenizer), encoding=options)
    return prepare_local(request)


def rendered(files: dict[str, bytes], folder: Path) -> str:
    """Return what Transformers writes with an exported tokenizer."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return str(AutoTokenizer.from_pretrained(folder).apply_chat_template(CONVERSATION, tokenize=False))


@pytest.mark.parametrize("own", [None, CHATML], ids=["none of its own", "one of its own"])
@pytest.mark.parametrize("given", [OTHER, MARKED], ids=["plain", "marked"])
def test_the_template_that_was_given_is_exported(tmp_path: Path, own: str | None, given: str) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", own, bos_token="<s>")
    (tokenizer / "chat_template.json").write_text("{}")
    run = make_run(tmp_path / "run", [chats(tmp_path / "chats", tokenizer, given).path])
    found = find_tokenizer(run.folder, None)
    assert found.files["chat_template.jinja"] == given.encode() and "chat_template.json" not in found.files
    assert found.words == f"from {tokenizer}{TRAINED}"
    assert found.published == f"the one that prepared the corpus{TRAINED}"
    with_given = {**find_tokenizer(tmp_path, tokenizer).files, "chat_template.jinja": given.encode()}
    text = rendered(found.files, tmp_path / "a")
    assert text == rendered(with_given, tmp_path / "b") and "zürich<|im_end|>" in text
    assert ("assistant:" in text) == (given == OTHER)
    asked = find_tokenizer(run.folder, tokenizer)
    assert asked.words.endswith("the one that prepared the corpus; its chat template is NOT the one that was trained")


def test_a_template_of_its_own_is_copied_as_it_is(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer")
    run = make_run(tmp_path / "run", [chats(tmp_path / "chats", tokenizer).path])
    for found in (find_tokenizer(run.folder, None), find_tokenizer(run.folder, tokenizer)):
        assert "chat_template.jinja" not in found.files and "chat template" not in found.words


def test_a_template_that_was_edited_since_is_exported_as_it_was(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", None)
    (tokenizer / "chat_template.jinja").write_text(CHATML)
    run = make_run(tmp_path / "run", [chats(tmp_path / "chats", tokenizer).path])
    (tokenizer / "chat_template.jinja").write_text(OTHER)
    assert find_tokenizer(run.folder, None).files["chat_template.jinja"] == CHATML.encode()


def test_of_several_templates_the_first_is_exported_and_the_others_are_said(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer")
    first, second = chats(tmp_path / "1", tokenizer, OTHER), chats(tmp_path / "2", tokenizer, MARKED, start=1)
    run = make_run(tmp_path / "run", [first.path, second.path])
    found = find_tokenizer(run.folder, None)
    assert found.files["chat_template.jinja"] == OTHER.encode()
    assert found.words.startswith(f"from {tokenizer}{TRAINED}; 2 chat templates were trained")
    (tmp_path / "1").rename(tmp_path / "away")
    assert find_tokenizer(run.folder, None).words == f"from {tokenizer}{TRAINED}{UNKNOWN}"
