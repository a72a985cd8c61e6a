"""Finds the tokenizer for texts that are put into held-out documents."""

from __future__ import annotations

from pathlib import Path

from ray_ulysses.data.tokenize.tokenizers import Tokenizer, load_tokenizer
from ray_ulysses.errors import UserError
from ray_ulysses.evaluation.held_out import HeldOut

_PROBE = "The number of bakimo is 48213, été.\n"
_GIVE = "give one with --tokenizer DIR, or leave retrieval out with --task loss"


def refuse_other_tokens(held: HeldOut, model_dir: Path) -> None:
    """Refuse documents that a model directory's own tokenizer would have given other tokens, as far as both are there.

    Raises:
        UserError: The tokenizers differ.
    """
    info = held.corpora.corpora[0].info.tokenizer
    own, prepared = _loaded(model_dir), _loaded(info.name)
    if isinstance(own, str) or isinstance(prepared, str):
        return
    made = ((*one.encode_all([_PROBE])[0].tolist(), one.info.eos_token_id) for one in (own, prepared))
    if len(set(made)) > 1:
        raise UserError(
            f"--data: the documents were prepared with the tokenizer {info.name}, which gives other tokens than the "
            f"model's own in {model_dir}; prepare them with that one, or give --tokenizer DIR if they are right"
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
