"""An exported chat model stops where its turns ended in training, whatever token its tokenizer ends documents with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.tokenize.tokenizers import load_tokenizer
from ray_ulysses.engine.model import described_config
from ray_ulysses.export.tokenizer_files import find_tokenizer
from ray_ulysses.run.secrets_file import stored_config
from tests.unit.data.tokenize.test_chat import CHATML, CONVERSATION, MARKED, chat_tokenizer
from tests.unit.data.tokenize.test_supervision import prepare_rows
from tests.unit.export.runs import export, write_checkpoint, write_config
from tests.unit.inspect.runs import make_run

# No line feed after the turn, so that the end token of the document follows the turn's.
LLAMA3_LIKE = CHATML.replace(" + '\\n' }}{% endfor %}", " }}{% endfor %}")
ENDS_WITH_EOS = CHATML.replace("'<|im_end|>' + '\\n'", "eos_token")
WITHOUT_END = CHATML.replace("'<|im_end|>' + '\\n'", "'\\n'")
# A model that calls a tool ends its turn otherwise than one that answers.
TWO_ENDS = CHATML.replace("'<|im_end|>' + '\\n'", "('<|im_start|>' if message['content'] == 'call' else '<|im_end|>')")
CALL = [{"role": "user", "content": "now"}, {"role": "assistant", "content": "call"}]


def tokenizer_with(directory: Path, template: str, eos_token: str = "</s>") -> Path:
    """A tokenizer whose template lies in a file of its own, so that another template leaves it the same tokenizer."""
    chat_tokenizer(directory, None, eos_token=eos_token)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def ids_of(directory: Path, *names: str) -> tuple[int, ...]:
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab(with_added_tokens=True)
    return tuple(vocabulary[name] for name in names)


def chats(directory: Path, tokenizer: Path, *conversations: list[dict[str, str]]) -> Corpus:
    rows: list[dict[str, Any]] = [{"messages": one} for one in conversations or [CONVERSATION, CONVERSATION[1:3]]]
    return prepare_rows(directory, rows, tokenizer=str(tokenizer), messages_field="messages")


@pytest.mark.parametrize(
    ("template", "eos_token", "ends"),
    [
        pytest.param(CHATML, "</s>", ("</s>", "<|im_end|>"), id="ChatML"),
        pytest.param(CHATML, "<|im_end|>", ("<|im_end|>",), id="ChatML, its end the tokenizer's own"),
        pytest.param(LLAMA3_LIKE, "</s>", ("</s>", "<|im_end|>"), id="Llama 3"),
        pytest.param(ENDS_WITH_EOS, "</s>", ("</s>",), id="the end of documents ends turns"),
        pytest.param(WITHOUT_END, "</s>", ("</s>", "<|im_start|>"), id="turns that the next message's token ends"),
        pytest.param(MARKED, "<|im_end|>", ("<|im_end|>",), id="generation marks"),
    ],
)
def test_what_ends_a_supervised_turn_ends_a_text(
    tmp_path: Path, template: str, eos_token: str, ends: tuple[str, ...]
) -> None:
    tokenizer = tokenizer_with(tmp_path / "tokenizer", template, eos_token)
    run = make_run(tmp_path / "run", [chats(tmp_path / "chats", tokenizer).path])
    assert find_tokenizer(run.folder, None).end_tokens == ids_of(tokenizer, *ends)


def test_every_end_that_a_template_writes_is_known(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path / "tokenizer", TWO_ENDS)
    corpus = chats(tmp_path / "chats", tokenizer, CONVERSATION, CALL)
    assert corpus.info.end_tokens == (
        load_tokenizer(tokenizer).info.eos_token_id,
        *sorted(ids_of(tokenizer, "<|im_start|>", "<|im_end|>")),
    )
    assert chats(tmp_path / "answers", tokenizer).info.end_tokens == ids_of(tokenizer, "</s>", "<|im_end|>")


def test_labels_of_tokens_that_were_given_say_where_turns_end(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path / "tokenizer", CHATML)
    (end,) = ids_of(tokenizer, "<|im_end|>")
    rows = [
        {"ids": [5, 6, end, 7, 8, end], "labels": [-100, 6, end, -100, 8, end]},
        {"ids": [5, 7], "labels": [-100, 7]},
    ]
    fields = {"tokens_field": "ids", "labels_field": "labels"}
    corpus = prepare_rows(tmp_path / "data", rows, tokenizer=str(tokenizer), **fields)
    assert corpus.info.turn_ends == (end,)


def test_several_corpora_end_a_text_with_what_any_of_them_ends_turns_with(tmp_path: Path) -> None:
    """One tokenizer, two chat templates and plain text: a text ends with whatever one of them supervises."""
    tokenizer = tokenizer_with(tmp_path / "tokenizer", CHATML)
    first = chats(tmp_path / "first", tokenizer)
    tokenizer_with(tmp_path / "tokenizer", CHATML.replace("<|im_end|>", "<s>"))
    second = chats(tmp_path / "second", tokenizer, CONVERSATION[1:3])
    plain = prepare_rows(tmp_path / "plain", [{"text": "the lazy fox"}], tokenizer=str(tokenizer), text_field="text")
    assert (plain.info.turn_ends, second.info.turn_ends) == ((), ids_of(tokenizer, "<s>"))
    run = make_run(tmp_path / "run", [plain.path, first.path, second.path])
    assert find_tokenizer(run.folder, None).end_tokens == ids_of(tokenizer, "</s>", "<|im_end|>", "<s>")


def test_the_plan_knows_the_ends_when_the_corpora_are_gone(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path / "tokenizer", CHATML)
    corpus = chats(tmp_path / "chats", tokenizer)
    run = make_run(tmp_path / "run", [corpus.path])
    corpus.path.rename(tmp_path / "away")
    found = find_tokenizer(run.folder, None)
    assert found.files == {} and found.end_tokens == ids_of(tokenizer, "</s>", "<|im_end|>")


def test_the_exported_generation_config_stops_at_the_end_of_a_turn(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path / "tokenizer", CHATML)
    run = make_run(tmp_path / "run", [chats(tmp_path / "chats", tokenizer).path])
    vocab_size = load_tokenizer(tokenizer).info.vocab_size
    fields = json.loads(json.dumps(stored_config(run.folder).model.config)) | {"vocab_size": vocab_size}
    write_config(run.folder, fields)
    torch.manual_seed(0)
    write_checkpoint(run.folder, AutoModelForCausalLM.from_config(described_config(stored_config(run.folder))))
    report = export(run.folder, check=False)
    ends = list(ids_of(tokenizer, "</s>", "<|im_end|>"))
    assert GenerationConfig.from_pretrained(report.out).eos_token_id == ends
    assert json.loads((Path(report.out) / "config.json").read_text())["eos_token_id"] == ends
