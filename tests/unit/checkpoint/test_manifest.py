"""The manifest's file: what was written is read back however it is laid out, and nothing else is taken for one."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from ray_ulysses.checkpoint import Manifest, StateDescription, newest_committed
from ray_ulysses.checkpoint.manifest import ForeignManifestError, ManifestError
from ray_ulysses.run_names import manifest_key
from tests.stores import MemoryStore
from tests.unit.checkpoint.fakes import save
from tests.unit.checkpoint.manifests import MANIFEST, META, STATE, STEP, WORLD_SIZE, replaced, shard_of_rank, signed


def test_what_was_written_is_read_back() -> None:
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST


def test_tuples_and_numbers_as_keys_are_read_back_as_json_has_them() -> None:
    meta = replace(META, extra={"pair": (1, 2), "rows": {10: "ten", 9: "nine"}})
    read = Manifest.from_bytes(replace(MANIFEST, meta=meta).to_bytes())
    assert read.meta.extra == {"pair": [1, 2], "rows": {"10": "ten", "9": "nine"}}


def test_the_first_field_is_the_checksum_of_the_file_without_it() -> None:
    content = MANIFEST.to_bytes()
    first, rest = content[1:].split(b",", 1)
    assert first == b'"crc32":%d' % zlib.crc32(b"{" + rest.rstrip(b"\n"))


def test_each_call_that_makes_a_manifest_makes_a_shard_of_it_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call holds the interpreter's lock: the training loop waits that long."""
    sizes = []
    make = json.JSONEncoder.encode

    def measured(self: json.JSONEncoder, value: object) -> str:
        text = make(self, value)
        sizes.append(len(text))
        return text

    shards = tuple(shard_of_rank(rank % WORLD_SIZE) for rank in range(500))
    monkeypatch.setattr(json.JSONEncoder, "encode", measured)
    content = replace(MANIFEST, world_size=500, shards=shards).to_bytes()
    assert max(sizes) < len(content) / 50
    assert json.loads(content)["shards"] == 250 * json.loads(MANIFEST.to_bytes())["shards"]


def test_the_damage_is_said_in_one_line_and_the_checkpoint_before_is_taken() -> None:
    store = MemoryStore()
    save(store, 5)
    save(store, STEP)
    values = json.loads(store.open(manifest_key(STEP)).read())
    values["shards"][1]["file"] = "../../x"
    store.replace(manifest_key(STEP), [signed(values)])
    for depth in ("sizes", "content"):
        chosen = newest_committed(store, depth)  # type: ignore[arg-type]
        assert chosen.manifest is not None and chosen.manifest.step == 5
        assert [str(damage) for damage in chosen.damaged] == [
            "the checkpoint of step 6 is damaged and not used: the manifest's shards[1].file is '../../x', which is "
            "outside the checkpoint"
        ]


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000])
def test_a_file_of_endless_nesting_is_no_manifest(content: bytes) -> None:
    with pytest.raises(ManifestError, match="the manifest is torn or no JSON"):
        Manifest.from_bytes(content)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\xff", b"9" * 5000, b'{"crc32":1,', MANIFEST.to_bytes()[:-9], '{"a":1'.encode("utf-16")],
    ids=["empty", "no-text", "a-long-number", "torn", "cut", "torn-utf-16"],
)
def test_what_is_no_json_is_no_manifest(content: bytes) -> None:
    with pytest.raises(ManifestError, match="the manifest is torn or no JSON"):
        Manifest.from_bytes(content)


@pytest.mark.parametrize("content", [b"{}", b"[]", b"null", b"NaN", b'{"crc32":null}', b'{"crc32":0,"a":1}\n'])
def test_json_without_the_right_checksum_is_no_manifest(content: bytes) -> None:
    with pytest.raises(ManifestError, match="the manifest's checksum is wrong"):
        Manifest.from_bytes(content)


@pytest.mark.parametrize("position", range(0, len(MANIFEST.to_bytes()), 7))
def test_a_flipped_bit_is_found(position: int) -> None:
    content = bytearray(MANIFEST.to_bytes())
    content[position] ^= 1
    with pytest.raises(ManifestError, match=r"^the manifest('s checksum is wrong| is torn or no JSON)$"):
        Manifest.from_bytes(bytes(content))


def test_another_version_is_named_before_anything_else_is_looked_at() -> None:
    with pytest.raises(ForeignManifestError, match="the manifest has schema version 4, but this version of ray-ulyss"):
        Manifest.from_bytes(signed({"schema_version": 4, "parts": "of another kind"}))


@pytest.mark.parametrize("version", ["2", None, 2.0, True, 0, -1, [2]])
def test_what_is_no_version_is_damage_and_not_another_version(version: object) -> None:
    with pytest.raises(ManifestError, match="the manifest's schema_version is ") as refused:
        Manifest.from_bytes(signed(replaced(("schema_version",), version)))
    assert not isinstance(refused.value, ForeignManifestError)


def test_a_state_of_nothing_needs_no_shards() -> None:
    manifest = replace(MANIFEST, state=StateDescription(tensors={}), shards=())
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_groups_that_an_engine_keeps_to_itself_are_not_looked_for() -> None:
    for group_of in ({}, {"layer.weight": 7}):
        manifest = replace(MANIFEST, state=replace(STATE, groups=(), group_of=group_of))
        assert Manifest.from_bytes(manifest.to_bytes()) == manifest


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"meta": replace(META, digest="hello")}, "digest is 'hello', but must be up to 16 hexadecimal digits"),
        ({"meta": replace(META, metrics={"loss": None})}, "metrics.loss is None, but must be a number"),
        ({"state": replace(STATE, group_of={})}, "group_of has no group for 'layer.weight'"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(change: Mapping[str, Any], text: str) -> None:
    with pytest.raises(ManifestError, match=text):
        replace(MANIFEST, **change).to_bytes()
