from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_ulysses.checkpoint import Manifest, StateDescription
from ray_ulysses.checkpoint.intervals import CoverError, check_cover
from ray_ulysses.checkpoint.manifest import ForeignManifestError, ManifestError, read_facts
from ray_ulysses.checkpoint.shard_table import ShardTable
from ray_ulysses.run_names import manifest_key, shard_file
from tests.breadth import examples
from tests.stores import MemoryStore
from tests.unit.checkpoint.manifests import (
    MANIFEST,
    META,
    MOMENT,
    NUM_LARGE,
    PATHS,
    STATE,
    TENSORS,
    WORLD_SIZE,
    changed,
    removed,
    replaced,
    shard_of_rank,
    signed,
    tree,
)


def test_what_was_written_is_read_back() -> None:
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST


def test_each_call_that_makes_a_manifest_makes_a_shard_of_it_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    make = json.JSONEncoder.encode

    def measured(self: json.JSONEncoder, value: object) -> str:
        text = make(self, value)
        sizes.append(len(text))
        return text

    shards = ShardTable(TENSORS, 500, [shard_of_rank(rank % WORLD_SIZE) for rank in range(500)])
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


def test_a_flipped_bit_is_found() -> None:
    for position in range(0, len(MANIFEST.to_bytes()), 61):
        content = bytearray(MANIFEST.to_bytes())
        content[position] ^= 1
        with pytest.raises(ManifestError, match=r"is truncated or is not JSON|checksum is wrong"):
            Manifest.from_bytes(bytes(content))


def test_another_version_is_named_before_anything_else_is_looked_at() -> None:
    with pytest.raises(ForeignManifestError, match="schema version 5"):
        Manifest.from_bytes(signed({"schema_version": 5, "parts": "of another kind"}))


@pytest.mark.parametrize("version", ["2", None, 2.0, True, 0])
def test_what_is_no_version_is_damage_and_not_another_version(version: object) -> None:
    with pytest.raises(ManifestError, match="schema_version") as refused:
        Manifest.from_bytes(signed(replaced(("schema_version",), version)))
    assert not isinstance(refused.value, ForeignManifestError)


@pytest.mark.parametrize(
    "change",
    [
        {"state": StateDescription(tensors={}), "shards": ShardTable({}, WORLD_SIZE, ())},
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
    [({"meta": replace(META, digest="hello")}, "digest"), ({"state": replace(STATE, group_of={})}, "group_of")],
)
def test_what_could_not_be_read_back_is_not_written(change: Mapping[str, Any], text: str) -> None:
    with pytest.raises(ManifestError, match=text):
        replace(MANIFEST, **change).to_bytes()


STATE_FIELDS = ("tensors", "tied", "optimizer", "counters", "shards")
FIRST, SECOND = ("shards", 0), ("shards", 1)
EVEN_ROW, ROW = (*FIRST, "intervals", 0), (*FIRST, "intervals", 1)
WEIGHT = "fp32/layer.weight"
HALF = NUM_LARGE // 2
WRONG: list[tuple[tuple[Any, ...], object, str]] = [
    (("step",), "6", "step"),
    (("attempt",), math.nan, "attempt"),
    (("attempt",), 0, "attempt"),
    (("attempt",), 2, "shards[0].file"),
    (("world_size",), 10**30, "world_size"),
    (("world_size",), 3, "shards"),
    (("sp_size",), 0, "sp_size"),
    (("ring_size",), None, "ring_size"),
    (("zero_stage",), 4, "zero_stage"),
    (("cursor",), [["next_row", 12]], "cursor"),
    (("digest",), "0" * 17, "digest"),
    (("tokens",), -1, "tokens"),
    (("config_fingerprint",), None, "config_fingerprint"),
    (("versions", "torch"), 2, "versions.torch"),
    (("metrics", "loss"), True, "metrics.loss"),
    (("metrics", "loss"), 10**400, "metrics.loss"),
    (("reason",), 5, "reason"),
    (("written_at",), 1e300, "written_at"),
    (("run",), "\ud800", "run"),
    (("extra",), "none", "extra"),
    (("tensors",), [], "tensors"),
    (("tensors", WEIGHT, "shape"), [-10], f"tensors.{WEIGHT}.shape[0]"),
    (("tensors", WEIGHT, "shape"), [2**40, 2**40], f"tensors.{WEIGHT}"),
    (("tensors", WEIGHT, "shape"), [1] * 65, f"tensors.{WEIGHT}.shape"),
    (("tensors", WEIGHT, "dtype"), "F8", f"tensors.{WEIGHT}.dtype"),
    (("tensors", WEIGHT, "dtype"), "F64", "shards[0].bytes"),
    (("tied", "head.weight"), 1, "tied.head.weight"),
    (("optimizer", "step"), -1, "optimizer.step"),
    (("optimizer", "groups", 1), 5, "optimizer.groups[1]"),
    (("optimizer", "group_of"), {}, "optimizer.group_of does not contain 'layer.weight'"),
    (("optimizer", "group_of", "norm"), 2, "optimizer.group_of.norm"),
    (("counters", "global_steps"), 6.5, "counters.global_steps"),
    (("shards",), tree()["shards"][:1], "shards"),
    (FIRST, "a shard", "shards[0]"),
    ((*SECOND, "file"), "../../x", "shards[1].file"),
    ((*SECOND, "file"), "attempt-0001/rank-00001-of-00002.safetensors", "shards[1].file"),
    ((*SECOND, "file"), shard_file(3, 0, 2), "shards[1].file"),
    ((*FIRST, "bytes"), 12, "shards[0].bytes"),
    ((*FIRST, "header_bytes"), 8, "shards[0].header_bytes"),
    ((*FIRST, "header_bytes"), 504, "shards[0].bytes"),
    ((*FIRST, "header_xxh3"), 2**64, "shards[0].header_xxh3"),
    ((*FIRST, "interval_fields"), ["key", "stop", "start"], "shards[0].interval_fields[1]"),
    (ROW, [MOMENT, -1, 5], "shards[0].intervals[1][1]"),
    (ROW, [MOMENT, 5, 0], "shards[0].intervals[1]"),
    (ROW, ["nobody", 0, 5], "shards[0].intervals[1]"),
    (ROW, [MOMENT, 0], "shards[0].intervals[1][2]"),
    (ROW, [WEIGHT, 0, HALF], "shards[0].intervals[1]"),
    (ROW, [MOMENT, 0, 6], "shards[0].bytes"),
    (EVEN_ROW, ["even", 1, 0], "shards[0].intervals[0]"),
    (EVEN_ROW, ["even", 0, 6], "shards[0].intervals[0]"),
    (EVEN_ROW, ["even", 0, 2], "shards[0].intervals[1]"),
    (EVEN_ROW, ["even", 0, 3], "shards[0].intervals[1]"),
    (EVEN_ROW, ["even", 1, 2], "shards[0].intervals[1]"),
    (EVEN_ROW, ["even", 0, 0], "shards[0].bytes"),
]


@pytest.mark.parametrize(
    ("path", "value", "field"), WRONG, ids=[f"{'.'.join(map(str, path))}={value!r:.20}" for path, value, _ in WRONG]
)
def test_a_wrong_field_is_refused_and_named(path: tuple[Any, ...], value: object, field: str) -> None:
    content = signed(replaced(path, value))
    with pytest.raises(ManifestError, match=rf"^the manifest's {re.escape(field)}(?!\w)") as refused:
        Manifest.from_bytes(content)
    # `read_facts` validates all fields but the state and the shards.
    store = MemoryStore()
    store.create(manifest_key(6), [content])
    same = pytest.raises(ManifestError, match=f"^{re.escape(str(refused.value))}$")
    with contextlib.nullcontext() if field.startswith(STATE_FIELDS) else same:
        assert read_facts(store, 6)[0].step == 6


def _is_needed(path: tuple[Any, ...]) -> bool:
    """Return whether a field is required: some mappings may have any keys."""
    is_open = path[0] in ("cursor", "extra", "metrics", "versions", "counters", "tied") and len(path) > 1
    return isinstance(path[-1], str) and not is_open and "groups" not in path[:-1] and path[-1] != "buffer/none"


NEEDED = [path for path in PATHS if _is_needed(path)]


@pytest.mark.parametrize("path", NEEDED, ids=[".".join(map(str, path)) for path in NEEDED])
def test_no_field_may_be_missing(path: tuple[Any, ...]) -> None:
    with pytest.raises(ManifestError) as refused:
        Manifest.from_bytes(signed(removed(path)))
    assert path[-1] in str(refused.value) or path[-1] in TENSORS


@pytest.mark.parametrize("name", ["cursor", "extra", "group"])
def test_values_of_the_loop_may_be_nested_but_not_without_end(name: str) -> None:
    path = ("optimizer", "groups", 0, "lr") if name == "group" else (name, "new")
    nested: list[object] = [1]
    for _ in range(30):
        nested.append({"in": [nested[-1]]})
    Manifest.from_bytes(signed(replaced(path, nested[20])))
    with pytest.raises(ManifestError, match="50 levels"):
        Manifest.from_bytes(signed(replaced(path, nested[30])))


_NUMBERS = st.sampled_from([-1, 0, 1, 2, 8, 9, 2**31, 2**63, 2**64, 10**30, 10**400]) | st.integers()
_SCALARS = st.none() | st.booleans() | _NUMBERS | st.floats() | st.text(max_size=20)
_LONE_HALVES = st.sampled_from(["\ud800", "a\0b", "../../x", "/etc/passwd", "attempt-0003/x", "F64", "F8", WEIGHT])
_VALUES = st.recursive(
    _SCALARS | _LONE_HALVES,
    lambda child: st.lists(child, max_size=4) | st.dictionaries(st.text(max_size=8), child, max_size=4),
    max_leaves=8,
)


@settings(max_examples=examples(800))
@given(
    path=st.sampled_from(PATHS),
    kind=st.sampled_from(["replace", "remove", "other", "add", "twice"]),
    value=_VALUES,
    other=st.sampled_from(PATHS),
)
@example(path=("step",), kind="replace", value=10**400, other=("step",))
@example(path=("written_at",), kind="replace", value=10**400, other=("step",))
def test_any_one_change_is_refused_or_gives_a_manifest_that_holds(
    path: tuple[Any, ...], kind: str, value: Any, other: tuple[Any, ...]
) -> None:
    def change(holder: Any, key: Any) -> None:
        if kind == "remove":
            del holder[key]
        elif kind == "other":
            found: Any = tree()
            for part in other:
                found = found[part]
            holder[key] = copy.deepcopy(found)
        elif kind == "add" and isinstance(holder[key], dict):
            holder[key]["new"] = value
        elif kind == "add" and isinstance(holder[key], list):
            holder[key].append(value)
        elif kind == "twice" and isinstance(holder, list):
            holder.append(holder[key])
        else:
            holder[key] = value

    try:
        read = Manifest.from_bytes(signed(changed(path, change)))
    except ManifestError:
        return
    assert Manifest.from_bytes(read.to_bytes()).to_bytes() == read.to_bytes()
    assert min(read.attempt, read.world_size, read.meta.sp_size) >= 1
    assert len(read.shards) == len({shard.file for shard in read.shards}) == read.world_size
    assert all(shard.file.startswith(f"attempt-{read.attempt:04d}/") for shard in read.shards)
    assert all(isinstance(math.isfinite(number), bool) for number in read.meta.metrics.values())
    assert 0 <= int(read.meta.digest, 16) < 2**64
    for shard in read.shards:
        ends = [stored.offset + stored.num_bytes for stored in shard.intervals]
        begins = [stored.offset for stored in shard.intervals]
        assert [shard.header_bytes, *ends] == [*begins, shard.sums_offset]
        assert all(one.num_bytes % read.state.tensors[one.interval.key].item_bytes == 0 for one in shard.intervals)
    held = [stored.interval for shard in read.shards for stored in shard.intervals]
    # Coverage is checked by the readers, not by the parser.
    with contextlib.suppress(CoverError):
        check_cover({key: spec.num_elements for key, spec in read.state.tensors.items()}, held)
