"""The manifest of a checkpoint. It is written last: a checkpoint exists once its manifest does."""

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
    """A manifest can't be read; the text is the reason."""


class ForeignManifestError(ManifestError):
    """Another version of ray-ulysses wrote a manifest; nothing is wrong with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMeta:
    """The training loop's part of a checkpoint, beside the model's state."""

    sp_size: Positive
    """Ranks that shared a row. Loading depends neither on it nor on `ring_size` and `zero_stage`."""
    cursor: Free
    """Position in the data, as `data.cursor` writes it."""
    digest: DigestText
    """Sum of the data digests of all steps so far, 16 hexadecimal digits."""
    tokens: Whole
    """Supervised tokens trained on so far."""
    config_fingerprint: Text = ""
    """Hash of what may not change on resume."""
    versions: Mapping[str, Text] = field(default_factory=dict)
    """Versions of the libraries that wrote it."""
    ring_size: Positive = 1
    zero_stage: Annotated[int, Field(strict=True, ge=0, lt=4)] = 3
    metrics: Mapping[str, Annotated[float, Field(strict=True)]] = field(default_factory=dict)
    """The step's numbers, such as ``loss`` and ``eval_loss``: retention keeps the best by one of them."""
    reason: Text = ""
    """The trigger of the save: ``steps``, ``minutes``, ``request`` and so on."""
    written_at: Seconds = 0.0
    """When the state was taken, seconds since the Unix epoch."""
    run: Text = ""
    extra: Free = field(default_factory=dict)
    """Further JSON values that the loop needs to resume."""

    @property
    def stage(self) -> str:
        """Name of the stage that trained it; empty in a run without stages."""
        return str(self.extra.get("stage", ""))

    @property
    def measured(self) -> str:
        """Identity of what its metrics were measured on."""
        return str(self.extra.get("measured", ""))


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRef:
    """Names a committed checkpoint."""

    step: Whole
    """Completed steps that it holds."""
    attempt: Positive
    """The attempt that wrote it."""
    world_size: Positive
    """Ranks that wrote it."""

    @property
    def folder(self) -> str:
        """Return its folder's key in the run's store."""
        return step_folder(self.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All that is needed to load a checkpoint at any world size."""

    step: int
    attempt: int
    world_size: int
    meta: CheckpointMeta
    state: StateDescription
    shards: tuple[ShardEntry, ...]

    @property
    def ref(self) -> CheckpointRef:
        """Return the checkpoint's name."""
        return CheckpointRef(step=self.step, attempt=self.attempt, world_size=self.world_size)

    def check_cover(self) -> None:
        """Check that the shards, as far as it says, hold every element of the state once; raises `CoverError`."""
        sizes = {key: spec.num_elements for key, spec in self.state.tensors.items()}
        check_cover(sizes, [stored.interval for shard in self.shards for stored in shard.intervals])

    def to_bytes(self) -> bytes:
        """Return the file: JSON with a checksum of everything else in it.

        Raises:
            ManifestError: The file could not be read back: the loop or the engine gave an invalid value.
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
        }
        # Through JSON once, since the checksum is of what a reader will see (tuples become lists, for one).
        head = json.loads(json.dumps(head))
        try:
            # What can't be read back must not be committed.
            _meta_from_json(head)
            _state_from_json(head)
        except ContentError as error:
            raise ManifestError(f"the manifest's {error}") from error
        return _encode(head, self.shards)

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Read the file back; every field is checked, since the checksum does not say who wrote them.

        Raises:
            ForeignManifestError: Another version wrote it.
            ManifestError: It is torn or altered, or a field is invalid.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shard:
    file: str
    bytes: Whole
    # Eight bytes are the header's own length.
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
    """Return what `take` makes of a file's fields, if the file is whole and its version is known."""
    try:
        values = json.loads(content)
        is_whole_file = isinstance(values, dict) and _has_checksum(content)
    except (ValueError, RecursionError) as error:
        raise ManifestError("the manifest is torn or no JSON") from error
    if not is_whole_file:
        raise ManifestError("the manifest's checksum is wrong")
    try:
        version = checked(adapter(_Version), values).schema_version
        if version == SCHEMA_VERSION:
            return take(values)
    except ContentError as error:
        raise ManifestError(f"the manifest's {error}") from error
    raise ForeignManifestError(
        f"the manifest has schema version {version}, but this version of ray-ulysses reads {SCHEMA_VERSION}; load it "
        "with the version that wrote it"
    )


def _manifest_of(values: Mapping[str, Any]) -> Manifest:
    ref, meta = _facts_of(values)
    state, folder = _state_from_json(values), attempt_folder(ref.attempt)
    # A large world has hundreds of thousands of intervals: what they need of a tensor is looked up once.
    sizes = {key: (spec.num_elements, spec.item_bytes) for key, spec in state.tensors.items()}
    shards, files = [], set[str]()
    for number, stored in enumerate(checked(adapter(_Shards), values).shards):
        shards.append(_entry(stored, f"shards[{number}]", folder, sizes))
        if stored.file in files:
            raise ContentError(f"shards[{number}].file is {shown_value(stored.file)}, which another one has already")
        files.add(stored.file)
    manifest = Manifest(
        step=ref.step, attempt=ref.attempt, world_size=ref.world_size, meta=meta, state=state, shards=tuple(shards)
    )
    # What holds nothing needs no file.
    if len(shards) != ref.world_size and (state.tensors or shards):
        rule = f"shards are {len(shards)}, but each of {ref.world_size} ranks has written one"
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
        ManifestError: It is missing, torn, altered, or not readable by this version.
    """
    return _read_step(store, step, _manifest_of)


def read_facts(store: Store, step: int) -> tuple[CheckpointRef, CheckpointMeta]:
    """Read a committed step's manifest without its state and shards, which take most of the time.

    Raises:
        ManifestError: It is missing, torn, altered, or not readable by this version.
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
            raise ManifestError(f"the manifest in the folder of step {step} is of step {found}")
        return take(values)

    return _read(content, take_of_step)


def _meta_from_json(values: Mapping[str, Any]) -> CheckpointMeta:
    # Callers may leave fields out; a file may not.
    missing = [one.name for one in fields(CheckpointMeta) if one.name not in values]
    if missing:
        raise ContentError(f"{missing[0]} is missing")
    meta: CheckpointMeta = checked(adapter(CheckpointMeta), values)
    return meta


def _encode(head: Mapping[str, Any], shards: Sequence[ShardEntry]) -> bytes:
    """Return the file.

    Args:
        head: All but the shards.
        shards: The shards.
    """
    # One call a shard, joined once: a single call would hold the interpreter's lock, and with it the training loop in
    # another thread, for seconds in a large world.
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
    """Return whether a file is what `_encode` returned."""
    beginning = _BEGINNING.match(content)
    if beginning is None or not content.endswith(b"}\n"):
        return False
    return zlib.crc32(memoryview(content)[beginning.end() : -1], zlib.crc32(b"{")) == int(beginning[1])


def _state_from_json(values: Mapping[str, Any]) -> StateDescription:
    """Return the state that a manifest describes.

    Raises:
        ContentError: A field is missing or wrong.
    """
    state = checked(adapter(_State), values)
    for key, spec in state.tensors.items():
        try:
            num_bytes = spec.num_elements * spec.item_bytes
        except ValueError as error:
            raise ContentError(f"tensors.{shown_text(key)}.dtype: {error}") from error
        if num_bytes >= 2**63:
            raise ContentError(f"tensors.{shown_text(key)}.shape is {list(spec.shape)}, more than any file can hold")
    groups, group_of = state.optimizer.groups, state.optimizer.group_of
    for name, number in group_of.items():
        if groups and number >= len(groups):
            raise ContentError(
                f"optimizer.group_of.{shown_text(name)} is {number}, not one of the {len(groups)} groups"
            )
    homeless = [key for key in state.tensors if key.startswith("fp32/") and key.split("/", 1)[1] not in group_of]
    if groups and homeless:
        raise ContentError(f"optimizer.group_of has no group for {shown_value(homeless[0].split('/', 1)[1])}")
    return StateDescription(
        tensors=state.tensors,
        tied=state.tied,
        optimizer_step=state.optimizer.step,
        groups=groups,
        group_of=group_of,
        counters=state.counters,
    )


def _shard_to_json(shard: ShardEntry) -> dict[str, Any]:
    # Rows instead of objects: a large world has hundreds of thousands of them. Their offsets follow from the sizes.
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
    """Return a shard whose file, intervals and size fit together."""
    where, _, name = shard.file.rpartition("/")
    if where != folder or not _FILE_NAME.fullmatch(name):
        is_out = shard.file.startswith("/") or ".." in shard.file.split("/")
        why = f"is no file in {folder}, where the manifest's own attempt writes"
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
        raise ContentError(f"{place}.bytes is {shard.bytes}, but its header, intervals and checksums come to {whole}")
    return entry


def _intervals(shard: _Shard, place: str, sizes: Mapping[str, tuple[int, int]]) -> list[tuple[Interval, int]]:
    """Return a shard's intervals with their sizes in bytes; each is inside its tensor, and no tensor appears twice."""
    found, seen = [], set()
    for number, (key, start, stop) in enumerate(shard.intervals):
        size = sizes.get(key)
        if size is None:
            why = "which is of no tensor of the state"
        elif not start <= stop <= size[0]:
            why = f"not an interval of its {size[0]} elements"
        elif key in seen:
            why = "whose tensor the shard holds already"
        else:
            seen.add(key)
            found.append((Interval(key, start, stop), (stop - start) * size[1]))
            continue
        raise ContentError(f"{place}.intervals[{number}] is {shown_value([key, start, stop])}, {why}")
    return found
