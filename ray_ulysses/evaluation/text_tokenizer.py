"""Finds the tokenizer for texts that are put into held-out documents."""

from __future__ import annotations

from pathlib import Path

from ray_ulysses.data.tokenize.tokenizers import Tokenizer, load_tokenizer
from ray_ulysses.errors import UserError
from ray_ulysses.evaluation.held_out import HeldOut

_GIVE = "give one with --tokenizer DIR, or leave retrieval out with --task loss"


def refuse_other_tokens(held: HeldOut, model_dir: Path) -> None:
    """Refuse documents with other tokens, or another end token, than the tokenizer in a model directory, if it has one.

    Raises:
        UserError: The tokenizers differ.
    """
    info, own = held.corpora.corpora[0].info, _loaded(model_dir)
    if isinstance(own, str) or own.info.fingerprint == info.tokenizer.fingerprint:
        return
    difference = own.tokens.difference_from(info.vocabulary)
    if difference is None and own.info.eos_token_id != info.tokenizer.eos_token_id:
        difference = f"the end token is {info.tokenizer.eos_token_id} there and {own.info.eos_token_id} in the model"
    if difference is not None:
        raise UserError(
            f"--data: the documents were prepared with the tokenizer {info.tokenizer.name}, which gives other tokens "
            f"than the model's own in {model_dir} ({difference}); prepare them with that one, or give --tokenizer DIR "
            "if they are right"
        )


def find_tokenizer(held: HeldOut, given: Path | None, model_dir: Path | None) -> Tokenizer:
    """Return the given tokenizer, else the one that the documents were prepared with, else a model directory's.

    Args:
        held: The documents.
        given: Directory of a tokenizer, or ``bytes``.
        model_dir: A model directory that may have tokenizer files; None for a run.

    Raises:
        UserError: There is none.
    """
    if given is not None:
        try:
            return load_tokenizer(given)
        except UserError as error:
            raise UserError(f"--{error}") from error
    info = held.corpora.corpora[0].info.tokenizer
    prepared = _loaded(info.name)
    if not isinstance(prepared, str) and prepared.info.fingerprint == info.fingerprint:
        return prepared
    own = None if model_dir is None else _loaded(model_dir)
    if own is None or isinstance(own, str):
        why = prepared if isinstance(prepared, str) else f"its files in {info.name} have changed"
        raise UserError(f"--tokenizer: is not given, and that of the documents can't be loaded ({why}); {_GIVE}")
    return own


def _loaded(name: Path | str) -> Tokenizer | str:
    """Return a tokenizer, or why it can't be loaded."""
    try:
        return load_tokenizer(name)
    except (UserError, OSError) as error:
        return str(error)
