"""The manifest: what a checkpoint is made of. It is written last, and a checkpoint exists when it does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from ray_ulysses.checkpoint.json_fields import FieldError, Fields, is_number, is_text
from ray_ulysses.checkpoint.manifest_json import encode, has_checksum, shards_from_json, state_from_json, state_to_json
from ray_ulysses.checkpoint.shards import ShardEntry
from ray_ulysses.checkpoint.state import StateDescription
from ray_ulysses.errors import RunError
from ray_ulysses.run_names import attempt_folder, manifest_key, step_folder
from ray_ulysses.storage import Store
from ray_ulysses.storage.store import read_bytes

SCHEMA_VERSION = 3

_DIGEST = re.compile(r"[0-9a-f]{1,16}")
_YEAR_10000_S = 253_402_300_800

_Taken = TypeVar("_Taken")


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
            _meta_from_json(Fields(values=head))
            state_from_json(Fields(values=head))
        except FieldError as error:
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


def _read(content: bytes, take: Callable[[Fields], _Taken]) -> _Taken:
    """Return what is taken from a file's fields; its version comes first, since it says what else there may be."""
    try:
        values = json.loads(content)
        is_whole_file = isinstance(values, dict) and has_checksum(content, values)
    except (ValueError, RecursionError) as error:
        raise ManifestError("the manifest is torn or no JSON") from error
    if not is_whole_file:
        raise ManifestError("the manifest's checksum is wrong")
    fields = Fields(values=values)
    try:
        version = fields.whole("schema_version", least=1)
        if version == SCHEMA_VERSION:
            return take(fields)
    except FieldError as error:
        raise ManifestError(f"the manifest's {error}") from error
    raise ForeignManifestError(
        f"the manifest has schema version {version}, but this version of ray-ulysses reads {SCHEMA_VERSION}; load it "
        "with the version that wrote it"
    )


def _manifest_of(fields: Fields) -> Manifest:
    ref, meta = _facts_of(fields)
    state = state_from_json(fields)
    folder = attempt_folder(ref.attempt)
    return Manifest(
        step=ref.step,
        attempt=ref.attempt,
        world_size=ref.world_size,
        meta=meta,
        state=state,
        shards=shards_from_json(fields, folder=folder, world_size=ref.world_size, tensors=state.tensors),
    )


def _facts_of(fields: Fields) -> tuple[CheckpointRef, CheckpointMeta]:
    attempt, world_size = fields.whole("attempt", least=1), fields.whole("world_size", least=1)
    step = fields.whole("step")
    ref = CheckpointRef(step=step, attempt=attempt, world_size=world_size, folder=step_folder(step))
    return ref, _meta_from_json(fields)


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


def _read_step(store: Store, step: int, take: Callable[[Fields], _Taken]) -> _Taken:
    try:
        content = read_bytes(store, manifest_key(step))
    except FileNotFoundError as error:
        raise ManifestError(f"step {step} has no manifest, so it was never committed") from error
    except OSError as error:
        raise ManifestError(f"the manifest can't be read ({error.strerror or error})") from error

    def take_of_step(fields: Fields) -> _Taken:
        if fields.whole("step") != step:
            raise ManifestError(f"the manifest in the folder of step {step} is of step {fields.whole('step')}")
        return take(fields)

    return _read(content, take_of_step)


def _meta_from_json(fields: Fields) -> CheckpointMeta:
    digest = fields.text("digest")
    if not _DIGEST.fullmatch(digest):
        raise fields.wrong("digest", "not up to 16 hexadecimal digits")
    return CheckpointMeta(
        sp_size=fields.whole("sp_size", least=1),
        ring_size=fields.whole("ring_size", least=1),
        zero_stage=fields.whole("zero_stage", below=4),
        cursor=fields.free("cursor"),
        digest=digest,
        tokens=fields.whole("tokens"),
        config_fingerprint=fields.text("config_fingerprint"),
        versions=fields.mapping("versions", is_text, "a text"),
        metrics=fields.mapping("metrics", is_number, "a number"),
        reason=fields.text("reason"),
        written_at=fields.number("written_at", below=_YEAR_10000_S),
        run=fields.text("run"),
        extra=fields.free("extra"),
    )
