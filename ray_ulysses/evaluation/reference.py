"""Computes the log-probabilities of a corpus's pairs of answers under a reference model, and stores them beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from ray_ulysses.attention.batch import IGNORE_INDEX, ShardedBatch, shard_batch
from ray_ulysses.attention.ulysses import apply_ulysses
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.reference import Reference, commit, has_reference, missing_parts, parts_of, write_part
from ray_ulysses.engine.model import build_model, refuse_architecture
from ray_ulysses.engine.model_config import described_config
from ray_ulysses.engine.model_digest import model_digest
from ray_ulysses.engine.preferences import document_log_probs
from ray_ulysses.engine.zero import build_forward_engine, partition_config, prepare_process
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.evaluation.model_source import directory_config
from ray_ulysses.evaluation.scoring import grouped
from ray_ulysses.parallel.layout import automatic_ring_size
from ray_ulysses.parallel.mesh import SequenceMesh
from ray_ulysses.run.settings import zero_settings
from ray_ulysses.storage.place import open_store

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.corpus.reference import Part
    from ray_ulysses.storage.place import FileStore

_ROW_TOKENS = 2**15
"""Longest row of several pairs, in tokens. A constant, so that the values do not depend on the layout."""
_PART_TOKENS = 2**22


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRequest:
    """The options of the command ``reference``."""

    corpus: str
    """Absolute path or URI of a corpus of pairs."""
    model: str
    """Absolute path of a model directory, or an id on the hub."""
    dtype: Literal["bf16", "fp32"]
    part_tokens: int = _PART_TOKENS
    """Number of tokens after which values are stored."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedReference:
    """A computation that has passed all checks."""

    request: ReferenceRequest
    config: Config
    """Configuration with which the engine loads the model."""
    corpus: Corpus
    reference: Reference
    parts: tuple[Part, ...]
    num_heads: int

    @property
    def store(self) -> FileStore:
        """The corpus's folder, for writing."""
        return open_store(self.request.corpus)

    @property
    def is_complete(self) -> bool:
        """Whether the values of all pairs are committed."""
        return has_reference(self.corpus, self.reference)

    def probe(self) -> str:
        """Check that the corpus's folder can be written, by creating a key in it, and return the key.

        Raises:
            RunError: The folder can't be written.
        """
        key = f"{self.reference.folder}/probe"
        try:
            self.store.replace(key, [b""])
        except OSError as error:
            raise RunError(
                f"CORPUS={self.request.corpus}: can't be written ({error.strerror or error}), but it stores the "
                "log-probabilities; make it writable, or copy the corpus"
            ) from error
        return key

    def missing(self) -> list[Part]:
        """Return the parts that are not stored yet."""
        return missing_parts(self.store, self.reference, self.parts)

    def commit(self) -> None:
        """Commit the values; all parts must be stored."""
        commit(self.store, self.reference, self.parts)


def prepare_reference(request: ReferenceRequest) -> PreparedReference:
    """Open the corpus and the model, and check that they fit together, without reading all weights.

    Raises:
        UserError: One of them can't be read, or they do not fit together.
    """
    corpus = Corpus.open(request.corpus)
    if not corpus.info.are_pairs or corpus.info.are_queries:
        raise UserError(
            f"CORPUS={request.corpus}: does not contain answers; prepare pairs with --chosen-field and "
            "--rejected-field, or labeled answers with --completion-field and --label-field"
        )
    directory = Path(request.model)
    config = directory_config(directory if directory.is_dir() else request.model, request.dtype)
    hf_config = described_config(config)
    num_positions = refuse_architecture(hf_config, config.model.part).num_positions
    text, longest = hf_config.get_text_config(decoder=True), int(corpus.text_lengths.max())
    if corpus.info.max_token_id >= text.vocab_size:
        raise UserError(
            f"--model={request.model}: has a vocabulary of {text.vocab_size} tokens, but the corpus contains token "
            f"{corpus.info.max_token_id}; prepare the corpus with the model's own tokenizer"
        )
    if num_positions is not None and longest > num_positions:
        raise UserError(
            f"--model={request.model}: has a table of {num_positions} positions, but the longest prompt with its "
            f"answer has {longest} tokens; remove such pairs from the sources, and prepare the corpus again"
        )
    reference = Reference(
        corpus=corpus.fingerprint, digest=model_digest(request.model), dtype=request.dtype, model=request.model
    )
    return PreparedReference(
        request=request,
        config=config,
        corpus=corpus,
        reference=reference,
        parts=tuple(parts_of(corpus.lengths, request.part_tokens)),
        num_heads=int(text.num_attention_heads),
    )


def compute_parts(
    device: torch.device,
    say: Callable[[str], object],
    request: ReferenceRequest,
    reference: Reference,
    parts: Sequence[Part],
    ring_size: int | None = None,
    probe: str = "",
) -> int:
    """Compute and store some parts, and return their number.

    All ranks of the world, which share each row, must call this function.

    Args:
        device: This rank's device.
        say: Not called.
        request: The options.
        reference: The reference model that the command identified.
        parts: Ranges of documents; those stored meanwhile are left out.
        ring_size: Number of ranks in a ring; chosen automatically if None.
        probe: Key in the corpus's folder that the command has created, to recognize a folder that is not shared.

    Raises:
        UserError: This node sees another corpus or model, or the model can't be computed exactly on this mesh.
        RunError: A log-probability is not finite.
    """
    prepared, world_size = prepare_reference(request), dist.get_world_size()
    is_shared = not probe or probe in prepared.store.list(prepared.reference.folder)
    if replace(prepared.reference, model=reference.model) != reference or not is_shared:
        raise UserError(
            f"CORPUS={request.corpus}, --model={request.model}: this node reads another corpus or model than the "
            "command; use paths that are shared by all nodes"
        )
    # The first rank lists for all ranks, because another command may store parts meanwhile.
    listed: list[Any] = [prepared.missing() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(listed)
    ring_size = automatic_ring_size(world_size, prepared.num_heads) if ring_size is None else ring_size
    mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
    model, stored = load_reference(prepared.config, mesh, device), prepared.store
    left = [one for one in parts if one in listed[0]]
    for part in left:
        values = np.concatenate([*log_probs(prepared.corpus, part, model, mesh, device)])
        if not np.isfinite(values).all():
            raise RunError(
                f"the log-probabilities of documents {part[0]} to {part[1] - 1} are not finite: the model has "
                "diverged, or its dtype overflows; use --dtype fp32"
            )
        if mesh.sp_rank == 0:
            write_part(stored, reference, part, values)
    return len(left)


def load_reference(config: Config, mesh: SequenceMesh, device: torch.device) -> Any:
    """Load the model for forward passes, partitioned over the ranks if there are several."""
    if mesh.sp_size == 1:
        return apply_ulysses(build_model(config).eval().to(device), mesh)
    prepare_process(dist.get_rank(), device.type)
    settings = replace(zero_settings(config, 1), stage=3)
    return build_forward_engine(apply_ulysses(build_model(config, partition_config(settings)), mesh), settings)


def log_probs(
    corpus: Corpus, part: Part, model: Any, mesh: SequenceMesh, device: torch.device
) -> Iterator[np.ndarray[Any, np.dtype[np.float64]]]:
    """Yield the log-probabilities of each row's pairs, fp64 ``[pairs, 2]``. All ranks must call this function."""
    for documents in grouped(range(*part), lambda document: int(corpus.lengths[document]), _ROW_TOKENS):
        yield document_log_probs(model, _batch(corpus, documents, mesh, device)).view(-1, 2).cpu().numpy()


def _batch(corpus: Corpus, documents: Sequence[int], mesh: SequenceMesh, device: torch.device) -> ShardedBatch:
    tokens, labels, lengths = [], [], list[int]()
    for document in documents:
        length, border = int(corpus.lengths[document]), int(corpus.borders[document])
        tokens.append(corpus.read(document, 0, length).astype(np.int64))
        weights = corpus.label_weights(document, 0, length)
        assert weights is not None
        labels.append(np.where(weights > 0, tokens[-1], IGNORE_INDEX))
        lengths += [border, length - border]
    ids, targets = (torch.from_numpy(np.concatenate(one)).to(device) for one in (tokens, labels))
    return shard_batch(ids, targets, lengths, mesh)
