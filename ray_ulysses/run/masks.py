"""Stores a run's masking in its directory, so that no node needs the tokenizer's files to mask tokens."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass, replace

import numpy as np

from ray_ulysses.config import Config
from ray_ulysses.data.read.masking import Masking, MaskReplacement, MaskUnit, masking_with
from ray_ulysses.data.tokenize.tokenizers import TokenizerInfo, load_unchanged
from ray_ulysses.errors import UserError
from ray_ulysses.run_names import MASKING_FILE
from ray_ulysses.storage.place import Place, is_file, open_store
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, Number, Whole, adapter, read_json


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredMasking:
    """The content of ``masking.json``; see `Masking`."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    seed: int
    fraction: Number
    unit: MaskUnit
    replace: MaskReplacement
    mask_id: Whole
    vocab_size: Whole
    special_ids: tuple[Whole, ...]
    word_starts: str | None
    """Base64 of one bit per token, or None if the vocabulary has no words."""


def run_masking(config: Config, tokenizer: TokenizerInfo) -> Masking | None:
    """Return the masking of a run's tokens, or None if its model is not a masked language model.

    Args:
        config: The run's configuration.
        tokenizer: The tokenizer of the run's corpora.

    Raises:
        UserError: The tokenizer can't be loaded, has changed, or does not suit the masks.
    """
    objective = config.objective
    if objective.task != "masked_lm":
        return None
    return masking_with(
        load_unchanged(tokenizer),
        seed=config.run.seed,
        fraction=objective.mask_fraction,
        unit=objective.mask_unit,
        replace=objective.mask_replacement,
    )


def store_masking(run_dir: Place, masking: Masking) -> None:
    """Write a masking to a run's directory."""
    starts = (
        None if masking.word_starts is None else base64.b64encode(np.packbits(masking.word_starts).tobytes()).decode()
    )
    fields = asdict(replace(masking, word_starts=None)) | {"word_starts": starts}
    fields["special_ids"] = sorted(masking.special_ids)
    open_store(run_dir).replace(MASKING_FILE, [json.dumps(fields).encode()])


def read_masking(run_dir: Place) -> Masking | None:
    """Return the masking that a run's directory contains, or None if there is none.

    Raises:
        UserError: The file is damaged.
    """
    if not is_file(run_dir / MASKING_FILE):
        return None
    try:
        stored = read_json(adapter(_StoredMasking), open_store(run_dir).read_whole(MASKING_FILE))
        starts = None
        if stored.word_starts is not None:
            bits = np.frombuffer(base64.b64decode(stored.word_starts, validate=True), dtype=np.uint8)
            starts = np.unpackbits(bits)[: stored.vocab_size].astype(np.bool_)
    except ValueError as error:
        raise UserError(f"{run_dir / MASKING_FILE}: {error}; delete it; `ray-ulysses train` writes it again") from error
    fields = asdict(stored) | {"special_ids": frozenset(stored.special_ids), "word_starts": starts}
    return Masking(**fields)
