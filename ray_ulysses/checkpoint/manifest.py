"""Checkpoint manifests. The manifest is written after all shards, and its creation commits the checkpoint."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from ray_ulysses.checkpoint.intervals import CoverError, Interval, check_cover
from ray_ulysses.checkpoint.shards import ShardEntry, place_intervals
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

SCHEMA_VERSION = 3
_INTERVAL_FIELDS = ["key", "start", "stop"]
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_BEGINNING = re.compile(rb'\{"crc32":(\d{1,10}),')
_Sum = Annotated[int, Field(strict=True, ge=0, lt=2**64)]
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
    shards: tuple[ShardEntry, ...]

    @property
    def ref(self) -> CheckpointRef:
        """Identity of the checkpoint."""
        return CheckpointRef(step=self.step, attempt=self.attempt, world_size=self.world_size)

    def check_cover(self) -> None:
        """Raise `CoverError` unless the shards' intervals contain each element of the state exactly once."""
        sizes = {key: spec.num_elements for key, spec in self.state.tensors.items()}
        check_cover(sizes, [stored.interval for shard in self.shards for stored in shard.intervals])

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
        return _encode(head, self.shards)

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
class _Shard:
    file: str
    bytes: Whole
    # The first eight bytes of the header are its length field.
    header_bytes: Annotated[int, Field(strict=True, ge=9, lt=2**63)]
    header_xxh3: _Sum
    block_sums_xxh3: _Sum
    interval_fields: tuple[Literal["key"], Literal["start"], Literal["stop"]]
    intervals: list[tuple[str, Whole, Whole]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shards:
    shards: list[_Shard]


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
    state, folder = _state_from_json(values), attempt_folder(ref.attempt)
    # Computed once per tensor, because at a large world size there are hundreds of thousands of intervals.
    sizes = {key: (spec.num_elements, spec.item_bytes) for key, spec in state.tensors.items()}
    shards, files = [], set[str]()
    for number, stored in enumerate(checked(adapter(_Shards), values).shards):
        shards.append(_entry(stored, f"shards[{number}]", folder, sizes))
        if stored.file in files:
            raise ContentError(f"shards[{number}].file is {shown_value(stored.file)}, which another shard also uses")
        files.add(stored.file)
    manifest = Manifest(
        step=ref.step, attempt=ref.attempt, world_size=ref.world_size, meta=meta, state=state, shards=tuple(shards)
    )
    # A state without tensors has no shards.
    if len(shards) != ref.world_size and (state.tensors or shards):
        rule = f"shards has {len(shards)} entries, but each of the {ref.world_size} ranks wrote one shard"
        try:
            manifest.check_cover()
        except CoverError as error:
            rule = f"{rule} ({error})"
        raise ContentError(rule)
    return manifest


def _facts_of(values: Mapping[str, Any]) -> tuple[CheckpointRef, CheckpointMeta]:
    return checked(adapter(CheckpointRef), values), _meta_from_json(values)


def read_manifest(store: Store, step: int) -> Manifest:
    """Read the manifest of a committed step.

    Raises:
        ManifestError: The manifest is missing, damaged, or from another version of ray-ulysses.
    """
    return _read_step(store, step, _manifest_of)


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


def _encode(head: Mapping[str, Any], shards: Sequence[ShardEntry]) -> bytes:
    """Return the content of a manifest file with the fields in `head` and the given shards."""
    # One encoder call per shard: at a large world size, a single call would hold the GIL for seconds and block the
    # training loop in another thread.
    pieces = [_ENCODER.encode(head)[:-1].encode(), b',"shards":[']
    for number, shard in enumerate(shards):
        pieces += [b"," if number else b"", _ENCODER.encode(_shard_to_json(shard)).encode()]
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
    for key, spec in state.tensors.items():
        try:
            num_bytes = spec.num_elements * spec.item_bytes
        except ValueError as error:
            raise ContentError(f"tensors.{shown_text(key)}.dtype: {error}") from error
        if num_bytes >= 2**63:
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


def _shard_to_json(shard: ShardEntry) -> dict[str, Any]:
    # Lists, because they are smaller than objects and there may be hundreds of thousands of intervals. Byte offsets are
    # not stored, because they follow from the sizes of the intervals.
    rows = [[stored.interval.key, stored.interval.start, stored.interval.stop] for stored in shard.intervals]
    return {
        "file": shard.file,
        "bytes": shard.num_bytes,
        "header_bytes": shard.header_bytes,
        "header_xxh3": shard.header_sum,
        "block_sums_xxh3": shard.sums_sum,
        "interval_fields": _INTERVAL_FIELDS,
        "intervals": rows,
    }


def _entry(shard: _Shard, place: str, folder: str, sizes: Mapping[str, tuple[int, int]]) -> ShardEntry:
    """Return the shard's entry after checking that its file name, intervals and size are consistent."""
    where, _, name = shard.file.rpartition("/")
    if where != folder or not _FILE_NAME.fullmatch(name):
        is_out = shard.file.startswith("/") or ".." in shard.file.split("/")
        why = f"is not a file in {folder}, the folder of the manifest's attempt"
        why = "is outside the checkpoint" if is_out else why
        raise ContentError(f"{place}.file is {shown_value(shard.file)}, which {why}")
    intervals = place_intervals(_intervals(shard, place, sizes), shard.header_bytes)
    entry = ShardEntry(
        file=shard.file,
        num_bytes=shard.bytes,
        header_bytes=shard.header_bytes,
        header_sum=shard.header_xxh3,
        sums_sum=shard.block_sums_xxh3,
        intervals=intervals,
    )
    data_end = intervals[-1].offset + intervals[-1].num_bytes if intervals else shard.header_bytes
    if entry.sums_offset != data_end:
        whole = entry.num_bytes - entry.sums_offset + data_end
        raise ContentError(f"{place}.bytes is {shard.bytes}, but its header, intervals and checksums add up to {whole}")
    return entry


def _intervals(shard: _Shard, place: str, sizes: Mapping[str, tuple[int, int]]) -> list[tuple[Interval, int]]:
    """Return each interval of a shard with its size in bytes; reject unknown tensors, bad bounds and duplicates."""
    found, seen = [], set()
    for number, (key, start, stop) in enumerate(shard.intervals):
        size = sizes.get(key)
        if size is None:
            why = "but the state has no such tensor"
        elif not start <= stop <= size[0]:
            why = f"but the tensor has {size[0]} elements"
        elif key in seen:
            why = "but the shard already has an interval of this tensor"
        else:
            seen.add(key)
            found.append((Interval(key, start, stop), (stop - start) * size[1]))
            continue
        raise ContentError(f"{place}.intervals[{number}] is {shown_value([key, start, stop])}, {why}")
    return found
