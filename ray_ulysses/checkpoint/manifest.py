"""The manifest of a checkpoint. It is written last: a checkpoint exists once its manifest does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, TypeVar

from pydantic import Field

from ray_ulysses.checkpoint.manifest_json import (
    encode,
    has_checksum,
    shards_from_json,
    state_from_json,
    state_to_json,
)
from ray_ulysses.checkpoint.shards import ShardEntry
from ray_ulysses.checkpoint.state import StateDescription
from ray_ulysses.errors import RunError
from ray_ulysses.run_names import attempt_folder, manifest_key, step_folder
from ray_ulysses.storage import Store
from ray_ulysses.storage.store import read_bytes
from ray_ulysses.validation import ContentError, DigestText, Free, Positive, Seconds, Text, Whole, adapter, checked

SCHEMA_VERSION = 3

_Taken = TypeVar("_Taken")


class ManifestError(RunError):
    """A manifest can't be read; the text is the reason."""


class ForeignManifestError(ManifestError):
    """Another version of ray-ulysses wrote a manifest; nothing is wrong with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMeta:
    """The training loop's part of a checkpoint, beside the model's state.

    Attributes:
        sp_size: Ranks that shared a row; for people, since loading does not depend on it. So are the next two.
        ring_size: The ring's part of it.
        zero_stage: ZeRO stage.
        cursor: Position in the data, as `data.cursor` writes it.
        digest: Sum of the data digests of all steps so far, 16 hexadecimal digits.
        tokens: Supervised tokens trained on so far.
        config_fingerprint: Hash of what may not change on resume.
        versions: Versions of the libraries that wrote it.
        metrics: The step's numbers, such as ``loss`` and ``eval_loss``: retention keeps the best by one of them.
        reason: What made it be saved: ``steps``, ``minutes``, ``request`` and so on.
        written_at: When the state was taken, seconds since the Unix epoch.
        run: The run's name.
        extra: Further JSON values that the loop needs to resume.
    """

    sp_size: Positive
    cursor: Free
    digest: DigestText
    tokens: Whole
    config_fingerprint: Text = ""
    versions: Mapping[str, Text] = field(default_factory=dict)
    ring_size: Positive = 1
    zero_stage: Annotated[int, Field(strict=True, ge=0, lt=4)] = 3
    metrics: Mapping[str, Annotated[float, Field(strict=True)]] = field(default_factory=dict)
    reason: Text = ""
    written_at: Seconds = 0.0
    run: Text = ""
    extra: Free = field(default_factory=dict)

    @property
    def stage(self) -> str:
        """Name of the stage that trained it; empty in a run without stages."""
        return str(self.extra.get("stage", ""))

    @property
    def measured(self) -> str:
        """Identity of what its metrics were measured on; empty in a checkpoint of an earlier version."""
        return str(self.extra.get("measured", ""))


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRef:
    """Names a committed checkpoint.

    Attributes:
        step: Completed steps that it holds.
        attempt: The attempt that wrote it.
        world_size: Ranks that wrote it.
    """

    step: Whole
    attempt: Positive
    world_size: Positive

    @property
    def folder(self) -> str:
        """Return its folder's key in the run's store."""
        return step_folder(self.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All that is needed to load a checkpoint at any world size.

    Attributes:
        step: Completed steps that it holds.
        attempt: The attempt that wrote it.
        world_size: Ranks that wrote it.
        meta: What the training loop added.
        state: What the state is made of.
        shards: The files that hold its parts.
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
        return CheckpointRef(step=self.step, attempt=self.attempt, world_size=self.world_size)

    def to_bytes(self) -> bytes:
        """Return the file: JSON with a checksum of everything else in it.

        Raises:
            ManifestError: The file could not be read back: the loop or the engine gave a value that can't be.
        """
        head = {
            "schema_version": SCHEMA_VERSION,
            "step": self.step,
            "attempt": self.attempt,
            "world_size": self.world_size,
            **asdict(self.meta),
            **state_to_json(self.state),
        }
        # Through JSON once, since the checksum is of what a reader will see (tuples become lists, for one).
        head = json.loads(json.dumps(head))
        try:
            # What can't be read back must not be committed.
            _meta_from_json(head)
            state_from_json(head)
        except ContentError as error:
            raise ManifestError(f"the manifest's {error}") from error
        return encode(head, self.shards)

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Read the file back; every field is checked, since the checksum does not say who wrote them.

        Raises:
            ForeignManifestError: Another version wrote it.
            ManifestError: It is torn or altered, or holds what no checkpoint has.
        """
        return _read(content, _manifest_of)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    schema_version: Positive


def _read(content: bytes, take: Callable[[Mapping[str, Any]], _Taken]) -> _Taken:
    """Return what is taken from a file's fields; its version comes first, since it says what else there may be."""
    try:
        values = json.loads(content)
        is_whole_file = isinstance(values, dict) and has_checksum(content, values)
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
    state = state_from_json(values)
    folder = attempt_folder(ref.attempt)
    return Manifest(
        step=ref.step,
        attempt=ref.attempt,
        world_size=ref.world_size,
        meta=meta,
        state=state,
        shards=shards_from_json(values, folder=folder, world_size=ref.world_size, tensors=state.tensors),
    )


def _facts_of(values: Mapping[str, Any]) -> tuple[CheckpointRef, CheckpointMeta]:
    return checked(adapter(CheckpointRef), values), _meta_from_json(values)


def read_manifest(store: Store, step: int) -> Manifest:
    """Read the manifest of a committed step.

    Raises:
        ManifestError: It is missing, torn, altered, or not readable by this version.
    """
    return _read_step(store, step, _manifest_of)


def read_facts(store: Store, step: int) -> tuple[CheckpointRef, CheckpointMeta]:
    """Read what a committed step's manifest says beside its state and shards, which take most of the time.

    Raises:
        ManifestError: It is missing, torn, altered, or not readable by this version.
    """
    return _read_step(store, step, _facts_of)


def _read_step(store: Store, step: int, take: Callable[[Mapping[str, Any]], _Taken]) -> _Taken:
    try:
        content = read_bytes(store, manifest_key(step))
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
    # Who makes one may leave fields out, and a file may not.
    missing = [one.name for one in fields(CheckpointMeta) if one.name not in values]
    if missing:
        raise ContentError(f"{missing[0]} is missing")
    meta: CheckpointMeta = checked(adapter(CheckpointMeta), values)
    return meta
