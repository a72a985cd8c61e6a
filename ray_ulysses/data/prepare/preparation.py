"""Prepares a corpus: lists the units of work, resumes an interrupted preparation, and commits the corpus.

The units may be processed anywhere, for example in Ray tasks (``ray_ulysses.cluster.prepare_job``).
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.format import CORPUS_FILE, PREPARATION_FILE, SHARDS_DIRECTORY
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.prepare.merge import Duplicates, merge, remove_working_files, working_files
from ray_ulysses.data.prepare.unit_writer import UnitResult, finished_unit, other_tokenizer, unit_signature
from ray_ulysses.data.sources.extraction import RawDocument, read_unit, refuse_missing_fields
from ray_ulysses.data.sources.files import path_text
from ray_ulysses.data.sources.rows import Rejected, RowError, TokenRow
from ray_ulysses.data.sources.token_files import stored_tokenizer, stored_type
from ray_ulysses.data.sources.units import DEFAULT_UNIT_BYTES, TOKENIZED, SourceSpec, Unit, list_units
from ray_ulysses.data.tokenize.encoding import DocumentEncoder, OutsideVocabularyError, load_encoder
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.data.tokenize.tokenizers import BYTES, TokenizerInfo
from ray_ulysses.errors import UserError
from ray_ulysses.storage.atomic import TEMPORARY_PREFIX, make_folders, write_text
from ray_ulysses.storage.hub import is_id
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.location import expand_home
from ray_ulysses.storage.lock import LockOwner, NoLocksError, lock_file, read_owner, write_note
from ray_ulysses.storage.regular import close_quietly, read_regular
from ray_ulysses.storage.retry import RETRY, RetryPolicy, is_transient
from ray_ulysses.validation import parse_json

LOCK_FILE = ".prepare.lock"
_FIRST_DOCUMENTS = 1000
# Texts without an end token often end with one of these, and rarely all with the same other token.
_FEWEST_ENDS, _TEXT_ENDS = 16, ("", ".", ")", "}", ">", ";", "。")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareRequest:
    """Options of ``prepare``."""

    sources: SourceSpec
    out: Path
    """Output directory of the corpus."""
    tokenizer: str = "bytes"
    """``bytes``, or the directory or hub id of a Hugging Face tokenizer."""
    encoding: EncodingOptions = field(default_factory=EncodingOptions)
    duplicates: Duplicates = "quarantine"
    """Whether to ``quarantine`` (exclude) or ``keep`` documents with the same content as an earlier document."""
    without: tuple[str, ...] = ()
    """Other corpora of the same run; documents that occur in them are excluded."""
    unit_bytes: int = DEFAULT_UNIT_BYTES
    """Input bytes per unit, roughly the size of a shard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """A preparation with its units of work."""

    request: PrepareRequest
    """Options, with absolute paths."""
    encoder: DocumentEncoder = field(repr=False)
    units: tuple[Unit, ...]
    rejected: tuple[Rejected, ...]
    """Files that were excluded without being read."""
    options: str
    """Hash of the options."""
    signature: str
    """Hash of the options and the units."""
    done: tuple[UnitResult, ...] = ()
    """Results of the units that earlier commands finished."""
    is_complete: bool = False
    """Whether the corpus already exists."""

    @property
    def pending(self) -> tuple[Unit, ...]:
        """Units that are not finished yet."""
        finished = {result.index for result in self.done}
        return tuple(unit for unit in self.units if unit.index not in finished)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareProgress:
    """Progress of a preparation."""

    units_done: int
    """Number of finished units, including units that earlier commands finished."""
    num_units: int
    documents: int
    """Number of documents stored so far."""
    tokens: int
    rejected: int
    """Number of documents excluded so far. Duplicates are found only at the end."""
    bytes_done: int
    """Number of input bytes in the finished units."""
    num_bytes: int
    """Number of input bytes in all units: stored bytes of files read as one unit, uncompressed bytes of other files."""


ProgressCallback = Callable[[PrepareProgress], None]


def listed(request: PrepareRequest, retry: RetryPolicy = RETRY) -> Preparation:
    """Check a request and list its units, without writing anything.

    Raises:
        UserError: A source, an option or the tokenizer can't be used, or the sources are empty.
        RunError: The storage did not respond in time.
    """
    return retry.call_or_fail("the sources", lambda: _listed(request))


@contextmanager
def claimed(found: Preparation, retry: RetryPolicy = RETRY, *, is_scratch: bool = False) -> Iterator[Preparation]:
    """Lock the output directory of a preparation until the ``with`` block ends.

    Existing files are never overwritten, with one exception: if ``is_scratch``, another preparation in the directory is
    deleted. A preparation that fails before writing a shard leaves no files behind.

    Raises:
        UserError: The directory contains another corpus, another unfinished preparation or other files, or another
            process is preparing a corpus there.
        RunError: The storage did not respond in time.
    """
    out = found.request.out
    if is_scratch and retry.call_or_fail(out, lambda: _holds_other(found)):
        with directory_lock(out, retry=retry):
            _clear(out)
    if retry.call_or_fail(out, lambda: _is_complete(found)):
        _remove_leftovers(out, retry)
        yield replace(found, is_complete=True)
        return
    made = retry.call_or_fail(out, lambda: [folder for folder in (out, *out.parents) if not folder.exists()])
    try:
        with directory_lock(out, retry=retry):
            # Checked again, since the previous owner of the lock may have finished the corpus.
            if retry.call_or_fail(out, lambda: _is_complete(found)):
                yield replace(found, is_complete=True)
                return
            retry.call_or_fail(out, lambda: _claim(found))
            try:
                yield replace(found, done=retry.call_or_fail(out, lambda: _finished_units(found)))
            except BaseException as error:
                with suppress(OSError):
                    # A UserError is raised once all tasks have ended; after other errors, tasks may still be running.
                    if not (_has_output(out) if isinstance(error, UserError) else (out / SHARDS_DIRECTORY).exists()):
                        _clear(out)
                raise
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


def finish(preparation: Preparation, results: tuple[UnitResult, ...], retry: RetryPolicy = RETRY) -> Corpus:
    """Merge the units' notes and commit the corpus by writing ``corpus.json``.

    ``preparation`` must come from ``claimed``; ``results`` has one result per unit, in any order.

    Raises:
        UserError: No document is left, or a JSONL file contains no JSON object.
        RunError: The corpus can't be written. ``StorageAwayError`` if the storage did not respond in time.
    """
    ordered = tuple(sorted(results, key=lambda result: result.index))
    assert [r.index for r in ordered] == [u.index for u in preparation.units], "every unit must have one result"
    request, encoder = preparation.request, preparation.encoder
    others = _other_corpora(request, encoder.tokenizer.info, retry)
    merge_units = functools.partial(
        merge,
        request.out,
        ordered,
        encoder=encoder,
        rejected=preparation.rejected,
        duplicates=request.duplicates,
        signature=preparation.signature,
        others=others,
        retry=retry,
    )
    info = retry.call_or_fail(request.out, merge_units)
    # The corpus is committed. Files that can't be removed now are removed by the next preparation.
    with suppress(OSError):
        remove_working_files(request.out, info)
    return Corpus.open(request.out, retry=retry)


def progress_of(preparation: Preparation, results: Sequence[UnitResult]) -> PrepareProgress:
    """Return the progress of a preparation, given all unit results so far, including results of earlier commands."""
    finished = {result.index for result in results}
    return PrepareProgress(
        units_done=len(results),
        num_units=len(preparation.units),
        documents=sum(result.num_documents for result in results),
        tokens=sum(result.num_tokens for result in results),
        rejected=len(preparation.rejected) + sum(result.num_rejected for result in results),
        bytes_done=sum(unit.num_bytes for unit in preparation.units if unit.index in finished),
        num_bytes=sum(unit.num_bytes for unit in preparation.units),
    )


def _listed(request: PrepareRequest) -> Preparation:
    request = _with_absolute_paths(request)
    for name, path in (("--out", str(request.out)), ("--tokenizer", request.tokenizer)):
        if path_text(path) != path:
            raise UserError(f"{name}={path_text(path)}: the path is not UTF-8, so a corpus can't store it; rename it")
    fields = request.sources.fields
    fields.check(request.sources.kind)
    encoder = load_encoder(request.tokenizer, request.encoding)
    if fields.kind == "messages":
        # Refuse a missing chat template immediately instead of in the first task.
        _ = encoder.chat
    elif request.encoding.chat_settings and fields.kind != "pair":
        option = f"--{request.encoding.chat_settings[0].replace('_', '-')}"
        raise UserError(f"{option}: applies to chats only; omit the option, or set --messages-field")
    units, rejected = list_units(request.sources, request.unit_bytes, request.out)
    if not units:
        paths = ", ".join(map(path_text, request.sources.paths))
        if rejected:
            raise UserError(
                f"source={paths}: all {len(rejected)} files were left out (the first: {rejected[0].source}, "
                f"{rejected[0].reason}); nothing was written"
            )
        raise UserError(
            f"source={paths}: no file matches --pattern={request.sources.pattern!r} "
            f"(--kind={request.sources.kind}), or none of the matching files has rows; nothing was written"
        )
    for unit in units:
        if fields.kind in ("pair", "query") and unit.kind in TOKENIZED:
            first = f"--chosen-field={fields.chosen}" if fields.chosen else f"--query-field={fields.query}"
            raise UserError(
                f"{first}: {path_text(unit.files[0].path)} contains tokens of another tool, not "
                "pairs; exclude the file (--exclude)"
            )
        if fields.label is not None and unit.kind in ("megatron", "datatrove"):
            raise UserError(
                f"--label-field={fields.label}: {path_text(unit.files[0].path)} contains tokens without fields; "
                "exclude the file (--exclude)"
            )
    refuse_missing_fields(units)
    _refuse_other_tokenizer(units, encoder)
    others = _other_corpora(request, encoder.tokenizer.info)
    options = _options_signature(request, encoder, others)
    signature = stable_hash([options, [unit_signature(unit, encoder) for unit in units]])
    return Preparation(
        request=request, encoder=encoder, units=units, rejected=rejected, options=options, signature=signature
    )


def _refuse_other_tokenizer(units: Sequence[Unit], encoder: DocumentEncoder) -> None:
    """Refuse token files that another tokenizer made, as far as their metadata and the first documents show."""
    info, seen = encoder.tokenizer.info, set()
    for unit in units:
        if unit.kind not in TOKENIZED or unit.first:
            continue
        source, (name, _) = path_text(unit.files[0].path), stored_tokenizer(unit.files)
        # A local folder may be the tokenizer of the same name; another machine's path says nothing.
        if name and is_id(name) and name.lower().split("/")[-1] not in info.name.lower().replace("--", "/").split("/"):
            way = f"the tokenizer {name} made it (a folder with the same tokenizer must have the name of this id)"
            raise other_tokenizer(source, way, encoder)
        dtype = stored_type(unit.files, unit.fields)
        if dtype is not None and (dtype.kind not in "iu" or np.iinfo(dtype).max < info.vocab_size - 1):
            rule = f"stores tokens as {dtype.name}, which can't represent a vocabulary of {info.vocab_size:,} tokens"
            raise other_tokenizer(source, rule, encoder)
        if unit.kind not in seen:
            seen.add(unit.kind)
            _refuse_other_tokens(unit, encoder)


def _refuse_other_tokens(unit: Unit, encoder: DocumentEncoder) -> None:
    ends = []
    for document in itertools.islice(read_unit(unit), _FIRST_DOCUMENTS):
        if isinstance(document, RawDocument) and isinstance(document.content, TokenRow):
            try:
                encoder.encode(document.content)
            except OutsideVocabularyError as error:
                raise other_tokenizer(document.source, f"document {document.offset}: {error}", encoder) from error
            except RowError:
                continue
            ends += [] if document.content.is_window else [int(document.content.tokens[-1])]
    if encoder.eos_token_id is None or len(set(ends)) != 1 or ends[0] == encoder.eos_token_id:
        return
    text, is_special = encoder.tokenizer.decode(np.array(ends[:1])), ends[0] in encoder.tokenizer.special_ids
    if is_special or (len(ends) >= _FEWEST_ENDS and text.strip() not in _TEXT_ENDS):
        raise UserError(
            f"source={path_text(unit.files[0].path)}: its documents end with the token {ends[0]} ({text!r}), but "
            f"documents end with {encoder.eos_token_id} in --tokenizer={encoder.tokenizer.info.name}; set --tokenizer "
            f"to the tokenizer that made the file, --eos={text!r} if the token ends documents, or --eos=none to add no "
            "token"
        )


def _finished_units(preparation: Preparation) -> tuple[UnitResult, ...]:
    found = (finished_unit(preparation.request.out, unit, preparation.encoder) for unit in preparation.units)
    return tuple(result for result in found if result is not None)


def _with_absolute_paths(request: PrepareRequest) -> PrepareRequest:
    """Make existing paths absolute, since the workers' working directory differs; leave hub ids unchanged."""
    return replace(
        request,
        sources=replace(request.sources, paths=tuple(map(_absolute, request.sources.paths))),
        out=expand_home(request.out).absolute(),
        without=tuple(map(_absolute, request.without)),
        tokenizer=_absolute(request.tokenizer) if request.tokenizer != BYTES else BYTES,
    )


def _absolute(path: str) -> str:
    expanded = expand_home(path)
    return str(expanded.absolute()) if expanded.exists() else path


def _other_corpora(request: PrepareRequest, tokenizer: TokenizerInfo, retry: RetryPolicy = RETRY) -> tuple[Corpus, ...]:
    others = []
    for path in request.without:
        try:
            corpus = Corpus.open(path, retry=retry)
        except UserError as error:
            raise UserError(f"--without{str(error).removeprefix('data.path')}") from error
        if corpus.info.tokenizer.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"--without={path}: was prepared with the tokenizer {corpus.info.tokenizer.name} instead of "
                f"{tokenizer.name}; all corpora of a run must have the same tokenizer"
            )
        others.append(corpus)
    return tuple(others)


def _options_signature(request: PrepareRequest, encoder: DocumentEncoder, others: Sequence[Corpus]) -> str:
    return stable_hash(
        {
            **asdict(request.sources),
            "tokenizer": encoder.tokenizer.info.fingerprint,
            "duplicates": request.duplicates,
            "without": [corpus.fingerprint for corpus in others],
            "unit_bytes": request.unit_bytes,
            "encoding": asdict(request.encoding),
        }
    )


def _is_complete(preparation: Preparation) -> bool:
    """Return whether the same corpus already exists; raise UserError if the directory contains anything else."""
    out = preparation.request.out
    if out.exists() and not out.is_dir():
        raise UserError(f"--out={out}: is a file; specify a directory")
    if (out / CORPUS_FILE).is_file():
        if _field(out / CORPUS_FILE, "signature") == preparation.signature:
            return True
        raise UserError(
            f"--out={out}: contains a corpus made from other sources, options or source files, or by another version "
            "of ray-ulysses; nothing was overwritten. Choose another directory, or delete this one first"
        )
    if (out / PREPARATION_FILE).is_file():
        if _field(out / PREPARATION_FILE, "options") != preparation.options and _has_output(out):
            raise UserError(
                f"--out={out}: contains an unfinished preparation with other sources or options; "
                "nothing was overwritten. Choose another directory, or delete this one first"
            )
        return False
    # A preparation that was killed before it claimed the directory leaves only files with these names.
    ours = (LOCK_FILE, TEMPORARY_PREFIX)
    if out.is_dir() and not all(path.name.startswith(ours) for path in out.iterdir()):
        raise UserError(f"--out={out}: is not empty and contains no corpus; choose another directory")
    return False


def _holds_other(preparation: Preparation) -> bool:
    with suppress(UserError):
        _is_complete(preparation)
        return False
    return True


def _remove_leftovers(out: Path, retry: RetryPolicy) -> None:
    """Remove the working files of a preparation that was killed after it committed the corpus.

    Errors are ignored: files that can't be removed, for example in a read-only directory, are harmless.
    """
    info = Corpus.open(out, retry=retry).info
    with suppress(UserError, OSError):
        if working_files(out, info) or (out / LOCK_FILE).exists():
            with directory_lock(out, retry=retry):
                remove_working_files(out, info)


def _claim(preparation: Preparation) -> None:
    path = preparation.request.out / PREPARATION_FILE
    if path.is_file() and _field(path, "options") != preparation.options:
        _clear(path.parent)
    if not path.is_file():
        write_text(path, json.dumps({"options": preparation.options}))


def _has_output(out: Path) -> bool:
    return next((out / SHARDS_DIRECTORY).glob("shard-*"), None) is not None


def _clear(out: Path) -> None:
    for path in (path for path in out.iterdir() if path.name != LOCK_FILE):
        LocalStore(out).delete(path.name)


def _field(path: Path, name: str) -> object:
    text = read_regular(path, path.parent)
    try:
        return parse_json(text).get(name)
    except (ValueError, AttributeError) as error:
        raise UserError(f"--out={path.parent}: {path.name} can't be read ({error}); delete the directory") from error


@contextmanager
def directory_lock(directory: Path, retry: RetryPolicy = RETRY) -> Iterator[None]:
    """Lock a directory for one preparation. The lock file is removed when the lock is released.

    Raises:
        UserError: Another process is preparing a corpus in the directory, or the directory is not writable.
        StorageAwayError: The storage did not respond in time.
    """
    path = directory / LOCK_FILE
    note = LockOwner.this_process(retry.clock).to_note()
    descriptor = retry.call(path, lambda: _take(path, note))
    try:
        yield
    finally:
        # Unlinked while locked: a process that opened the file before finds it unlinked once it has the lock.
        # If unlinking fails, the next preparation locks the same file.
        with suppress(OSError):
            path.unlink()
        # Closing the descriptor releases the lock even if ``close`` reports an error.
        close_quietly(descriptor)


def _take(path: Path, note: bytes) -> int:
    """Acquire the lock, write the owner to the lock file, and return the open file descriptor."""
    try:
        make_folders(path.parent)
        descriptor = lock_file(path)
        try:
            write_note(descriptor, note)
        except OSError:
            close_quietly(descriptor)
            raise
    except BlockingIOError as error:
        owner = read_owner(path) or "another process that has not written its name yet"
        raise UserError(
            f"--out={path.parent}: is already being prepared by {owner}; wait for that process, stop it, "
            "or choose another directory"
        ) from error
    except OSError as error:
        if is_transient(error):
            raise
        if isinstance(error, NoLocksError):
            raise UserError(
                f"--out={path.parent}: the file system does not support locks ({error.strerror}); mount it with lock "
                "support, or choose another directory"
            ) from error
        raise UserError(
            f"--out={path.parent}: can't be written ({error.strerror}); choose a writable directory"
        ) from error
    return descriptor
