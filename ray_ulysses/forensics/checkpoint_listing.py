"""Lists every checkpoint folder of a run with its content, its condition, and the retention rules that keep it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic_core import from_json

from ray_ulysses.checkpoint.choice import Damage, examine, for_each_step, read_committed
from ray_ulysses.checkpoint.fence import Lineage, read_lineage
from ray_ulysses.checkpoint.manifest import Manifest, ManifestError, read_manifest
from ray_ulysses.checkpoint.retention import Committed, keep_reasons
from ray_ulysses.checkpoint.state import StateDescription
from ray_ulysses.forensics.checkpoint_report import (
    CheckpointCondition,
    CheckpointListing,
    CheckpointReport,
    SetAside,
)
from ray_ulysses.forensics.run_storage import RunStorage, open_run_storage
from ray_ulysses.run.checkpoint_store import keep_rules, storage_answers
from ray_ulysses.run.start_point import Start, commits_that_count, decide_start
from ray_ulysses.run_names import (
    CHECKPOINT_FOLDER,
    CHECKPOINT_KEY,
    MANIFEST_FILE,
    NOTE_NAME,
    SHARD_NAME,
    manifest_key,
    step_folder,
)
from ray_ulysses.storage import Store, current_owner
from ray_ulysses.storage.place import Place
from ray_ulysses.storage.store import read_bytes
from ray_ulysses.tracking.events import CheckpointCommitted, CheckpointSetAside
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.tracking.steps import Entry


@dataclass(frozen=True, kw_only=True, slots=True)
class _Folder:
    """The content of a checkpoint folder."""

    step: int
    files: Mapping[str, int | None]
    """Size of each file in bytes, by its key relative to the folder; None if the storage does not report it."""
    notes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """The notes about checkpoints that were set aside, by the attempt that wrote them."""
    found: Manifest | Damage | None = None
    """The manifest if the checkpoint is part of the run and its sizes are right, else the damage; None if it was never
    committed."""
    manifest: Manifest | None = None
    """The manifest without tensors and shards, if it can be read."""
    named: frozenset[str] = frozenset()


def list_checkpoints(
    run_dir: Place, events: Sequence[Entry] | None = None, *, trust_run: bool = False
) -> CheckpointListing:
    """Return every checkpoint folder of a run; changes nothing, and reads no shard.

    Args:
        run_dir: The run's directory; its configuration may name another store.
        events: Its journal, if it has been read already.
        trust_run: As of `open_run_storage`.

    Raises:
        UserError: The configuration names a store that can't be opened.
        RunError: The store can't be listed.
    """
    storage = open_run_storage(run_dir, trust_run=trust_run)
    with storage_answers(storage.location):
        lineage = read_lineage(storage.store)
        folders = _read_folders(storage.store, lineage)
    events = read_entries(run_dir) if events is None else events
    writing = lineage.newest_attempt if current_owner(run_dir) is not None else None
    reports = [_report(folder, events, writing) for folder in folders]
    start = _start(reports, commits_that_count(events, lineage), storage.location)
    return CheckpointListing(
        name=run_dir.absolute().name,
        location=storage.location,
        checkpoints=tuple(_with_reasons(reports, storage, lineage)),
        resumes_from=start.resumes_from,
        unless=start.unless,
        refusal=start.refusal,
    )


def _start(reports: Sequence[CheckpointReport], committed: Sequence[int], location: str) -> Start:
    """Return where the next attempt starts, judged by the files' sizes."""
    whole = max((report.step for report in reports if report.condition == "whole"), default=None)
    passed = [
        Damage(step=report.step, reason=report.why or "", kind=report.condition)
        for report in reversed(reports)
        if report.condition in ("damaged", "unreadable", "foreign") and (whole is None or report.step > whole)
    ]
    return decide_start([] if whole is None else [whole], passed, committed, location)


def _read_folders(store: Store, lineage: Lineage) -> list[_Folder]:
    """Return the content of each folder, by step; a few are read at a time."""
    files: dict[int, dict[str, int | None]] = {}
    for key, size in store.sizes(CHECKPOINT_FOLDER).items():
        match = CHECKPOINT_KEY.match(key)
        if match:
            files.setdefault(int(match[1]), {})[match[2]] = size
    return for_each_step(sorted(files), lambda step: _read_folder(store, step, files[step], lineage))


def _read_folder(store: Store, step: int, files: dict[str, int | None], lineage: Lineage) -> _Folder:
    """Return the content of a folder that has these files."""
    matches = ((name, NOTE_NAME.match(name)) for name in files)
    notes = {int(match[1]): _read_note(store, f"{step_folder(step)}/{name}") for name, match in matches if match}
    if MANIFEST_FILE not in files:
        return _Folder(step=step, files=files, notes=notes)
    found = read_committed(store, step)
    if isinstance(found, Manifest) and not _is_sound(found, files, lineage):
        found = examine(store, step, "sizes")
    if isinstance(found, Damage) and _is_gone(store, manifest_key(step)):
        # Retention deletes the manifest first: files that are missing from then on are no damage.
        del files[MANIFEST_FILE]
        return _Folder(step=step, files=files, notes=notes)
    manifest = found if isinstance(found, Manifest) else _readable(store, step)
    if manifest is None:
        return _Folder(step=step, files=files, notes=notes, found=found)
    named = frozenset(shard.file for shard in manifest.shards)
    # A manifest of a large world takes tens of megabytes, most of which the report does not need.
    facts = replace(manifest, state=StateDescription(tensors={}), shards=())
    found = found if isinstance(found, Damage) else facts
    return _Folder(step=step, files=files, notes=notes, found=found, manifest=facts, named=named)


def _is_sound(manifest: Manifest, files: Mapping[str, int | None], lineage: Lineage) -> bool:
    """Return whether a checkpoint is part of the run and its shards have their sizes."""
    return lineage.holds(manifest.step, manifest.attempt) and all(
        files.get(shard.file) == shard.num_bytes for shard in manifest.shards
    )


def _is_gone(store: Store, key: str) -> bool:
    try:
        store.open(key).close()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def _read_note(store: Store, key: str) -> Mapping[str, Any]:
    try:
        note = from_json(read_bytes(store, key))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _readable(store: Store, step: int) -> Manifest | None:
    try:
        return read_manifest(store, step)
    except ManifestError:
        return None


def _report(folder: _Folder, events: Sequence[Entry], writing: int | None) -> CheckpointReport:
    """Return the report on a folder (pure); ``writing`` is the attempt of a live process, if any."""
    condition, why = _condition(folder, writing)
    manifest = folder.manifest
    named = {MANIFEST_FILE, *folder.named} if manifest is not None else set(folder.files)
    notes = tuple(_set_aside(folder.step, attempt, folder.notes[attempt], events) for attempt in sorted(folder.notes))
    report = CheckpointReport(
        step=folder.step,
        path=step_folder(folder.step),
        committed=MANIFEST_FILE in folder.files,
        condition=condition,
        why=why,
        num_bytes=sum(size or 0 for name, size in folder.files.items() if name in named),
        leftover_bytes=sum(size or 0 for name, size in folder.files.items() if name not in named),
        set_aside=notes,
        is_swept=condition in ("set_aside", "not_committed") and bool(_attempts(folder.files)),
    )
    if manifest is None:
        manifest = _manifest_of(folder)
    if manifest is None:
        return _with_names(report, folder.files)
    meta = manifest.meta
    return replace(
        report,
        attempt=manifest.attempt,
        world_size=manifest.world_size,
        sp_size=meta.sp_size,
        ring_size=meta.ring_size,
        dp_size=manifest.world_size // meta.sp_size,
        zero_stage=meta.zero_stage,
        written_at=meta.written_at or _time(events, CheckpointCommitted, folder.step, manifest.attempt),
        reason=meta.reason,
        metrics=dict(meta.metrics),
        stage=meta.stage,
        measured=meta.measured,
        plan_id=str(meta.cursor.get("plan_id", "")),
    )


def _condition(folder: _Folder, writing: int | None) -> tuple[CheckpointCondition, str | None]:
    if isinstance(folder.found, Damage):
        return folder.found.kind, folder.found.reason
    if folder.found is not None:
        return "whole", None
    attempts = _attempts(folder.files)
    if writing is not None and writing in attempts:
        return "being_written", f"attempt {writing} has not committed it yet"
    if folder.notes:
        return "set_aside", str(folder.notes[max(folder.notes)].get("reason", "its note can't be read"))
    if not attempts:
        return "not_committed", "no attempt wrote anything in it; move it out of the run's checkpoints"
    who = ", ".join(str(attempt) for attempt in sorted(attempts))
    return "not_committed", f"left by attempt {who}, which ended before the commit; a later commit deletes it"


def _attempts(names: Iterable[str]) -> set[int]:
    matches = (SHARD_NAME.match(name) for name in names)
    return {int(match[1]) for match in matches if match}


def _manifest_of(folder: _Folder) -> Manifest | None:
    """Return the manifest of a checkpoint that was set aside, from its newest note."""
    if not folder.notes:
        return None
    text = folder.notes[max(folder.notes)].get("manifest")
    try:
        return Manifest.from_bytes(text.encode()) if isinstance(text, str) else None
    except ManifestError:
        return None


def _with_names(report: CheckpointReport, names: Iterable[str]) -> CheckpointReport:
    """Add attempt and world size from the names of the shards, if there is no manifest."""
    attempts = sorted(_attempts(names))
    if not attempts:
        return report
    matches = (SHARD_NAME.match(name) for name in names)
    sizes = {int(match[2]) for match in matches if match and match[2] and int(match[1]) == attempts[-1]}
    return replace(report, attempt=attempts[-1], world_size=max(sizes, default=None))


def _set_aside(step: int, attempt: int, note: Mapping[str, Any], events: Sequence[Entry]) -> SetAside:
    reason = str(note.get("reason", "its note can't be read"))
    return SetAside(attempt=attempt, reason=reason, at=_time(events, CheckpointSetAside, step, attempt))


def _time(
    events: Sequence[Entry], kind: type[CheckpointCommitted | CheckpointSetAside], step: int, attempt: int
) -> float | None:
    """Return the time of an event of a step in the journal; None without one."""
    times = (
        event.time for event in events if isinstance(event, kind) and event.step == step and event.attempt == attempt
    )
    return max(times, default=None)


def _with_reasons(reports: Sequence[CheckpointReport], storage: RunStorage, lineage: Lineage) -> list[CheckpointReport]:
    """Add the retention rules that keep each checkpoint, if there is a configuration."""
    if storage.config is None:
        return list(reports)
    rules = keep_rules(storage.config)
    committed = {
        report.step: Committed(
            attempt=report.attempt,
            metrics=report.metrics,
            stage=report.stage,
            measured=report.measured,
        )
        for report in reports
        if report.committed and (report.attempt is None or lineage.holds(report.step, report.attempt))
    }
    if not committed:
        return list(reports)
    reasons = keep_reasons(committed, newest=max(committed), rules=rules)
    # Retention keeps what it can't read, since a rule may need it. Without a manifest the layout is unknown.
    unread = {report.step for report in reports if report.committed and report.dp_size is None}
    return [
        replace(report, kept=reasons.get(report.step, ("unread manifest",) if report.step in unread else ()))
        for report in reports
    ]
