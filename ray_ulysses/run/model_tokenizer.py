"""Compares the tokenizer that prepared a run's corpora with the one in ``model.path``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_ulysses.data.tokenize.tokenizers import files_fingerprint, load_tokenizer, tokenizer_folder
from ray_ulysses.errors import Problem, UserError

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.corpus.corpus import Corpus


def compare_tokenizers(config: Config, corpus: Corpus) -> tuple[tuple[Problem, ...], tuple[str, ...]]:
    """Return the problems and the notes of a run whose corpora have another tokenizer than its model.

    Args:
        config: The run's configuration.
        corpus: One of its corpora, which all have the same tokenizer.
    """
    path, init = config.model.path, config.model.init
    if path is None:
        return (), ()
    try:
        directory = tokenizer_folder(path)
        if files_fingerprint(directory) == corpus.info.tokenizer.fingerprint:
            return (), ()
        difference = load_tokenizer(directory).tokens.difference_from(corpus.info.vocabulary)
    except (UserError, OSError) as error:
        unknown = f"the corpus's tokenizer could not be compared with the one in model.path={path!r} ({error})"
        return (), (unknown,) if init == "pretrained" else ()
    if difference is None:
        return (), ()
    rule = (
        f"was prepared with the tokenizer {corpus.info.tokenizer.name}, which is not the one in model.path={path!r}: "
        f"{difference}"
    )
    if init == "pretrained" and not config.data.allow_other_tokenizer:
        problem = Problem(
            path="data.path",
            value=str(corpus.folder),
            rule=rule,
            hint=f"prepare it again with --tokenizer {path}, or set data.allow_other_tokenizer: true to train the "
            "weights on ids that mean other text",
        )
        return (problem,), ()
    return (), (f"data.path={corpus.folder}: {rule}; an export gets the corpus's tokenizer",)
