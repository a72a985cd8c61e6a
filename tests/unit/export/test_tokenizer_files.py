"""An exported tokenizer has the tokens, chat template and end tokens that the run was trained on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as RustTokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.data.tokenize.tokenizers import ByteTokenizer, load_tokenizer
from ray_ulysses.engine.model import described_config
from ray_ulysses.errors import UserError
from ray_ulysses.export.tokenizer_files import byte_tokenizer_files, find_tokenizer
from ray_ulysses.run.secrets_file import stored_config
from ray_ulysses.storage import LocalStore
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.data.tokenize.test_chat import CHATML, CONVERSATION, MARKED, chat_tokenizer
from tests.unit.data.tokenize.test_supervision import prepare_rows
from tests.unit.export.runs import export, word_tokenizer, write_checkpoint, write_config
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
        # Some characters are incomplete.
        ids = [draw.randrange(256) for _ in range(20)]
        assert hugging_face.decode(ids) == bytes(ids).decode("utf-8", errors="replace")
    assert hugging_face.eos_token_id == again.info.eos_token_id == ours.info.eos_token_id
    assert len(hugging_face) == ours.info.vocab_size


def test_only_the_tokenizer_files_of_a_given_directory_are_copied(tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path / "words", 8)
    found = find_tokenizer(tmp_path / "run", folder)
    assert found.files.keys() == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert found.files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert (found.end_tokens, found.vocab_size) == ((8,), 9)
    assert found.words == f"from {folder}, as requested by --tokenizer"


def test_tokenizers_that_can_not_be_exported_are_refused_or_reported(tmp_path: Path) -> None:
    found = find_tokenizer(tmp_path / "run", word_tokenizer(tmp_path / "words", 8))
    found.refuse_unknown_tokens(9)
    with pytest.raises(UserError, match="--tokenizer: the largest token id is 8"):
        found.refuse_unknown_tokens(8)
    with pytest.raises(UserError, match="no such directory"):
        find_tokenizer(tmp_path / "run", tmp_path / "none")
    found = find_tokenizer(tmp_path, None)
    assert found.files == {}
    assert found.words.startswith("none: the run's corpus, which specifies the tokenizer, does not exist")


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    corpus = text_corpus(tmp_path / "data", varied_texts(20))
    return make_run(tmp_path / "run", [corpus.path]).folder


@pytest.mark.parametrize("has_corpus", [True, False])
def test_the_corpus_end_token_is_kept_with_another_tokenizer(planned: Path, tmp_path: Path, has_corpus: bool) -> None:
    folder = word_tokenizer(tmp_path / "words", 65)
    if not has_corpus:
        (tmp_path / "data").rename(tmp_path / "away")
    found = find_tokenizer(planned, folder)
    assert found.end_tokens == (256, 65)
    assert found.words == f"from {folder}, as requested by --tokenizer, NOT the tokenizer that prepared the corpus"
    assert find_tokenizer(planned, Path("bytes")).end_tokens == (256,)
    assert find_tokenizer(planned, None).end_tokens == (256,)


@pytest.mark.parametrize("file", ["plan.json", "rows.parquet"])
def test_a_truncated_plan_only_prevents_finding_the_tokenizer(planned: Path, file: str) -> None:
    path = planned / "plan/segment-0000" / file
    path.write_bytes(path.read_bytes()[:40])
    found = find_tokenizer(planned, None)
    assert found.files == {} and found.end_tokens == ()
    assert found.words.startswith(f"none: the run's data plan can't be read ({path}: ")
    assert find_tokenizer(planned, Path("bytes")).words == "from bytes, as requested by --tokenizer"


def test_missing_permissions_are_named(planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = word_tokenizer(tmp_path / "words", 8)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    monkeypatch.setattr(LocalStore, "list", lambda store, folder: refuse(store.path(folder)))
    assert f"can't be read ({planned}/plan: Permission denied)" in find_tokenizer(planned, None).words
    with pytest.raises(UserError, match=f"--tokenizer='{folder}': .*Permission denied"):
        find_tokenizer(planned, folder)


OTHER = CHATML.replace("message['role'] +", "message['role'] + ':' +")
# A turn with a tool call may have an end token of its own.
CALL = [{"role": "user", "content": "now"}, {"role": "assistant", "content": "call"}]
TRAINED = ", with its chat template replaced by the one used in training"
UNKNOWN = "; a missing corpus may have used another chat template"


def chats(folder: Path, tokenizer: Path, template: str | None = None, start: int = 0) -> Corpus:
    rows: list[dict[str, Any]] = [{"messages": one} for one in [CONVERSATION, CONVERSATION[1:3], CALL][start:]]
    options = EncodingOptions(chat_template=template)
    return prepare_rows(folder, rows, str(tokenizer), encoding=options, messages_field="messages")


def rendered(files: dict[str, bytes], folder: Path) -> str:
    """Render a conversation with Transformers and the exported tokenizer."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return str(AutoTokenizer.from_pretrained(folder).apply_chat_template(CONVERSATION, tokenize=False))


@pytest.mark.parametrize("own", [None, CHATML], ids=["none of its own", "one of its own"])
@pytest.mark.parametrize("given", [OTHER, MARKED], ids=["plain", "marked"])
def test_the_template_given_to_prepare_is_exported(tmp_path: Path, own: str | None, given: str) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", own, bos_token="<s>")
    (tokenizer / "chat_template.json").write_text("{}")
    run = make_run(tmp_path / "run", [chats(tmp_path / "chats", tokenizer, given).path])
    found = find_tokenizer(run.folder, None)
    assert found.files["chat_template.jinja"] == given.encode() and "chat_template.json" not in found.files
    assert found.words == f"from {tokenizer}{TRAINED}"
    assert found.published == f"the tokenizer that prepared the corpus{TRAINED}"
    with_given = {**find_tokenizer(tmp_path, tokenizer).files, "chat_template.jinja": given.encode()}
    text = rendered(found.files, tmp_path / "a")
    assert text == rendered(with_given, tmp_path / "b") and "zürich<|im_end|>" in text
    assert ("assistant:" in text) == (given == OTHER)
    asked = find_tokenizer(run.folder, tokenizer)
    assert asked.words.endswith(
        "the tokenizer that prepared the corpus; its chat template is NOT the one used in training"
    )


def test_a_template_is_exported_as_it_was_during_preparation(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path / "tokenizer", CHATML)
    run = make_run(tmp_path / "run", [chats(tmp_path / "chats", tokenizer).path])
    for found in (find_tokenizer(run.folder, None), find_tokenizer(run.folder, tokenizer)):
        assert found.files["chat_template.jinja"] == CHATML.encode() and "chat template" not in found.words
    (tokenizer / "chat_template.jinja").write_text(OTHER)
    assert find_tokenizer(run.folder, None).files["chat_template.jinja"] == CHATML.encode()


def test_the_first_of_several_templates_is_exported_and_the_others_are_mentioned(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer")
    first, second = chats(tmp_path / "1", tokenizer, OTHER), chats(tmp_path / "2", tokenizer, MARKED, start=1)
    run = make_run(tmp_path / "run", [first.path, second.path])
    found = find_tokenizer(run.folder, None)
    assert found.files["chat_template.jinja"] == OTHER.encode()
    assert found.words.startswith(f"from {tokenizer}{TRAINED}; training used 2 chat templates")
    (tmp_path / "1").rename(tmp_path / "away")
    assert find_tokenizer(run.folder, None).words == f"from {tokenizer}{TRAINED}{UNKNOWN}"


# Without a line feed after the turn, the document's end token follows the turn's.
LLAMA3_LIKE = CHATML.replace(" + '\\n' }}{% endfor %}", " }}{% endfor %}")
ENDS_WITH_EOS = CHATML.replace("'<|im_end|>' + '\\n'", "eos_token")
WITHOUT_END = CHATML.replace("'<|im_end|>' + '\\n'", "'\\n'")
TWO_ENDS = CHATML.replace("'<|im_end|>' + '\\n'", "('<|im_start|>' if message['content'] == 'call' else '<|im_end|>')")


def tokenizer_with(directory: Path, template: str, eos_token: str = "</s>") -> Path:
    """Write a tokenizer with the template in a separate file, which its fingerprint does not include."""
    chat_tokenizer(directory, None, eos_token=eos_token)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def ids_of(directory: Path, *names: str) -> tuple[int, ...]:
    vocabulary = RustTokenizer.from_file(str(directory / "tokenizer.json")).get_vocab(with_added_tokens=True)
    return tuple(vocabulary[name] for name in names)


@pytest.mark.parametrize(
    ("template", "eos_token", "ends"),
    [
        pytest.param(CHATML, "</s>", ("</s>", "<|im_end|>"), id="ChatML"),
        pytest.param(CHATML, "<|im_end|>", ("<|im_end|>",), id="ChatML with its end as the tokenizer's own"),
        pytest.param(LLAMA3_LIKE, "</s>", ("</s>", "<|im_end|>"), id="Llama 3"),
        pytest.param(ENDS_WITH_EOS, "</s>", ("</s>",), id="the document end ends turns"),
        pytest.param(WITHOUT_END, "</s>", ("</s>", "<|im_start|>"), id="the next message's token ends turns"),
        pytest.param(MARKED, "<|im_end|>", ("<|im_end|>",), id="generation marks"),
        pytest.param(TWO_ENDS, "</s>", ("</s>", "<|im_start|>", "<|im_end|>"), id="two ends"),
    ],
)
def test_end_tokens_of_turns_end_a_text(tmp_path: Path, template: str, eos_token: str, ends: tuple[str, ...]) -> None:
    tokenizer = tokenizer_with(tmp_path / "tokenizer", template, eos_token)
    run = make_run(tmp_path / "run", [chats(tmp_path / "chats", tokenizer).path])
    assert find_tokenizer(run.folder, None).end_tokens == ids_of(tokenizer, *ends)
    # The plan records the end tokens.
    (tmp_path / "chats").rename(tmp_path / "away")
    found = find_tokenizer(run.folder, None)
    assert found.files == {} and found.end_tokens == ids_of(tokenizer, *ends)


def test_the_end_tokens_of_several_corpora_are_combined(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path / "tokenizer", CHATML)
    first = chats(tmp_path / "first", tokenizer)
    tokenizer_with(tmp_path / "tokenizer", CHATML.replace("<|im_end|>", "<s>"))
    second = chats(tmp_path / "second", tokenizer, start=1)
    plain = prepare_rows(tmp_path / "plain", [{"text": "the lazy fox"}], tokenizer=str(tokenizer), text_field="text")
    assert (plain.info.turn_ends, second.info.turn_ends) == ((), ids_of(tokenizer, "<s>"))
    run = make_run(tmp_path / "run", [plain.path, first.path, second.path])
    assert find_tokenizer(run.folder, None).end_tokens == ids_of(tokenizer, "</s>", "<|im_end|>", "<s>")


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
