"""The manifest: what a checkpoint is made of. It is written last, and a checkpoint exists when it does."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ray_ulysses.checkpoint.intervals import Interval
from ray_ulysses.checkpoint.shards import ShardEntry, place_intervals
from ray_ulysses.checkpoint.state import StateDescription, TensorSpec
from ray_ulysses.errors import RunError
from ray_ulysses.storage import Store
from ray_ulysses.storage.store import read_bytes

SCHEMA_VERSION = 2
CHECKPOINT_FOLDER = "checkpoints"
MANIFEST_FILE = "manifest.json"


class ManifestError(RunError):
    """A manifest can't be read; the text is the reason."""


class ForeignManifestError(ManifestError):
    """Another version of ray-ulysses wrote a manifest; nothing is wrong with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMeta:
    """What the training loop adds to the model's state.

    Attributes:
        sp_size: Ranks that shared a row; for people, since loading does not depend on it. So are the next two.
        ring_size: The ring's part of it.
        zero_stage: ZeRO stage.
        cursor: Where the data stand, as `data.cursor` writes it.
        digest: Sum of the data digests of all steps so far, 16 hexadecimal digits.
        tokens: Supervised tokens trained on so far.
        config_fingerprint: Hash of what may not change on resume.
        versions: Versions of the libraries that wrote it.
        metrics: The step's numbers, such as ``loss`` and ``eval_loss``: retention keeps the best by one of them.
        reason: What made it be saved: ``steps``, ``minutes``, ``request`` and so on.
        written_at: When the state was taken, seconds since the Unix epoch.
        run: The run's name.
        extra: Whatever else the loop needs to go on; JSON values.
    """

    sp_size: int
    cursor: Mapping[str, Any]
    digest: str
    tokens: int
    config_fingerprint: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    ring_size: int = 1
    zero_stage: int = 3
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    written_at: float = 0.0
    run: str = ""
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
        values = {
            "schema_version": SCHEMA_VERSION,
            "step": self.step,
            "attempt": self.attempt,
            "world_size": self.world_size,
            **_meta_to_json(self.meta),
            **_state_to_json(self.state),
            "shards": [_shard_to_json(shard) for shard in self.shards],
        }
        text = json.dumps({"crc32": _checksum(values), **values}, separators=(",", ":"))
        return text.encode() + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Read the file back.

        Raises:
            ManifestError: It is torn or altered, or a newer version wrote it.
        """
        try:
            values = json.loads(content)
        except ValueError as error:
            raise ManifestError("the manifest is torn or no JSON") from error
        if not isinstance(values, dict) or values.pop("crc32", None) != _checksum(values):
            raise ManifestError("the manifest's checksum is wrong")
        version = values.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ForeignManifestError(
                f"the manifest has schema version {version}, but this version of ray-ulysses reads "
                f"{SCHEMA_VERSION}; load it with the version that wrote it"
            )
        state = _state_from_json(values)
        return cls(
            step=values["step"],
            attempt=values["attempt"],
            world_size=values["world_size"],
            meta=_meta_from_json(values),
            state=state,
            shards=tuple(_shard_from_json(shard, state.tensors) for shard in values["shards"]),
        )


def step_folder(step: int) -> str:
    """Return the key of a step's folder."""
    return f"{CHECKPOINT_FOLDER}/step-{step:08d}"


def shard_file(attempt: int, rank: int, world_size: int, part: int = 0) -> str:
    """Return a shard's key relative to its step's folder; no two attempts share one, nor two tries of one attempt."""
    again = f"-try-{part:02d}" if part else ""
    return f"attempt-{attempt:04d}/rank-{rank:05d}-of-{world_size:05d}{again}.safetensors"


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


def _checksum(values: Mapping[str, Any]) -> int:
    """Return the checksum of a JSON object, whatever the order of its keys and the spaces in its file."""
    return zlib.crc32(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def _meta_to_json(meta: CheckpointMeta) -> dict[str, Any]:
    # Through JSON once, so that the checksum is of what a reader will see (tuples become lists, for one).
    normal: dict[str, Any] = json.loads(json.dumps(asdict(meta)))
    return normal


def _meta_from_json(values: Mapping[str, Any]) -> CheckpointMeta:
    return CheckpointMeta(**{known.name: values[known.name] for known in fields(CheckpointMeta)})


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


def _state_from_json(values: Mapping[str, Any]) -> StateDescription:
    optimizer = values["optimizer"]
    return StateDescription(
        tensors={
            key: TensorSpec(shape=tuple(spec["shape"]), dtype=spec["dtype"]) for key, spec in values["tensors"].items()
        },
        tied=values["tied"],
        optimizer_step=optimizer["step"],
        groups=tuple(optimizer["groups"]),
        group_of=optimizer["group_of"],
        counters=values["counters"],
    )


def _shard_to_json(shard: ShardEntry) -> dict[str, Any]:
    # Rows instead of objects: a large world has hundreds of thousands of them. Where each lies follows from the sizes.
    rows = [[stored.interval.key, stored.interval.start, stored.interval.stop] for stored in shard.intervals]
    return {
        "file": shard.file,
        "bytes": shard.num_bytes,
        "header_bytes": shard.header_bytes,
        "header_xxh3": shard.header_sum,
        "block_sums_xxh3": shard.sums_sum,
        "interval_fields": ["key", "start", "stop"],
        "intervals": rows,
    }


def _shard_from_json(values: Mapping[str, Any], tensors: Mapping[str, TensorSpec]) -> ShardEntry:
    intervals = [Interval(key=key, start=start, stop=stop) for key, start, stop in values["intervals"]]
    sizes = [(interval, (interval.stop - interval.start) * tensors[interval.key].item_bytes) for interval in intervals]
    return ShardEntry(
        file=values["file"],
        num_bytes=values["bytes"],
        header_bytes=values["header_bytes"],
        header_sum=values["header_xxh3"],
        sums_sum=values["block_sums_xxh3"],
        intervals=place_intervals(sizes, values["header_bytes"]),
    )
