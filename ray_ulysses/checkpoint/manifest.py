"""The manifest: what a checkpoint is made of. It is written last, and a checkpoint exists when it does."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_ulysses.checkpoint.intervals import Interval
from ray_ulysses.checkpoint.shards import ShardEntry, StoredInterval
from ray_ulysses.checkpoint.state import StateDescription, TensorSpec
from ray_ulysses.errors import RunError
from ray_ulysses.storage import Store
from ray_ulysses.storage.store import read_bytes

SCHEMA_VERSION = 1
CHECKPOINT_FOLDER = "checkpoints"
MANIFEST_FILE = "manifest.json"


class ManifestError(RunError):
    """A manifest can't be read; the text is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMeta:
    """What the training loop adds to the model's state.

    Attributes:
        sp_size: Ranks that shared a row; for people, since loading does not depend on it.
        cursor: Where the data stand, as `data.cursor` writes it.
        digest: Sum of the data digests of all steps so far, 16 hexadecimal digits.
        tokens: Supervised tokens trained on so far.
        config_fingerprint: Hash of what may not change on resume.
        versions: Versions of the libraries that wrote it.
        extra: Whatever else the loop needs to go on; JSON values.
    """

    sp_size: int
    cursor: Mapping[str, Any]
    digest: str
    tokens: int
    config_fingerprint: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRef:
    """Names a committed checkpoint.

    Attributes:
        step: Completed steps that it holds.
        attempt: The attempt that wrote it.
        world_size: Ranks that wrote it.
        folder: Its folder's key in the run's store.
    """

    step: int
    attempt: int
    world_size: int
    folder: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All that is needed to load a checkpoint at any world size.

    Attributes:
        step: Completed steps that it holds.
        attempt: The attempt that wrote it.
        world_size: Ranks that wrote it.
        meta: What the training loop added.
        state: What the state is made of.
        shards: Where its pieces lie.
    """

    step: int
    attempt: int
    world_size: int
    meta: CheckpointMeta
    state: StateDescription
    shards: tuple[ShardEntry, ...]

    @property
    def ref(self) -> CheckpointRef:
        """Return the checkpoint's name."""
        folder = step_folder(self.step)
        return CheckpointRef(step=self.step, attempt=self.attempt, world_size=self.world_size, folder=folder)

    def to_bytes(self) -> bytes:
        """Return the file: JSON with a checksum of everything else in it."""
        fields = {
            "schema_version": SCHEMA_VERSION,
            "step": self.step,
            "attempt": self.attempt,
            "world_size": self.world_size,
            **_meta_to_json(self.meta),
            **_state_to_json(self.state),
            "shards": [_shard_to_json(shard) for shard in self.shards],
        }
        text = json.dumps({"crc32": _checksum(fields), **fields}, separators=(",", ":"))
        return text.encode() + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Read the file back.

        Raises:
            ManifestError: It is torn or altered, or a newer version wrote it.
        """
        try:
            fields = json.loads(content)
        except ValueError as error:
            raise ManifestError("the manifest is torn or no JSON") from error
        if not isinstance(fields, dict) or fields.pop("crc32", None) != _checksum(fields):
            raise ManifestError("the manifest's checksum is wrong")
        version = fields["schema_version"]
        if version != SCHEMA_VERSION:
            raise ManifestError(
                f"the manifest has schema version {version}, but this version of ray-ulysses reads "
                f"{SCHEMA_VERSION}; load it with the version that wrote it"
            )
        return cls(
            step=fields["step"],
            attempt=fields["attempt"],
            world_size=fields["world_size"],
            meta=_meta_from_json(fields),
            state=_state_from_json(fields),
            shards=tuple(_shard_from_json(shard) for shard in fields["shards"]),
        )


def step_folder(step: int) -> str:
    """Return the key of a step's folder."""
    return f"{CHECKPOINT_FOLDER}/step-{step:08d}"


def shard_file(attempt: int, rank: int, world_size: int) -> str:
    """Return a shard's key relative to its step's folder; no two attempts share one."""
    return f"attempt-{attempt:04d}/rank-{rank:05d}-of-{world_size:05d}.safetensors"


def manifest_key(step: int) -> str:
    """Return the key of a step's manifest."""
    return f"{step_folder(step)}/{MANIFEST_FILE}"


def read_manifest(store: Store, step: int) -> Manifest:
    """Read the manifest of a committed step.

    Raises:
        ManifestError: It is missing, torn, altered, or not readable by this version.
    """
    try:
        manifest = Manifest.from_bytes(read_bytes(store, manifest_key(step)))
    except FileNotFoundError as error:
        raise ManifestError(f"step {step} has no manifest, so it was never committed") from error
    except OSError as error:
        raise ManifestError(f"the manifest can't be read ({error.strerror or error})") from error
    if manifest.step != step:
        raise ManifestError(f"the manifest in the folder of step {step} is of step {manifest.step}")
    return manifest


def _checksum(fields: Mapping[str, Any]) -> int:
    """Return the checksum of a JSON object, whatever the order of its keys and the spaces in its file."""
    return zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def _meta_to_json(meta: CheckpointMeta) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "sp_size": meta.sp_size,
        "cursor": dict(meta.cursor),
        "digest": meta.digest,
        "tokens": meta.tokens,
        "config_fingerprint": meta.config_fingerprint,
        "versions": dict(meta.versions),
        "extra": dict(meta.extra),
    }
    # Through JSON once, so that the checksum is of what a reader will see (tuples become lists, for one).
    normal: dict[str, Any] = json.loads(json.dumps(fields))
    return normal


def _meta_from_json(fields: Mapping[str, Any]) -> CheckpointMeta:
    names = ("sp_size", "cursor", "digest", "tokens", "config_fingerprint", "versions", "extra")
    return CheckpointMeta(**{name: fields[name] for name in names})


def _state_to_json(state: StateDescription) -> dict[str, Any]:
    return {
        "tensors": {key: {"shape": list(spec.shape), "dtype": spec.dtype} for key, spec in state.tensors.items()},
        "tied": dict(state.tied),
        "optimizer": {
            "step": state.optimizer_step,
            "groups": [dict(group) for group in state.groups],
            "group_of": dict(state.group_of),
        },
        "counters": dict(state.counters),
    }


def _state_from_json(fields: Mapping[str, Any]) -> StateDescription:
    optimizer = fields["optimizer"]
    return StateDescription(
        tensors={
            key: TensorSpec(shape=tuple(spec["shape"]), dtype=spec["dtype"]) for key, spec in fields["tensors"].items()
        },
        tied=fields["tied"],
        optimizer_step=optimizer["step"],
        groups=tuple(optimizer["groups"]),
        group_of=optimizer["group_of"],
        counters=fields["counters"],
    )


def _shard_to_json(shard: ShardEntry) -> dict[str, Any]:
    # Rows instead of objects: a large world has hundreds of thousands of them.
    rows = [
        [
            entry.interval.key,
            entry.interval.start,
            entry.interval.stop,
            entry.offset,
            entry.num_bytes,
            entry.crc32,
        ]
        for entry in shard.intervals
    ]
    return {
        "file": shard.file,
        "bytes": shard.num_bytes,
        "header_crc32": shard.header_crc32,
        "interval_fields": ["key", "start", "stop", "offset", "bytes", "crc32"],
        "intervals": rows,
    }


def _shard_from_json(fields: Mapping[str, Any]) -> ShardEntry:
    return ShardEntry(
        file=fields["file"],
        num_bytes=fields["bytes"],
        header_crc32=fields["header_crc32"],
        intervals=tuple(
            StoredInterval(
                interval=Interval(key=key, start=start, stop=stop),
                offset=offset,
                num_bytes=num_bytes,
                crc32=crc32,
            )
            for key, start, stop, offset, num_bytes, crc32 in fields["intervals"]
        ),
    )
