"""Lists a run's checkpoint folders with their content, condition and retention rules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from pydantic_core import from_json

from ray_ulysses.checkpoint.choice import Damage, examine, for_each_step, read_committed
from ray_ulysses.checkpoint.fence import Lineage, read_lineage
from ray_ulysses.checkpoint.manifest import Manifest, ManifestError, read_manifest
from ray_ulysses.checkpoint.retention import Committed, keep_reasons
from ray_ulysses.inspect.run_data import RunStorage, open_run_storage
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
from ray_ulysses.tracking.events import CheckpointCommitted, CheckpointSetAside
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.tracking.steps import Entry

CheckpointCondition = Literal[
    "whole", "damaged", "unreadable", "superseded", "foreign", "set_aside", "being_written", "not_committed"
]
"""``whole`` and ``damaged`` are based on file sizes. ``unreadable``: can't be read now; ``superseded``: committed by
an old attempt after a newer attempt had resumed from an earlier step; ``foreign``: written by another version;
``set_aside``: found damaged and set aside. The last two have no manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetAside:
    """A damaged checkpoint that was set aside."""

    attempt: int
    reason: str
    at: float | None
    """Time of the event, in seconds since the epoch; None if it is not in the journal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReport:
    """Report on a checkpoint folder. Unknown values are None or empty."""

    step: int
    path: str
    committed: bool
    condition: CheckpointCondition
    why: str | None = None
    attempt: int | None = None
    world_size: int | None = None
    sp_size: int | None = None
    ring_size: int | None = None
    dp_size: int | None = None
    zero_stage: int | None = None
    num_bytes: int = 0
    """Size of the manifest and the files listed in it; without a manifest, size of all files."""
    leftover_bytes: int = 0
    """Size of all other files in the folder: notes, and files left by dead attempts."""
    written_at: float | None = None
    """Time at which the training state was copied, in seconds since the epoch."""
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    stage: str = ""
    measured: str = ""
    """Identity of the data that the metrics were measured on; metrics with different identities are not comparable."""
    plan_id: str = ""
    kept: tuple[str, ...] = ()
    """Names of the retention rules that keep the checkpoint."""
    set_aside: tuple[SetAside, ...] = ()
    is_swept: bool = False
    """Whether the next commits delete the shards in this uncommitted folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointListing:
    """All checkpoint folders of a run."""

    name: str
    location: str
    checkpoints: tuple[CheckpointReport, ...]
    resumes_from: int | None
    """Step that the next attempt resumes from, judging by file sizes; None if there is no checkpoint to resume from."""
    unless: tuple[int, ...] = ()
    """Newer steps that currently can't be read. If some are readable again by the next attempt, it uses the newest."""
    refusal: str | None = None
    """Reason why the next attempt would refuse to start, or None if it would start."""

    def to_json(self) -> dict[str, Any]:
        """Return the output of ``inspect RUN --checkpoints --json``."""
        return plain_json(asdict(self))


def plain_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert fields to plain JSON values, with non-finite numbers as strings."""
    found: dict[str, Any] = json.loads(json.dumps(fields), parse_constant=str)
    return found


def list_checkpoints(
    run_dir: Place, events: Sequence[Entry] | None = None, *, trust_run: bool = False
) -> CheckpointListing:
    """List a run's checkpoint folders without reading shards.

    Args:
        run_dir: The run's directory. Its configuration may specify another checkpoint store.
        events: The run's journal, if it has already been read.
        trust_run: See `open_run_storage`.

    Raises:
        UserError: The configured store can't be opened.
        RunError: The store can't be listed.
    """
    storage = open_run_storage(run_dir, trust_run=trust_run)
    store = storage.store
    events = read_entries(run_dir) if events is None else events
    is_held = current_owner(run_dir) is not None
    files: dict[int, dict[str, int | None]] = {}
    with storage_answers(storage.location):
        lineage = read_lineage(store)
        writing = lineage.newest_attempt if is_held else None
        for key, size in store.sizes(CHECKPOINT_FOLDER).items():
            if match := CHECKPOINT_KEY.match(key):
                files.setdefault(int(match[1]), {})[match[2]] = size
        reports = for_each_step(sorted(files), lambda step: _report(store, step, files[step], lineage, events, writing))
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
    """Return where the next attempt would start, judging by file sizes."""
    whole = max((report.step for report in reports if report.condition == "whole"), default=None)
    passed = [
        Damage(step=report.step, reason=report.why or "", kind=report.condition)
        for report in reversed(reports)
        if report.condition in ("damaged", "unreadable", "foreign") and (whole is None or report.step > whole)
    ]
    return decide_start({} if whole is None else {"storage": whole}, passed, committed, location)


def _report(
    store: Store,
    step: int,
    files: dict[str, int | None],
    lineage: Lineage,
    events: Sequence[Entry],
    writing: int | None,
) -> CheckpointReport:
    """Return the report of a folder, given its file sizes. ``writing`` is the attempt of a live process, if any."""

    def time_of(kind: type[CheckpointCommitted | CheckpointSetAside], attempt: int) -> float | None:
        found = (one for one in events if isinstance(one, kind) and (one.step, one.attempt) == (step, attempt))
        return max((event.time for event in found), default=None)

    matches = sorted((int(match[1]), name) for name in files if (match := NOTE_NAME.match(name)))
    notes = {attempt: _read_note(store, f"{step_folder(step)}/{name}") for attempt, name in matches}
    found, why, manifest = _committed(store, step, files, lineage)
    named = {*files}
    if manifest is not None:
        named = {MANIFEST_FILE, *(shard.file for shard in manifest.shards)}
    elif found is None:
        manifest = _noted_manifest(notes)
    shards = [(int(match[1]), match[2]) for name in files if (match := SHARD_NAME.match(name))]
    attempts = {attempt for attempt, _ in shards}
    condition, why = (found, why) if found is not None else _uncommitted(notes, attempts, writing)
    report = CheckpointReport(
        step=step,
        path=step_folder(step),
        committed=found is not None,
        condition=condition,
        why=why,
        num_bytes=sum(size or 0 for name, size in files.items() if name in named),
        leftover_bytes=sum(size or 0 for name, size in files.items() if name not in named),
        set_aside=tuple(
            SetAside(attempt=attempt, reason=_reason(note), at=time_of(CheckpointSetAside, attempt))
            for attempt, note in notes.items()
        ),
        is_swept=condition in ("set_aside", "not_committed") and bool(shards),
    )
    if manifest is None:
        newest = max(attempts, default=None)
        sizes = [int(world_size) for attempt, world_size in shards if world_size and attempt == newest]
        return replace(report, attempt=newest, world_size=max(sizes, default=None))
    meta = manifest.meta
    return replace(
        report,
        attempt=manifest.attempt,
        world_size=manifest.world_size,
        sp_size=meta.sp_size,
        ring_size=meta.ring_size,
        dp_size=manifest.world_size // meta.sp_size,
        zero_stage=meta.zero_stage,
        written_at=meta.written_at or time_of(CheckpointCommitted, manifest.attempt),
        reason=meta.reason,
        metrics=dict(meta.metrics),
        stage=meta.stage,
        measured=meta.measured,
        plan_id=str(meta.cursor.get("plan_id", "")),
    )


def _committed(
    store: Store, step: int, files: dict[str, int | None], lineage: Lineage
) -> tuple[CheckpointCondition | None, str | None, Manifest | None]:
    """Return a checkpoint's condition (None if not committed), the reason, and the manifest if it can be read."""
    if MANIFEST_FILE not in files:
        return None, None, None
    found = read_committed(store, step)
    if isinstance(found, Manifest):
        sizes_differ = any(files.get(shard.file) != shard.num_bytes for shard in found.shards)
        if sizes_differ or not lineage.holds(step, found.attempt):
            found = examine(store, step, "sizes")
    if isinstance(found, Manifest):
        return "whole", None, found
    if _is_gone(store, manifest_key(step)):
        # Retention deletes the manifest first, so files that are missing afterwards are not damage.
        del files[MANIFEST_FILE]
        return None, None, None
    try:
        return found.kind, found.reason, read_manifest(store, step)
    except ManifestError:
        return found.kind, found.reason, None


def _uncommitted(
    notes: Mapping[int, Mapping[str, Any]], attempts: set[int], writing: int | None
) -> tuple[CheckpointCondition, str]:
    """Return a condition and its reason for a folder without a manifest that contains the shards of ``attempts``."""
    if writing in attempts:
        return "being_written", f"attempt {writing} has not committed this checkpoint yet"
    if notes:
        return "set_aside", _reason(notes[max(notes)])
    if not attempts:
        return "not_committed", "no attempt wrote this folder; move it out of the run's checkpoints"
    who = ", ".join(str(attempt) for attempt in sorted(attempts))
    return "not_committed", f"left by attempt {who}, which ended before the commit; a later commit deletes this folder"


def _noted_manifest(notes: Mapping[int, Mapping[str, Any]]) -> Manifest | None:
    """Return the manifest stored in the newest note of a checkpoint that was set aside."""
    text = notes[max(notes)].get("manifest") if notes else None
    try:
        return Manifest.from_bytes(text.encode()) if isinstance(text, str) else None
    except ManifestError:
        return None


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
        note = from_json(store.read_whole(key))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _reason(note: Mapping[str, Any]) -> str:
    return str(note.get("reason", "the note with the reason can't be read"))


def _with_reasons(reports: Sequence[CheckpointReport], storage: RunStorage, lineage: Lineage) -> list[CheckpointReport]:
    """Add the retention rules that keep each checkpoint, if the run's configuration is known."""
    if storage.config is None:
        return list(reports)
    rules = keep_rules(storage.config)
    committed = {
        report.step: Committed(
            attempt=report.attempt, metrics=report.metrics, stage=report.stage, measured=report.measured
        )
        for report in reports
        if report.committed and (report.attempt is None or lineage.holds(report.step, report.attempt))
    }
    if not committed:
        return list(reports)
    reasons = keep_reasons(committed, newest=max(committed), rules=rules)
    # Retention keeps a checkpoint whose manifest can't be read, because a rule may apply to it.
    unread = {report.step for report in reports if report.committed and report.dp_size is None}
    return [
        replace(report, kept=reasons.get(report.step, ("unread manifest",) if report.step in unread else ()))
        for report in reports
    ]
