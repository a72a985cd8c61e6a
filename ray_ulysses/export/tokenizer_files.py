"""Finds an export's tokenizer files: the files given by the user, or the files that prepared the run's corpus."""

from __future__ import annotations

import fnmatch
import json
from dataclasses import dataclass, field
from pathlib import Path

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.format import CorpusInfo
from ray_ulysses.data.plan.corpus_set import PlannedSource
from ray_ulysses.data.tokenize.chat_template import own_template
from ray_ulysses.data.tokenize.tokenizers import (
    BYTES,
    BYTES_END,
    ByteTokenizer,
    TokenizerInfo,
    load_tokenizer,
    tokenizer_folder,
)
from ray_ulysses.errors import UserError
from ray_ulysses.inspect.run_data import DATA_ERRORS, planned_data
from ray_ulysses.storage.place import Place

# Files that Hugging Face tokenizers read. Weights and other model files must not be copied.
_PATTERNS = (
    "tokenizer*.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "tokenization_*.py",
)
_ADD = "; add a tokenizer with --tokenizer DIR, or copy its files into the directory"
_BYTE_WORDS = f"{BYTES}, converted to a tokenizer.json that gives the same tokens for every text"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """The tokenizer files to export, or the reason why there are none."""

    words: str
    """Description of the tokenizer, or the reason why there is none."""
    published: str = "none"
    """The same description without local paths, for the published directory."""
    files: dict[str, bytes] = field(default_factory=dict)
    """File contents by name; empty if there is no tokenizer."""
    end_tokens: tuple[int, ...] = ()
    """Tokens that end a document or a supervised chat turn in the corpora, and the tokenizer's own end tokens; empty if
    unknown."""
    vocab_size: int = 0
    """Largest token id plus one; 0 if there is no tokenizer."""

    def refuse_unknown_tokens(self, model_size: int) -> None:
        """Refuse a tokenizer whose token ids exceed the model's vocabulary.

        Raises:
            UserError: The tokenizer has such ids.
        """
        if self.vocab_size > model_size:
            raise UserError(
                f"--tokenizer: the largest token id is {self.vocab_size - 1}, but the model has {model_size} tokens; "
                "use the tokenizer that prepared the run's corpus"
            )


def find_tokenizer(run_dir: Place, given: Path | None, *, trust_run: bool = False) -> TokenizerFiles:
    """Find the tokenizer to export: ``given`` (a directory or ``bytes``) if set, otherwise the corpora's tokenizer.

    Raises:
        UserError: ``given`` can't be read.
    """
    prepared = _prepared_with(run_dir, trust_run)
    if given is not None:
        return _given(given, prepared)
    if prepared.fingerprint == ByteTokenizer().info.fingerprint:
        return TokenizerFiles(
            words=_BYTE_WORDS,
            published=_BYTE_WORDS,
            files=byte_tokenizer_files(),
            end_tokens=prepared.end_tokens,
            vocab_size=ByteTokenizer().info.vocab_size,
        )
    info = prepared.info
    if info is None:
        return TokenizerFiles(words=f"none: {prepared.problem}{_ADD}", end_tokens=prepared.end_tokens)
    try:
        found = load_tokenizer(info.name).info
        if found.fingerprint != info.fingerprint:
            raise UserError(f"the files in {info.name} have changed since the corpus was prepared")
        files = _copy(info.name)
        own = _template_of(info.name)
    except (UserError, OSError) as error:
        return TokenizerFiles(words=f"none: {error}{_ADD}", end_tokens=prepared.end_tokens)
    said = prepared.unsure
    if (template := prepared.template) not in (None, own):
        # Transformers prefers this file to the entry in tokenizer_config.json.
        files = {name: files[name] for name in files if not name.startswith("chat_template.")}
        files["chat_template.jinja"] = template.encode()
        said = f", with its chat template replaced by the one used in training{said}"
    return TokenizerFiles(
        words=f"from {info.name}{said}",
        published=f"the tokenizer that prepared the corpus{said}",
        files=files,
        end_tokens=prepared.end_tokens,
        vocab_size=info.vocab_size,
    )


def tokenizer_in(directory: Path) -> TokenizerFiles:
    """Read the tokenizer of a model directory, or ``bytes``.

    Raises:
        UserError: There is no tokenizer, or it can't be read.
    """
    return _given(directory, _Prepared())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """The tokenizer with which a run's corpora were prepared."""

    fingerprint: str | None = None
    end_tokens: tuple[int, ...] = ()
    """Tokens that end a text in the corpora."""
    info: TokenizerInfo | None = None
    """Description of the tokenizer; None if none of the corpora exists."""
    template: str | None = None
    """Chat template of the first corpus with conversations; None if unknown, or if no corpus has conversations."""
    unsure: str = ""
    """A clause that explains why training may have used another template, or an empty string."""
    problem: str = "the run's corpus, which specifies the tokenizer, does not exist"
    """Reason why the tokenizer is unknown."""


def _prepared_with(run_dir: Place, trust_run: bool) -> _Prepared:
    try:
        data = planned_data(run_dir, trust_run=trust_run)
    except UserError as error:
        return _Prepared(problem=str(error))
    sources = data.sources if data is not None else ()
    end_tokens = tuple(dict.fromkeys(token for source in sources for token in source.end_tokens))
    found = [info for source in sources if (info := _corpus_info(source)) is not None]
    if found:
        tokenizer = found[0].tokenizer
        texts = dict.fromkeys(info.encoding.chat_template for info in found if info.encoding.num_chats)
        unsure = ""
        if len(found) < len(sources):
            unsure = "; a missing corpus may have used another chat template"
        known = [text for text in texts if text is not None]
        if len(known) > 1:
            unsure += f"; training used {len(known)} chat templates, of which this is the first in data.sources"
        return _Prepared(
            fingerprint=tokenizer.fingerprint,
            end_tokens=end_tokens,
            info=tokenizer,
            template=known[0] if known else None,
            unsure=unsure,
        )
    fingerprint = next((source.tokenizer for source in sources if source.tokenizer), None)
    return _Prepared(fingerprint=fingerprint, end_tokens=end_tokens)


def _corpus_info(source: PlannedSource) -> CorpusInfo | None:
    try:
        info = Corpus.open(source.path).info
    except DATA_ERRORS:
        return None
    return info if source.tokenizer in ("", info.tokenizer.fingerprint) else None


def _given(directory: Path, prepared: _Prepared) -> TokenizerFiles:
    try:
        if str(directory) == BYTES:
            info, files = ByteTokenizer().info, byte_tokenizer_files()
        else:
            info, files = load_tokenizer(directory).info, _copy(directory)
    except OSError as error:
        raise UserError(
            f"--tokenizer={str(directory)!r}: can't be read ({error.strerror or error}); use a readable directory"
        ) from error
    own = None if str(directory) == BYTES else _template_of(directory)
    same = "the tokenizer" if info.fingerprint == prepared.fingerprint else "NOT the tokenizer"
    said = f", {same} that prepared the corpus" if prepared.fingerprint is not None else ""
    if prepared.template not in (None, own):
        said += "; its chat template is NOT the one used in training"
    return TokenizerFiles(
        words=f"from {directory}, as requested by --tokenizer{said}",
        published=f"given by --tokenizer{said}",
        files=files,
        # The model learned the corpus's end tokens, whichever tokenizer is exported.
        end_tokens=tuple(dict.fromkeys((*prepared.end_tokens, info.eos_token_id))),
        vocab_size=info.vocab_size,
    )


def _copy(tokenizer: str | Path) -> dict[str, bytes]:
    directory = tokenizer_folder(tokenizer)
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    return {
        name: (directory / name).read_bytes()
        for name in names
        if any(fnmatch.fnmatch(name, pattern) for pattern in _PATTERNS)
    }


def _template_of(tokenizer: str | Path) -> str | None:
    try:
        return own_template(tokenizer_folder(tokenizer))
    except UserError:
        return None


def byte_tokenizer_files() -> dict[str, bytes]:
    """Return the byte tokenizer as Hugging Face files that give the same tokens for every text.

    Every byte is a token and nothing is merged, so no text can produce the end token, even by spelling it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=dict(ByteTokenizer().tokens.ids), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": BYTES_END,
        "clean_up_tokenization_spaces": False,
        # Text that spells the end token stays plain text, as in training.
        "split_special_tokens": True,
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode() + b"\n",
    }
