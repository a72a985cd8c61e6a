"""Names of all files in a run's directory and of all keys in the store of its checkpoints.

=====================================================  ==============================================================
in the run's directory                                 holds
=====================================================  ==============================================================
``config.yaml``                                        the configuration, resolved
``plan.txt``, ``plan-facts.json``, ``README.md``       description of the run for people and for reports
``plan/``                                              the data plan; see `data.plan.plan_files`
``journal/attempt-0003.jsonl``                         the journal of the third attempt
``journal/attempt-0003.controller.jsonl``              records that another process adds to it
``journal/attempt-0003.jsonl/00000007.jsonl``          in an object store: a segment of that file
``tracking.json``                                      the MLflow run
``trackers/mlflow.json``                               how much of the journal MLflow has received
``resumed-from.json``                                  the checkpoint of another run that it started from
``identity``                                           random id of the directory, which moves with it
``session``, ``probe-ID/``, ``refused/SESSION``        messages between a command and its workers
``stop-request``, ``save-request``,                    requests; see `run.requests`
``preemption-notice``, ``excluded-nodes``
``export/step-00000200/``                              exported models
``evaluation/step-00000200/``                          results of evaluations
``diagnostics/attempt-0003/profile/``                  traces of steps; ``memory/`` and ``flight-recorder/`` beside it
=====================================================  ==============================================================

=====================================================  ==============================================================
in the store of its checkpoints                        holds
=====================================================  ==============================================================
``owner.json``                                         the run directory that they belong to, if stored elsewhere
``attempts/0003.claimed``                              marks the third attempt's number as taken
``attempts/0003.from-00000200``                        records that the third attempt started from step 200
``checkpoints/step-00000200/manifest.json``            commits the checkpoint
``checkpoints/step-00000200/attempt-0003/``            its shards, such as ``rank-00000-of-00008.safetensors``
``checkpoints/step-00000200/set-aside-0004.json``      records that the fourth attempt found it damaged
=====================================================  ==============================================================

Files of claims and locks are private to `storage`.
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
ORIGIN_FILE = "resumed-from.json"
IDENTITY_FILE = "identity"
SESSION_FILE = "session"
PROBE_FOLDER = "probe"
"""Prefix of one folder per attempt, ``probe-<id>``; after a crash it stays until the next command."""
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
"""A file in the journal's folder."""
JOURNAL_SEGMENT = re.compile(
    rf"^{JOURNAL_FOLDER}/(?P<file>[^/]+\.jsonl)(?:/(?P<first>\d{{8,}})(?:-(?P<last>\d{{8,}}))?\.jsonl)?$"
)
"""A segment of a journal file in an object store; or a whole file, of a run that was copied there."""
ATTEMPT_KEY = re.compile(rf"^{ATTEMPT_FOLDER}/(?P<attempt>\d{{4,}})\.(?:claimed|from-(?P<step>\d{{8,}}))$")
"""A key that records an attempt in the store of the checkpoints."""
CHECKPOINT_KEY = re.compile(rf"^{_STEP}/(?P<name>.+)$")
"""A file of a checkpoint, by its name in the step's folder."""
SHARD_KEY = re.compile(rf"^(?P<folder>{_STEP}/{_ATTEMPT})/(?:rank-\d+-of-\d+(?:-try-\d+)?\.safetensors)?$")
"""A shard, in an attempt's folder of a step; or that folder itself."""
PROBE_NAME = re.compile(rf"^{PROBE_FOLDER}-[0-9a-f]{{32}}$")
"""The folder of an attempt's probe."""
SHARD_NAME = re.compile(rf"^{_ATTEMPT}/(?:rank-\d+-of-(?P<world_size>\d+))?")
"""A shard, by its name in the step's folder."""
NOTE_NAME = re.compile(r"^set-aside-(?P<attempt>\d{4,})\.json$")
"""The note, in the step's folder, of an attempt that set the checkpoint aside."""
STEP_LOCATION = re.compile(rf"^(?P<run>.+)/{_STEP}/?(?P<options>\?.*)?$")
"""The path or URI of a checkpoint, as MLflow shows it."""


def journal_file_name(attempt: int, writer: str | None = None) -> str:
    """Return the name of an attempt's main journal file, or of another writer's file beside it."""
    name = f"attempt-{attempt:04d}{'' if writer is None else f'.{writer}'}.jsonl"
    assert JOURNAL_FILE_NAME.match(name), f"{writer!r} is not a name for a journal file"
    return name


def segment_key(file: str, number: int) -> str:
    """Return the key of a segment of a journal file in an object store."""
    return f"{JOURNAL_FOLDER}/{file}/{number:08d}.jsonl"


def merged_segment_key(file: str, first: int, last: int) -> str:
    """Return the key of the segment that replaces several."""
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
    """Return the key of the note of an attempt that sets a step's checkpoint aside."""
    return f"{step_folder(step)}/set-aside-{attempt:04d}.json"


def attempt_folder(attempt: int) -> str:
    """Return the folder of an attempt's shards, relative to the step's folder."""
    return f"attempt-{attempt:04d}"


def shard_file(attempt: int, rank: int, world_size: int, retry: int = 0) -> str:
    """Return a shard's key relative to its step's folder, unique per attempt and per try of it."""
    again = f"-try-{retry:02d}" if retry else ""
    return f"{attempt_folder(attempt)}/rank-{rank:05d}-of-{world_size:05d}{again}.safetensors"


def profile_key(attempt: int, step: int, rank: int) -> str:
    """Return the key of the trace of a step on a rank."""
    return f"{DIAGNOSTICS_FOLDER}/{attempt_folder(attempt)}/profile/step-{step:08d}-rank-{rank:05d}.json.gz"


def memory_snapshot_key(attempt: int, step: int, rank: int) -> str:
    """Return the key of the state of a GPU's memory when a rank ran out of it."""
    return f"{DIAGNOSTICS_FOLDER}/{attempt_folder(attempt)}/memory/step-{step:08d}-rank-{rank:05d}.pickle"


def flight_record_key(attempt: int, rank: int) -> str:
    """Return the key of a rank's last collectives before a hang; PyTorch's analyzer requires this form."""
    return f"{DIAGNOSTICS_FOLDER}/{attempt_folder(attempt)}/flight-recorder/rank-{rank}"


def cursor_key(tracker: str) -> str:
    """Return the key of the cursor that records how much of the journal a tracker has received."""
    return f"{CURSOR_FOLDER}/{tracker}.json"
