"""From sources to a corpus: what is to be done, what is done already, and the merge that commits it.

The units between may run anywhere: here one after another, or as Ray tasks
(``ray_ulysses.cluster.prepare_job``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ray_ulysses.data.atomic import write_text
from ray_ulysses.data.corpus import Corpus
from ray_ulysses.data.format import CORPUS_FILE, PREPARATION_FILE, stable_hash
from ray_ulysses.data.merge import Duplicates, merge
from ray_ulysses.data.sources import DEFAULT_UNIT_BYTES, Rejected, SourceSpec, Unit, list_units
from ray_ulysses.data.tokenizers import BYTES, Tokenizer, load_tokenizer
from ray_ulysses.data.unit_writer import UnitResult, finished_unit, unit_signature, write_unit
from ray_ulysses.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareRequest:
    """What the user asked ``prepare`` for.

    Attributes:
        sources: What to read.
        out: Directory of the corpus.
        tokenizer: ``bytes``, or a local Hugging Face tokenizer directory.
        duplicates: ``quarantine`` leaves out documents whose text occurred before; ``keep`` keeps them.
        unit_bytes: Input bytes a unit, and so about the size of a shard.
    """

    sources: SourceSpec
    out: Path
    tokenizer: str = "bytes"
    duplicates: Duplicates = "quarantine"
    unit_bytes: int = DEFAULT_UNIT_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """A preparation that has begun.

    Attributes:
        request: What was asked for.
        units: All units.
        done: Results of the units that an earlier run finished.
        rejected: Files left out before any was read.
        signature: Identifies request and units.
        is_complete: Whether the corpus is there already.
    """

    request: PrepareRequest
    units: tuple[Unit, ...]
    done: tuple[UnitResult, ...]
    rejected: tuple[Rejected, ...]
    signature: str
    is_complete: bool

    @property
    def pending(self) -> tuple[Unit, ...]:
        """Return the units that are still to be written."""
        finished = {result.index for result in self.done}
        return tuple(unit for unit in self.units if unit.index not in finished)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareProgress:
    """How far a preparation is.

    Attributes:
        units_done: Units finished, those of earlier runs included.
        num_units: All units.
        documents: Documents stored so far.
        tokens: Tokens stored so far.
        rejected: Documents left out so far.
    """

    units_done: int
    num_units: int
    documents: int
    tokens: int
    rejected: int


ProgressCallback = Callable[[PrepareProgress], None]


def begin(request: PrepareRequest) -> Preparation:
    """List the sources and claim the directory; nothing that is already there is written over.

    Raises:
        UserError: A source or the tokenizer is missing, there is nothing to read, or the directory holds
        another
            corpus, another unfinished preparation, or files that are not ours.
    """
    request = _with_absolute_paths(request)
    tokenizer = load_tokenizer(request.tokenizer)
    units, rejected = list_units(request.sources, request.unit_bytes)
    if not units:
        paths = ", ".join(request.sources.paths)
        raise UserError(
            f"source={paths}: no file matches pattern={request.sources.pattern!r} "
            f"(kind={request.sources.kind}); nothing was written"
        )
    options = _options_signature(request, tokenizer)
    signature = stable_hash([options, [unit_signature(unit, tokenizer) for unit in units]])
    is_complete = _claim(request.out, options, signature)
    done = () if is_complete else tuple(r for u in units if (r := finished_unit(request.out, u, tokenizer)) is not None)
    return Preparation(
        request=request,
        units=units,
        done=done,
        rejected=rejected,
        signature=signature,
        is_complete=is_complete,
    )


def finish(preparation: Preparation, results: tuple[UnitResult, ...]) -> Corpus:
    """Merge the units' notes and commit the corpus by writing ``corpus.json``.

    Args:
        preparation: What ``begin`` returned.
        results: The results of all units, in any order.

    Raises:
        UserError: No document is left.
    """
    ordered = tuple(sorted(results, key=lambda result: result.index))
    assert [r.index for r in ordered] == [u.index for u in preparation.units], "every unit must have one result"
    request = preparation.request
    merge(
        request.out,
        ordered,
        tokenizer=load_tokenizer(request.tokenizer).info,
        rejected=preparation.rejected,
        duplicates=request.duplicates,
        signature=preparation.signature,
    )
    return Corpus.open(request.out)


def prepare_local(request: PrepareRequest, progress: ProgressCallback | None = None) -> Corpus:
    """Prepare a corpus in this process, one unit after another; the same files as through Ray.

    Raises:
        UserError: As ``begin`` and ``finish`` do, and for a file that can't be read.
    """
    preparation = begin(request)
    request = preparation.request
    if preparation.is_complete:
        return Corpus.open(request.out)
    tokenizer = load_tokenizer(request.tokenizer)
    results = list(preparation.done)
    for unit in preparation.pending:
        results.append(write_unit(request.out, unit, tokenizer))
        if progress is not None:
            progress(progress_of(results, len(preparation.units)))
    return finish(preparation, tuple(results))


def progress_of(results: list[UnitResult], num_units: int) -> PrepareProgress:
    """Return the progress that the results so far amount to."""
    return PrepareProgress(
        units_done=len(results),
        num_units=num_units,
        documents=sum(result.num_documents for result in results),
        tokens=sum(result.num_tokens for result in results),
        rejected=sum(result.num_rejected for result in results),
    )


def _with_absolute_paths(request: PrepareRequest) -> PrepareRequest:
    """Resolve what is on disk here: a worker has another current directory; hub names stay as they are."""
    paths = tuple(_absolute(path) for path in request.sources.paths)
    return replace(
        request,
        sources=replace(request.sources, paths=paths),
        out=request.out.expanduser().absolute(),
        tokenizer=_absolute(request.tokenizer) if request.tokenizer != BYTES else BYTES,
    )


def _absolute(path: str) -> str:
    expanded = Path(path).expanduser()
    return str(expanded.absolute()) if expanded.exists() else path


def _options_signature(request: PrepareRequest, tokenizer: Tokenizer) -> str:
    spec = request.sources
    return stable_hash(
        {
            "tokenizer": tokenizer.info.fingerprint,
            "paths": spec.paths,
            "kind": spec.kind,
            "pattern": spec.pattern,
            "exclude": spec.exclude,
            "text_field": spec.text_field,
            "split": spec.split,
            "duplicates": request.duplicates,
            "unit_bytes": request.unit_bytes,
        }
    )


def _claim(out: Path, options: str, signature: str) -> bool:
    """Return whether the same corpus is complete; claim the directory when it is free."""
    if out.exists() and not out.is_dir():
        raise UserError(f"out={out}: is a file; name a directory")
    if (out / CORPUS_FILE).is_file():
        if _field(out / CORPUS_FILE, "signature") == signature:
            return True
        raise UserError(
            f"out={out}: already holds a corpus of other sources, options or source files; "
            "nothing was written over. Choose another directory, or delete this one first"
        )
    if (out / PREPARATION_FILE).is_file():
        if _field(out / PREPARATION_FILE, "options") != options:
            raise UserError(
                f"out={out}: holds an unfinished preparation with other sources or options; "
                "nothing was written over. Choose another directory, or delete this one first"
            )
        return False
    try:
        if out.is_dir() and any(out.iterdir()):
            raise UserError(f"out={out}: is not empty and holds no corpus of ours; choose another directory")
        write_text(out / PREPARATION_FILE, json.dumps({"options": options}))
    except OSError as error:
        raise UserError(f"out={out}: can't be written ({error.strerror}); choose a directory you may write") from error
    return False


def _field(path: Path, name: str) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"out={path.parent}: {path.name} can't be read ({error}); delete the directory") from error
