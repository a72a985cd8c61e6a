"""Names of all files in a run's directory and of all keys in its checkpoint store.

=====================================================  ==============================================================
in the run's directory                                 content
=====================================================  ==============================================================
``config.yaml``                                        the resolved configuration
``plan.txt``, ``plan-facts.json``, ``README.md``       description of the run for people and for reports
``plan/``                                              the data plan; see `data.plan.plan_files`
``journal/attempt-0003.jsonl``                         the third attempt's journal
``journal/attempt-0003.controller.jsonl``              the third attempt's journal records from another process
``journal/attempt-0003.jsonl/00000007.jsonl``          in an object store: a segment of the journal file
``tracking.json``                                      the MLflow run
``trackers/mlflow.json``                               position up to which MLflow has received the journal
``masking.json``                                       how tokens are masked, for a masked language model
``reference-model``                                    digest of the reference model of a preference loss
``resumed-from.json``                                  the other run's checkpoint from which the run started
``identity``                                           random ID of the directory, which survives a move
``session``, ``probe-ID/``, ``refused/SESSION``        messages between a command and its workers
``stop-request``, ``save-request``,                    requests; see `run.requests`
``preemption-notice``, ``excluded-nodes``
``export/step-00000200/``                              exported models
``evaluation/step-00000200/``                          results of evaluations
``diagnostics/attempt-0003/profile/``                  step traces; siblings: ``memory/`` and ``flight-recorder/``
=====================================================  ==============================================================

=====================================================  ==============================================================
in the checkpoint store                                content
=====================================================  ==============================================================
``owner.json``                                         the run directory, if the store is outside of it
``attempts/0003.claimed``                              marks the third attempt's number as taken
``attempts/0003.from-00000200``                        records that the third attempt started from step 200
``checkpoints/step-00000200/manifest.json``            commits the checkpoint
``checkpoints/step-00000200/attempt-0003/``            the shards, such as ``rank-00000-of-00008.safetensors``
``checkpoints/step-00000200/set-aside-0004.json``      records that the fourth attempt found it damaged
=====================================================  ==============================================================

Names of claim and lock files are private to `storage`.
"""

from __future__ import annotations

import re

CONFIG_FILE = "config.yaml"
PLAN_TEXT_FILE = "plan.txt"
PLAN_FACTS_FILE = "plan-facts.json"
README_FILE = "README.md"
REPORT_FILE = "report.html"
PLAN_FOLDER = "plan"
JOURNAL_FOLDER = "journal"
TRACKING_FILE = "tracking.json"
CURSOR_FOLDER = "trackers"
TENSORBOARD_FOLDER = "tensorboard-events"
MASKING_FILE = "masking.json"
REFERENCE_FILE = "reference-model"
ORIGIN_FILE = "resumed-from.json"
IDENTITY_FILE = "identity"
SESSION_FILE = "session"
PROBE_FOLDER = "probe"
"""Prefix of each attempt's probe folder, ``probe-<id>``. After a crash, the folder remains until the next command."""
REFUSAL_FOLDER = "refused"
STOP_FILE = "stop-request"
SAVE_FILE = "save-request"
NOTICE_FILE = "preemption-notice"
EXCLUDED_FILE = "excluded-nodes"
EXPORT_FOLDER = "export"
EVALUATION_FOLDER = "evaluation"
DIAGNOSTICS_FOLDER = "diagnostics"

OWNER_FILE = "owner.json"
ATTEMPT_FOLDER = "attempts"
CHECKPOINT_FOLDER = "checkpoints"
MANIFEST_FILE = "manifest.json"

_STEP = rf"{CHECKPOINT_FOLDER}/step-(?P<step>\d{{8,}})"
_ATTEMPT = r"attempt-(?P<attempt>\d{4,})"

JOURNAL_FILE_NAME = re.compile(rf"^{_ATTEMPT}(?:\.(?P<writer>[A-Za-z0-9_-]+))?\.jsonl$")
"""Name of a file in the journal folder."""
JOURNAL_SEGMENT = re.compile(
    rf"^{JOURNAL_FOLDER}/(?P<file>[^/]+\.jsonl)(?:/(?P<first>\d{{8,}})(?:-(?P<last>\d{{8,}}))?\.jsonl)?$"
)
"""Key of a journal segment in an object store, or of a complete journal file if a run was copied there."""
ATTEMPT_KEY = re.compile(rf"^{ATTEMPT_FOLDER}/(?P<attempt>\d{{4,}})\.(?:claimed|from-(?P<step>\d{{8,}}))$")
"""Key in the checkpoint store that records an attempt's claim or start."""
CHECKPOINT_KEY = re.compile(rf"^{_STEP}/(?P<name>.+)$")
"""Key of a file in a step's folder; ``name`` is relative to this folder."""
SHARD_KEY = re.compile(rf"^(?P<folder>{_STEP}/{_ATTEMPT})/(?:rank-\d+-of-\d+(?:-try-\d+)?\.safetensors)?$")
"""Key of a shard, or of an attempt's shard folder with a trailing slash."""
PROBE_NAME = re.compile(rf"^{PROBE_FOLDER}-[0-9a-f]{{32}}$")
"""Name of an attempt's probe folder."""
SHARD_NAME = re.compile(rf"^{_ATTEMPT}/(?:rank-\d+-of-(?P<world_size>\d+))?")
"""Name of a shard, relative to the step's folder."""
NOTE_NAME = re.compile(r"^set-aside-(?P<attempt>\d{4,})\.json$")
"""Name of the note about a checkpoint that an attempt set aside, relative to the step's folder."""
STEP_LOCATION = re.compile(rf"^(?P<run>.+)/{_STEP}/?(?P<options>\?.*)?$")
"""Path or URI of a checkpoint, in the form that MLflow displays."""


def journal_file_name(attempt: int, writer: str | None = None) -> str:
    """Return the name of an attempt's journal file; `writer` is None for the main process."""
    name = f"attempt-{attempt:04d}{'' if writer is None else f'.{writer}'}.jsonl"
    assert JOURNAL_FILE_NAME.match(name), f"{writer!r} is not a name for a journal file"
    return name


def segment_key(file: str, number: int) -> str:
    """Return the key of a segment of a journal file in an object store."""
    return f"{JOURNAL_FOLDER}/{file}/{number:08d}.jsonl"


def merged_segment_key(file: str, first: int, last: int) -> str:
    """Return the key of the segment that replaces segments `first` to `last`."""
    return f"{JOURNAL_FOLDER}/{file}/{first:08d}-{last:08d}.jsonl"


def claim_key(attempt: int) -> str:
    """Return the key that marks an attempt's number as taken."""
    return f"{ATTEMPT_FOLDER}/{attempt:04d}.claimed"


def start_key(attempt: int, step: int) -> str:
    """Return the key that records the step from which an attempt started."""
    return f"{ATTEMPT_FOLDER}/{attempt:04d}.from-{step:08d}"


def step_folder(step: int) -> str:
    """Return the key of a step's folder."""
    return f"{CHECKPOINT_FOLDER}/step-{step:08d}"


def manifest_key(step: int) -> str:
    """Return the key of a step's manifest."""
    return f"{step_folder(step)}/{MANIFEST_FILE}"


def note_key(step: int, attempt: int) -> str:
    """Return the key of the note with which `attempt` sets aside the checkpoint of `step`."""
    return f"{step_folder(step)}/set-aside-{attempt:04d}.json"


def attempt_folder(attempt: int) -> str:
    """Return an attempt's shard folder, relative to the step's folder."""
    return f"attempt-{attempt:04d}"


def shard_file(attempt: int, rank: int, world_size: int, retry: int = 0) -> str:
    """Return a shard's key relative to its step's folder, unique per attempt and per try of the save."""
    again = f"-try-{retry:02d}" if retry else ""
    return f"{attempt_folder(attempt)}/rank-{rank:05d}-of-{world_size:05d}{again}.safetensors"


def profile_key(attempt: int, step: int, rank: int) -> str:
    """Return the key of a profiler trace of one step on one rank."""
    return f"{DIAGNOSTICS_FOLDER}/{attempt_folder(attempt)}/profile/step-{step:08d}-rank-{rank:05d}.json.gz"


def memory_snapshot_key(attempt: int, step: int, rank: int) -> str:
    """Return the key of the memory snapshot that a rank stores when its GPU runs out of memory."""
    return f"{DIAGNOSTICS_FOLDER}/{attempt_folder(attempt)}/memory/step-{step:08d}-rank-{rank:05d}.pickle"


def flight_record_key(attempt: int, rank: int) -> str:
    """Return the key of a rank's flight record after a hang. PyTorch's analyzer requires this file name."""
    return f"{DIAGNOSTICS_FOLDER}/{attempt_folder(attempt)}/flight-recorder/rank-{rank}"


def cursor_key(tracker: str) -> str:
    """Return the key of the cursor that records a tracker's position in the journal."""
    return f"{CURSOR_FOLDER}/{tracker}.json"
