from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from ray_ulysses.checkpoint import Manifest, StateDescription
from ray_ulysses.checkpoint.manifest import ForeignManifestError, ManifestError
from tests.unit.checkpoint.manifests import MANIFEST, META, STATE, WORLD_SIZE, replaced, shard_of_rank, signed


def test_what_was_written_is_read_back() -> None:
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST


def test_each_call_that_makes_a_manifest_makes_a_shard_of_it_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\xff", b"9" * 5000, MANIFEST.to_bytes()[:-9], b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000,
     b"[]", b"NaN", b'{"crc32":null}', b'{"crc32":0,"a":1}\n'],
    ids=["empty", "no-text", "a-long-number", "cut", "open", "nested", "list", "nan", "no-sum", "wrong-sum"],
)  # fmt: skip
def test_a_file_without_json_of_the_right_checksum_is_no_manifest(content: bytes) -> None:
    with pytest.raises(ManifestError, match=r"is truncated or is not JSON|checksum is wrong"):
        Manifest.from_bytes(content)


@pytest.mark.parametrize("position", range(0, len(MANIFEST.to_bytes()), 61))
def test_a_flipped_bit_is_found(position: int) -> None:
    content = bytearray(MANIFEST.to_bytes())
    content[position] ^= 1
    with pytest.raises(ManifestError, match=r"is truncated or is not JSON|checksum is wrong"):
        Manifest.from_bytes(bytes(content))


def test_another_version_is_named_before_anything_else_is_looked_at() -> None:
    with pytest.raises(ForeignManifestError, match="schema version 4"):
        Manifest.from_bytes(signed({"schema_version": 4, "parts": "of another kind"}))


@pytest.mark.parametrize("version", ["2", None, 2.0, True, 0])
def test_what_is_no_version_is_damage_and_not_another_version(version: object) -> None:
    with pytest.raises(ManifestError, match="schema_version") as refused:
        Manifest.from_bytes(signed(replaced(("schema_version",), version)))
    assert not isinstance(refused.value, ForeignManifestError)


@pytest.mark.parametrize(
    "change",
    [
        {"state": StateDescription(tensors={}), "shards": ()},
        {"state": replace(STATE, groups=(), group_of={})},
        {"state": replace(STATE, groups=(), group_of={"layer.weight": 7})},
    ],
    ids=["no state", "no groups", "groups that the engine keeps to itself"],
)
def test_a_state_without_shards_or_groups_is_read_back(change: Mapping[str, Any]) -> None:
    manifest = replace(MANIFEST, **change)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"meta": replace(META, digest="hello")}, "digest"),
        ({"state": replace(STATE, group_of={})}, "group_of"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(change: Mapping[str, Any], text: str) -> None:
    with pytest.raises(ManifestError, match=text):
        replace(MANIFEST, **change).to_bytes()
