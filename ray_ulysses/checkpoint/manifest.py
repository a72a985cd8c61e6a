"""Checkpoint manifests. The manifest is written after all shards, and its creation commits the checkpoint."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, TypeVar

from pydantic import Field

from ray_ulysses.checkpoint.intervals import CoverError
from ray_ulysses.checkpoint.shard_table import ShardRecord, ShardTable
from ray_ulysses.checkpoint.state import StateDescription, TensorSpec
from ray_ulysses.errors import RunError
from ray_ulysses.run_names import attempt_folder, manifest_key, step_folder
from ray_ulysses.storage import Store
from ray_ulysses.validation import (
    ContentError,
    DigestText,
    Free,
    Positive,
    Seconds,
    Text,
    Whole,
    adapter,
    checked,
    shown_text,
    shown_value,
)

SCHEMA_VERSION = 4
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_BEGINNING = re.compile(rb'\{"crc32":(\d{1,10}),')
_HEAD = re.compile(_BEGINNING.pattern + rb'"schema_version":\d+,"step":\d+,"attempt":(\d{1,10}),')
HEAD_BYTES = 128
"""Number of bytes at the start of a manifest that contain its checksum, step and attempt."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")

_Taken = TypeVar("_Taken")


class ManifestError(RunError):
    """A manifest is missing, unreadable or invalid."""


class ForeignManifestError(ManifestError):
    """A valid manifest was written by another version of ray-ulysses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMeta:
    """The training loop's part of a checkpoint, stored in addition to the model's state."""

    sp_size: Positive
    """Number of ranks that shared a row. Checkpoints can be loaded at any `sp_size`, `ring_size` and `zero_stage`."""
    cursor: Free
    """Position in the data as JSON; see `data.plan.plan.Cursor.to_json`."""
    digest: DigestText
    """Sum of the data digests of all completed steps, as 16 hexadecimal digits."""
    tokens: Whole
    """Number of supervised tokens in all completed steps."""
    config_fingerprint: Text = ""
    """Hash of the settings that must not change on resume."""
    versions: Mapping[str, Text] = field(default_factory=dict)
    """Versions of the installed libraries, by name."""
    ring_size: Positive = 1
    zero_stage: Annotated[int, Field(strict=True, ge=0, lt=4)] = 3
    metrics: Mapping[str, Annotated[float, Field(strict=True)]] = field(default_factory=dict)
    """Metrics of the last step, such as ``loss`` and ``eval_loss``, which determine the best checkpoints to retain."""
    reason: Text = ""
    """Trigger of the save: ``steps``, ``minutes``, ``request`` and so on."""
    written_at: Seconds = 0.0
    """Time at which the state was copied, in seconds since the Unix epoch."""
    run: Text = ""
    extra: Free = field(default_factory=dict)
    """Other JSON values that the training loop needs in order to resume."""

    @property
    def stage(self) -> str:
        """Name of the training stage, or an empty string if the run has no stages."""
        return str(self.extra.get("stage", ""))

    @property
    def measured(self) -> str:
        """Identity of the data on which the metrics were measured."""
        return str(self.extra.get("measured", ""))


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRef:
    """Identity of a committed checkpoint."""

    step: Whole
    """Number of completed optimizer steps."""
    attempt: Positive
    """Number of the attempt that saved the checkpoint."""
    world_size: Positive
    """Number of ranks that saved the checkpoint."""

    @property
    def folder(self) -> str:
        """Key of the checkpoint's folder in the run's store."""
        return step_folder(self.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of a manifest file, sufficient to load the checkpoint at any world size."""

    step: int
    attempt: int
    world_size: int
    meta: CheckpointMeta
    state: StateDescription
    shards: ShardTable

    @property
    def ref(self) -> CheckpointRef:
        """Identity of the checkpoint."""
        return CheckpointRef(step=self.step, attempt=self.attempt, world_size=self.world_size)

    def to_bytes(self) -> bytes:
        """Serialize the manifest to JSON that starts with a checksum of the remaining content.

        Raises:
            ManifestError: The training loop or the engine set a field to an invalid value.
        """
        head = {
            "schema_version": SCHEMA_VERSION,
            "step": self.step,
            "attempt": self.attempt,
            "world_size": self.world_size,
            **asdict(self.meta),
            "tensors": {k: {"shape": spec.shape, "dtype": spec.dtype} for k, spec in self.state.tensors.items()},
            "tied": dict(self.state.tied),
            "optimizer": {
                "step": self.state.optimizer_step,
                "groups": [dict(group) for group in self.state.groups],
                "group_of": dict(self.state.group_of),
            },
            "counters": dict(self.state.counters),
            **({"base_fingerprint": self.state.base_fingerprint} if self.state.base_fingerprint else {}),
        }
        # Convert the values to JSON types (tuples to lists), because the validation below expects parsed JSON.
        head = json.loads(json.dumps(head))
        try:
            # A manifest that fails validation on load must not be committed.
            _meta_from_json(head)
            _state_from_json(head)
        except ContentError as error:
            raise ManifestError(f"the manifest's {error}") from error
        return _encode(head, self.shards.records)

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Parse and validate a manifest file.

        Every field is validated, because a matching checksum does not prove that ray-ulysses wrote the file.

        Raises:
            ForeignManifestError: Another version of ray-ulysses wrote the file.
            ManifestError: The file is truncated or altered, or a field is invalid.
        """
        return _read(content, _manifest_of)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Optimizer:
    step: Whole
    groups: tuple[Free, ...]
    group_of: dict[str, Whole]


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    tensors: dict[str, TensorSpec]
    tied: dict[str, Text]
    optimizer: _Optimizer
    counters: dict[str, Whole]
    base_fingerprint: Text = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shards:
    shards: list[ShardRecord]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    schema_version: Positive


def _read(content: bytes, take: Callable[[Mapping[str, Any]], _Taken]) -> _Taken:
    """Verify a manifest file's checksum and version, and return the result of `take`, called with the file's fields."""
    try:
        values = json.loads(content)
        is_whole_file = isinstance(values, dict) and _has_checksum(content)
    except (ValueError, RecursionError) as error:
        raise ManifestError("the manifest is truncated or is not JSON") from error
    if not is_whole_file:
        raise ManifestError("the manifest's checksum is wrong")
    try:
        version = checked(adapter(_Version), values).schema_version
        if version == SCHEMA_VERSION:
            return take(values)
    except ContentError as error:
        raise ManifestError(f"the manifest's {error}") from error
    raise ForeignManifestError(
        f"the manifest has schema version {version}, but this version of ray-ulysses reads version {SCHEMA_VERSION}; "
        "load the checkpoint with the version of ray-ulysses that wrote it"
    )


def _manifest_of(values: Mapping[str, Any]) -> Manifest:
    ref, meta = _facts_of(values)
    state, folder, files = _state_from_json(values), attempt_folder(ref.attempt), set[str]()
    records = checked(adapter(_Shards), values).shards
    for number, record in enumerate(records):
        _check_file(record.file, f"shards[{number}].file is {shown_value(record.file)}", folder, files)
    shards = ShardTable(state.tensors, ref.world_size, records)
    shards.validate()
    # A state without tensors has no shards.
    if len(shards) != ref.world_size and (state.tensors or shards):
        rule = f"shards has {len(shards)} entries, but each of the {ref.world_size} ranks wrote one shard"
        try:
            shards.check_cover()
        except CoverError as error:
            rule = f"{rule} ({error})"
        raise ContentError(rule)
    return Manifest(
        step=ref.step, attempt=ref.attempt, world_size=ref.world_size, meta=meta, state=state, shards=shards
    )


def _check_file(file: str, place: str, folder: str, files: set[str]) -> None:
    """Raise `ContentError` unless a shard has a file of its own in the attempt's folder."""
    where, _, name = file.rpartition("/")
    if where != folder or not _FILE_NAME.fullmatch(name):
        is_out = file.startswith("/") or ".." in file.split("/")
        why = f"is not a file in {folder}, the folder of the manifest's attempt"
        why = "is outside the checkpoint" if is_out else why
        raise ContentError(f"{place}, which {why}")
    if file in files:
        raise ContentError(f"{place}, which another shard also uses")
    files.add(file)


def _facts_of(values: Mapping[str, Any]) -> tuple[CheckpointRef, CheckpointMeta]:
    return checked(adapter(CheckpointRef), values), _meta_from_json(values)


def read_manifest(store: Store, step: int) -> Manifest:
    """Read the manifest of a committed step.

    Raises:
        ManifestError: The manifest is missing, damaged, or from another version of ray-ulysses.
    """
    return _read_step(store, step, _manifest_of)


def attempt_of(head: bytes) -> int:
    """Return the attempt in the first `HEAD_BYTES` bytes of a manifest, or 0 if the bytes are damaged."""
    found = _HEAD.match(head)
    return int(found[2]) if found else 0


def read_facts(store: Store, step: int) -> tuple[CheckpointRef, CheckpointMeta]:
    """Read a committed step's identity and metadata, without the slow validation of the state and shards.

    Raises:
        ManifestError: The manifest is missing, damaged, or from another version of ray-ulysses.
    """
    return _read_step(store, step, _facts_of)


def _read_step(store: Store, step: int, take: Callable[[Mapping[str, Any]], _Taken]) -> _Taken:
    try:
        content = store.read_whole(manifest_key(step))
    except FileNotFoundError as error:
        raise ManifestError(f"step {step} has no manifest, so it was never committed") from error
    except OSError as error:
        raise ManifestError(f"the manifest can't be read ({error.strerror or error})") from error

    def take_of_step(values: Mapping[str, Any]) -> _Taken:
        found = checked(adapter(CheckpointRef), values).step
        if found != step:
            raise ManifestError(f"the manifest in the folder of step {step} belongs to step {found}")
        return take(values)

    return _read(content, take_of_step)


def _meta_from_json(values: Mapping[str, Any]) -> CheckpointMeta:
    # The dataclass has defaults for callers, but a file must contain every field.
    missing = [one.name for one in fields(CheckpointMeta) if one.name not in values]
    if missing:
        raise ContentError(f"{missing[0]} is missing")
    meta: CheckpointMeta = checked(adapter(CheckpointMeta), values)
    return meta


def _encode(head: Mapping[str, Any], shards: Sequence[ShardRecord]) -> bytes:
    """Return the content of a manifest file with the fields in `head` and the given shards."""
    # One encoder call per shard, because a single call would hold the GIL for its whole duration and block the training
    # loop in another thread.
    pieces = [_ENCODER.encode(head)[:-1].encode(), b',"shards":[']
    for number, shard in enumerate(shards):
        pieces += [b"," if number else b"", _ENCODER.encode(asdict(shard)).encode()]
    pieces.append(b"]}")
    crc32 = 0
    for piece in pieces:
        crc32 = zlib.crc32(piece, crc32)
    pieces[0] = b'{"crc32":%d,%s' % (crc32, pieces[0][1:])
    return b"".join([*pieces, b"\n"])


def _has_checksum(content: bytes) -> bool:
    """Return whether the checksum at the start of the file, written by `_encode`, matches the remaining content."""
    beginning = _BEGINNING.match(content)
    if beginning is None or not content.endswith(b"}\n"):
        return False
    return zlib.crc32(memoryview(content)[beginning.end() : -1], zlib.crc32(b"{")) == int(beginning[1])


def _state_from_json(values: Mapping[str, Any]) -> StateDescription:
    state = checked(adapter(_State), values)
    num_bytes = 0
    for key, spec in state.tensors.items():
        try:
            num_bytes += spec.num_elements * spec.item_bytes
        except ValueError as error:
            raise ContentError(f"tensors.{shown_text(key)}.dtype: {error}") from error
        # Positions in shards are computed with 64 bits.
        if num_bytes >= 2**62:
            raise ContentError(f"tensors.{shown_text(key)}.shape is {list(spec.shape)}, which is too large for a file")
    groups, group_of = state.optimizer.groups, state.optimizer.group_of
    for name, number in group_of.items():
        if groups and number >= len(groups):
            raise ContentError(
                f"optimizer.group_of.{shown_text(name)} is {number}, but there are only {len(groups)} groups"
            )
    homeless = [key for key in state.tensors if key.startswith("fp32/") and key.split("/", 1)[1] not in group_of]
    if groups and homeless:
        raise ContentError(f"optimizer.group_of does not contain {shown_value(homeless[0].split('/', 1)[1])}")
    return StateDescription(
        tensors=state.tensors,
        tied=state.tied,
        optimizer_step=state.optimizer.step,
        groups=groups,
        group_of=group_of,
        counters=state.counters,
        base_fingerprint=state.base_fingerprint,
    )
